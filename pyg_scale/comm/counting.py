"""A wrapper that counts what a communicator sends and receives."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pyg_scale.comm.base import Communicator, Then, Work


@dataclass
class Traffic:
    """Of one collective, between this rank and the others; what it gives itself is not counted.

    Attributes:
        calls: How often it was called (``all_reduce`` exchanges twice).
        sent: Bytes of tensors.
        received: Bytes of tensors.
    """

    calls: int = 0
    sent: int = 0
    received: int = 0


class Counting(Communicator):
    """Counts calls and bytes.

    Args:
        comm: What to count; closed with this one.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        self.rank, self.world_size, self.timeout = comm.rank, comm.world_size, comm.timeout
        self.devices = comm.devices
        self._lock = threading.Lock()
        self._traffic: dict[str, Traffic] = {}

    def _exchange(self, name: str, tensors: Sequence[Tensor], tag: int) -> Work[list[Tensor]]:
        work = self.comm._exchange(name, tensors, tag)
        with self._lock:
            traffic = self._traffic.setdefault(name, Traffic())
            traffic.calls += 1
            traffic.sent += self._bytes(tensors)
        return Then(work, lambda found: self._received(name, found))

    def _received(self, name: str, found: list[Tensor]) -> list[Tensor]:
        with self._lock:
            self._traffic[name].received += self._bytes(found)
        return found

    def _bytes(self, tensors: Sequence[Tensor]) -> int:
        return sum(tensor.nbytes for rank, tensor in enumerate(tensors) if rank != self.rank)

    def traffic(self) -> dict[str, Traffic]:
        """What was counted so far, by collective."""
        with self._lock:
            return {name: Traffic(**vars(each)) for name, each in self._traffic.items()}

    def close(self) -> None:
        self._break("it was closed")
        self.comm.close()
