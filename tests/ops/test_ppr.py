"""Personalised PageRank by pushes: the same bits on both paths, and within its error bound."""

import math

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.ppr import ppr, ppr_plain
from tests.ops.undirected import random_graph, rows, undirected


@pytest.fixture(params=["plain", "compiled"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    elif not library.compiled():
        pytest.skip("the kernels are not compiled")


def directed(num_nodes, num_edges, seed):
    """Random edges with repeats and self-loops; none leaves the last three nodes."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(num_nodes - 3, (num_edges,), generator=generator).sort().values
    count = torch.bincount(row, minlength=num_nodes)
    indptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
    return indptr, torch.randint(num_nodes, (num_edges,), generator=generator)


def exact(indptr, indices, alpha):
    """Power iteration in float64, ``[seed, node]``; a walk ends at a node without edges."""
    size = indptr.numel() - 1
    step = torch.zeros(size, size, dtype=torch.float64)
    step.index_put_((rows(indptr), indices), torch.ones(()).double(), accumulate=True)
    degree = step.sum(1)
    step[degree == 0] = torch.eye(size).double()[degree == 0]
    step /= step.sum(1, keepdim=True)
    start = torch.eye(size).double()
    out = start
    for _ in range(math.ceil(math.log(1e-17) / math.log(1 - alpha))):
        out = alpha * start + (1 - alpha) * out @ step
    return out, degree


def dense(found, size):
    """All scores ``[seed, node]`` of a result that has them all."""
    node, score = found.node[:, 0], found.score[:, 0]
    out = torch.zeros(node.size(0), size + 1, dtype=torch.float64)
    return out.scatter_(1, torch.where(node < 0, size, node), score)[:, :size]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("layout", ["int64", "int32", "strided"])
@pytest.mark.parametrize(
    ("alpha", "eps"),
    [(0.15, 1e-4), (0.5, 1e-2), (0.15, 0.9), (0.05, 1e-7), (0.999, 1e-14), (2**-16, 1e-3)],
)
def test_compiled_is_the_meaning(alpha, eps, layout):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, indices = directed(60, 240, 1)
    layouts = {
        "int64": indices,
        "int32": indices.int(),
        "strided": torch.stack([indices, -indices], dim=1)[:, 0],
    }
    seed, bounds = torch.arange(60), torch.tensor([0, 20, 60])
    found = ppr(indptr, layouts[layout], seed, 7, alpha=alpha, eps=eps, bounds=bounds)
    whole = [math.floor(value * 2**62) for value in (alpha, eps)]
    node, score = ppr_plain(indptr, indices, seed, bounds, *whole, 7)
    assert torch.equal(found.node, node)
    assert torch.equal(found.score, score.double() / 2**62)
    units = torch.ops.pyg_scale.ppr(indptr, layouts[layout], seed, bounds, *whole, 7, 1)[1]
    assert torch.equal(units, score)  # to the last bit, which float64 does not have


@pytest.mark.parametrize("alpha", [0.1, 0.15, 0.5])
@pytest.mark.parametrize("eps", [1e-2, 1e-4, 1e-7])
def test_scores_are_within_the_bound_of_the_paper(path, alpha, eps):
    indptr, indices = random_graph(50, 150, 0)
    truth, degree = exact(indptr, indices, alpha)
    found = dense(ppr(indptr, indices, torch.arange(50), 50, alpha=alpha, eps=eps), 50)
    missing = truth - found
    assert float(missing.min()) > -1e-14
    assert bool((missing < eps * degree.clamp(min=1) + 1e-14).all())


def test_in_a_directed_graph_what_is_missing_was_left(path):
    indptr, indices = directed(60, 240, 2)
    truth, degree = exact(indptr, indices, 0.2)
    for eps in (1e-3, 1e-6):
        found = dense(ppr(indptr, indices, torch.arange(60), 60, alpha=0.2, eps=eps), 60)
        missing = truth - found
        assert float(missing.min()) > -1e-14
        assert float(missing.sum(1).max()) < eps * float(degree.clamp(min=1).sum())


def test_the_best_are_the_best_where_they_differ_by_more_than_the_bound(path):
    indptr, indices = random_graph(50, 150, 3)
    truth, degree = exact(indptr, indices, 0.15)
    k, eps = 8, 1e-6
    found = ppr(indptr, indices, torch.arange(50), k, alpha=0.15, eps=eps)
    order = truth.sort(dim=1, descending=True)
    clear = 0
    for seed in range(48):
        gap = order.values[seed, : k + 1].diff().neg()
        if float(gap.min()) > eps * float(degree.max()):
            assert found.node[seed, 0].tolist() == order.indices[seed, :k].tolist()
            clear += 1
    assert clear > 20
    assert bool((found.score.diff(dim=2) <= 0).all())


def test_a_star_in_closed_form(path):
    """The middle has 1 / (2 - alpha), its neighbours share the rest."""
    leaves, alpha = torch.arange(1, 6), 0.25
    indptr, indices = undirected(torch.stack([leaves * 0, leaves]), 6)
    found = ppr(indptr, indices, torch.tensor([0]), 9, alpha=alpha, eps=1e-14)
    assert found.node.view(-1).tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1]  # equal ones by id
    middle = 1 / (2 - alpha)
    expected = torch.tensor([middle] + [(1 - middle) / 5] * 5 + [0] * 3, dtype=torch.float64)
    torch.testing.assert_close(found.score.view(-1), expected, atol=1e-12, rtol=0)


def test_a_path_in_closed_form(path):
    """Along a directed path, what is left of a walk after n steps."""
    indptr, indices = torch.tensor([0, 1, 2, 3, 3]), torch.tensor([1, 2, 3])
    found = ppr(indptr, indices, torch.tensor([0, 3]), 4, alpha=0.5, eps=1e-9)
    assert found.node[:, 0].tolist() == [[0, 1, 2, 3], [3, -1, -1, -1]]  # equal ones by id
    assert found.score[:, 0].tolist() == [[0.5, 0.25, 0.125, 0.125], [1.0, 0, 0, 0]]


def test_a_seed_with_many_neighbours_pushes_all_the_same(path):
    leaves = torch.arange(1, 101)
    indptr, indices = undirected(torch.stack([leaves * 0, leaves]), 101)
    found = ppr(indptr, indices, torch.tensor([0]), 3, alpha=0.15, eps=0.5)
    assert found.node.view(-1).tolist() == [0, -1, -1]
    assert found.score[0, 0, 0] == pytest.approx(0.15)


def test_the_same_for_any_number_of_threads():
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, indices = random_graph(2000, 9000, 3)
    seed, threads, found = torch.arange(2000), torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(ppr(indptr, indices, seed, 10, alpha=0.15, eps=1e-4))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0].node, found[1].node)
    assert torch.equal(found[0].score, found[1].score)
    some = torch.tensor([77, 3])  # nor on the other seeds
    assert torch.equal(
        ppr(indptr, indices, some, 10, alpha=0.15, eps=1e-4).node, found[0].node[some]
    )


@pytest.mark.parametrize("alpha", [0, 1, -0.1, 1e-9, float("nan")])
def test_alpha_must_be_between_none_and_all(alpha):
    indptr, indices = random_graph(10, 20, 3)
    with pytest.raises(ValueError, match="alpha must be at least .* with 0 they never end"):
        ppr(indptr, indices, torch.tensor([0]), 3, alpha=alpha, eps=1e-3)


@pytest.mark.parametrize("eps", [0, 1, -1e-3, 1e-18, float("nan")])
def test_eps_must_be_small(eps):
    indptr, indices = random_graph(10, 20, 3)
    with pytest.raises(ValueError, match="eps must be from"):
        ppr(indptr, indices, torch.tensor([0]), 3, alpha=0.15, eps=eps)
