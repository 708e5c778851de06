"""Seconds, bytes and rows of every stage of a loader, always counted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
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
    """Sums over batches. Not thread-safe: every batch has its own, the consumer adds them up."""

    def __init__(self) -> None:
        self.batches = 0
        self.in_consumer = 0
        self.now = "waiting for a worker"
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._bytes = dict.fromkeys(STAGES, 0)
        self._rows = dict.fromkeys(STAGES, 0)
        self._reads = dict(_NO_READS)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the seconds spent within it."""
        self.now = name
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def add_seconds(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds

    def count(self, name: str, *, rows: int = 0, num_bytes: int = 0) -> None:
        self._rows[name] += rows
        self._bytes[name] += num_bytes

    def count_reads(self, reads: Reads) -> None:
        for name, value in vars(reads).items():
            self._reads[name] += value

    def add(self, other: Stats) -> None:
        self.batches += other.batches
        self.in_consumer += other.in_consumer
        for name, value in other._reads.items():
            self._reads[name] += value
        for name in STAGES:
            self._seconds[name] += other._seconds[name]
            self._bytes[name] += other._bytes[name]
            self._rows[name] += other._rows[name]

    def and_also(self, other: Stats) -> Stats:
        """The sum of two, as a new object."""
        found = Stats()
        found.add(self)
        found.add(other)
        return found

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"batches": self.batches, "in_consumer": self.in_consumer}
        for name in STAGES:
            out[name] = {
                "seconds": self._seconds[name],
                "bytes": self._bytes[name],
                "rows": self._rows[name],
            }
        out["fetch"] |= self._reads
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
