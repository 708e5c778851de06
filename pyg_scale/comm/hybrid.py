"""Tensors on the CPU by gloo, on a GPU by NCCL: routed by device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale.comm.base import Communicator, Work
from pyg_scale.comm.connect import Group
from pyg_scale.comm.gloo import Gloo
from pyg_scale.comm.nccl import Nccl
from pyg_scale.comm.service import Handler, Service


class Hybrid(Communicator):
    """The counterpart of ``cpu:gloo,cuda:nccl`` in ``torch.distributed``.

    The tensors of one call are all on the CPU or all on the GPU, the same on every rank.
    """

    devices = frozenset(["cpu", "cuda"])

    @classmethod
    def join(cls, group: Group) -> Hybrid:
        """Meet the other ranks, twice.

        Raises:
            CommError: If there is no GPU or no NCCL.
        """
        parts = [
            kind.join(replace(group, store=PrefixStore(kind.__name__, group.store)))
            for kind in (Nccl, Gloo)
        ]
        return cls(parts[1], parts[0])

    def __init__(self, cpu: Communicator, cuda: Communicator) -> None:
        super().__init__()
        self._cpu, self._cuda = cpu, cuda
        self.rank, self.world_size, self.timeout = cpu.rank, cpu.world_size, cpu.timeout
        self.group = cpu.group

    def _exchange(self, name: str, tensors: Sequence[Tensor], tag: int) -> Work[list[Tensor]]:
        where = {tensor.device.type for tensor in tensors}
        if len(where) != 1:
            raise TypeError(f"{name}: all tensors must be on one kind of device (got {where})")
        part = self._cpu if where == {"cpu"} else self._cuda
        return part._exchange(name, tensors, tag)

    def serve(self, handlers: Mapping[str, Handler], *, num_threads: int = 2) -> Service:
        return self._cpu.serve(handlers, num_threads=num_threads)

    def close(self) -> None:
        self._break("it was closed")
        self._cpu.close()
        self._cuda.close()
