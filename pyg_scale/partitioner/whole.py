"""A whole graph as a graph directory of one part, whatever it was handed over as."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.base import Topology
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory.data import unchanged_directory
from pyg_scale.store.topology import topology_of


def whole_directory(data: Any) -> GraphDirectory:
    """The directory of one part that a path names, opened.

    Raises:
        GraphDirectoryError: If it is damaged, or has several parts.
        TypeError: If it is something else.
    """
    opened = directory_of(data)
    if opened is None:
        raise TypeError(
            f"data must be the path of a graph directory (got {type(data).__name__}): "
            "save the graph first"
        )
    if opened.meta.num_parts > 1:
        raise GraphDirectoryError(
            f"{opened.path} is cut into {opened.meta.num_parts} parts already: give the "
            "directory of one part that it was made from"
        )
    opened.part(0)
    return opened


def directory_of(data: Any) -> GraphDirectory | None:
    """The directory that a path names, or of a graph as it was opened; ``None`` if neither."""
    if isinstance(data, GraphDirectory):
        return data
    if isinstance(data, str | PathLike):
        return GraphDirectory(Path(data))
    return unchanged_directory(data)


def whole_topology(data: Any) -> Topology:
    """The in-edges of a whole graph, without times and weights, mapped where they are in files.

    Raises:
        GraphDirectoryError: If it is a directory of several parts.
        TypeError: If it is no graph.
    """
    if isinstance(data, Topology):
        return data
    if directory_of(data) is None:
        return topology_of(data)
    directory = whole_directory(data)
    meta, part = directory.meta, directory.part(0)
    if meta.partition is not None and meta.partition.edge_assign_strategy == "by_src":
        raise GraphDirectoryError(
            f"{directory.path} holds out-edges (edge_assign_strategy='by_src'): give the directory "
            "that it was made from"
        )
    return Topology(
        node_types=tuple(meta.nodes),
        edge_types=tuple(meta.edges),
        num_nodes={name: node.num_nodes for name, node in meta.nodes.items()},
        csc={name: replace(part.csc(name), time=None, weight_prefix=None) for name in meta.edges},
    )
