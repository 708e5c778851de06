"""Resident memory of this process and of its worker processes, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_PROC = Path("/proc/self")


def resident() -> int | None:
    """Bytes of this process that are in memory now; ``None`` where there is no ``/proc``."""
    return _status("VmRSS")


def reset_peak() -> None:
    """Let :func:`peak` start anew; a no-op where the system cannot."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")


def peak() -> int | None:
    """The most bytes of this process that were in memory since :func:`reset_peak`."""
    return _status("VmHWM")


def give_back() -> None:
    """Let malloc return what it keeps of freed memory, which would hide what is needed next."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def children() -> int:
    """Bytes that child processes hold for themselves alone, so not what they share with us."""
    total = 0
    for task in _PROC.glob("task/*/children"):
        for pid in _read(task).split():
            for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
                if line.startswith(("Private_Clean", "Private_Dirty")):
                    total += int(line.split()[1]) * 1024
    return total


def total() -> int | None:
    """Bytes of memory of the machine."""
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal"):
            return int(line.split()[1]) * 1024
    return None


def load_average() -> float | None:
    """Processes that wanted to run, averaged over the last minute."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _status(field: str) -> int | None:
    for line in _read(_PROC / "status").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
