"""Parts of files as mapped arrays, without an open file descriptor.

Python's own ``mmap`` (and so ``numpy.memmap``) keeps a file descriptor open, and a directory of
many parts has more files than a process may have open. It also reserves memory for a copy of the
whole mapping, which the system refuses for a file larger than memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10
_NORESERVE = 0x4000 if platform.machine() in ("x86_64", "aarch64", "arm64", "riscv64") else 0


class FileView:
    """A mapping from which ``numpy.asarray`` makes an array; it lives as long as the array.

    Args:
        file: A file descriptor; may be closed afterwards.
        offset: Offset of the array in the file, in bytes.
        dtype: Its dtype.
        shape: Its shape, without a zero. The file must be long enough: reading beyond its end kills
            the process.

        shared: Write changes of the array to the file.

    Raises:
        OSError: If the system refuses.
    """

    def __init__(
        self,
        file: int,
        offset: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        *,
        shared: bool = False,
    ) -> None:
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        self._length = offset - start + size
        self._address: int | None = None
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _NORESERVE
        self._address = _mapped(None, self._length, flags, file, start)
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,
            "shape": shape,
            "data": (self._address + offset - start, False),
        }

    def __del__(self, _munmap: Any = _munmap) -> None:
        if getattr(self, "_address", None) is not None:
            _munmap(self._address, self._length)
            self._address = None


class Piece(NamedTuple):
    """A range of bytes of a file."""

    file: int
    """A file descriptor."""
    offset: int
    size: int


class JoinedView:
    """One array whose bytes lie in several files, mapped copy-on-write one after the other.

    Whole pages are mapped where a file has them as the array needs them: where the offset in the
    file and the place in the array are the same number of bytes beyond a page. All else is read
    into memory, which is a page where two pieces meet.

    Args:
        pieces: The ranges, in the order of the array. Files may be closed afterwards, and must be
            long enough.
        dtype: The dtype of the array.
        shape: Its shape, without a zero.

    Raises:
        OSError: If the system refuses, or a file is too short for what is read of it.
    """

    def __init__(
        self, pieces: Sequence[Piece], dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self._address: int | None = None
        self._length = _whole_pages(sum(piece.size for piece in pieces))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._address = _mapped(None, self._length, flags, -1, 0)
        at = 0
        for piece in pieces:
            self._place(piece, at)
            at += piece.size
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,
            "shape": shape,
            "data": (self._address, False),
        }

    def _place(self, piece: Piece, at: int) -> None:
        page, end = mmap.ALLOCATIONGRANULARITY, at + piece.size
        first, last = _whole_pages(at), end - end % page
        if (at - piece.offset) % page or last <= first:
            self._read(piece, at, end, at)
            return
        self._read(piece, at, first, at)
        assert self._address is not None
        flags = mmap.MAP_PRIVATE | _NORESERVE | _FIXED
        offset = piece.offset + first - at
        _mapped(self._address + first, last - first, flags, piece.file, offset)
        self._read(piece, last, end, at)

    def _read(self, piece: Piece, begin: int, end: int, at: int) -> None:
        """Read the bytes ``[begin, end)`` of the array, of which ``piece`` begins at ``at``."""
        if begin == end:
            return
        assert self._address is not None
        memory = memoryview((ctypes.c_char * (end - begin)).from_address(self._address + begin))
        view, offset = memory.cast("B"), piece.offset + begin - at
        while view.nbytes:
            count = os.preadv(piece.file, [view], offset)
            if not count:
                raise OSError("it is shorter than it was when it was opened")
            view, offset = view[count:], offset + count

    def __del__(self, _munmap: Any = _munmap) -> None:
        if getattr(self, "_address", None) is not None:
            _munmap(self._address, self._length)
            self._address = None


def _whole_pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _mapped(address: int | None, length: int, flags: int, file: int, offset: int) -> int:
    found = _mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
