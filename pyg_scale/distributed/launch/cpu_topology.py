"""Cores, NUMA nodes and sockets of a machine, as Linux lists them in ``/sys``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
CGROUP = Path("/sys/fs/cgroup")
PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Core:
    """A physical core.

    Attributes:
        cpus: Its logical CPUs (hardware threads) that may be used.
        node: Its NUMA node.
        socket: Its package.
    """

    cpus: frozenset[int]
    node: int
    socket: int


@dataclass(frozen=True)
class CpuTopology:
    """The cores that a process may use, ordered so that neighbours are close to each other.

    Attributes:
        cores: The cores, ordered by socket, NUMA node and lowest CPU.
    """

    cores: tuple[Core, ...]

    @property
    def cpus(self) -> frozenset[int]:
        """All logical CPUs."""
        return frozenset().union(*(core.cpus for core in self.cores))

    def groups(self, of: str) -> list[list[Core]]:
        """The cores grouped by ``"node"`` or ``"socket"``, in order."""
        found: dict[int, list[Core]] = {}
        for core in self.cores:
            found.setdefault(core.node if of == "node" else core.socket, []).append(core)
        return list(found.values())


def read_topology(allowed: Iterable[int], root: Path = SYSTEM) -> CpuTopology:
    """Read the topology of this machine.

    Args:
        allowed: The logical CPUs that may be used.
        root: Replaces ``/sys/devices/system``.

    Returns:
        The topology. If the system does not provide it, every CPU is a core, and all are of one
        node and socket.

    Raises:
        ValueError: If no CPU is allowed, or a file there is not a list of CPUs.
    """
    usable = frozenset(allowed)
    if not usable:
        raise ValueError("this process is not allowed to use any CPU")
    nodes = {}
    for folder in sorted((root / "node").glob("node[0-9]*")):
        for cpu in _cpus(folder / "cpulist"):
            nodes[cpu] = int(folder.name.removeprefix("node"))
    cores: dict[frozenset[int], Core] = {}
    for cpu in sorted(usable):
        told = root / "cpu" / f"cpu{cpu}" / "topology"
        siblings = _cpus(told / "core_cpus_list") or _cpus(told / "thread_siblings_list") or {cpu}
        mine = frozenset(siblings | {cpu}) & usable
        cores.setdefault(mine, Core(mine, nodes.get(cpu, 0), _number(told / "physical_package_id")))
    ordered = sorted(cores.values(), key=lambda core: (core.socket, core.node, min(core.cpus)))
    return CpuTopology(tuple(ordered))


def gpu_node(pci_address: str, root: Path = PCI) -> int | None:
    """The NUMA node of a PCI device such as ``"0000:dc:00.0"``; ``None`` if it has none."""
    node = _number(root / pci_address / "numa_node", -1)
    return node if node >= 0 else None


def cpu_quota(root: Path = CGROUP) -> float | None:
    """Number of CPUs that the control group of a container grants (``cpu.max``), or ``None``."""
    try:
        quota, _, period = (root / "cpu.max").read_text(encoding="ascii").strip().partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def parse_cpus(text: str) -> set[int]:
    """The CPUs of a list such as ``0-3,8``.

    Raises:
        ValueError: If it is not such a list.
    """
    found: set[int] = set()
    for item in text.strip().split(","):
        if not item:
            continue
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if match is None:
            raise ValueError(f"{text.strip()!r} is not a list of CPUs such as 0-3,8")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def format_cpus(cpus: Iterable[int]) -> str:
    """A list such as ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _cpus(path: Path) -> set[int]:
    try:
        return parse_cpus(path.read_text(encoding="ascii"))
    except OSError:
        return set()


def _number(path: Path, otherwise: int = 0) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return otherwise


def allowed_cpus() -> frozenset[int]:
    """The logical CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
