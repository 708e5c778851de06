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

QUIET = 0.5
"""The load average below which a machine counts as quiet."""


def describe() -> dict[str, Any]:
    """Plain values for the head of a report, taken before the work starts."""
    load = memory.load_average()
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
        "load_average_before": load,
        "quiet": load is not None and load < QUIET,
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """The values of :func:`describe` as sentences of a report."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    quiet = "quiet" if found["quiet"] else "NOT QUIET: do not quote these numbers"
    return [
        (
            f"machine: {found['cpu']}, {found['cpus']} CPUs, {found['threads']} torch threads, "
            f"{(found['memory_bytes'] or 0) / 2**30:.1f} GiB memory, {found['system']}"
        ),
        (
            f"load average: {found['load_average_before']} before ({quiet}), "
            f"{found['load_average_after']} after"
        ),
        f"versions: {versions}; commit {found['commit'] or 'unknown'}; {found['date']}",
        f"kernels: {found['kernels']['path'] or found['kernels']['reason']}",
    ]


def command(name: str, argv: Sequence[str]) -> str:
    """The command of a benchmark, without private folders."""
    words = list(argv)
    for i, word in enumerate(words[:-1]):
        if word == "--dir":
            words[i + 1] = "DIR"
        elif word.endswith("-npz"):
            words[i + 1] = Path(words[i + 1]).name
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
