"""Memory of processes as Linux counts it, and a limit on it: a control group.

Without a limit, a benchmark of what does not fit into memory measures the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import uuid
from pathlib import Path

_PROC = Path("/proc/self")
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 5.0


def resident() -> int | None:
    """Bytes of this process that are in memory now; ``None`` where there is no ``/proc``."""
    return _field(_PROC / "status", "VmRSS")


def reset_peak() -> None:
    """Let :func:`peak` start anew; a no-op where the system cannot."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")


def peak() -> int | None:
    """The most bytes of this process that were in memory since :func:`reset_peak`."""
    return _field(_PROC / "status", "VmHWM")


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
    return _field(Path("/proc/meminfo"), "MemTotal")


def load_average() -> float | None:
    """Processes that wanted to run, averaged over the last minute."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def evict(folder: Path) -> None:
    """Drop what the page cache has of the files below ``folder``.

    Pages are charged to the group that read them first: what another process has read or written
    before would be in memory beside the limit.
    """
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


class MemoryLimit:
    """A control group of its own, removed when this is closed.

    Args:
        num_bytes: The most that its processes and what they read from files may have in memory.

    Raises:
        OSError: If control groups are missing, or may not be made (they need root, or a delegated
            group); says so.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        v1 = (_V1 / "memory.limit_in_bytes").exists()
        root = _V1 if v1 else _V2
        self._folder = root / f"pyg_scale-{uuid.uuid4().hex[:12]}"
        self._peak = "memory.max_usage_in_bytes" if v1 else "memory.peak"
        limit = "memory.limit_in_bytes" if v1 else "memory.max"
        try:
            if not v1 and "memory" not in (_V2 / "cgroup.subtree_control").read_text().split():
                (_V2 / "cgroup.subtree_control").write_text("+memory")
            self._folder.mkdir()
            (self._folder / limit).write_text(str(num_bytes))
            if not v1:
                with contextlib.suppress(OSError):
                    (self._folder / "memory.swap.max").write_text("0")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            raise OSError(
                f"memory cannot be limited here ({error}): control groups need root or delegation"
            ) from None

    def enter(self) -> None:
        """Let this process be the first of the group; for the start of a child."""
        handle = os.open(self._folder / "cgroup.procs", os.O_WRONLY)
        os.write(handle, str(os.getpid()).encode())
        os.close(handle)

    def peak(self) -> int | None:
        """The most bytes that were in memory, page cache included."""
        try:
            return int((self._folder / self._peak).read_text())
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Remove the group."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        while self._folder.exists():
            try:
                self._folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def __enter__(self) -> MemoryLimit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _field(path: Path, field: str) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
