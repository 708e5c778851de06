"""Merging of answers about some nodes, in the order of the nodes (``csrc/stitch.cpp``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library

_ABSENT = torch.empty(0, dtype=torch.int64)


class PartEdges(NamedTuple):
    """The edges of some of the nodes.

    Attributes:
        position: Positions of these nodes among all, ``int64`` ``[m]``.
        take: Index of the answered node for each of these, ``int64`` ``[m]``; one after the other
            if ``None``.
        counts: Number of edges of each answered node, ``int64`` ``[k]``.
        neighbor: Neighbours, node after node, ``int32`` or ``int64``.
        edge: Edge ids, ``int32`` or ``int64``.
        attrs: More tensors by edge, by name.
    """

    position: Tensor
    take: Tensor | None
    counts: Tensor
    neighbor: Tensor
    edge: Tensor
    attrs: Mapping[str, Tensor]


def stitch_edges(
    size: int, answers: Sequence[PartEdges]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Merge answers.

    Args:
        size: Number of nodes.
        answers: The answers; each node is in exactly one of them.

    Returns:
        Number of edges of each node, ``int64`` ``[size]``; neighbours and edge ids, node after
        node, ``int64``; and the other tensors.

    Raises:
        ValueError: If answers do not fit each other.
    """
    names = list(answers[0].attrs) if answers else []
    if library.compiled() and not names:
        found = torch.ops.pyg_scale.stitch_edges(
            size,
            [each.position for each in answers],
            [_ABSENT if each.take is None else each.take for each in answers],
            [each.counts for each in answers],
            [each.neighbor for each in answers],
            [each.edge for each in answers],
        )
        return (*found, {})
    all_counts = torch.cat([_ABSENT, *[each.counts for each in answers]])
    before = all_counts.cumsum(0) - all_counts  # first edge of each answered node
    order, source, nodes = [_ABSENT], [_ABSENT], 0
    for each in answers:
        count = each.counts.numel()
        order.append(each.position)
        source.append(nodes + (torch.arange(count) if each.take is None else each.take))
        nodes += count
    position = torch.cat(order)
    if position.numel() != size or torch.bincount(position, minlength=size).ne(1).any():
        raise ValueError("answers do not have each of the nodes once")
    node = torch.empty(size, dtype=torch.int64)  # the answered node for each node
    node[position] = torch.cat(source)
    counts = all_counts[node]
    total = int(counts.sum())
    first = (before[node] - (counts.cumsum(0) - counts)).repeat_interleave(
        counts, output_size=total
    )
    at = first + torch.arange(total)

    def put(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))[at]

    none = [_ABSENT] if not answers else []
    return (
        counts,
        put([*none, *[each.neighbor.to(torch.int64) for each in answers]]),
        put([*none, *[each.edge.to(torch.int64) for each in answers]]),
        {name: put([each.attrs[name] for each in answers]) for name in names},
    )
