"""Loaders that announce their batches: the same batches, in order, bounded, resumable, closed."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore

import pyg_scale
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader, ZipLoader
from pyg_scale.loader.batch.source import filled
from pyg_scale.store import Cached, Disk, MemoryFeatureStore
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same, assert_same_batches

pytestmark = pytest.mark.matrix(2)

WORKERS = [{}, {"num_workers": 1}, {"num_workers": 3}, {"num_workers": 2, "in_order": False}]


def cached(data: Any, capacity: int = 400, policy: str = "belady", **options: Any) -> Cached:
    """The features of a graph behind a cache that is too small for them."""
    if policy == "placed":
        options["hot"] = torch.arange(3)
    return Cached(filled(MemoryFeatureStore(), data), capacity, policy, **options)


def arguments_of(data: Any) -> dict[str, Any]:
    nodes = "item" if isinstance(data, HeteroData) else None
    return {"input_nodes": nodes, "batch_size": 6, "shuffle": True, "seed": 3}


def in_order(batches: Any) -> list[Any]:
    """By their first seed, as ``in_order=False`` gives them as they come."""
    found = list(batches)
    return sorted(found, key=lambda batch: seeds_of(batch).tolist())


def seeds_of(batch: Any) -> torch.Tensor:
    return (batch["item"] if isinstance(batch, HeteroData) else batch).input_id


# The same batches ##############################################################################


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("policy", ["belady", "sieve", "placed"])
@pytest.mark.parametrize("data", [graphs.hostile(), graphs.hetero()], ids=["homo", "hetero"])
def test_batches_are_those_of_the_features_in_memory(
    data: Any, policy: str, workers: dict[str, Any]
) -> None:
    arguments = arguments_of(data)
    store = cached(data, policy=policy)
    loader = NeighborLoader(data, [3, 2], **arguments, feature_store=store, **workers)
    for _ in range(2):
        expected = in_order(NeighborLoader(data, [3, 2], **arguments))
        assert_same_batches(expected, in_order(loader))
        arguments["seed"] += 1
        loader.seed = arguments["seed"]
        loader.set_epoch(0)
    counts = store.stats()
    assert counts["hits"] > 0 and counts["misses"] > 0
    assert loader.stats()["total"]["fetch"]["cache_hits"] == counts["hits"]
    assert counts["cached_bytes"] <= store.capacity


@pytest.mark.parametrize("workers", WORKERS[1:3], ids=str)
@pytest.mark.parametrize("temporal", ["time", "when"])
def test_temporal_batches_which_repeat_nodes(temporal: str, workers: dict[str, Any]) -> None:
    data = graphs.hostile()
    arguments = {
        "num_neighbors": [3, 2], "batch_size": 7, "time_attr": temporal, "seed": 1,
        "input_time": data.time,
    }  # fmt: skip
    store = cached(data, 600)
    assert_same_batches(
        NeighborLoader(data, **arguments),
        NeighborLoader(data, **arguments, feature_store=store, **workers),
    )
    assert store.stats()["late"] == 0


@pytest.mark.parametrize("workers", WORKERS[:3], ids=str)
def test_links(workers: dict[str, Any]) -> None:
    data = graphs.hostile()
    arguments = {"num_neighbors": [3, 2], "batch_size": 9, "neg_sampling": "binary", "seed": 1}
    assert_same_batches(
        LinkNeighborLoader(data, **arguments),
        LinkNeighborLoader(data, **arguments, feature_store=cached(data), **workers),
    )


@pytest.mark.parametrize("workers", WORKERS[:3], ids=str)
@pytest.mark.parametrize("data", [graphs.hostile(), graphs.hetero()], ids=["homo", "hetero"])
def test_files_of_an_opened_graph(tmp_path: Path, data: Any, workers: dict[str, Any]) -> None:
    path = tmp_path / "graph"
    pyg_scale.save(data, path)
    arguments = arguments_of(data)
    expected = list(NeighborLoader(data, [3, 2], **arguments))
    for given in (data, pyg_scale.open(path)):
        store = Disk(path, cache=500)
        loader = NeighborLoader(given, [3, 2], **arguments, feature_store=store, **workers)
        assert_same_batches(expected, loader)
        assert store.stats()["reads"] > 0
    by_name = NeighborLoader(pyg_scale.open(path), [3, 2], **arguments, feature_store="disk")
    assert_same_batches(expected, by_name)


def test_by_name_it_needs_something_to_read_from() -> None:
    data = graphs.hostile()
    with pytest.raises(ValueError, match=r"takes its path from data that pyg_scale.open\(path\)"):
        NeighborLoader(data, [2], feature_store="disk")
    with pytest.raises(ValueError, match="which has none"):
        NeighborLoader(data, [2], feature_store="cached")
    stores = graphs.stores(data)
    (batch,) = NeighborLoader(stores, [2], batch_size=200, feature_store="cached")
    assert torch.equal(batch.x, data.x[batch.n_id])


def test_data_itself_behind_a_cache() -> None:
    data = graphs.hostile()
    store = Cached(data, 400)
    loader = NeighborLoader((store, data), [2], batch_size=9, seed=1, num_workers=2)
    expected = NeighborLoader((data, data), [2], batch_size=9, seed=1)
    assert_same_batches(expected, loader)
    assert store.stats()["hits"] > 0


def test_features_on_the_consumers_thread() -> None:
    data = graphs.hostile()
    arguments = {"batch_size": 9, "seed": 1}
    store = cached(data)
    loader = NeighborLoader(
        data, [3, 2], **arguments, feature_store=store, num_workers=2, filter_per_worker=False
    )
    assert_same_batches(NeighborLoader(data, [3, 2], **arguments), loader)
    assert store.stats()["late"] == 0


def test_decisions_do_not_depend_on_the_workers() -> None:
    data, counts = graphs.hostile(), []
    for workers in ({}, {"num_workers": 1}, {"num_workers": 4, "prefetch_factor": 5}):
        store = cached(data, 300)
        loader = NeighborLoader(
            data, [4, 3], batch_size=5, seed=1, shuffle=True, feature_store=store, **workers
        )
        for _ in loader:
            pass
        counts.append({k: store.stats()[k] for k in ("hits", "misses", "evictions", "late")})
    assert counts[0] == counts[1] == counts[2]


# How far ahead #################################################################################


class Noting(MyFeatureStore):
    """Says what is announced and what is read."""

    look_ahead = 3

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(events=[], announced=set(), suffice=3, closed=0)

    def schedule(self) -> Any:
        return _Noted(self)

    def _get_tensor(self, attr: Any) -> Any:
        self.events.append(("read", attr.index))
        return super()._get_tensor(attr)


class _Noted:
    paused = False

    def __init__(self, store: Noting) -> None:
        self.store = store

    def announce(self, batch: int, wanted: Any) -> None:
        self.store.announced.add(batch)
        self.store.events.append(("announce", batch, [attr.index for attr in wanted]))

    def suffices(self, ahead: int) -> bool:
        return ahead >= self.store.suffice

    def serving(self, batch: int) -> Any:
        self.store.events.append(("serve", batch, len(self.store.announced)))
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None:
        self.store.__dict__["closed"] += 1


def noting(data: Data) -> Noting:
    store = Noting()
    store.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    return store


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("suffice", [0, 1, 3])
def test_so_many_batches_are_announced_before_one_is_read(
    suffice: int, workers: dict[str, int]
) -> None:
    data = graphs.hostile()
    store = noting(data)
    store.__dict__["suffice"] = suffice
    loader = NeighborLoader(data, [2], batch_size=10, feature_store=store, seed=1, **workers)
    batches = list(loader)
    announced = [event for event in store.events if event[0] == "announce"]
    assert [event[1] for event in announced] == list(range(len(batches)))
    for batch, (_, _, (index,)) in zip(batches, announced):
        assert torch.equal(batch.n_id, index)
    served = {event[1]: event[2] for event in store.events if event[0] == "serve"}
    for b, known in served.items():
        assert known >= min(b + 1 + suffice, len(batches))
        if not workers:
            assert known == min(b + 1 + suffice, len(batches))
    assert store.closed > 0


def test_no_more_is_sampled_than_what_is_under_way() -> None:
    data, store, sampled = graphs.hostile(), None, []
    store = noting(data)

    class Watched(NeighborLoader):
        def _sample(self, batch: Any) -> Any:
            sampled.append(batch)
            return super()._sample(batch)

    loader = Watched(
        data, [2], batch_size=1, feature_store=store, num_workers=2, prefetch_factor=2, seed=1
    )
    iterator = iter(loader)
    for count in range(1, 6):
        next(iterator)
        time.sleep(0.05)
        # handed out, ready or being fetched (4), announced after them (3), being sampled (4)
        assert len(sampled) <= count + 4 + 3 + 4
    iterator.close()


# Errors, ends, resuming ########################################################################


@pytest.mark.parametrize("workers", WORKERS[:3], ids=str)
def test_an_error_while_sampling_is_raised_in_its_place(workers: dict[str, int]) -> None:
    data = graphs.hostile()

    class Failing(NeighborLoader):
        def _sample(self, batch: Any) -> Any:
            if 20 in batch.index.tolist():
                raise RuntimeError("not this one")
            return super()._sample(batch)

    expected = list(NeighborLoader(data, [2], batch_size=10, seed=1))
    loader = Failing(data, [2], batch_size=10, seed=1, feature_store=cached(data), **workers)
    iterator = iter(loader)
    for b in range(2):
        assert_same(expected[b], next(iterator))
    with pytest.raises(RuntimeError, match="not this one"):
        next(iterator)
    assert_same_batches(expected[3:], iterator)


@pytest.mark.parametrize("workers", WORKERS[:3], ids=str)
def test_an_error_of_the_index_sampler_comes_after_what_was_sampled(
    workers: dict[str, int],
) -> None:
    def indices() -> Any:
        yield from range(15)
        raise RuntimeError("no more")

    class Order:
        def __iter__(self) -> Any:
            return indices()

        def __len__(self) -> int:
            return 100

    data = graphs.hostile()
    loader = NeighborLoader(
        data, [2], batch_size=5, sampler=Order(), seed=1, feature_store=cached(data), **workers
    )
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with pytest.raises(RuntimeError, match="no more"):
        next(iterator)
    for _ in range(2):  # its end is not that of the epoch
        with pytest.raises(RuntimeError, match="could not draw all|what it would have drawn"):
            next(iterator)


@pytest.mark.parametrize("workers", WORKERS[:3], ids=str)
def test_resuming_in_the_middle(workers: dict[str, int]) -> None:
    data = graphs.hostile()
    arguments = {"batch_size": 7, "shuffle": True, "seed": 1}
    expected = list(NeighborLoader(data, [3, 2], **arguments))
    loader = NeighborLoader(data, [3, 2], **arguments, feature_store=cached(data), **workers)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    assert state["delivered"] == 4
    again = NeighborLoader(data, [3, 2], **arguments, feature_store=cached(data), num_workers=1)
    again.load_state_dict(state)
    assert_same_batches(expected[4:], again)
    iterator.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_consumer_that_stops_early_leaves_nothing(persistent: bool) -> None:
    data = graphs.hostile()
    store = cached(data)
    loader = NeighborLoader(
        data, [3, 2], batch_size=4, feature_store=store, seed=1,
        num_workers=3, persistent_workers=persistent,
    )  # fmt: skip
    for _ in range(3):
        for number, batch in enumerate(loader):
            assert torch.equal(batch.x, data.x[batch.n_id])
            if number == 2:
                break
    alive = weakref.ref(loader)
    del loader, batch
    left = ["the loader"]
    deadline = time.monotonic() + 20  # a batch that is under way holds the loader until it is done
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        left = [t.name for t in threading.enumerate() if t.name.startswith("pyg_scale-loader")]
        left += ["the loader"] * (alive() is not None)
    assert left == []
    assert store.get_tensor(group_name=None, attr_name="x", index=torch.tensor([1])).shape[0] == 1


def test_two_iterations_of_one_store_at_a_time() -> None:
    data = graphs.hostile()
    store = cached(data)
    train = NeighborLoader(
        data, [3], batch_size=6, feature_store=store, seed=1, num_workers=2, persistent_workers=True
    )
    other = NeighborLoader(data, [2], batch_size=9, feature_store=store, seed=2, num_workers=1)
    expected = list(NeighborLoader(data, [3], batch_size=6, seed=1))
    for b, batch in enumerate(train):
        assert_same(expected[b], batch)
        if b % 5 == 2:
            for validation in other:
                assert torch.equal(validation.x, data.x[validation.n_id])
    first, second = iter(train), iter(train)
    for left, right in zip(first, second):
        assert torch.equal(left.x, data.x[left.n_id]) and torch.equal(right.x, data.x[right.n_id])


def test_a_pause_after_an_error_and_going_on() -> None:
    """A transform that fails lets the threads end; what they left undone is done later."""
    data, calls = graphs.hostile(), []

    def transform(batch: Data) -> Data:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("once")
        return batch

    loader = NeighborLoader(
        data, [3, 2], batch_size=5, seed=1, num_workers=3, feature_store=cached(data),
        transform=transform,
    )  # fmt: skip
    iterator = iter(loader)
    seen = []
    while True:
        try:
            seen.append(next(iterator))
        except RuntimeError:
            time.sleep(0.2)
        except StopIteration:
            break
    expected = list(NeighborLoader(data, [3, 2], batch_size=5, seed=1))
    del expected[2]
    assert_same_batches(expected, seen)


# What has no look-ahead ########################################################################


def test_processes_need_a_store_that_does_not_look_ahead() -> None:
    data = graphs.hostile()
    arguments = {"batch_size": 20, "num_workers": 2, "worker_type": "process", "seed": 1}
    with pytest.raises(ValueError, match="look_ahead=0"):
        NeighborLoader(data, [2], **arguments, feature_store=cached(data))
    store = cached(data, look_ahead=0)
    loader = NeighborLoader(data, [2], **arguments, feature_store=store)
    assert_same_batches(NeighborLoader(data, [2], batch_size=20, seed=1), loader)


def test_a_transform_of_samples_is_told_to_end_the_look_ahead() -> None:
    data = graphs.hostile()
    loader = NeighborLoader(
        data, [2], batch_size=20, seed=1, feature_store=cached(data), num_workers=1,
        transform_sampler_output=lambda out: out,
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="transform_sampler_output= may change what is read"):
        iterator = iter(loader)
    assert_same_batches(NeighborLoader(data, [2], batch_size=20, seed=1), iterator)


def test_loaders_side_by_side_and_single_calls() -> None:
    data = graphs.hostile()
    store = cached(data)
    parts = [
        NeighborLoader(data, [2], batch_size=5, seed=seed, feature_store=store) for seed in (1, 2)
    ]
    for pair in ZipLoader(parts, batch_size=10, seed=1, num_workers=2):
        for batch in pair:
            assert torch.equal(batch.x, data.x[batch.n_id])
    assert torch.equal((batch := parts[0]([3, 4])).x, data.x[batch.n_id])
