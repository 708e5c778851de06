"""What NCCL is to its caller, on the CPU: calls are queued, and done one after the other later.

For all of :class:`~pyg_scale.comm.nccl.Nccl` but NCCL itself, which wants a GPU for each rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from pyg_scale.comm import Group
from pyg_scale.comm.gloo import Gloo
from pyg_scale.comm.nccl import Nccl

_local = threading.local()


class Event:
    """As ``torch.cuda.Event``: of what the thread's group has queued so far."""

    def record(self) -> None:
        self._group: _QueuedGroup = _local.group
        self._number = self._group.queued

    def query(self) -> bool:
        return self._group.done >= self._number


class _Work:
    def wait(self) -> None:
        """Lets what is queued later wait, not the caller."""


class _QueuedGroup:
    """The calls of ``ProcessGroupNCCL`` that are needed."""

    def __init__(self, group: Group) -> None:
        self._gloo = Gloo.join(group)._group
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.queued = self.done = 0
        threading.Thread(target=self._run, name="queued", daemon=True).start()

    def rank(self) -> int:
        return int(self._gloo.rank())

    def size(self) -> int:
        return int(self._gloo.size())

    def alltoall_base(self, out: Tensor, given: Tensor, *_: Any) -> _Work:
        size = self.size()
        return self.alltoall(list(out.view(size, -1)), list(given.view(size, -1)), None)

    def alltoall(self, out: list[Tensor], given: list[Tensor], _: Any) -> _Work:
        def call() -> None:
            works = []
            for rank in range(self.size()):
                if rank == self.rank():
                    out[rank].copy_(given[rank])
                    continue
                if given[rank].numel():
                    works.append(self._gloo.send([given[rank]], rank, 0))
                if out[rank].numel():
                    works.append(self._gloo.recv([out[rank]], rank, 0))
            for work in works:
                work.wait()

        self.queued += 1
        self._calls.put(call)
        return _Work()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except RuntimeError:  # a rank is gone: what is queued is never done
                return
            self.done += 1

    def close(self) -> None:
        self._calls.put(None)


class QueuedNccl(Nccl):
    """:class:`Nccl` over such a group. Needs :class:`Event` in place of that of ``torch.cuda``."""

    devices = frozenset(["cpu"])

    @classmethod
    def join(cls, group: Group) -> QueuedNccl:
        _local.group = _QueuedGroup(group)
        joined = cls(_local.group, group.timeout, torch.device("cpu"))
        joined.group = group
        return joined

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        super().close()
