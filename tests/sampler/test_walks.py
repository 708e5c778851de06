"""``pyg_scale.sampler.random_walk``: along edges, the same for whoever asks, and typed errors."""

import gc

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale.ops import keys
from pyg_scale.sampler import random_walk
from pyg_scale.sampler import walk_graph as module
from pyg_scale.testing import statistics

GENERATOR = torch.Generator().manual_seed(0)
EDGES = torch.randint(50, (2, 300), generator=GENERATOR)
WEIGHT = torch.rand(300, generator=GENERATOR)
WAYS = [{}, {"p": 0.5, "q": 2.0}, {"weight": WEIGHT}, {"weight": WEIGHT, "p": 3.0}]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_edge_ids_are_those_of_the_steps(options, dtype):
    edges = EDGES.to(dtype)
    node, edge = random_walk(edges, torch.arange(50), 7, seed=3, return_edge_id=True, **options)
    assert node.shape == (50, 8) and edge.shape == (50, 7)
    assert node.dtype == edge.dtype == torch.int64
    moved = edge >= 0
    assert torch.equal(EDGES[0][edge[moved]], node[:, :-1][moved])
    assert torch.equal(EDGES[1][edge[moved]], node[:, 1:][moved])
    assert torch.equal(node[:, 1:][~moved], node[:, :-1][~moved])
    assert torch.equal(random_walk(edges, torch.arange(50), 7, seed=3, **options), node)


@pytest.mark.parametrize("options", WAYS)
def test_walks_do_not_depend_on_the_order_of_edges(options):
    simple = torch.unique(EDGES, dim=1)
    order = torch.randperm(simple.size(1), generator=torch.Generator().manual_seed(1))
    given, other = dict(options), dict(options)
    if "weight" in options:
        given["weight"] = WEIGHT[: simple.size(1)]
        other["weight"] = given["weight"][order]
    start = torch.arange(50)
    found = random_walk(simple, start, 9, seed=7, **given)
    assert torch.equal(random_walk(simple[:, order], start, 9, seed=7, **other), found)


def test_edges_are_followed_from_source_to_destination():
    path = torch.tensor([[0, 1, 2], [1, 2, 3]])
    node, edge = random_walk(path, [0, 3, 1], 4, return_edge_id=True)
    assert node.tolist() == [[0, 1, 2, 3, 3], [3] * 5, [1, 2, 3, 3, 3]]
    assert edge.tolist() == [[0, 1, 2, -1], [-1] * 4, [1, 2, -1, -1]]


def test_every_kind_of_graph_gives_the_same_walks():
    data = Data(edge_index=EDGES, rating=WEIGHT, num_nodes=53)
    start = torch.arange(53)
    for options in ({}, {"p": 0.2, "q": 0.3}):
        expected = random_walk(EDGES, start, 6, num_nodes=53, seed=1, **options)
        assert torch.equal(random_walk(data, start, 6, seed=1, **options), expected)
        assert torch.equal(random_walk((data, data), start, 6, seed=1, **options), expected)
    weighted = random_walk(EDGES, start, 6, weight=WEIGHT, num_nodes=53, seed=1)
    assert torch.equal(random_walk(data, start, 6, weight="rating", seed=1), weighted)
    assert not torch.equal(weighted, expected)
    assert bool((weighted[50:] == start[50:, None]).all())  # isolated


def test_processes_that_share_walks_get_what_one_would():
    start = torch.arange(40) % 50
    together = random_walk(EDGES, start, 5, p=0.5, seed=11)
    halves = [
        random_walk(EDGES, start[rank::2], 5, p=0.5, seed=11, walk=torch.arange(40)[rank::2])
        for rank in (0, 1)
    ]
    assert torch.equal(together[0::2], halves[0]) and torch.equal(together[1::2], halves[1])


def test_torch_generator_is_the_seed_of_last_resort():
    torch.manual_seed(5)
    first = random_walk(EDGES, [0] * 30, 4)
    second = random_walk(EDGES, [0] * 30, 4)
    torch.manual_seed(5)
    assert torch.equal(random_walk(EDGES, [0] * 30, 4), first)
    assert not torch.equal(first, second)


def test_the_key_is_as_specified():
    star = torch.tensor([[0, 0, 0], [1, 2, 3]])
    node = random_walk(star, [0] * 20, 1, seed=9)
    for number, (_, end) in enumerate(node.tolist()):
        key = keys.fold(0, 9, keys.WALK)
        word = torch.tensor(keys.to_signed(keys.fold(key, number, 0, 0)))
        assert end == 1 + int(keys.bounded(word, 0, torch.tensor(3)))


def test_parallel_edges_count_each_for_itself():
    edges = torch.tensor([[0, 0, 0, 0], [2, 1, 2, 2]])
    node, edge = random_walk(edges, [0] * 8000, 1, seed=1, return_edge_id=True)
    statistics.require(statistics.multinomial(torch.bincount(edge.view(-1), minlength=4)), "edges")
    assert torch.equal(node[:, 1] == 1, edge.view(-1) == 1)


def test_edges_changed_in_place_are_seen_and_nothing_is_kept():
    edges = torch.tensor([[0, 1], [1, 0]])
    assert random_walk(edges, [0], 2).tolist() == [[0, 1, 0]]
    graph = module._held_tensors[edges]
    random_walk(edges, [0], 2)
    assert module._held_tensors[edges] is graph
    edges[1, 0] = 0
    assert random_walk(edges, [0], 2, num_nodes=2).tolist() == [[0, 0, 0]]
    held = len(module._held_tensors)
    del edges
    gc.collect()
    assert len(module._held_tensors) == held - 1


def test_the_edges_of_data_are_grouped_once_and_forgotten_with_it():
    data = Data(edge_index=EDGES.clone(), num_nodes=50)
    first = random_walk(data, [0], 2, seed=1)
    ((_, graphs),) = [entry for entry in module._held.values() if entry[0]() is data]
    (before,) = graphs.values()
    assert torch.equal(random_walk(data, [0], 2, seed=1), first)
    assert tuple(graphs.values()) == (before,)
    data.edge_index = EDGES.flip(0)
    random_walk(data, [0], 2)
    (after,) = graphs.values()
    assert after is not before
    held = len(module._held)
    del data
    gc.collect()
    assert len(module._held) == held - 1


def test_no_walks_and_no_edges():
    none = torch.empty(2, 0, dtype=torch.int64)
    assert random_walk(EDGES, torch.empty(0, dtype=torch.int64), 3).shape == (0, 4)
    node, edge = random_walk(none, [1], 2, num_nodes=3, return_edge_id=True, q=2.0)
    assert node.tolist() == [[1, 1, 1]] and edge.tolist() == [[-1, -1]]
    assert random_walk(EDGES, [4], 0).tolist() == [[4]]


WRONG = [
    ({"walk_length": -1}, ValueError, "walk_length must not be negative"),
    ({"walk_length": 2.5}, TypeError, "walk_length must be an integer"),
    ({"start": [50]}, IndexError, "start: node 50 does not exist, there are 50: set num_nodes"),
    ({"start": [-1]}, IndexError, "start: node -1 does not exist"),
    ({"start": torch.ones(50, dtype=torch.bool)}, TypeError, "start must be node ids, int64"),
    ({"start": torch.zeros(2, 2).long()}, TypeError, "start must be node ids"),
    ({"p": 0}, ValueError, "p must be a positive, finite number"),
    ({"q": float("nan")}, ValueError, "q must be a positive, finite number"),
    ({"q": "2"}, TypeError, "q must be a number"),
    ({"weight": -WEIGHT}, ValueError, "weight: the weight of edge 0 is -.*must be finite and not"),
    ({"weight": WEIGHT * torch.nan}, ValueError, "weight: the weight of edge 0 is nan"),
    ({"weight": WEIGHT[:9]}, ValueError, "there are 9 weights for 300 edges"),
    ({"weight": "rating"}, TypeError, "edge_index has no attributes"),
    ({"seed": 0.5}, TypeError, "seed must be an integer"),
    ({"walk": torch.arange(3)}, ValueError, "walk must have a number for each of the 1 walks"),
    ({"walk": torch.rand(1)}, TypeError, "walk must be int64 or int32"),
    ({"start": None}, TypeError, "start must be node ids, int64.*got None"),
    ({"return_edge_id": 2}, TypeError, "return_edge_id must be True or False"),
    ({"num_nodes": 3}, IndexError, "there are 3"),
    ({"data": EDGES[0]}, ValueError, r"edge_index must be \[2, num_edges\]"),
    ({"data": EDGES.float()}, TypeError, "int64 or int32"),
    ({"data": HeteroData()}, NotImplementedError, "one type of nodes and edges"),
    ({"data": Data(edge_index=EDGES, num_nodes=50), "num_nodes": 60}, ValueError, "data.num_nodes"),
    (
        {"data": Data(edge_index=EDGES, num_nodes=50), "weight": "rating"},
        ValueError,
        "weight='rating': the graph has no such attribute",
    ),
    (
        {"data": Data(edge_index=EDGES, num_nodes=50), "weight": WEIGHT},
        TypeError,
        "weight must be the name of an attribute",
    ),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_arguments_are_named(case):
    changes, error, message = WRONG[case]
    arguments = {"data": EDGES, "start": [0], "walk_length": 3, "num_nodes": None, **changes}
    if "num_nodes" not in changes:
        del arguments["num_nodes"]
    with pytest.raises(error, match=message):
        random_walk(**arguments)
