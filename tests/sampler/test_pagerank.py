"""``pyg_scale.sampler.ppr``: along in-edges, types together, and typed errors."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale.sampler import ppr

GENERATOR = torch.Generator().manual_seed(0)
EDGES = torch.randint(50, (2, 300), generator=GENERATOR)


@pytest.fixture
def hetero():
    data = HeteroData()
    data["paper"].num_nodes, data["author"].num_nodes = 4, 3
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 3]])
    data["paper", "rev_writes", "author"].edge_index = torch.tensor([[0, 0, 1, 3], [0, 1, 1, 2]])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[2, 0], [1, 1]])
    return data


def test_in_edges_are_followed_unless_told_otherwise():
    path = torch.tensor([[0, 1, 2], [1, 2, 3]])
    assert ppr(path, [3], 4, alpha=0.5).node.tolist() == [[3, 2, 0, 1]]  # 0 and 1: the same score
    assert ppr(path, [0], 4, alpha=0.5).node.tolist() == [[0, -1, -1, -1]]
    backward = ppr(path, [0], 4, alpha=0.5, sample_direction="backward")
    assert backward.node.tolist() == [[0, 1, 2, 3]]
    assert torch.equal(backward.score, ppr(path.flip(0), [0], 4, alpha=0.5).score)
    assert backward.score.tolist() == [[0.5, 0.25, 0.125, 0.125]]


def test_the_order_of_edges_and_the_kind_of_graph_do_not_matter():
    data, seed = Data(edge_index=EDGES, num_nodes=52), torch.arange(52)
    found = ppr(data, seed, 6, eps=1e-3)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    for other in (EDGES[:, order], EDGES.int()):
        again = ppr(other, seed, 6, eps=1e-3, num_nodes=52)
        assert torch.equal(again.node, found.node) and torch.equal(again.score, found.score)
    assert torch.equal(ppr((data, data), seed, 6, eps=1e-3).node, found.node)
    assert found.node[50].tolist() == [50, -1, -1, -1, -1, -1] and found.score[50, 0] == 1
    assert torch.equal(ppr(EDGES, seed[:50], 3, eps=1e-3).node, found.node[:50, :3])


def test_types_are_ranked_together_and_given_apart(hetero):
    found = ppr(hetero, ("paper", [0, 1, 2]), 4, eps=1e-9)
    flat = hetero.to_homogeneous()
    whole = ppr(flat, torch.tensor([0, 1, 2]), 7, eps=1e-9)
    assert set(found) == {"paper", "author"}
    score = torch.zeros(3, 8, dtype=torch.float64)
    score.scatter_(1, torch.where(whole.node < 0, 7, whole.node), whole.score)
    for node_type, first in (("paper", 0), ("author", 4)):
        node, own = found[node_type]
        assert node.shape == own.shape == (3, 4)
        there = node >= 0
        assert torch.equal(own[there], score.gather(1, (node + first).clamp(min=0))[there])
        assert bool((own[~there] == 0).all()) and int(node.max()) < (4 if first == 0 else 3)
    total = found["paper"].score.sum(1) + found["author"].score.sum(1)
    assert bool((total > 1 - 1e-6).all())
    assert found["paper"].node[2].tolist() == [2, -1, -1, -1]  # no in-edges
    assert found["author"].node[2].tolist() == [-1] * 4


def test_edge_types_can_be_chosen(hetero):
    cites = ("paper", "cites", "paper")
    found = ppr(hetero, ("paper", [1]), 3, edge_types=[cites])
    assert found["paper"].node.tolist() == [[0, 2, 1]]
    assert found["author"].node.tolist() == [[-1] * 3]
    both = ppr(hetero, ("paper", [1]), 3)
    assert both["author"].node[0, 0] >= 0
    assert ppr(hetero, ("author", [0]), 2, edge_types=[])["author"].score.tolist() == [[1.0, 0.0]]


def test_no_seeds():
    found = ppr(EDGES, torch.empty(0, dtype=torch.int64), 3)
    assert found.node.shape == found.score.shape == (0, 3)


WRONG = [
    ({"alpha": 0}, ValueError, "alpha must be at least"),
    ({"alpha": 1.0}, ValueError, "alpha must be at least"),
    ({"alpha": "0.1"}, TypeError, "alpha must be a number"),
    ({"eps": 0}, ValueError, "eps must be from"),
    ({"k": 0}, ValueError, "k must be at least 1"),
    ({"k": 2.5}, TypeError, "k must be an integer"),
    ({"seed": [50]}, IndexError, "seed: node 50 does not exist, there are 50"),
    ({"seed": torch.ones(50, dtype=torch.bool)}, TypeError, "seed must be node ids"),
    ({"sample_direction": "in"}, ValueError, "sample_direction must be one of"),
    ({"edge_types": [("a", "b", "c")]}, ValueError, "edge_types is for graphs that have them"),
    ({"data": EDGES[0]}, ValueError, r"edge_index must be \[2, num_edges\]"),
    ({"data": "graph"}, TypeError, "data must be Data, HeteroData"),
    ({"num_nodes": "50"}, TypeError, "num_nodes must be an integer"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_arguments_are_named(case):
    changes, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        ppr(**{"data": EDGES, "seed": [0], "k": 3, **changes})


def test_wrong_types_are_named(hetero):
    with pytest.raises(TypeError, match="seed must be a pair of node type and ids"):
        ppr(hetero, [0], 3)
    with pytest.raises(ValueError, match="seed is of node type 'venue', but the node types are"):
        ppr(hetero, ("venue", [0]), 3)
    with pytest.raises(IndexError, match="seed: node 3 does not exist, there are 3"):
        ppr(hetero, ("author", [3]), 3)
    with pytest.raises(ValueError, match="edge_types has .*'reads'.*, but the edge types are"):
        ppr(hetero, ("author", [0]), 3, edge_types=[("author", "reads", "paper")])
