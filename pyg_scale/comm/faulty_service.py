"""Requests and answers that fail on purpose; see :class:`pyg_scale.comm.Fault`."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_scale.comm.base import Communicator, Work
from pyg_scale.comm.service import Answer, Handler, Service
from pyg_scale.errors import CommError, CommTimeoutError

if TYPE_CHECKING:
    from pyg_scale.comm.faults import Fault


class FaultyService(Service):
    """The service of a communicator, some requests and answers of which fail.

    Args:
        comm: The communicator.
        handlers: The handlers of this rank.
        num_threads: Number of requests that it answers at a time.
        faults: The faults.
        happened: The list to which faults that hit a call are appended.
    """

    def __init__(
        self,
        comm: Communicator,
        handlers: Mapping[str, Handler],
        num_threads: int,
        faults: Sequence[Fault],
        happened: list[tuple[Fault, int]],
    ) -> None:
        self._faults, self._happened = faults, happened
        self._requests, self._answers = itertools.count(), itertools.count()
        self._closed = threading.Event()
        self._service = comm.serve(
            {name: self._faulty(name, handler) for name, handler in handlers.items()},
            num_threads=num_threads,
        )
        self.rank, self.world_size = self._service.rank, self._service.world_size
        self.timeout = self._service.timeout

    def request(self, rank: int, name: str, tensors: Sequence[Tensor]) -> Work[list[Tensor]]:
        number, delay = next(self._requests), 0.0
        for fault in self._faults:
            if not fault.hits("request", number):
                continue
            self._happened.append((fault, number))
            if fault.action == "delay":
                delay += fault.seconds
            elif fault.action == "drop":
                return Answer(Future(), rank, name, self.timeout)
            else:
                self._fail(fault, f"request {number} ({name!r}) of rank {self.rank}")
        start = time.monotonic()
        work = self._service.request(rank, name, tensors)
        return _Late(work, start + delay, self, rank, name) if delay else work

    def _faulty(self, name: str, handler: Handler) -> Handler:
        def answer(tensors: list[Tensor]) -> Sequence[Tensor]:
            number = next(self._answers)
            for fault in self._faults:
                if not fault.hits("answer", number):
                    continue
                self._happened.append((fault, number))
                if fault.action == "delay":
                    self._closed.wait(fault.seconds)
                elif fault.action == "drop":
                    self._wait_for_the_end()
                elif fault.action == "garble":
                    return [torch.full((7,), -(1 << 40)), torch.rand(3, 2)]
                else:
                    self._fail(fault, f"answer {number} ({name!r}) of rank {self.rank}")
            return handler(tensors)

        return answer

    def _wait_for_the_end(self) -> None:
        """Wait until the service is closed; it may serve others for some time before that."""
        while not self._closed.wait(0.02):
            if getattr(self._service, "_closed", False):
                return

    def _fail(self, fault: Fault, what: str) -> None:
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "close":
            self.close()
        raise CommError(f"{what} was told to fail")

    def close(self, wait: float = 0.0) -> list[int]:
        if wait <= 0:
            self._closed.set()
        missing = self._service.close(wait)
        self._closed.set()
        return missing


class _Late(Work[list[Tensor]]):
    """An answer that arrives after a delay, as over a slow network."""

    def __init__(
        self, work: Work[list[Tensor]], ready: float, service: Service, rank: int, name: str
    ) -> None:
        self._work, self._ready = work, ready
        self._service, self._rank, self._name = service, rank, name

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        seconds = self._service.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        found = self._work.wait(timeout)
        if self._ready <= deadline:
            time.sleep(max(0.0, self._ready - time.monotonic()))
            return found
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise CommTimeoutError(
            f"rank {self._rank} did not answer the request {self._name!r} within "
            f"{round(seconds, 2):g} seconds"
        )
