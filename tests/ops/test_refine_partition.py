"""Refinement of partitions: the compiled op against its meaning, and what both promise."""

import pytest
import torch

from pyg_scale.ops import keys, library
from pyg_scale.ops.refine_partition import refine_partition
from tests.ops.undirected import (
    barbell,
    cut_weight,
    held,
    planted,
    random_graph,
    symmetric_weights,
    undirected,
)


@pytest.fixture(params=["plain", "compiled"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    elif not library.compiled():
        pytest.skip("the kernels are not compiled")


def scattered(num_nodes, num_parts):
    return keys.permutation(1, num_nodes) % num_parts


def equally(weights, num_parts, slack=1.1):
    fair = weights.sum(0).double() / num_parts
    return (fair * slack).ceil().long().expand(num_parts, -1)


@pytest.mark.parametrize("seed", range(12))
def test_compiled_is_the_meaning(seed, monkeypatch):
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    num_nodes, num_parts = 60, 2 + seed % 6
    indptr, indices = random_graph(num_nodes, 150, seed)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(4, (num_nodes, 2), generator=generator)
    capacity = equally(weights, num_parts)
    options = {
        "node_weights": weights,
        "edge_weights": symmetric_weights(indptr, indices) if seed % 3 else None,
        "minimum": capacity * 3 // 5 if seed % 2 else None,
        "patience": 5,
        "key": seed,
    }
    start = torch.randint(num_parts, (num_nodes,), generator=generator)
    indices = torch.stack([indices, indices], dim=1).int()[:, 0] if seed % 2 else indices
    compiled = refine_partition(indptr, indices, start, capacity, **options)
    monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    assert torch.equal(compiled, refine_partition(indptr, indices, start, capacity, **options))
    assert compiled.dtype == torch.int32
    assert not torch.equal(compiled, start.int())


def test_finds_the_one_edge_between_two_cliques(path):
    indptr, indices = undirected(barbell(8), 16)
    found = refine_partition(indptr, indices, scattered(16, 2), torch.tensor([[9], [9]]))
    assert cut_weight(indptr, indices, found) == 1


def test_never_worse_and_within_bounds(path):
    edge_index, _ = planted([40] * 4, 8.0, 2.0, seed=3)
    indptr, indices = undirected(edge_index, 160)
    weights = torch.stack([torch.ones(160).long(), indptr.diff()], dim=1)
    start = scattered(160, 4)
    capacity = torch.maximum(equally(weights, 4), held(start, weights, 4))
    found = refine_partition(indptr, indices, start, capacity, node_weights=weights)
    assert bool((held(found, weights, 4) <= capacity).all())
    before = cut_weight(indptr, indices, start)
    assert cut_weight(indptr, indices, found) < before / 2
    again = refine_partition(indptr, indices, found, capacity, node_weights=weights)
    assert cut_weight(indptr, indices, again) <= cut_weight(indptr, indices, found)


def test_repairs_in_every_column_with_few_moves(path):
    """All in one part: those that must leave do, and with no passes no others."""
    indptr, indices = random_graph(60, 200, 0)
    weights = torch.ones(60, 2, dtype=torch.int64)
    weights[:, 1] = torch.arange(60) < 9
    capacity = equally(weights, 3, 1.0)
    start = torch.zeros(60, dtype=torch.int32)
    found = refine_partition(indptr, indices, start, capacity, node_weights=weights, passes=0)
    assert held(found, weights, 3).tolist() == [[20, 3]] * 3
    assert int((found != start).sum()) == 40


def test_fills_parts_up_to_their_minimum(path):
    indptr, indices = random_graph(60, 200, 0)
    start = (torch.arange(60) >= 55).int()
    minimum = torch.tensor([[0], [20]])
    found = refine_partition(
        indptr, indices, start, torch.full((2, 1), 60), minimum=minimum, passes=0
    )
    assert torch.bincount(found).tolist() == [40, 20]
    assert int((found != start).sum()) == 15


def test_what_cannot_be_repaired_gets_no_worse(path):
    indptr, indices = undirected(barbell(4), 8)
    weights = torch.tensor([[5], [1], [1], [1], [1], [1], [1], [1]])
    capacity = torch.tensor([[4], [6]])  # too little for all
    found = refine_partition(
        indptr, indices, torch.zeros(8).int(), capacity, node_weights=weights, passes=3
    )
    over = (held(found, weights, 2) - capacity).clamp(min=0).sum()
    assert int(over) == 2


def test_no_nodes_and_no_edges(path):
    none = torch.empty(0, dtype=torch.int64)
    capacity = torch.ones(2, 1, dtype=torch.int64)
    assert refine_partition(torch.zeros(1).long(), none, none, capacity).shape == (0,)
    start = torch.zeros(2).int()
    found = refine_partition(torch.zeros(3).long(), none, start, capacity)
    assert sorted(found.tolist()) == [0, 1]
    assert start.tolist() == [0, 0]


def test_the_same_for_any_number_of_threads():
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, indices = random_graph(3000, 20_000, 5)
    start, capacity = scattered(3000, 8), torch.full((8, 1), 410)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(refine_partition(indptr, indices, start, capacity))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"assignment": torch.zeros(3).long()},
            r"assignment must be int32 or int64 of shape \[4\]",
        ),
        ({"assignment": torch.zeros(4)}, "assignment must be int32 or int64"),
        ({"assignment": torch.tensor([0, 0, 2, 0])}, "has parts 0 to 2, but capacity has 2"),
        ({"capacity": torch.tensor([4, 4])}, "capacity must be of shape"),
        ({"capacity": torch.ones(2, 1)}, "capacity must be int64"),
        ({"node_weights": torch.ones(4, 2).long()}, "node_weights must be of shape"),
        ({"node_weights": -torch.ones(4, 1).long()}, "node_weights must not be negative"),
        ({"edge_weights": torch.tensor([1, 1, 0, 0])}, "edge_weights must be above 0"),
        ({"passes": -1}, "must not be negative"),
    ],
)
def test_bad_input(changes, message):
    arguments = {
        "indptr": torch.tensor([0, 1, 2, 3, 4]),
        "indices": torch.tensor([1, 0, 3, 2]),
        "assignment": torch.zeros(4).long(),
        "capacity": torch.full((2, 1), 4),
    }
    with pytest.raises(ValueError, match=message):
        refine_partition(**{**arguments, **changes})


def test_compiled_refuses_what_is_no_graph():
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    indptr, capacity = torch.tensor([0, 1, 2]), torch.full((2, 1), 2)
    with pytest.raises(ValueError, match=r"indices\[1\] is 7, but there are 2 nodes"):
        refine_partition(indptr, torch.tensor([1, 7]), torch.zeros(2).int(), capacity)
    with pytest.raises(ValueError, match="indptr must"):
        refine_partition(indptr, torch.tensor([1]), torch.zeros(2).int(), capacity)
