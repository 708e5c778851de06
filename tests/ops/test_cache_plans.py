"""What caches keep: against plain Python, with and without kernels, and against the optimum."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_scale.ops import library, row_cache
from pyg_scale.ops.belady import Belady
from pyg_scale.ops.row_cache import CachePlan, Placed
from pyg_scale.ops.sieve import Sieve
from tests.store.cache.oracles import WindowedCache, fewest_misses, min_misses, sieve_misses


@pytest.fixture(params=["never", "require"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)
    return request.param


def requests(seed: int, count: int, rows: int, size: int, repeats: bool = False) -> list[list[int]]:
    """Requests that ask for low rows more often."""
    draw = random.Random(seed)
    out = []
    for _ in range(count):
        asked = [int(rows * draw.random() ** 2) for _ in range(draw.randint(0, size))]
        out.append(asked if repeats else list(dict.fromkeys(asked)))
    return out


def misses_of(asked: list[list[int]], rows: int, slots: int, window: int) -> tuple[int, Belady]:
    """Misses of Belady's rule where each request is announced ``window`` requests before."""
    policy, misses, told = Belady(rows, slots, window), 0, 1
    tensors = [torch.tensor(each, dtype=torch.int64) for each in asked]
    for now, index in enumerate(tensors):
        while told <= min(now + window, len(tensors) - 1):
            policy.announce(tensors[told], told)
            told += 1
        misses += policy.plan(index, now).miss.numel()
    return misses, policy


@settings(max_examples=60)
@given(
    asked=st.lists(st.sets(st.integers(0, 4)).map(sorted), max_size=5), capacity=st.integers(1, 3)
)
def test_with_all_announced_misses_are_as_few_as_can_be(asked: Any, capacity: int) -> None:
    assert misses_of(asked, 5, capacity, 15)[0] == fewest_misses(asked, capacity)


@pytest.mark.parametrize("seed", range(6))
def test_with_all_announced_misses_are_those_of_min(kernels: str, seed: int) -> None:
    asked = requests(seed, 30, 200, 60)
    assert misses_of(asked, 200, 25, 30)[0] == min_misses(asked, 25)


@pytest.mark.parametrize("window", [0, 1, 2, 7, 15, 16, 31, 63])
@pytest.mark.parametrize("size", [10, 80])
def test_a_window_is_as_plain_python_says(kernels: str, window: int, size: int) -> None:
    asked = requests(window, 60, 300, size)
    expected = WindowedCache(40)
    for now, rows in enumerate(asked):
        expected.request(rows, asked[now + 1 : now + 1 + window])
    misses, policy = misses_of(asked, 300, 40, window)
    assert misses == expected.misses
    assert policy.owner[: int(policy.state[0])].tolist() == expected.slots
    assert policy.evictions == expected.evictions


def test_forgetting_is_as_if_nothing_had_been_announced(kernels: str) -> None:
    asked = [torch.tensor(each) for each in requests(3, 30, 100, 20) if each]
    told, plain = Belady(100, 15, 7), Belady(100, 15, 7)
    for now in range(len(asked) - 3):
        for ahead in (1, 2, 3):
            told.announce(asked[now + ahead], now + ahead)
        for ahead in (1, 2, 3):
            told.forget(asked[now + ahead])
        for left, right in zip(told.plan(asked[now], now), plain.plan(asked[now], now)):
            assert torch.equal(left, right)


@pytest.mark.parametrize("capacity", [1, 2, 30, 120])
def test_sieve_is_as_published(kernels: str, capacity: int) -> None:
    asked = requests(capacity, 25, 150, 60, repeats=True)
    policy, misses = Sieve(150, capacity), 0
    for rows in asked:
        misses += policy.plan(torch.tensor(rows, dtype=torch.int64)).miss.numel()
    assert misses == sieve_misses(asked, capacity)
    assert policy.evictions == misses - int(policy.state[0])


def policies() -> dict[str, Any]:
    return {
        "belady": Belady(90, 20, 15),
        "sieve": Sieve(90, 20),
        "placed": Placed(90, torch.tensor([3, 1, 70, 2, 9])),
    }


@pytest.mark.parametrize("name", policies())
def test_plans_with_and_without_kernels_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    ours = policies()[name]
    plain = copy.deepcopy(ours)
    asked = [torch.tensor(each, dtype=torch.int64) for each in requests(5, 40, 90, 50, True)]
    for now, index in enumerate(asked):
        plans = []
        for policy, mode in ((ours, "require"), (plain, "never")):
            monkeypatch.setenv("PYG_SCALE_KERNELS", mode)
            if name == "belady" and now + 1 < len(asked):
                policy.announce(asked[now + 1], now + 1)
            plans.append(policy.plan(index, now))
        for field, left, right in zip(CachePlan._fields, *plans):
            assert left.dtype == right.dtype and torch.equal(left, right), field
        for field, left in vars(ours).items():
            right = vars(plain)[field]
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.mark.parametrize("name", policies())
def test_what_a_plan_says_gives_the_rows(kernels: str, name: str) -> None:
    """Carrying out plans gives the right rows, with no more in the slots than there are."""
    values = torch.randint(0, 256, (90, 12), dtype=torch.uint8)
    policy, rows, held = policies()[name], torch.zeros(20, 12, dtype=torch.uint8), -torch.ones(20)
    held = held.long()
    for each in requests(6, 40, 90, 50, repeats=True):
        index = torch.tensor(each, dtype=torch.int64)
        plan, out = policy.plan(index), torch.zeros(len(each), 12, dtype=torch.uint8)
        row_cache.scatter(values[index[plan.miss]], plan.miss, out)
        assert row_cache.copy(rows, held, plan.slot_at, index, out).numel() == 0
        narrow = out.clone()
        row_cache.scatter(out, plan.again, out, take=plan.same)
        assert torch.equal(out, values[index])
        row_cache.scatter(narrow, plan.again, narrow, take=plan.same.int())
        assert torch.equal(narrow, out)
        row_cache.fill(rows, held, plan.fill_slot, plan.fill, index, out)
        assert plan.fill_slot.unique().numel() == plan.fill_slot.numel()


def test_a_slot_with_another_row_is_not_copied(kernels: str) -> None:
    rows = torch.arange(6, dtype=torch.uint8).view(3, 2)
    out = torch.full((3, 2), 9, dtype=torch.uint8)
    late = row_cache.copy(
        rows, torch.tensor([7, 8, -1]), torch.tensor([1, 0, -1], dtype=torch.int32),
        torch.tensor([8, 5, 4]), out,
    )  # fmt: skip
    assert late.tolist() == [1]
    assert out.tolist() == [[2, 3], [9, 9], [9, 9]]


@pytest.mark.parametrize("name", policies())
@pytest.mark.parametrize("row", [-1, 90, 2**40])
def test_rows_that_do_not_exist_change_nothing(kernels: str, name: str, row: int) -> None:
    policy = policies()[name]
    before = copy.deepcopy(policy)
    with pytest.raises(IndexError, match=f"row {row} does not exist, there are only 90 rows"):
        policy.plan(torch.tensor([3, row, 4]))
    with pytest.raises(IndexError):
        row_cache.lookup(policy.slot_of, torch.tensor([row]))
    for field, value in vars(before).items():
        now = vars(policy)[field]
        assert torch.equal(value, now) if isinstance(value, torch.Tensor) else value == now


@pytest.mark.parametrize("wrong", [5, 2**40, -6, -(2**63)])
def test_rows_are_not_written_where_there_is_no_place(kernels: str, wrong: int) -> None:
    rows, out, places = torch.ones(3, 64), torch.zeros(5, 64), torch.tensor([0, 1, 2])
    rows, out = rows.view(torch.uint8), out.view(torch.uint8)
    bad = torch.tensor([0, wrong, 2])
    with pytest.raises((ValueError, IndexError), match="out of range|out of bounds"):
        row_cache.scatter(rows, bad, out)
    with pytest.raises((ValueError, IndexError), match="out of range|out of bounds"):
        row_cache.scatter(rows, places, out, take=bad)
    if kernels == "require":  # torch writes what comes before
        assert not out.any()


@pytest.mark.parametrize("start", [-1, 2**62, 2**63 - 1])
def test_rows_brought_before_are_a_count(start: int) -> None:
    if not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    pins, held, place = torch.zeros(2, dtype=torch.int32), torch.tensor([5, 6]), torch.tensor([0])
    with pytest.raises(ValueError, match=r"next must be from 0 to 2\*\*62 - 1"):
        row_cache.pin(pins, held, place, torch.tensor([7]), start)
    assert place.tolist() == [0]
