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


def typed_graph() -> HeteroData:
    """Two types of nodes, and one of them without edges to the other."""
    generator = torch.Generator().manual_seed(2)
    data = HeteroData()
    for name, size in SIZES.items():
        data[name].x = torch.randn(size, 3, generator=generator)
        data[name].own = torch.arange(size)
    for source, target in (("paper", "paper"), ("author", "paper")):
        edges = [
            torch.randint(SIZES[name], (90,), generator=generator) for name in (source, target)
        ]
        data[source, "to", target].edge_index = torch.stack(edges)
        data[source, "to", target].edge_attr = torch.arange(90)
    return data


SIZES = {"paper": 30, "author": 13}
DATA, TYPED = graph(), typed_graph()


@pytest.mark.parametrize("num_parts", [1, 4, 9, 41])
def test_ranges_are_those_of_pyg(num_parts: int) -> None:
    theirs = list(torch_geometric.loader.RandomNodeLoader(DATA, num_parts))
    ours = list(RandomNodeLoader(DATA, num_parts))
    assert len(ours) == len(theirs) == len(RandomNodeLoader(DATA, num_parts))
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("x", "y", "edge_index", "edge_attr"):
            assert torch.equal(mine[name], other[name])
        assert mine.num_nodes == other.num_nodes
        assert mine.keys() == other.keys()


@pytest.mark.parametrize("num_parts", [1, 3, 43])
def test_typed_ranges_are_those_of_pyg(num_parts: int) -> None:
    theirs = torch_geometric.loader.RandomNodeLoader(TYPED, num_parts)
    for mine, other in zip(RandomNodeLoader(TYPED, num_parts), theirs, strict=True):
        assert mine.metadata() == other.metadata()
        for one, another in zip(mine.stores, other.stores, strict=True):
            assert set(one) == set(another)
            assert all(
                torch.equal(torch.as_tensor(one[k]), torch.as_tensor(another[k])) for k in one
            )


def test_typed_sets_are_all_nodes_and_draw_all_types_together(tmp_path: Path) -> None:
    pyg_scale.save(TYPED, tmp_path / "graph")
    opened = pyg_scale.open(tmp_path / "graph")
    make = lambda data, **kw: RandomNodeLoader(data, 4, shuffle=True, seed=2, **kw)  # noqa: E731
    batches = list(make(TYPED))
    assert all(batch[name].num_nodes for batch in batches for name in SIZES)
    for name, size in SIZES.items():
        every = torch.cat([batch[name].own for batch in batches])
        assert torch.equal(every.sort().values, torch.arange(size))
    for batch in batches:
        expected = TYPED.subgraph({name: batch[name].own for name in SIZES})
        for kind, edges in expected.edge_index_dict.items():
            assert torch.equal(batch[kind].edge_index, edges)
            assert torch.equal(batch[kind].edge_attr, expected[kind].edge_attr)
    assert_same_batches(make(TYPED, num_workers=2), batches)
    for found, expected in zip(make(opened), batches, strict=True):
        assert all(torch.equal(found[name].x, expected[name].x) for name in SIZES)
    loader = make(TYPED)
    next(iter(loader))
    again = make(TYPED)
    again.load_state_dict(loader.state_dict())
    assert_same_batches(again, batches[1:])


def test_shuffled_sets_are_all_nodes_with_their_edges() -> None:
    loader = RandomNodeLoader(DATA, 5, shuffle=True, seed=3)
    assert isinstance(loader, torch_geometric.loader.RandomNodeLoader)
    orders = []
    for _ in range(2):
        batches = list(loader)
        orders.append(torch.cat([batch.y // 10 for batch in batches]))
        assert torch.equal(orders[-1].sort().values, torch.arange(41))
        for batch in batches:
            expected = DATA.subgraph(batch.y // 10)
            assert torch.equal(batch.edge_index, expected.edge_index)
            assert torch.equal(batch.edge_attr, expected.edge_attr)
            assert torch.equal(batch.x, expected.x)
    assert not torch.equal(*orders)


def test_every_pair_of_nodes_is_together_equally_often() -> None:
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.long), n_id=torch.arange(6), num_nodes=6)
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
    with pytest.raises(NotImplementedError, match="pad_to= is not for RandomNodeLoader"):
        RandomNodeLoader(DATA, 2, pad_to="buckets")
    with pytest.raises(TypeError, match="must be a Data"):
        RandomNodeLoader([DATA], 2)  # type: ignore[arg-type]


def test_lists_have_an_entry_for_each_node() -> None:
    data = Data(edge_index=torch.arange(20).view(2, 10), num_nodes=20)
    data.names = [f"n{i}" for i in range(20)]
    data.nid = torch.arange(20)
    for batch in RandomNodeLoader(data, num_parts=4, shuffle=True, seed=1):
        assert batch.names == [f"n{i}" for i in batch.nid.tolist()]
