"""The content for a cache, chosen from some parts of a graph directory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType
from pyg_scale.store.cache.hot import add_degrees, order
from pyg_scale.store.directory import GraphDirectory


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


def by_degree(directory: GraphDirectory, parts: Sequence[int]) -> dict[NodeType, Tensor]:
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
