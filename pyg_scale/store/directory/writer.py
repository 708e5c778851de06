"""Writes a graph directory under another name, and renames it when it is complete."""

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
from pyg_scale.files.file_view import FileView
from pyg_scale.files.npy import (
    as_array,
    as_tensor,
    check_header,
    dtype_name,
    npy_header,
    num_bytes,
    numpy_dtype,
)
from pyg_scale.files.place import Lock, flush, restore, sync, take_place
from pyg_scale.store.directory.checksums import checksums
from pyg_scale.store.directory.layout import expected_files
from pyg_scale.store.directory.meta import META, FileMeta, Meta, is_graph_directory

_CHUNK = 1 << 24
_MARK = ".writing"
"""A file that marks a directory that is being written."""


class DirectoryWriter:
    """Files of a new graph directory, which appears at ``path`` with :meth:`commit`.

    An existing directory at ``path`` stays complete until the new one replaces it in one step. A
    writer that dies leaves a hidden directory next to it, which the next writer to the same path
    removes or, with ``resume=True``, continues.

    Args:
        path: The directory to write.
        overwrite: Allow an existing graph directory to be replaced; one whose ``META.json`` cannot
            be read is none.
        resume: Keep the files that an earlier writer left.

    Raises:
        FileExistsError: If ``path`` exists and ``overwrite`` is not set, or it is not a graph
            directory.
        GraphDirectoryError: If another process is writing to ``path``, or it cannot be written.

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
                self._check_target(overwrite)  # from now on no other process writes
                (self.path / _MARK).unlink(missing_ok=True)
                self._prepare()
        except BaseException:
            self._lock.release()
            raise
        self._open = True

    def _prepare(self) -> None:
        # Without the mark it is the old directory, which was just moved away from the path.
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
        """Create a file of a given size, and map it: writes to the tensor go to the file.

        Args:
            name: Path in the directory, with ``/``.
            dtype: Its dtype.
            shape: Its shape. The content is initially zero.

        Returns:
            The tensor; do not write to it after :meth:`commit`.

        Raises:
            GraphDirectoryError: If the disk is full, before anything is written; names the file.
        """
        stored = dtype_name(dtype)
        with self._file(name) as out:
            offset = out.write(npy_header(stored, shape))
            out.flush()
            size = num_bytes(stored, shape)
            if not size:
                return torch.empty(shape, dtype=dtype)
            os.posix_fallocate(out.fileno(), offset, size)  # raises if the disk is full
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
        """Write a whole tensor, some rows at a time, so that strides and ``dtype`` need no copy.

        Args:
            name: Path in the directory, with ``/``.
            value: The tensor.
            dtype: The dtype of the file; that of ``value`` if ``None``.
            progress: Called with the number of bytes written, after each piece.

        Raises:
            GraphDirectoryError: If the disk is full or fails; names the file.
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

        Files other than ``.npy`` files are removed.

        Args:
            meta: The content of ``META.json``; this method fills in ``files``.

        Raises:
            ValueError: If ``meta`` contradicts itself.
            GraphDirectoryError: If a file is missing or does not fit ``meta``, or the disk is full.
        """
        with refused(self.staging):
            files = self._clean()
            meta.files = checksums(self.staging, files, self._known(files))
            meta.check()
            for file in expected_files(meta, range(meta.num_parts)):
                check_header(self.staging / file.name, file.dtype, file.shape)
            with (self.staging / META).open("w", encoding="utf-8") as out:
                out.write(meta.to_json())
                flush(out)
            for folder, _, _ in os.walk(self.staging, topdown=False):
                sync(Path(folder))
            take_place(self.staging, self.path)
            sync(self.path.parent)
            (self.path / _MARK).unlink(missing_ok=True)
        shutil.rmtree(self.staging, ignore_errors=True)  # the old directory, if any
        self.close()

    def close(self) -> None:
        """Discard files that were not committed, unless it was opened with ``resume=True``."""
        if not self._open:
            return
        self._open = False
        if not self._resume:
            shutil.rmtree(self.staging, ignore_errors=True)
        self._lock.release()

    def _check_target(self, overwrite: bool) -> None:
        for outer in self.path.parents:
            if is_graph_directory(outer):
                raise FileExistsError(
                    f"{self.path} is inside the graph directory {outer}, which is replaced as a "
                    "whole: choose another path"
                )
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not is_graph_directory(self.path):
            advice = "choose another"
            if (self.path / META).exists():
                advice = (
                    f"its {META} is of another program or damaged; choose another path, or delete "
                    "it by hand"
                )
            raise FileExistsError(f"{self.path} exists, but is not a graph directory: {advice}")
        if not overwrite:
            raise FileExistsError(
                f"{self.path} is already a graph directory: choose another path, or pass "
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
        """The files of the directory; everything else is removed."""
        files = []
        for folder, folders, names in os.walk(self.staging, topdown=False):
            for name in names:
                file = Path(folder) / name
                if name.endswith(".npy"):
                    files.append(file.relative_to(self.staging).as_posix())
                elif name != _MARK:
                    file.unlink()
            for name in folders:
                with contextlib.suppress(OSError):  # the directory is not empty
                    (Path(folder) / name).rmdir()
        return sorted(files)

    def _known(self, files: list[str]) -> dict[str, FileMeta]:
        """The checksums of files that were not written to since."""
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
    """Write the content of a tensor in another dtype, some rows at a time.

    Args:
        out: A file.
        tensor: The tensor.
        dtype: The dtype of the file.
        crc: The checksum of the existing content of the file.
        progress: Called with the number of bytes written, after each piece.

    Returns:
        The checksum of the whole file, and the number of bytes written.

    Raises:
        OSError: If the disk is full or fails.
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
    """Turn errors of the system into one that names the file."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        name = error.filename or file
        raise GraphDirectoryError(f"{name} cannot be written: {error.strerror or error}") from error
