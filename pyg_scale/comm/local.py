"""One process alone: it receives the tensors that it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from pyg_scale.comm.base import Communicator, Done, Work
from pyg_scale.comm.connect import Group
from pyg_scale.comm.service import Handler, LocalService, Service


class Local(Communicator):
    """The communicator of a single rank."""

    devices = frozenset(["cpu", "cuda"])

    @classmethod
    def join(cls, group: Group) -> Local:
        """The communicator of a group of one.

        Raises:
            ValueError: If the group is larger.
        """
        if group.world_size != 1:
            raise ValueError(
                f"the backend 'local' is for one process, there are {group.world_size}: use 'gloo'"
            )
        made = cls()
        made.timeout, made.group = group.timeout, group
        return made

    def _exchange(self, name: str, tensors: Sequence[Tensor], tag: int) -> Work[list[Tensor]]:
        return Done(list(tensors))

    def serve(self, handlers: Mapping[str, Handler], *, num_threads: int = 2) -> Service:
        return LocalService(handlers, self.timeout, num_threads)

    def close(self) -> None:
        self._break("it was closed")
