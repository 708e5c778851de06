"""What a store tells whoever reads from it, besides the values: where the rows came from."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass
class Reads:
    """Rows of features, and their bytes.

    Attributes:
        cache_hits: Rows that were in a cache.
        cache_bytes: Their bytes.
        device_rows: Rows that were on the device already.
        device_bytes: Their bytes.
        local_rows: Rows of a partitioned graph that this process read itself.
        local_bytes: Their bytes.
        remote_rows: Rows that other ranks sent; one that is wanted twice at a time is sent once.
        remote_bytes: Their bytes.
    """

    cache_hits: int = 0
    cache_bytes: int = 0
    device_rows: int = 0
    device_bytes: int = 0
    local_rows: int = 0
    local_bytes: int = 0
    remote_rows: int = 0
    remote_bytes: int = 0

    def add(self, other: Reads) -> None:
        """Add the numbers of another."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.reads = Reads()


_thread = _Thread()


def count_hits(rows: int, num_bytes: int = 0) -> None:
    """Called by a store with a cache: so many rows of a read of this thread were in it."""
    _thread.reads.cache_hits += rows
    _thread.reads.cache_bytes += num_bytes


def count_device(rows: int, num_bytes: int) -> None:
    """Called by a store on a device: so many rows of a read of this thread were there."""
    _thread.reads.device_rows += rows
    _thread.reads.device_bytes += num_bytes


def count_local(rows: int, num_bytes: int) -> None:
    """Called by a store of several ranks: this process read so many rows itself."""
    _thread.reads.local_rows += rows
    _thread.reads.local_bytes += num_bytes


def count_remote(rows: int, num_bytes: int) -> None:
    """Called by a store of several ranks: other ranks sent so many rows."""
    _thread.reads.remote_rows += rows
    _thread.reads.remote_bytes += num_bytes


def take_reads() -> Reads:
    """What this thread's reads counted since it asked last."""
    found, _thread.reads = _thread.reads, Reads()
    return found
