"""The role and rank of a process in a distributed job, in the terms of PyG and GLT."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from pyg_scale.errors import is_failure


class DistRole(Enum):
    """The role of a process.

    ``WORKER`` samples and trains, ``SERVER`` samples for others, ``CLIENT`` trains with batches
    that servers sample.
    """

    WORKER = 1
    SERVER = 2
    CLIENT = 3


@dataclass
class DistContext:
    """The identity of this process in the job.

    The first six fields are those of ``torch_geometric.distributed.DistContext``. As a context
    manager, it calls :func:`pyg_scale.distributed.shutdown` at its end.

    Attributes:
        rank: Rank among the processes of its role.
        global_rank: Rank among all processes; servers come first.
        world_size: Number of processes of its role.
        global_world_size: Number of all processes.
        group_name: Name of the group of its role; by default ``"worker"``, ``"server"`` or
            ``"client"``.
        role: See :class:`DistRole`.
        local_rank: Rank among the processes of this machine.
        local_world_size: Number of processes of this machine.
        node_rank: Number of this machine; machines are ordered by their lowest global rank.
        num_nodes: Number of machines.
        device: The device on which this process computes.
        backend: Backend of ``torch.distributed``.
        launcher: ``"torchrun"``, ``"slurm"``, ``"arguments"``, ``"none"`` (one process), or
            ``"torch"`` if ``torch.distributed`` had been initialised before.
        restarts: Number of times that the launcher restarted this process.
        addresses: The address of each process, by global rank.
        hosts: The host name of each process, by global rank.
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
        """The name of this process, such as ``"worker-0"``."""
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
        """True if this process samples and trains."""
        return self.role is DistRole.WORKER

    def is_server(self) -> bool:
        """True if this process samples for others."""
        return self.role is DistRole.SERVER

    def is_client(self) -> bool:
        """True if this process trains with batches that servers sample."""
        return self.role is DistRole.CLIENT

    def __enter__(self) -> DistContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        from pyg_scale.distributed import ranks
        from pyg_scale.distributed.launch import start

        failed = is_failure(error)
        if failed:
            ranks.script_failed()
        start.shutdown(wait=0.0 if failed else None)
