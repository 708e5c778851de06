"""Sources of a hop by norms of columns: compiled and plain alike, and probabilities."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.keys import source_number
from pyg_scale.ops.layer_take import layer_take, layer_take_by

pytestmark = pytest.mark.matrix(3)

ALWAYS = 0x9E3779B9
"""A key; which one does not matter."""
NODES = 60


@pytest.fixture
def compiled():
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")


def hop(seed, rows=30, most=25):
    """The in-edges of some nodes, of which few sources have many, and degrees of sources."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most, (rows,), generator=generator)
    skewed = torch.rand(int(counts.sum()), generator=generator) ** 2
    degree = torch.randint(0, 40, (NODES,), generator=generator)
    neighbor = (skewed * NODES).long()
    return counts, neighbor, degree[neighbor]


def expected(counts, neighbor, weights, k, theirs):
    """The shares of edges as whole numbers and fractions: the definition, source by source."""
    norm: dict[int, int] = {}
    edges = iter(range(neighbor.numel()))
    for d in counts.tolist():
        for _ in range(d):
            edge = next(edges)
            other = max(int(theirs[edge]), 1) if weights == "gcn" else d
            square = 1 << 32 if weights == "sum" else max(1, (1 << 32) // (d * other))
            norm[int(neighbor[edge])] = norm.get(int(neighbor[edge]), 0) + square
    certain: set[int] = set(norm) if len(norm) <= k else set()
    while True:
        left = sum(q for t, q in norm.items() if t not in certain)
        rate = Fraction((k - len(certain)) << 32, max(left, 1))
        more = {t for t, q in norm.items() if t not in certain and q * rate >= 1 << 32}
        if not more:
            break
        certain |= more
    share = {t: 1 << 32 if t in certain else max(1, math.ceil(q * rate)) for t, q in norm.items()}
    return torch.tensor([share[t] for t in neighbor.tolist()], dtype=torch.float64)


@pytest.mark.parametrize("weights", [None, "sum", "mean", "gcn"])
@pytest.mark.parametrize("block", range(3))
def test_compiled_and_plain_are_equal_to_the_bit(compiled, weights, block, monkeypatch):
    for i in range(12 * block, 12 * block + 12):
        counts, neighbor, degree = hop(i, rows=i, most=1 + i)
        theirs = degree if weights == "gcn" else None
        arguments = counts, neighbor, NODES, (0, 1, 5, 20, 1000)[i % 5], weights, i * ALWAYS, theirs
        ours = layer_take(*arguments)
        with monkeypatch.context() as patch:
            patch.setenv("PYG_SCALE_KERNELS", "never")
            plain = layer_take(*arguments)
        for one, other in zip(ours, plain, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype


@pytest.mark.parametrize("weights", ["sum", "mean", "gcn"])
@pytest.mark.parametrize("k", [1, 7, 25, 59])
def test_shares_are_those_of_exact_arithmetic(weights, k):
    counts, neighbor, degree = hop(k)
    theirs = degree if weights == "gcn" else None
    share = expected(counts, neighbor, weights, k, theirs)
    seen = torch.zeros_like(share)
    for key in range(200):
        taken, of = layer_take(counts, neighbor, NODES, k, weights, key * ALWAYS, theirs)
        drawn = source_number(key * ALWAYS, neighbor).double()
        assert torch.equal(taken, (drawn < share).nonzero().view(-1))
        seen[taken] = of
    was_taken = seen > 0
    assert was_taken.double().mean() > 0.5
    # Rounding up comes after one of floating point.
    assert float((seen - share)[was_taken].abs().max()) <= 2


def test_some_sources_are_certain_and_the_others_divide_the_rest():
    counts = torch.full((40,), 2)
    neighbor = torch.stack([torch.zeros(40, dtype=torch.int64), torch.arange(40) + 10]).t()
    share = torch.zeros(80, dtype=torch.float64)
    for key in range(100):
        taken, of = layer_take(counts, neighbor.reshape(-1), NODES, 5, "sum", key * ALWAYS)
        share[taken] = of
    assert bool((share[::2] == 2**32).all()), "of the source that all have"
    others = share[1::2] / 2**32
    torch.testing.assert_close(others, torch.full_like(others, 4 / 40), rtol=1e-6, atol=0)


def test_shares_of_nodes(compiled, monkeypatch):
    share = (torch.rand(NODES, dtype=torch.float64) * 2**32).ceil()
    share[:5], share[5:10] = 0, 2**32
    for key in range(20):
        neighbor = hop(key)[1]
        taken, of = layer_take_by(neighbor, share, key * ALWAYS)
        with monkeypatch.context() as patch:
            patch.setenv("PYG_SCALE_KERNELS", "never")
            plain = layer_take_by(neighbor, share, key * ALWAYS)
        assert torch.equal(taken, plain[0]) and torch.equal(of, plain[1])
        assert not bool((neighbor[taken] < 5).any())
        assert int(((neighbor >= 5) & (neighbor < 10)).sum()) == int((of == 2**32).sum())


@pytest.mark.parametrize(
    ("counts", "neighbor", "nodes", "k", "message"),
    [
        ([2], [0], 4, 1, "counts must add up to neighbor"),
        ([-1, 2], [0], 4, 1, "counts must not be negative"),
        ([1], [4], 4, 1, "neighbor 4 does not exist: there are 4"),
        ([1], [-1], 4, 1, "neighbor -1 does not exist"),
        ([1], [0], -1, 1, "num_nodes must be from 0"),
        ([1], [0], 4, -1, "k must not be negative"),
    ],
)
def test_what_does_not_fit_is_refused(compiled, counts, neighbor, nodes, k, message):
    with pytest.raises(ValueError, match=message):
        layer_take(torch.tensor(counts), torch.tensor(neighbor), nodes, k, "mean", 1)


def test_degrees_of_sources_go_with_weights_of_gcn(compiled):
    counts, neighbor, degree = hop(0)
    with pytest.raises(ValueError, match="theirs goes with weights of GCN"):
        layer_take(counts, neighbor, NODES, 3, "mean", 1, degree)
    with pytest.raises(ValueError, match="does not exist: there are 3"):
        layer_take_by(neighbor, torch.ones(3, dtype=torch.float64), 1)


def test_shares_elsewhere_than_on_the_cpu_are_refused(compiled):
    shares = torch.ones(2, dtype=torch.float64, device="meta")
    with pytest.raises(ValueError, match="share must be a contiguous 1-D float64 tensor on the"):
        layer_take_by(torch.tensor([0, 1]), shares, 1)
