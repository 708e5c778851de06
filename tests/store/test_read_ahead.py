"""Passes over a file in the background: in order, within their room, errors to who waits."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_scale.store import read_ahead
from pyg_scale.store.cache.pending import Read
from pyg_scale.store.read_ahead import ReadAhead, ReadAheadBatch

FILE = torch.arange(1000 * 8, dtype=torch.int64).view(1000, 8).view(torch.uint8)
"""1000 rows of 64 bytes."""
ROW = FILE.size(1)


class Disk:
    """Reads, and knows what it read."""

    def __init__(self) -> None:
        self.reads: list[list[int]] = []
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Event()
        self.bad = -1

    def read(self, rows: Tensor, position: Tensor, out: Tensor) -> None:
        self.begun.set()
        assert self.go.wait(20)
        self.reads.append(rows.tolist())
        if self.bad in rows.tolist():
            raise OSError("the disk is gone")
        out[position] = FILE[rows]


def never() -> bool:
    return False


def take(coming: ReadAheadBatch) -> list[int] | None:
    """The rows that a request gets."""
    count = coming.rows.numel()
    out = torch.full((count + 1, ROW), 7, dtype=torch.uint8)
    if not coming.take(torch.arange(count).flip(0), out, never):
        return None
    assert bool((out[-1] == 7).all())
    return out[:-1].flip(0).contiguous().view(torch.int64)[:, 0].div(8).long().tolist()


def settle(ahead: ReadAhead) -> None:
    """Until nothing is read any more."""
    deadline = time.monotonic() + 20
    while (reader := ahead._reader) is not None and time.monotonic() < deadline:
        reader.join(0.01)


def random_rows(sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randperm(1000, generator=g)[:size] for size in sizes]


@pytest.mark.parametrize("least", [4 << 20, 64 * 20])
def test_everybody_gets_their_rows(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    monkeypatch.setattr(read_ahead, "LEAST", least)
    ahead, disk = ReadAhead(), Disk()
    rows = random_rows([100, 0, 37, 400, 1])
    for each, found in zip(rows, ahead.ask(rows, ROW, disk.read, 1 << 20)):
        assert take(found) == each.tolist()
    settle(ahead)
    assert ahead.held == 0
    assert len(disk.reads) == (1 if least > ROW * 1000 else 16)
    assert sorted(chain(*disk.reads)) == sorted(torch.cat(rows).tolist())
    if len(disk.reads) > 1:  # sections are in the order of the file, and of about the same length
        assert all(max(one) < min(two) for one, two in zip(disk.reads, disk.reads[1:]))
        assert max(map(len, disk.reads)) < 538 / 16 * 4


def test_no_more_is_held_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "LEAST", ROW * 10)
    ahead, disk, room = ReadAhead(), Disk(), ROW * 400
    one, two = random_rows([50] * 8), random_rows([50] * 8, seed=1)
    first = ahead.ask(one, ROW, disk.read, room)
    settle(ahead)
    assert ahead.held == room and all(each.there.is_set() for each in first)
    second = ahead.ask(two, ROW, disk.read, room)
    for number, each in enumerate(first):  # what one leaves the other fills, no more
        settle(ahead)
        assert ahead.held <= room
        assert number < 2 or ahead.held > 0.8 * room
        assert not any(each.there.is_set() for each in second)
        assert take(each) == one[number].tolist()
    settle(ahead)
    assert ahead.held == room
    for each, expected in zip(second, two):
        assert each.there.is_set() and take(each) == expected.tolist()
    assert ahead.held == 0


def test_where_the_script_has_ended_nobody_waits_for_a_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_ahead, "LEAST", ROW * 10)
    ahead, disk = ReadAhead(), Disk()
    disk.go.clear()
    found = ahead.ask(random_rows([100]), ROW, disk.read, 1 << 20)
    assert disk.begun.wait(20)
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    threading.Timer(0.3, disk.go.set).start()
    begun = time.monotonic()
    assert take(found[0]) is None  # it reads them itself
    assert take(ahead.ask(random_rows([100]), ROW, disk.read, 1 << 20)[0]) is None
    assert time.monotonic() - begun < 20
    settle(ahead)
    assert len(disk.reads) == 1 and ahead.held == 0


def test_memory_is_used_again_and_given_back_in_the_end() -> None:
    ahead, row, count = ReadAhead(), 1 << 12, 1024
    asked, out = torch.arange(count), torch.zeros(count, row, dtype=torch.uint8)

    def read(rows: Tensor, position: Tensor, out: Tensor) -> None:
        out[position] = 1

    found = ahead.ask([asked] * 4, row, read, 1 << 30)
    settle(ahead)
    rows = weakref.ref(found[0].held[0].rows)
    assert 0 <= _resident(rows()) - 4 * count * row < 2 << 20  # in whole huge pages
    for _ in range(5):
        found += ahead.ask([asked], row, read, 1 << 30)
        settle(ahead)
        assert found.pop(0).take(asked, out, never)
    assert all(held.rows is rows() for each in found for held in each.held)
    assert _resident(rows()) - 5 * count * row < 2 << 20
    for each in found:
        assert each.take(asked, out, never)
    assert rows() is None  # all of it is gone before the garbage collector comes


def _resident(values: Tensor | None) -> int:
    """Bytes of a tensor that are in memory."""
    assert values is not None
    pages = -(-values.numel() // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    size = ctypes.c_size_t(values.numel())
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(values.data_ptr()), size, found)
    return sum(each & 1 for each in found) * mmap.PAGESIZE


def test_what_somebody_waits_for_is_read_though_there_is_no_room() -> None:
    ahead, disk = ReadAhead(), Disk()
    (kept,) = ahead.ask(random_rows([100]), ROW, disk.read, ROW * 100)
    others = [ahead.ask(random_rows([90], seed), ROW, disk.read, ROW * 100)[0] for seed in (1, 2)]
    settle(ahead)
    assert len(disk.reads) == 1
    assert take(others[1]) == random_rows([90], 2)[0].tolist()  # the last that was asked for
    assert len(disk.reads) == 2 and take(kept) is not None and take(others[0]) is not None


def test_what_nobody_needs_is_not_read() -> None:
    ahead, disk = ReadAhead(), Disk()
    disk.go.clear()
    first = ahead.ask(random_rows([10, 10]), ROW, disk.read, 1 << 20)
    second = ahead.ask([torch.arange(5), torch.arange(5, 10)], ROW, disk.read, 1 << 20)
    third = ahead.ask([torch.arange(20, 25)], ROW, disk.read, 1 << 20)
    assert disk.begun.wait(20)
    for each in (*first, second[1], *third):
        each.forget()
    disk.go.set()
    settle(ahead)
    assert [sorted(each) for each in disk.reads[1:]] == [[0, 1, 2, 3, 4]]
    assert ahead.held == 5 * ROW and take(first[0]) is None
    assert take(second[0]) == [0, 1, 2, 3, 4] and ahead.held == 0


def test_a_read_that_fails_is_for_those_who_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows are elsewhere in the file gets them."""
    monkeypatch.setattr(read_ahead, "LEAST", ROW * 10)
    ahead, disk = ReadAhead(), Disk()
    disk.bad = 700
    rows = [torch.arange(600, 800), torch.arange(0, 200)]
    found = ahead.ask(rows, ROW, disk.read, 1 << 20)
    assert take(found[0]) is None and take(found[1]) == rows[1].tolist()
    settle(ahead)
    assert ahead.held == 0


def test_who_forgot_rows_does_not_wait_for_them() -> None:
    """As an iteration whose plans were dropped for another one that reads now."""
    ahead, disk = ReadAhead(), Disk()
    (before,) = ahead.ask(random_rows([10]), ROW, disk.read, 1 << 20)
    settle(ahead)
    disk.go.clear()
    (coming,) = ahead.ask([torch.arange(4)], ROW, disk.read, 1 << 20)
    (other,) = ahead.ask([torch.arange(4)], ROW, disk.read, 1 << 20)
    coming.forget()
    out = torch.empty(10, ROW, dtype=torch.uint8)
    assert not coming.take(torch.arange(4), out, lambda: pytest.fail("it waited"))
    disk.go.set()
    assert take(other) == [0, 1, 2, 3] and take(before) is not None


def test_rows_that_are_forgotten_while_they_are_taken_are_read_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may fill their memory before all of them are copied."""
    ahead, disk, scatter = ReadAhead(), Disk(), read_ahead.row_cache.scatter
    one, _ = ahead.ask([torch.arange(4), torch.arange(9)], ROW, disk.read, 1 << 20)
    settle(ahead)

    def late(*args: Any, **kwargs: Any) -> None:
        one.forget()
        scatter(*args, **kwargs)

    monkeypatch.setattr(read_ahead.row_cache, "scatter", late)
    assert take(one) is None


@pytest.mark.parametrize("given_up", [False, True])
def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch, given_up: bool) -> None:
    if not given_up:
        monkeypatch.setattr(read_ahead, "LIMIT", 0.01)
    ahead, disk = ReadAhead(), Disk()
    disk.go.clear()
    (coming,) = ahead.ask([torch.arange(4)], ROW, disk.read, 1 << 20)
    assert not coming.take(
        torch.arange(4), torch.empty(4, ROW, dtype=torch.uint8), lambda: given_up
    )
    disk.go.set()
    settle(ahead)
    assert ahead.held == 0


def test_where_no_thread_can_be_started_everybody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    reads: Read = Disk().read
    found = ReadAhead().ask([torch.arange(4)], ROW, reads, 1 << 20)
    assert take(found[0]) is None
