"""Recursive bisection into any number of parts of any size."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyg_scale.ops import keys
from pyg_scale.ops.grow_part import grow_part
from pyg_scale.ops.refine_partition import refine_partition
from pyg_scale.partitioner.coarsening import Level

Halve = Callable[[Level, float, Tensor, Tensor, int], Tensor]
"""A function that cuts a graph in two. It takes the graph, the share of part 0, the largest and the
smallest loads of the parts (``[2, num_constraints]``) and a key, and returns the part ``int32``
``[num_nodes]`` of each node.
"""

_WHOLE = 1 << 30


def recursive(
    level: Level, shares: Tensor, capacity: Tensor, minimum: Tensor, key: int, halve: Halve
) -> Tensor:
    """Cut a graph in two, and the halves again, until there are as many parts as shares.

    Args:
        level: The graph.
        shares: ``float64`` ``[num_parts]``, above 0.
        capacity: ``int64`` ``[num_parts, num_constraints]``. The room beyond fair shares is divided
            evenly among the cuts to come.
        minimum: ``int64`` ``[num_parts, num_constraints]``.
        key: Key of all random choices.
        halve: A function that cuts a graph in two.

    Returns:
        ``int32`` ``[num_nodes]``.
    """
    out = torch.zeros(level.num_nodes, dtype=torch.int32)
    num_parts = shares.numel()
    if num_parts == 1 or level.num_nodes == 0:
        return out
    split = (num_parts + 1) // 2
    share = float(shares[:split].sum() / shares.sum())
    room = _room(level, shares, capacity, split)
    least = torch.stack([minimum[:split].sum(0), minimum[split:].sum(0)])
    sides = halve(level, share, room, torch.minimum(least, room), key)
    for side, part in enumerate((slice(0, split), slice(split, num_parts))):
        nodes = (sides == side).nonzero().view(-1)
        inner = recursive(
            level.induced(nodes),
            shares[part],
            capacity[part],
            minimum[part],
            keys.fold(key, side + 1),
            halve,
        )
        out[nodes] = inner + (part.start or 0)
    return out


def _room(level: Level, shares: Tensor, capacity: Tensor, split: int) -> Tensor:
    """The capacities of the two sides."""
    total = level.weights.sum(0).to(torch.float64)
    cuts = math.ceil(math.log2(shares.numel()))
    slack = (capacity.sum(0) / total.clamp(min=1)).clamp(min=1) ** (1 / cuts)
    rooms = []
    for part in (slice(0, split), slice(split, None)):
        fair = total * (shares[part].sum() / shares.sum())
        room = torch.maximum((fair * slack).floor(), fair.ceil())
        rooms.append(torch.minimum(room.to(torch.int64), capacity[part].sum(0)))
    return torch.stack(rooms)


def bisect(
    level: Level, shares: Tensor, capacity: Tensor, minimum: Tensor, *, tries: int, key: int
) -> Tensor:
    """Bisect recursively, by growing and refining parts several times and taking the best ones.

    Args:
        level: A small graph.
        shares: ``float64`` ``[num_parts]``.
        capacity: ``int64`` ``[num_parts, num_constraints]``.
        minimum: ``int64`` ``[num_parts, num_constraints]``.
        tries: Number of pieces that are grown for each cut.
        key: Key of all random choices.

    Returns:
        ``int32`` ``[num_nodes]``.
    """

    def halve(level: Level, share: float, room: Tensor, least: Tensor, key: int) -> Tensor:
        size = sizes(level.weights)
        best: tuple[int, int] | None = None
        for number in range(tries):
            mine = keys.fold(key, number)
            grown = grow_part(
                level.indptr,
                level.indices,
                size,
                keys.permutation(mine, level.num_nodes),
                int(size.sum() * share),
                edge_weights=level.edge_weights,
                key=mine,
            )
            sides = refine_partition(
                level.indptr,
                level.indices,
                (~grown).to(torch.int32),
                room,
                node_weights=level.weights,
                edge_weights=level.edge_weights,
                minimum=least,
                key=mine,
            )
            found = (excess(level, sides, room, least), level.cut(sides))
            if best is None or found < best:
                best, result = found, sides
        return result

    return recursive(level, shares, capacity, minimum, key, halve)


def sizes(weights: Tensor) -> Tensor:
    """One number per node, ``int64`` ``[num_nodes]``: the sum of its shares of all columns."""
    if weights.size(1) == 1:
        return weights[:, 0].contiguous()
    total = weights.sum(0).clamp(min=1)
    return (weights.to(torch.float64) / total * _WHOLE).to(torch.int64).sum(1)


def least_of_parts(weights: Tensor, shares: Tensor, max_imbalance: float) -> Tensor:
    """The smallest load of a part, so that balancing by capacities leaves no part empty.

    It is the share less twice the margin by which parts may exceed it, and less the heaviest node;
    0 in columns where that node is heavier than the share.

    Args:
        weights: ``int64`` ``[num_nodes, num_constraints]``.
        shares: ``float64`` ``[num_parts]``.
        max_imbalance: The largest part may be this many times its share.

    Returns:
        ``int64`` ``[num_parts, num_constraints]``.
    """
    fair = shares.view(-1, 1) * weights.sum(0).to(torch.float64)
    largest = weights.amax(0)
    below = (fair * (3 - 2 * max_imbalance) - largest).floor().to(torch.int64)
    return below.clamp(min=1) * (fair >= largest.clamp(min=1))


def excess(level: Level, assignment: Tensor, capacity: Tensor, minimum: Tensor) -> int:
    """The excess of parts over their bounds, with equal weights for all columns."""
    held = torch.zeros_like(capacity)
    held.index_add_(0, assignment.to(torch.int64), level.weights)
    out = ((held - capacity).clamp(min=0) + (minimum - held).clamp(min=0)).to(torch.float64)
    return int((out / level.weights.sum(0).clamp(min=1) * _WHOLE).sum())
