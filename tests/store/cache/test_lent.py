"""Rows that a cache lends: read in place, the same as long as somebody holds them."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import TensorAttr
from torch_geometric.testing import MyFeatureStore

from pyg_scale.ops import library, row_cache
from pyg_scale.ops.lazy_rows import LazyRows
from pyg_scale.store import Cached, MemoryFeatureStore, Quantized
from pyg_scale.store.base import LendsRows
from pyg_scale.store.lending import lends_features

X = torch.arange(100 * 4.0).view(100, 4)  # 16 bytes a row


class Counting(MyFeatureStore):
    """Counts what is read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["rows"] = []

    def _get_tensor(self, attr: TensorAttr) -> Any:
        if isinstance(attr.index, Tensor) and attr.index.numel():
            self.rows.extend(attr.index.tolist())
        return super()._get_tensor(attr)


@pytest.fixture
def source() -> Counting:
    store = Counting()
    store.put_tensor(X, group_name=None, attr_name="x", index=None)
    return store


def attr(index: Any) -> TensorAttr:
    return TensorAttr(None, "x", index=torch.as_tensor(index))


def lent(store: Cached, index: Any) -> LazyRows:
    found = store.lend_rows(attr(index))
    assert found is not None
    return LazyRows(*found)


def places(lazy: LazyRows) -> list[int]:
    found = lazy.unread()
    assert found is not None
    return found[1].tolist()


def test_cached_rows_stay_in_their_slots_and_others_are_brought(source: Counting) -> None:
    store = Cached(source, 16 * 10, "sieve")
    assert isinstance(store, LendsRows) and store.lends_rows
    first = lent(store, [5, 3, 5])
    assert places(first) == [-1, -2, -1]
    second = lent(store, [3, 7, 5, 7])
    assert [place >= 0 for place in places(second)] == [True, False, True, False]
    assert source.rows == [5, 3, 7]
    assert torch.equal(first, X[[5, 3, 5]]) and torch.equal(second, X[[3, 7, 5, 7]])
    assert torch.equal(store.get_tensor(attr([3, 5, 7])), X[[3, 5, 7]])
    stats = store.stats()
    assert (stats["hits"], stats["misses"], stats["late"]) == (7, 3, 0)


def test_a_slot_is_refilled_only_after_its_lease(source: Counting) -> None:
    store = Cached(source, 16 * 2, "sieve")
    store.get_tensor(attr([1, 2]))
    kept = lent(store, [1, 2])
    assert min(places(kept)) >= 0
    for _ in range(2):
        for rows in ([3, 4], [5, 6]):  # which the plan puts into the same slots
            assert torch.equal(store.get_tensor(attr(rows)), X[rows])
            assert torch.equal(kept[:2].clone(), X[[1, 2]])
    assert store.stats()["evictions"] > 0 and store.stats()["late"] == 0
    assert torch.equal(lent(store, [6, 1]), X[[6, 1]])
    assert store.stats()["late"] > 0  # 6 should be in a slot
    source.rows.clear()
    del kept
    gc.collect()
    for _ in range(3):
        store.get_tensor(attr([5, 6]))
    assert source.rows.count(5) <= 2  # it was put into its slot
    source.rows.clear()
    store.get_tensor(attr([5, 6]))
    assert source.rows == []


def test_rows_whose_slots_the_request_refills_are_brought(source: Counting) -> None:
    """Nothing is lost: a row that no announced batch needs makes place for one that is."""
    store = Cached(source, 16 * 2)
    batches = [[1, 2], [1, 3, 4], [3, 4], [3, 4]]
    with contextlib.closing(store.schedule()) as schedule:
        for b, rows in enumerate(batches):
            schedule.announce(b, [attr(rows)])
        kept = []
        for b, rows in enumerate(batches):
            with schedule.serving(b):
                kept.append(lent(store, rows))
    assert source.rows == [1, 2, 3, 4] and store.stats()["late"] == 0
    for rows, lazy in zip(batches, kept, strict=True):
        assert torch.equal(lazy, X[rows])


def test_a_look_ends_the_lease(source: Counting) -> None:
    store = Cached(source, 16 * 2, "sieve")
    store.get_tensor(attr([1, 2]))
    lazy = lent(store, [1, 2])
    cache = store.row_caches()[None, "x"]
    assert cache._pins is not None and cache._pins.tolist() == [1, 1]
    part = lazy[:1]
    assert torch.equal(lazy + 0, X[[1, 2]])
    assert cache._pinned().tolist() == [1, 1]  # by the part, which has not been looked at
    assert torch.equal(part + 0, X[[1]])
    assert cache._pinned().tolist() == [0, 0]


def test_writes_leave_lent_rows_as_they_were(source: Counting) -> None:
    store = Cached(source, 1000)
    lazy = lent(store, [1, 2])
    again = lent(store, [1, 2])
    store.put_tensor(-X, group_name=None, attr_name="x", index=None)
    assert torch.equal(lent(store, [1, 2]), -X[[1, 2]])
    assert torch.equal(lazy, X[[1, 2]]) and torch.equal(again, X[[1, 2]])


def test_an_error_of_the_store_ends_leases(source: Counting, monkeypatch: Any) -> None:
    store = Cached(source, 16 * 4, "sieve")
    store.get_tensor(attr([1, 2]))
    with monkeypatch.context() as patched:
        patched.setattr(Counting, "_get_tensor", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.lend_rows(attr([1, 9]))
    assert torch.equal(lent(store, [1, 9]), X[[1, 9]])
    gc.collect()
    cache = store.row_caches()[None, "x"]
    assert not cache._pinned().any()
    with pytest.raises(IndexError, match="row 100 does not exist"):
        store.lend_rows(attr([1, 100]))


@pytest.mark.parametrize("policy", ["belady", "sieve", "placed"])
def test_values_stay_right_while_rows_are_evicted_by_many_threads(
    source: Counting, policy: str
) -> None:
    hot = torch.arange(0, 100, 3) if policy == "placed" else None
    store = Cached(source, 16 * 12, policy, hot)
    wrong: list[Any] = []
    begin = threading.Barrier(4)

    def work(number: int) -> None:
        draw = random.Random(number)
        held: list[tuple[list[int], LazyRows]] = []
        begin.wait()
        for _ in range(150):
            rows = [int(100 * draw.random() ** 2) for _ in range(draw.randrange(12))]
            if draw.random() < 0.3:
                value = store.get_tensor(attr(torch.tensor(rows, dtype=torch.int64)))
                if not torch.equal(value, X[rows]):
                    wrong.append(rows)
                continue
            held.append((rows, lent(store, torch.tensor(rows, dtype=torch.int64))))
            if len(held) > 3:
                rows, lazy = held.pop(draw.randrange(4))
                if not torch.equal(lazy, X[rows]):
                    wrong.append(rows)
        wrong.extend(rows for rows, lazy in held if not torch.equal(lazy, X[rows]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    cache = store.row_caches()[None, "x"]
    assert not cache._pinned().any()
    assert store.stats()["hits"] > 0


def test_what_cannot_be_lent(source: Counting) -> None:
    source.put_tensor(X.int(), group_name=None, attr_name="y", index=None)
    source.put_tensor(X.view(100, 2, 2), group_name=None, attr_name="z", index=None)
    store = Cached(source, "1MB")
    lends = {name: lends_features(store, TensorAttr(None, name)) for name in "xyz"}
    assert lends == {"x": True, "y": False, "z": False}
    assert not lends_features(source, TensorAttr(None, "x"))
    assert not lends_features(Cached(source, 1), TensorAttr(None, "x"))  # has no slots
    memory = MemoryFeatureStore()
    memory.put_tensor(X, group_name=None, attr_name="x", index=None)
    assert lends_features(Cached(memory, 1), TensorAttr(None, "x"))  # those of the store below


@pytest.mark.parametrize("options", [("int8",), ("fp16",)], ids=str)
def test_quantised_rows_in_a_cache(options: Any) -> None:
    below = Counting()
    usual = Quantized(below, *options)
    usual.put_tensor(X, group_name=None, attr_name="x", index=None)
    expected = usual.get_tensor(attr([9, 1, 4]))
    store = Quantized(Cached(below, 1000), *options)
    for _ in range(2):
        lazy = store.lend_rows(attr([9, 1, 4]))
        assert lazy is not None and torch.equal(LazyRows(*lazy), expected)
    columns = Quantized(Cached(MyFeatureStore(), 1000), "int8", axis="column")
    columns.put_tensor(X, group_name=None, attr_name="x", index=None)
    for _ in range(2):
        lazy = columns.lend_rows(attr([9, 1, 4]))
        assert lazy is not None
        assert torch.equal(LazyRows(*lazy), columns.get_tensor(attr([9, 1, 4])))


def test_ops_have_their_plain_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    found = []
    held = numbers(0, 6, 8)
    slot_at = numbers(-1, 8, 40).int()
    missing = (slot_at < 0).nonzero().view(-1)
    none = torch.empty(0, dtype=torch.int64)
    plan = row_cache.CachePlan(
        slot_at, missing[:2], missing[:1], torch.tensor([3], dtype=torch.int32), missing[2:],
        missing[:1].expand(missing.numel() - 2).contiguous() if missing.numel() > 2 else none,
    )  # fmt: skip
    index = numbers(0, 6, 40)
    for compiled in (True, False):
        monkeypatch.setattr(library, "compiled", lambda given=compiled: given)
        place, moved = row_cache.places(plan, 8)
        pins = torch.zeros(8, dtype=torch.int32)
        before = place.clone()
        late = row_cache.pin(pins, held, place, index, 7)
        pinned = pins.clone()
        row_cache.unpin(pins, place)
        found.append((before, moved, late, place, pinned, pins))
    assert all(map(torch.equal, *found))
    assert found[0][2].numel() and found[0][4].any() and not found[0][5].any()
