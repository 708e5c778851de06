"""Puts files and directories in their place in one step, or not at all; locks them meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pyg_scale.errors import GraphDirectoryError

_LOOK_AGAIN = 0.01  # seconds between two attempts at a lock
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def try_lock(handle: int, file: Path, *, shared: bool = False) -> bool:
    """Lock an open file, unless it is already locked.

    Args:
        handle: The file descriptor.
        file: Its path in errors.
        shared: Allow other shared locks at the same time.

    Returns:
        True if this call locked it.

    Raises:
        OSError: If the file system does not support locks.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        why = (
            f"its file system cannot lock files ({os.strerror(error.errno or 0)}), so that two "
            "writers could not be told apart: write to a file system with locks (a local disk, "
            "NFS with its lock service, Lustre mounted with `flock`)"
        )
        raise OSError(error.errno, why, str(file)) from None
    return True


class Lock:
    """Lets only one process write to a path. The system releases it when the process dies.

    Args:
        path: The path to write.
        timeout: Seconds to wait for another process that writes it.

    Raises:
        GraphDirectoryError: If another process writes it; names that.
        OSError: If no file can be created next to it, or the file system does not support locks.
    """

    def __init__(self, path: Path, timeout: float = 0.0) -> None:
        self._file = path.with_name(f".{path.name}.lock")
        until = time.monotonic() + timeout
        while True:
            self._handle = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                locked = try_lock(self._handle, self._file)
            except OSError:
                os.close(self._handle)
                self._file.unlink(missing_ok=True)
                raise
            if not locked:
                holder = os.pread(self._handle, 100, 0).decode("ascii", "replace")
                os.close(self._handle)
                if time.monotonic() < until:
                    time.sleep(_LOOK_AGAIN)
                    continue
                waited = f", and was not ready within {timeout:g} seconds" if timeout else ""
                who = f" ({holder})" if holder else ""
                raise GraphDirectoryError(f"another process is writing {path}{who}{waited}")
            if self._is_current():
                name = f"process {os.getpid()} on {socket.gethostname()}"
                with contextlib.suppress(OSError):  # the disk may be full; it is for others to read
                    os.ftruncate(self._handle, 0)
                    os.pwrite(self._handle, name.encode("ascii", "replace"), 0)
                return
            os.close(self._handle)  # its last owner removed it; a new one may exist

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._handle), os.stat(self._file))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let others write."""
        self._file.unlink(missing_ok=True)
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        os.close(self._handle)


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Name the file in errors of the system in this context, such as a write to a full disk.

    Raises:
        OSError: The same error, with the file.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(file)) from None


def take_place(new: Path, old: Path) -> None:
    """Rename ``new`` to ``old``; an existing directory is exchanged with it in one step.

    If the system cannot exchange two directories, the old one is moved away for a moment;
    :func:`restore` moves it back.

    Raises:
        OSError: If the system refuses.
    """
    if not old.exists() or not any(old.iterdir()):
        new.replace(old)
        return
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        paths = os.fsencode(new), os.fsencode(old)
        if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(old))
    before = _before(old)
    shutil.rmtree(before, ignore_errors=True)
    old.rename(before)
    new.rename(old)
    shutil.rmtree(before, ignore_errors=True)


def restore(path: Path) -> None:
    """Move back a directory that a writer had moved away before it died.

    Raises:
        OSError: If the system refuses.
    """
    before = _before(path)
    if not before.exists():
        return
    if path.exists():
        shutil.rmtree(before)
    else:
        before.rename(path)


def flush(file: IO[Any]) -> None:
    """Put everything that was written to an open file on the disk.

    Raises:
        OSError: If the disk is full or fails.
    """
    file.flush()
    os.fsync(file.fileno())


def replace_file(path: Path, content: str, *, durable: bool = True) -> None:
    """Write a file that always has either its old content or all of the new one.

    Args:
        path: The file. Only one process may write it at a time.
        content: The text.
        durable: If True, the file survives a failure of the system as well.

    Raises:
        OSError: If the disk is full or fails; names the file.
    """
    staged = path.with_name(f".{path.name}.partial")
    with naming(staged), staged.open("w", encoding="utf-8") as out:
        out.write(content)
        if durable:
            flush(out)
    # Readers tell a new file by its time. Those of file systems are accurate to a few ms only, and
    # inode numbers are used again at once.
    now = time.time_ns()
    os.utime(staged, ns=(now, now))
    staged.replace(path)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk.

    Raises:
        OSError: If the disk fails.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _before(path: Path) -> Path:
    return path.with_name(f".{path.name}.before")
