"""Graphs for examples and benchmarks: generated ones, ``.npz`` archives, PyG's by name."""

from pyg_scale.datasets.communities import hetero_communities, planted_communities
from pyg_scale.datasets.events import event_stream
from pyg_scale.datasets.read import load, read_npz
from pyg_scale.datasets.streamed import StreamedCommunities

__all__ = [
    "StreamedCommunities",
    "event_stream",
    "hetero_communities",
    "load",
    "planted_communities",
    "read_npz",
]
