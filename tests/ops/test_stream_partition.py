"""Nodes placed one after the other: by hand, and compiled against plain."""

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.stream_partition import (
    FRACTION,
    breadth_first,
    stream_partition,
    stream_partition_plain,
)
from tests.ops.undirected import random_graph, undirected

needs_kernels = pytest.mark.skipif(not library.compiled(), reason="the kernels are not compiled")


@pytest.fixture(params=["compiled", "plain"])
def path(request, monkeypatch):
    if request.param == "compiled" and not library.compiled():
        pytest.skip("the kernels are not compiled")
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")


def place(indptr, indices, capacity, *, ldg=True, price=0.0, weights=None, order=None, passes=1):
    """The parts and loads after some passes."""
    size = indptr.numel() - 1
    weights = torch.ones(size, 1, dtype=torch.int64) if weights is None else weights
    order = torch.empty(0, dtype=torch.int64) if order is None else order
    capacity = torch.as_tensor(capacity).view(-1, weights.size(1))
    part = torch.full((size,), -1, dtype=torch.int32)
    load = torch.zeros_like(capacity)
    coefficient = torch.full(capacity.shape, price * 2**FRACTION, dtype=torch.float64)
    moved = [
        stream_partition(
            indptr,
            indices,
            weights,
            order,
            part,
            load,
            capacity,
            coefficient,
            ldg=ldg,
            begin=0,
            end=size,
        )
        for _ in range(passes)
    ]
    held = torch.zeros_like(load).index_add_(0, part.long(), weights)
    assert torch.equal(held, load)
    return part.tolist(), moved


PATH = undirected(torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]), 6)


def test_a_path_by_hand(path):
    # 0 opens part 0; its neighbours follow while there is room; 3 finds none, and opens part 1
    assert place(*PATH, [3, 3]) == ([0, 0, 0, 1, 1, 1], [6])
    # each node of a pass in the order 5, 4, ...: 5 begins at part 5 % 2
    order = torch.arange(5, -1, -1)
    assert place(*PATH, [3, 3], order=order)[0] == [0, 0, 0, 1, 1, 1]
    assert place(*PATH, [3, 3], passes=2)[1] == [6, 0]


def test_the_price_of_fennel(path):
    # without a price all follow the first node; with a high one, parts fill up in turn
    assert place(*PATH, [6, 6], ldg=False)[0] == [0] * 6
    part, _ = place(*PATH, [6, 6], ldg=False, price=100.0)
    assert torch.bincount(torch.tensor(part)).tolist() == [3, 3]


def test_nothing_has_room(path):
    """Node 2 weighs more than any part holds: it goes where least is missing."""
    weights = torch.tensor([[1], [1], [9], [1], [1], [1]])
    part, _ = place(*PATH, [4, 8], weights=weights)
    assert part[2] == 1


def test_a_node_that_weighs_nothing_goes_to_its_neighbours(path):
    weights = torch.tensor([[1], [1], [1], [0], [1], [1]])
    part, _ = place(*PATH, [3, 3], weights=weights)
    assert part[3] == 0  # part 0 is full, but this takes no room


@needs_kernels
@pytest.mark.parametrize("ldg", [True, False])
@pytest.mark.parametrize("num_parts", [2, 7])
@pytest.mark.parametrize("columns", [1, 3])
def test_compiled_is_plain(ldg, num_parts, columns):
    indptr, indices = random_graph(120, 500, num_parts + columns)
    generator = torch.Generator().manual_seed(columns)
    weights = torch.randint(0, 4, (120, columns), generator=generator)
    capacity = (weights.sum(0) * 1.05 / num_parts).long().expand(num_parts, -1) + 2
    capacity = capacity.contiguous()
    price = torch.rand(num_parts, columns, generator=generator, dtype=torch.float64) * 2**FRACTION
    order = torch.randperm(120, generator=generator)
    found = []
    variants = [
        (stream_partition_plain, indices, order, weights, torch.int32),
        (stream_partition_plain, indices, order, weights, torch.int8),
        (torch.ops.pyg_scale.stream_partition, indices, order, weights, torch.int32),
        (
            torch.ops.pyg_scale.stream_partition,
            torch.stack([indices.int(), -indices.int()], 1)[:, 0],
            order.int(),
            weights.t().contiguous().t(),
            torch.int8,
        ),
    ]
    for op, neighbors, nodes, weight, dtype in variants:
        part = torch.full((120,), -1, dtype=dtype)
        load = torch.zeros_like(capacity)
        moved = [
            op(indptr, neighbors, weight, nodes, part, load, capacity, price, ldg, begin, end)
            for _ in range(3)
            for begin, end in ((0, 50), (50, 51), (51, 120))
        ]
        found.append((part.tolist(), load.tolist(), moved))
    assert all(each == found[0] for each in found)
    assert len(set(found[0][0])) == num_parts


def test_breadth_first(path):
    edges = torch.tensor([[5, 5, 1, 0, 3], [1, 4, 2, 3, 6]])
    indptr, indices = undirected(edges, 8)
    assert breadth_first(indptr, indices).tolist() == [0, 3, 6, 1, 2, 5, 4, 7]
    indptr, indices = random_graph(60, 70, 1)
    found = breadth_first(indptr, indices)
    assert sorted(found.tolist()) == list(range(60))
    for v in range(60):  # the order of neighbours is of no account
        indices[indptr[v] : indptr[v + 1]] = indices[indptr[v] : indptr[v + 1]].flip(0)
    assert torch.equal(breadth_first(indptr, indices), found)


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": torch.full((10,), 6)}, "no node 6"),
        ({"indices": torch.zeros(3, dtype=torch.int64)}, "indptr does not fit"),
        ({"part": torch.full((6,), 2, dtype=torch.int32)}, "no such part"),
        ({"part": torch.tensor([-1] * 5 + [-2], dtype=torch.int8), "end": 1}, "no such part"),
        (
            {
                "load": torch.zeros(128, 1).long(),
                "capacity": torch.ones(128, 1).long(),
                "coefficient": torch.zeros(128, 1).double(),
                "part": torch.full((6,), -1, dtype=torch.int8),
            },
            "too many parts",
        ),
        ({"part": torch.full((6,), -1)}, "part must be"),
        ({"order": torch.tensor([0, 1, 2, 3, 4, 6])}, "no node 6"),
        ({"order": torch.tensor([0])}, "order must name every node"),
        ({"weights": torch.ones(5, 1, dtype=torch.int64)}, "weights must be"),
        ({"load": torch.zeros(2, 2, dtype=torch.int64)}, "load must be"),
        ({"end": 7}, "no such nodes"),
    ],
)
def test_compiled_refuses_what_does_not_fit(change, message):
    arguments = {
        "indptr": PATH[0],
        "indices": PATH[1],
        "weights": torch.ones(6, 1, dtype=torch.int64),
        "order": torch.empty(0, dtype=torch.int64),
        "part": torch.full((6,), -1, dtype=torch.int32),
        "load": torch.zeros(2, 1, dtype=torch.int64),
        "capacity": torch.full((2, 1), 3),
        "coefficient": torch.zeros(2, 1, dtype=torch.float64),
        "ldg": True,
        "begin": 0,
        "end": 6,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        torch.ops.pyg_scale.stream_partition(*arguments.values())
