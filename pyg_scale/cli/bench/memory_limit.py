"""A limit on the memory of a child process, page cache included: a control group.

Without it, a benchmark of what does not fit into memory measures the page cache.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 5.0


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

    def run(self, command: Sequence[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """``subprocess.run`` under the limit; a process that needs more is killed."""
        return subprocess.run(command, preexec_fn=self._enter, text=True, check=False, **kwargs)

    def start(self, command: Sequence[str], **kwargs: Any) -> subprocess.Popen[str]:
        """``subprocess.Popen`` under the limit; close the group after the process has ended."""
        return subprocess.Popen(command, preexec_fn=self._enter, text=True, **kwargs)

    def _enter(self) -> None:
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
