"""Subgraphs among the best nodes: the nodes of ``ppr``, all edges among them, in any loader."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import subgraph

from pyg_scale.loader import NodeLoader
from pyg_scale.sampler import PPRSampler, ppr

GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture
def data():
    edges = torch.randint(50, (2, 300), generator=GENERATOR)
    return Data(edge_index=edges, x=torch.arange(52)[:, None].float(), num_nodes=52)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_seed_has_its_best_nodes_and_all_edges_among_them(data, workers):
    best = ppr(data, torch.arange(52), 7, eps=1e-3)
    sampler = PPRSampler(data, 6, eps=1e-3)
    loader = NodeLoader(data, sampler, batch_size=8, num_workers=workers)
    seen = 0
    for batch in loader:
        assert torch.equal(batch.x, data.x[batch.n_id])
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        for i, seed in enumerate(batch.input_id.tolist()):
            mine = batch.batch == i
            node = batch.n_id[mine].tolist()
            ranked = [v for v in best.node[seed].tolist() if v >= 0]
            others = [v for v in ranked if v != seed][:6]
            assert node == [seed, *others]
            score = dict(zip(ranked, best.score[seed].tolist()))
            assert batch.score[mine].tolist() == [score.get(v, 0.0) for v in node]
            _, edge = subgraph(torch.tensor(node), data.edge_index, torch.arange(300), num_nodes=52)
            inside = mine[batch.edge_index[0]]
            assert torch.equal(inside, mine[batch.edge_index[1]])
            assert batch.e_id[inside].sort().values.tolist() == edge.tolist()
            seen += 1
    assert seen == 52


def test_processes_and_threads_give_the_same(data):
    sampler = PPRSampler(data, 5)
    runs = [
        list(NodeLoader(data, sampler, batch_size=20, num_workers=1, worker_type=kind))
        for kind in ("thread", "process")
    ]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one.n_id, other.n_id) and torch.equal(one.e_id, other.e_id)
        assert torch.equal(one.score, other.score)


def test_repeated_and_isolated_seeds(data):
    loader = NodeLoader(data, PPRSampler(data, 4), torch.tensor([51, 3, 3]), batch_size=3)
    (batch,) = loader
    assert batch.n_id[:3].tolist() == [51, 3, 3]
    parts = [batch.n_id[batch.batch == i].tolist() for i in range(3)]
    assert parts[0] == [51] and parts[1] == parts[2] and len(parts[1]) == 5
    assert batch.score[0] == 1


def test_int32_stays(data):
    data.edge_index = data.edge_index.int()
    (batch,) = NodeLoader(data, PPRSampler(data, 4), torch.arange(5), batch_size=5)
    assert batch.edge_index.dtype == torch.int32


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 0}, ValueError, "k must be at least 1"),
        ({"k": "3"}, TypeError, "k must be an integer"),
        ({"k": 3, "alpha": 0}, ValueError, "alpha must be at least"),
        ({"k": 3, "eps": 1}, ValueError, "eps must be from"),
    ],
)
def test_wrong_arguments_are_named(data, options, error, message):
    with pytest.raises(error, match=message):
        PPRSampler(data, **options)


def test_types_are_refused():
    hetero = HeteroData()
    hetero["a"].num_nodes = 3
    hetero["a", "to", "a"].edge_index = torch.tensor([[0], [1]])
    with pytest.raises(NotImplementedError, match="PPRSampler needs one type of nodes"):
        PPRSampler(hetero, 3)


def test_more_nodes_than_there_are():
    """All that have a score; the room for them does not grow with ``k``."""
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    sampler = PPRSampler(Data(edge_index=edges, num_nodes=3), k=10**9)
    found = sampler.sample({None: torch.tensor([0])}, None, 0)
    assert sorted(found.node[None].tolist()) == [0, 1, 2]
