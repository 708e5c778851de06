"""LABOR-i and LABOR-*: compiled and plain alike, and the equations of the paper, solved again."""

from __future__ import annotations

import math

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.keys import source_number
from pyg_scale.ops.labor_take import CONVERGED, labor_take
from pyg_scale.ops.sample import SourceDraws

pytestmark = pytest.mark.matrix(3)

ALWAYS = 0x9E3779B9
"""A key; which one does not matter."""


def hop(seed, rows=30, nodes=50, most=25):
    """The in-edges of some nodes, some of which have none; few sources have many of them."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most, (rows,), generator=generator)
    skewed = torch.rand(int(counts.sum()), generator=generator) ** 2
    return counts, (skewed * nodes).long(), nodes


def rows_of(counts):
    return torch.arange(counts.numel()).repeat_interleave(counts)


def shares_of(counts, neighbor, nodes, k, rounds):
    """The probabilities of all in-edges, from many keys: each that is ever taken says its own."""
    share = torch.zeros(neighbor.numel(), dtype=torch.float64)
    for key in range(400):
        taken, of = labor_take(counts, neighbor, nodes, k, rounds, key * ALWAYS, SourceDraws())
        share[taken] = of
    return share / 2**32


def solved(counts, neighbor, k, rounds):
    """The probabilities of in-edges by bisection, in floating point: the paper's equations."""
    row = rows_of(counts).tolist()
    source = neighbor.tolist()
    importance = dict.fromkeys(source, 1.0)
    of_row = {}
    for edge, r in enumerate(row):
        of_row.setdefault(r, []).append(edge)

    def scale(edges):
        d, mine = len(edges), [importance[source[e]] for e in edges]
        if d <= k:
            return 1 / min(mine)
        low, high = -60.0, 60.0  # of the logarithm
        for _ in range(200):
            middle = (low + high) / 2
            over = sum(1 / min(1.0, math.exp(middle) * pi) for pi in mine) > d * d / k
            low, high = (middle, high) if over else (low, middle)
        return math.exp(low)

    for _ in range(rounds):
        raised = dict.fromkeys(importance, 0.0)
        for edges in of_row.values():
            c = scale(edges)
            for e in edges:
                raised[source[e]] = max(raised[source[e]], c * importance[source[e]])
        importance = raised
    out = torch.empty(len(source), dtype=torch.float64)
    for edges in of_row.values():
        c = scale(edges)
        for e in edges:
            out[e] = min(1.0, c * importance[source[e]])
    return out


@pytest.mark.parametrize("block", range(6))
def test_compiled_and_plain_are_equal_to_the_bit(block, monkeypatch):
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    for i in range(10 * block, 10 * block + 10):
        counts, neighbor, nodes = hop(i, rows=i, most=1 + 2 * i)
        draws = SourceDraws(next_key=7 * ALWAYS, renewed=i % 3 << 30)
        arguments = (nodes, i % 7, (CONVERGED, 0, 1, 2, 5)[i % 5], (i + 1) * ALWAYS, draws)
        compiled = labor_take(counts, neighbor, *arguments)
        with monkeypatch.context() as patch:
            patch.setenv("PYG_SCALE_KERNELS", "never")
            plain = labor_take(counts, neighbor, *arguments)
        for one, other in zip(compiled, plain, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype


@pytest.mark.parametrize("rounds", [0, 1, 3, CONVERGED])
def test_probabilities_solve_the_equations(rounds):
    counts, neighbor, nodes = hop(1)
    found = shares_of(counts, neighbor, nodes, 4, rounds)
    assert bool((found > 0).all())
    degree, row = counts[rows_of(counts)], rows_of(counts)
    inverse = torch.zeros(counts.numel(), dtype=torch.float64).index_add_(0, row, 1 / found)
    chosen = counts > 4
    wanted = (counts * counts).double() / 4
    torch.testing.assert_close(inverse[chosen], wanted[chosen], rtol=1e-7, atol=0)
    assert bool((found[degree <= 4] == 1).all())
    if rounds >= 0:
        torch.testing.assert_close(found, solved(counts, neighbor, 4, rounds), rtol=1e-6, atol=0)


def test_every_round_expects_fewer_sources():
    counts, neighbor, nodes = hop(2, rows=200, nodes=300, most=60)
    expected = []
    for rounds in (0, 1, 2, 4, CONVERGED):
        share = shares_of(counts, neighbor, nodes, 5, rounds)
        largest = torch.zeros(nodes, dtype=torch.float64)
        expected.append(float(largest.scatter_reduce_(0, neighbor, share, "amax").sum()))
    assert expected == sorted(expected, reverse=True)
    assert expected[-1] < 0.9 * expected[0]
    assert expected[-1] > 0.99 * expected[-2], "four rounds are nearly all that there is to gain"


def test_a_source_is_taken_by_all_who_would_rather():
    """Its number is below the shares of some in-edges and not below those of the others."""
    counts, neighbor, nodes = hop(3)
    share = shares_of(counts, neighbor, nodes, 4, 2)
    taken, _ = labor_take(counts, neighbor, nodes, 4, 2, ALWAYS, SourceDraws())
    number = source_number(ALWAYS, neighbor).double() / 2**32
    assert torch.equal(taken, (number < share).nonzero().view(-1))


def test_long_rows_and_rows_without_in_edges():
    """More than 2**20 in-edges of a node, the sum of which is made in pieces."""
    many = (1 << 20) + 7
    neighbor = torch.cat([torch.arange(many), torch.tensor([3])])
    counts = torch.tensor([0, many, 0, 1, 0])
    taken, share = labor_take(counts, neighbor, many, 1000, 1, ALWAYS, SourceDraws())
    assert taken[-1] == many and share[-1] == 2**32
    assert taken[0] == 3 and share[0] > 0.999 * 2**32, "a node that another one always takes"
    assert 800 < taken.numel() < 1200
    others = torch.full((taken.numel() - 2,), 1000 / many, dtype=torch.float64)
    torch.testing.assert_close(share[1:-1] / 2**32, others, rtol=1e-2, atol=0)
    none = labor_take(counts, neighbor, many, 0, 1, ALWAYS, SourceDraws())
    assert [each.numel() for each in none] == [0, 0]


@pytest.mark.parametrize(
    ("counts", "neighbor", "nodes", "k", "message"),
    [
        ([2], [0], 4, 1, "counts must add up to neighbor"),
        ([-1, 2], [0], 4, 1, "counts must not be negative"),
        ([1], [4], 4, 1, "neighbor 4 does not exist: there are 4"),
        ([1], [-1], 4, 1, "neighbor -1 does not exist"),
        ([1], [0], -1, 1, "num_nodes must be from 0"),
        ([1], [0], 4, 2**31, "k must be from 0"),
    ],
)
def test_what_does_not_fit_is_refused(counts, neighbor, nodes, k, message):
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")
    with pytest.raises(ValueError, match=message):
        labor_take(torch.tensor(counts), torch.tensor(neighbor), nodes, k, 1, 1, SourceDraws())
