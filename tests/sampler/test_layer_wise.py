"""LADIES and FastGCN: probabilities, numbers of nodes, parts, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.loader import NeighborLoader
from pyg_scale.ops.layer_take import layer_shares
from pyg_scale.sampler import FastGCN, Ladies
from pyg_scale.sampler.parts import parts_topology
from pyg_scale.testing import graphs
from pyg_scale.testing.ask import draw
from pyg_scale.testing.sampler import _in_parts
from tests.sampler.graphs import difference

pytestmark = pytest.mark.matrix(3)


def dense(num_nodes=200, num_edges=3000) -> Data:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    return Data(edge_index=edge_index, num_nodes=num_nodes)


@pytest.mark.parametrize("weights", ["sum", "mean", "gcn"])
def test_probabilities_are_in_proportion_to_the_norms_of_columns(weights):
    """A dense matrix in float64 says what they are; weights of edges say what they were."""
    data, seeds = dense(), list(range(30))
    matrix = torch.zeros(200, 200, dtype=torch.float64)
    degree = torch.bincount(data.edge_index[1], minlength=200).double().clamp(min=1)
    source, destination = data.edge_index
    value = {
        "sum": torch.ones(source.numel(), dtype=torch.float64),
        "mean": 1 / degree[destination],
        "gcn": 1 / (degree[destination] * degree[source]).sqrt(),
    }[weights]
    squares = matrix.index_put((destination, source), value.square(), accumulate=True)
    for kind, rows in ((Ladies, seeds), (FastGCN, range(200))):
        norm = squares[list(rows)].sum(dim=0)
        expected = norm * 20 / norm.sum()
        assert float(expected.max()) < 1, "here nothing is certain"
        found = 0
        for key in range(20):
            sample = draw(kind(weights=weights).bind(data, num_neighbors=[20]), seeds, key)
            edge = sample.edge[None]
            p = value[edge] / sample.edge_attrs["edge_weight"][None].double()
            torch.testing.assert_close(p, expected[source[edge]], rtol=1e-4, atol=0)
            found += source[edge].unique().numel() / 20
        if kind is Ladies:
            assert abs(found - 20) < 4, f"{found} sources in a hop instead of about 20"


def test_shares_add_up_to_what_is_wanted():
    norm = torch.tensor([0, 1, 5, 100, 10_000, 10_001, 7])
    for k in (1, 2, 3, 5):
        share = layer_shares(norm, k) / 2**32
        assert float(share[0]) == 0 and float(share.max()) <= 1
        assert abs(float(share.sum()) - k) < 1e-6
    assert (layer_shares(norm, 6) / 2**32).tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert layer_shares(norm, 0).tolist() == [0] * 7


@pytest.mark.parametrize("kind", [Ladies, FastGCN])
@pytest.mark.parametrize("options", [{}, {"weights": "gcn"}, {"hops": "layers"}], ids=str)
def test_parts_and_plain_torch_give_the_same(kind, options, tmp_path, monkeypatch):
    data, seeds = graphs.hostile(), [0, 7, 5, 99, 8]
    sampler = kind(**options).bind(data, num_neighbors=[12, 9])
    in_parts = kind(**options).bind(data, num_neighbors=[12, 9])
    in_parts.topology = parts_topology(_in_parts(data, tmp_path))
    expected = [draw(sampler, seeds, key) for key in range(5)]
    for kernels in ("auto", "never"):
        monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
        for key in range(5):
            assert not difference(draw(in_parts, seeds, key), expected[key])
            assert not difference(draw(sampler, seeds, key), expected[key])
    if kind is FastGCN:
        assert torch.equal(in_parts.column_norms(), sampler.column_norms())


@pytest.mark.parametrize("name", ["ladies", "fastgcn"])
def test_workers_do_not_matter(name):
    def batches(workers):
        loader = NeighborLoader(
            graphs.hostile(), [12, 12], batch_size=16, shuffle=True, seed=3,
            neighbor_sampler=name, num_workers=workers,
        )  # fmt: skip
        return [(b.n_id.tolist(), b.edge_weight.tolist()) for b in loader]

    assert batches(0) == batches(2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Ladies(weights="avg"), ValueError, "weights must be one of"),
        (lambda: FastGCN(hops=2), ValueError, "hops must be one of"),
        (lambda: Ladies(graphs.hetero(), [2]), NotImplementedError, "hetero"),
        (lambda: Ladies(graphs.hostile(), [2], weight_attr="weight"), NotImplementedError, "weig"),
        (lambda: Ladies(graphs.hostile(), [2], time_attr="time"), NotImplementedError, "node_time"),
        (lambda: FastGCN(graphs.hostile(), [2], disjoint=True), NotImplementedError, "disjoint"),
        (lambda: FastGCN(graphs.hostile(), [2], redraw=False), NotImplementedError, "redraw"),
        (lambda: FastGCN(graphs.hostile(), [-3]), ValueError, "num_neighbors must be -1"),
    ],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
