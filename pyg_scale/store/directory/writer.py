"""Write a graph directory: under another name, renamed when it is complete."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.directory.array import as_array, as_tensor, dtype_name, numpy_dtype
from pyg_scale.store.directory.meta import META, FileMeta, Meta

_CHUNK = 1 << 24
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


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
        GraphDirectoryError: If another process is writing to ``path``.

    Example::

        with DirectoryWriter(path) as writer:
            out = writer.create("part-0/nodes/attributes/x.npy", torch.float32, (10, 3))
            out[:] = 1
            writer.commit(meta)
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = Path(path).absolute()
        self._check_target(overwrite)
        self._overwrite = overwrite
        self.staging = self.path.with_name(f".{self.path.name}.partial")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self.path.with_name(f".{self.path.name}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise GraphDirectoryError(f"another process is writing {self.path}") from None
        if not resume:
            shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir(exist_ok=True)
        self._resume = resume
        self._checksums: dict[str, FileMeta] = {}
        self._open = True

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

        Raises:
            OSError: If the disk is full, before anything is written to it.
        """
        file, stored = self.staging / name, dtype_name(dtype)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            header = {"descr": npy.dtype_to_descr(numpy_dtype(stored)), "fortran_order": False}
            npy.write_array_header_1_0(out, {**header, "shape": shape})
            offset = out.tell()
            size = int(np.prod(shape, dtype=object)) * numpy_dtype(stored).itemsize
            if size:
                os.posix_fallocate(out.fileno(), offset, size)  # a full disk is said here
        if not size:
            return torch.empty(shape, dtype=dtype)
        array = np.memmap(file, numpy_dtype(stored), mode="r+", offset=offset, shape=shape)
        return as_tensor(np.asarray(array), stored)

    def write(self, name: str, value: Tensor | np.ndarray[Any, Any]) -> None:
        """Write a whole tensor."""
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
        tensor = tensor.detach().cpu().contiguous()
        file = self.staging / name
        file.parent.mkdir(parents=True, exist_ok=True)
        array = as_array(tensor)
        with file.open("wb") as out:
            header = {"descr": npy.dtype_to_descr(array.dtype), "fortran_order": False}
            npy.write_array_header_1_0(out, {**header, "shape": tuple(array.shape)})
            flat = array.reshape(-1)
            step = max(1, _CHUNK // max(1, array.itemsize))
            for begin in range(0, flat.size, step):
                out.write(np.ascontiguousarray(flat[begin : begin + step]).data)

    def commit(self, meta: Meta) -> None:
        """Complete the directory: checksums, flush, ``META.json``, rename.

        Args:
            meta: ``files`` is filled in here, from what lies in the directory.

        Raises:
            ValueError: If ``meta`` contradicts itself.
        """
        meta.files = self._files()
        meta.check()
        with (self.staging / META).open("w") as out:
            out.write(meta.to_json())
            out.flush()
            os.fsync(out.fileno())
        for folder, _, _ in os.walk(self.staging):
            _sync(Path(folder))
        _take_place(self.staging, self.path)
        _sync(self.path.parent)
        shutil.rmtree(self.staging, ignore_errors=True)  # what was there before, if anything
        self.close()

    def close(self) -> None:
        """Give up what was not committed, unless it was opened with ``resume=True``."""
        if not self._open:
            return
        self._open = False
        if not self._resume:
            shutil.rmtree(self.staging, ignore_errors=True)
        Path(self._lock.name).unlink(missing_ok=True)
        self._lock.close()

    def _check_target(self, overwrite: bool) -> None:
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not (self.path / META).is_file():
            raise FileExistsError(f"{self.path} exists and is no graph directory: choose another")
        if not overwrite:
            raise FileExistsError(
                f"{self.path} is a graph directory already: choose another path, or pass "
                "overwrite=True"
            )

    def _files(self) -> dict[str, FileMeta]:
        found = {}
        for file in sorted(self.staging.rglob("*.npy")):
            found[file.relative_to(self.staging).as_posix()] = _checksum(file)
        return found


def _checksum(file: Path) -> FileMeta:
    """Size and CRC-32 of a file, which is on the disk afterwards."""
    crc, size = 0, 0
    with file.open("rb+") as read:
        while chunk := read.read(_CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        os.fsync(read.fileno())
    return FileMeta(size, crc)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _take_place(new: Path, old: Path) -> None:
    """Rename ``new`` to ``old``; a directory that is there is exchanged with it in one step."""
    if not old.exists():
        new.rename(old)
        return
    if not any(old.iterdir()):
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
    before = old.with_name(f".{old.name}.before")
    shutil.rmtree(before, ignore_errors=True)
    old.rename(before)
    new.rename(old)
    shutil.rmtree(before, ignore_errors=True)
