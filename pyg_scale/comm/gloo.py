"""Ranks over TCP by gloo, which every build of torch has.

Messages go from point to point, so that a time limit can say which rank did not answer, and
several collectives can be under way in any order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, PrefixStore  # type: ignore[attr-defined]

from pyg_scale.comm import message
from pyg_scale.comm.address import own_address
from pyg_scale.comm.base import MAX_TAG, Communicator, Work
from pyg_scale.comm.connect import Group
from pyg_scale.comm.meeting import named, store_failure
from pyg_scale.comm.roll_call import STORE_SECONDS, is_timeout, report, reports
from pyg_scale.comm.service import Handler, Service, join
from pyg_scale.comm.tcp import TcpService
from pyg_scale.comm.time_limit import within
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.ops.raw_bytes import raw_bytes

_CPU = torch.device("cpu")
_NOBODY = 4 * MAX_TAG + 1  # a tag that nobody sends with
_STOP_SECONDS = 0.1


class Gloo(Communicator):
    """Tensors on the CPU between processes and machines.

    A rank that does not answer within the time limit breaks the connection for good (so does gloo):
    the error names the rank, and every later call raises.
    """

    @classmethod
    def join(cls, group: Group) -> Gloo:
        """Meet the other ranks.

        Raises:
            CommTimeoutError: If not all of them come in time; names those that did not.
            CommError: If they cannot be reached, or the store is gone; names ranks that ended.
        """
        address = own_address()
        process_group: Any = None
        said = PrefixStore("joined", group.store)
        try:
            process_group = dist.ProcessGroupGloo(
                group.store, group.rank, group.world_size, _options(address, group.timeout)
            )
            # A rank that closes before another has seen their connection would fail its joining.
            process_group.barrier().wait()
        except RuntimeError as error:
            process_group = None  # ends the waits of others for this rank
            raise _not_joined(group, said, address, error) from None
        with contextlib.suppress(RuntimeError):  # all are connected: rank 0 may have ended
            report(said, group.rank, {})
        return cls(process_group, group)

    def __init__(self, process_group: Any, group: Group) -> None:
        super().__init__()
        self._group: Any = process_group
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self.timeout = group.timeout
        self.group = self._where = group
        self._services = itertools.count()
        self._receiver: _Receiver | None = None
        self._lock = threading.Lock()

    def _exchange(self, name: str, tensors: Sequence[Tensor], tag: int) -> Work[list[Tensor]]:
        return _Exchange(self, name, tensors, tag)

    def _push(self, work: _Exchange) -> None:
        """Let the receiver thread receive the work: nobody may be waiting for it yet."""
        with self._lock:
            if self._receiver is None:
                self._receiver = _Receiver(self._group)
                # Needed even if nobody closes it: if the interpreter ends a daemon that is inside
                # gloo, the process aborts.
                self._stop_receiver = weakref.finalize(self, self._receiver.stop)
            self._receiver.works.put(work)

    def _result(self, work: Work[Any], async_op: bool) -> Any:
        if async_op:
            under_way = getattr(work, "_work", work)
            if isinstance(under_way, _Exchange):
                self._push(under_way)
        return super()._result(work, async_op)

    def serve(self, handlers: Mapping[str, Handler], *, num_threads: int = 2) -> Service:
        prefix = PrefixStore(f"service/{next(self._services)}", self._where.store)
        return TcpService(replace(self._where, store=prefix), handlers, num_threads)

    def close(self) -> None:
        self._break("it was closed")
        with self._lock:
            if self._receiver is not None:
                self._stop_receiver()
        self._group = None


class _Exchange(Work[list[Tensor]]):
    """Headers and tensors of one collective, to and from every other rank."""

    def __init__(self, comm: Gloo, name: str, tensors: Sequence[Tensor], tag: int) -> None:
        self._comm, self._name, self._tag = comm, name, tag
        self._tensors = tensors
        self._result: list[Tensor] | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        group, self._sent, self._headers = comm._group, [], {}
        own = comm.rank
        self._others = [(own + step) % comm.world_size for step in range(1, comm.world_size)]
        headers = {rank: message.header(name, tensors[rank]) for rank in self._others}
        try:
            for rank in self._others:
                found = torch.empty(message.SIZE, dtype=torch.int64)
                self._headers[rank] = (found, group.recv([found], rank, 2 * tag))
                self._sent.append((rank, headers[rank], group.send([headers[rank]], rank, 2 * tag)))
                if tensors[rank].numel():
                    flat = raw_bytes(tensors[rank])
                    self._sent.append((rank, flat, group.send([flat], rank, 2 * tag + 1)))
        except RuntimeError as error:
            raise self._failed(error, rank, 0.0) from None

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._result is None:
                try:
                    self._result = self._receive(self._comm.timeout if timeout is None else timeout)
                except Exception as error:
                    self._error = error
                    raise
            return self._result

    def _receive(self, seconds: float) -> list[Tensor]:
        deadline = time.monotonic() + seconds
        result: dict[int, Tensor] = {self._comm.rank: self._tensors[self._comm.rank]}
        coming = []
        for rank in reversed(self._others):
            found, work = self._headers[rank]
            self._await(work, rank, deadline, seconds)
            result[rank] = message.empty_for(found, self._name, rank, _CPU)
            if result[rank].numel():
                flat = raw_bytes(result[rank])
                coming.append((rank, flat, self._comm._group.recv([flat], rank, 2 * self._tag + 1)))
        for rank, _, work in [*coming, *self._sent]:
            self._await(work, rank, deadline, seconds)
        self._sent, self._headers = [], {}
        return [result[rank] for rank in range(self._comm.world_size)]

    def _await(self, work: Any, rank: int, deadline: float, seconds: float) -> None:
        left = max(0.001, deadline - time.monotonic())
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise self._failed(error, rank, seconds) from None

    def _failed(self, error: RuntimeError, rank: int, seconds: float) -> CommError:
        if is_timeout(error):
            reason = f"{self._name}: rank {rank} did not answer within {seconds:g} seconds"
            self._comm._break(reason)
            return CommTimeoutError(f"{reason} (waited for by rank {self._comm.rank})")
        reason = f"{self._name}: the connection to rank {rank} is lost"
        self._comm._break(reason)
        return CommError(f"{reason} (rank {self._comm.rank} says: {_first_line(error)})")


def _not_joined(group: Group, said: Any, address: str, error: RuntimeError) -> CommError:
    """The error to raise for one of joining, with the ranks that say nothing in a store."""
    rank, size = group.rank, group.world_size
    reason = f"rank {rank} at {address} could not meet all of the {size} ranks"
    if isinstance(error, DistNetworkError):
        return CommError(f"{reason}: {store_failure(error, reason)}")
    late = is_timeout(error)
    if late:
        reason = f"{reason} within {group.timeout:g} seconds"

    def tell_and_ask() -> list[int]:
        report(said, rank, {})
        words = reports(said, size)
        return [other for other in range(size) if other not in words]

    try:
        silent = within(STORE_SECONDS, tell_and_ask)
    except (RuntimeError, TimeoutError):
        who = "the store of rank 0, in which the ranks meet, does not answer"
    else:
        who = f"{named(silent)} {'did not come' if late else 'ended'}"
        who = who if silent else "none of them ended, but their connections broke"
    return (CommTimeoutError if late else CommError)(f"{reason}: {who} ({_first_line(error)})")


def _options(address: str, seconds: float) -> Any:
    """Options of a group at an address; the machine's name, gloo's choice, may mean loopback."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=seconds)
    return options


class _Receiver:
    """A thread that waits for the work under way.

    Args:
        group: The process group whose work it waits for.
    """

    def __init__(self, group: Any) -> None:
        self.works: SimpleQueue[_Exchange | None] = SimpleQueue()
        self._group, self._process = group, os.getpid()
        self._thread = threading.Thread(
            target=_receive_all, args=(self.works,), name="pyg_scale-comm", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, even if it waits for a rank that does not answer."""
        if self._process != os.getpid():  # a thread does not survive a fork
            return
        self.works.put(None)
        if threading.current_thread() is self._thread:
            return  # which had the last call that kept the communicator
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            _interrupt(self._group)
            join([self._thread])


def _receive_all(works: SimpleQueue[_Exchange | None]) -> None:
    while (work := works.get()) is not None:
        try:
            work.wait()
        except Exception:  # raised to whoever waits for the work
            continue
        finally:
            del work


def _interrupt(group: Any) -> None:
    """Let all waits of a group fail: an expired time limit ends all of its connections."""
    other = (group.rank() + 1) % group.size()
    nothing = torch.empty(1, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):
        group.recv([nothing], other, _NOBODY).wait(timedelta(milliseconds=1))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
