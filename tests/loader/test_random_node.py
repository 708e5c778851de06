"""The batches of RandomNodeLoader are PyG's subgraphs, and repeatable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.loader
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.loader import RandomNodeLoader
from pyg_scale.testing import statistics
from tests.loader.batches import assert_same_batches

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 2},
    {"num_workers": 2, "worker_type": "process"},
    {"num_workers": 1, "worker_type": "ring"},
]


def graph(num_nodes: int = 41, num_edges: int = 300) -> Data:
    """Directed, with self-loops and parallel edges."""
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    edge_index[:, -3:] = edge_index[:, :3]
    return Data(
        x=torch.arange(num_nodes).view(-1, 1).float(),
        edge_index=edge_index,
        edge_attr=torch.arange(num_edges),
        y=torch.arange(num_nodes) * 10,
    )


DATA = graph()


@pytest.mark.parametrize("num_parts", [1, 4, 9, 41])
def test_ranges_are_those_of_pyg(num_parts: int) -> None:
    theirs = list(torch_geometric.loader.RandomNodeLoader(DATA, num_parts))
    ours = list(RandomNodeLoader(DATA, num_parts))
    assert len(ours) == len(theirs) == len(RandomNodeLoader(DATA, num_parts))
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("x", "y", "edge_index", "edge_attr"):
            assert torch.equal(mine[name], other[name])
        assert mine.num_nodes == other.num_nodes
        assert torch.equal(mine.e_id, mine.edge_attr)


def test_shuffled_sets_are_all_nodes_with_their_edges() -> None:
    loader = RandomNodeLoader(DATA, 5, shuffle=True, seed=3)
    assert isinstance(loader, torch_geometric.loader.RandomNodeLoader)
    orders = []
    for _ in range(2):
        batches = list(loader)
        orders.append(torch.cat([batch.n_id for batch in batches]))
        assert torch.equal(orders[-1].sort().values, torch.arange(41))
        for batch in batches:
            expected = DATA.subgraph(batch.n_id)
            assert torch.equal(batch.edge_index, expected.edge_index)
            assert torch.equal(batch.edge_attr, expected.edge_attr)
            assert torch.equal(batch.x, expected.x)
    assert not torch.equal(*orders)


def test_every_pair_of_nodes_is_together_equally_often() -> None:
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.long), num_nodes=6)
    loader = RandomNodeLoader(data, 2, shuffle=True, seed=0)
    triples: dict[tuple[int, ...], int] = {}
    for _ in range(2_000):
        first = next(iter(loader))
        name = tuple(first.n_id.sort().values.tolist())
        triples[name] = triples.get(name, 0) + 1
    assert len(triples) == 20
    statistics.require(statistics.multinomial(torch.tensor(list(triples.values()))), "triples")


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_the_same_for_any_workers(workers: dict[str, Any]) -> None:
    make = lambda **kw: RandomNodeLoader(DATA, 7, shuffle=True, seed=5, **kw)  # noqa: E731
    assert_same_batches(make(**workers), make())


def test_resumes_in_the_middle() -> None:
    loader = RandomNodeLoader(DATA, 7, shuffle=True, seed=5)
    whole = list(loader)
    loader = RandomNodeLoader(DATA, 7, shuffle=True, seed=5)
    it = iter(loader)
    next(it), next(it)
    state = loader.state_dict()
    again = RandomNodeLoader(DATA, 7, shuffle=True, seed=5, num_workers=2)
    again.load_state_dict(state)
    assert_same_batches(again, whole[2:])


def test_a_graph_in_files(tmp_path: Path) -> None:
    pyg_scale.save(DATA, tmp_path / "graph")
    opened = pyg_scale.open(tmp_path / "graph")
    make = lambda data: RandomNodeLoader(data, 4, shuffle=True, seed=2)  # noqa: E731
    for found, expected in zip(make(opened), make(DATA), strict=True):
        for name in ("x", "y", "edge_index", "edge_attr"):
            assert torch.equal(found[name], expected[name])


def test_bad_input() -> None:
    for num_parts in (0, -1, 42, 2.5):
        with pytest.raises(ValueError, match="num_parts"):
            RandomNodeLoader(DATA, num_parts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch_size"):
        RandomNodeLoader(DATA, 2, batch_size=3)
    with pytest.raises(NotImplementedError, match="HeteroData"):
        RandomNodeLoader(HeteroData(), 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a Data"):
        RandomNodeLoader([DATA], 2)  # type: ignore[arg-type]
