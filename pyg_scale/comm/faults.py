"""A wrapper that makes a communicator fail on purpose, for tests."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_scale.comm.base import Communicator, Work
from pyg_scale.comm.faulty_service import FaultyService
from pyg_scale.comm.service import Handler, Service
from pyg_scale.errors import CommError, CommTimeoutError

ACTIONS = ("delay", "drop", "raise", "kill", "garble", "close")
WHERE = ("exchange", "request", "answer")


@dataclass(frozen=True)
class Fault:
    """A fault, and the calls that it hits.

    Attributes:
        action: ``"delay"`` (the call starts ``seconds`` later; the answer to a request arrives that
            much later without delaying others), ``"drop"`` (this rank sends nothing and waits as if
            the others sent nothing either; an answer is never given), ``"raise"`` (this rank raises
            :class:`~pyg_scale.errors.CommError`), ``"kill"`` (this process ends by SIGKILL),
            ``"garble"`` (an answer has the wrong tensors), ``"close"`` (from then on this rank
            neither serves nor sends requests, as if it had been killed: for ranks that are threads
            of one process).
        call: The number of the call that it hits, from 0, counted separately for each ``of``;
            ``None`` for all of them.
        seconds: Length of a delay.
        of: ``"exchange"`` (collectives), ``"request"`` (requests of this rank) or ``"answer"``
            (requests to it).
    """

    action: str
    call: int | None = None
    seconds: float = 0.0
    of: str = "exchange"

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"action must be one of {', '.join(ACTIONS)} (got {self.action!r})")
        if self.of not in WHERE:
            raise ValueError(f"of must be one of {', '.join(WHERE)} (got {self.of!r})")
        if self.action == "garble" and self.of != "answer":
            raise ValueError("action 'garble' is for of='answer': only answers can be garbled")
        if self.action == "close" and self.of == "exchange":
            raise ValueError("action 'close' is for of='request' or 'answer': it ends a service")

    def hits(self, of: str, number: int) -> bool:
        """Return True if it hits a call."""
        return self.of == of and self.call in (None, number)


class Faulty(Communicator):
    """Makes calls of this rank fail.

    Args:
        comm: The communicator that fails; closed with this one.
        faults: The faults; several may hit one call, in this order.

    Attributes:
        happened: The faults that have hit a call so far, each with the number of the call.
    """

    def __init__(self, comm: Communicator, faults: Sequence[Fault]) -> None:
        super().__init__()
        self.comm, self.faults = comm, tuple(faults)
        self.happened: list[tuple[Fault, int]] = []
        self.rank, self.world_size, self.timeout = comm.rank, comm.world_size, comm.timeout
        self.devices, self.group = comm.devices, comm.group
        self._exchanges = itertools.count()

    def _empty(self, tensor: Tensor) -> Tensor:
        return self.comm._empty(tensor)

    def _exchange(self, name: str, tensors: Sequence[Tensor], tag: int) -> Work[list[Tensor]]:
        number = next(self._exchanges)
        for fault in self.faults:
            if not fault.hits("exchange", number):
                continue
            self.happened.append((fault, number))
            if fault.action == "delay":
                time.sleep(fault.seconds)
            elif fault.action == "raise":
                raise CommError(f"{name}: rank {self.rank} was told to fail at call {number}")
            elif fault.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                return _Dropped(self, name)
        return self.comm._exchange(name, tensors, tag)

    def serve(self, handlers: Mapping[str, Handler], *, num_threads: int = 2) -> Service:
        return FaultyService(self.comm, handlers, num_threads, self.faults, self.happened)

    def close(self) -> None:
        self._break("it was closed")
        self.comm.close()


class _Dropped(Work[list[Tensor]]):
    def __init__(self, comm: Faulty, name: str) -> None:
        self._comm, self._name = comm, name

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        seconds = self._comm.timeout if timeout is None else timeout
        if self._comm.world_size == 1:
            return [torch.empty(0)]
        time.sleep(seconds)
        raise CommTimeoutError(
            f"{self._name}: no rank answered within {seconds:g} seconds (rank {self._comm.rank} "
            "was told to send nothing)"
        )
