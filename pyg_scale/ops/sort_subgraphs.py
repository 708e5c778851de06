"""Subgraphs side by side, put in order (``csrc/sort_subgraphs.cpp``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library


class Sorted(NamedTuple):
    """Subgraphs in order.

    Attributes:
        node: By subgraph, then ascending, ``int64`` ``[n]``.
        batch: The subgraph of each, ``int64`` ``[n]``.
        row: The place in ``node`` of the source of each edge, rising, ``int64`` ``[m]``.
        col: That of its destination, rising for each source.
        edge: Its id. Parallel edges stay in order.
        place: Where each node went, ``int64`` ``[n]``.
    """

    node: Tensor
    batch: Tensor
    row: Tensor
    col: Tensor
    edge: Tensor
    place: Tensor


def sort_subgraphs(
    node: Tensor, batch: Tensor, row: Tensor, col: Tensor, edge: Tensor, num_graphs: int
) -> Sorted:
    """Sort the nodes of subgraphs by id, and their edges by source, then destination.

    If compiled, ``row`` and ``col`` are rows of one tensor.

    Args:
        node: Ids, not negative, ``int32`` or ``int64`` ``[n]``. Equal ones stay in order.
        batch: The number of the subgraph of each node, ``int64`` ``[n]``.
        row: The place in ``node`` of the source of each edge, ``int32`` or ``int64`` ``[m]``.
        col: That of its destination, never decreasing, ``int32`` or ``int64`` ``[m]``.
        edge: Ids of edges ``int64`` ``[m]``.
        num_graphs: Number of subgraphs.

    Raises:
        ValueError: If, compiled, a number leads out of the subgraphs, or ``col`` decreases.
    """
    if library.compiled():
        given = (node, batch, row, col, edge.contiguous())
        node, batch, ends, edge, place = torch.ops.pyg_scale.sort_subgraphs(*given, num_graphs)
        row, col = ends.unbind()
        return Sorted(node, batch, row, col, edge, place)
    by_node = node.argsort(stable=True)
    order = by_node[batch[by_node].argsort(stable=True)]
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    row, col = place[row.long()], place[col.long()]
    by_source = (row * max(node.numel(), 1) + col).argsort(stable=True)
    row, col = row[by_source], col[by_source]
    return Sorted(node[order].long(), batch[order], row, col, edge[by_source], place)
