"""A run as a Chrome trace: for Perfetto (ui.perfetto.dev) and chrome://tracing.

The form is the Trace Event Format: complete events (``X``) that nest, counters (``C``), and names
of processes and threads (``M``). A rank is a process, so ranks are shown below each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyg_scale.files.place import replace_file
from pyg_scale.train.recording.run import Rank, Run
from pyg_scale.train.steps import Step

_LOOP, _SPANS = 1, 2
_THREADS = {_LOOP: "training loop", _SPANS: "besides steps"}


def write_trace(run: Run, path: str | Path) -> None:
    """Write the trace of all ranks of a run as one file.

    Within a step, waiting for other ranks is drawn after computing: when exactly a rank waited is
    not recorded, only for how long.

    Raises:
        OSError: If the file cannot be written.
    """
    content = {"traceEvents": list(trace_events(run)), "displayTimeUnit": "ms"}
    replace_file(Path(path), json.dumps(content, allow_nan=False), durable=False)


def trace_events(run: Run) -> Iterator[dict[str, Any]]:
    """The events of a run; times are in microseconds since all ranks began together."""
    for rank in run.ranks:
        yield _name("process_name", rank.rank, 0, f"rank {rank.rank} on {rank.host}")
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": rank.rank,
            "tid": 0,
            "args": {"sort_index": rank.rank},
        }
        for thread, name in _THREADS.items():
            yield _name("thread_name", rank.rank, thread, name)
        for step in rank.steps:
            yield from _of_step(rank, step)
        for span in rank.spans:
            begin = _nanoseconds(span.begin)
            end = _nanoseconds(span.begin + span.seconds)
            yield _complete(span.name, rank.rank, _SPANS, begin, end, {})
        for memory in rank.memory:
            sizes = {"process": memory.process, "device": memory.device}
            yield _counter("memory in bytes", rank.rank, memory.begin, sizes)


def _of_step(rank: Rank, step: Step) -> Iterator[dict[str, Any]]:
    begin = _nanoseconds(step.begin)
    there = max(begin, _nanoseconds(step.begin + step.load))
    computed = max(there, _nanoseconds(step.begin + step.load + step.compute))
    end = max(computed, _nanoseconds(step.begin + step.load + step.body))
    finite = {name: value for name, value in step.values.items() if math.isfinite(value)}
    about = {
        "epoch": step.epoch,
        "seeds": step.seeds,
        **{f"{stage} in ms": round(1e3 * seconds, 3) for stage, seconds in step.stages.items()},
        **step.counts,
        **finite,
    }
    yield _complete(f"step {step.number}", rank.rank, _LOOP, begin, end, about)
    yield _complete("load", rank.rank, _LOOP, begin, there, {})
    yield _complete("compute", rank.rank, _LOOP, there, computed, {})
    if end > computed and step.exchange:
        yield _complete("wait for ranks", rank.rank, _LOOP, computed, end, {})
    for name, value in finite.items():
        yield _counter(name, rank.rank, step.begin + step.load + step.body, {name: value})


def _nanoseconds(seconds: float) -> int:
    return max(0, round(1e9 * seconds))


def _complete(
    name: str, rank: int, thread: int, begin: int, end: int, about: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": thread,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": about,
    }


def _counter(name: str, rank: int, seconds: float, values: dict[str, Any]) -> dict[str, Any]:
    at = _nanoseconds(seconds) / 1000
    return {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": at, "args": values}


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}
