"""The graph directory: the one on-disk form of a graph, in one part or many.

``META.json`` describes the graph; all other files are plain ``.npy`` files that NumPy and other
programs can map. ``docs/graph-directory.md`` specifies the format.
"""

from pyg_scale.files.npy import map_array
from pyg_scale.store.directory.book import PartitionBook
from pyg_scale.store.directory.meta import (
    Attribute,
    EdgeMeta,
    FileMeta,
    Meta,
    NodeMeta,
    PartitionMeta,
)
from pyg_scale.store.directory.reader import GraphDirectory, Part
from pyg_scale.store.directory.writer import DirectoryWriter

__all__ = [
    "Attribute",
    "DirectoryWriter",
    "EdgeMeta",
    "FileMeta",
    "GraphDirectory",
    "Meta",
    "NodeMeta",
    "Part",
    "PartitionBook",
    "PartitionMeta",
    "map_array",
]
