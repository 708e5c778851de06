"""How many threads a compiled op may use.

A loader with k workers has k threads that each make a batch of their own; an op that split its
work once more would only get in their way. Results never depend on the number.
"""

from __future__ import annotations

import contextlib
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
