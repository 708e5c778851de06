"""Streams of counted batches, made by our or PyG's code, and measured in rounds."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput

from pyg_scale.ops import library
from pyg_scale_bench import memory, peers, rounds

LIMIT = "limit"
"""The side of the limit that no loader can exceed."""


@dataclass(frozen=True)
class Counts:
    """Counts of one batch: sampled nodes, sampled edges, bytes of gathered features."""

    nodes: int
    edges: int
    bytes: int = 0


Counted = Generator[Counts, None, None]
Stream = Callable[[], Counted]
"""A function that starts a new stream and yields the counts of each batch."""


@dataclass(kw_only=True)
class Case(rounds.Case):
    """A stream to measure, and its results.

    Attributes:
        group: The table it belongs to.
        label: Its name in that table.
        variant: The graph it runs on.
        workers: Number of workers of a loader, else ``None``.
        stream: The function that makes the batches.
        rates: Batches per second, one number per round.
        timed: Number of timed batches per round.
        mean: Mean :class:`Counts` per batch.
        notes: Other results, by name.
    """

    group: str
    label: str
    variant: str
    stream: Stream | None = field(repr=False)
    workers: int | None = None
    rates: list[float] = field(default_factory=list)
    timed: int = 0
    mean: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def measure(self, warmup: int, batches: int, max_seconds: float) -> None:
        """Measure a round.

        Args:
            warmup: Number of batches before the clock starts.
            batches: Number of timed batches; fewer after ``max_seconds``, but at least three.
            max_seconds: Seconds after which a round ends early.
        """
        assert self.stream is not None, "this case was released"
        gc.collect()
        seen: list[Counts] = []
        with contextlib.closing(self.stream()) as stream:
            for _ in range(warmup):
                next(stream)
            start = time.perf_counter()
            while len(seen) < batches:
                seen.append(next(stream))
                seconds = time.perf_counter() - start
                if seconds > max_seconds and len(seen) >= min(3, batches):
                    break
        self.timed = len(seen)
        self.rates.append(self.timed / seconds)
        self.mean = {
            name: sum(getattr(one, name) for one in seen) / self.timed
            for name in ("nodes", "edges", "bytes")
        }

    def release(self) -> None:
        """Release the graph; the case cannot be measured afterwards."""
        self.stream = None

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


# Streams ######################################################################################


def loaded(make: Callable[[], Any]) -> Counted:
    """The batches of a loader; each one stays alive while the next one is made."""
    for batch in make():
        yield count(batch)


def loaded_by_pyg(name: str, make: Callable[[], Any]) -> Counted:
    """The batches of a loader of PyG that samples with the package ``name``."""
    with peers.using(name):
        yield from loaded(make)


def sampled(sampler: Any, node: Tensor, batch_size: int) -> Counted:
    """Only sampling, on one thread, with our sampler."""
    with library.serial():
        for key, seed in enumerate(node.split(batch_size)):
            out = sampler.sample_from_nodes(NodeSamplerInput(None, seed), key=key)
            yield Counts(out.node.numel(), out.row.numel())


def sampled_by_pyg(name: str, sampler: Any, node: Tensor, batch_size: int) -> Counted:
    """Only sampling, on one thread, with PyG's sampler and the package ``name``."""
    with peers.using(name), _one_thread():
        for seed in node.split(batch_size):
            out = sampler.sample_from_nodes(NodeSamplerInput(None, seed))
            yield Counts(out.node.numel(), out.row.numel())


def limit(sampler: Any, data: Data, node: Tensor, batch_size: int, num_threads: int) -> Counted:
    """Sampling, followed by a plain copy of as many bytes as the features have.

    No loader that samples this way and copies features can be faster on this machine.
    """
    width = row_bytes(data)
    source = np.empty(0, np.uint8)
    if data.x is not None:
        source = data.x.contiguous().numpy().reshape(-1).view(np.uint8)
    own = threading.local()

    def work(item: tuple[int, Tensor]) -> Counts:
        key, seed = item
        with library.serial():
            out = sampler.sample_from_nodes(NodeSamplerInput(None, seed), key=key)
        size = min(out.node.numel() * width, source.size)
        if getattr(own, "target", source[:0]).size < size:
            own.target = np.empty(size + size // 4, np.uint8)
        begin = (key * 2_654_435_761) % (source.size - size + 1)
        np.copyto(own.target[:size], source[begin : begin + size])
        return Counts(out.node.numel(), out.row.numel(), size)

    with ThreadPoolExecutor(num_threads, "pyg_scale-bench") as pool:
        try:
            yield from pool.map(work, enumerate(node.split(batch_size)))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def count(batch: Data | HeteroData) -> Counts:
    """The counts of a batch."""
    x = [store.x for store in batch.node_stores if "x" in store]
    return Counts(
        sum(store.n_id.numel() for store in batch.node_stores),
        sum(store.edge_index.shape[1] for store in batch.edge_stores),
        sum(each.numel() * each.element_size() for each in x),
    )


def row_bytes(data: Data) -> int:
    """Size in bytes of the features of one node."""
    return 0 if data.x is None else data.x[:1].numel() * data.x.element_size()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Memory #######################################################################################


def resident(case: Case, batches: int, max_seconds: float) -> dict[str, Any]:
    """Watch memory over many batches: after a start, it must not grow.

    Args:
        case: The case; its first batch is made after the first measurement of memory.
        batches: Number of batches, fewer after ``max_seconds``.
        max_seconds: Seconds after which it ends early.

    Returns:
        Bytes ``before``, ``at_early`` (batch number ``early``), ``largest_after`` that batch,
        ``peak`` above ``before``, private bytes of ``workers`` (processes), and bytes of the
        features of the largest batch; ``None`` if the system does not count them.
    """
    assert case.stream is not None, "this case was released"
    gc.collect()
    before, early = memory.resident(), min(50, batches // 2)
    memory.reset_peak()
    at_early: int | None = None
    largest, biggest, number, start = 0, 0, 0, time.perf_counter()
    with contextlib.closing(case.stream()) as source:
        for number, one in zip(range(1, batches + 1), source):
            biggest = max(biggest, one.bytes)
            now = memory.resident() or 0
            at_early = now if number == early else at_early
            largest = max(largest, now) if number > early else largest
            if time.perf_counter() - start > max_seconds:
                break
        top, workers = memory.peak(), memory.children()
    return {
        "label": case.label,
        "variant": case.variant,
        "batches": number,
        "early": early,
        "before": before,
        "at_early": at_early,
        "largest_after": largest if number > early else None,
        "peak": None if top is None or before is None else max(0, top - before),
        "workers": workers,
        "bytes_per_batch": biggest,
    }


def build(found: list[dict[str, Any]], label: str, variant: str, make: Callable[[], Any]) -> Any:
    """Make a sampler; appends its seconds and memory, measured once, to ``found``."""
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
