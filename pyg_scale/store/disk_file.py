"""One ``.npy`` file of rows, read without the page cache if the file system supports that."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.ops.disk_read import TRUNCATED, Read, disk_read

_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass
class _Handle:
    """An open file; after it was replaced, its last user closes it."""

    fd: int
    direct: bool
    users: int = 0


class DiskFile:
    """A file of rows, opened at its first read.

    Args:
        path: Its path in errors.
        opened: Opens it with flags of ``os.open``; this object closes the file descriptor.
        offset: Offset of row 0 in bytes.
        num_rows: Number of rows.
        row_bytes: Size of a row in bytes.
        direct: ``True``: reads bypass the page cache, or raise if they cannot. ``False``: they use
            it. ``None``: they bypass it if the file system supports that.
        threads: Number of threads that read, one read at a time each. ``None``: one thread with up
            to 128 reads by io_uring, if reads bypass the page cache and the kernel allows it; else
            16.
    """

    def __init__(
        self,
        path: Path,
        opened: Callable[[int], int],
        offset: int,
        num_rows: int,
        row_bytes: int,
        direct: bool | None = None,
        threads: int | None = None,
    ) -> None:
        self.path = path
        self.num_rows = num_rows
        self.direct: bool | None = None
        """True if reads bypass the page cache; ``None`` before the first one."""
        self.reads = self.bytes = 0
        self._opened_with = opened
        self._offset = offset
        self._row_bytes = row_bytes
        self._wanted = direct
        self._threads = threads
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._handle: _Handle | None = None
        self.closed = False

    def read(self, rows: Tensor, position: Tensor, out: Tensor) -> None:
        """Write row ``rows[i]`` to ``out[position[i]]``.

        Args:
            rows: ``int64`` ``[n]``, rows that exist.
            position: ``int64`` ``[n]``.
            out: ``uint8`` ``[m, row_bytes]``.

        Raises:
            GraphDirectoryError: If the file is gone, or was truncated; names it and the rows.
            ValueError: If it was closed, or ``direct`` is ``True`` and cannot be done.
        """
        with self._open() as handle:
            done = self._read(handle.fd, rows, position, out)
        if done.error in _REFUSED and handle.direct:  # some file systems refuse only now
            self._without_direct(os.strerror(done.error))
            with self._open() as handle:
                done = self._read(handle.fd, rows, position, out)
        with self._lock:
            self.reads += done.reads
            self.bytes += done.num_bytes
        if done.error:
            why = (
                "it was truncated"
                if done.error == TRUNCATED
                else f"{os.strerror(done.error)} (errno {done.error})"
            )
            raise GraphDirectoryError(
                f"{self.path}: rows {done.first} to {done.last} of {self.num_rows} cannot be read: "
                f"{why}; see `pyg-scale info DIR --verify`"
            )

    def _read(self, fd: int, rows: Tensor, position: Tensor, out: Tensor) -> Read:
        return disk_read(
            fd, self._offset, self.num_rows, rows, position, out, num_threads=self._threads
        )

    @contextlib.contextmanager
    def _open(self) -> Iterator[_Handle]:
        if self._pid != os.getpid():  # a fork may have copied a locked lock
            self._lock, self._pid = threading.Lock(), os.getpid()
            if self._handle is not None:
                self._handle.users = 0
        with self._lock:
            if self.closed:
                raise ValueError(f"{self.path} was closed: make another store")
            if self._handle is None:
                self._handle = self._opened()
                self.direct = self._handle.direct
            handle = self._handle
            handle.users += 1
        try:
            yield handle
        finally:
            with self._lock:
                handle.users -= 1
                if handle is not self._handle and not handle.users:
                    os.close(handle.fd)

    def _opened(self) -> _Handle:
        direct = getattr(os, "O_DIRECT", 0)
        if self._wanted is not False and direct:
            try:
                return _Handle(self._opened_with(direct), True)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise self._cannot_open(error) from None
                self._refuse_if_wanted(error.strerror)
        elif self._wanted:
            self._refuse_if_wanted("this system has no O_DIRECT")
        try:
            return _Handle(self._opened_with(0), False)
        except OSError as error:
            raise self._cannot_open(error) from None

    def _cannot_open(self, error: OSError) -> GraphDirectoryError:
        return GraphDirectoryError(f"{self.path} cannot be opened: {error.strerror}")

    def _without_direct(self, reason: str) -> None:
        self._refuse_if_wanted(reason)
        with self._lock:
            self._wanted = self.direct = False
            if self._handle is not None and self._handle.direct:
                self._let_go()  # others may still be reading, and fail as well

    def _refuse_if_wanted(self, reason: str | None) -> None:
        if self._wanted:
            raise ValueError(
                f"direct=True, but {self.path} cannot be read past the page cache: {reason}; "
                "direct=None allows either"
            )

    def _let_go(self) -> None:
        """Have the next read open the file again."""
        handle, self._handle = self._handle, None
        if handle is not None and not handle.users:
            os.close(handle.fd)

    def close(self) -> None:
        """Close the file after the reads under way; later ones raise."""
        with self._lock:
            self.closed = True
            self._let_go()

    def __del__(self) -> None:
        handle: _Handle | None = getattr(self, "_handle", None)
        if handle is not None:
            os.close(handle.fd)
