"""Checksums of files, several of them at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from tqdm.auto import tqdm

from pyg_scale.files.place import flush
from pyg_scale.ops.library import num_threads
from pyg_scale.store.directory.meta import FileMeta

_CHUNK = 1 << 22


def checksums(
    folder: Path, names: Sequence[str], known: Mapping[str, FileMeta]
) -> dict[str, FileMeta]:
    """Sizes and CRC-32 of files, which are flushed to the disk.

    Args:
        folder: The folder of the files.
        names: Their paths in it.
        known: Results that are already known, whose files are not read again.

    Raises:
        OSError: If the disk is full or fails.
    """
    total = sum((folder / name).stat().st_size for name in names if name not in known)
    with _bar("Checksums", total) as bar:

        def one(name: str) -> FileMeta:
            with (folder / name).open("rb+") as file:
                found = known.get(name)
                if found is None:
                    found = file_meta(file, bar.update)
                flush(file)
            return found

        return dict(zip(names, _map(one, names), strict=True))


def find_altered(open_file: Callable[[str], BinaryIO], files: Mapping[str, FileMeta]) -> str | None:
    """The first file whose checksum differs; ``None`` if there is none.

    Args:
        open_file: Opens a file by its name.
        files: The expected size and checksum of each.

    Raises:
        OSError: If one cannot be read.
    """
    with _bar("Checksums", sum(file.bytes for file in files.values())) as bar:

        def one(name: str) -> FileMeta:
            with open_file(name) as file:
                return file_meta(file, bar.update)

        found = _map(one, list(files))
    return next((name for name, meta in zip(files, found) if files[name] != meta), None)


def file_meta(file: BinaryIO, progress: Callable[[int], object]) -> FileMeta:
    """Size and CRC-32 of the rest of an open file.

    Raises:
        OSError: If it cannot be read.
    """
    crc, size = 0, 0
    while chunk := file.read(_CHUNK):
        crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        progress(len(chunk))
    return FileMeta(size, crc)


def _bar(what: str, total: int) -> tqdm:
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, delay=2)


def _map(function: Callable[[str], FileMeta], names: Sequence[str]) -> list[FileMeta]:
    """``map`` with threads; zlib and reads release the interpreter's lock."""
    if len(names) < 2:
        return [function(name) for name in names]
    with ThreadPoolExecutor(min(num_threads(), 8, len(names)), "pyg_scale-checksum") as pool:
        return list(pool.map(function, names))
