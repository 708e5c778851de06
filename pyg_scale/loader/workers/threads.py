"""Threads that work ahead of a consumer: ordered, bounded, and gone when nobody needs them.

The compiled ops release the GIL, so threads share the graph and overlap with training. What
must never happen: a thread that keeps its iterator alive, a batch that something forgotten
still holds, a wait without end. Therefore threads know only a queue of jobs; a job is dropped
as soon as it is done; queues are ``SimpleQueue``, whose ``put`` may be called by a finalizer; and a
finalizer in one of our own threads never waits for another.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from pyg_scale.errors import was_interrupted
from pyg_scale.loader.iterator import Failed, Inline, SourceError, Work
from pyg_scale.loader.stats import Stats
from pyg_scale.loader.workers.pace import Course
from pyg_scale.ops.library import renew_pool_after_fork, serial

JOIN_SECONDS = 5.0
"""Seconds for which closing waits for threads that are in the middle of a batch."""

EXIT_SECONDS = 60.0
"""Seconds for which the end of the process waits for them."""

_local = threading.local()


class _Job:
    """One batch on its way: what it is made of, then what came out."""

    def __init__(self, item: Any, work: Work | None) -> None:
        self.item = item
        self.work = work
        self.stats = Stats()
        self.worker = ""
        self.value: Any = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.done = False
        self.token = [None]  # whoever pops it does the job; list.pop is atomic

    def run(self) -> None:
        work, self.work = self.work, None
        assert work is not None
        self.worker = threading.current_thread().name
        start = time.perf_counter()
        try:
            self.value = work(self.item, self.stats)
        except BaseException as error:
            error.add_note(f"(raised in loader thread {self.worker}, while making {self.item})")
            self.error = error
        self.seconds = time.perf_counter() - start
        self.done = True


class _Crew:
    """Running threads and their queue of jobs. Replaced, never restarted."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.stopped = False
        self.pid = os.getpid()


class _Flag:
    """Says that nobody wants the results of an iterator any more."""

    raised = False


def _serve(crew: _Crew) -> None:
    _local.is_worker = True
    with serial():
        while True:
            entry = crew.jobs.get()
            if entry is None or crew.stopped:
                crew.jobs.put(None)  # for the next one
                return
            job, finished, cancelled = entry
            if not cancelled.raised and _claim(job):
                job.run()
                finished.put(job)
            del entry, job, finished, cancelled  # the batch must not live until the next job


def _claim(job: _Job) -> bool:
    try:
        job.token.pop()
    except IndexError:
        return False
    return True


def _stop(crew: _Crew, wait: bool) -> None:
    if crew.pid != os.getpid():
        return  # threads do not survive a fork: there is nothing to stop in the child
    crew.stopped = True
    crew.jobs.put(None)  # the threads hand it on to each other, also those not on the list yet
    if not wait or getattr(_local, "is_worker", False):
        return
    if busy := _join(crew.threads, JOIN_SECONDS):
        _warn(f"{_still_busy(busy, JOIN_SECONDS)}; they end when what they called returns")


def _join(threads: Sequence[threading.Thread], seconds: float) -> list[str]:
    """Wait for threads to end; returns the names of those that have not."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


def _still_busy(names: list[str], seconds: float) -> str:
    return f"loader threads {', '.join(names)} are still busy after {seconds:g} seconds"


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


_started: weakref.WeakSet[_Crew] = weakref.WeakSet()
"""Those whose threads may run; a thread keeps its crew."""


def _wait_at_exit() -> None:
    # What returns from a compiled op into an interpreter that is gone aborts the process (until
    # Python 3.13: its thread is ended by unwinding, which C++ does not let through).
    crews = [crew for crew in _started if crew.pid == os.getpid()]
    for crew in crews:
        _stop(crew, wait=False)
    if busy := _join([thread for crew in crews for thread in crew.threads], EXIT_SECONDS):
        _warn(f"{_still_busy(busy, EXIT_SECONDS)}; the process ends, which may abort it")


# Finalizers run from the last one made to the first: this one after those that end what threads
# wait for.
weakref.finalize(_started, _wait_at_exit)


class WorkerThreads:
    """A number of threads that start with the first job and end when this object is gone.

    Args:
        num_threads: How many.
        cores: CPU cores of each thread, or ``None`` to leave them to the scheduler.
    """

    def __init__(self, num_threads: int, cores: Sequence[Sequence[int]] | None = None) -> None:
        self.num_threads = num_threads
        self._cores = cores
        self._crew = _Crew()
        self._finalizer = weakref.finalize(self, _stop, self._crew, True)

    def submit(self, job: _Job, finished: SimpleQueue[_Job], cancelled: _Flag) -> None:
        if self._crew.stopped or self._crew.pid != os.getpid():
            crew = _Crew()
            finalizer = weakref.finalize(self, _stop, crew, True)
            _stop(self._crew, False)  # which an exception may have left half done
            self._finalizer.detach()
            self._crew, self._finalizer = crew, finalizer
        if len(self._crew.threads) < self.num_threads:  # none, or an exception came in between
            self._start()
        self._crew.jobs.put((job, finished, cancelled))

    def _start(self) -> None:
        renew_pool_after_fork()
        _started.add(self._crew)
        for i in range(len(self._crew.threads), self.num_threads):
            thread = threading.Thread(
                target=_serve, args=(self._crew,), name=f"pyg_scale-loader-{i}", daemon=True
            )
            thread.start()
            self._crew.threads.append(thread)
        if self._cores is not None:
            self._pin(self._cores)

    def _pin(self, cores: Sequence[Sequence[int]]) -> None:
        for i, thread in enumerate(self._crew.threads):
            if thread.native_id is not None and thread.is_alive():
                os.sched_setaffinity(thread.native_id, cores[i])

    def set_cores(self, cores: Sequence[Sequence[int]] | None) -> None:
        """Move the threads, those that run and those to come; ``None``: where the caller runs."""
        self._cores = cores
        here = sorted(os.sched_getaffinity(0))
        self._pin(cores if cores is not None else [here] * self.num_threads)

    def stop(self, wait: bool = True) -> None:
        """End the threads; jobs not begun are dropped. A later job starts new threads."""
        _stop(self._crew, wait)

    @property
    def native_ids(self) -> list[int]:
        """The ids that the operating system gave to the running threads."""
        return [t.native_id for t in self._crew.threads if t.is_alive() and t.native_id is not None]


class Borrowed:
    """Threads for a pipeline that feeds another one on the same threads, which ends them.

    Args:
        threads: The threads.
    """

    def __init__(self, threads: WorkerThreads) -> None:
        self._threads = threads

    def submit(self, job: _Job, finished: SimpleQueue[_Job], cancelled: _Flag) -> None:
        self._threads.submit(job, finished, cancelled)

    def stop(self, wait: bool = True) -> None:
        """Leaves that to the owner."""


class Pipeline:
    """An iterator over ``(item, result, stats)`` whose results threads make ahead of time.

    At most ``limit`` results are under way or waiting. ``items`` is advanced by the consumer's
    thread only. An exception of ``work`` comes as :class:`Failed` in the place of its result, and
    one of ``items`` with ``None`` as its item, after what was taken before.

    Only :class:`SourceError` may leave it and be gone on after: any other exception can have
    come at any place, so that another pipeline has to make what was not handed out.

    Args:
        items: What to make results of.
        work: Makes the result of an item, in a thread.
        threads: The threads; others may use them at the same time.
        owned: Whether the threads end with this iterator.
        limit: How many items may be under way.
        timeout: Seconds to wait for a result, 0 for ever.
        in_order: Whether results come in the order of the items, or as they are finished.
        course: Says which results the consumer's thread makes, when it asks for them; without it,
            none.
    """

    def __init__(
        self,
        items: Iterator[Any],
        work: Work,
        threads: WorkerThreads | Borrowed,
        *,
        owned: bool,
        limit: int,
        timeout: float = 0,
        in_order: bool = True,
        course: Course | None = None,
    ) -> None:
        self._items = items
        self._work = work
        self._threads = threads
        self._owned = owned
        self._limit = limit
        self._timeout = timeout
        self._in_order = in_order
        self._pid = os.getpid()
        self._exhausted = False
        self._paused = False
        self._pending: deque[_Job] = deque()
        self._finished: SimpleQueue[_Job] = SimpleQueue()
        self._cancelled = _Flag()
        self._course = course
        self._inline = Inline(items, work)
        self._here = course is not None and next(course)
        weakref.finalize(self, setattr, self._cancelled, "raised", True).atexit = True
        self._fill()

    def __next__(self) -> tuple[Any, Any, Stats]:
        if self._pid != os.getpid():
            raise SourceError(
                "this iterator belongs to the process that was forked, and threads do not survive "
                "a fork: call iter(loader) in this process"
            )
        if self._paused:
            self._paused = False
            for job in self._pending:
                if not job.done:
                    self._threads.submit(job, self._finished, self._cancelled)
        if self._here and not self._pending and not self._exhausted:
            return self._made_here()
        self._fill()
        if not self._pending:
            self.close()
            raise StopIteration
        start = time.perf_counter()
        job = self._next_finished()
        waited = time.perf_counter() - start
        if not self._here:  # else these are left from before
            self._handed_out(job.seconds)
        self._fill()  # before the consumer gets busy
        value, error, job.value, job.error = job.value, job.error, None, None
        job.stats.add_seconds("wait", waited)
        return job.item, value if error is None else Failed(error), job.stats

    def _made_here(self) -> tuple[Any, Any, Stats]:
        start = time.perf_counter()
        try:
            item, value, stats = next(self._inline)
        except StopIteration:
            self.close()
            raise
        stats.in_consumer = 1
        self._handed_out(time.perf_counter() - start)
        return item, value, stats

    def _handed_out(self, seconds: float) -> None:
        if self._course is not None:
            self._here = self._course.send((time.perf_counter(), seconds))

    def _fill(self) -> None:
        if self._here:
            return
        while not self._exhausted and len(self._pending) < self._limit:
            try:
                job = _Job(next(self._items), self._work)
            except StopIteration:
                self._exhausted = True
                return
            except Exception as error:  # raised when it is its turn, not before what is finished
                if was_interrupted(error):
                    raise
                self._exhausted = True
                job = _Job(None, None)
                job.error, job.done = error, True
                self._pending.append(job)
                self._finished.put(job)
                return
            self._pending.append(job)
            self._threads.submit(job, self._finished, self._cancelled)

    def _next_finished(self) -> _Job:
        deadline = time.monotonic() + self._timeout if self._timeout else float("inf")
        while (job := self._ready()) is None:
            left = deadline - time.monotonic()
            try:
                # Not for ever: on some systems a wait without an end cannot be interrupted.
                self._finished.get(timeout=max(0.0, min(left, 1.0)))
            except Empty:
                if left <= 0:
                    raise SourceError(self._timeout_message(self._pending[0])) from None
        while not self._finished.empty():  # only wakes us up; what is done is in _pending
            self._finished.get()
        self._pending.remove(job)
        return job

    def _ready(self) -> _Job | None:
        if self._in_order:
            return self._pending[0] if self._pending[0].done else None
        return next((job for job in self._pending if job.done), None)

    def _timeout_message(self, job: _Job) -> str:
        where = f"in thread {job.worker}, stage {job.stats.now!r}" if job.worker else job.stats.now
        return (
            f"the loader timed out: {job.item} was not ready after timeout={self._timeout:g} "
            f"seconds ({where}); raise timeout=, or see what blocks that stage"
        )

    def pause(self) -> None:
        """Let the threads end if they are ours; the next call starts them again.

        Called when an exception leaves the iterator: its traceback can keep the iterator alive
        for long (in a notebook, until the next exception).
        """
        if self._owned:
            self._paused = True
            self._threads.stop(wait=False)

    def close(self) -> None:
        """Drop what is under way and end the threads if they are ours."""
        if self._pid != os.getpid():
            return
        self._exhausted = True
        self._cancelled.raised = True
        self._pending.clear()
        if self._owned:
            self._threads.stop()
