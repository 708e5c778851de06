"""Worker processes: torch's own, which are handed the key of a batch together with its seeds."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pyg_scale.errors import was_interrupted
from pyg_scale.loader.iterator import Failed, SourceError
from pyg_scale.loader.seeds.epoch import BatchIndex
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import keys


class _Itself:
    """A data set whose entries are what one asks for."""

    def __getitem__(self, item: BatchIndex) -> BatchIndex:
        return item


class _Feed:
    """The index sampler as torch sees it: the batches of the current epoch."""

    def __init__(self) -> None:
        self.batches: Iterator[BatchIndex] = iter(())

    def __iter__(self) -> Iterator[BatchIndex]:
        return self.batches

    def __len__(self) -> int:
        raise TypeError("the number of batches is that of the loader")


class WeakWork:
    """A method of an object that it does not keep alive; a copy in another process does.

    An error of it is its result: what torch raises by itself is then none of a batch.
    """

    def __init__(self, method: Any) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, batch: BatchIndex) -> Any:
        method = self._method()
        assert method is not None, "whoever iterates holds the loader"
        try:
            return method(batch)
        except Exception:
            worker = torch.utils.data.get_worker_info()
            assert worker is not None
            where = f"in DataLoader worker process {worker.id}, while making {batch}"
            return batch.step, ExceptionWrapper(where=where), Stats()

    def __reduce__(self) -> tuple[Any, ...]:
        method: Any = self._method()
        return getattr, (method.__self__, method.__name__)


class WorkerProcesses:
    """Torch's iterator over worker processes, with what it reads of a loader.

    Args:
        loader: The loader whose arguments of :class:`torch.utils.data.DataLoader` apply.
        work: A method that makes ``(step, result, stats)`` of a batch; run in the workers.
        pin: Whether torch's thread pins what the workers return.
        key: What the seeds of the workers' generators are drawn from.
    """

    def __init__(
        self,
        loader: Any,
        work: Callable[[BatchIndex], tuple[int, Any, Stats]],
        pin: bool,
        key: int,
    ) -> None:
        # One draw per epoch is all that a loader takes from torch's default generator, whatever its
        # workers are.
        generator = torch.Generator()
        generator.manual_seed(keys.to_signed(key))
        self._feed = _Feed()
        self._loader = SimpleNamespace(
            dataset=_Itself(),
            collate_fn=WeakWork(work),
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
        self._intact = True

    def start(self, user: object, batches: Iterator[BatchIndex]) -> None:
        """Begin an epoch; whoever used the processes before can no longer."""
        self._user, self._intact = user, False
        self._feed.batches = batches
        if self._iterator is None:
            self._iterator = _MultiProcessingDataLoaderIter(self._loader)
        else:
            self._iterator._reset(self._loader)
        self._intact = True

    def next_for(self, user: object) -> tuple[int, Any, Stats]:
        """The result of the next batch.

        Raises:
            SourceError: If nothing came in time, or somebody else uses the processes now. After any
                other error, they are of no use.
        """
        if self._user is not user:
            raise SourceError(
                "this iterator ended when another one of the same loader began: with worker "
                "processes and persistent_workers=True there is one at a time"
            )
        self._intact = False
        try:
            try:
                found: tuple[int, Any, Stats] = next(self._iterator)
            except (EOFError, OSError) as error:  # such as from a tensor of a worker that is gone
                self._raise_if_dead(error)
                raise
        except StopIteration:
            self._intact = True
            raise
        except Exception as error:
            if not self.alive:  # torch's signal handler would say so once more, anywhere
                self.stop()
            elif str(error).startswith("DataLoader timed out") and not was_interrupted(error):
                self._intact = True
                raise SourceError(str(error)) from None
            # Torch's frame that raised refers to the error: with it in the traceback, a cycle
            # would keep the worker processes.
            raise error.with_traceback(None) from error.__cause__
        self._intact = True
        return found

    def stop(self) -> None:
        """End the processes."""
        self._user, self._intact = None, False
        if self._iterator is not None:
            with contextlib.suppress(RuntimeError):
                self._iterator._shutdown_workers()

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
    def usable(self) -> bool:
        """True if another epoch can begin with them: no exception came in between."""
        return self._intact and self.alive

    @property
    def persistent(self) -> bool:
        """True if they outlive an epoch."""
        return bool(self._loader.persistent_workers)

    @property
    def alive(self) -> bool:
        """True if every worker process runs, or none was started yet."""
        return self._iterator is None or all(w.is_alive() for w in self._iterator._workers)


class ProcessPipeline:
    """The same iterator as :class:`~pyg_scale.loader.workers.threads.Pipeline`, over processes."""

    # No cycles: torch ends its workers properly only if its iterator dies of its last reference.

    def __init__(self, batches: Iterator[BatchIndex], processes: WorkerProcesses) -> None:
        self._me = object()
        self._sent: dict[int, BatchIndex] = {}
        self._failed: list[Exception] = []
        self._processes = processes
        processes.start(self._me, _noted(batches, self._sent, self._failed))

    def __next__(self) -> tuple[BatchIndex | None, Any, Stats]:
        start = time.perf_counter()
        try:
            step, value, stats = self._processes.next_for(self._me)
        except StopIteration:
            if self._failed:
                return None, Failed(self._failed.pop()), Stats()
            raise
        stats.add_seconds("wait", time.perf_counter() - start)
        return self._sent.pop(step), _failed(value), stats

    def pause(self) -> None:
        """Processes end with the iterator, or with the loader."""

    def close(self) -> None:
        """End the processes, unless the loader keeps them and they can go on."""
        if not (self._processes.persistent and self._processes.usable):
            self._processes.stop()


def _failed(value: Any) -> Any:
    """The result of a batch, with an error of a process as one of this process."""
    if not isinstance(value, ExceptionWrapper):
        return value
    try:
        value.reraise()
    except Exception as error:
        return Failed(error.with_traceback(None))


def _noted(
    batches: Iterator[BatchIndex], sent: dict[int, BatchIndex], failed: list[Exception]
) -> Iterator[BatchIndex]:
    """Keeps what is sent, and an error until what was sent before it has come back."""
    try:
        for batch in batches:
            sent[batch.step] = batch
            yield batch
    except Exception as error:
        if was_interrupted(error):
            raise
        failed.append(error)
