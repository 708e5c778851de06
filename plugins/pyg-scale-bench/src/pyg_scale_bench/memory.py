"""Memory of processes as counted by Linux, and its limit by a control group.

Without a limit, a benchmark of data larger than memory would measure the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PROC = Path("/proc/self")
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 5.0
_SAMPLE_SECONDS = 0.01
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def resident() -> int | None:
    """Resident bytes of this process; ``None`` without ``/proc``."""
    return _field(_PROC / "status", "VmRSS")


def reset_peak() -> None:
    """Reset :func:`peak`; does nothing if the system does not support it."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")


def peak() -> int | None:
    """The largest number of resident bytes of this process since :func:`reset_peak`."""
    return _field(_PROC / "status", "VmHWM")


class PeakOfOwn:
    """The largest number of bytes of this process that are not pages of files, while it is open.

    Attributes:
        first: That at the beginning, or ``None`` without ``/proc``.
        most: The largest of many samples.
    """

    def __init__(self) -> None:
        self.first = self.most = _field(_PROC / "status", "RssAnon")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            found = _field(_PROC / "status", "RssAnon")
            if found is not None and self.most is not None:
                self.most = max(self.most, found)

    def __enter__(self) -> PeakOfOwn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def give_back() -> None:
    """Have malloc return freed memory to the system, which would hide later needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """A context in which malloc keeps freed memory, so that a later step finds it mapped.

    glibc returns what is free at the end of its heap to the system. Whether that happens depends on
    where blocks of memory happen to lie, and faulting pages in again may take half of a short step.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if option is None:
        yield
        return
    option(_TRIM_THRESHOLD, (1 << 31) - 1)
    option(_MMAP_THRESHOLD, 1 << 25)  # the largest that it takes
    try:
        yield
    finally:
        option(_TRIM_THRESHOLD, 1 << 17)  # its own numbers
        option(_MMAP_THRESHOLD, 1 << 17)


def children() -> int:
    """Private bytes of child processes, without memory shared with this process."""
    total = 0
    for task in _PROC.glob("task/*/children"):
        for pid in read(task).split():
            for line in read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
                if line.startswith(("Private_Clean", "Private_Dirty")):
                    total += int(line.split()[1]) * 1024
    return total


def total() -> int | None:
    """Size of the memory of the machine in bytes."""
    return _field(Path("/proc/meminfo"), "MemTotal")


def load_average() -> float | None:
    """The average number of runnable processes over the last minute."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def evict(folder: Path) -> None:
    """Drop the files below ``folder`` from the page cache.

    Pages are charged to the group that read them first: those that another process has read or
    written before would not count against the limit.
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
    """A new control group, which is removed by :meth:`close`.

    Args:
        num_bytes: Largest size in memory of its processes and the files that they read.

    Raises:
        OSError: If control groups are missing, or cannot be made (they need root, or a delegated
            group).
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
        """Add this process to the group; called at the start of a child."""
        handle = os.open(self._folder / "cgroup.procs", os.O_WRONLY)
        os.write(handle, str(os.getpid()).encode())
        os.close(handle)

    def peak(self) -> int | None:
        """The largest number of bytes in memory, page cache included."""
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
    for line in read(path).splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def read(path: Path) -> str:
    """The text of a file of ``/proc``; empty if it is not there, as its process has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


@contextlib.contextmanager
def limited(found: dict[str, Any]) -> Iterator[MemoryLimit | None]:
    """A limit of ``found["limit_bytes"]`` for a child, or ``None`` where there can be none.

    ``found`` then says so: ``limited`` is False, and ``why_not`` the reason.
    """
    try:
        group = MemoryLimit(found["limit_bytes"])
    except OSError as error:
        found |= {"limited": False, "why_not": str(error)}
        yield None
        return
    with group:
        yield group
