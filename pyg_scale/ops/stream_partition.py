"""Streaming partitioning: each node in turn goes to the part with the best score at that time.

It uses integer arithmetic, except for one square root and one product in 64-bit floating point,
which are rounded alike everywhere. The result depends only on the arguments.

* A node that already has a part leaves it first (re-streaming).
* The *room* of a part is the capacity that it would have left with the node, as a share of its
  capacity in units of ``2**-20``, rounded down; the smallest over the columns in which the node has
  weight. A part without room (below 0) is not considered. If no part has room, the node goes to the
  one with the largest room.
* The *score* of a part: with ``count`` neighbours of the node in it, ``count * (room + 1)`` for
  LDG; for Fennel ``count * 2**20`` minus, for each column, the weight of the node times
  ``floor(coefficient * sqrt(load))`` of the part.
* The best score wins. Parts are considered from the node's own part on, or else from
  ``node % num_parts`` on. Ties go to the node's own part, then to the one with more room, then to
  the first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyg_scale.ops import library

FRACTION = 20
"""Number of fractional bits of scores, rooms and coefficients."""


def stream_partition(
    indptr: Tensor,
    indices: Tensor,
    weights: Tensor,
    order: Tensor,
    part: Tensor,
    load: Tensor,
    capacity: Tensor,
    coefficient: Tensor,
    *,
    ldg: bool,
    begin: int,
    end: int,
) -> int:
    """Place the nodes ``order[begin]`` to ``order[end - 1]``, one after the other.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, each edge in both directions; may be
            strided.
        weights: ``int64`` ``[num_nodes, num_constraints]``, from 0 to ``2**60 - 1``; may be
            strided.
        order: ``int64`` or ``int32`` ``[num_nodes]``; empty for 0, 1, ...
        part: ``int32``, or ``int8`` for at most 127 parts, ``[num_nodes]``, -1 for a node without
            one; written to.
        load: ``int64`` ``[num_parts, num_constraints]``, the weights of parts according to
            ``part``, less than ``2**60``; written to.
        capacity: The largest load of a part; type and shape as ``load``.
        coefficient: ``float64``, shape as ``load``, with ``FRACTION`` fractional bits (Fennel).
        ldg: True for scores of LDG, False for those of Fennel.
        begin: The first node, as a position in ``order``.
        end: The position after the last node.

    Returns:
        Number of nodes that are in another part than before.

    Raises:
        ValueError: If shapes, types or node ids do not fit, or if a score (Fennel) exceeds 63 bits.
    """
    op = torch.ops.pyg_scale.stream_partition if library.compiled() else stream_partition_plain
    return op(indptr, indices, weights, order, part, load, capacity, coefficient, ldg, begin, end)


def stream_partition_plain(
    indptr: Tensor,
    indices: Tensor,
    weights: Tensor,
    order: Tensor,
    part: Tensor,
    load: Tensor,
    capacity: Tensor,
    coefficient: Tensor,
    ldg: bool,
    begin: int,
    end: int,
) -> int:
    """The meaning of the compiled op, with its arguments."""
    parts, columns = load.shape
    loads, most, factor = load.tolist(), capacity.tolist(), coefficient.tolist()
    where, moved = part.tolist(), 0
    nodes = order[begin:end].tolist() if order.numel() else range(begin, end)
    one = 1 << FRACTION
    for v in nodes:
        weight: list[int] = weights[v].tolist()
        active = [c for c in range(columns) if weight[c] > 0]
        before = where[v]
        if before >= 0:
            for c in active:
                loads[before][c] -= weight[c]
        count = [0] * parts
        for u in indices[int(indptr[v]) : int(indptr[v + 1])].tolist():
            if where[u] >= 0:
                count[where[u]] += 1
        ranked, rooms = [], []
        for i in range(parts):
            p = ((before if before >= 0 else v) + i) % parts
            free = [
                ((most[p][c] - loads[p][c] - weight[c]) << FRACTION) // max(1, most[p][c])
                for c in active
            ]
            room = min([one, *free])
            rooms.append((-room, i, p))
            if room < 0:
                continue
            if ldg:
                score = count[p] * (room + 1)
            else:
                score = (count[p] << FRACTION) - sum(
                    weight[c] * int(factor[p][c] * math.sqrt(loads[p][c])) for c in active
                )
            ranked.append((-score, p != before, -room, i, p))
        best = min(ranked)[-1] if ranked else min(rooms)[-1]
        for c in active:
            loads[best][c] += weight[c]
        where[v] = best
        moved += best != before
    part.copy_(torch.tensor(where, dtype=part.dtype))
    load.copy_(torch.tensor(loads, dtype=torch.int64).view(parts, columns))
    return moved


def breadth_first(indptr: Tensor, indices: Tensor) -> Tensor:
    """The nodes in breadth-first order, ``int64`` ``[num_nodes]``.

    Components follow one another, each from its smallest node. The neighbours of a node are visited
    in ascending order, whatever their order in ``indices``.
    """
    if library.compiled():
        return torch.ops.pyg_scale.breadth_first(indptr, indices)
    pointer, size = indptr.tolist(), indptr.numel() - 1
    seen = torch.zeros(size, dtype=torch.bool)
    out: list[int] = []
    for start in range(size):
        if seen[start]:
            continue
        seen[start] = True
        queue = [start]
        for v in queue:  # grows while it is walked
            near = indices[pointer[v] : pointer[v + 1]].to(torch.int64)
            near = near[~seen[near]].unique()
            seen[near] = True
            queue += near.tolist()
        out += queue
    return torch.tensor(out, dtype=torch.int64)
