"""The folders of a run: one for each checkpoint, there as a whole or not at all.

A checkpoint is written under a name that begins with a dot, flushed, and renamed. Its
``manifest.json`` has the size and checksum of every file. Folders are numbered in the order in
which they were written: after going back to an older one, what follows from it is the newest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyg_scale.errors import CheckpointError
from pyg_scale.files.place import sync
from pyg_scale.train.storage import FORMAT, checksum, read_json, write_json

MANIFEST = "manifest.json"
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_WRITING, _REMOVING = ".writing-", ".removing-"


@dataclass(frozen=True, order=True)
class Folder:
    """A checkpoint that was written."""

    number: int
    step: int
    path: Path


def written(folder: Path) -> list[Folder]:
    """The checkpoints of a run, the newest first, whether damaged or not."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            found.append(Folder(int(match[1]), int(match[2]), path))
    return sorted(found, reverse=True)


def begin(folder: Path, step: int) -> Path:
    """Make a folder to write to; what a killed run left half written goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(path)
    number = max((each.number for each in written(folder)), default=0) + 1
    made = folder / f"{_WRITING}{number:06d}-step-{step}"
    made.mkdir()
    return made


def commit(made: Path, world_size: int, files: dict[str, dict[str, int]]) -> Path:
    """Make what was written a checkpoint.

    Args:
        made: What :func:`begin` made.
        world_size: How many ranks wrote to it.
        files: Size and checksum of each file, all of them on disk.

    Returns:
        Where it is.
    """
    final = made.with_name(made.name.removeprefix(_WRITING))
    match = _NAME.fullmatch(final.name)
    assert match is not None
    content = {
        "format": FORMAT,
        "number": int(match[1]),
        "step": int(match[2]),
        "world_size": world_size,
        "files": files,
    }
    write_json(made / MANIFEST, {**content, "checksum": _checksum(content)})
    sync(made)
    os.rename(made, final)
    sync(final.parent)
    return final


def staying(folder: Path, keep_last: int, damaged: Collection[str]) -> list[str] | None:
    """Names of the checkpoints that are to stay beside one more; ``None`` if none is to go.

    Args:
        folder: Of the run.
        keep_last: How many to keep.
        damaged: Names of those that do not count.
    """
    whole = [each.path.name for each in written(folder) if each.path.name not in damaged]
    return whole[: keep_last - 1] if len(whole) >= keep_last else None


def prune(folder: Path, keep_last: int, damaged: Collection[str]) -> None:
    """Remove all but the last checkpoints.

    Args:
        folder: Of the run.
        keep_last: How many to keep.
        damaged: Names of those that do not count; they go with what is older than the last ones.
    """
    found = written(folder)
    whole = [each for each in found if each.path.name not in damaged]
    if len(whole) <= keep_last:
        return
    for old in found[found.index(whole[keep_last - 1]) + 1 :]:
        hidden = old.path.with_name(f"{_REMOVING}{old.path.name}")
        os.rename(old.path, hidden)  # half removed, it would look damaged
        shutil.rmtree(hidden)


def manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: If it is damaged or of another version.
    """
    found = read_json(path / MANIFEST)
    check = found.pop("checksum", None)
    if found.get("format") != FORMAT:
        raise CheckpointError(
            f"{path / MANIFEST} has format {found.get('format')!r}, this is format {FORMAT}"
        )
    if check != _checksum(found):
        raise CheckpointError(f"{path / MANIFEST} was altered")
    return found


def verify(path: Path, share: int = 0, shares: int = 1) -> None:
    """Read some files of a checkpoint, and compare sizes and checksums.

    Args:
        path: The checkpoint.
        share: Which files: every ``shares``-th, from this one on.
        shares: How many share the work.

    Raises:
        CheckpointError: If something is missing or damaged; says which file.
    """
    files = manifest(path)["files"]
    compare(path, {name: files[name] for name in sorted(files)[share::shares]})


def compare(path: Path, files: Mapping[str, dict[str, int]]) -> None:
    """Read files, and compare them with their sizes and checksums.

    Raises:
        CheckpointError: If one is missing or damaged; says which.
    """
    for name in files:
        try:
            found = checksum(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error}") from error
        if found != files[name]:
            raise CheckpointError(f"{path / name} is damaged: its size or checksum is another")


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
