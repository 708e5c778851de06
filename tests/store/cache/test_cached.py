"""A cache over any store: values, threads, failures, several iterations at a time, bad input."""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import TensorAttr
from torch_geometric.testing import MyFeatureStore

from pyg_scale.store import Cached, MemoryFeatureStore
from pyg_scale.store.cache import by_degree, pending
from pyg_scale.store.cache.row_cache import slots_of
from pyg_scale.store.rows import TensorRows
from pyg_scale.testing import graphs

X = torch.arange(100 * 4.0).view(100, 4)  # 16 bytes a row


class Counting(MyFeatureStore):
    """Counts what is read from it; fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["rows"] = []
        self.__dict__["error"] = None

    def _get_tensor(self, attr: TensorAttr) -> Any:
        if isinstance(attr.index, torch.Tensor) and attr.index.numel():
            if self.error is not None:
                raise self.error
            self.rows.extend(attr.index.tolist())
        return super()._get_tensor(attr)


@pytest.fixture
def source() -> Counting:
    store = Counting()
    store.put_tensor(X, group_name=None, attr_name="x", index=None)
    return store


def attr(index: Any) -> TensorAttr:
    return TensorAttr(None, "x", index=torch.as_tensor(index))


def read(store: Cached, index: Any) -> None:
    got = store.get_tensor(attr(index))
    assert torch.equal(got, X[torch.as_tensor(index)])


def test_only_misses_are_read(source: Counting) -> None:
    store = Cached(source, 16 * 10)
    read(store, [5, 3, 5])
    read(store, [3, 7, 5])
    assert source.rows == [5, 3, 7]
    stats = store.stats()
    assert (stats["hits"], stats["misses"]) == (3, 3)
    assert stats["cached_bytes"] == 3 * 16
    assert json.loads(json.dumps(stats))["tensors"]["x"]["slots"] == 10


def test_placed_rows_are_read_once_and_no_others_are_kept(source: Counting) -> None:
    store = Cached(source, 16 * 2, "placed", hot=[4, 9, 1])
    for _ in range(3):
        read(store, [9, 4, 1])
    assert source.rows == [9, 4, 1, 1, 1]


def test_hot_lists_from_files_and_by_degree(source: Counting, tmp_path: Path) -> None:
    np.save(tmp_path / "hot.npy", np.array([4, 9]))
    store = Cached(source, 1000, "placed", hot=tmp_path / "hot.npy")
    read(store, [4, 9, 4, 5])
    read(store, [4, 9])
    assert source.rows == [4, 9, 5]
    data = graphs.hostile()
    (order,) = by_degree(data).values()
    degree = torch.bincount(data.edge_index[0], minlength=data.num_nodes)
    assert degree[order].tolist() == sorted(degree.tolist(), reverse=True)


def test_announced_rows_stay(source: Counting) -> None:
    """Rows that a later batch needs are kept, though others are more recent."""
    store = Cached(source, 16 * 2)
    with contextlib.closing(store.schedule()) as schedule:
        batches = [[1, 2], [3], [4], [5], [1, 2]]
        for b, rows in enumerate(batches):
            schedule.announce(b, [attr(rows)])
        for b, rows in enumerate(batches):
            with schedule.serving(b):
                read(store, rows)
    assert source.rows == [1, 2, 3, 4, 5]
    assert store.stats()["late"] == 0


def test_reads_that_were_not_announced_change_nothing(source: Counting) -> None:
    store = Cached(source, 16 * 2)
    with contextlib.closing(store.schedule()) as schedule:
        schedule.announce(0, [attr([1, 2])])
        schedule.announce(1, [attr([1, 2])])
        with schedule.serving(0):
            read(store, [1, 2])
            read(store, [8, 9])  # of a batch, but not what was said
        read(store, [6, 7])
        with schedule.serving(1):
            read(store, [2, 1][::-1])
    assert source.rows == [1, 2, 8, 9, 6, 7]


def test_batches_must_be_announced_in_order(source: Counting) -> None:
    schedule = Cached(source, 100).schedule()
    schedule.announce(3, [])
    with pytest.raises(ValueError, match="batch 3 was announced after batch 3"):
        schedule.announce(3, [])


def test_the_schedule_that_began_last_goes_first_until_it_is_closed(source: Counting) -> None:
    store = Cached(source, 16 * 2)
    outer = store.schedule()
    for b, rows in enumerate([[1, 2], [3, 4], [1, 2], [1, 2]]):
        outer.announce(b, [attr(rows)])
    with outer.serving(0):
        read(store, [1, 2])
    with contextlib.closing(store.schedule()) as inner:
        for b, rows in enumerate([[5, 6], [7], [5, 6]]):
            inner.announce(b, [attr(rows)])
        for b, rows in enumerate([[5, 6], [7], [5, 6]]):
            with inner.serving(b):
                read(store, rows)
        with outer.serving(1):
            read(store, [3, 4])
    assert source.rows == [1, 2, 5, 6, 7, 3, 4]  # the inner one's rows stayed
    for b in (2, 3):
        with outer.serving(b):
            read(store, [1, 2])
    assert source.rows == [1, 2, 5, 6, 7, 3, 4, 1, 2]  # and now the outer one's do again
    outer.close()


def test_a_batch_that_fails_costs_others_a_read_but_no_wrong_value(source: Counting) -> None:
    store = Cached(source, 16 * 3)
    with contextlib.closing(store.schedule()) as schedule:
        for b in range(3):
            schedule.announce(b, [attr([1, 2])])
        source.error = OSError("no disk")
        with schedule.serving(0), pytest.raises(OSError, match="no disk"):
            store.get_tensor(attr([1, 2]))
        source.error = None
        for b in (1, 2):
            with schedule.serving(b):
                read(store, [1, 2])
    assert source.rows == [1, 2]  # the second one put them where they should have been
    assert store.stats()["late"] == 2


def test_a_batch_that_is_never_read_is_not_waited_for(source: Counting) -> None:
    store = Cached(source, 16 * 3)
    with contextlib.closing(store.schedule()) as schedule:
        for b in range(3):
            schedule.announce(b, [attr([1, 2])])
        with schedule.serving(0):
            pass  # it failed before it read anything
        with schedule.serving(2):
            schedule.paused = True  # as a loader says when its workers end
            read(store, [1, 2])
    read(store, [1, 2])
    assert source.rows == [1, 2]


def test_waiting_has_a_limit(source: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending.Turns.wait, "__defaults__", (0.01,))
    store = Cached(source, 16 * 3)
    with contextlib.closing(store.schedule()) as schedule:
        for b in range(2):
            schedule.announce(b, [attr([1, 2])])
        with schedule.serving(1):
            read(store, [1, 2])
        with schedule.serving(0):
            read(store, [1, 2])
    read(store, [1, 2])


@pytest.mark.parametrize("policy", ["belady", "sieve"])
@pytest.mark.parametrize("slots", [1, 7, 60])
def test_many_threads_read_what_they_asked_for(policy: str, slots: int) -> None:
    features = MemoryFeatureStore()
    x = torch.arange(500.0)[:, None].repeat(1, 8)
    features.put_tensor(x, group_name=None, attr_name="x", index=None)
    store = Cached(features, slots * 32, policy)
    generator = torch.Generator().manual_seed(slots)
    batches = [(torch.rand(90, generator=generator) ** 3 * 500).long() for _ in range(120)]
    schedule = store.schedule()
    for b, rows in enumerate(batches):
        schedule.announce(b, [attr(rows)])
    claimed = iter(range(len(batches)))
    lock = threading.Lock()

    def work() -> int:
        done = 0
        while True:
            with lock:
                b = next(claimed, None)
            if b is None:
                return done
            with schedule.serving(b):
                got = store.get_tensor(attr(batches[b]))
            assert torch.equal(got, x[batches[b]])
            done += 1

    with ThreadPoolExecutor(6) as pool:
        assert sum(f.result(timeout=60) for f in [pool.submit(work) for _ in range(6)]) == 120
    schedule.close()
    stats = store.stats()
    assert stats["hits"] + stats["misses"] == 120 * 90
    assert stats["cached_bytes"] <= slots * 32
    assert stats["late"] == 0


def test_writes_in_the_middle_of_an_iteration(source: Counting) -> None:
    store = Cached(source, 16 * 20)
    schedule = store.schedule()
    for b in range(3):
        schedule.announce(b, [attr([1, 2])])
    with schedule.serving(0):
        read(store, [1, 2])
    store.update_tensor(-X, group_name=None, attr_name="x", index=None)
    for b in (1, 2):
        with schedule.serving(b):
            assert torch.equal(store.get_tensor(attr([1, 2])), -X[[1, 2]])
    schedule.close()


def test_shorter_rows_come_first() -> None:
    rows = {
        ("paper", "x"): TensorRows(1000, (100,), torch.float32),
        ("paper", "y"): TensorRows(1000, (), torch.int64),
        ("author", "mask"): TensorRows(10**6, (), torch.int8),
        (("paper", "cites", "paper"), "weight"): TensorRows(10**5, (), torch.int8),
    }
    of_author, of_y, of_x = 50_000, 1000, 42_000 // 400
    assert list(slots_of(rows, 100_000).values()) == [of_x, of_y, of_author, 0]
    for capacity in (1, 1000, 10**6, 10**7):
        slots = slots_of(rows, capacity)
        assert sum(slots[k] * rows[k].row_bytes for k in rows) <= capacity
    assert slots == {key: each.num_rows for key, each in rows.items()}
    assert slots_of({(None, "x"): TensorRows(5, (0,), torch.float32)}, 100) == {(None, "x"): 0}


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"capacity": "12 parsecs"}, ValueError, "capacity must be bytes or text such as '4GB'"),
        ({"capacity": 0}, ValueError, "at least one byte"),
        ({"capacity": 2.5}, TypeError, "capacity"),
        ({"policy": "lru"}, ValueError, "belady, sieve, placed"),
        ({"policy": "placed"}, ValueError, "needs hot="),
        ({"hot": [1]}, ValueError, "hot= is for policy='placed'"),
        ({"policy": "placed", "hot": [1, 1]}, ValueError, "repeated id"),
        ({"policy": "placed", "hot": [-1]}, ValueError, "negative"),
        ({"policy": "placed", "hot": [100]}, IndexError, "id 100.*only 100 rows"),
        ({"policy": "placed", "hot": [0.5]}, TypeError, "integers"),
        ({"look_ahead": 64}, ValueError, "from 0 to 63"),
        ({"look_ahead": -1}, ValueError, "from 0 to 63"),
    ],
    ids=str,
)
def test_bad_arguments(
    source: Counting, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Cached(source, **arguments)


def test_only_stores_are_cached() -> None:
    with pytest.raises(TypeError, match="must be a FeatureStore"):
        Cached({"x": X})  # type: ignore[arg-type]


def test_rows_that_do_not_exist(source: Counting) -> None:
    store = Cached(source, 1000)
    with pytest.raises(IndexError, match="'x': row 100 does not exist, there are only 100 rows"):
        store.get_tensor(attr([1, 100]))
    schedule = store.schedule()
    schedule.announce(0, [attr([100])])
    schedule.announce(1, [attr([5])])
    with schedule.serving(1):
        read(store, [5])
    with schedule.serving(0), pytest.raises(IndexError, match="row 100"):
        store.get_tensor(attr([100]))
    schedule.close()


def test_a_store_that_returns_something_else_is_found_out(source: Counting) -> None:
    store = Cached(source, 1000)
    read(store, [1])
    source.update_tensor(X.double(), group_name=None, attr_name="x", index=None)
    with pytest.raises(ValueError, match=r"returned torch.float64 .* expected torch.float32"):
        store.get_tensor(attr([2]))
