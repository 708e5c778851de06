"""Edge lists and tables of nodes in Parquet and Arrow files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyg_scale.convert.table import Array, Column, Table
from pyg_scale.convert.tables import Tables
from pyg_scale_tables.records import ArrowRecords, ParquetRecords

_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


class ColumnarTable(Table):
    """A file of typed columns.

    Args:
        path: The file.
        columns: The columns to read, in this order; all by default.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it has another format, or lacks a column.
        TypeError: If a column has neither numbers nor text.
    """

    records: type[ParquetRecords | ArrowRecords]

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        self._records = self.records(self.path)
        self.num_rows, schema = self._records.num_rows, self._records.schema
        names = schema.names if columns is None else list(columns)
        if unknown := [name for name in names if name not in schema.names]:
            raise ValueError(f"{path} has no column {unknown[0]!r}, only {', '.join(schema.names)}")
        twice = [name for name in names if schema.names.count(name) > 1 or names.count(name) > 1]
        if twice:
            raise ValueError(
                f"{path}: every column must have its own name (got {twice[0]!r} twice)"
            )
        self.columns = {name: self._column(name, schema.field(name).type) for name in names}

    def _column(self, name: str, kind: pa.DataType) -> Column:
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if any(test(kind) for test in _TEXTS):
            return Column("text")
        row: tuple[int, ...] = ()
        if any(test(kind) for test in _LISTS):
            row, kind = (self._length(name, kind),), kind.value_type
        if pa.types.is_boolean(kind):
            return Column("bool", row)
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            return Column(str(np.dtype(kind.to_pandas_dtype())), row)
        raise TypeError(
            f"{self.path}, column {name!r} holds {kind}, neither numbers nor text: leave it out "
            "with columns=[...]"
        )

    def _length(self, name: str, kind: pa.DataType) -> int:
        """The length of a column's lists, given by the first one."""
        if pa.types.is_fixed_size_list(kind):
            return kind.list_size
        for _, batch in self._records.batches([name], 1):
            if batch.num_rows:
                value = batch.column(0)[0]
                return len(value) if value.is_valid else 0
        return 0

    def read(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[Array, ...]]:
        """Yield columns of consecutive rows.

        Raises:
            ValueError: If a value is missing, or a list has another length; names the row.
        """
        for first, batch in self._records.batches(list(dict.fromkeys(names)), rows, begin):
            for skip in range(max(0, begin - first), batch.num_rows, rows):
                part = batch.slice(skip, rows)
                yield tuple(self._array(name, part.column(name), first + skip) for name in names)

    def _array(self, name: str, values: Any, begin: int) -> Array:
        column = self.columns[name]
        if values.null_count:
            row = values.is_null().to_numpy(zero_copy_only=False).argmax()
            raise ValueError(f"{self.row_name(begin + row)} has no value in column {name!r}")
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if column.dtype == "text":
            return byte_strings(
                values, lambda row: f"{self.row_name(begin + row)}, column {name!r},"
            )
        if column.row:
            return self._lists(name, values, begin)
        return np.array(values.to_numpy(zero_copy_only=False), column.dtype)

    def _lists(self, name: str, values: Any, begin: int) -> Array:
        column = self.columns[name]
        (length,) = column.row
        if not pa.types.is_fixed_size_list(values.type):
            lengths = np.diff(values.offsets.to_numpy())
            if (lengths != length).any():
                row = int((lengths != length).argmax())
                raise ValueError(
                    f"{self.row_name(begin + row)} has {lengths[row]} numbers in column {name!r}, "
                    f"expected {length} as in the first row"
                )
        flat = values.flatten()
        if flat.null_count:
            row = int(flat.is_null().to_numpy(zero_copy_only=False).argmax()) // length
            raise ValueError(
                f"{self.row_name(begin + row)} lacks a number in the list of column {name!r}"
            )
        numbers = np.array(flat.to_numpy(zero_copy_only=False), column.dtype)
        return numbers.reshape(len(values), length)

    def close(self) -> None:
        self._records.close()


class ParquetTable(ColumnarTable):
    """A Parquet file."""

    records = ParquetRecords


class ArrowTable(ColumnarTable):
    """An Arrow IPC file, also called Feather, or an Arrow IPC stream."""

    records = ArrowRecords


class _ColumnarReader(Tables):
    table_options = frozenset({"columns"})
    table: type[ColumnarTable]

    def __init__(self, source: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(source, **options)

    @classmethod
    def open_edges(cls, source: str, options: Mapping[str, Any]) -> Table:
        """The edge list in a file."""
        return cls.table(source, **options)

    @classmethod
    def open_nodes(cls, source: str, options: Mapping[str, Any]) -> Table:
        """The table in a file."""
        return cls.table(source, **options)


class ParquetReader(_ColumnarReader):
    """Reads ``edges.parquet`` with sources, destinations, and any attributes of edges.

    Args:
        source: The file.
        **options: Options of :class:`pyg_scale.convert.tables.Tables` and :class:`ParquetTable`.
    """

    table = ParquetTable


class ArrowReader(_ColumnarReader):
    """Reads ``edges.arrow`` or ``edges.feather``, as :class:`ParquetReader`.

    Args:
        source: The file.
        **options: Options of :class:`pyg_scale.convert.tables.Tables` and :class:`ArrowTable`.
    """

    table = ArrowTable


def byte_strings(values: Any, name: Callable[[int], str]) -> Array:
    """An Arrow array of text without nulls as a NumPy array of dtype ``S``, in UTF-8.

    Args:
        values: The array.
        name: Names a row of it.

    Raises:
        ValueError: If a text ends in a NUL byte, which NumPy does not tell from a shorter text.
    """
    if len(values) == 0:
        return np.empty(0, "S1")
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    packed = pc.cast(values, pa.large_binary())
    _, offsets, data = packed.buffers()
    ends = np.frombuffer(offsets, np.int64)[packed.offset : packed.offset + len(packed) + 1]
    lengths = np.diff(ends)
    width = max(1, int(lengths.max()))
    out = np.zeros((len(packed), width), np.uint8)
    if ends[-1] > ends[0]:
        inside = np.arange(width) < lengths[:, None]
        letters = np.frombuffer(data, np.uint8)
        out[inside] = letters[ends[0] : ends[-1]]
        wrong = (lengths > 0) & (letters[np.maximum(ends[1:], 1) - 1] == 0)
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(f"{name(row)} ends in a NUL byte: such text cannot be told apart")
    return out.reshape(-1).view(f"S{width}")
