"""Arrays in an ``.npz`` archive, read in pieces."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from pyg_scale.convert.array_file import Array
from pyg_scale.files.npy import read_npy_header

_SKIP = 1 << 20


class Stream:
    """The elements of a member, one after the other."""

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any], name: str) -> None:
        self._file, self._dtype, self._name = file, dtype, name

    def take(self, count: int) -> Array:
        """The next elements.

        Raises:
            ValueError: If there are fewer, or the archive is damaged.
        """
        wanted = count * self._dtype.itemsize
        out = bytearray()
        while len(out) < wanted:
            try:
                data = self._file.read(wanted - len(out))
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                raise ValueError(f"{self._name} is damaged: {error}") from None
            if not data:
                raise ValueError(f"{self._name} is truncated: copy it again")
            out += data
        return np.frombuffer(out, self._dtype).astype(self._dtype.newbyteorder("="), copy=False)

    def skip(self, count: int) -> None:
        """Leave elements out."""
        step = max(1, _SKIP // self._dtype.itemsize)
        while count:
            self.take(min(step, count))
            count -= min(step, count)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Member:
    """An array in an archive.

    Attributes:
        name: What errors call it.
        shape: Its shape.
        dtype: Its dtype, in the machine's byte order.
    """

    def __init__(self, path: Path, info: zipfile.ZipInfo) -> None:
        self._path, self._info = path, info
        self.name = f"{info.filename.removesuffix('.npy')!r} in {path}"
        with self._open() as file:
            self.shape, self._fortran, self._stored = self._header(file)
        self.dtype = self._stored.newbyteorder("=")
        if self.dtype.hasobject:
            raise ValueError(f"{self.name} holds Python objects; nothing is unpickled")
        if self._fortran and len(self.shape) > 2:
            raise ValueError(f"{self.name} is in Fortran order: save it in C order")

    def open(self, begin: int) -> Stream:
        """Its elements in the order of the file, from one on."""
        file = self._open()
        self._header(file)
        stream = Stream(file, self._stored, self.name)
        if self._info.compress_type == zipfile.ZIP_STORED:
            file.seek(begin * self._stored.itemsize, 1)
        else:
            stream.skip(begin)
        return stream

    def rows(self, begin: int, rows: int) -> Iterator[Array]:
        """Rows from one on, at most so many at a time.

        Raises:
            ValueError: If it has no rows, or is in Fortran order.
        """
        if not self.shape or (self._fortran and len(self.shape) > 1):
            raise ValueError(f"{self.name} must have rows, in C order (shape {list(self.shape)})")
        width = int(np.prod(self.shape[1:], dtype=object))
        with self.open(begin * width) as stream:
            for first in range(begin, self.shape[0], rows):
                count = min(rows, self.shape[0] - first)
                yield stream.take(count * width).reshape(count, *self.shape[1:])

    def columns(self, begin: int, rows: int) -> Iterator[tuple[Array, Array]]:
        """The two rows of an array ``[2, n]`` side by side, from column ``begin`` on."""
        size = self.shape[1]
        if self._fortran:
            with self.open(2 * begin) as stream:
                for first in range(begin, size, rows):
                    both = stream.take(2 * min(rows, size - first)).reshape(-1, 2)
                    yield both[:, 0], both[:, 1]
            return
        with self.open(begin) as upper, self.open(size + begin) as lower:
            for first in range(begin, size, rows):
                count = min(rows, size - first)
                yield upper.take(count), lower.take(count)

    def whole(self) -> Array:
        """All of it."""
        with self.open(0) as stream:
            return stream.take(int(np.prod(self.shape, dtype=object))).reshape(self.shape)

    def number(self) -> int:
        """A single number.

        Raises:
            ValueError: If it is none, or negative.
        """
        if self.shape != () or self.dtype.kind not in "iu" or int(self.whole()) < 0:
            raise ValueError(f"{self.name} must be one integer, 0 or more")
        return int(self.whole())

    def _open(self) -> IO[bytes]:
        with zipfile.ZipFile(self._path) as archive:
            return archive.open(self._info)

    def _header(self, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        try:
            return read_npy_header(file)
        except ValueError as error:
            raise ValueError(f"{self.name} cannot be read as .npy: {error}") from None


def open_archive(path: Path) -> dict[str, Member]:
    """The arrays of an archive by their names.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no ``.npz`` archive.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        with zipfile.ZipFile(path) as archive:
            found = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            return {info.filename.removesuffix(".npy"): Member(path, info) for info in found}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path} is no plain NumPy .npz archive: {error}") from None
