"""Ranks of one machine on cores of their own, near the memory that they use.

torchrun's ``--numa-binding`` binds by GPU, and needs ``numactl``; this module also binds ranks
without a GPU. Memory follows: Linux places a page on the NUMA node of the thread that first touches
it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from pyg_scale.distributed.launch.cpu_topology import (
    PCI,
    SYSTEM,
    Core,
    CpuTopology,
    allowed_cpus,
    format_cpus,
    gpu_node,
    read_topology,
)

MODES = ("exclusive", "node", "socket")


@dataclass(frozen=True)
class Binding:
    """The cores on which a rank runs.

    Attributes:
        cpus: The logical CPUs that its threads may use.
        num_cores: Number of their physical cores.
        nodes: The NUMA nodes of these cores.
    """

    cpus: frozenset[int]
    num_cores: int
    nodes: tuple[int, ...]

    def __str__(self) -> str:
        return f"CPUs {format_cpus(self.cpus)} of NUMA node {format_cpus(self.nodes)}"


def plan_binding(
    topology: CpuTopology,
    local_world_size: int,
    mode: str = "exclusive",
    gpu_nodes: Sequence[int | None] | None = None,
) -> list[Binding]:
    """Divide the cores of a machine among its ranks.

    Args:
        topology: The cores that may be used.
        local_world_size: Number of ranks of the machine.
        mode: ``"exclusive"``: each rank has cores of its own, about as many as the others: of one
            NUMA node if there are no more nodes than ranks, else whole nodes. ``"node"``: the rank
            may use all cores of its node; ``"socket"``: of its socket. Other ranks may, too.
        gpu_nodes: The NUMA node of each rank's GPU; the rank is placed on it.

    Returns:
        One binding for each local rank. ``"exclusive"`` leaves out no core unless GPUs leave a node
        without ranks.

    Raises:
        ValueError: If the mode is unknown, or there are more ranks than cores with ``"exclusive"``.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)} (got {mode!r})")
    if local_world_size < 1:
        raise ValueError(f"local_world_size must be 1 or more (got {local_world_size})")
    groups = topology.groups("socket" if mode == "socket" else "node")
    if mode == "exclusive" and local_world_size > len(topology.cores):
        raise ValueError(
            f"{local_world_size} ranks cannot each have a core: the {len(groups)} NUMA "
            f"nodes of this machine have {len(topology.cores)} usable cores; start "
            f"{len(topology.cores)} ranks or fewer, or use mode 'node'"
        )
    places = _of_gpus(groups, local_world_size, gpu_nodes, mode)
    if places is None:
        places = _spread(groups, local_world_size)
    found: list[Binding] = []
    for rank, place in enumerate(places):
        cores = [core for group in place for core in groups[group]]
        if mode == "exclusive":
            mates = [other for other, each in enumerate(places) if each == place]
            if len(cores) < len(mates):
                raise ValueError(
                    f"the GPUs of {len(mates)} ranks are on a NUMA node with {len(cores)} cores "
                    "that may be used; use mode 'node'"
                )
            cores = _share(cores, len(mates), mates.index(rank))
        found.append(_binding(cores))
    return found


def _spread(groups: list[list[Core]], ranks: int) -> list[tuple[int, ...]]:
    """The groups of each rank: several, or one shared with others, in proportion to their cores."""
    count = len(groups)
    if ranks < count:
        ends = [count * (rank + 1) // ranks for rank in range(ranks)]
        return [tuple(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)]
    total = sum(len(group) for group in groups)
    # the next rank goes to the group with the most cores per rank, so that no rank gets none
    seats = [0] * count
    for _ in range(ranks):
        best = max(range(count), key=lambda g: (len(groups[g]) / (seats[g] + 1), -g))
        seats[best] += 1
    assert sum(seats) == ranks and total > 0
    return [(group,) for group, number in enumerate(seats) for _ in range(number)]


def _of_gpus(
    groups: list[list[Core]], ranks: int, gpu_nodes: Sequence[int | None] | None, mode: str
) -> list[tuple[int, ...]] | None:
    if gpu_nodes is None or any(node is None for node in gpu_nodes):
        return None
    if len(gpu_nodes) != ranks:
        raise ValueError(f"gpu_nodes must have one entry per rank ({ranks}; got {len(gpu_nodes)})")
    where = {core.node: place for place, group in enumerate(groups) for core in group}
    if any(node not in where for node in gpu_nodes):
        return None  # the GPU is near cores that this process may not use
    return [(where[node],) for node in gpu_nodes if node is not None]


def _share(cores: list[Core], parts: int, index: int) -> list[Core]:
    sizes = [len(cores) // parts + (part < len(cores) % parts) for part in range(parts)]
    start = [0, *accumulate(sizes)][index]
    return cores[start : start + sizes[index]]


def _binding(cores: list[Core]) -> Binding:
    cpus = frozenset().union(*(core.cpus for core in cores))
    return Binding(cpus, len(cores), tuple(sorted({core.node for core in cores})))


def bind(
    local_rank: int,
    local_world_size: int,
    mode: str = "exclusive",
    *,
    device: torch.device | None = None,
    system: Path = SYSTEM,
    pci: Path = PCI,
) -> Binding:
    """Bind all threads of this process, and those that they start later.

    Args:
        local_rank: Local rank of this process.
        local_world_size: Number of ranks of this machine; all share the same CPUs.
        mode: See :func:`plan_binding`.
        device: If a GPU, the rank is placed on its NUMA node.
        system: Replaces ``/sys/devices/system``.
        pci: Replaces ``/sys/bus/pci/devices``.

    Returns:
        The binding.

    Raises:
        ValueError: See :func:`plan_binding`.
        NotImplementedError: If the system cannot bind threads.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise NotImplementedError("this system cannot bind threads to CPUs: leave out bind")
    if not 0 <= local_rank < local_world_size:
        raise ValueError(f"local_rank must be from 0 to {local_world_size - 1} (got {local_rank})")
    before = allowed_cpus()
    nodes = _gpu_nodes(local_world_size, device, pci)
    plan = plan_binding(read_topology(before, system), local_world_size, mode, nodes)
    chosen = plan[local_rank]
    os.sched_setaffinity(0, chosen.cpus)
    for name in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []:
        with contextlib.suppress(OSError):  # the thread has ended
            if os.sched_getaffinity(int(name)) == before:  # else it was bound on purpose
                os.sched_setaffinity(int(name), chosen.cpus)
    return chosen


def _gpu_nodes(ranks: int, device: torch.device | None, pci: Path) -> list[int | None] | None:
    """The nodes of the GPUs of all ranks, if each rank has the GPU of its local rank."""
    if device is None or device.type != "cuda" or torch.cuda.device_count() < ranks:
        return None
    found = []
    for index in range(ranks):
        told = torch.cuda.get_device_properties(index)
        domain, bus, slot = (
            getattr(told, f"pci_{name}_id", None) for name in ("domain", "bus", "device")
        )
        if domain is None or bus is None or slot is None:
            return None
        found.append(gpu_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0", pci))
    return found
