"""Ranks with a GPU each, by NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_scale.comm import message
from pyg_scale.comm.base import Communicator, Work
from pyg_scale.comm.connect import Group
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.ops.raw_bytes import raw_bytes

_POLL = 0.0005


class Nccl(Communicator):
    """Tensors on CUDA devices, one device for each rank.

    NCCL matches calls by their order alone, so all ranks must make calls with tags in the same
    order, too. The time limit is kept by polling the device; NCCL cannot name a rank that does not
    answer.
    """

    devices = frozenset(["cuda"])

    @classmethod
    def join(cls, group: Group) -> Nccl:
        """Meet the other ranks; the device of each is ``torch.cuda.current_device()``.

        Raises:
            CommError: If this build of torch has no NCCL, or there is no GPU.
        """
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise CommError(
                "the backend 'nccl' needs a GPU and a build of torch with NCCL: use 'gloo' here"
            )
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=group.timeout)
        made = dist.ProcessGroupNCCL(group.store, group.rank, group.world_size, options)
        joined = cls(made, group.timeout, torch.device("cuda", torch.cuda.current_device()))
        joined.group = group
        return joined

    def __init__(self, process_group: Any, timeout: float, device: torch.device) -> None:
        super().__init__()
        self._group = process_group
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self.timeout, self.device = timeout, device
        self._lock = threading.RLock()
        self._last: _Exchange | None = None

    def _empty(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _exchange(self, name: str, tensors: Sequence[Tensor], tag: int) -> Work[list[Tensor]]:
        with self._lock:
            # Every rank issues headers, tensors, headers, tensors, in whatever order works are
            # awaited.
            if self._last is not None:
                self._last.send_tensors(self.timeout)
            self._last = _Exchange(self, name, tensors)
            return self._last

    def close(self) -> None:
        self._break("it was closed")
        self._group = self._last = None


class _Exchange(Work[list[Tensor]]):
    """Headers, then tensors, to and from every rank."""

    def __init__(self, comm: Nccl, name: str, tensors: Sequence[Tensor]) -> None:
        self._comm, self._name, self._group = comm, name, comm._group
        self._tensors: Sequence[Tensor] | None = tensors
        self._result: list[Tensor] | None = None
        headers = torch.stack([message.header(name, tensor) for tensor in tensors])
        sent = headers.to(comm.device)
        self._headers = torch.empty_like(sent)
        self._group.alltoall_base(
            self._headers.view(-1), sent.view(-1), [], [], dist.AllToAllOptions()
        ).wait()
        self._reached = _here()

    def send_tensors(self, seconds: float) -> None:
        """Send the tensors, once the headers have arrived."""
        with self._comm._lock:
            if self._result is not None:
                return
            assert self._tensors is not None
            self._await(seconds)
            own, device, rows = self._comm.rank, self._comm.device, self._headers.cpu()
            result = [
                tensor if rank == own else message.empty_for(rows[rank], self._name, rank, device)
                for rank, tensor in enumerate(self._tensors)
            ]
            flat_in, flat_out = (
                [_nothing(t) if rank == own else raw_bytes(t) for rank, t in enumerate(each)]
                for each in (self._tensors, result)
            )
            self._group.alltoall(flat_out, flat_in, dist.AllToAllOptions()).wait()
            self._reached, self._result = _here(), result

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        deadline = time.monotonic() + (self._comm.timeout if timeout is None else timeout)
        self.send_tensors(max(0.0, deadline - time.monotonic()))
        if self._tensors is not None:
            self._await(max(0.0, deadline - time.monotonic()))
            self._tensors = None
        assert self._result is not None
        return self._result

    def _await(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._reached.query():
            if time.monotonic() > deadline:
                reason = f"{self._name}: some rank did not answer within {seconds:g} seconds"
                self._comm._break(reason)
                raise CommTimeoutError(f"{reason} (waited for by rank {self._comm.rank})")
            time.sleep(_POLL)


def _here() -> Any:
    """An event at the end of the thread's stream, after the work of NCCL."""
    event = torch.cuda.Event()
    event.record()
    return event


def _nothing(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device)
