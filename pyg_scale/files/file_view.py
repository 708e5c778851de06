"""A part of a file as a mapped array, without an open file descriptor.

Python's own ``mmap`` (and so ``numpy.memmap``) keeps a file descriptor open, and a directory of
many parts has more files than a process may have open. It also reserves memory for a copy of the
whole mapping, which the system refuses for a file larger than memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from typing import Any

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
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _NORESERVE
        address = _mmap(None, self._length, protection, flags, file, start)
        if address is None or address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address = address
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,
            "shape": shape,
            "data": (address + offset - start, False),
        }

    def __del__(self, _munmap: Any = _munmap) -> None:
        if getattr(self, "_address", None) is not None:
            _munmap(self._address, self._length)
            self._address = None
