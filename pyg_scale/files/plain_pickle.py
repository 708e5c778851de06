"""Files of ``torch.save`` and :mod:`pickle`, read without running any code in them.

:mod:`pyg_scale.files.pickle_program` reads the pickles; this module reads the files around them.
``torch.load(weights_only=True)`` does not suffice. It accepts sizes that exceed the storage, and
supports neither the newer pickle protocols, nor tensors that :mod:`pickle` itself wrote, nor
NumPy's arrays unless they may restore any state.
"""

from __future__ import annotations

import mmap as memory_map
import struct
import zipfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_scale.files.pickle_program import Program, StandIn
from pyg_scale.files.pickle_values import Storage

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of torch before its version 1.6


def load_plain(
    file: str | PathLike[str], *, mmap: bool = False, stand_in: StandIn | None = None
) -> Any:
    """Load a file of ``torch.save``: dense tensors, NumPy arrays, numbers, text and containers.

    Tensors have no gradients; parameters and buffers become plain tensors.

    Args:
        file: The file.
        mmap: Map tensors instead of reading them, if the file is of torch 1.6 or later.
        stand_in: Replaces other classes.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is damaged, or has anything else in it; names it. None of its code was
            run.
    """
    path = Path(file)
    data = _opened(path, mmap)
    with _named(path):
        if data[:4] == b"PK\x03\x04":
            return _Archive(path, data, mmap, stand_in).load()
        return _load_old(data, stand_in)


def load_pickle(file: str | PathLike[str], *, stand_in: StandIn | None = None) -> Any:
    """Load a file of ``pickle.dump``; otherwise like :func:`load_plain`.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is damaged, or has anything else in it; names it.
    """
    path = Path(file)
    data = _opened(path)
    with _named(path):
        return Program(data, stand_in=stand_in, file_within=_storage_of).load()


def iterate_pickles(file: str | PathLike[str], *, stand_in: StandIn | None = None) -> Iterator[Any]:
    """Iterate over the values that ``pickle.dump`` appended to a file.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is damaged, or has anything else in it; names it.
    """
    path = Path(file)
    data, begin = _opened(path), 0
    while begin < len(data):
        with _named(path):
            one = Program(data, begin, stand_in=stand_in, file_within=_storage_of)
            value = one.load()
        yield value
        begin = one.at


class _named:
    """Turns errors of reading into one that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, MemoryError):
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"{self.path} is damaged, or holds more than tensors, arrays and plain "
                f"containers: {type(error).__name__}: {reason}"
            ) from None


def _opened(path: Path, writable: bool = False) -> Any:
    """The bytes of a file, mapped; writes to them stay in memory."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    with path.open("rb") as opened:
        if not path.stat().st_size:  # an empty file cannot be mapped
            return b""
        access = memory_map.ACCESS_COPY if writable else memory_map.ACCESS_READ
        return memory_map.mmap(opened.fileno(), 0, access=access)


# Torch's files ############################################################################


class _Archive:
    """A file of torch 1.6 or later: a zip archive with a pickle, and the raw storages."""

    def __init__(self, path: Path, data: Any, mapped: bool, stand_in: StandIn | None) -> None:
        self._data, self._mapped, self._stand_in = data, mapped, stand_in
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
        self._entries = {info.filename.partition("/")[2]: info for info in infos}
        if len({info.filename.partition("/")[0] for info in infos}) != 1:
            raise UnpicklingError("it is a zip archive, but not one of torch.save")
        if len(self._entries) != len(infos):
            raise UnpicklingError("it has two files of the same name")
        if "constants.pkl" in self._entries or any(n.startswith("code/") for n in self._entries):
            raise UnpicklingError("it is a program of TorchScript, which is not allowed")
        if "byteorder" in self._entries and bytes(self._content("byteorder")) != b"little":
            raise UnpicklingError("its byte order is not little-endian: save it on such a machine")
        self._storages: dict[str, Tensor] = {}
        self._left = len(data)

    def load(self) -> Any:
        pickled = bytes(self._content("data.pkl"))
        return Program(
            pickled, stand_in=self._stand_in, storage=self._storage, file_within=_storage_of
        ).load()

    def _storage(self, dtype: torch.dtype | None, key: Any, size: int) -> Storage:
        if key not in self._storages:
            content = self._content(f"data/{key}")
            self._left -= content.nbytes
            if self._left < 0:  # entries may lie over each other
                raise EOFError("its storages are larger than the file")
            aligned = content.ctypes.data % 16 == 0  # as in every file of torch.save
            mapped = self._mapped and aligned
            self._storages[key] = torch.from_numpy(content if mapped else content.copy())
        return Storage(dtype, self._storages[key]).of(dtype, size)

    def _content(self, name: str) -> NDArray[np.uint8]:
        """The bytes of an entry."""
        info = self._entries.get(name)
        if info is None:
            raise UnpicklingError(f"it has no {name}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise UnpicklingError(f"{name} is compressed or encrypted, which torch.save never does")
        head = self._data[info.header_offset : info.header_offset + 30]
        if len(head) < 30 or head[:4] != b"PK\x03\x04":
            raise UnpicklingError(f"{name} is not at its stated position")
        begin = info.header_offset + 30 + sum(struct.unpack("<HH", head[26:]))
        if begin + info.file_size > len(self._data):
            raise EOFError(f"it ends within {name}")
        return np.frombuffer(self._data, np.uint8, info.file_size, begin)


def _load_old(data: Any, stand_in: StandIn | None = None) -> Any:
    """Load a file of torch before version 1.6."""
    program, storages = _program_of_old(data, stand_in, _storage_of)
    value = program.load()
    storages.fill(program.at)
    return value


def _storage_of(data: bytes) -> Storage:
    """The storage that a pickled tensor contains, as a file of torch before 1.6."""
    program, storages = _program_of_old(data, None, None)
    value = program.run()
    storages.fill(program.at)
    if type(value) is not Storage:
        raise UnpicklingError(f"a tensor's storage is a {type(value).__name__}")
    return value


def _program_of_old(
    data: Any, stand_in: StandIn | None, file_within: Any
) -> tuple[Program, _OldStorages]:
    """The pickle of the value; those of a magic number, a version and system facts precede it."""
    at, facts = 0, []
    for _ in range(3):
        head = Program(data, at, plain=True)
        facts.append(head.load())
        at = head.at
    if facts[:2] != [_MAGIC, _PROTOCOL] or type(facts[2]) is not dict:
        raise UnpicklingError("it was not written by torch.save")
    if facts[2].get("little_endian") is not True:
        raise UnpicklingError("its byte order is not little-endian: save it on such a machine")
    storages = _OldStorages(data)
    program = Program(data, at, stand_in=stand_in, storage=storages.named, file_within=file_within)
    return program, storages


class _OldStorages:
    """The storages of a value: first named by it, then filled."""

    def __init__(self, data: Any) -> None:
        self._data, self._left = data, len(data)
        self._named: dict[str, Storage] = {}

    def named(self, dtype: torch.dtype | None, key: str, size: int) -> Storage:
        if key not in self._named:
            length = size * (1 if dtype is None else dtype.itemsize)
            self._left -= length
            if self._left < 0:
                raise EOFError("its storages are larger than the file")
            self._named[key] = Storage(dtype, torch.zeros(length, dtype=torch.uint8))
        return self._named[key].of(dtype, size)

    def fill(self, at: int) -> None:
        """Read them; their list is at a position in the file, and their content follows."""
        names = Program(self._data, at, plain=True)
        keys = names.load()
        at = names.at
        if type(keys) is not list or not all(type(key) is str for key in keys):
            raise UnpicklingError("its list of storages is not a list")
        if sorted(keys) != sorted(self._named):
            raise UnpicklingError("its list of storages does not fit its value")
        for key in keys:
            storage = self._named[key]
            size = storage.content.numel()
            head = bytes(self._data[at : at + 8])
            if len(head) < 8 or struct.unpack("<q", head)[0] * storage.itemsize != size:
                raise UnpicklingError("a storage does not have its stated size")
            at += 8
            if at + size > len(self._data):
                raise EOFError("it ends within a storage")
            storage.content.numpy()[:] = np.frombuffer(self._data, np.uint8, size, at)
            storage.check(storage.dtype)
            at += size
