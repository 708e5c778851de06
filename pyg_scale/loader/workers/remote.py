"""Batches that others make: asked for well before they are used, and no further ahead than told."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

from pyg_scale.errors import was_interrupted
from pyg_scale.loader.iterator import Inline
from pyg_scale.loader.options import SamplingOptions
from pyg_scale.loader.seeds.epoch import BatchIndex
from pyg_scale.loader.stats import Stats
from pyg_scale.loader.workers.threads import Pipeline, WorkerThreads

if TYPE_CHECKING:
    pass


class Pending(ABC):
    """A sampled subgraph that was asked for."""

    @abstractmethod
    def wait(self) -> Any:
        """The sampler's output, or the error that came instead."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """True if the answer has come."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of what has come."""

    @abstractmethod
    def abandon(self) -> None:
        """Nobody will wait for it."""


@runtime_checkable
class RemoteSampler(Protocol):
    """A sampler whose graph is elsewhere: batches are asked for, several at a time."""

    def check_seeds(self, seed_type: Any, timed: bool) -> None:
        """Let the other side check the arguments of a loader.

        Raises:
            ValueError: If they do not fit the graph; likewise ``TypeError`` and
                ``NotImplementedError``.
        """

    def ask_from_nodes(self, inputs: NodeSamplerInput, key: int) -> Pending:
        """Ask for the subgraph around seed nodes; returns at once."""

    def ask_from_edges(self, inputs: EdgeSamplerInput, neg_sampling: Any, key: int) -> Pending:
        """Ask for the subgraph around seed links; returns at once."""


class _Item:
    """A batch that was asked for."""

    def __init__(self, batch: BatchIndex, pending: Pending) -> None:
        self.batch, self.pending = batch, pending

    def __str__(self) -> str:
        return str(self.batch)


class RequestWindow:
    """Asks for batches, so many ahead of the one that is used.

    Args:
        batches: The batches of the epoch.
        ask: Asks for one.
        size: How many may have been asked for and not been used.
        buffer_bytes: How much of them may have come; ``None`` for any.
        most_used: How many the one who iterates has at a time.
    """

    def __init__(
        self,
        batches: Iterator[BatchIndex],
        ask: Callable[[BatchIndex], Pending],
        size: int,
        buffer_bytes: int | None,
        most_used: int = 1,
    ) -> None:
        self._batches, self._ask, self._most_used = batches, ask, most_used
        self._size, self._buffer_bytes = size, buffer_bytes
        self._asked: deque[_Item] = deque()
        self._used: list[_Item] = []  # handed out, but not done with
        self._largest = 0
        self._ended = False
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[_Item]:
        return self

    def __next__(self) -> _Item:
        # Whoever asks for one more is done with the oldest.
        self._used = self._used[max(0, len(self._used) - self._most_used + 1) :]
        self.fill()
        if not self._asked:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            raise StopIteration
        item = self._asked.popleft()
        self._used.append(item)
        return item

    def fill(self) -> None:
        """Ask for as much as may be."""
        while not self._ended and self._may_ask():
            try:
                batch = next(self._batches)
            except StopIteration:
                self._ended = True
            except Exception as error:  # raised when it is its turn
                if was_interrupted(error):
                    raise
                self._ended, self._error = True, error
            else:
                self._asked.append(_Item(batch, self._ask(batch)))

    def done(self, item: _Item) -> None:
        """A batch was used, or nothing came of it."""
        self._largest = max(self._largest, item.pending.nbytes)
        if item in self._used:
            self._used.remove(item)

    def _may_ask(self) -> bool:
        under_way = [*self._used, *self._asked]
        if not under_way:
            return True
        if len(under_way) >= self._size:
            return False
        if self._buffer_bytes is None:
            return True
        known = [item.pending.nbytes for item in under_way if item.pending.ready]
        self._largest = max([self._largest, *known])
        expected = sum(known) + (len(under_way) - len(known)) * self._largest
        return self._largest > 0 and expected + self._largest <= self._buffer_bytes

    def close(self) -> None:
        """Nobody wants any more."""
        self._ended = True
        for item in [*self._asked, *self._used]:
            item.pending.abandon()
        self._asked.clear()
        self._used.clear()


class Ahead:
    """The source of an iteration whose batches servers sample.

    Args:
        batches: The batches of the epoch.
        source: Makes the results of work for items, by threads or by this one (see
            :class:`~pyg_scale.loader.base.SubgraphLoader`).
        ask: Asks for a batch.
        sample: Waits for a batch that was asked for.
        finish: Makes a batch of what came.
        threads: Make batches of what comes; ``None`` for this thread.
        in_order: See ``DataLoader``.
        size: Number of batches that may have been asked for and not been used.
        buffer_bytes: How much of them may have come; ``None`` for any.
        most_used: Number of batches that threads may have ready.
    """

    def __init__(
        self,
        batches: Iterator[BatchIndex],
        source: Callable[..., Inline | Pipeline],
        *,
        ask: Callable[[BatchIndex], Pending],
        sample: Callable[[BatchIndex, Stats, Pending], Any],
        finish: Callable[[Any, Stats], Any],
        threads: WorkerThreads | None,
        in_order: bool,
        size: int,
        buffer_bytes: int | None,
        most_used: int,
    ) -> None:
        limit = min(size if buffer_bytes is None else 1, most_used)
        self._window = RequestWindow(batches, ask, size, buffer_bytes, max(1, limit))
        weakref.finalize(self, self._window.close)
        work = partial(_made_of, sample, finish)
        self._made: Any = source(self._window, work, threads, in_order, limit)

    def __next__(self) -> tuple[BatchIndex | None, Any, Stats]:
        try:
            item, made, stats = next(self._made)
        except StopIteration:
            self.close()
            raise
        if item is None:
            return None, made, stats
        self._window.done(item)
        self._window.fill()  # before the consumer gets busy
        return item.batch, made, stats

    def pause(self) -> None:
        """Let the threads end."""
        self._made.pause()

    def close(self) -> None:
        """Drop what is under way."""
        self._window.close()  # first: threads may be waiting for servers that do not answer
        self._made.close()


def most_under_way(options: SamplingOptions, data: Any) -> int:
    """Number of batches for which a loader may have asked servers."""
    if options.num_workers is None:
        return options.prefetch_size
    servers: Any = options.servers_of(None) or data.graph_directory.servers
    return min(
        options.prefetch_size, len(servers) * options.num_workers * options.worker_concurrency
    )


def _made_of(
    sample: Callable[[BatchIndex, Stats, Pending], Any],
    finish: Callable[[Any, Stats], Any],
    item: _Item,
    stats: Stats,
) -> Any:
    return finish(sample(item.batch, stats, item.pending), stats)
