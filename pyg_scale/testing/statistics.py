"""Statistical tests of the draws of samplers, with the appropriate corrections.

Pearson's statistic of the number of times that each of ``d`` neighbours was among ``k`` drawn
*without replacement* is smaller than a chi-square variable, as the draws are negatively correlated.
It has to be multiplied by ``(d - 1) / (d - k)``; otherwise a test rejects nothing, however biased.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

SIGNIFICANCE = 1e-4
"""The probability that a test rejects a correct sampler, if its keys were not fixed."""


def chi_square_tail(statistic: float, dof: int) -> float:
    """The probability that a chi-square variable with ``dof`` degrees exceeds ``statistic``."""
    half = torch.tensor([dof / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def multinomial(count: Tensor, probability: Tensor | None = None) -> float:
    """The p-value of independent draws from given probabilities.

    Args:
        count: Number of draws of each outcome, ``[outcomes]``.
        probability: Probability of each outcome, ``[outcomes]``, up to a factor; equal if ``None``.
            An outcome of probability 0 must not have been drawn.
    """
    count = count.to(torch.float64)
    weight = torch.ones_like(count) if probability is None else probability.to(torch.float64)
    if bool((count[weight == 0] > 0).any()):
        return 0.0
    count, weight = count[weight > 0], weight[weight > 0]
    expected = count.sum() * weight / weight.sum()
    if count.numel() < 2 or not count.sum():
        return 1.0
    return chi_square_tail(float(((count - expected) ** 2 / expected).sum()), count.numel() - 1)


def inclusion(count: Tensor, k: int, size: Tensor | None = None) -> float:
    """The p-value of repeated uniform draws of ``k`` out of ``d`` without replacement.

    Args:
        count: Number of draws of each of the ``d``, ``[d]``; or of each group of them.
        k: Number of different ones drawn each time.
        size: The sizes of the groups, of sum ``d``, if ``count`` is by group.
    """
    count = count.to(torch.float64)
    size = torch.ones_like(count) if size is None else size.to(torch.float64)
    d = float(size.sum())
    expected = count.sum() * size / d
    spread = ((count - expected) ** 2 / expected).sum()
    if k == d:  # not random
        return float(not bool(spread))
    return chi_square_tail(float(spread * (d - 1) / (d - k)), count.numel() - 1)


def bernoulli(count: Tensor, draws: int, probability: Tensor) -> float:
    """The p-value of in-edges that are each taken by itself, with a probability of its own.

    The squares of deviations are divided by the variances ``n p (1 - p)``: with Pearson's ``n p``
    the statistic would be smaller than a chi-square variable.

    Args:
        count: Number of times that each was taken, ``[d]``.
        draws: Number of draws.
        probability: That of each, ``[d]``; one of 1 must have been taken every time.
    """
    count, p = count.to(torch.float64), probability.to(torch.float64)
    certain = p > 1 - 1e-6
    if bool((count[certain] != draws).any()):
        return 0.0
    count, p = count[~certain], p[~certain]
    if not count.numel():
        return 1.0
    spread = ((count - draws * p) ** 2 / (draws * p * (1 - p))).sum()
    return chi_square_tail(float(spread), count.numel())


def combinations(
    picks: Tensor, d: int, probability: Mapping[tuple[int, ...], float] | None = None
) -> float:
    """The p-value of repeated draws of sets, where every combination has a given probability.

    Unlike :func:`inclusion`, this detects combinations that are never drawn although each of their
    members is.

    Args:
        picks: The draws, ``[draws, k]``, with different numbers below ``d`` in a row.
        probability: Probability of each combination, up to a factor; equal if ``None``.
    """
    every = list(itertools.combinations(range(d), picks.size(1)))
    number = {combination: i for i, combination in enumerate(every)}
    drawn = [number[tuple(row)] for row in picks.sort(dim=1).values.tolist()]
    count = torch.bincount(torch.tensor(drawn), minlength=len(every))
    weight = None if probability is None else torch.tensor([probability[c] for c in every])
    return multinomial(count, weight)


def successive(weight: Tensor, k: int) -> dict[tuple[int, ...], float]:
    """The probability of every set of ``k``, if drawn one by one in proportion to weights."""
    out: dict[tuple[int, ...], float] = {}
    values, total = weight.tolist(), float(weight.sum())
    for order in itertools.permutations(range(len(values)), k):
        probability, left = 1.0, total
        for i in order:
            probability *= values[i] / left if values[i] else 0.0
            left -= values[i]
        key = tuple(sorted(order))
        out[key] = out.get(key, 0.0) + probability
    return out


def independent(pair: Tensor, sizes: tuple[int, int]) -> float:
    """The p-value of two independent uniform draws, ``pair`` ``[draws, 2]``."""
    cell = pair[:, 0] * sizes[1] + pair[:, 1]
    return multinomial(torch.bincount(cell, minlength=math.prod(sizes)))


def require(p: float | Mapping[str, float], what: str, significance: float = SIGNIFICANCE) -> None:
    """Fail if a p-value, or the smallest of several after Bonferroni's correction, is too small."""
    values = {"": p} if isinstance(p, float) else p
    worst = min(values, key=values.__getitem__)
    limit = significance / len(values)
    where = f" ({worst})" if worst else ""
    assert values[worst] >= limit, (
        f"{what}{where}: a correct sampler would be this far off with probability "
        f"{values[worst]:.2g}, less than {limit:.2g}"
    )
