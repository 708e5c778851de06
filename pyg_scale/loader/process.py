"""Worker processes: torch's own, which are handed the key of a batch together with its seeds."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import _DatasetKind
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pyg_scale.loader.epoch import BatchIndex
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import keys


class _Itself:
    """A data set whose entries are what one asks for."""

    def __getitem__(self, item: BatchIndex) -> BatchIndex:
        return item


class _Feed:
    """What torch takes for the index sampler: the batches of the epoch that is under way."""

    def __init__(self) -> None:
        self.batches: Iterator[BatchIndex] = iter(())

    def __iter__(self) -> Iterator[BatchIndex]:
        return self.batches

    def __len__(self) -> int:
        raise TypeError("the number of batches is that of the loader")


class Work:
    """A method of an object that it does not keep alive; a copy in another process does."""

    def __init__(self, method: Any) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, batch: BatchIndex) -> Any:
        method = self._method()
        assert method is not None, "whoever iterates holds the loader"
        return method(batch)

    def __reduce__(self) -> tuple[Any, ...]:
        method: Any = self._method()
        return getattr, (method.__self__, method.__name__)


class Processes:
    """Torch's iterator over worker processes, with what it reads of a loader.

    Args:
        loader: The loader whose arguments of :class:`torch.utils.data.DataLoader` apply.
        work: A method that makes ``(step, result, stats)`` of a batch; run in the workers.
        pin: Whether torch's thread pins what the workers return.
        generator: What torch draws the base seed of its workers from.
    """

    def __init__(
        self,
        loader: Any,
        work: Callable[[BatchIndex], tuple[int, Any, Stats]],
        pin: bool,
        generator: Any,
    ) -> None:
        self._feed = _Feed()
        self._loader = SimpleNamespace(
            dataset=_Itself(),
            collate_fn=Work(work),
            generator=generator,
            pin_memory=pin,
            _dataset_kind=_DatasetKind.Map,
            _IterableDataset_len_called=None,
            _auto_collation=False,
            _index_sampler=self._feed,
            **{
                name: getattr(loader, name)
                for name in (
                    "drop_last",
                    "in_order",
                    "multiprocessing_context",
                    "num_workers",
                    "persistent_workers",
                    "pin_memory_device",
                    "prefetch_factor",
                    "timeout",
                    "worker_init_fn",
                )
            },
        )
        self._iterator: Any = None
        self._user: object = None

    def start(self, user: object, batches: Iterator[BatchIndex]) -> None:
        """Begin an epoch; whoever used the processes before can no longer."""
        self._user = user
        self._feed.batches = batches
        if self._iterator is None:
            self._iterator = _MultiProcessingDataLoaderIter(self._loader)
        else:
            self._iterator._reset(self._loader)

    def next_for(self, user: object) -> tuple[int, Any, Stats]:
        if self._user is not user:
            raise RuntimeError(
                "this iterator ended when another one of the same loader began: with worker "
                "processes and persistent_workers=True there is one at a time"
            )
        try:
            try:
                return next(self._iterator)
            except (EOFError, OSError) as error:  # such as from a tensor of a worker that is gone
                self._raise_if_dead(error)
                raise
        except Exception as error:
            if not self.alive:  # torch's signal handler would say so once more, anywhere
                with contextlib.suppress(RuntimeError):
                    self._iterator._shutdown_workers()
            # Torch's frame that raised refers to the error: with it in the traceback, a cycle
            # would keep the worker processes. Where a worker failed is in the message.
            raise error.with_traceback(None) from error.__cause__

    def _raise_if_dead(self, cause: Exception) -> None:
        deadline = time.monotonic() + 1.0
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        dead = [w for w in self._iterator._workers if not w.is_alive()]
        if dead:
            raise RuntimeError(
                "loader worker processes exited unexpectedly: "
                + ", ".join(f"pid {w.pid} with exit code {w.exitcode}" for w in dead)
            ) from cause

    @property
    def in_order(self) -> bool:
        return self._loader.in_order

    @property
    def alive(self) -> bool:
        """Whether every worker process runs, or none was started yet."""
        return self._iterator is None or all(w.is_alive() for w in self._iterator._workers)


class ProcessPipeline:
    """The same iterator as :class:`~pyg_scale.loader.pipeline.Pipeline`, over processes."""

    # No cycles: torch ends its workers properly only if its iterator dies of its last reference.

    def __init__(self, batches: Iterator[BatchIndex], processes: Processes) -> None:
        self._me = object()
        self._sent: dict[int, BatchIndex] = {}
        self._failed: list[Exception] = []
        self._processes = processes
        processes.start(self._me, _noted(batches, self._sent, self._failed))

    def __next__(self) -> tuple[BatchIndex, Any, Stats]:
        start = time.perf_counter()
        try:
            step, value, stats = self._processes.next_for(self._me)
        except StopIteration:
            if self._failed:
                raise self._failed.pop() from None
            raise
        stats.add_seconds("wait", time.perf_counter() - start)
        if self._processes.in_order:
            for passed in [each for each in self._sent if each < step]:
                del self._sent[passed]  # what raised instead
        return self._sent.pop(step), value, stats

    def pause(self) -> None:
        """Processes end with the iterator, or with the loader."""

    close = pause


def _noted(
    batches: Iterator[BatchIndex], sent: dict[int, BatchIndex], failed: list[Exception]
) -> Iterator[BatchIndex]:
    """Keeps what is sent, and an error until what was sent before it has come back."""
    try:
        for batch in batches:
            sent[batch.step] = batch
            yield batch
    except Exception as error:
        failed.append(error)


def processes_of(loader: Any, pin: bool, progress: Any) -> Processes:
    """The worker processes of a loader: those that it has, or new ones.

    Args:
        loader: The loader.
        pin: Whether it pins its batches.
        progress: The seed and the epoch of what begins.
    """
    if loader._processes is not None and loader._processes.alive:
        running: Processes = loader._processes
        return running
    # Torch seeds its workers' generators from this one, so that one draw per epoch is all
    # that the loader takes from torch's default generator, whatever its workers are.
    generator = torch.Generator()
    generator.manual_seed(keys.to_signed(keys.fold(0, progress.seed, progress.epoch)))
    made = Processes(loader, loader._process_work, pin and loader.filter_per_worker, generator)
    loader._processes = made if loader.persistent_workers else None
    return made
