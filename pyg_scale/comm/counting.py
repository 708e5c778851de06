"""A wrapper that counts what a communicator sends and receives."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pyg_scale.comm.base import Communicator, Then, Work
from pyg_scale.comm.service import Handler, Service


@dataclass
class Traffic:
    """Traffic of one collective between this rank and the others, without what it gives itself.

    ``"request NAME"`` counts the requests of this rank to others: ``sent`` is the size of the
    requests, ``received`` that of the answers.

    Attributes:
        calls: Number of calls (``all_reduce`` exchanges twice).
        sent: Bytes of tensors.
        received: Bytes of tensors.
    """

    calls: int = 0
    sent: int = 0
    received: int = 0


class Counting(Communicator):
    """Counts calls and bytes, of collectives and of requests.

    Args:
        comm: The communicator whose calls are counted; closed with this one.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        self.rank, self.world_size, self.timeout = comm.rank, comm.world_size, comm.timeout
        self.devices, self.group = comm.devices, comm.group
        self._lock = threading.Lock()
        self._traffic: dict[str, Traffic] = {}

    def _empty(self, tensor: Tensor) -> Tensor:
        return self.comm._empty(tensor)

    def _exchange(self, name: str, tensors: Sequence[Tensor], tag: int) -> Work[list[Tensor]]:
        work = self.comm._exchange(name, tensors, tag)
        self._sent(name, self._bytes(tensors))
        return Then(work, lambda found: self._received(name, found, self._bytes(found)))

    def _sent(self, name: str, size: int) -> None:
        with self._lock:
            traffic = self._traffic.setdefault(name, Traffic())
            traffic.calls += 1
            traffic.sent += size

    def _received(self, name: str, found: list[Tensor], size: int) -> list[Tensor]:
        with self._lock:
            self._traffic[name].received += size
        return found

    def _bytes(self, tensors: Sequence[Tensor]) -> int:
        return sum(tensor.nbytes for rank, tensor in enumerate(tensors) if rank != self.rank)

    def traffic(self) -> dict[str, Traffic]:
        """The traffic so far, by collective; that of requests by ``"request NAME"``."""
        with self._lock:
            return {name: Traffic(**vars(each)) for name, each in self._traffic.items()}

    def serve(self, handlers: Mapping[str, Handler], *, num_threads: int = 2) -> Service:
        return _CountingService(self.comm.serve(handlers, num_threads=num_threads), self)

    def close(self) -> None:
        self._break("it was closed")
        self.comm.close()


class _CountingService(Service):
    def __init__(self, service: Service, counting: Counting) -> None:
        self._service, self._counting = service, counting
        self.rank, self.world_size = service.rank, service.world_size
        self.timeout = service.timeout

    def request(self, rank: int, name: str, tensors: Sequence[Tensor]) -> Work[list[Tensor]]:
        work = self._service.request(rank, name, tensors)
        if rank == self.rank:
            return work
        counting, what = self._counting, f"request {name}"
        counting._sent(what, _total(tensors))
        return Then(work, lambda found: counting._received(what, found, _total(found)))

    def close(self, wait: float = 0.0) -> list[int]:
        return self._service.close(wait)


def _total(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
