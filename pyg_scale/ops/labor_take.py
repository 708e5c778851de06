"""In-edges of a whole hop by importance that is refined: LABOR-i and ``LABOR-*``.

The method of Balin and Catalyurek (:mod:`pyg_scale.sampler.labor`). This module has the meaning in
plain torch, ``csrc/labor_take.cpp`` the same bits, compiled; ``docs/draws.md`` specifies both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import keys, library
from pyg_scale.ops.sample import SourceDraws

CONVERGED = -1
"""The number of rounds that means: until a round gains less than one part in 10,000."""

MOST_ROUNDS = 100
"""No importance is refined more often; it has long converged by then."""

_CERTAIN = float(1 << 32)
_WHOLE = float(1 << 31)
_LEAST_GAIN = 10_000


def labor_take(
    counts: Tensor,
    neighbor: Tensor,
    num_nodes: int,
    k: int,
    rounds: int,
    key: int,
    draws: SourceDraws,
) -> tuple[Tensor, Tensor]:
    """Choose among all in-edges of the nodes that a hop expands.

    Args:
        counts: Numbers of in-edges, ``int64`` ``[n]``.
        neighbor: Their sources, node after node, ``int64`` ``[m]``.
        num_nodes: Nodes of the neighbours' type.
        k: In-edges whose variance a node shall have, at least 0; it gets as many or a few more.
        rounds: How often importance is refined, at most :data:`MOST_ROUNDS`, or
            :data:`CONVERGED`.
        key: The key of the numbers of sources, see :class:`~pyg_scale.ops.sample.SourceDraws`.
        draws: ``next_key`` and ``renewed`` are those.

    Returns:
        The places of the in-edges that are taken, rising, ``int64`` ``[t]``, and their
        probabilities as numbers of ``2**32``, ``float64`` ``[t]``.

    Raises:
        ValueError: If numbers do not fit each other, or a source is not a node.
    """
    if library.compiled():
        position, share = torch.ops.pyg_scale.labor_take(
            counts.contiguous(),
            neighbor.contiguous(),
            num_nodes,
            k,
            rounds,
            keys.to_signed(key),
            keys.to_signed(draws.next_key),
            draws.renewed,
        )
        return position, share
    if rounds > MOST_ROUNDS:
        raise ValueError(f"rounds must be at most {MOST_ROUNDS} (got {rounds})")
    if k == 0:
        return counts.new_empty(0), torch.empty(0, dtype=torch.float64)
    row = torch.arange(counts.numel()).repeat_interleave(counts, output_size=neighbor.numel())
    source, place = torch.unique(neighbor, return_inverse=True)
    rarity = torch.ones(source.numel(), dtype=torch.float64)
    before = 0
    for number in range(MOST_ROUNDS if rounds < 0 else rounds):
        part, bound = _bounds(counts, row, rarity[place], k)
        rarity = torch.full_like(rarity, torch.inf)
        rarity.scatter_reduce_(0, place, part * (1 / bound)[row], "amin")
        expected = int((_CERTAIN / rarity.clamp(min=1)).ceil().to(torch.int64).sum())
        if rounds < 0 and number > 0 and before - expected < before // _LEAST_GAIN:
            break
        before = expected
    part, bound = _bounds(counts, row, rarity[place], k)
    share = torch.where(part <= bound[row], _CERTAIN, (bound[row] / part * _CERTAIN).ceil())
    drawn = keys.source_number(key, source)
    if draws.renewed:
        has_next = keys.source_number(keys.fold(key, 1), source) < draws.renewed
        drawn = torch.where(has_next, keys.source_number(draws.next_key, source), drawn)
    taken = (drawn.to(torch.float64)[place] < share).nonzero().view(-1)
    return taken, share[taken]


def _bounds(counts: Tensor, row: Tensor, rarity: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The parts of in-edges, from 1 to ``2**31``, and the bound of each node.

    In-edges whose part is not above the bound are certain. Another one has the probability
    ``bound / part``: the sum of one over all probabilities of a node is ``d**2 / k``, as it is with
    equal probabilities, and so is the variance.

    Args:
        counts: ``int64`` ``[n]``, the degrees ``d``.
        row: The node of each in-edge, ``int64`` ``[m]``.
        rarity: One over the importance of its source, ``float64`` ``[m]``.
        k: How many in-edges are wanted.
    """
    largest = torch.zeros(counts.numel(), dtype=torch.float64)
    largest.scatter_reduce_(0, row, rarity, "amax")
    part = (rarity * (_WHOLE / largest)[row]).ceil().clamp(1, _WHOLE)
    bound = torch.where(counts <= k, _WHOLE, 0.0)
    certain = torch.full_like(counts, -1)
    while True:
        is_certain = part <= bound[row]
        more = torch.zeros_like(counts).index_add_(0, row, is_certain.to(torch.int64))
        wanted = torch.where(is_certain, 0, part.to(torch.int64))
        left = torch.zeros_like(counts).index_add_(0, row, wanted)
        moving = (more != certain) & (counts > k)
        if not bool(moving.any()):
            return part, bound
        certain = more
        reached = (counts * counts - k * certain).to(torch.float64)
        bound = torch.where(moving, k * left.to(torch.float64) / reached, bound)
