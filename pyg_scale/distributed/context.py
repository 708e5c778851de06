"""What a process is among those that work together, in the words of PyG and GLT."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from pyg_scale.errors import is_failure


class DistRole(Enum):
    """What a process does.

    ``WORKER`` samples and trains, ``SERVER`` samples for others, ``CLIENT`` trains with what
    servers sample.
    """

    WORKER = 1
    SERVER = 2
    CLIENT = 3


@dataclass
class DistContext:
    """Who this process is.

    The first six fields are those of ``torch_geometric.distributed.DistContext``. As a context
    manager it ends with :func:`pyg_scale.distributed.shutdown`.

    Attributes:
        rank: Among the processes of its role.
        global_rank: Among all processes; servers come first.
        world_size: Number of processes of its role.
        global_world_size: Number of all processes.
        group_name: Of its role: ``"worker"``, ``"server"`` or ``"client"`` unless named.
        role: See :class:`DistRole`.
        local_rank: Among the processes of this machine.
        local_world_size: Number of processes of this machine.
        node_rank: Number of this machine, by the lowest global rank on it.
        num_nodes: Number of machines.
        device: Where this process computes.
        backend: Of ``torch.distributed``.
        launcher: ``"torchrun"``, ``"slurm"``, ``"arguments"``, ``"none"`` (one process), or
            ``"torch"`` where ``torch.distributed`` had been initialised before.
        restarts: How often the launcher started this process again.
        addresses: Where each process can be reached, by global rank.
        hosts: The name of each one's machine, by global rank.
        servers: Names of the servers, see :attr:`worker_name`.
        clients: Names of the clients.
    """

    rank: int
    global_rank: int
    world_size: int
    global_world_size: int
    group_name: str
    role: DistRole = DistRole.WORKER
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "gloo"
    launcher: str = "none"
    restarts: int = 0
    addresses: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()

    @property
    def worker_name(self) -> str:
        """Such as ``"worker-0"``."""
        return f"{self.group_name}-{self.rank}"

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return len(self.servers)

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.clients)

    def is_worker(self) -> bool:
        """Whether this process samples and trains."""
        return self.role is DistRole.WORKER

    def is_server(self) -> bool:
        """Whether this process samples for others."""
        return self.role is DistRole.SERVER

    def is_client(self) -> bool:
        """Whether this process trains with what servers sample."""
        return self.role is DistRole.CLIENT

    def __enter__(self) -> DistContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        from pyg_scale.distributed import ranks, start

        failed = is_failure(error)
        if failed:
            ranks.script_failed()
        start.shutdown(wait=0.0 if failed else None)
