"""GraphSAINT's subgraphs are induced, drawn with its probabilities, and normalised as PyG does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.loader
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import degree, subgraph

from pyg_scale.loader import (
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
)
from pyg_scale.testing import statistics
from tests.loader.batches import assert_same_batches

N, E = 30, 120
DATA = Data(
    x=torch.arange(N).view(-1, 1).float(),
    edge_index=torch.randint(N - 2, (2, E), generator=torch.Generator().manual_seed(1)),
    edge_attr=torch.arange(E),
    y=torch.arange(N) % 3,
    name="of all",
)
MAKE: dict[str, Callable[..., Any]] = {
    "node": lambda size=6, **kw: GraphSAINTNodeSampler(DATA, size, **{"log": False} | kw),
    "edge": lambda size=6, **kw: GraphSAINTEdgeSampler(DATA, size, **{"log": False} | kw),
    "walk": lambda size=4, **kw: GraphSAINTRandomWalkSampler(DATA, size, 2, **{"log": False} | kw),
}
every = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@every
def test_batches_are_induced_subgraphs(make: Callable[..., Any]) -> None:
    loader = make(num_steps=7, seed=1)
    batches = list(loader)
    assert len(loader) == len(batches) == 7
    assert isinstance(loader, torch_geometric.loader.GraphSAINTSampler)
    assert isinstance(loader, getattr(torch_geometric.loader, type(loader).__name__))
    for batch in batches:
        node = batch.x[:, 0].long()
        assert torch.equal(node, node.unique()) and 0 < batch.num_nodes == node.numel() < N
        _, ids = subgraph(node, DATA.edge_index, DATA.edge_attr, num_nodes=N)
        assert torch.equal(batch.edge_attr.sort().values, ids)
        assert torch.equal(node[batch.edge_index], DATA.edge_index[:, batch.edge_attr])
        assert torch.equal(batch.y, DATA.y[node]) and batch.name == "of all"
        assert "node_norm" not in batch


@every
def test_edges_without_attributes_are_the_same(make: Callable[..., Any], monkeypatch: Any) -> None:
    whole, bare = list(make(num_steps=3, seed=1)), DATA.clone()
    del bare.edge_attr
    monkeypatch.setitem(globals(), "DATA", bare)
    for batch, other in zip(make(num_steps=3, seed=1), whole, strict=True):
        assert torch.equal(batch.edge_index, other.edge_index) and "edge_attr" not in batch


def test_draws_have_the_probabilities_of_pyg() -> None:
    row, col = DATA.edge_index
    out, into = degree(row, N), degree(col, N)
    draws = 1_500
    found = [batch.x[0, 0].long() for batch in MAKE["node"](1, num_steps=draws, seed=2)]
    statistics.require(
        statistics.multinomial(torch.stack(found).bincount(minlength=N), out), "node"
    )
    first = MAKE["walk"](1, num_steps=draws, seed=2)
    first.walk_length = 0
    found = [batch.x[0, 0].long() for batch in first]
    count = torch.stack(found).bincount(minlength=N)
    statistics.require(statistics.multinomial(count), "starts of walks")
    loader = MAKE["edge"](1, num_steps=draws, seed=2)
    pair = torch.stack([batch.x[[0, -1], 0].long() for batch in loader])
    cell = torch.minimum(row, col) * N + torch.maximum(row, col)
    weight = torch.zeros(N * N).index_add_(0, cell, into[row] + out[col])
    count = (pair[:, 0] * N + pair[:, 1]).bincount(minlength=N * N)
    statistics.require(statistics.multinomial(count, weight), "edges")


def test_walks_go_along_edges() -> None:
    path = Data(edge_index=torch.stack([torch.arange(9), torch.arange(1, 10)]), num_nodes=10)
    path.number = torch.arange(10)
    for batch in GraphSAINTRandomWalkSampler(path, 1, 3, num_steps=20, seed=3):
        begin = int(batch.number[0])
        assert batch.number.tolist() == list(range(begin, min(begin + 4, 10)))


@every
@pytest.mark.parametrize(
    "workers",
    [{"num_workers": 2}, {"num_workers": 2, "worker_type": "process"}],
    ids=str,
)
def test_any_workers_and_resuming(make: Callable[..., Any], workers: dict[str, Any]) -> None:
    options = {"num_steps": 6, "seed": 3, "sample_coverage": 2}
    alone = make(**options)
    expected = [*alone, *alone]
    assert not torch.equal(expected[0].x, expected[6].x) or not torch.equal(
        expected[1].x, expected[7].x
    )
    first = make(**options, **workers)
    begun = list(itertools.islice(first, 4))
    second = make(**options, **workers)
    second.load_state_dict(first.state_dict())
    assert_same_batches(expected, [*begun, *second, *second])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.slow] if name != "node" else [])
        for name, make in MAKE.items()
    ],
)
def test_norms_make_sums_over_batches_unbiased(make: Callable[..., Any]) -> None:
    """Of many samples, norms times how often nodes come are equal, and so are those of edges."""
    loader = make(sample_coverage=2_000, num_steps=50, seed=1)
    node = torch.zeros(N)
    edge = torch.zeros(E)
    steps = 2_000
    for i in range(steps):
        found = loader._induced(10**6 + i)
        node[found.node] += 1
        edge[found.edge] += 1
    source = node[DATA.edge_index[0]]
    often = node > 150
    assert often.sum() > 5
    close = (loader.node_norm * node * N / steps)[often]
    assert ((close - 1).abs() < 0.3).all()
    often = edge > 150
    close = (loader.edge_norm * edge / source)[often]
    assert often.sum() > 3 and ((close - 1).abs() < 0.3).all()
    assert loader.node_norm.dtype == loader.edge_norm.dtype == torch.float32
    never = node == 0
    assert (loader.node_norm[never] > loader.node_norm[~never].max()).all()


TINY = Data(edge_index=torch.tensor([[0, 1, 1, 2, 3, 3], [1, 2, 2, 1, 3, 0]]), num_nodes=5)


@pytest.mark.parametrize("cls", [GraphSAINTNodeSampler, GraphSAINTEdgeSampler])
def test_means_and_variances_with_and_without_norms(cls: Any) -> None:
    """Both are those of all draws that there are; without norms, the mean is another."""
    row, col = TINY.edge_index.tolist()
    weight = [1.0] * 6
    if cls is GraphSAINTEdgeSampler:
        weight = [float(col.count(u) + row.count(v)) for u, v in zip(row, col, strict=True)]
    drawn: dict[frozenset[int], float] = {}
    for first, second in itertools.product(range(6), repeat=2):
        found = {row[first], row[second]}
        if cls is GraphSAINTEdgeSampler:
            found |= {col[first], col[second]}
        chance = weight[first] * weight[second] / sum(weight) ** 2
        drawn[frozenset(found)] = drawn.get(frozenset(found), 0.0) + chance
    odds = [sum(chance for nodes, chance in drawn.items() if v in nodes) for v in range(5)]
    value = [0.3, -1.0, 2.0, 9.0, 0.0]  # the last one is never drawn
    data = Data(edge_index=TINY.edge_index, num_nodes=5, value=torch.tensor(value))
    seen: dict[bool, list[float]] = {True: [], False: []}
    for batch in cls(data, 2, num_steps=4_000, sample_coverage="exact", seed=3, log=False):
        seen[True].append(float((batch.node_norm * batch.value).sum()))
        seen[False].append(float(batch.value.mean()))
    means = {}
    for with_norms, found_values in seen.items():
        results = [
            (
                chance,
                sum(value[v] / (5 * odds[v]) for v in nodes)
                if with_norms
                else sum(value[v] for v in nodes) / len(nodes),
            )
            for nodes, chance in drawn.items()
        ]
        means[with_norms] = mean = sum(chance * z for chance, z in results)
        variance, fourth = (
            sum(chance * (z - mean) ** power for chance, z in results) for power in (2, 4)
        )
        observed = torch.tensor(found_values, dtype=torch.float64)
        count = observed.numel()
        assert abs(observed.mean() - mean) < 4 * math.sqrt(variance / count)
        spread = math.sqrt((fourth - variance**2) / count)
        assert abs((observed - mean).square().mean() - variance) < 4 * spread
    assert means[True] == pytest.approx(sum(value) / 5)
    assert abs(means[False] - sum(value) / 5) > 0.1


@pytest.mark.parametrize("draws", [1, 2, 4])
@pytest.mark.parametrize("cls", [GraphSAINTNodeSampler, GraphSAINTEdgeSampler])
def test_exact_norms_are_those_of_all_draws_that_there_are(cls: Any, draws: int) -> None:
    """A self-loop, parallel and opposite edges, a node without edges and one that is no source."""
    row, col = TINY.edge_index.tolist()
    weight = [1.0] * 6
    if cls is GraphSAINTEdgeSampler:
        weight = [float(col.count(u) + row.count(v)) for u, v in zip(row, col, strict=True)]
    node, edge = [0.0] * 5, [0.0] * 6
    for drawn in itertools.product(range(6), repeat=draws):
        chance = math.prod(weight[e] / sum(weight) for e in drawn)
        found = {row[e] for e in drawn}
        if cls is GraphSAINTEdgeSampler:
            found |= {col[e] for e in drawn}
        for v in found:
            node[v] += chance
        for e in range(6):
            edge[e] += chance * (row[e] in found and col[e] in found)
    loader = cls(TINY, draws, sample_coverage="exact", log=False)
    wanted = [1 / (5 * p) if p else 0 for p in node]
    assert loader.node_norm.tolist() == pytest.approx(wanted, rel=1e-5)
    for found, u, p in zip(loader.edge_norm.tolist(), row, edge, strict=True):
        # What no batch has may be 0 or the largest norm, as its chance is 0 but for rounding.
        assert found == pytest.approx(node[u] / p, rel=1e-5) if p else found in (0, 1e4)
    batch = next(iter(loader))
    assert batch.node_norm.numel() == batch.num_nodes
    assert batch.edge_norm.numel() == batch.num_edges


def test_norms_of_many_samples_tend_to_the_exact_ones() -> None:
    sampled, exact = (MAKE["node"](sample_coverage=k, seed=1) for k in (500, "exact"))
    often = (exact.node_norm > 0) & (exact.node_norm < 0.3)  # some 300 times, and more
    assert often.sum() > 5
    assert torch.allclose(sampled.node_norm[often], exact.node_norm[often], rtol=0.25)


def test_norms_are_kept(tmp_path: Path, monkeypatch: Any) -> None:
    options = {"sample_coverage": 2, "save_dir": str(tmp_path), "seed": 1}
    first = MAKE["node"](**options)
    assert [path.name for path in tmp_path.iterdir()] == ["graphsaintnodesampler_2.npz"]
    monkeypatch.setattr(GraphSAINTNodeSampler, "_compute_norm", None)
    again = MAKE["node"](**options)
    assert torch.equal(first.node_norm, again.node_norm)
    assert torch.equal(first.edge_norm, again.edge_norm)
    with pytest.raises(ValueError, match=r"is for .*'batch_size': 6.*remove the file"):
        MAKE["node"](7, **options)


def test_norms_of_edges_in_another_order_are_refused(tmp_path: Path) -> None:
    """The file has a number for each edge, by its place."""
    options: dict[str, Any] = {"sample_coverage": 2, "save_dir": str(tmp_path), "log": False}
    GraphSAINTNodeSampler(DATA, 6, **options)
    assert DATA.edge_index is not None
    other = Data(edge_index=DATA.edge_index.flip(1), num_nodes=N)
    with pytest.raises(ValueError, match="of a graph with other edges: remove the file"):
        GraphSAINTNodeSampler(other, 6, **options)


def test_states_of_other_subgraphs_are_refused() -> None:
    state = MAKE["node"](4, num_steps=3, seed=0).state_dict()
    for other in (MAKE["node"](9, num_steps=3, seed=0), MAKE["edge"](4, num_steps=3, seed=0)):
        with pytest.raises(ValueError, match="a loader with subgraphs=GraphSAINTNodeSampler"):
            other.load_state_dict(state)


@pytest.mark.parametrize("name", ["_sample_nodes", "_collate"])
def test_steps_of_pyg_that_are_overridden_are_refused(name: str) -> None:
    """They would be left out without a word."""
    mine = type("Mine", (GraphSAINTNodeSampler,), {name: print, "__module__": "mine"})
    with pytest.raises(NotImplementedError, match=f"Mine.{name} overrides a step"):
        mine(DATA, 4)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be 1 or more"),
        ({"batch_size": 2.5}, TypeError, "batch_size must be an integer"),
        ({"walk_length": -1}, ValueError, "walk_length must be 0 or more"),
        ({"num_steps": 0}, ValueError, "num_steps"),
        ({"sample_coverage": -1}, ValueError, "sample_coverage"),
        ({"sample_coverage": "exact"}, NotImplementedError, "exact.*have no closed form: pass a"),
        ({"sample_coverage": "all"}, TypeError, "sample_coverage must be an integer"),
        ({"data": HeteroData()}, NotImplementedError, "HeteroData"),
        ({"data": Data(num_nodes=3)}, ValueError, "needs data.edge_index"),
        ({"data": Data(edge_index=torch.rand(2, 5), num_nodes=3)}, TypeError, "got torch.float32"),
        ({"data": Data(edge_index=torch.ones(3, 5).long())}, ValueError, r"got \[3, 5\]"),
        ({"data": Data(edge_index=DATA.edge_index, num_nodes=3)}, IndexError, "num_nodes=3"),
        ({"data": Data(edge_index=DATA.edge_index, node_norm=1)}, ValueError, "node_norm"),
        ({"split_batches": True}, ValueError, "split_batches=True.*split_seeds='global'"),
        ({"transform": print}, NotImplementedError, "transform="),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], says: str) -> None:
    arguments: dict[str, Any] = {"data": DATA, "batch_size": 4, "walk_length": 2} | change
    with pytest.raises(error, match=says):
        GraphSAINTRandomWalkSampler(**arguments)
