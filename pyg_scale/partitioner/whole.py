"""A whole graph in any form as a graph directory of one part."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch_geometric.data import Data, HeteroData

from pyg_scale.graph.topology import Topology
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory.data import unchanged_directory
from pyg_scale.store.directory.opening import graph_of
from pyg_scale.store.directory.saving import save, saved_as
from pyg_scale.store.topology import topology_of


@contextmanager
def whole_directory(data: Any, beside: Path | None = None) -> Iterator[GraphDirectory]:
    """A directory of one part that holds the graph, with in-edges.

    Args:
        data: The path of such a directory, or an open one; else a graph in memory, or a directory
            of several parts or with appended rows, which are merged in memory. These are saved, and
            the saved files are removed when the context ends.
        beside: Files are saved next to this path, on the same disk. ``None``: with temporary files.

    Raises:
        GraphDirectoryError: If the directory is damaged, or parts are missing.
        TypeError: If ``data`` is something else.
    """
    opened = directory_of(data)
    is_one = opened is not None and opened.meta.num_parts == 1 and opened.delta is None
    if opened is not None and is_one and not is_by_src(opened):
        opened.part(0)
        yield opened
        return
    if opened is not None:
        graph, options = saved_as(opened)
    elif isinstance(data, Data | HeteroData):
        graph, options = data, {}
    else:
        raise TypeError(
            "data must be a graph directory or its path, Data or HeteroData (got "
            f"{type(data).__name__})"
        )
    if beside is not None:
        beside = beside.absolute().parent
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pyg_scale-", dir=beside) as folder:
        yield GraphDirectory(save(graph, Path(folder) / "graph", **options))


def is_by_src(directory: GraphDirectory) -> bool:
    """Return True if its parts have out-edges."""
    partition = directory.meta.partition
    return partition is not None and partition.edge_assign_strategy == "by_src"


def directory_of(data: Any) -> GraphDirectory | None:
    """The directory of a path or an open graph; ``None`` if it is neither."""
    if isinstance(data, GraphDirectory):
        return data
    if isinstance(data, str | PathLike):
        return GraphDirectory(Path(data))
    return unchanged_directory(data)


def whole_topology(data: Any) -> Topology:
    """The in-edges of a whole graph, without times and weights; those in a file are mapped.

    Several parts are merged in memory.

    Raises:
        GraphDirectoryError: If parts of a directory are missing.
        TypeError: If ``data`` is not a graph.
    """
    if isinstance(data, Topology):
        return data
    directory = directory_of(data)
    if directory is None:
        return topology_of(data)
    meta = directory.meta
    if meta.num_parts > 1 or is_by_src(directory):
        return topology_of(graph_of(directory))
    csc = {name: directory.part(0).csc(name) for name in meta.edges}  # in any order
    return Topology(
        node_types=tuple(meta.nodes),
        edge_types=tuple(meta.edges),
        num_nodes={name: node.num_nodes for name, node in meta.nodes.items()},
        csc={name: replace(each, time=None, weight_prefix=None) for name, each in csc.items()},
    )
