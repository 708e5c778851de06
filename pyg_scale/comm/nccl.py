"""Ranks with a GPU each, by NCCL."""

from __future__ import annotations

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

_POLL = 0.0005


class Nccl(Communicator):
    """Tensors on CUDA devices, one device for each rank.

    NCCL matches calls by their order alone, so calls with tags must be made in one order, too.
    The time limit is kept by asking whether the device is done; a rank that does not answer cannot
    be named by NCCL.
    """

    devices = frozenset(["cuda"])

    @classmethod
    def join(cls, group: Group) -> Nccl:
        """Meet the other ranks; each one's device is ``torch.cuda.current_device()``.

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

    def _start(self, name: str, tensors: Sequence[Tensor], tag: int | None) -> Work[list[Tensor]]:
        # barriers and the others of a broadcast have nothing to send
        moved = [t.to(self.device) if t.numel() == 0 else t for t in tensors]
        return super()._start(name, moved, tag)

    def _exchange(self, name: str, tensors: Sequence[Tensor], tag: int) -> Work[list[Tensor]]:
        headers = torch.stack([message.header(name, tensor) for tensor in tensors])
        sent = headers.to(self.device)
        found = torch.empty_like(sent)
        self._group.alltoall_base(
            found.view(-1), sent.view(-1), [], [], dist.AllToAllOptions()
        ).wait()
        self._await(name, self.timeout)
        rows = found.cpu()
        result = [
            tensors[rank]
            if rank == self.rank
            else message.empty_for(rows[rank], name, rank, self.device)
            for rank in range(self.world_size)
        ]
        flat_in = [_bits(t) if r != self.rank else _nothing(t) for r, t in enumerate(tensors)]
        flat_out = [_bits(t) if r != self.rank else _nothing(t) for r, t in enumerate(result)]
        self._group.alltoall(flat_out, flat_in, dist.AllToAllOptions()).wait()
        return _Queued(self, name, result, tensors)

    def _await(self, name: str, seconds: float) -> None:
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + seconds
        while not event.query():
            if time.monotonic() > deadline:
                reason = f"{name}: some rank did not answer within {seconds:g} seconds"
                self._break(reason)
                raise CommTimeoutError(f"{reason} (waited for by rank {self.rank})")
            time.sleep(_POLL)

    def close(self) -> None:
        self._break("it was closed")
        self._group = None


class _Queued(Work[list[Tensor]]):
    """Done when the device has come this far."""

    def __init__(
        self, comm: Nccl, name: str, result: list[Tensor], tensors: Sequence[Tensor]
    ) -> None:
        self._comm, self._name, self._result = comm, name, result
        self._tensors: Sequence[Tensor] | None = tensors

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        if self._tensors is not None:
            self._comm._await(self._name, self._comm.timeout if timeout is None else timeout)
            self._tensors = None
        return self._result


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _nothing(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device)
