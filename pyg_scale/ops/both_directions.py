"""Edges and their opposites, each pair of nodes once (``csrc/both_directions.cpp``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library


class Pairs(NamedTuple):
    """Edges in both directions, in order of (destination, id, source).

    Attributes:
        row: The node where each begins, ``[p]``, of the dtype that was given.
        col: The node where it ends.
        edge: Its id, ``int64`` ``[p]``.
    """

    row: Tensor
    col: Tensor
    edge: Tensor


def both_directions(row: Tensor, col: Tensor, edge: Tensor, first: Tensor) -> Pairs:
    """All edges and their opposites, each pair of nodes once with its smallest id.

    The opposite of an edge from ``u`` to ``v`` leads from ``first[v]`` to ``u``.

    Args:
        row: The node where each edge begins, ``int32`` or ``int64`` ``[m]``.
        col: The node where it ends, of the same dtype.
        edge: Its id, ``int64`` ``[m]``.
        first: The node that stands for each node, ``int64`` ``[num_nodes]``.

    Raises:
        ValueError: If, compiled, a node does not exist.
    """
    if library.compiled():
        given = (edge.contiguous(), first.contiguous())
        ends, edge = torch.ops.pyg_scale.both_directions(row, col, *given)
        row, col = ends.unbind()
        return Pairs(row, col, edge)
    source, destination = torch.cat([row, first[col.long()]]), torch.cat([col, row])
    size = max(first.numel(), 1)
    pair, which = torch.unique(destination.long() * size + source, return_inverse=True)
    smallest = torch.full_like(pair, torch.iinfo(torch.int64).max)
    smallest.scatter_reduce_(0, which, torch.cat([edge, edge]), "amin")
    by_edge = smallest.argsort(stable=True)  # pairs come sorted: ties stay in order of source
    order = by_edge[(pair // size)[by_edge].argsort(stable=True)]
    pair = pair[order]
    return Pairs((pair % size).to(row.dtype), (pair // size).to(row.dtype), smallest[order])
