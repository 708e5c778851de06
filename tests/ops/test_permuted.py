"""The order that is computed place by place: a permutation, and as random as one should be."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.stats import chi2, chisquare

from pyg_scale.ops import keys

MANY = (1 << 22) + 12_345
LEAST = 1e-4  # of a p-value; the keys are fixed


def slowly(key: int, size: int, x: int) -> int:
    """The definition in ``docs/draws.md``, with Python's integers."""
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    while True:
        left, right = x % a, x // a
        for r in range(keys.FEISTEL_ROUNDS):
            if r % 2 == 0:
                left = (left + ((keys.fold(key, r, right) >> 33) * a >> 31)) % a
            else:
                right = (right + ((keys.fold(key, r, left) >> 33) * b >> 31)) % b
        x = left + a * right
        if x < size:
            return x


@pytest.mark.parametrize("size", [*range(1, 20), 99, 100, 101, 1 << 12, (1 << 12) + 1])
def test_it_is_the_permutation_of_the_definition(size: int) -> None:
    for key in (0, 1, keys.fold(3, size)):
        found = keys.permuted(key, size, torch.arange(size)).tolist()
        assert sorted(found) == list(range(size))
        assert found[:50] == [slowly(key, size, x) for x in range(size)][:50]


@pytest.mark.parametrize("size", [MANY, 60_000_000, 10**12, (1 << 62) - 1])
def test_large_sizes(size: int) -> None:
    at = torch.tensor([0, 1, size // 2, size - 2, size - 1])
    found = keys.permuted(7, size, at)
    assert found.tolist() == [slowly(7, size, x) for x in at.tolist()]
    assert torch.equal(keys.permuted(7, size, at.view(5, 1)), found.view(5, 1))
    assert keys.permuted(7, size, at[:0]).shape == (0,)


@pytest.mark.parametrize("size", [250_000, pytest.param(MANY, marks=pytest.mark.slow)])
def test_all_of_many_come_once(size: int) -> None:
    seen = torch.zeros(size, dtype=torch.uint8)
    for at in torch.arange(size).split(1 << 16):
        seen[keys.permuted(5, size, at)] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize("size", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_small_orders_are_about_equally_likely(size: int) -> None:
    count = dict.fromkeys(itertools.permutations(range(size)), 0)
    for key in range(25 * len(count)):
        count[tuple(keys.permuted(keys.fold(key, 99), size, torch.arange(size)).tolist())] += 1
    assert chisquare(list(count.values())).pvalue > LEAST


@pytest.mark.parametrize("begin", [0, MANY - 40_000])
def test_a_stretch_of_the_order_is_a_sample_without_replacement(begin: int) -> None:
    """Cells of a draw without replacement vary less, by ``(size - n) / (size - 1)``."""
    n, cells = 40_000, 64
    for key in range(2):
        found = keys.permuted(keys.fold(key, begin), MANY, torch.arange(begin, begin + n))
        cell = found * cells // MANY
        expected = torch.bincount(torch.arange(MANY) * cells // MANY) * (n / MANY)
        squares = (torch.bincount(cell, minlength=cells) - expected) ** 2 / expected
        statistic = float(squares.sum()) * (MANY - 1) / (MANY - n)
        assert LEAST < chi2.sf(statistic, cells - 1) < 1 - LEAST
        pairs = cell[:-1] // 8 * 8 + cell[1:] // 8  # of seeds one after the other
        assert chisquare(torch.bincount(pairs, minlength=64).tolist()).pvalue > LEAST
        low = found % 7 * 7 + (found.roll(1) % 7)
        assert chisquare(torch.bincount(low[1:], minlength=49).tolist()).pvalue > LEAST


def test_a_place_has_any_seed_and_epochs_are_independent() -> None:
    size, cells, at = MANY, 20, torch.tensor([0, 17, MANY - 1])
    found = torch.stack(
        [keys.permuted(keys.fold(0, 1, epoch, keys.SHUFFLE), size, at) for epoch in range(300)]
    )
    for place in range(3):
        count = torch.bincount(found[:, place] * cells // size, minlength=cells)
        assert chisquare(count.tolist()).pvalue > LEAST
    following = (found[:-1, 0] * 4 // size) * 4 + found[1:, 0] * 4 // size
    assert chisquare(torch.bincount(following, minlength=16).tolist()).pvalue > LEAST
