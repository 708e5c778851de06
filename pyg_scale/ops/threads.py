"""The number of threads that a compiled op may use.

A loader with k workers has k threads that each make a batch of their own; an op that split its
work once more would only get in their way. Results never depend on the number.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

WAITING = 32
"""Threads of an op that waits for a disk more than it works: a disk delivers several times as much
if it is asked for that many pages at a time."""

_state = threading.local()


def num_threads() -> int:
    """The number of threads for an op that is called now, by this thread."""
    return 1 if getattr(_state, "serial", False) else torch.get_num_threads()


@contextlib.contextmanager
def serial() -> Iterator[None]:
    """Within it, and on this thread only, ops use one thread."""
    before = getattr(_state, "serial", False)
    _state.serial = True
    try:
        yield
    finally:
        _state.serial = before


_forked = False  # since torch made its pool of threads
_renewing = threading.Lock()


def _note_fork() -> None:
    global _forked, _renewing
    _forked, _renewing = True, threading.Lock()


os.register_at_fork(after_in_child=_note_fork)


def renew_pool_after_fork() -> None:
    """Let torch make its pool of threads anew in a fork; call it before threads that use torch.

    It does so in the first call there that uses any, without a lock: a second thread that makes
    such a call meanwhile raises "Invalid thread pool!".
    """
    global _forked
    with _renewing:
        if _forked:
            torch.set_num_threads(torch.get_num_threads())
            _forked = False
