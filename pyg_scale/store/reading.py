"""Statistics of reads from stores: the sources of the rows."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass
class Reads:
    """Rows of features, and their bytes.

    Attributes:
        cache_hits: Number of rows that were in a cache.
        cache_bytes: Their bytes.
        device_rows: Number of rows that were already on the device.
        device_bytes: Their bytes.
        local_rows: Number of rows of a partitioned graph that this process read itself.
        local_bytes: Their bytes.
        remote_rows: Number of rows that other ranks sent; a row that a read wants twice is sent
            once.
        remote_bytes: Their bytes.
        lent_rows: Number of rows that were left where they are (``lazy_x=True``).
        lent_bytes: Their bytes there.
    """

    cache_hits: int = 0
    cache_bytes: int = 0
    device_rows: int = 0
    device_bytes: int = 0
    local_rows: int = 0
    local_bytes: int = 0
    remote_rows: int = 0
    remote_bytes: int = 0
    lent_rows: int = 0
    lent_bytes: int = 0


class _Thread(threading.local):
    def __init__(self) -> None:
        self.reads = Reads()


_thread = _Thread()


def count_hits(rows: int, num_bytes: int = 0) -> None:
    """Called by a store with a cache: add rows of this thread's read that were in it."""
    _thread.reads.cache_hits += rows
    _thread.reads.cache_bytes += num_bytes


def count_device(rows: int, num_bytes: int) -> None:
    """Called by a store on a device: add rows of this thread's read that were on it."""
    _thread.reads.device_rows += rows
    _thread.reads.device_bytes += num_bytes


def count_local(rows: int, num_bytes: int) -> None:
    """Called by a store of several ranks: add rows that this process read itself."""
    _thread.reads.local_rows += rows
    _thread.reads.local_bytes += num_bytes


def count_remote(rows: int, num_bytes: int) -> None:
    """Called by a store of several ranks: add rows that other ranks sent."""
    _thread.reads.remote_rows += rows
    _thread.reads.remote_bytes += num_bytes


def count_lent(rows: int, num_bytes: int) -> None:
    """Called by who reads for a batch: add rows that are left where they are."""
    _thread.reads.lent_rows += rows
    _thread.reads.lent_bytes += num_bytes


def take_reads() -> Reads:
    """Return the counts of this thread's reads since the last call."""
    found, _thread.reads = _thread.reads, Reads()
    return found
