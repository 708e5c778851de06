"""Tables that are slow to read, copied once to one plain file a column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from pyg_scale.convert.array_file import Array, ArrayReader, write_all
from pyg_scale.convert.base import Workspace
from pyg_scale.convert.ids import IdMap
from pyg_scale.convert.table import Column, Table
from pyg_scale.files.place import flush, naming


class CopiedTable(Table):
    """Columns in ``.npy`` files.

    Args:
        original: What was copied.
        files: The file of each column.
    """

    positions = True

    def __init__(self, original: Table, files: Mapping[str, Path]) -> None:
        self.path = original.path
        self._original = original
        self._arrays = {name: ArrayReader(file) for name, file in files.items()}
        self.columns = {
            name: Column(str(array.dtype), tuple(array.shape[1:]))
            for name, array in self._arrays.items()
        }
        self.num_rows = next(iter(self._arrays.values())).shape[0]

    def read(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[Array, ...]]:
        total = self.num_rows or 0
        for first in range(begin, total, rows):
            last = min(total, first + rows)
            yield tuple(self._arrays[name].rows(first, last) for name in names)

    def row_name(self, row: int) -> str:
        return self._original.row_name(row)

    @property
    def files(self) -> list[Path]:
        return self._original.files

    def close(self) -> None:
        for array in self._arrays.values():
            array.close()


def copy_table(
    table: Table,
    key: str,
    maps: Mapping[str, IdMap],
    skip: Sequence[str],
    work: Workspace,
    rows: int,
) -> CopiedTable:
    """Copy the columns of a table, some of them as node numbers; done once.

    Args:
        table: The table.
        key: What its files are called.
        maps: The ids of columns that hold ids.
        skip: Columns to leave out.
        work: Where to.
        rows: Rows to read at a time.

    Raises:
        ValueError: If an id is unknown.
    """
    names = [name for name in table.columns if name not in skip]
    files = {name: work.folder / f"{key}-{i}.npy" for i, name in enumerate(names)}
    if names:
        work.once(f"copy {table.path.name} {key}", lambda: _copy(table, files, maps, work, rows))
    return CopiedTable(table, files)


def _copy(
    table: Table, files: Mapping[str, Path], maps: Mapping[str, IdMap], work: Workspace, rows: int
) -> int:
    columns = [
        _Growing(file, "i8" if name in maps else table.columns[name].dtype, table.columns[name].row)
        for name, file in files.items()
    ]
    at = 0
    try:
        with work.progress(f"Reading {table.path.name}", table.num_rows, "rows") as bar:
            for chunk in table.read(list(files), 0, rows):
                for name, values, column in zip(files, chunk, columns):
                    if name in maps:
                        values = maps[name].numbers(values, table, at)
                    column.append(values)
                at += len(chunk[0])
                bar.update(len(chunk[0]))
        for column in columns:
            column.finish()
    finally:
        for column in columns:
            column.close()
    return at


class _Growing:
    """A ``.npy`` file whose length is known only in the end: NumPy's headers leave room for it."""

    def __init__(self, file: Path, dtype: str, row: tuple[int, ...]) -> None:
        self._dtype, self._row, self._rows = np.dtype(dtype), row, 0
        self._path, self._file = file, file.open("wb")
        self._header()
        self._end = self._file.tell()

    def append(self, values: Array) -> None:
        array = np.ascontiguousarray(values, dtype=self._dtype)
        self._end = write_all(self._file.fileno(), array, self._end, self._path)
        self._rows += len(array)

    def finish(self) -> None:
        self._file.seek(0)
        self._header()
        with naming(self._path):
            flush(self._file)

    def close(self) -> None:
        self._file.close()

    def _header(self) -> None:
        header: dict[str, Any] = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False}
        with naming(self._path):
            npy.write_array_header_1_0(self._file, {**header, "shape": (self._rows, *self._row)})
            self._file.flush()
