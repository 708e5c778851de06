"""Edge lists and tables of nodes in Parquet files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pyg_scale.convert.table import Array, Column, Table
from pyg_scale.convert.tables import Tables

_BUFFER = 1 << 20  # bytes of a column that are read ahead
_TEXTS = [
    getattr(pa.types, name)  # views, as Polars writes them, came with pyarrow 16
    for name in ("is_string", "is_large_string", "is_string_view")
    if hasattr(pa.types, name)
]
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


class ParquetTable(Table):
    """A Parquet file, read in pieces.

    Args:
        path: The file.
        columns: Which columns to take, in which order; all if ``None``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no Parquet file, or has no such column.
        TypeError: If a column holds neither numbers nor text.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        try:
            self._file = pq.ParquetFile(self.path, pre_buffer=False, buffer_size=_BUFFER)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} is no Parquet file: {error}") from None
        self.num_rows = self._file.metadata.num_rows
        schema = self._file.schema_arrow
        names = schema.names if columns is None else list(columns)
        if unknown := [name for name in names if name not in schema.names]:
            raise ValueError(f"{path} has no column {unknown[0]!r}, only {', '.join(schema.names)}")
        self.columns = {}
        for name in names:
            self.columns[name] = self._column(name, schema.field(name).type)

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
        if pa.types.is_fixed_size_list(kind):
            return kind.list_size
        for batch in self._file.iter_batches(1, columns=[name], use_threads=False):
            value = batch.column(0)[0]
            return len(value) if value.is_valid else 0
        return 0

    def read(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[Array, ...]]:
        """Yield columns of consecutive rows.

        Raises:
            ValueError: If a value is missing, or a list of another length; names the row.
        """
        group, first = 0, 0
        metadata = self._file.metadata
        while group < metadata.num_row_groups:
            size = metadata.row_group(group).num_rows
            if first + size > begin:
                break
            group, first = group + 1, first + size
        groups = list(range(group, metadata.num_row_groups))
        batches = self._file.iter_batches(
            rows, row_groups=groups, columns=list(dict.fromkeys(names)), use_threads=False
        )
        for batch in batches if groups else ():
            skip = min(batch.num_rows, max(0, begin - first))
            at, first = first + skip, first + batch.num_rows
            if skip < batch.num_rows:
                part = batch.slice(skip)
                yield tuple(self._array(name, part.column(name), at) for name in names)

    def _array(self, name: str, values: Any, begin: int) -> Array:
        column = self.columns[name]
        if values.null_count:
            row = values.is_null().to_numpy(zero_copy_only=False).argmax()
            raise ValueError(f"{self.row_name(begin + row)} has no value in column {name!r}")
        if column.dtype == "text":
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            texts = values.to_numpy(zero_copy_only=False)
            return np.array([text.encode() for text in texts], dtype="S")
        if column.row:
            return self._lists(name, values, begin)
        return np.ascontiguousarray(values.to_numpy(zero_copy_only=False), column.dtype)

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
        numbers = np.ascontiguousarray(flat.to_numpy(zero_copy_only=False), column.dtype)
        return numbers.reshape(len(values), length)

    def close(self) -> None:
        self._file.close()


class ParquetReader(Tables):
    """``edges.parquet``: sources, destinations, and any attributes of edges.

    Args:
        source: The file.
        **options: Of :class:`pyg_scale.convert.tables.Tables` and :class:`ParquetTable`.
    """

    table_options = frozenset({"columns"})

    def __init__(self, source: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(source, **options)

    @classmethod
    def open_edges(cls, source: str, options: Mapping[str, Any]) -> Table:
        """The edge list in a file."""
        return ParquetTable(source, **options)

    @classmethod
    def open_nodes(cls, source: str, options: Mapping[str, Any]) -> Table:
        """The table in a file."""
        return ParquetTable(source, **options)
