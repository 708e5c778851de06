"""A directory of ``.npy`` files with an index: tensors that any number of processes can map.

``STORE.json`` lists entries, each with some arrays and facts. A write creates new files, then
replaces the index in one step, then removes the old files: readers see either the old or the new
entry, and a writer that is killed leaves the old one. Tensors that were mapped before do not
change.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import (
    as_array,
    dtype_name,
    map_array,
    npy_header,
    open_regular,
)
from pyg_scale.files.place import flush, naming, replace_file, try_lock

FORMAT = "pyg_scale tensor directory"
VERSION = 1
INDEX = "STORE.json"
_LOCK = ".lock"
_CHUNK = 1 << 24
_WAIT_SECONDS = 600.0
_ATTEMPTS = 20


@dataclass(frozen=True)
class TensorEntry:
    """The content stored under one key.

    Attributes:
        key: The key, as JSON: strings, numbers, ``None`` and lists of these.
        info: Facts about it, as JSON.
        arrays: The file, dtype and shape of each array, by name.
    """

    key: Any
    info: dict[str, Any]
    arrays: dict[str, tuple[str, str, tuple[int, ...]]]


@dataclass
class _State:
    """The index as last read, and the tensors mapped from it."""

    stamp: Any = None
    next: int = 0
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    mapped: dict[str, Tensor] = field(default_factory=dict)


class TensorDirectory:
    """Entries of arrays under JSON keys.

    Args:
        path: The directory; created by the first write.
        durable: Flush writes to the disk before they take effect.

    Raises:
        GraphDirectoryError: If the path is something else, or has a newer version.
    """

    def __init__(self, path: str | Path, *, durable: bool = True) -> None:
        self.path = Path(path).absolute()
        self._durable = durable
        self._state = _State()
        self._reading = threading.Lock()
        if self.path.exists() and not self.path.is_dir():
            raise GraphDirectoryError(f"{self.path} is a file, expected a directory")
        index = self.path / INDEX
        if self.path.is_dir() and not index.exists():
            others = [p.name for p in self.path.iterdir() if not p.name.startswith(".")]
            if others and not all(p.endswith(".npy") for p in others):
                raise GraphDirectoryError(
                    f"{self.path} is not a directory of tensors: it has {sorted(others)[0]} and no "
                    f"{INDEX}: choose an empty or a new one"
                )
        self.entries()

    # Reading ###############################################################################

    def entries(self) -> dict[str, TensorEntry]:
        """The stored entries, in the order in which they were first written. Do not change them."""
        return self._current().entries

    def find(self, key: Any) -> TensorEntry | None:
        """The entry of a key."""
        return self._current().entries.get(_text(key))

    def tensors(self, key: Any) -> dict[str, Tensor] | None:
        """The arrays of a key, mapped copy-on-write; ``None`` if there is none.

        They are the same objects until the entry is replaced.

        Raises:
            GraphDirectoryError: If a file is missing or was changed.
        """
        for attempt in range(_ATTEMPTS):
            state = self._current()
            entry = state.entries.get(_text(key))
            if entry is None:
                return None
            try:
                return {name: self._map(state, *array) for name, array in entry.arrays.items()}
            except (GraphDirectoryError, FileNotFoundError) as error:
                # The entry was replaced since the index was read, unless nothing changed.
                if self._current() is state or attempt == _ATTEMPTS - 1:
                    raise GraphDirectoryError(str(error)) from None
        raise AssertionError("the loop returns or raises")

    def _map(self, state: _State, file: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        tensor = state.mapped.get(file)
        if tensor is None:
            tensor = state.mapped.setdefault(file, map_array(self.path / file, dtype, shape))
        return tensor

    def _current(self) -> _State:
        """The index; read again if it was replaced."""
        state = self._state
        stamp = self._stamp()
        if stamp == state.stamp:
            return state
        with self._reading:
            if self._state.stamp == stamp:
                return self._state
            new = self._read() if stamp is not None else _State()
            new.stamp = stamp
            files = {array[0] for entry in new.entries.values() for array in entry.arrays.values()}
            new.mapped = {f: t for f, t in list(self._state.mapped.items()) if f in files}
            self._state = new
            return new

    def _stamp(self) -> Any:
        try:
            found = os.stat(self.path / INDEX)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> _State:
        file = self.path / INDEX
        try:
            with os.fdopen(open_regular(INDEX, self.path), encoding="utf-8") as opened:
                found = json.loads(opened.read())
            if found["format"] != FORMAT:
                raise ValueError(f"it does not say that it is a {FORMAT}")
            if found["version"] > VERSION:
                raise GraphDirectoryError(
                    f"{file} has version {found['version']}, this release reads up to {VERSION}: "
                    "pip install --upgrade pyg-scale"
                )
            entries = {}
            for each in found["entries"]:
                arrays = {
                    name: (_inside(file), str(dtype), tuple(shape))
                    for name, (file, dtype, shape) in each["arrays"].items()
                }
                entries[_text(each["key"])] = TensorEntry(each["key"], dict(each["info"]), arrays)
            return _State(next=int(found["next"]), entries=entries)
        except GraphDirectoryError:
            raise
        except FileNotFoundError:
            return _State()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise GraphDirectoryError(
                f"{file} cannot be read: {type(error).__name__}: {error}"
            ) from None

    # Writing ###############################################################################

    def write(self, key: Any, arrays: Mapping[str, Tensor], info: dict[str, Any]) -> None:
        """Store arrays under a key, replacing its entry.

        Raises:
            OSError: If the disk is full; the old entry is kept.
            TimeoutError: If another process has been writing for more than ten minutes.
        """
        with self.locked():
            self._replace(key, arrays, info)

    def remove(self, key: Any) -> bool:
        """Remove an entry; return True if there was one."""
        with self.locked():
            if self.find(key) is None:
                return False
            self._replace(key, None, {})
            return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other threads and processes from writing. A thread that holds it may write."""
        me = threading.get_ident()
        if getattr(self, "_writer", None) == me:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with file_lock(self.path / _LOCK, f"writing {self.path}", _WAIT_SECONDS):
            self._writer: int | None = me
            try:
                yield
            finally:
                self._writer = None

    def _replace(self, key: Any, arrays: Mapping[str, Tensor] | None, info: dict[str, Any]) -> None:
        state = self._current()
        entries, number = dict(state.entries), state.next
        old = entries.get(_text(key))
        written: list[str] = []
        try:
            if arrays is None:
                del entries[_text(key)]
            else:
                stored = {}
                for name, tensor in arrays.items():
                    file = f"{number:08d}-{len(written)}.npy"
                    written.append(file)
                    save_array(self.path / file, tensor, durable=self._durable)
                    stored[name] = (file, dtype_name(tensor.dtype), tuple(tensor.shape))
                entries[_text(key)] = TensorEntry(key, info, stored)
            self._write_index(entries, number + 1)
        except BaseException:
            for file in written:
                (self.path / file).unlink(missing_ok=True)
            raise
        if old is not None:
            for file, _, _ in old.arrays.values():
                (self.path / file).unlink(missing_ok=True)

    def _write_index(self, entries: Mapping[str, TensorEntry], number: int) -> None:
        listed = [{"key": e.key, "info": e.info, "arrays": e.arrays} for e in entries.values()]
        content = {"format": FORMAT, "version": VERSION, "next": number, "entries": listed}
        replace_file(self.path / INDEX, json.dumps(content, indent=1), durable=self._durable)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_durable": self._durable}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._state = _State()
        self._reading = threading.Lock()


def save_array(file: Path, tensor: Tensor, *, durable: bool = True) -> None:
    """Write a tensor as ``.npy``, in pieces if it is not contiguous.

    Raises:
        TypeError: If NumPy's format has no such dtype.
        OSError: If the disk is full.
    """
    tensor = tensor.detach()
    header = npy_header(dtype_name(tensor.dtype), tuple(tensor.shape))
    with naming(file), file.open("wb") as out:
        out.write(header)
        row = max(1, tensor[:1].numel() * tensor.element_size()) if tensor.dim() else 1
        for begin in range(0, tensor.size(0), max(1, _CHUNK // row)):
            rows = tensor[begin : begin + max(1, _CHUNK // row)].cpu().contiguous()
            out.write(np.ascontiguousarray(as_array(rows)).data.cast("B") if rows.numel() else b"")
        if durable:
            flush(out)


@contextlib.contextmanager
def file_lock(file: Path, what: str, timeout: float) -> Iterator[None]:
    """Hold a lock, waiting up to ``timeout`` seconds for it; it ends with the process.

    Raises:
        TimeoutError: If another process keeps it for longer; names that process.
        OSError: If the file system does not support locks.
    """
    deadline = time.monotonic() + timeout
    with file.open("a+") as handle:
        while True:
            if try_lock(handle.fileno(), file):
                break
            if time.monotonic() > deadline:
                handle.seek(0)
                who = handle.read(20).strip() or "unknown"
                raise TimeoutError(
                    f"{what}: process {who} has been at it for more than {timeout:.0f} s ({file})"
                )
            time.sleep(0.01)
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        yield  # closing the file releases the lock


def _text(key: Any) -> str:
    return json.dumps(key)


def _inside(file: Any) -> str:
    """Check that a file name is one of ours, and not a path out of the directory."""
    if not isinstance(file, str) or Path(file).name != file or not file.endswith(".npy"):
        raise ValueError(f"{file!r} is not a file of the directory")
    return file
