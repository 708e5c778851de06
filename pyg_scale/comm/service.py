"""Requests and replies between ranks: each serves the others, whatever its own loop does.

An idle rank takes part in no collective. A rank answers from :meth:`Communicator.serve` until it is
closed, in threads of its own; it may break out of its loop, evaluate alone or send no requests at
all.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from pyg_scale.comm.base import Work
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.ops.library import renew_pool_after_fork
from pyg_scale.ops.sockets import GatheredRows

Handler = Callable[[list[Tensor]], Sequence[Tensor]]
"""Answers a request: tensors in, tensors out. Called in several threads at once."""


@runtime_checkable
class AnswersRows(Protocol):
    """A handler that can leave choosing rows to the sender of its answer, which saves a copy."""

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Answer with tensors."""

    def rows(self, tensors: list[Tensor]) -> Sequence[Tensor | GatheredRows]:
        """The same answer, of tensors and of rows still to be chosen."""


_Asked = tuple[Future[list[Any]], str, list[Tensor], bool]


class Service(ABC):
    """The service of a rank: answers requests of other ranks, and sends requests to them.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Seconds that an answer may take.
    """

    rank: int
    world_size: int
    timeout: float

    @abstractmethod
    def request(self, rank: int, name: str, tensors: Sequence[Tensor]) -> Work[list[Tensor]]:
        """Send a request to a rank, which may be this one; returns at once.

        Args:
            rank: The rank.
            name: The handler.
            tensors: Its arguments, on the CPU. They must not be changed until the answer has
                arrived.

        Returns:
            Work whose result is the tensors that the handler returned. It raises :class:`CommError`
            with the message of the handler's error, or if the rank is gone.

        Raises:
            ValueError: If the rank does not exist.
        """

    @abstractmethod
    def close(self, wait: float = 0.0) -> list[int]:
        """Send no more requests, and stop serving.

        Args:
            wait: Seconds to go on serving until every rank has called ``close``. A call with 0 ends
                one that waits in another thread.

        Returns:
            The ranks that have not called it.
        """


class Answer(Work[list[Tensor]]):
    """The answer to a request."""

    def __init__(self, future: Future[list[Tensor]], rank: int, name: str, timeout: float) -> None:
        self._future, self._rank, self._name, self._timeout = future, rank, name, timeout

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        seconds = self._timeout if timeout is None else timeout
        try:
            return self._future.result(seconds)
        except FutureTimeoutError as error:
            if self._future.done():  # the handler's own timeout
                raise
            raise CommTimeoutError(
                f"rank {self._rank} did not answer the request {self._name!r} within "
                f"{round(seconds, 2):g} seconds"
            ) from error


class Handlers:
    """The handlers of a rank and the threads that run them.

    A rank still answers the others after its script has ended. Threads of ``concurrent.futures`` do
    not outlive the script, so these are daemons.

    Args:
        handlers: The handlers, by name.
        num_threads: Number of requests that are answered at a time.
    """

    def __init__(self, handlers: Mapping[str, Handler], num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1 (got {num_threads})")
        self._handlers = dict(handlers)
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        self._closed = False
        renew_pool_after_fork()
        self._threads = [
            threading.Thread(target=self._work, name=f"pyg_scale-serve-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, name: str, tensors: list[Tensor], *, rows: bool = False) -> Future[list[Any]]:
        """Answer a request in a thread.

        Args:
            name: The handler.
            tensors: Its arguments.
            rows: Allow rows still to be chosen in the answer.
        """
        future: Future[list[Any]] = Future()
        if self._closed:
            future.set_exception(CommError("this rank has stopped serving"))
        else:
            self._asked.put((future, name, tensors, rows))
        return future

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, name, tensors, rows = asked
            try:
                if self._closed:
                    raise CommError("this rank has stopped serving")
                result = self._call(name, tensors, rows)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            del asked, future, tensors

    def _call(self, name: str, tensors: list[Tensor], rows: bool) -> list[Any]:
        if name not in self._handlers:
            known = ", ".join(sorted(self._handlers)) or "nothing"
            raise CommError(f"there is no handler {name!r}; this rank serves {known}")
        handler = self._handlers[name]
        if rows and isinstance(handler, AnswersRows):
            return list(handler.rows(tensors))
        return list(handler(tensors))

    def close(self) -> None:
        """Finish the requests under way, and refuse those that wait."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._asked.put(None)
        join(self._threads)


def join(threads: Iterable[threading.Thread], seconds: float = 5.0) -> None:
    """Wait until threads other than this one have ended, within a time limit.

    The interpreter ends a daemon wherever it is; inside C++ that aborts the process.
    """
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


class LocalService(Service):
    """The service of a single rank."""

    rank, world_size = 0, 1

    def __init__(self, handlers: Mapping[str, Handler], timeout: float, num_threads: int) -> None:
        self.timeout = timeout
        self._handlers = Handlers(handlers, num_threads)
        self._closed = False

    def request(self, rank: int, name: str, tensors: Sequence[Tensor]) -> Work[list[Tensor]]:
        if rank != 0:
            raise ValueError(f"there is no rank {rank}: this process is alone")
        if self._closed:
            raise CommError("this service was closed")
        return Answer(self._handlers.submit(name, list(tensors)), rank, name, self.timeout)

    def close(self, wait: float = 0.0) -> list[int]:
        self._closed = True
        self._handlers.close()
        return []
