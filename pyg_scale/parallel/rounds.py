"""Rounds that ranks end together through rank 0, without those that have left or are late.

No collective is made: a rank that is gone would break it for all. Ranks answer rank 0, and ask it,
by requests of :mod:`pyg_scale.comm`.
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_scale.comm import Communicator, connect
from pyg_scale.comm.service import Handler
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.parallel.base import Waited
from pyg_scale.parallel.replica import by_dtype

_GRACE = 10.0  # seconds for an answer on its way
_CLOSING = 60.0  # seconds in which rank 0 still answers others

Combine = Callable[[dict[int, list[Tensor]]], list[Tensor]]
"""Makes the result of a round from what each rank brought. Called on rank 0."""


class Round(NamedTuple):
    """A round that has ended.

    Attributes:
        number: Its number, from 0 on.
        ranks: The ranks that counted in it.
        result: Its result.
    """

    number: int
    ranks: list[int]
    result: list[Tensor]


class Rounds:
    """The rounds of a rank; on rank 0 also those of all.

    Args:
        group: The ranks: a communicator, or ``None`` for all of them.
        combine: See :data:`Combine`.
        start: What ranks get at first, on rank 0.
        handlers: Other requests that rank 0 answers.
        timeout: Seconds after the first rank has ended a round in which others may end it, too.

    Raises:
        TypeError: If ``group`` is something else.
        ValueError: If ``timeout`` is not above 0.
        CommError: If rank 0 cannot be reached.

    Attributes:
        waited: Counts the time in which this rank waits for rank 0, and so for the others.
    """

    def __init__(
        self,
        group: Any,
        combine: Combine,
        start: Sequence[Tensor],
        *,
        handlers: Mapping[str, Handler] | None = None,
        timeout: float = 300.0,
    ) -> None:
        if group is not None and not isinstance(group, Communicator):
            raise TypeError(
                f"group must be a pyg_scale.comm.Communicator, as ranks may leave "
                f"(got {type(group).__name__})"
            )
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds (got {timeout})")
        self._comm = _connected() if group is None else group
        self.rank, self.world_size = self._comm.rank, self._comm.world_size
        self.waited = Waited()
        self._owns = group is None
        self._timeout = timeout
        self._own = _Own()
        served: dict[str, Handler] = {"bring": self._own.bring}
        self._all: _All | None = None
        if self.rank == 0:
            self._all = _All(self.world_size, combine, [each.clone() for each in start], timeout)
            served |= {"start": self._all.start, "end": self._all.end, **(handlers or {})}
        # Requests wait here until a round ends: one of each rank, and those that are no rounds.
        self._service = self._comm.serve(served, num_threads=2 * self.world_size + 2)
        if self._all is not None:
            self._all.service = self._service
        self._number = 0

    @property
    def gone(self) -> dict[int, str]:
        """The ranks that have left, with the reason of each. On rank 0."""
        return {} if self._all is None else dict(self._all.gone)

    def ask(self, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Ask rank 0.

        Raises:
            CommError: If it is gone, or could not answer.
            CommTimeoutError: If it does not answer in time.
        """
        with self.waited.counting():
            return self._service.request(0, name, list(tensors)).wait(self._timeout + _GRACE)

    def start(self) -> list[Tensor]:
        """The tensors that rank 0 has started with."""
        return self.ask("start", [])

    def end(self, tensors: Sequence[Tensor]) -> Round:
        """End a round: bring something, wait for the others, and get the result.

        Args:
            tensors: They must not be changed before this returns.

        Raises:
            CommError: If rank 0 is gone.
            CommTimeoutError: If it does not answer in time.
        """
        self._own.has(self._number, tensors)
        about, *result = self.ask("end", [torch.tensor([self._number])])
        number, *ranks = about.tolist()
        # A rank that was late has missed rounds, and goes on with the next one.
        self._number = number + 1
        return Round(number, ranks, result)

    def leave(self) -> None:
        """Take part in no more rounds.

        Raises:
            ValueError: On rank 0, without which there are none.
        """
        if self.rank == 0:
            raise ValueError("rank 0 has what all ranks need, and cannot leave")
        self._own.leave()

    def close(self, wait: float = _CLOSING) -> None:
        """End; rank 0 waits up to ``wait`` seconds until the others have ended, too."""
        self._own.leave()
        self._service.close(wait if self.rank == 0 else 0.0)
        if self._owns:
            self._comm.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next round."""
        return {"round": self._number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a round."""
        self._number = state["round"]
        if self._all is not None:
            self._all.begin(self._number)


_connections: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()


def _connected() -> Communicator:
    """Connect all ranks, which have wrapped as many modules as this one since they have met."""
    if not dist.is_available() or not dist.is_initialized():
        return connect()
    numbers = _connections.setdefault(dist.group.WORLD, itertools.count())
    return connect(name=f"rounds-{next(numbers)}")


class _Own:
    """The tensors that this rank brings to a round."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tensors: tuple[int, list[Tensor]] | None = None
        self._left = False

    def has(self, number: int, tensors: Sequence[Tensor]) -> None:
        with self._changed:
            self._tensors = number, list(tensors)
            self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def bring(self, tensors: list[Tensor]) -> list[Tensor]:
        """Answer rank 0, once this rank has ended that round."""
        number, seconds = tensors[0].tolist()
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._has(number), seconds)
            if self._left:
                raise CommError("it has left")
            if not self._has(number):
                raise CommTimeoutError(f"it has not ended the round within {seconds:g} seconds")
            assert self._tensors is not None
            return self._tensors[1]

    def _has(self, number: float) -> bool:
        return self._tensors is not None and self._tensors[0] == number


class _All:
    """The rounds of all ranks, on rank 0."""

    def __init__(
        self, world_size: int, combine: Combine, start: list[Tensor], timeout: float
    ) -> None:
        self.service: Any = None
        self.gone: dict[int, str] = {}
        self._world_size, self._combine, self._timeout = world_size, combine, timeout
        self._start = start
        self._changed = threading.Condition()
        self._collects = False
        self._last: Round | None = None
        self._error: Exception | None = None

    def begin(self, number: int) -> None:
        with self._changed:
            self._last = Round(number - 1, [], []) if number else None

    def start(self, _: list[Tensor]) -> list[Tensor]:
        return self._start

    def end(self, tensors: list[Tensor]) -> list[Tensor]:
        """Answer a rank that has ended a round; the first one's request collects from all."""
        number = int(tensors[0])
        with self._changed:
            collects = not self._collects and not self._ended(number)
            self._collects |= collects
        if collects:
            found, error = None, None
            try:
                found = self._collect(number)
            except Exception as raised:
                error = raised
            with self._changed:
                self._last, self._error = found or self._last, error
                self._collects = False
                self._changed.notify_all()
        with self._changed:
            # A rank that was late does not wait for the next round, which waits for it.
            self._changed.wait_for(
                lambda: self._ended(number) or not self._collects, self._timeout + _GRACE
            )
            if not self._ended(number):
                raise self._error or CommTimeoutError(f"round {number} did not end in time")
            last = self._last
        assert last is not None
        return [torch.tensor([last.number, *last.ranks]), *last.result]

    def _ended(self, number: int) -> bool:
        return self._last is not None and self._last.number >= number

    def _collect(self, number: int) -> Round:
        deadline = time.monotonic() + self._timeout
        asked = torch.tensor([number, self._timeout], dtype=torch.float64)
        works = {
            rank: self.service.request(rank, "bring", [asked])
            for rank in range(self._world_size)
            if rank not in self.gone
        }
        brought: dict[int, list[Tensor]] = {}
        for rank, work in works.items():
            try:
                brought[rank] = work.wait(max(0.0, deadline - time.monotonic()))
            except CommTimeoutError:
                self._say(f"rank {rank} did not end round {number} within {self._timeout:g} s")
            except CommError as error:
                if "CommTimeoutError" in str(error):  # its own clock was faster
                    self._say(f"rank {rank} did not end round {number} in time")
                    continue
                self.gone[rank] = str(error)
                self._say(f"rank {rank} has left ({error})")
        return Round(number, sorted(brought), self._combine(brought))

    def _say(self, what: str) -> None:
        warnings.warn(f"{what}: the round goes on without it", RuntimeWarning, stacklevel=2)


# Tensors of a module ###########################################################################


def checked_timeout(timeout: float) -> float:
    """The seconds after the first rank in which others may end a round.

    Raises:
        ValueError: If they are not above 0.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds (got {timeout})")
    return timeout


def packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors into one for each dtype and device, on the CPU."""
    groups = by_dtype([tensor.detach() for tensor in tensors])
    return [torch.cat([tensor.flatten() for tensor in same]).cpu() for same in groups]


@torch.no_grad()
def unpack(packs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy what :func:`packed` made of such tensors into these.

    Raises:
        ValueError: If they are others.
    """
    groups = by_dtype(list(tensors))
    sizes = [sum(tensor.numel() for tensor in same) for same in groups]
    if sizes != [pack.numel() for pack in packs]:
        raise ValueError("the parameters of rank 0 are others: all ranks need one model")
    for same, pack in zip(groups, packs):
        for tensor, values in zip(same, pack.split([tensor.numel() for tensor in same])):
            tensor.copy_(values.view_as(tensor))
