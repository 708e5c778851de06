"""Batches are sampled well before their features are read, so that a store knows what is coming.

Sampling is keyed and costs little; reading may not. A feature store with ``look_ahead`` (and
``schedule()``, see :class:`pyg_scale.store.cache.Schedule`) is told the rows of so many batches
before it is asked for them. Two pipelines on the same threads do this: the first one samples, the
second one fetches what a window between them hands out, in order.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch_geometric.data import TensorAttr
from torch_geometric.sampler import SamplerOutput

from pyg_scale.errors import was_interrupted
from pyg_scale.graph.base import needs_threads
from pyg_scale.loader.batch.build import _original
from pyg_scale.loader.batch.features import Features
from pyg_scale.loader.iterator import Failed, Inline, SourceError
from pyg_scale.loader.seeds.epoch import BatchIndex
from pyg_scale.loader.stats import Stats
from pyg_scale.loader.workers.threads import Borrowed, Pipeline, WorkerThreads
from pyg_scale.store.base import KeepsInFlight, ReadSchedule


class _Sampled:
    """A batch between the two stages."""

    def __init__(self, batch: BatchIndex | None) -> None:
        self.batch = batch
        self.out: Any = None
        self.wanted: list[TensorAttr] = []
        self.error: BaseException | None = None
        self.stats = Stats()

    def __str__(self) -> str:
        return str(self.batch)


class AnnouncedWindow:
    """Sampled batches, each handed out when those after it are announced.

    Args:
        sampled: Where they come from.
        schedule: Where they are announced.
    """

    def __init__(self, sampled: Inline | Pipeline, schedule: ReadSchedule) -> None:
        self._sampled = sampled
        self._schedule = schedule
        self._ready: deque[_Sampled] = deque()
        self._ended = False

    def __iter__(self) -> Iterator[_Sampled]:
        return self

    def __next__(self) -> _Sampled:
        while not self._ended and not (
            self._ready and self._schedule.suffices(len(self._ready) - 1)
        ):
            self._take()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def _take(self) -> None:
        try:
            batch, item, stats = next(self._sampled)
        except StopIteration:
            self._ended = True
            return
        except SourceError as error:  # raised when it is its turn
            batch, item, stats = None, Failed(error), Stats()
        if isinstance(item, Failed):  # no batch came of it
            failed = _Sampled(batch)
            failed.error = item.error
            self._ready.append(failed)
            return
        item.stats = stats
        self._schedule.announce(batch.step, item.wanted)
        item.wanted = []
        if item.error is None:
            item.out._announced = (self._schedule, batch.step)
        self._ready.append(item)


class LookAhead:
    """The source of an iteration whose batches are announced to the feature store.

    Args:
        schedule: Announces rows to the feature store.
        batches: The batches of the epoch.
        source: Makes the results of work for items, by threads or by this one (see
            :class:`~pyg_scale.loader.base.SubgraphLoader`).
        sample: Samples a batch.
        wanted: Returns the rows that a sampled batch will read.
        finish: Makes a batch of what was sampled.
        threads: Do the work; ``None`` for this thread.
        in_order: See ``DataLoader``.
        under_way: Number of batches that threads of their own sample at a time; 0 for none.
    """

    def __init__(
        self,
        schedule: ReadSchedule,
        batches: Iterator[BatchIndex],
        source: Callable[..., Inline | Pipeline],
        *,
        sample: Callable[[BatchIndex, Stats], Any],
        wanted: Callable[[Any], list[TensorAttr]],
        finish: Callable[[Any, Stats], Any],
        threads: WorkerThreads | None,
        in_order: bool,
        under_way: int,
    ) -> None:
        self._schedule = schedule
        weakref.finalize(self, schedule.close)
        work = partial(_sample, sample, wanted)
        if under_way:
            # They wait for other ranks more than they work.
            crew = WorkerThreads(under_way)
            self._sampled: Any = Pipeline(batches, work, crew, owned=True, limit=under_way)
        else:
            borrowed = None if threads is None else Borrowed(threads)
            self._sampled = source(batches, work, borrowed, True)
        window = AnnouncedWindow(self._sampled, schedule)
        self._fetched: Any = source(window, partial(_fetch, finish), threads, in_order)

    def __next__(self) -> tuple[BatchIndex | None, Any, Stats]:
        self._schedule.paused = False
        try:
            item, made, stats = next(self._fetched)
        except StopIteration:
            self.close()
            raise
        return None if item is None else item.batch, made, stats

    def pause(self) -> None:
        """Let the threads end; a read does not wait for one that may not be made."""
        self._schedule.paused = True
        self._fetched.pause()
        self._sampled.pause()

    def close(self) -> None:
        """Drop what is under way."""
        self._schedule.close()
        self._fetched.close()
        self._sampled.close()


def warn_not_told(loader: str, reason: str) -> None:
    """Warn that a store which looks ahead will wait for nothing."""
    warnings.warn(
        f"the feature store of this {loader} is not told of coming batches: {reason}; a store with "
        "look_ahead=0 does not wait for it",
        RuntimeWarning,
        stacklevel=5,
    )


def batches_under_way(data: Any, features: Features, num_workers: int) -> int:
    """Number of batches that threads of their own sample at a time, 0 for none.

    Where a graph is on several ranks, sampling waits for answers: with few workers, or none, other
    batches are sampled in the meantime, as many as the feature store has ``in_flight``.
    """
    waits, store = bool(needs_threads(data)), features.store
    wanted = store.in_flight if waits and isinstance(store, KeepsInFlight) else 1
    return wanted if wanted > max(1, num_workers) else 0


def _sample(
    sample: Callable[[BatchIndex, Stats], Any],
    wanted: Callable[[Any], list[TensorAttr]],
    batch: BatchIndex,
    stats: Stats,
) -> _Sampled:
    item = _Sampled(batch)
    try:
        item.out = sample(batch, stats)
        item.wanted = wanted(item.out)
    except Exception as error:
        if was_interrupted(error):
            raise
        item.error = error
    return item


def _fetch(finish: Callable[[Any, Stats], Any], item: _Sampled, stats: Stats) -> Any:
    if item.error is not None:
        raise item.error
    out, item.out = item.out, None
    stats.add(item.stats)
    return finish(out, stats)


def requests_of(out: Any, permutation: Any, features: Features) -> list[TensorAttr]:
    """The requests of a batch to its feature store.

    Args:
        out: A sampled subgraph.
        permutation: PyG's ``BaseSampler.edge_permutation``.
        features: The features.
    """
    node: Any
    edge: Any
    if isinstance(out, SamplerOutput):
        node, edge = {None: out.node}, {None: _original(out.edge, permutation)}
    else:
        ids, order = out.edge or {}, permutation or {}
        node, edge = out.node, {t: _original(ids.get(t), order.get(t)) for t in out.row}
    return [attr for attr, _, _ in features.wanted(node, edge)]
