"""Arrays in ``.npy`` files and ``.npz`` archives, read sequentially in pieces."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyg_scale.files.npy import read_npy_header

Items = NDArray[Any]
_DAMAGED = (EOFError, OSError, ValueError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Array:
    """An array in a file.

    Attributes:
        file: A ``.npy`` file or an ``.npz`` archive.
        shape: Its shape, with rows first.
        dtype: The dtype in the machine's byte order.
        stored: The dtype in the file.
        offset: Position of its items, if they are uncompressed in the file; else ``None``.
        member: Its name in the archive.
        by_columns: True if the file has the first column first (an edge index ``[2, n]`` is given
            as ``[n, 2]`` by columns).
    """

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    offset: int | None
    member: str | None = None
    by_columns: bool = False

    @property
    def row_items(self) -> int:
        """Number of items of a row."""
        return int(np.prod(self.shape[1:], dtype=object))

    def rows(self, begin: int, rows: int) -> Iterator[Items]:
        """Rows from ``begin`` on, in chunks of at most ``rows``.

        Raises:
            ValueError: If the file ends too early or is damaged; names it.
        """
        count, width = self.shape[0], self.row_items
        if not self.by_columns or width == 1:
            for chunk in self._items(begin * width, count * width, rows * width):
                yield chunk.reshape(-1, *self.shape[1:])
            return
        columns = [
            self._items(column * count + begin, (column + 1) * count, rows)
            for column in range(width)
        ]
        for parts in zip(*columns, strict=True):
            yield np.stack(parts, axis=1)

    def _items(self, begin: int, end: int, step: int) -> Iterator[Items]:
        step = max(1, step)
        size = self.stored.itemsize
        with self._open() as opened:
            opened.seek((self.offset or 0) + begin * size)
            if self.offset is None:  # the header comes first in what is unpacked
                _header(opened, self.file)
                _skip(opened, begin * size, self.file)
            for first in range(begin, end, step):
                chunk = np.empty(min(step, end - first), self.stored)
                _fill(opened, memoryview(chunk.view(np.uint8)), self.file)
                yield chunk.astype(self.dtype, copy=False)

    def _open(self) -> Any:
        return self.file.open("rb") if self.offset is not None else _Member(self.file, self.member)


class _Member:
    """A member of an archive, which is closed with it."""

    def __init__(self, file: Path, member: str | None) -> None:
        self._archive = _archive(file)
        self._opened = self._archive.open(f"{member}.npy")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        self._archive.close()

    def seek(self, offset: int) -> None:
        """Do nothing: only uncompressed items can be read from the middle."""

    def read(self, size: int) -> bytes:
        return self._opened.read(size)

    def readinto(self, out: memoryview) -> int:
        return self._opened.readinto(out)


def transposed(array: Array) -> Array:
    """A matrix ``[2, n]`` as ``[n, 2]``, without touching the file."""
    return replace(array, shape=array.shape[::-1], by_columns=not array.by_columns)


def npy_array(file: Path) -> Array:
    """The array in a ``.npy`` file.

    Raises:
        ValueError: If it is not an ``.npy`` file.
    """
    with file.open("rb") as opened:
        shape, by_columns, stored = _header(opened, file)
        offset = opened.tell()
    return Array(file, shape, stored.newbyteorder("="), stored, offset, None, by_columns)


def npz_arrays(file: Path) -> dict[str, Array]:
    """The arrays of an ``.npz`` archive, by name.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not an archive of arrays, or an array has Python objects.
    """
    out = {}
    with _archive(file) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            with archive.open(info) as member:
                shape, by_columns, stored = _header(member, file)
                header = member.tell()
            offset = None
            if info.compress_type == zipfile.ZIP_STORED:
                offset = _data_offset(file, info) + header
            dtype = stored.newbyteorder("=")
            out[name] = Array(file, shape, dtype, stored, offset, name, by_columns)
    return out


def _archive(file: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(file)!r}") from None
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{file} is no .npz archive, or is truncated: {error}") from None


def _data_offset(file: Path, info: zipfile.ZipInfo) -> int:
    """The offset of a member: after its local header, whose length the directory lacks."""
    with file.open("rb") as opened:
        opened.seek(info.header_offset)
        local = opened.read(30)
    lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    return info.header_offset + 30 + lengths


def _header(opened: Any, file: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        shape, by_columns, dtype = read_npy_header(opened)
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as an array of NumPy: {error}") from None
    if dtype.hasobject:
        raise ValueError(f"{file} holds Python objects: nothing is unpickled")
    if by_columns and len(shape) > 2:
        raise ValueError(f"{file} holds an array in Fortran order: save np.ascontiguousarray of it")
    return tuple(shape), bool(by_columns), dtype


def _fill(opened: Any, out: memoryview, file: Path) -> None:
    done = 0
    while done < len(out):
        try:
            count = opened.readinto(out[done:])
        except _DAMAGED as error:
            raise ValueError(f"{file} is damaged: {error}") from None
        if not count:
            raise ValueError(f"{file} is truncated: copy or download it again")
        done += count


def _skip(opened: Any, size: int, file: Path) -> None:
    """Skip bytes by reading them."""
    rest = memoryview(bytearray(min(size, 1 << 20)))
    while size:
        part = rest[: min(size, len(rest))]
        _fill(opened, part, file)
        size -= len(part)
