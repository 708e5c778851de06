"""Calls that keep no time limit of their own."""

from __future__ import annotations

import threading
import time

import pytest

from pyg_scale.comm.time_limit import Unwanted, check, within


def test_what_a_call_returns_or_raises_comes_through() -> None:
    assert within(10, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        within(10, divmod, 1, 0)


def test_a_call_that_does_not_end_is_left_behind() -> None:
    free = threading.Event()
    with pytest.raises(TimeoutError, match="within 0.05 seconds"):
        within(0.05, free.wait, 60)
    free.set()


@pytest.mark.parametrize("interrupted", ["start", "join"])
def test_nothing_is_left_in_the_middle_of_an_interrupted_call(
    monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    """``Thread.start`` waits, too: Ctrl-C may come when the thread runs already."""
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        try:
            while True:
                check()
                time.sleep(0.01)
        except Unwanted:
            ended.set()

    right = getattr(threading.Thread, interrupted)

    def interrupt(thread: threading.Thread, *_: object) -> None:
        monkeypatch.setattr(threading.Thread, interrupted, right)
        if interrupted == "start":
            right(thread)
        begun.wait(60)
        raise Interrupted

    monkeypatch.setattr(threading.Thread, interrupted, interrupt)
    with pytest.raises(Interrupted):
        within(60, work)
    assert ended.is_set()


class Interrupted(BaseException):
    """As Ctrl-C, which pytest would take for its own."""
