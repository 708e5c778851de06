"""Seconds, bytes and rows of every stage of a loader, always counted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_scale.store.reading import Reads

STAGES = ("sample", "fetch", "copy", "transform", "pin", "wait")
"""The stages of a batch.

``sample``: rows are sampled edges, bytes those of the sampler's output. ``fetch``: rows are
feature rows read, bytes what they hold, and where a store says it, where they came from
(:class:`~pyg_scale.store.reading.Reads`: cache, parts that are here, other ranks).
``copy``: with ``device=``, seconds that batches took to be sent there, but for features that the
store brought; rows are batches. ``transform``: rows are batches. ``pin``: rows are batches
copied to pinned memory, bytes what they hold. ``wait``: seconds the consumer waited for workers.
"""

_NO_READS = vars(Reads())


class Stats:
    """Sums over batches. Not thread-safe: every batch has its own, the consumer adds them up.

    Sums are kept of what was counted alone: a batch takes part in few stages, and adding it up
    should cost little.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.in_consumer = 0
        self.now = "waiting for a worker"
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._reads: dict[str, int] = {}

    def stage(self, name: str) -> AbstractContextManager[Any]:
        """Counts the seconds spent within it."""
        return _Stage(self, name)

    def add_seconds(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def count(self, name: str, *, rows: int = 0, num_bytes: int = 0) -> None:
        self._rows[name] = self._rows.get(name, 0) + rows
        self._bytes[name] = self._bytes.get(name, 0) + num_bytes

    def count_reads(self, reads: Reads) -> None:
        _add(self._reads, vars(reads))

    def add(self, other: Stats) -> None:
        self.batches += other.batches
        self.in_consumer += other.in_consumer
        _add(self._seconds, other._seconds)
        _add(self._bytes, other._bytes)
        _add(self._rows, other._rows)
        _add(self._reads, other._reads)

    def and_also(self, other: Stats) -> Stats:
        """The sum of two, as a new object."""
        found = Stats()
        found.batches = self.batches + other.batches
        found.in_consumer = self.in_consumer + other.in_consumer
        found._seconds = _sum(self._seconds, other._seconds)
        found._bytes = _sum(self._bytes, other._bytes)
        found._rows = _sum(self._rows, other._rows)
        found._reads = _sum(self._reads, other._reads)
        return found

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"batches": self.batches, "in_consumer": self.in_consumer}
        for name in STAGES:
            out[name] = {
                "seconds": self._seconds.get(name, 0.0),
                "bytes": self._bytes.get(name, 0),
                "rows": self._rows.get(name, 0),
            }
        out["fetch"] |= _NO_READS | self._reads
        return out

    def plain(self) -> dict[str, Any]:
        """All counts as values that JSON can represent."""
        return dict(vars(self))

    @classmethod
    def from_plain(cls, found: dict[str, Any]) -> Stats:
        """The counts of :meth:`plain`."""
        stats = cls()
        stats.__dict__.update(found)
        return stats


class _Stage(AbstractContextManager[Any]):
    """A stage, from when it is made: a generator would cost a small batch several times as much."""

    __slots__ = ("_name", "_start", "_stats")

    def __init__(self, stats: Stats, name: str) -> None:
        stats.now = name
        self._stats, self._name, self._start = stats, name, time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._stats.add_seconds(self._name, time.perf_counter() - self._start)


def _sum(first: dict[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    sums = first.copy()
    if second:
        _add(sums, second)
    return sums


def _add(sums: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        sums[name] = sums[name] + value if name in sums else value


class Counted:
    """The costs of the batches that were handed out; the sum is replaced, never changed."""

    def __init__(self) -> None:
        self.sum = Stats()


def added(stats: Stats, epoch: Counted, total: Counted) -> tuple[Stats, Stats]:
    """The sums of both with one batch more, as new objects."""
    return epoch.sum.and_also(stats), total.sum.and_also(stats)


def count_sampled(out: SamplerOutput | HeteroSamplerOutput, stats: Stats) -> None:
    """Rows are edges, bytes those of nodes and edges."""
    rows = size = 0
    for name in ("node", "row", "col", "edge"):
        value = getattr(out, name)
        for tensor in value.values() if isinstance(value, dict) else (value,):
            if isinstance(tensor, Tensor):
                size += tensor.numel() * tensor.element_size()
                rows += tensor.numel() if name == "row" else 0
    stats.count("sample", rows=rows, num_bytes=size)
