"""Events in the order of time: PyG's batches, keyed negatives, any number of workers, resumed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch_geometric.loader as pyg
from torch_geometric.data import TemporalData

from pyg_scale.loader import TemporalDataLoader
from pyg_scale.ops import keys
from pyg_scale.testing import statistics

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 3, "prefetch_factor": 1},
    {"num_workers": 1, "worker_type": "process"},
]


def events(count: int = 103) -> TemporalData:
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(0, 40, (count,), generator=generator)
    dst = torch.randint(40, 60, (count,), generator=generator)
    t = torch.randint(0, 30, (count,), generator=generator).sort().values
    return TemporalData(src=src, dst=dst, t=t, msg=torch.rand(count, 3), y=torch.arange(count))


def contents(batch: TemporalData) -> dict[str, Any]:
    return dict(batch._store.items())


def assert_same(left: Any, right: Any) -> None:
    left, right = [contents(b) for b in left], [contents(b) for b in right]
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value.dtype == other[name].dtype
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 10, 103, 200])
def test_batches_are_those_of_pyg(batch_size: int, drop_last: bool) -> None:
    data = events()
    theirs = pyg.TemporalDataLoader(data, batch_size, drop_last=drop_last)
    ours = TemporalDataLoader(data, batch_size, drop_last=drop_last)
    assert isinstance(ours, pyg.TemporalDataLoader)
    if not (drop_last and batch_size == 200):  # PyG gives a batch of a negative range then
        assert len(ours) == len(theirs)
        assert_same(ours, theirs)
    assert len(ours) == (103 // batch_size if drop_last else -(-103 // batch_size))


def test_negatives_follow_from_the_key_of_the_batch() -> None:
    data = events()
    for position, batch in enumerate(TemporalDataLoader(data, 20, 1.5, seed=9)):
        count = round(1.5 * batch.src.numel())
        key = keys.fold(keys.batch_key(9, 0, position), 26)
        drawn = keys.bounded(
            torch.full((count,), keys.to_signed(key)), torch.arange(count), torch.tensor(20)
        )
        assert torch.equal(batch.neg_dst, drawn + 40)
        assert torch.equal(batch.n_id, torch.cat([batch.src, batch.dst, batch.neg_dst]).unique())


def test_negatives_are_uniform() -> None:
    data = events(4000)
    found = torch.cat([batch.neg_dst for batch in TemporalDataLoader(data, 500, 2.0, seed=3)])
    assert found.numel() == 8000
    count = torch.bincount(found - 40, minlength=20)
    statistics.require(statistics.multinomial(count), f"negatives: {count.tolist()}")


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_workers_make_the_same_batches(workers: dict[str, Any]) -> None:
    data = events()
    expected = list(TemporalDataLoader(data, 9, 1.0, seed=4))
    assert_same(expected, TemporalDataLoader(data, 9, 1.0, seed=4, **workers))


def test_an_epoch_has_negatives_of_its_own_and_torch_decides_without_a_seed() -> None:
    data = events()
    loader = TemporalDataLoader(data, 50, 1.0, seed=4)
    first, second = list(loader), list(loader)
    assert torch.equal(first[0].src, second[0].src)
    assert not torch.equal(first[0].neg_dst, second[0].neg_dst)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)
        one = list(TemporalDataLoader(data, 50, 1.0))
        torch.manual_seed(12)
        assert_same(one, TemporalDataLoader(data, 50, 1.0))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}], ids=str)
def test_resuming(workers: dict[str, Any]) -> None:
    data = events()
    expected = list(TemporalDataLoader(data, 10, 1.0, seed=4))
    loader = TemporalDataLoader(data, 10, 1.0, seed=4, **workers)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    again = TemporalDataLoader(data, 10, 1.0, seed=4)
    again.load_state_dict(loader.state_dict())
    assert_same(expected[4:], again)


def test_a_batch_has_memory_of_its_own() -> None:
    data = events()
    batch = next(iter(TemporalDataLoader(data, 10)))
    batch.msg.zero_()
    assert float(data.msg[:10].sum()) > 0


def test_a_call_takes_the_first_event_as_in_pyg() -> None:
    data = events()
    loader = TemporalDataLoader(data, 10, 1.0, seed=1)
    assert loader([25]).y.tolist() == list(range(25, 35))
    assert torch.equal(loader([25]).neg_dst, loader([25]).neg_dst)
    assert not torch.equal(loader([25]).neg_dst, loader([26]).neg_dst)
    with pytest.raises(IndexError, match="event 103 does not exist: there are 103"):
        loader([103])


@pytest.mark.parametrize("count", [4, 104, 140])
def test_events_whose_number_is_changed_are_refused(count: int) -> None:
    data = events()
    loader = TemporalDataLoader(data, 10, 1.0)
    for name, value in events(count)._store.items():
        data[name] = value
    for make in (lambda: next(iter(loader)), lambda: loader([0])):
        with pytest.raises(ValueError, match=f"data.src had 103 rows .* has {count} now"):
            make()


def not_a_number() -> TemporalData:
    data = events()
    data.t = data.t.double()
    data.t[5] = torch.nan
    return data


def unsorted() -> TemporalData:
    data = events()
    data.t = data.t.flip(0)
    return data


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: TemporalDataLoader(unsorted()), ValueError, "is earlier than the one before it"),
        (lambda: TemporalDataLoader([1]), TypeError, "data must be a TemporalData"),
        (lambda: TemporalDataLoader(TemporalData(src=torch.ones(2))), ValueError, "must have dst"),
        (lambda: TemporalDataLoader(events(), 0), ValueError, "batch_size must be at least 1"),
        (lambda: TemporalDataLoader(events(), 1, -1.0), ValueError, "must not be negative"),
        (lambda: TemporalDataLoader(events(), 1, math.inf), ValueError, "must be finite"),
        (lambda: TemporalDataLoader(events(), 1, math.nan), ValueError, "must be finite"),
        (lambda: TemporalDataLoader(not_a_number()), ValueError, "data.t has NaN"),
        (lambda: TemporalDataLoader(events())([]), ValueError, "arange is empty"),
        (lambda: TemporalDataLoader(events(), shuffle=True), ValueError, "order of time"),
        (lambda: TemporalDataLoader(events(), split_batches=True), ValueError, "stays whole"),
    ],
)
def test_wrong_input(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()
