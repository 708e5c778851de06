"""Where graphs and features live, and what samplers see of a graph."""

from pyg_scale.store.base import CSC, EdgeType, NodeType, Topology, sortable_time
from pyg_scale.store.memory import MemoryFeatureStore, MemoryGraphStore
from pyg_scale.store.topology import topology_of

__all__ = [
    "CSC",
    "EdgeType",
    "MemoryFeatureStore",
    "MemoryGraphStore",
    "NodeType",
    "Topology",
    "sortable_time",
    "topology_of",
]
