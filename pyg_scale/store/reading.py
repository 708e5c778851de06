"""What a store tells whoever reads from it, besides the values: how many rows cost no read."""

from __future__ import annotations

import threading


class _Thread(threading.local):
    hits = 0


_thread = _Thread()


def count_hits(rows: int) -> None:
    """Called by a store with a cache: so many rows of a read of this thread were in it."""
    _thread.hits += rows


def take_hits() -> int:
    """How many rows this thread's reads found in caches since it asked last."""
    hits, _thread.hits = _thread.hits, 0
    return hits
