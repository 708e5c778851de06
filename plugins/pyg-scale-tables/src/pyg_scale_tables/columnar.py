"""Edge lists and tables of nodes in Parquet and Arrow files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pyg_scale.convert.table import Array, Column, Table
from pyg_scale.convert.tables import Tables

_BUFFER = 1 << 20  # bytes of a column to read ahead
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

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        schema = self._open()
        names = schema.names if columns is None else list(columns)
        if unknown := [name for name in names if name not in schema.names]:
            raise ValueError(f"{path} has no column {unknown[0]!r}, only {', '.join(schema.names)}")
        twice = [name for name in names if schema.names.count(name) > 1 or names.count(name) > 1]
        if twice:
            raise ValueError(
                f"{path}: every column must have its own name (got {twice[0]!r} twice)"
            )
        self.columns = {name: self._column(name, schema.field(name).type) for name in names}

    def _open(self) -> pa.Schema:
        raise NotImplementedError

    def _batches(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[int, Any]]:
        """Yield consecutive record batches, each with its first row.

        They may include rows before ``begin``, and batches may have more than ``rows``.
        """
        raise NotImplementedError

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
        for _, batch in self._batches([name], 0, 1):
            if batch.num_rows:
                value = batch.column(0)[0]
                return len(value) if value.is_valid else 0
        return 0

    def read(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[Array, ...]]:
        """Yield columns of consecutive rows.

        Raises:
            ValueError: If a value is missing, or a list has another length; names the row.
        """
        for first, batch in self._batches(list(dict.fromkeys(names)), begin, rows):
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
            return byte_strings(values)
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


class ParquetTable(ColumnarTable):
    """A Parquet file, read in pieces within its row groups."""

    def _open(self) -> pa.Schema:
        try:
            self._file = pq.ParquetFile(self.path, pre_buffer=False, buffer_size=_BUFFER)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path} is no Parquet file: {error}") from None
        self.num_rows = self._file.metadata.num_rows
        return self._file.schema_arrow

    def _batches(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[int, Any]]:
        group, first = 0, 0
        metadata = self._file.metadata
        while group < metadata.num_row_groups:
            size = metadata.row_group(group).num_rows
            if first + size > begin:
                break
            group, first = group + 1, first + size
        groups = list(range(group, metadata.num_row_groups))
        batches = self._file.iter_batches(rows, row_groups=groups, columns=names, use_threads=False)
        for batch in batches if groups else ():
            yield first, batch
            first += batch.num_rows

    def close(self) -> None:
        self._file.close()


class ArrowTable(ColumnarTable):
    """An Arrow IPC file, also called Feather, or an Arrow IPC stream.

    The file is mapped. Its pages are released after every chunk, so that they do not count as
    memory of the process for long. Compressed files are decompressed one record batch at a time.
    """

    def _open(self) -> pa.Schema:
        with self.path.open("rb") as file:
            magic = file.read(6)
            if magic.startswith(b"FEA1"):
                raise ValueError(
                    f"{self.path} is a Feather file of version 1: write it again with version 2"
                )
            if not magic:
                raise ValueError(f"{self.path} is no Arrow file: it is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._is_stream = magic != b"ARROW1"
        try:
            schema = self._reader().schema
            self.num_rows = sum(batch.num_rows for batch in self._all())
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path} is no Arrow file: {error}") from None
        return schema

    def _reader(self) -> Any:
        source = pa.BufferReader(pa.py_buffer(self._map))
        # included_fields, which would choose columns, copies whole batches
        options = pa.ipc.IpcReadOptions(use_threads=False)
        if self._is_stream:
            return pa.ipc.open_stream(source, options=options)
        return pa.ipc.open_file(source, options=options)

    def _all(self) -> Iterator[Any]:
        reader = self._reader()
        if self._is_stream:
            yield from reader
        else:
            yield from map(reader.get_batch, range(reader.num_record_batches))

    def _batches(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[int, Any]]:
        first = 0
        try:
            for batch in self._all():
                for at in range(max(0, begin - first) // rows * rows, batch.num_rows, rows):
                    part = batch.select(names).slice(at, rows)
                    part.validate(full=True)  # offsets of a damaged file may point anywhere
                    yield first + at, part
                    self._map.madvise(mmap.MADV_DONTNEED)
                first += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path}, behind row {first}: {error}") from None

    def close(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)  # unmapped once no reader refers to it


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


def byte_strings(values: Any) -> Array:
    """An Arrow array of text without nulls as a NumPy array of dtype ``S``, in UTF-8."""
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
        out[inside] = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
    return out.reshape(-1).view(f"S{width}")
