"""Stores of graphs and features, and the graph as samplers see it.

Names are loaded when they are first used: opening a graph needs few of them.
"""

from typing import TYPE_CHECKING

from pyg_scale import lazy

if TYPE_CHECKING:
    from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology, sortable_time
    from pyg_scale.store.cache import Cached
    from pyg_scale.store.device import DeviceFeatures
    from pyg_scale.store.disk import Disk
    from pyg_scale.store.memory import MemoryFeatureStore, MemoryGraphStore
    from pyg_scale.store.mmap import Mmap
    from pyg_scale.store.mmap_graph import MmapGraph
    from pyg_scale.store.quantized import Quantized
    from pyg_scale.store.shared import Shared, SharedGraph
    from pyg_scale.store.topology import topology_of

_HOME = {
    "CSC": "base",
    "Cached": "cache",
    "DeviceFeatures": "device",
    "Disk": "disk",
    "EdgeType": "base",
    "MemoryFeatureStore": "memory",
    "MemoryGraphStore": "memory",
    "Mmap": "mmap",
    "MmapGraph": "mmap_graph",
    "NodeType": "base",
    "Quantized": "quantized",
    "Shared": "shared",
    "SharedGraph": "shared",
    "Topology": "base",
    "sortable_time": "base",
    "topology_of": "topology",
}

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

__getattr__, __dir__ = lazy.names(__name__, _HOME)
