"""Processes of benchmarks: what they yield comes back, and what becomes of them is told."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyg_scale_bench import memory
from pyg_scale_bench.child import Child, call


def counts(first: int) -> Iterator[dict[str, Any]]:
    for number in range(first, first + 3):
        print("this is for people")
        yield {"number": number, "pid": os.getpid(), "said": os.environ.get("SAID")}


def dies(code: int) -> Iterator[None]:
    sys.exit(code)
    yield


def not_finite() -> Iterator[list[float]]:
    yield [1.0, float("nan")]


def sleeps() -> Iterator[None]:
    time.sleep(1000)
    yield


def fills(num_bytes: int) -> Iterator[int]:
    yield len(b"\1" * num_bytes)


@pytest.fixture(autouse=True)
def found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions above, which pytest has under another name."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    for function in (counts, dies, sleeps, fills, not_finite):
        monkeypatch.setattr(function, "__module__", "test_child")


def test_steps_come_one_by_one() -> None:
    with Child(counts, {"first": 5}, environ={"SAID": "so"}) as child:
        one, two = child.next(), child.next()
    assert (one["number"], two["number"]) == (5, 6)
    assert one["pid"] == two["pid"] != os.getpid()
    assert one["said"] == "so"


def test_what_is_not_finite_comes_as_none() -> None:
    assert call(not_finite, {}) == [1.0, None]


def test_one_that_ends_is_reported() -> None:
    with pytest.raises(SystemExit, match=r"test_child:dies ended with 3, see above"):
        call(dies, {"code": 3})


def test_one_that_takes_too_long_is_ended() -> None:
    with pytest.raises(SystemExit, match=r"it was killed, for memory or for time"):
        call(sleeps, {}, seconds=0.5)


def test_memory_is_limited() -> None:
    try:
        group = memory.MemoryLimit(500 << 20)
    except OSError as error:
        pytest.skip(str(error))
    with group:
        assert call(fills, {"num_bytes": 1 << 20}, group=group) == 1 << 20
        assert 1 << 20 < (group.peak() or 0) < 500 << 20
        with pytest.raises(SystemExit, match=r"it was killed"):
            call(fills, {"num_bytes": 800 << 20}, group=group)
