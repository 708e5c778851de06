"""Folds appended rows into a new base, beside the graph, and exchanges the two in one step."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from os import PathLike
from pathlib import Path

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.place import Lock, replace_file, restore, sync, take_place, try_lock
from pyg_scale.store.directory.appending import TIMEOUT, RowFiles
from pyg_scale.store.directory.reader import GraphDirectory
from pyg_scale.store.directory.saving import save, saved_as
from pyg_scale.store.directory.snapshots import (
    FOLDER,
    HEAD,
    LOG,
    Head,
    base_number,
    columns_of,
    log_column,
    read_rows,
)
from pyg_scale.store.directory.writer import refused

_AT_ONCE = 1 << 24  # bytes of appended rows that are copied at a time


def compact(path: str | PathLike[str], *, timeout: float = TIMEOUT) -> int:
    """Fold the appended rows of a graph directory into its base.

    The newest snapshot is written as a base of its own, which is the same, byte for byte, as if the
    whole graph had been saved. Meanwhile others read and append: what they append is carried over
    before the two directories change places in one step. If the process dies, the directory is
    either the old one or the new one. Call it in a thread or process of its own, or run
    ``pyg-scale compact``.

    Graphs that are open stay as they are: their files are kept until nobody has them open, and
    removed by a later compaction. Snapshots before the folded one can no longer be opened anew.

    It takes the disk space of the graph, and in memory 8 to 16 bytes per edge of one edge type.

    Args:
        path: A graph directory of one part.
        timeout: Seconds to wait while another process appends, at the end.

    Returns:
        The id of the snapshot that is the base now.

    Raises:
        GraphDirectoryError: If the directory is damaged, was replaced by another graph meanwhile,
            or the disk is full; or another process compacts it, or appends for longer than
            ``timeout``. It is then unchanged.
        ValueError: If ``timeout`` is not 0 or more.
    """
    if not timeout >= 0:
        raise ValueError(f"timeout must be 0 or more seconds (got {timeout})")
    path = Path(path).resolve()
    GraphDirectory(path)  # before a lock beside it
    beside = path.with_name(f".{path.name}.compact")
    with refused(path):
        working = Lock(path.with_name(f"{path.name}.compact"))
    try:
        with refused(path):
            _remove_unused(path, beside)
        directory = GraphDirectory(path)
        if directory.delta is not None:
            _fold(directory, path, beside, timeout)
        return directory.snapshot
    finally:
        working.release()


def _fold(directory: GraphDirectory, path: Path, beside: Path, timeout: float) -> None:
    try:
        graph, options = saved_as(directory)
        save(graph, beside, overwrite=True, **options)
        with refused(path):
            lock = Lock(path, timeout)
        try:
            with refused(path):
                restore(path)
            _carry_over(GraphDirectory(path), directory, beside)
            with refused(path):
                take_place(beside, path)
                sync(path.parent)
        finally:
            lock.release()
    finally:
        directory.let_go()
        with refused(beside):
            _remove_unused(path, beside)


def _carry_over(now: GraphDirectory, folded: GraphDirectory, beside: Path) -> None:
    """Write what was appended since a snapshot was folded to the new base.

    Raises:
        GraphDirectoryError: If the graph was replaced or changed otherwise, or the disk is full.
    """
    is_same = now.head.lineage == folded.head.lineage and now.head.base == folded.head.base
    if not is_same or now.base_meta != folded.base_meta:
        raise GraphDirectoryError(
            f"{now.path} was changed while it was compacted, other than by appending: again, please"
        )
    meta, head = GraphDirectory(beside).base_meta, now.head
    new = Head(folded.snapshot, head.newest, head.lineage, base_number(meta), head.counts)
    before = {c.name: c for c in columns_of(now.base_meta, head.counts)}
    columns = list(columns_of(meta, head.counts))
    if new.newest > new.base:
        before[LOG] = log_column(meta, head.newest - head.base)
        columns.append(log_column(meta, new.newest - new.base))
    files = RowFiles(beside, new.files)
    for column in columns:
        first = before[column.name].rows - column.rows
        step = max(1, _AT_ONCE // max(1, column.row_bytes))
        for begin in range(0, column.rows, step):
            count = min(step, column.rows - begin)
            rows = read_rows(now.file, now.path, before[column.name], first + begin, count)
            files.extend(column, rows)
    with refused(beside / HEAD):
        files.make_folder(beside / FOLDER)
        files.flush()
        replace_file(beside / HEAD, new.to_json())


def _remove_unused(path: Path, beside: Path) -> None:
    """Remove what compactions left, unless somebody has it open."""
    old = f".{glob.escape(path.name)}.before-{'[0-9a-f]' * 8}"
    for folder in [beside, *path.parent.glob(old)]:
        if not folder.is_dir():
            continue
        if not _is_open(folder):
            shutil.rmtree(folder)
        elif folder == beside:
            folder.rename(path.with_name(f".{path.name}.before-{secrets.token_hex(4)}"))


def _is_open(folder: Path) -> bool:
    """Return True if a process has a graph directory open."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return not try_lock(handle, folder)
    except OSError:  # nobody can lock here: mapped files stay until they are unmapped
        return False
    finally:
        os.close(handle)
