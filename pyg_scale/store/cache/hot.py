"""The rows that are read most often: the content for a static cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType, Topology
from pyg_scale.store.directory import GraphDirectory

_CHUNK = 1 << 24

EVERY_NODE_TYPE = "*"
"""The group of a list that was given without groups."""


def by_degree(graph: Any) -> dict[Any, Tensor]:
    """All nodes of each type, by descending number of nodes that have them as a neighbour.

    If all nodes are equally likely to be seeds, this is the order of how often they are sampled.

    Args:
        graph: ``Data``, ``HeteroData``, ``(FeatureStore, GraphStore)`` or a
            :class:`~pyg_scale.store.Topology`.

    Returns:
        Original ids ``int64`` ``[num_nodes]`` by node type, ``None`` in a homogeneous graph; ties
        in order of their ids.
    """
    from pyg_scale.store.topology import topology_of

    topology = graph if isinstance(graph, Topology) else topology_of(graph)
    counts = {
        node_type: torch.zeros(count, dtype=torch.int64)
        for node_type, count in topology.num_nodes.items()
    }
    for edge_type, csc in topology.csc.items():
        add_degrees(counts[None if edge_type is None else edge_type[0]], csc.indices)
    return {node_type: order(count) for node_type, count in counts.items()}


def add_degrees(counts: Tensor, neighbors: Tensor) -> None:
    """Add the number of times that each node is a neighbour, piece by piece.

    Args:
        counts: ``int64`` ``[num_nodes]``, written to.
        neighbors: ``[num_edges]``.
    """
    for chunk in neighbors.split(_CHUNK):
        counts += torch.bincount(chunk, minlength=counts.numel())


def order(counts: Tensor) -> Tensor:
    """Nodes by descending count, ties by id."""
    return counts.sort(descending=True, stable=True).indices


def hot_lists(hot: Any) -> dict[Any, Tensor]:
    """The lists of ``hot=`` by group; :data:`EVERY_NODE_TYPE` if no group was given.

    Args:
        hot: Original ids in order of priority: a tensor, an array, a list or an ``.npy`` file of
            integers; or a dictionary of these by node type (or edge type).

    Raises:
        TypeError: If it has another type.
        ValueError: If an id is repeated or negative.
    """
    if isinstance(hot, Mapping):
        return {group: _ids(each, f"hot[{group!r}]") for group, each in hot.items()}
    return {EVERY_NODE_TYPE: _ids(hot, "hot")}


def hot_of(lists: Mapping[Any, Tensor], group: Any) -> Tensor | None:
    """The list of a group; ``None`` if there is none."""
    if group in lists:
        return lists[group]
    return None if isinstance(group, tuple) else lists.get(EVERY_NODE_TYPE)


def _ids(hot: Any, name: str) -> Tensor:
    if isinstance(hot, str | Path):
        try:
            hot = np.array(np.load(hot, mmap_mode="r", allow_pickle=False))
        except FileNotFoundError:
            raise
        except Exception as error:  # the header is parsed as Python, which fails in many ways
            first = str(error).partition("\n")[0]
            raise ValueError(f"{name}: {hot} cannot be read as .npy: {first}") from None
    ids = torch.as_tensor(hot)
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(
            f"{name} must be original ids, one-dimensional integers, or an .npy file of them "
            f"(got {ids.dtype} of shape {list(ids.shape)})"
        )
    ids = ids.to(torch.int64)
    if ids.numel() and int(ids.min()) < 0:
        raise ValueError(f"{name} has a negative id {int(ids.min())}")
    if ids.unique().numel() != ids.numel():
        raise ValueError(f"{name} has a repeated id: list each once, in order of priority")
    return ids


# Of parts of a graph directory ##############################################################


def neighbor_counts(directory: GraphDirectory, parts: Sequence[int]) -> dict[NodeType, Tensor]:
    """Number of edges of some parts that have each node as the neighbour.

    Args:
        directory: The directory.
        parts: Local parts.

    Returns:
        ``int64`` ``[num_nodes]`` by node type.
    """
    meta = directory.meta
    counts = {t: torch.zeros(node.num_nodes, dtype=torch.int64) for t, node in meta.nodes.items()}
    by_src = meta.partition is not None and meta.partition.edge_assign_strategy == "by_src"
    for number in parts:
        for edge_type in meta.edges:
            end = None if edge_type is None else edge_type[2 if by_src else 0]
            add_degrees(counts[end], directory.part(number).csc(edge_type).indices)
    return counts


def by_degree_in_parts(directory: GraphDirectory, parts: Sequence[int]) -> dict[NodeType, Tensor]:
    """All nodes of each type, by descending number of edges in some parts that lead to them."""
    return {t: order(count) for t, count in neighbor_counts(directory, parts).items()}


def in_turn(lists: Sequence[Tensor], num_nodes: int) -> Tensor:
    """The first id of every list, then the second of every list, and so on; each id once.

    Args:
        lists: Lists of original ids ``int64``.
        num_nodes: Number of nodes.
    """
    ids, rank = torch.cat(list(lists)), torch.cat([torch.arange(each.numel()) for each in lists])
    ids = ids[rank.sort(stable=True).indices]
    first = torch.full((num_nodes,), ids.numel())
    first.scatter_reduce_(0, ids, torch.arange(ids.numel()), "amin")
    return ids[first[ids] == torch.arange(ids.numel())]


def listed(directory: GraphDirectory, parts: Sequence[int]) -> dict[NodeType, Tensor]:
    """The nodes that the partitioner listed for some parts, interleaved if several.

    Raises:
        ValueError: If it listed none.
    """
    found = {}
    for node_type, node in directory.meta.nodes.items():
        lists = [directory.part(number).cache(node_type) for number in parts]
        if any(each.numel() for each in lists):
            found[node_type] = in_turn(lists, node.num_nodes)
    if not found:
        raise ValueError(
            f"hot='listed', but {directory.path} has no lists of nodes to cache: partition it with "
            "method='frequency', or pass hot='degree'"
        )
    return found
