"""Rounds of measurements: every case once per round, so that a slow minute hits all alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tqdm import tqdm

from pyg_scale.cli.bench import memory

OURS, PYG, LIMIT = "pyg_scale", "PyG", "limit"
"""Whose a case is."""


@dataclass(frozen=True)
class Counts:
    """What one batch holds: sampled nodes, sampled edges, bytes of gathered features."""

    nodes: int
    edges: int
    bytes: int = 0


Stream = Callable[[], Iterator[Counts]]
"""Starts anew and yields the counts of one batch after the other."""


@dataclass
class Case:
    """One thing to measure, and what was found.

    Attributes:
        group: The table it belongs to.
        label: Its name in that table.
        side: :data:`OURS`, :data:`PYG` or :data:`LIMIT`.
        variant: The graph it runs on.
        workers: Of a loader; ``None`` elsewhere.
        stream: Makes the batches. What it raises on PyG's side becomes ``error``.
        rates: Batches per second, one number per round.
        timed: Batches per round that were timed.
        mean: Means of :class:`Counts` per batch.
        error: Why there are no numbers, in one line.
        notes: Anything else, by name.
    """

    group: str
    label: str
    side: str
    variant: str
    stream: Stream = field(repr=False)
    workers: int | None = None
    rates: list[float] = field(default_factory=list)
    timed: int = 0
    mean: dict[str, float] = field(default_factory=dict)
    error: str = ""
    notes: dict[str, Any] = field(default_factory=dict)

    def release(self) -> None:
        """Let go of the graph; the case cannot be measured after this."""
        self.stream = _released

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and reports, with median and spread."""
        out = {k: v for k, v in vars(self).items() if k != "stream"}
        if self.rates:
            middle = median(self.rates)
            out |= {
                "batches_per_s": middle,
                "batches_per_s_low": min(self.rates),
                "batches_per_s_high": max(self.rates),
                "edges_per_s": middle * self.mean["edges"],
            }
        return out


def _released() -> Iterator[Counts]:
    raise RuntimeError("this case was released")


def run_rounds(
    cases: Sequence[Case], repeats: int, warmup: int, batches: int, max_seconds: float
) -> None:
    """Measure every case ``repeats`` times, in rounds.

    Args:
        cases: Filled in here.
        repeats: Rounds.
        warmup: Batches before the clock starts.
        batches: Batches on the clock, fewer if ``max_seconds`` are over, but at least three.
        max_seconds: After which a case's round ends early.
    """
    for turn in range(repeats):
        for case in tqdm(cases, desc=f"Round {turn + 1} of {repeats}", leave=False, disable=None):
            if case.error:
                continue
            try:
                _run(case, warmup, batches, max_seconds)
            except Exception as error:
                if case.side == OURS:
                    raise
                case.error = in_one_line(error)


def in_one_line(error: Exception) -> str:
    """An error's type and message; of one from a worker process, that of the worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "worker process" in lines[0]:
        return lines[-1]
    return f"{type(error).__name__}: {' '.join(lines)}"


def resident(
    label: str, variant: str, stream: Stream, batches: int, max_seconds: float
) -> dict[str, Any]:
    """Watch memory over many batches: after a start, it must not grow.

    Args:
        label: Whose stream it is.
        variant: The graph it runs on.
        stream: Its first batch is made after the first look at memory.
        batches: How many, fewer if ``max_seconds`` are over.
        max_seconds: After which it ends early.

    Returns:
        Bytes ``before``, ``at_early`` (batch number ``early``), ``largest_after`` that batch,
        ``peak`` above ``before``, of ``workers`` (processes, what they hold for themselves), of the
        features of the largest batch; ``None`` where the system does not say.
    """
    gc.collect()
    before, early = memory.resident(), min(50, batches // 2)
    memory.reset_peak()
    at_early: int | None = None
    largest, biggest, number, start = 0, 0, 0, time.perf_counter()
    source = stream()
    try:
        for number, one in zip(range(1, batches + 1), source):
            biggest = max(biggest, one.bytes)
            now = memory.resident() or 0
            at_early = now if number == early else at_early
            largest = max(largest, now) if number > early else largest
            if time.perf_counter() - start > max_seconds:
                break
        top, workers = memory.peak(), memory.children()
    finally:
        _close(source)
    return {
        "label": label,
        "variant": variant,
        "batches": number,
        "early": early,
        "before": before,
        "at_early": at_early,
        "largest_after": largest if number > early else None,
        "peak": None if top is None or before is None else max(0, top - before),
        "workers": workers,
        "bytes_per_batch": biggest,
    }


def _close(source: Iterator[Counts]) -> None:
    close = getattr(source, "close", None)
    if close is not None:
        close()


def build(found: list[dict[str, Any]], label: str, variant: str, make: Callable[[], Any]) -> Any:
    """Make a sampler; append the seconds and the memory it took to ``found``, measured once."""
    gc.collect()
    before = memory.resident()
    memory.reset_peak()
    start = time.perf_counter()
    sampler = make()
    seconds = time.perf_counter() - start
    entry: dict[str, Any] = {"label": label, "variant": variant, "seconds": seconds}
    for name, now in (("peak_bytes", memory.peak()), ("kept_bytes", memory.resident())):
        entry[name] = None if now is None or before is None else max(0, now - before)
    found.append(entry)
    return sampler


def _run(case: Case, warmup: int, batches: int, max_seconds: float) -> None:
    gc.collect()
    stream = case.stream()
    try:
        for _ in range(warmup):
            next(stream)
        total, count = Counts(0, 0), 0
        start = time.perf_counter()
        while count < batches:
            one = next(stream)
            total = Counts(
                total.nodes + one.nodes, total.edges + one.edges, total.bytes + one.bytes
            )
            count += 1
            seconds = time.perf_counter() - start
            if seconds > max_seconds and count >= min(3, batches):
                break
    finally:
        _close(stream)
    case.rates.append(count / seconds)
    case.timed = count
    case.mean = {name: value / count for name, value in vars(total).items()}
