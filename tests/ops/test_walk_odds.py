"""Walks by weight and those of node2vec: the same to the bit on both paths, and exact odds."""

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.csc import Compressed, weight_prefix
from pyg_scale.ops.random_walk import odds_of, random_walk, random_walk_plain
from pyg_scale.testing import statistics


def compressed(row, col, num_nodes):
    """``indptr`` and ``indices`` of edges, ascending within a node."""
    order = torch.argsort(row * num_nodes + col, stable=True)
    count = torch.bincount(row, minlength=num_nodes)
    return torch.cat([count.new_zeros(1), count.cumsum(0)]), col[order]


def directed(num_nodes, num_edges, seed):
    """Random edges with repeats and self-loops; none leaves the last two nodes."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(num_nodes - 2, (num_edges,), generator=generator)
    return compressed(row, torch.randint(num_nodes, (num_edges,), generator=generator), num_nodes)


def weights_of(indices, seed=0):
    weight = torch.rand(indices.numel(), generator=torch.Generator().manual_seed(seed))
    return weight.masked_fill(weight < 0.3, 0)


def prefix_of(indptr, indices, weight):
    return weight_prefix(Compressed(indptr, indices, None), weight)


def transitions(indptr, indices, weight, p, q):
    """The exact probabilities ``[before, node, next]`` of a step, from their definition."""
    size = indptr.numel() - 1
    matrix = torch.zeros(size, size, dtype=torch.float64)
    row = torch.arange(size).repeat_interleave(indptr.diff())
    matrix.index_put_((row, indices), weight.double(), accumulate=True)
    joined = torch.zeros(size, size, dtype=torch.float64)
    joined[row, indices] = 1
    odds = torch.where(joined > 0, 1.0, 1 / q)
    odds = odds - torch.diag(odds.diag()) + torch.eye(size) / p
    out = matrix[None] * odds[:, None, :].double()
    return out / out.sum(2, keepdim=True).clamp(min=1e-300)


@pytest.fixture(params=["plain", "compiled"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    elif not library.compiled():
        pytest.skip("the kernels are not compiled")


@pytest.mark.matrix(4)
@pytest.mark.parametrize("weighted", [False, True, "small"])
@pytest.mark.parametrize(
    ("p", "q"), [(1, 1), (0.5, 2), (3, 1), (1e9, 1e-9), (1e-9, 1e9), (1e9, 1e9), (1e-300, 1e300)]
)
def test_compiled_is_the_meaning(weighted, p, q):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, indices = directed(50, 300, 1)
    prefix = prefix_of(indptr, indices, weights_of(indices)) if weighted else None
    if weighted == "small":  # sums of few values, so that draws hit them
        own = torch.arange(indices.numel()) % 3
        total = own.cumsum(0)
        prefix = total - (total - own)[indptr[:-1].clamp(max=299)].repeat_interleave(indptr.diff())
    start, walk = torch.arange(300) % 50, torch.arange(300) * 7 + 3
    key, odds = 2**64 - 5, odds_of(p, q)
    plain = random_walk_plain(indptr, indices, prefix, start, walk, 12, key, odds)
    for column, is_sorted in ((indices, False), (indices.int(), True)):
        found = random_walk(
            indptr,
            column,
            start,
            12,
            walk=walk,
            key=key,
            weight_prefix=prefix,
            p=p,
            q=q,
            is_sorted=is_sorted,
            return_position=True,
        )
        assert torch.equal(found.node, plain.node)
        assert torch.equal(found.position, plain.position)


def test_positions_are_edges_of_the_walk(path):
    indptr, indices = directed(40, 90, 2)
    prefix = prefix_of(indptr, indices, weights_of(indices))
    for options in ({}, {"weight_prefix": prefix}, {"p": 0.2, "q": 3}):
        found = random_walk(indptr, indices, torch.arange(40), 8, return_position=True, **options)
        node, position = found
        stayed = position < 0
        assert bool(stayed.any()) and bool((~stayed).any())
        assert torch.equal(node[:, :-1][stayed], node[:, 1:][stayed])
        assert torch.equal(indices[position[~stayed]], node[:, 1:][~stayed])
        row = torch.arange(40).repeat_interleave(indptr.diff())
        assert torch.equal(row[position[~stayed]], node[:, :-1][~stayed])


def test_weights_are_odds(path):
    weight = torch.tensor([0.5, 0.0, 2.0, 1e-12, 1.0, 3.0])
    indptr = torch.tensor([0, 5, 6, 6, 6, 6, 6])
    indices = torch.tensor([1, 2, 3, 4, 5, 0])
    prefix = prefix_of(indptr, indices, weight)
    found = random_walk(indptr, indices, torch.zeros(30_000).long(), 1, weight_prefix=prefix).node
    count = torch.bincount(found[:, 1], minlength=6)[1:]
    assert int(count[1]) == 0
    kept = torch.tensor([0, 2, 4])
    statistics.require(statistics.multinomial(count[kept], weight[:5][kept]), "weights")


def test_zero_weights_keep_a_walk_where_it_is(path):
    indptr, indices = torch.tensor([0, 2, 4, 4]), torch.tensor([1, 2, 0, 2])
    prefix = prefix_of(indptr, indices, torch.tensor([0.0, 0.0, 1.0, 0.0]))
    for options in ({}, {"p": 2.0, "q": 0.5}):
        start = torch.tensor([0, 1, 2])
        found = random_walk(
            indptr, indices, start, 3, weight_prefix=prefix, return_position=True, **options
        )
        assert found.node.tolist() == [[0] * 4, [1, 0, 0, 0], [2] * 4]
        assert found.position.tolist() == [[-1] * 3, [2, -1, -1], [-1] * 3]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("p", "q"), [(0.25, 4), (4, 0.25), (1e9, 2), (1, 1e9), (7, 1e-9), (1e-9, 4)]
)
def test_second_order_odds(weighted, p, q):
    """Frequencies of what follows each pair of nodes, against the definition in float64."""
    if not library.compiled():
        pytest.skip("the plain path is compared to the bit, and slow")
    indptr, indices = directed(12, 60, 4)
    weight = weights_of(indices, 1) if weighted else torch.ones(indices.numel())
    prefix = prefix_of(indptr, indices, weight) if weighted else None
    start = torch.arange(12).repeat(2500)
    node = random_walk(indptr, indices, start, 6, weight_prefix=prefix, p=p, q=q).node
    triple = (node[:, :-2] * 12 + node[:, 1:-1]) * 12 + node[:, 2:]
    # a node that was left by no edge has no odds
    leaves = torch.zeros(12, dtype=torch.float64)
    row = torch.arange(12).repeat_interleave(indptr.diff())
    leaves.index_add_(0, row, weight.double())
    count = torch.bincount(triple.view(-1), minlength=12**3).view(12, 12, 12)
    exact = transitions(indptr, indices, weight, p, q)
    values = {}
    for before in range(12):
        for middle in range(12):
            seen = count[before, middle]
            if int(seen.sum()) < 200 or not leaves[middle] or not leaves[before]:
                continue
            likely = exact[before, middle]
            rare = (likely > 0) & (likely * seen.sum() < 5)  # too few for the approximation
            assert int(seen[rare].sum()) < 5 * max(1, int(rare.sum())) + 10
            values[f"{before} to {middle}"] = statistics.multinomial(
                seen.masked_fill(rare, 0), likely.masked_fill(rare, 0)
            )
    assert len(values) > 20
    statistics.require(values, "second-order walks")


def test_a_tree_is_left_backwards_by_p_alone(path):
    """On a path, a walk turns with the odds 1 / p to 1 / q."""
    indptr, indices = compressed(
        torch.tensor([0, 1, 1, 2, 2, 3]), torch.tensor([1, 0, 2, 1, 3, 2]), 4
    )
    node = random_walk(indptr, indices, torch.zeros(6000).long(), 2, p=4.0, q=0.5).node
    assert node[:, 1].eq(1).all()  # the only edge of an end
    back = int(node[:, 2].eq(0).sum())
    statistics.require(
        statistics.multinomial(torch.tensor([back, 6000 - back]), torch.tensor([0.25, 2.0])), "p, q"
    )


def test_a_star_returns_whatever_the_odds_are(path):
    leaves = torch.arange(1, 6)
    indptr, indices = compressed(
        torch.cat([leaves * 0, leaves]), torch.cat([leaves, leaves * 0]), 6
    )
    node = random_walk(indptr, indices, torch.zeros(40).long(), 9, p=1e12, q=1e-12).node
    assert node[:, ::2].eq(0).all() and node[:, 1::2].gt(0).all()
    assert node[:, 1:-2:2].ne(node[:, 3::2]).all()  # back to the same leaf: once in 1e24


def test_a_walk_depends_on_its_own_numbers_alone(path):
    indptr, indices = directed(60, 300, 3)
    prefix = prefix_of(indptr, indices, weights_of(indices))
    start, options = torch.arange(600) % 60, {"key": 5, "weight_prefix": prefix, "p": 3, "q": 0.2}
    walks = random_walk(indptr, indices, start, 6, **options).node
    some = torch.tensor([3, 599, 77, 3])
    assert torch.equal(
        random_walk(indptr, indices, start[some], 6, walk=some, **options).node, walks[some]
    )
    assert torch.equal(random_walk(indptr, indices, start, 3, **options).node, walks[:, :4])


@pytest.mark.parametrize("options", [{}, {"p": 0.3, "q": 5.0}])
def test_the_same_for_any_number_of_threads(options):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, indices = directed(1000, 5000, 3)
    prefix = prefix_of(indptr, indices, weights_of(indices))
    start, threads, found = torch.arange(40_000) % 1000, torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(random_walk(indptr, indices, start, 5, weight_prefix=prefix, **options))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0].node, found[1].node)


def test_odds_as_integers():
    assert odds_of(1, 1) is None
    assert odds_of(4, 1) == (2**60, 2**62, 2**62)
    assert odds_of(0.5, 2) == (2**62, 2**61, 2**60)
    assert odds_of(1e300, 1) == (1, 2**62, 2**62)
