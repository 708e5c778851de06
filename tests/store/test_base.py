"""The capabilities of feature stores: one protocol each, and a store that has them all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, TensorAttr

import pyg_scale.graph.topology
from pyg_scale.graph.base import InDirectory, NeedsThreads, directory_of, needs_threads
from pyg_scale.loader import NeighborLoader
from pyg_scale.ops.row_cache import scatter
from pyg_scale.store import Cached, Disk, MemoryFeatureStore, MemoryGraphStore, base
from pyg_scale.store.base import (
    BuildsFromData,
    LooksAhead,
    RowReader,
    RowRequester,
    is_read_only,
    look_ahead_of,
    returns_views,
)
from pyg_scale.testing import FeatureStoreTests


class Announced:
    """Remembers what was announced, and refuses to serve anything else."""

    def __init__(self) -> None:
        self.paused = False
        self.batches: set[int] = set()
        self.served = 0

    def announce(self, batch: int, attrs: Sequence[TensorAttr]) -> None:
        assert attrs and all(isinstance(attr.index, Tensor) for attr in attrs)
        self.batches.add(batch)

    def suffices(self, ahead: int) -> bool:
        return ahead >= Everything.look_ahead

    @contextlib.contextmanager
    def serving(self, batch: int) -> Iterator[None]:
        self.batches.remove(batch)
        yield
        self.served += 1

    def close(self) -> None:
        self.batches.clear()


class Everything(MemoryFeatureStore):
    """A store in memory with every capability, written as a plugin's author would."""

    look_ahead = 3

    def schedule(self) -> Announced:
        self.__dict__["last"] = Announced()
        return self.__dict__["last"]

    def read_rows(self, attr: TensorAttr, index: Tensor, position: Tensor, out: Tensor) -> None:
        scatter(self._raw(attr, index), position, out)

    def ask_rows(self, wanted: Sequence[tuple[TensorAttr, Tensor]]) -> list[Callable[[], Tensor]]:
        return [lambda attr=attr, index=index: self._raw(attr, index) for attr, index in wanted]

    def _raw(self, attr: TensorAttr, index: Tensor) -> Tensor:
        rows = self.get_tensor(TensorAttr(attr.group_name, attr.attr_name, index))
        return rows.contiguous().view(rows.size(0), -1).view(torch.uint8)


class TestEverything(FeatureStoreTests):
    @pytest.fixture
    def feature_store(self) -> Everything:
        return Everything()


def test_a_cache_over_it_reads_and_asks_through_its_methods() -> None:
    calls: list[str] = []

    class Noted(Everything):
        def __getattribute__(self, name: str) -> Any:
            if name in ("read_rows", "ask_rows"):
                calls.append(name)
            return super().__getattribute__(name)

    store, tensor = Noted(), torch.arange(60.0).view(20, 3)
    store["user", "x", None] = tensor
    cached = Cached(store, 10 * tensor[0].nbytes)
    calls.clear()
    index = torch.tensor([4, 19, 0])
    assert torch.equal(cached["user", "x", index], tensor[index])
    assert "read_rows" in calls
    assert cached.asked_ahead > 0 and look_ahead_of(cached) >= cached.asked_ahead


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_announces_every_batch_to_it(num_workers: int) -> None:
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.rand(200, 3, generator=generator),
        edge_index=torch.randint(200, (2, 900), generator=generator),
    )
    store, graph = Everything(), MemoryGraphStore()
    store[None, "x", None] = data.x
    graph.put_edge_index(data.edge_index, edge_type=None, layout="coo", size=(200, 200))
    options = {"num_neighbors": [3, 2], "batch_size": 16, "shuffle": True, "seed": 1}
    loader = NeighborLoader(
        (store, graph), input_nodes=torch.arange(200), num_workers=num_workers, **options
    )
    plain = NeighborLoader(data, input_nodes=torch.arange(200), **options)
    count = 0
    for batch, expected in zip(loader, plain, strict=True):
        assert torch.equal(batch.x, expected.x) and torch.equal(batch.x, data.x[batch.n_id])
        count += 1
    last = store.__dict__["last"]
    assert count == last.served == 13 and not last.batches


def test_stores_say_what_they_can() -> None:
    memory = MemoryFeatureStore()
    cached = Cached(memory, "1MB")
    assert returns_views(memory) and returns_views(cached) and not is_read_only(cached)
    assert not isinstance(memory, RowReader | RowRequester | LooksAhead)
    assert isinstance(cached, LooksAhead) and look_ahead_of(cached) == 15
    assert look_ahead_of(Cached(memory, "1MB", "sieve")) == look_ahead_of(memory) == 0
    assert isinstance(Disk, BuildsFromData) and not isinstance(MemoryFeatureStore, BuildsFromData)


def test_a_plain_store_of_pyg_has_none_of_them() -> None:
    data: FeatureStore = Data(x=torch.ones(3, 2))
    assert not isinstance(data, RowReader | RowRequester | LooksAhead)
    assert not is_read_only(data) and not returns_views(data) and look_ahead_of(data) == 0
    assert not isinstance(data, NeedsThreads | InDirectory)
    assert needs_threads(data) == "" and directory_of(data) is None


@pytest.mark.parametrize("name", ["CSC", "EdgeType", "NodeType", "Topology", "sortable_time"])
def test_topologies_are_found_where_they_were(name: str) -> None:
    assert getattr(base, name) is getattr(pyg_scale.graph.topology, name)
