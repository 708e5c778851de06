"""Where graphs and features live, and what samplers see of a graph."""

from pyg_scale.store.base import CSC, EdgeType, NodeType, Topology, sortable_time
from pyg_scale.store.cache import Cached
from pyg_scale.store.device import DeviceFeatures
from pyg_scale.store.disk import Disk
from pyg_scale.store.memory import MemoryFeatureStore, MemoryGraphStore
from pyg_scale.store.mmap import Mmap
from pyg_scale.store.mmap_graph import MmapGraph
from pyg_scale.store.quantized import Quantized
from pyg_scale.store.shared import Shared
from pyg_scale.store.shared_graph import SharedGraph
from pyg_scale.store.topology import topology_of

__all__ = [
    "CSC",
    "Cached",
    "DeviceFeatures",
    "Disk",
    "EdgeType",
    "MemoryFeatureStore",
    "MemoryGraphStore",
    "Mmap",
    "MmapGraph",
    "NodeType",
    "Quantized",
    "Shared",
    "SharedGraph",
    "Topology",
    "sortable_time",
    "topology_of",
]
