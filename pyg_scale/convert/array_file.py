"""``.npy`` files in pieces, through plain reads and writes.

A mapped file would count as memory of the process, page by page; what is read and written here
lies in the system's cache, which gives way.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from pyg_scale.files.npy import as_array, npy_header, numpy_dtype, read_npy_header
from pyg_scale.files.place import naming

Array = NDArray[Any]


def read_into(handle: int, array: Array, offset: int, file: Path) -> Array:
    """Fill a contiguous array from an open file.

    Raises:
        ValueError: If the file ends before.
    """
    view = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        count = os.preadv(handle, [view[done:]], offset + done)
        if count == 0:
            raise ValueError(
                f"{file} ends at byte {offset + done}, {len(view) - done} bytes too early: it is "
                "truncated; copy it again"
            )
        done += count
    return array


def write_all(handle: int, array: Array, offset: int, file: Path) -> int:
    """Write a contiguous array at a place in an open file; returns where it ends.

    Raises:
        OSError: If the disk is full; names the file.
    """
    view = array.reshape(-1).view(np.uint8).data
    done = 0
    with naming(file):
        while done < len(view):
            done += os.pwrite(handle, view[done : done + (1 << 30)], offset + done)
    return offset + len(view)


def save_array(file: Path, array: Array) -> None:
    """Write a whole array, also of text: ``np.save`` does not say where and why it fails.

    Raises:
        OSError: If the disk is full; names the file.
    """
    array = np.asarray(array, order="C")
    if array.dtype.hasobject:
        raise ValueError(f"{file}: arrays of objects are not written")
    with naming(file), file.open("wb") as out:
        npy.write_array_header_1_0(out, npy.header_data_from_array_1_0(array))
        if array.nbytes:
            out.write(array.reshape(-1).view(np.uint8).data)


def read_header(file: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, whether in Fortran order, dtype and where the data begins.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no ``.npy`` file, holds Python objects, or is too short.
    """
    try:
        with file.open("rb") as opened:
            shape, fortran, dtype = read_npy_header(opened)
            offset, length = opened.tell(), opened.seek(0, 2)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(file)!r}") from None
    except IsADirectoryError:
        raise ValueError(f"{file} is a directory, expected a .npy file") from None
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as .npy: {error}") from None
    if dtype.hasobject:
        raise ValueError(f"{file} holds Python objects; nothing is unpickled: save plain numbers")
    expected = offset + dtype.itemsize * int(np.prod(shape, dtype=object))
    if length < expected:
        raise ValueError(f"{file} has {length} bytes, its header says {expected}: it is truncated")
    return shape, fortran, dtype, offset


class ArrayReader:
    """Rows of a ``.npy`` file.

    Attributes:
        shape: Of the whole.
        dtype: In the machine's byte order.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.shape, self.fortran, self._stored, self.offset = read_header(file)
        self.dtype = self._stored.newbyteorder("=")
        self._handle: int | None = None

    def check_rows(self) -> None:
        """Refuse a file whose rows do not lie one after the other.

        Raises:
            ValueError: If it is a single number, or in Fortran order.
        """
        if not self.shape or (self.fortran and len(self.shape) > 1):
            raise ValueError(
                f"{self.file} must have one row a node or edge, in C order (it has shape "
                f"{list(self.shape)}{', in Fortran order' if self.fortran else ''})"
            )

    def row_bytes(self) -> int:
        return self._stored.itemsize * int(np.prod(self.shape[1:], dtype=object))

    def rows(self, begin: int, end: int) -> Array:
        """Rows ``[begin, end)``, copied.

        Raises:
            ValueError: See :meth:`check_rows`.
        """
        self.check_rows()
        out = np.empty((end - begin, *self.shape[1:]), self._stored)
        return self._read(out, self.offset + begin * self.row_bytes())

    def flat(self, begin: int, end: int) -> Array:
        """Elements ``[begin, end)`` in the order of the file, copied."""
        out = np.empty(end - begin, self._stored)
        return self._read(out, self.offset + begin * self._stored.itemsize)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _read(self, out: Array, offset: int) -> Array:
        if self._handle is None:
            self._handle = os.open(self.file, os.O_RDONLY)
        return read_into(self._handle, out, offset, self.file).astype(self.dtype, copy=False)


class ArrayWriter:
    """A ``.npy`` file of known shape, written in pieces.

    Args:
        file: Its path.
        dtype: As in ``torch.float32``.
        shape: Of the whole.
        fresh: Whether to begin anew; else what is there is gone on with.

    Raises:
        OSError: If the disk is full, before anything is written; names the file.
    """

    def __init__(self, file: Path, dtype: str, shape: tuple[int, ...], *, fresh: bool) -> None:
        stored = numpy_dtype(dtype)
        self.file = file
        self._row = stored.itemsize * int(np.prod(shape[1:], dtype=object))
        file.parent.mkdir(parents=True, exist_ok=True)
        if fresh or not file.exists():
            with naming(file), file.open("wb") as out:
                out.write(npy_header(dtype, shape))
                if size := self._row * shape[0]:
                    out.flush()
                    os.posix_fallocate(out.fileno(), out.tell(), size)
        self.offset = read_header(file)[-1]
        self._handle: int | None = os.open(file, os.O_RDWR)

    def write(self, first: int, rows: Tensor | Array) -> None:
        """Write rows from row ``first`` on; they are of the dtype of the file."""
        array = as_array(rows.contiguous()) if isinstance(rows, Tensor) else rows
        assert self._handle is not None
        place = self.offset + first * self._row
        write_all(self._handle, np.ascontiguousarray(array), place, self.file)

    def sync(self) -> None:
        """Return when everything that was written is on the disk."""
        assert self._handle is not None
        with naming(self.file):
            os.fdatasync(self._handle)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
