"""The meaning of neighbour sampling in plain torch: obvious rather than fast.

Every other sampler that promises the same draws is compared with this one. It is also what
runs where the kernels have not been compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops.keys import bounded
from pyg_scale.sampler.frontier import Chosen, Frontier
from pyg_scale.sampler.hop import HopSampler

NONE = -1
"""Stands in a table of picks for "nothing"."""


class ReferenceSampler(HopSampler):
    """Samples neighbours uniformly or by weight, with or without replacement.

    Without replacement a node that has no more than ``k`` candidates takes all, in their order.
    Else uniform picks are made by Floyd's method (Bentley and Floyd: "A sample of brilliance",
    CACM 1987) and weighted ones by successive sampling: each pick in proportion to the weights
    of what is left. A zero weight is picked only when all candidates are taken.
    """

    supports = HopSampler.supports | {"replace", "weighted"}

    def pick(self, frontier: Frontier, k: int) -> Chosen:
        weighted = frontier.csc.weight_prefix is not None
        if self.replace:
            table = _weighted(frontier, k) if weighted else _uniform(frontier, k)
            return Chosen(*_entries(table))
        few = (frontier.num_candidates <= k).nonzero().view(-1)
        many = (frontier.num_candidates > k).nonzero().view(-1)
        row, position = frontier.at(few).candidates()
        if not many.numel():
            return Chosen(few[row], position)
        choice = frontier.at(many)
        table = _successive(choice, k) if weighted else _floyd(choice, k)
        row2, position2 = _entries(table)
        return Chosen(torch.cat([few[row], many[row2]]), torch.cat([position, position2]))


def _entries(table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and values of the entries of a table ``[n, k]`` that are not :data:`NONE`."""
    row, column = (table != NONE).nonzero(as_tuple=True)
    return row, table[row, column]


def _uniform(frontier: Frontier, k: int) -> Tensor:
    """``k`` independent draws for every row that has candidates, ``[n, k]``."""
    size = frontier.num_candidates.unsqueeze(1)
    t = bounded(frontier.key.unsqueeze(1).expand(-1, k), torch.arange(k), size.clamp(min=1))
    return torch.where(size > 0, frontier.begin.unsqueeze(1) + t, NONE)


def _floyd(frontier: Frontier, k: int) -> Tensor:
    """``k`` different candidates of every row, each set as likely as any other, ``[n, k]``.

    Pick ``i`` is one of the first ``j + 1 = d - k + i + 1`` candidates; if that one has been
    taken, it is candidate ``j``, which cannot have been.
    """
    picks = torch.empty(frontier.node.numel(), k, dtype=torch.int64)
    for i in range(k):
        j = frontier.num_candidates - k + i
        t = bounded(frontier.key, i, j + 1)
        taken = (picks[:, :i] == t.unsqueeze(1)).any(dim=1)
        picks[:, i] = torch.where(taken, j, t)
    return frontier.begin.unsqueeze(1) + picks


def _weights(frontier: Frontier) -> tuple[Tensor, Tensor, Tensor]:
    """Running sums by position, the sum before the candidates, and that of all of them."""
    prefix = frontier.csc.weight_prefix
    assert prefix is not None
    prefix = torch.cat([prefix, prefix.new_zeros(1)])  # so that position -1 is 0
    first = frontier.begin == frontier.first
    before = torch.where(first, 0, prefix[frontier.begin - 1])
    total = torch.where(frontier.num_candidates > 0, prefix[frontier.end - 1] - before, 0)
    return prefix, before, total


def _weighted(frontier: Frontier, k: int) -> Tensor:
    """``k`` independent draws by weight for every row that has a weight, ``[n, k]``."""
    prefix, before, total = _weights(frontier)
    picks = torch.full((frontier.node.numel(), k), NONE)
    for i in range(k):
        t = before + bounded(frontier.key, i, total.clamp(min=1))
        position = frontier.first_where(lambda p, t=t: prefix[p] > t)  # type: ignore[misc]
        picks[:, i] = torch.where(total > 0, position, NONE)
    return picks


def _successive(frontier: Frontier, k: int) -> Tensor:
    """Up to ``k`` different candidates of every row, one by one in proportion to the weights.

    A draw ``t`` from the weight that is left is moved past the candidates that are gone,
    in their order; then it lies within the one that it picks.
    """
    prefix, before, left = _weights(frontier)
    picks = torch.full((frontier.node.numel(), k), NONE)
    for i in range(k):
        t = before + bounded(frontier.key, i, left.clamp(min=1))
        for gone in picks[:, :i].sort(dim=1).values.unbind(dim=1):
            start, weight = _interval(frontier, prefix, gone)
            t = torch.where((gone != NONE) & (t >= start), t + weight, t)
        position = frontier.first_where(lambda p, t=t: prefix[p] > t)  # type: ignore[misc]
        position = torch.where(left > 0, position, NONE)
        picks[:, i] = position
        left = torch.where(left > 0, left - _interval(frontier, prefix, position)[1], 0)
    return picks


def _interval(frontier: Frontier, prefix: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """The running sum before each position, and its weight."""
    first = position == frontier.first
    start = torch.where(first, 0, prefix[position - 1])
    return start, prefix[position] - start
