"""One pass over a loader, and the contract of the places where its batches are made."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch_geometric.data.data import BaseData

from pyg_scale.errors import was_interrupted
from pyg_scale.loader.seeds.epoch import Batches, BatchIndex, EpochProgress, Passed
from pyg_scale.loader.stats import Counted, Stats, added

if TYPE_CHECKING:
    from pyg_scale.loader.base import SubgraphLoader


Work = Callable[[Any, Stats], Any]
"""A function that makes a batch of an item and counts its work in the ``Stats``."""


class SourceError(RuntimeError):
    """An error that leaves the source of batches as it was, such as that one is late."""


class Failed:
    """The error that came instead of a batch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class BatchSource(Protocol):
    """The place where the work of a pass is done: this thread, threads, or processes."""

    def __next__(self) -> tuple[BatchIndex | None, Any, Stats]:
        """The next batch, what came of it (:class:`Failed`: an error), and what that took.

        ``None`` as the batch: nothing could be drawn. After an exception, other than
        ``StopIteration`` and :class:`SourceError`, nobody asks it any more.
        """

    def pause(self) -> None:
        """An exception leaves the iterator: hold no thread; go on if asked for more."""

    def close(self) -> None:
        """Nobody will ask for more."""


class Inline:
    """The source without workers: the work is done when the consumer asks.

    An exception that interrupts it is raised as it comes, and says nothing of the batch.
    """

    def __init__(self, items: Iterator[Any], work: Work) -> None:
        self._items = items
        self._work = work

    def __next__(self) -> tuple[Any, Any, Stats]:
        item, stats = None, Stats()
        try:
            item = next(self._items)
            return item, self._work(item, stats), stats
        except Exception as error:
            # The end is looked at first: whoever looks at the frames of an error keeps them.
            if (item is None and isinstance(error, StopIteration)) or was_interrupted(error):
                raise
            return item, Failed(error), stats

    def pause(self) -> None:
        """Nothing runs between two calls."""

    close = pause


def _mark(out: Any, why: str, **attributes: Any) -> None:
    """Say something about a batch in attributes of it.

    Raises:
        TypeError: If it is none of PyG's.
    """
    for each in out if isinstance(out, tuple) else (out,):
        if not isinstance(each, BaseData):
            raise TypeError(
                f"{why} sets the attributes {', '.join(attributes)} of every batch, but this "
                f"loader makes a {type(each).__name__}: leave it out, or let transform= return "
                "PyG's"
            )
        for name, value in attributes.items():
            setattr(each, name, value)


class EpochIterator:
    """One pass over a loader, or the rest of one.

    An exception can leave :meth:`__next__` anywhere: ``KeyboardInterrupt``, or what a signal's
    handler raises. It moves on by a single step, which is its last one: whoever asks again after an
    exception gets the first batch that was not handed out, from a new source. An error of a batch
    itself (of the sampler, of a transform) is raised once, and the pass is done with that batch.

    Args:
        loader: The loader.
        begin: Makes a source of the batches that are left.
        pieces: Takes what the source made of a planned batch apart; ``None`` without a plan.
        finish: Does the work of the consumer for a batch.
        batches: All batches of the pass.
        progress: What is told how many were handed out.
        counted: What is told what they took: the counts of this pass, and of all passes.
    """

    def __init__(
        self,
        loader: SubgraphLoader,
        begin: Callable[[Iterator[BatchIndex]], BatchSource],
        pieces: Callable[[BatchIndex, Any, Stats], list[tuple[BatchIndex, Any, Stats]]] | None,
        finish: Callable[[BatchIndex, Any, Stats], Any],
        batches: Batches,
        progress: EpochProgress,
        counted: tuple[Counted, Counted],
    ) -> None:
        self._loader = loader
        self._begin, self._pieces, self._finish = begin, pieces, finish
        self._batches = batches
        self._progress = progress
        self._epoch, self._total = counted
        self._profile_name = f"enumerate(DataLoader)#{type(loader).__name__}.__next__"
        self._passed = Passed(batches.first)
        self._waiting: deque[tuple[BatchIndex, Any, Stats]] = deque()  # pieces of the batch at hand
        self._asked_at: Passed | None = None  # where the batch that is being made was asked for
        self._user: dict[str, int] = {}  # the thread that asks: a dict is filled by one thread only
        self._closed = False
        self._source = begin(batches.rest(self._passed))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        progress, thread, before = self._progress, threading.get_ident(), None
        try:
            if self._user.setdefault("thread", thread) != thread:
                raise RuntimeError(_USED_BY_TWO)
            before = progress.position, self._passed, self._epoch.sum, self._total.sum
            if progress.finished or self._closed:
                raise StopIteration
            batch, out, stats = self._named()
            if isinstance(out, Failed):
                if batch is not None:
                    self._passed = self._passed.after(batch)
                before = progress.position, self._passed, self._epoch.sum, self._total.sum
                self._asked_at = None
                if isinstance(out.error, StopIteration):  # which would look like the end
                    raise RuntimeError(f"making {batch} raised StopIteration") from out.error
                raise out.error
            assert batch is not None
            sums = added(stats, self._epoch, self._total)
            after = progress.position.after(batch), self._passed.after(batch), *sums
            # No call from here on, and so no signal's handler: all of this happens, or nothing.
            progress.position, self._passed, self._epoch.sum, self._total.sum = after
            self._user = {}
            return out
        except BaseException as error:
            if before is not None:
                progress.position, self._passed, self._epoch.sum, self._total.sum = before
            batch = out = None  # which the traceback would keep
            if self._user.get("thread") == thread:
                self._user = {}
                if not isinstance(error, StopIteration):
                    self._source.pause()
            raise

    @property
    def at_end(self) -> bool:
        """True if no batch follows the one that was handed out last, here or on another rank.

        Ranks that share the seeds of a loader get the same answer in the same step, as long as
        all of them have batches. Nothing is sampled ahead for it.
        """
        return self._progress.finished or self._closed or self._batches.at_end(self._passed)

    def _named(self) -> tuple[BatchIndex | None, Any, Stats]:
        """:meth:`_made`, named for profilers as a step of a ``DataLoader``, if one is at work."""
        if not torch.autograd.profiler._is_profiler_enabled:
            return self._made()
        with torch.autograd.profiler.record_function(self._profile_name):
            return self._made()

    def _made(self) -> tuple[BatchIndex | None, Any, Stats]:
        """The next batch, or an error of its own."""
        if self._asked_at is self._passed:  # and nothing was handed out since: it was interrupted
            self._source.close()
            self._waiting.clear()
            self._source = self._begin(self._batches.rest(self._passed))
        self._asked_at = self._passed
        self._batches.forget(self._passed)
        if self._waiting:
            return self._finished(*self._waiting.popleft())
        try:
            batch, made, stats = next(self._source)
        except SourceError:
            self._asked_at = None
            raise
        except Exception as error:
            if self._closed:
                raise StopIteration from None
            if not isinstance(error, StopIteration):
                raise
            if self._passed.all_before != self._batches.end:
                raise RuntimeError(_NOT_ALL) from None
            self._progress.finished = True
            raise
        if batch is None or isinstance(made, Failed):
            return batch, made, stats
        if self._pieces is None:
            return self._finished(batch, made, stats)
        try:
            self._waiting.extend(self._left_of(self._pieces(batch, made, stats)))
        except Exception as error:
            if was_interrupted(error):
                raise
            return batch, Failed(error), stats
        return self._finished(*self._waiting.popleft())

    def _finished(
        self, batch: BatchIndex, made: Any, stats: Stats
    ) -> tuple[BatchIndex, Any, Stats]:
        """The batch, or piece of one, after the work of the consumer."""
        try:
            out = self._finish(batch, made, stats)
            if self._loader.uneven == "repeat":
                _mark(out, "uneven='repeat'", repeated=batch.repeated)
            if self._loader.batch_cost is not None:
                _mark(out, "batch_cost=", piece=batch.piece, num_pieces=batch.num_pieces)
        except Exception as error:
            if was_interrupted(error):
                raise
            return batch, Failed(error), stats
        stats.batches = 1
        return batch, out, stats

    def _left_of(self, pieces: list[Any]) -> list[Any]:
        """The pieces of a batch that were not handed out."""
        position, had = self._progress.position.pieces or (None, 0)
        if position != pieces[0][0].position:
            return pieces
        if had >= len(pieces):
            raise ValueError(
                f"{had} pieces of {pieces[0][0]} were handed out when the state was taken, and it "
                f"has {len(pieces)} now: the graph or its features are others"
            )
        return pieces[had:]

    def close(self) -> None:
        """Stop the workers of this iteration now, rather than when the last reference is gone."""
        self._closed = True
        self._source.close()


_USED_BY_TWO = (
    "another thread is asking this iterator for a batch: an iterator is for one thread at a time. "
    "Call iter(loader) in each thread, or let one thread hand out its batches"
)
_NOT_ALL = (
    "this iterator cannot go on, as it could not draw all of its batches (see the error that was "
    "raised before): iter(loader) begins anew"
)
