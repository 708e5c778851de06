"""The number of threads that a compiled op may use.

A loader with k workers has k threads that each make their own batch; an op that also split its work
would only slow them down. Results never depend on the number.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

WAITING = 32
"""Number of threads of an op that mostly waits for a disk: a disk delivers several times as much
with this many requests at a time.
"""

_state = threading.local()


def num_threads() -> int:
    """Number of threads for an op that this thread calls now."""
    return 1 if getattr(_state, "serial", False) else torch.get_num_threads()


@contextlib.contextmanager
def serial() -> Iterator[None]:
    """A context in which ops called by this thread use one thread."""
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
    """Have torch make its thread pool anew in a fork; call it before threads that use torch.

    Torch does so without a lock in the first call that uses the pool: if a second thread makes such
    a call meanwhile, it raises "Invalid thread pool!".
    """
    global _forked
    with _renewing:
        if _forked:
            torch.set_num_threads(torch.get_num_threads())
            _forked = False
