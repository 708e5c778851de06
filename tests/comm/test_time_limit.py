"""Calls that keep no time limit of their own."""

from __future__ import annotations

import threading

import pytest

from pyg_scale.comm.time_limit import within


def test_what_a_call_returns_or_raises_comes_through() -> None:
    assert within(10, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        within(10, divmod, 1, 0)


def test_a_call_that_does_not_end_is_left_behind() -> None:
    free = threading.Event()
    with pytest.raises(TimeoutError, match="within 0.05 seconds"):
        within(0.05, free.wait, 60)
    free.set()
