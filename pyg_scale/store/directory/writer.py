"""Write a graph directory: under another name, renamed when it is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.directory.array import (
    as_array,
    as_tensor,
    check_header,
    dtype_name,
    npy_header,
    num_bytes,
    numpy_dtype,
)
from pyg_scale.store.directory.checksums import checksums
from pyg_scale.store.directory.file_view import FileView
from pyg_scale.store.directory.layout import expected_files
from pyg_scale.store.directory.meta import META, FileMeta, Meta
from pyg_scale.store.directory.place import Lock, restore, sync, take_place

_CHUNK = 1 << 24
_MARK = ".writing"
"""A file that tells what is being written from what was there before."""


class DirectoryWriter:
    """Files of a graph directory to be; nothing is at ``path`` before :meth:`commit`.

    What was at ``path`` before stays there, whole, until the new directory takes its place in one
    step. A writer that dies leaves a hidden directory beside it, which the next one to the same
    path clears or, with ``resume=True``, goes on with.

    Args:
        path: The directory to write.
        overwrite: Whether a graph directory that is there may be replaced.
        resume: Keep the files that a writer before left.

    Raises:
        FileExistsError: If something is at ``path`` and ``overwrite`` is not set, or it is no graph
            directory.
        GraphDirectoryError: If another process is writing to ``path``, or nothing can be written
            there.

    Example::

        with DirectoryWriter(path) as writer:
            out = writer.create("part-0/nodes/attributes/x.npy", torch.float32, (10, 3))
            out[:] = 1
            writer.commit(meta)
    """

    def __init__(
        self, path: str | PathLike[str], *, overwrite: bool = False, resume: bool = False
    ) -> None:
        self.path = Path(path).resolve()
        self._check_target(overwrite)
        self.staging = self.path.with_name(f".{self.path.name}.partial")
        self._resume = resume
        self._written: dict[str, tuple[FileMeta, int]] = {}
        with refused(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path)
        try:
            with refused(self.path):
                restore(self.path)
                self._check_target(overwrite)  # nobody else writes from here on
                (self.path / _MARK).unlink(missing_ok=True)
                self._prepare()
        except BaseException:
            self._lock.release()
            raise
        self._open = True

    def _prepare(self) -> None:
        # Without the mark it is what was at the path before, from where it was just taken.
        if not (self._resume and (self.staging / _MARK).exists()) and self.staging.exists():
            shutil.rmtree(self.staging)
        self.staging.mkdir(exist_ok=True)
        (self.staging / _MARK).touch()
        (self.staging / META).unlink(missing_ok=True)

    def __enter__(self) -> DirectoryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A new file of a given size, mapped: what is written to the tensor is in the file.

        Args:
            name: Path in the directory, with ``/``.
            dtype: What it holds.
            shape: Its shape. The content is zero at first.

        Returns:
            The tensor; not to be written to after :meth:`commit`.

        Raises:
            GraphDirectoryError: If the disk is full, before anything is written to it; names the
                file.
        """
        stored = dtype_name(dtype)
        with self._file(name) as out:
            offset = out.write(npy_header(stored, shape))
            out.flush()
            size = num_bytes(stored, shape)
            if not size:
                return torch.empty(shape, dtype=dtype)
            os.posix_fallocate(out.fileno(), offset, size)  # a full disk is said here
            view = FileView(out.fileno(), offset, numpy_dtype(stored), shape, shared=True)
            return as_tensor(np.asarray(view), stored)

    def write(
        self,
        name: str,
        value: Tensor | np.ndarray[Any, Any],
        *,
        dtype: torch.dtype | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        """Write a whole tensor, some rows at a time: neither strides nor ``dtype`` need a copy.

        Args:
            name: Path in the directory, with ``/``.
            value: What to write.
            dtype: What the file is to hold; that of ``value`` if ``None``.
            progress: Called with the bytes that were written, piece by piece.

        Raises:
            GraphDirectoryError: If the disk is full or refuses; names the file.
        """
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
        tensor, dtype = tensor.detach(), dtype or tensor.dtype
        with self._file(name) as out:
            header = npy_header(dtype_name(dtype), tuple(tensor.shape))
            out.write(header)
            crc, size = write_rows(out, tensor, dtype, zlib.crc32(header), progress)
            out.flush()
            changed = os.fstat(out.fileno()).st_mtime_ns
        self._written[name] = FileMeta(size + len(header), crc), changed

    def commit(self, meta: Meta) -> None:
        """Complete the directory: checksums, flush, ``META.json``, rename.

        Files that are no ``.npy`` files are removed.

        Args:
            meta: ``files`` is filled in here, from what lies in the directory.

        Raises:
            ValueError: If ``meta`` contradicts itself.
            GraphDirectoryError: If a file is missing, or holds something else than ``meta`` says,
                or the disk is full.
        """
        with refused(self.staging):
            files = self._clean()
            meta.files = checksums(self.staging, files, self._known(files))
            meta.check()
            for file in expected_files(meta, range(meta.num_parts)):
                check_header(self.staging / file.name, file.dtype, file.shape)
            with (self.staging / META).open("w", encoding="utf-8") as out:
                out.write(meta.to_json())
                out.flush()
                os.fsync(out.fileno())
            for folder, _, _ in os.walk(self.staging, topdown=False):
                sync(Path(folder))
            take_place(self.staging, self.path)
            sync(self.path.parent)
            (self.path / _MARK).unlink(missing_ok=True)
        shutil.rmtree(self.staging, ignore_errors=True)  # what was there before, if anything
        self.close()

    def close(self) -> None:
        """Give up what was not committed, unless it was opened with ``resume=True``."""
        if not self._open:
            return
        self._open = False
        if not self._resume:
            shutil.rmtree(self.staging, ignore_errors=True)
        self._lock.release()

    def _check_target(self, overwrite: bool) -> None:
        for outer in self.path.parents:
            if (outer / META).is_file():
                raise FileExistsError(
                    f"{self.path} is inside of the graph directory {outer}, which is replaced as a "
                    "whole: choose another path"
                )
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not (self.path / META).is_file():
            raise FileExistsError(f"{self.path} exists and is no graph directory: choose another")
        if not overwrite:
            raise FileExistsError(
                f"{self.path} is a graph directory already: choose another path, or pass "
                "overwrite=True"
            )

    @contextlib.contextmanager
    def _file(self, name: str) -> Iterator[BinaryIO]:
        file = self.staging / name
        self._written.pop(name, None)
        with refused(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb+") as out:
                yield out

    def _clean(self) -> list[str]:
        """The files of the directory; all else is removed."""
        files = []
        for folder, folders, names in os.walk(self.staging, topdown=False):
            for name in names:
                file = Path(folder) / name
                if name.endswith(".npy"):
                    files.append(file.relative_to(self.staging).as_posix())
                elif name != _MARK:
                    file.unlink()
            for name in folders:
                with contextlib.suppress(OSError):  # which says that it is not empty
                    (Path(folder) / name).rmdir()
        return sorted(files)

    def _known(self, files: list[str]) -> dict[str, FileMeta]:
        """The checksums of files that nobody wrote to since."""
        known = {}
        for name in files:
            found, changed = self._written.get(name, (None, 0))
            stat = (self.staging / name).stat()
            if found is not None and (stat.st_size, stat.st_mtime_ns) == (found.bytes, changed):
                known[name] = found
        return known


def write_rows(
    out: BinaryIO,
    tensor: Tensor,
    dtype: torch.dtype,
    crc: int,
    progress: Callable[[int], object] | None = None,
) -> tuple[int, int]:
    """Write the content of a tensor as another dtype, some rows at a time.

    Args:
        out: A file.
        tensor: What to write.
        dtype: What the file is to hold.
        crc: The checksum of what is in the file already.
        progress: Called with the bytes that were written, piece by piece.

    Returns:
        The checksum of all that is in the file, and the bytes that were written.

    Raises:
        OSError: If the disk is full or refuses.
    """
    rows, size = tensor if tensor.dim() else tensor.view(1), 0
    step = max(1, _CHUNK // max(1, rows[:1].numel() * dtype.itemsize))
    for begin in range(0, len(rows) if rows.numel() else 0, step):
        piece = rows[begin : begin + step].to(device="cpu", dtype=dtype).contiguous()
        data = as_array(piece).reshape(-1).view(np.uint8).data
        out.write(data)
        crc, size = zlib.crc32(data, crc), size + data.nbytes
        if progress is not None:
            progress(data.nbytes)
    return crc, size


@contextlib.contextmanager
def refused(file: Path) -> Iterator[None]:
    """What the system refuses, with the file that it is about."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        name = error.filename or file
        raise GraphDirectoryError(f"{name} cannot be written: {error.strerror or error}") from error
