"""A directory that exists as long as a process uses it, for memory shared by name.

Every process that uses it holds a shared lock on ``NAME.lock`` next to it, which the kernel drops
when the process ends, however it ends. The last process to release it removes the directory. If
that process was killed, the directory is removed when the next one on the machine starts
(:func:`reap`).
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import secrets
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pyg_scale.files.place import try_lock

_WAIT_SECONDS = 60.0


def memory_root() -> Path:
    """The directory of named memory: ``/dev/shm``, or that of temporary files without it."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class Segment:
    """A directory that exists as long as some process has it open.

    Args:
        name: Its name in all processes; ``None`` for a random one.
        root: The directory that contains it.

    Raises:
        PermissionError: If a directory of another user has the name.
        TimeoutError: If a process takes more than a minute to remove it.
    """

    def __init__(self, name: str | None, root: Path) -> None:
        root = Path(root)
        if not root.is_dir():
            raise NotADirectoryError(f"{root} is not a directory: pass root= for shared memory")
        reap(root)
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}" if name is None else name
        self.root = root
        base = root / f"{_prefix()}{quote(self.name, safe='')}"
        self.path, lock = base, base.with_name(base.name + ".lock")
        handle = _hold(lock)
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            if self.path.stat().st_uid != os.getuid():
                raise PermissionError(f"{self.path} belongs to another user: choose another name")
        except BaseException:
            os.close(handle)
            raise
        self._release = _Release(handle, self.path, lock)
        self._finalizer = weakref.finalize(self, self._release)
        # Children of multiprocessing end without atexit, so they get a finalizer of their own.
        _at_end(self._release)
        multiprocessing.util.register_after_fork(self, lambda segment: _at_end(segment._release))

    def close(self) -> None:
        """Release it; the last process to do so removes it. Mapped files stay mapped."""
        self._finalizer()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.name, str(self.root), str(self.path))


def _attach(name: str, root: str, path: str) -> Segment:
    if not Path(path).is_dir():
        raise FileNotFoundError(
            f"{path} is gone: the store was closed, or it was pickled on another machine"
        )
    return Segment(name, Path(root))


class _Release:
    """Drops the lock once per process, and removes the directory if no other process has one."""

    def __init__(self, handle: int, path: Path, lock: Path) -> None:
        self._handle: int | None = handle
        self._path, self._lock = path, lock

    def __call__(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        os.close(handle)
        _remove_unless_used(self._path, self._lock)


def _at_end(release: _Release) -> None:
    multiprocessing.util.Finalize(None, release, exitpriority=1)


def reap(root: Path) -> list[Path]:
    """Remove and return directories in ``root`` that killed processes of this user left."""
    removed = []
    for lock in root.glob(f"{_prefix()}*.lock"):
        path = lock.with_name(lock.name.removesuffix(".lock"))
        if _remove_unless_used(path, lock):
            removed.append(path)
    return removed


def _prefix() -> str:
    return f"pyg_scale-{os.getuid()}-"


def _hold(lock: Path) -> int:
    """Take a shared lock on the file that is at ``lock`` now."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(handle, lock, shared=True) and _is_at(handle, lock):
                return handle
        except OSError:
            os.close(handle)
            raise
        os.close(handle)  # it is being removed, or was removed since it was opened
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process removes {lock} for {_WAIT_SECONDS:.0f} s")
        time.sleep(0.002)


def _remove_unless_used(path: Path, lock: Path) -> bool:
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not try_lock(handle, lock) or not _is_at(handle, lock):
            return False  # another process has it open
        shutil.rmtree(path, ignore_errors=True)
        lock.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _is_at(handle: int, file: Path) -> bool:
    with contextlib.suppress(OSError):
        here, there = os.fstat(handle), os.stat(file)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
    return False
