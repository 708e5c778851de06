"""Drawn nodes of a graph, and all edges among them (``csrc/induced_edges.cpp``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import keys, library
from pyg_scale.ops.random_walk import random_walk


class Induced(NamedTuple):
    """Some nodes, and all edges among them.

    Attributes:
        node: Their ids, ``int64`` ``[n]``.
        edge_index: The places in ``node`` of both ends of each edge, ``int64`` ``[2, m]``.
        edge: The id of each edge, ``int64`` ``[m]``; ``None`` if ids were not asked for.
    """

    node: Tensor
    edge_index: Tensor
    edge: Tensor | None


def induced_edges(indptr: Tensor, index: Tensor, edge_id: Tensor | None, drawn: Tensor) -> Induced:
    """The drawn nodes, and the edges that both begin and end in them, in the order of the graph.

    Nodes ascend, each once. The first row of ``edge_index`` is that of the nodes that have the
    edges, and rises.

    Args:
        indptr: The edges of node ``v`` are ``indptr[v]`` to ``indptr[v + 1] - 1``, ``int64``
            ``[num_nodes + 1]``.
        index: Their other ends, ``int32`` or ``int64`` ``[num_edges]``.
        edge_id: Their ids, of the same dtype, ``[num_edges]``; both contiguous, or columns of one
            table of pairs. ``None`` if nobody needs them.
        drawn: Ids of nodes in any order, repeats allowed, ``int64``.

    Raises:
        ValueError: If a node does not exist, or if pointers or ends lead out of the graph.
    """
    if library.compiled():
        node, ends, edge = torch.ops.pyg_scale.induced_edges(
            indptr.contiguous(), index, edge_id, drawn.contiguous()
        )
        return Induced(node, ends, None if edge_id is None else edge)
    node, num_nodes = drawn.unique(), indptr.numel() - 1
    if node.numel() and not 0 <= int(node[0]) <= int(node[-1]) < num_nodes:
        raise ValueError(f"drawn: nodes must be ids below {num_nodes}")
    begin = indptr[node]
    if int(indptr[0]) or int(indptr[-1]) > index.numel() or bool((indptr.diff() < 0).any()):
        raise ValueError(f"indptr: the pointers of nodes must rise from 0 to {index.numel()}")
    if edge_id is not None and edge_id.numel() != index.numel():
        raise ValueError(f"edge_id has {edge_id.numel()} entries for {index.numel()} edges")
    degree = indptr[node + 1] - begin
    row = torch.arange(node.numel()).repeat_interleave(degree)
    first = begin - (degree.cumsum(0) - degree)
    position = torch.arange(row.numel()) + first[row]
    end = index[position].to(torch.int64)
    missing = end[(end < 0) | (end >= num_nodes)]
    if missing.numel():
        raise ValueError(
            f"index: node {int(missing[0])} does not exist: ids end at {num_nodes - 1}"
        )
    col = torch.searchsorted(node, end).clamp(max=max(node.numel() - 1, 0))
    inside = (node[col] == end).nonzero().view(-1)
    edge = None if edge_id is None else edge_id[position[inside]].to(torch.int64)
    return Induced(node, torch.stack([row[inside], col[inside]]), edge)


def walked_edges(
    indptr: Tensor, index: Tensor, edge_id: Tensor | None, count: int, length: int, key: int
) -> Induced:
    """The nodes of random walks from nodes that are equally likely, and all edges among them.

    Walk ``i`` begins at node ``draws_each(key, count, num_nodes)[i]``, and the walks are those of
    :func:`~pyg_scale.ops.random_walk.random_walk` with the key ``fold(key, WALK)``
    (:mod:`pyg_scale.ops.keys`).

    Args:
        indptr: As for :func:`induced_edges`, as are ``index`` and ``edge_id``.
        index: Their other ends.
        edge_id: Their ids, or ``None``.
        count: Number of walks.
        length: Number of steps of each.
        key: Key of all draws, unsigned.

    Raises:
        ValueError: If ``count`` or ``length`` is negative, there is no node to begin at, or
            pointers or ends lead out of the graph.
    """
    if library.compiled():
        of_walks = keys.to_signed(keys.fold(key, keys.WALK))
        node, ends, edge = torch.ops.pyg_scale.walked_edges(
            indptr.contiguous(),
            index,
            edge_id,
            count,
            length,
            keys.to_signed(key),
            of_walks,
            library.num_threads(),
        )
        return Induced(node, ends, None if edge_id is None else edge)
    for name, value in (("count", count), ("length", length)):
        if value < 0:
            raise ValueError(f"{name} must not be negative (got {value})")
    if count and indptr.numel() < 2:
        raise ValueError("walks need a node to begin at, and the graph has none")
    start = keys.draws_each(key, count, max(indptr.numel() - 1, 1))
    walks = random_walk(indptr, index, start, length, key=keys.fold(key, keys.WALK))
    return induced_edges(indptr, index, edge_id, walks.node.view(-1))
