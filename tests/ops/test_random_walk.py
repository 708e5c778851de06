"""Random walks: along edges, fair, and a function of integers alone."""

import pytest
import torch

from pyg_scale.ops import keys, library
from pyg_scale.ops.random_walk import random_walk as walks_of
from pyg_scale.ops.random_walk import random_walk_plain
from tests.ops.undirected import random_graph, rows


def random_walk(*args, **kwargs):
    return walks_of(*args, **kwargs).node


@pytest.fixture(params=["plain", "compiled"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    elif not library.compiled():
        pytest.skip("the kernels are not compiled")


@pytest.mark.parametrize("layout", ["int64", "int32", "strided"])
def test_compiled_is_the_meaning(layout):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, indices = random_graph(50, 150, 0)
    layouts = {
        "int64": indices,
        "int32": indices.int(),
        "strided": torch.stack([indices, -indices], dim=1)[:, 0],
    }
    start, walk = torch.arange(500) % 50, torch.arange(500) * 7 + 3
    found = random_walk(indptr, layouts[layout], start, 9, walk=walk, key=2**64 - 5)
    assert torch.equal(
        found, random_walk_plain(indptr, indices, None, start, walk, 9, 2**64 - 5).node
    )
    assert found.shape == (500, 10)


def test_steps_follow_edges_and_nobody_leaves_an_isolated_node(path):
    indptr, indices = random_graph(50, 150, 1)
    joined = torch.zeros(50, 50, dtype=torch.bool)
    joined[rows(indptr), indices] = True
    alone = (indptr.diff() == 0).nonzero().view(-1)
    assert alone.numel() >= 2
    joined[alone, alone] = True
    walks = random_walk(indptr, indices, torch.arange(50), 20)
    assert bool(joined[walks[:, :-1], walks[:, 1:]].all())
    assert torch.equal(walks[:, 0], torch.arange(50))


def test_a_step_as_it_is_specified(path):
    indptr, indices = torch.tensor([0, 3, 4, 5, 6]), torch.tensor([1, 2, 3, 0, 0, 0])
    walks = random_walk(indptr, indices, torch.zeros(40).long(), 1, walk=torch.arange(40), key=9)
    for number, (_, node) in enumerate(walks.tolist()):
        key = torch.tensor(keys.to_signed(keys.fold(9, number, 0, 0)))
        assert node == 1 + int(keys.bounded(key, 0, torch.tensor(3)))


def test_every_neighbour_is_as_likely(path):
    indptr = torch.tensor([0, 5, 6, 7, 8, 9, 10])
    indices = torch.tensor([1, 2, 3, 4, 5, 0, 0, 0, 0, 0])
    walks = random_walk(indptr, indices, torch.zeros(20_000).long(), 3)
    for step in (1, 3):
        count = torch.bincount(walks[:, step], minlength=6)[1:]
        assert bool(((count - 4000).abs() < 4 * (20_000 * 0.2 * 0.8) ** 0.5).all())
    pairs = walks[:, 1] * 6 + walks[:, 3]  # steps are independent of each other
    assert int(torch.bincount(pairs).max()) < 800 + 4 * 800**0.5


def test_a_walk_depends_on_its_own_numbers_alone(path):
    indptr, indices = random_graph(60, 300, 3)
    start = torch.arange(600) % 60
    walks = random_walk(indptr, indices, start, 6, key=5)
    some = torch.tensor([3, 599, 77, 3])
    assert torch.equal(random_walk(indptr, indices, start[some], 6, walk=some, key=5), walks[some])
    assert torch.equal(random_walk(indptr, indices, start, 3, key=5), walks[:, :4])
    assert not torch.equal(random_walk(indptr, indices, start, 6, key=6), walks)


def test_the_same_for_any_number_of_threads():
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, indices = random_graph(1000, 5000, 3)
    start, threads, found = torch.arange(40_000) % 1000, torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(random_walk(indptr, indices, start, 5))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_nothing(path):
    indptr, indices = random_graph(10, 20, 3)
    none = torch.empty(0, dtype=torch.int64)
    assert random_walk(indptr, indices, none, 4).shape == (0, 5)
    assert random_walk(indptr, indices, torch.tensor([3]), 0).tolist() == [[3]]


def test_bad_input(monkeypatch):
    indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    one = torch.zeros(1).long()
    with pytest.raises(ValueError, match="start and walk must be int64"):
        random_walk(indptr, indices, one.int(), 2)
    for kernels in ("auto", "never"):
        monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
        with pytest.raises(ValueError, match=r"\[n\] of the same length \(got .*int64 \[2, 1\]\)"):
            random_walk(indptr, indices, torch.zeros(2, 1).long(), 2)
    with pytest.raises(ValueError, match="of the same length"):
        random_walk(indptr, indices, one, 2, walk=torch.arange(3))
    with pytest.raises(ValueError, match="length must not be negative"):
        random_walk(indptr, indices, one, -1)
    if library.compiled():
        with pytest.raises(ValueError, match="start: node 2 is out of range, there are 2"):
            random_walk(indptr, indices, one + 2, 1)
        with pytest.raises(ValueError, match="indices: node -4 is out of range"):
            random_walk(indptr, torch.tensor([-4, 0]), one, 1)
        with pytest.raises(ValueError, match="weight_prefix must rise .* at node 0"):
            random_walk(indptr, indices, one, 1, weight_prefix=torch.tensor([-4, 1]))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-309])
@pytest.mark.parametrize("name", ["p", "q"])
def test_odds_must_be_positive(name, value):
    indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    with pytest.raises(ValueError, match=f"{name} must be a positive, finite number"):
        random_walk(indptr, indices, torch.zeros(1).long(), 2, **{name: value})
