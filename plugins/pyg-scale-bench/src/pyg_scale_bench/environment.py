"""The environment of a measurement: versions, hardware, load."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import pyg_scale
from pyg_scale.ops import library
from pyg_scale_bench import memory

_CODE = ("pyg_scale", "csrc", "plugins")

QUIET = 0.05
"""The share of the processors that others may take during a measurement on a quiet machine."""


class Others:
    """The processor time that processes besides this one and its children take, from now on.

    Time that a hypervisor takes counts as others'.
    """

    def __init__(self) -> None:
        self._begun = _processor_seconds()

    def share(self) -> float | None:
        """Their part of all processors' time, from 0 to 1; ``None`` if the system does not say."""
        now = _processor_seconds()
        if now is None or self._begun is None:
            return None
        whole, busy, own = (b - a for a, b in zip(self._begun, now, strict=True))
        return round(min(max(0.0, busy - own) / max(whole, 1e-9), 1.0), 3)


def _processor_seconds() -> tuple[float, float, float] | None:
    """Seconds of all processors, those in which they worked, and those of this process."""
    try:
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except (OSError, IndexError):
        return None
    ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
    whole = sum(ticks)
    own = sum(os.times()[:4]) + _seconds_of_children(Path("/proc/self"))
    return whole, whole - ticks[3] - ticks[4], own  # idle, and waiting for a disk


def _seconds_of_children(process: Path) -> float:
    """Processor seconds of the children that run, and of theirs."""
    total = 0.0
    for task in process.glob("task/*/children"):
        for pid in memory.read(task).split():
            child = Path("/proc") / pid
            fields = memory.read(child / "stat").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            total += _seconds_of_children(child)
    return total


def describe() -> dict[str, Any]:
    """Plain values for the head of a report, taken before the work starts."""
    kernels = library.status()
    if kernels["path"]:
        kernels["path"] = Path(kernels["path"]).name  # reports are published
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "versions": {
            "pyg_scale": pyg_scale.__version__,
            "torch": torch.__version__,
            "torch_geometric": _version("torch_geometric"),
            "numpy": _version("numpy"),
            "python": platform.python_version(),
        },
        "kernels": kernels,
        "cpu": _cpu(),
        "cpus": _cpus(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory.total(),
        "system": platform.platform(),
        "load_average_before": memory.load_average(),
    }


def complete(found: dict[str, Any], others: Others) -> None:
    """Add to the values of :func:`describe` what is known after the work.

    Args:
        found: The values.
        others: What began before the work.
    """
    share = others.share()
    found["load_average_after"] = memory.load_average()
    found["others"], found["quiet"] = share, share is not None and share < QUIET


def lines(found: Mapping[str, Any]) -> list[str]:
    """The values of :func:`describe` as sentences of a report."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    quiet = "quiet" if found["quiet"] else "NOT QUIET: do not quote these numbers"
    return [
        (
            f"machine: {found['cpu']}, {found['cpus']} CPUs, {found['threads']} torch threads, "
            f"{(found['memory_bytes'] or 0) / 2**30:.1f} GiB memory, {found['system']}"
        ),
        _load(found, quiet),
        f"versions: {versions}; commit {found['commit'] or 'unknown'}; {found['date']}",
        f"kernels: {found['kernels']['path'] or found['kernels']['reason']}",
    ]


def _load(found: Mapping[str, Any], quiet: str) -> str:
    before, after = found["load_average_before"], found["load_average_after"]
    others = found.get("others")  # reports of earlier versions have none
    if others is None:
        return f"load average: {before} before ({quiet}), {after} after"
    took = f"other processes took {100 * others:.1f} % of the processors"
    return f"{took} meanwhile ({quiet}); load average: {before} before, {after} after"


def command(name: str, argv: Sequence[str]) -> str:
    """The command of a benchmark, without private folders."""
    words = list(argv)
    for i, word in enumerate(words[:-1]):
        if word == "--dir":
            words[i + 1] = "DIR"
        elif word.endswith("-npz"):
            words[i + 1] = ",".join(Path(each).name for each in words[i + 1].split(","))
    return shlex.join(["pyg-scale", "bench", name, *words])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpus() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of this checkout, marked if files differ from it; ``None`` outside of one."""
    root = Path(pyg_scale.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", *_CODE)
    except (OSError, subprocess.SubprocessError):
        return None
    return head + (" with changes" if changed else "")


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *args], check=True, capture_output=True, text=True, timeout=30
    )
    return done.stdout.strip()
