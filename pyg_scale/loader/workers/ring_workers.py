"""Sampler processes whose batches come through rings of shared memory, in order, without pickle."""

from __future__ import annotations

import builtins
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import struct
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import reduction
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_scale import errors
from pyg_scale.errors import was_interrupted
from pyg_scale.loader.batch import wire
from pyg_scale.loader.batch.pin import pin_batch
from pyg_scale.loader.iterator import Failed, SourceError
from pyg_scale.loader.seeds.epoch import BatchIndex
from pyg_scale.loader.stats import Stats
from pyg_scale.loader.workers.processes import WeakWork
from pyg_scale.loader.workers.ring import (
    HEAD,
    READ,
    Ring,
    RingReader,
    RingWriter,
    bytes_of,
    count_of,
    message_of,
)
from pyg_scale.ops.library import serial

TASK, QUIT = b"T", b"Q"
_TASK = struct.Struct("<cqQqqq")  # kind, step, key, position, epoch, first
_JOIN_SECONDS = 5.0
_REFUSAL = "worker_type='ring' cannot send: use 'thread' or 'process'"


class _NotYet(Exception):
    """A message did not come in time."""


class WorkerDiedError(RuntimeError):
    """A sampler process ended before it was told to; says which, and how."""


class _Worker:
    """A process, as its parent sees it."""

    def __init__(self, context: Any, number: int, work: Any, size: int, concurrency: int) -> None:
        self.pipe, theirs = context.Pipe()
        ring = Ring(size)
        self.process = context.Process(
            target=_run,
            args=(theirs, size, work, concurrency),
            name=f"pyg_scale-sampler-{number}",
            daemon=True,
        )
        self.sent: deque[BatchIndex] = deque()
        self.ring, self.reader = ring, RingReader(ring, self.pipe)
        self._head: Any = None
        self._tensors: list[Tensor] = []
        self._waiting: deque[memoryview] = deque()
        try:
            self.process.start()
            theirs.close()
            reduction.send_handle(self.pipe, ring.fd, self.process.pid)
        except BaseException:
            if self.process.pid is not None:
                self.process.kill()
            raise

    def give(self, batch: BatchIndex) -> None:
        """Let the process make a batch."""
        self.sent.append(batch)
        numbers = batch.step, batch.key, batch.position, batch.epoch, batch.first
        head = _TASK.pack(TASK, *numbers)
        try:
            self.pipe.send_bytes(head + batch.index.to(torch.int64).numpy().tobytes())
        except OSError:
            self.died()

    def receive(self, deadline: float) -> tuple[Any, list[Tensor]]:
        """The next message.

        Raises:
            WorkerDiedError: If the process is gone.
            _NotYet: If not all came in time; what did is kept.
        """
        waiting = self._waiting
        while self._head is None or waiting:
            message = self._next(deadline)
            if message[:1] == HEAD:
                self._head, self._tensors = self.reader.head(message)
                waiting.extend(bytes_of(tensor) for tensor in self._tensors if tensor.numel())
            else:
                self.reader.announced(message)
            while waiting and self.reader.written:
                read = self._read(waiting[0])
                waiting[0] = waiting[0][read:]
                if not waiting[0].nbytes:
                    waiting.popleft()
        head, tensors, self._head, self._tensors = self._head, self._tensors, None, []
        return head, tensors

    def _read(self, view: memoryview) -> int:
        try:
            return self.reader.read_into(view)
        except OSError:
            self.died()
            raise

    def _next(self, deadline: float) -> bytes:
        try:
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise _NotYet
            return self.pipe.recv_bytes()
        except (EOFError, ConnectionError):
            self.died()
            raise

    def died(self) -> None:
        """The pipe has ended.

        Raises:
            WorkerDiedError: Always.
        """
        self.process.join(1.0)
        code = self.process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        raise WorkerDiedError(
            f"the sampler process {self.process.name}, pid {self.process.pid}, ended by {how}: "
            "the next call begins with new processes, as does load_state_dict(), and with the "
            "first batch that was not handed out"
        )


def _stop(workers: list[_Worker], pid: int) -> None:
    if pid != os.getpid():
        return
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.pipe.send_bytes(QUIT)
        worker.pipe.close()
    deadline = time.monotonic() + _JOIN_SECONDS
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.ring.close()


class RingPipeline:
    """The iterator of :class:`~pyg_scale.loader.workers.threads.Pipeline`, over sampler processes.

    Batches go to the processes in turn and come back in order. A process makes as many ahead as fit
    into its ring, and those that it has begun.

    Args:
        batches: The batches of the epoch.
        work: A method that makes ``(step, (stage, result), stats)`` of a batch.
        num_workers: How many processes.
        ring_bytes: Of each one's ring.
        concurrency: Batches that each makes at a time.
        prefetch: Batches that each is given ahead.
        timeout: Seconds to wait for a batch, 0 for ever.
        pin: Whether to pin batches, where the processes make whole ones.
        context: Of multiprocessing, a name or an object; ``None`` for the default one.

    Raises:
        WorkerDiedError: Of ``next``: if a process ended.
    """

    def __init__(
        self,
        batches: Iterator[BatchIndex],
        work: Callable[[BatchIndex], Any],
        *,
        num_workers: int,
        ring_bytes: int,
        concurrency: int,
        prefetch: int,
        timeout: float,
        pin: bool,
        context: Any,
    ) -> None:
        self._batches, self._timeout, self._pin = batches, timeout, pin
        made = context if hasattr(context, "Process") else multiprocessing.get_context(context)
        self._workers: list[_Worker] = []
        self._stop = weakref.finalize(self, _stop, self._workers, os.getpid())
        for number in range(num_workers):
            self._workers.append(_Worker(made, number, WeakWork(work), ring_bytes, concurrency))
        self._turn: deque[_Worker] = deque()
        self._given = 0
        self._limit = num_workers * max(prefetch, concurrency)
        self._ended = False
        self._error: Exception | None = None

    def __next__(self) -> tuple[BatchIndex | None, Any, Stats]:
        self._fill()
        if not self._turn:
            self.close()
            if self._error is not None:
                error, self._error = self._error, None
                return None, Failed(error), Stats()
            raise StopIteration
        start = time.perf_counter()
        worker = self._turn[0]
        deadline = time.monotonic() + self._timeout if self._timeout else float("inf")
        try:
            head, tensors = worker.receive(min(deadline, time.monotonic() + 1e6))
        except _NotYet:
            raise SourceError(
                f"the loader timed out: {worker.sent[0]} was not ready after timeout="
                f"{self._timeout:g} seconds (in the sampler process {worker.process.name}, pid "
                f"{worker.process.pid}); raise timeout=, or see what blocks it"
            ) from None
        except WorkerDiedError:
            self.close()
            raise
        self._turn.popleft()
        batch = worker.sent.popleft()
        self._fill()  # before the consumer gets busy
        if "error" in head:
            return batch, Failed(_error(head, worker)), Stats()
        out = wire.unpack(head["text"].encode(), tensors)
        if isinstance(out, SamplerOutput | HeteroSamplerOutput):
            out._batch_key = batch.piece_key
        stats = Stats.from_plain(head["stats"])
        stats.add_seconds("wait", time.perf_counter() - start)
        return batch, (head["stage"], pin_batch(out, stats) if self._pin else out), stats

    def _fill(self) -> None:
        while not self._ended and len(self._turn) < self._limit:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._ended = True
            except Exception as error:  # raised when it is its turn
                if was_interrupted(error):
                    raise
                self._ended, self._error = True, error
            else:
                worker = self._workers[self._given % len(self._workers)]
                self._given += 1
                self._turn.append(worker)
                worker.give(batch)

    def pause(self) -> None:
        """Processes end with the iterator."""

    def close(self) -> None:
        """Drop what is under way and end the processes."""
        self._ended = True
        self._turn.clear()
        self._stop()


def _error(head: dict[str, Any], worker: _Worker) -> Exception:
    """The error of a worker, of the same type if that is a standard one."""
    kind = getattr(builtins, head["error"], None) or getattr(errors, head["error"], None)
    standard = isinstance(kind, type) and issubclass(kind, Exception)
    found: Any = kind if standard else RuntimeError
    text = head["message"] if standard else f"{head['error']}: {head['message']}"
    try:
        error: Exception = found(text)
    except TypeError:
        error = RuntimeError(f"{head['error']}: {text}")
    error.add_note(
        f"(raised in the sampler process {worker.process.name}, pid {worker.process.pid}, while "
        f"making {head['batch']})\n{head['traceback']}"
    )
    return error


# The process ##############################################################################


def _run(pipe: Connection, size: int, work: Any, concurrency: int) -> None:
    """Run a sampler process until its parent ends it, or is gone."""
    began_under = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    torch.set_num_threads(1)
    # A copy of the loader, which a method does not keep alive by itself.
    method = getattr(work, "_method", None)
    work = method() if isinstance(method, weakref.WeakMethod) else work
    ring = Ring(size, reduction.recv_handle(pipe))
    writer = RingWriter(ring, pipe)
    tasks: SimpleQueue[Any] = SimpleQueue()
    pool = ThreadPoolExecutor(concurrency, "pyg_scale-sampler")
    room = threading.Semaphore(concurrency)  # nothing is begun while what is made cannot be sent
    threading.Thread(target=_send_all, args=(tasks, writer, room), daemon=True).start()
    try:
        while True:
            if not pipe.poll(1.0):
                if os.getppid() != began_under:  # siblings may hold the other end of the pipe
                    break
                continue
            message = pipe.recv_bytes()
            if message[:1] == QUIT:
                break
            if message[:1] == READ:
                writer.freed(count_of(message))
                continue
            _, step, key, position, epoch, first = _TASK.unpack_from(message)
            index = torch.from_numpy(np.frombuffer(message, np.int64, offset=_TASK.size).copy())
            batch = BatchIndex(index, key, position, epoch, step=step, first=first)
            tasks.put((batch, pool.submit(_make, work, batch, room)))
    except (EOFError, OSError):
        pass  # the parent is gone
    os._exit(0)


def _make(
    work: Callable[[BatchIndex], Any], batch: BatchIndex, room: threading.Semaphore
) -> tuple[bytes, list[Tensor]]:
    room.acquire()
    try:
        with serial():
            _, (stage, out), stats = work(batch)
        text, tensors = wire.pack(out, "the batch", _REFUSAL)
        head = {"text": text.decode(), "stage": stage, "stats": stats.plain()}
        return message_of(head, tensors)
    except Exception as error:
        head = {
            "error": type(error).__name__,
            "message": str(error.args[0] if len(error.args) == 1 else error),
            "batch": str(batch),
            "traceback": "".join(traceback.format_exception(error)),
        }
        return message_of(head, [])


def _send_all(tasks: SimpleQueue[Any], writer: RingWriter, room: threading.Semaphore) -> None:
    """Send what was made, in the order in which it was asked for."""
    try:
        while True:
            _, future = tasks.get()
            writer.write(*future.result())
            del future
            room.release()
    except OSError:
        os._exit(0)
    except BaseException:  # the parent waits for what this thread alone sends
        traceback.print_exc()
        os._exit(1)
