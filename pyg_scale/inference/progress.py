"""The files of an inference, and a journal of what is in them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_scale.files.npy import (
    as_array,
    dtype_name,
    map_array,
    npy_header,
    num_bytes,
)
from pyg_scale.files.place import flush, naming, try_lock
from pyg_scale.ops.raw_bytes import raw_bytes

FORMAT = "pyg_scale layerwise inference"
VERSION = 1
JOURNAL = "PROGRESS.jsonl"
RESULT = "output.npy"
_SYNC_SECONDS = 10.0


class InferenceProgress:
    """The progress of an inference.

    A line is added to the journal after each batch, once its rows are in the file: a process that
    is killed loses nothing. After the machine itself went down, only lines count that were written
    when the rows had been flushed to the disk, which they are every ten seconds.

    Args:
        path: The directory.
        made_by: What must be the same for the files to be gone on with.
        sizes: Number of rows of each step; all have ``made_by["num_nodes"]`` if not given.
        results: The file names of the steps that are results, by number; the last step is one if
            not given.
    """

    def __init__(
        self,
        path: Path,
        made_by: dict[str, Any],
        sizes: Sequence[int] | None = None,
        results: Mapping[int, str] | None = None,
    ) -> None:
        self.path = path
        self._made_by = made_by
        self._sizes, self._results = sizes, results
        self._rows: dict[int, int] = {}
        self._kinds: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._done = False
        self._files: dict[int, tuple[int, int]] = {}
        self._synced = time.monotonic()

    @contextlib.contextmanager
    def opened(self, resume: bool) -> Iterator[None]:
        """Read the journal, and keep others away.

        Raises:
            ValueError: If another inference, or none, made the directory.
            RuntimeError: If another process is at it.
            OSError: If the file system has no locks.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"out={str(self.path)!r} is a file, expected a directory")
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            if not try_lock(lock.fileno(), self.path / ".lock"):
                raise RuntimeError(f"another process writes to {self.path}")
            self._read(resume)
            self._journal = (self.path / JOURNAL).open("a", encoding="utf-8")
            try:
                yield
            finally:
                self._journal.close()
                for handle, _ in self._files.values():
                    os.close(handle)
                self._files.clear()

    def _read(self, resume: bool) -> None:
        journal = self.path / JOURNAL
        lines = _lines(journal) if journal.exists() else []
        if not lines:
            self._check_empty(journal)
            self.begin()
            return
        head = lines[0]
        if head.get("format") != FORMAT:
            raise ValueError(f"{journal} is of something else: choose another directory")
        if not resume:
            self.begin()
            return
        if head.get("version") != VERSION:
            raise ValueError(f"{journal} is no journal of this release: choose another directory")
        for name, value in self._made_by.items():
            if head["made_by"].get(name) != value:
                raise ValueError(
                    f"{self.path} holds the inference of another {name}: pass resume=False to "
                    "begin anew, or choose another directory"
                )
        survived = head["boot"] == _boot()
        for line in lines[1:]:
            if "row" in line:
                self._kinds[line["step"]] = (line["dtype"], tuple(line["row"]))
            elif "rows" in line and (survived or line.get("synced")):
                self._rows[line["step"]] = line["rows"]
            self._done |= bool(line.get("done"))
        named = all((self.path / name).is_file() for name in self._named.values())
        complete = all(self._rows.get(k, 0) >= self._size(k) for k in self._named)
        self._done |= named and bool(self._kinds) and complete
        if not (named if self._done else self._files_are_there()):
            self.begin()
            return
        lines = [self._head()]
        for step, (dtype, row) in self._kinds.items():
            lines.append({"step": step, "dtype": dtype, "row": row})
            lines.append({"step": step, "rows": self.rows(step), "synced": True})
        lines += [{"done": True}] if self._done else []
        staged = self.path / f".{JOURNAL}.partial"
        with naming(staged):
            staged.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        staged.replace(journal)

    def _check_empty(self, journal: Path) -> None:
        """Refuse files of others; a crash may leave a journal that ends in its first line."""
        others = {p.name for p in self.path.iterdir() if not p.name.startswith(".")}
        if journal.exists():
            text, mark = _text(journal), json.dumps({"format": FORMAT})[:-1]
            if text.startswith(mark) or mark.startswith(text):
                others -= {JOURNAL, *(p.name for p in self.path.glob("step-*.npy"))}
        if others:
            raise ValueError(f"{self.path} holds {min(others)}: choose an empty directory")

    @property
    def _named(self) -> Mapping[int, str]:
        """The file names of results, by number of the step."""
        return {max(self._kinds, default=0): RESULT} if self._results is None else self._results

    def _size(self, step: int) -> int:
        size: int = self._made_by["num_nodes"] if self._sizes is None else self._sizes[step]
        return size

    def _files_are_there(self) -> bool:
        """Return True if the file of each step is whole, or was removed when nobody needed it."""
        superseded = False
        for step in sorted(self._kinds, reverse=True):
            dtype, row = self._kinds[step]
            file = self._file(step)
            if file.exists():
                if file.stat().st_size < num_bytes(dtype, (self._size(step), *row)):
                    return False
            elif not superseded:
                return False
            superseded |= self.rows(step) >= self._size(step)
        return True

    def begin(self) -> None:
        """Remove what is there, and begin anew."""
        results = [self.path / name for name in (self._results or {0: RESULT}).values()]
        for file in (*self.path.glob("step-*.npy"), *results, self.path / JOURNAL):
            file.unlink(missing_ok=True)
        self._rows, self._kinds, self._done = {}, {}, False
        with naming(self.path / JOURNAL):
            (self.path / JOURNAL).write_text(json.dumps(self._head()) + "\n", encoding="utf-8")

    def _head(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "boot": _boot(), "made_by": self._made_by}

    @property
    def is_done(self) -> bool:
        """True if the result is complete."""
        return self._done

    def rows(self, step: int) -> int:
        """Number of rows of a step that are written: the first ones."""
        return self._rows.get(step, 0)

    def has(self, step: int) -> bool:
        """Return True if a step has begun."""
        return step in self._kinds

    def first(self, num_steps: int) -> int:
        """The first of the steps that is not complete; their number if all are."""
        open_ = (k for k in range(num_steps) if not self.has(k) or self.rows(k) < self._size(k))
        return next(open_, num_steps)

    def removed(self) -> list[int]:
        """The steps that have begun and whose file is not there any more."""
        return [step for step in sorted(self._kinds) if not self._file(step).exists()]

    def array(self, step: int) -> Tensor:
        """The result of a step, mapped."""
        dtype, row = self._kinds[step]
        return map_array(self._file(step), dtype, (self._size(step), *row))

    def result(self, step: int | None = None) -> Tensor:
        """The result of the inference, mapped: that of the last step, or of another one."""
        step = max(self._kinds) if step is None else step
        dtype, row = self._kinds[step]
        return map_array(self.path / self._named[step], dtype, (self._size(step), *row))

    def write(self, step: int, begin: int, rows: Tensor, size: int) -> None:
        """Write rows of a step from number ``begin`` on.

        Raises:
            OSError: If the disk is full; names the file.
        """
        kind = (dtype_name(rows.dtype), tuple(rows.shape[1:]))
        if step not in self._kinds:
            self._create(step, kind, size)
        if self._kinds[step] != kind:
            raise ValueError(f"step {step} gave {kind} after {self._kinds[step]}")
        handle, offset = self._open(step)
        data = as_array(rows.contiguous()).tobytes()
        at = offset + begin * num_bytes(kind[0], kind[1])
        with naming(self._file(step)):
            while data:
                written = os.pwrite(handle, data, at)
                data, at = data[written:], at + written
        self._rows[step] = begin + rows.size(0)
        line: dict[str, Any] = {"step": step, "rows": self._rows[step]}
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            with naming(self._file(step)):
                os.fdatasync(handle)
            self._synced, line["synced"] = time.monotonic(), True
        self._note(line)

    def kind(self, step: int) -> tuple[str, tuple[int, ...]]:
        """The dtype and the shape of a row of a step that has begun."""
        return self._kinds[step]

    def piece(self, step: int, folder: Path, size: int) -> Tensor:
        """The rows that another rank wrote in a step that this one has finished too, mapped."""
        dtype, row = self._kinds[step]
        return map_array(folder / self._file(step).name, dtype, (size, *row))

    def flush(self, step: int) -> None:
        """See that a step survives whatever happens."""
        handle, _ = self._open(step)
        with naming(self._file(step)):
            os.fsync(handle)
        self._note({"step": step, "rows": self._rows.get(step, 0), "synced": True}, durable=True)

    def remove_before(self, step: int, keep: set[int]) -> None:
        """Remove files that nobody needs once a step is complete."""
        for old in range(step):
            if old not in keep:
                self._close(old)
                self._file(old).unlink(missing_ok=True)

    def finish(self, num_steps: int) -> None:
        """Give the results their names, and remove all else."""
        for step in range(num_steps):
            self._close(step)
            if step not in self._named:
                self._file(step).unlink(missing_ok=True)
            elif self._file(step).exists():
                self._file(step).replace(self.path / self._named[step])
        self._done = True
        self._note({"done": True}, durable=True)

    # Files #################################################################################

    def _create(self, step: int, kind: tuple[str, tuple[int, ...]], size: int) -> None:
        dtype, row = kind
        with naming(self._file(step)), self._file(step).open("wb") as out:
            out.write(npy_header(dtype, (size, *row)))
            length = num_bytes(dtype, (size, *row))
            if length:
                os.posix_fallocate(out.fileno(), out.tell(), length)  # a full disk is said here
        self._kinds[step] = kind
        self._note({"step": step, "dtype": dtype, "row": row})

    def _open(self, step: int) -> tuple[int, int]:
        if step not in self._files:
            handle = os.open(self._file(step), os.O_RDWR | os.O_CLOEXEC)
            dtype, row = self._kinds[step]
            length = num_bytes(dtype, (self._size(step), *row))
            self._files[step] = handle, os.fstat(handle).st_size - length
        return self._files[step]

    def _close(self, step: int) -> None:
        if step in self._files:
            os.close(self._files.pop(step)[0])

    def _file(self, step: int) -> Path:
        return self.path / f"step-{step}.npy"

    def _note(self, line: dict[str, Any], durable: bool = False) -> None:
        with naming(self.path / JOURNAL):
            self._journal.write(json.dumps(line) + "\n")
            if durable:
                flush(self._journal)
            else:
                self._journal.flush()


def fingerprint(model: torch.nn.Module, content: Iterable[Tensor], **rest: Any) -> dict[str, Any]:
    """The properties that must be the same for an inference to be resumed.

    Args:
        model: All of its parameters count.
        content: Some of the features and edges.
        rest: Further properties by name.
    """
    weights = hashlib.blake2b(digest_size=16)
    weights.update(repr(model).encode())
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            weights.update(f"{name}{value.dtype}{list(value.shape)}".encode())
            weights.update(_bytes(value))
    found = hashlib.blake2b(digest_size=16)
    for tensor in content:
        found.update(_bytes(tensor))
    return {"model": weights.hexdigest(), "graph": found.hexdigest(), **rest}


def _bytes(tensor: Tensor) -> bytes:
    return raw_bytes(tensor.detach().cpu().contiguous()).numpy().tobytes()


def _lines(journal: Path) -> list[dict[str, Any]]:
    """The lines of a journal; the last one may have been cut by a crash."""
    found = []
    for line in _text(journal).splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return [line for line in found if isinstance(line, dict)]


def _text(journal: Path) -> str:
    return journal.read_text(encoding="utf-8", errors="replace")


def _boot() -> str:
    """Changes when the machine starts anew."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return str(math.floor(time.time() - time.monotonic()))
