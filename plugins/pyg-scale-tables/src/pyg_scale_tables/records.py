"""Rows of a table as Arrow record batches, from files of any kind."""

from __future__ import annotations

import abc
import csv
import io
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from pyg_scale_tables.manifest import TableSpec

_READ_AHEAD = 1 << 20  # bytes of a column
_BLOCK = 1 << 20  # bytes of text parsed at a time
BATCH_ROWS = 1 << 16
"""Rows of a batch that is copied."""


class Records(abc.ABC):
    """The rows of one file. They can be read again, by columns.

    Attributes:
        path: The file.
        name: What errors call it.
        schema: Its columns.
        num_rows: Number of its rows.
    """

    path: Path
    name: str
    schema: pa.Schema
    num_rows: int

    @abc.abstractmethod
    def batches(
        self, columns: Sequence[str], rows: int, begin: int = 0
    ) -> Iterator[tuple[int, Any]]:
        """Yield consecutive record batches with some columns, each with its first row.

        Batches have at most ``rows`` rows. They may begin before row ``begin``.

        Raises:
            ValueError: If the file is damaged; names the row, and the column if it is one.
        """

    def row_name(self, row: int) -> str:
        """The name of a row in errors."""
        return f"row {row} of {self.name}"

    def close(self) -> None:  # noqa: B027
        """Let go of the file."""


class ParquetRecords(Records):
    """A Parquet file, read in pieces within its row groups.

    Args:
        path: The file.

    Raises:
        ValueError: If it is no Parquet file, or was cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        try:
            self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_AHEAD)
            self.schema = self._file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{path} is no Parquet file, or was cut short: {in_one_line(error)}"
            ) from None
        self.num_rows = self._file.metadata.num_rows

    def batches(
        self, columns: Sequence[str], rows: int, begin: int = 0
    ) -> Iterator[tuple[int, Any]]:
        if not columns:
            for first in range(begin, self.num_rows, rows):
                size = min(rows, self.num_rows - first)
                yield first, pa.RecordBatch.from_struct_array(pa.array([{}] * size, pa.struct([])))
            return
        groups, first = self._groups_from(begin)
        try:
            for batch in self._file.iter_batches(rows, groups, list(columns)) if groups else ():
                yield first, batch
                first += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            column = self._damaged(columns, rows)
            where = f", column {column!r}" if column is not None else ""
            text = in_one_line(error)
            raise ValueError(f"{self.path}{where}, behind row {first}: {text}") from None
        if first != self.num_rows:
            raise ValueError(f"{self.path} has {first} rows, its end says {self.num_rows}")

    def _groups_from(self, begin: int) -> tuple[list[int], int]:
        """The row groups from that of a row on, and the first row of the first one."""
        metadata, first = self._file.metadata, 0
        for group in range(metadata.num_row_groups):
            size = metadata.row_group(group).num_rows
            if first + size > begin:
                return list(range(group, metadata.num_row_groups)), first
            first += size
        return [], self.num_rows

    def _damaged(self, columns: Sequence[str], rows: int) -> str | None:
        """The first column that alone cannot be read."""
        for column in columns:
            try:
                for _ in self._file.iter_batches(rows, columns=[column], use_threads=False):
                    pass
            except (pa.ArrowException, OSError):
                return column
        return None

    def close(self) -> None:
        self._file.close()


class ArrowRecords(Records):
    """An Arrow IPC file, also called Feather, or an Arrow IPC stream.

    The file is mapped. Its pages are released after every piece, so that they do not count as
    memory of the process for long. Compressed files are decompressed one record batch at a time.

    Args:
        path: The file.

    Raises:
        ValueError: If it is no Arrow file, or was cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        with path.open("rb") as file:
            magic = file.read(6)
            if magic.startswith(b"FEA1"):
                raise ValueError(
                    f"{path} is a Feather file of version 1: write it again with version 2"
                )
            if not magic:
                raise ValueError(f"{path} is no Arrow file: it is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._is_stream = magic != b"ARROW1"
        try:
            self.schema = self._reader().schema
            self.num_rows = sum(batch.num_rows for batch in self._all())
        except (pa.ArrowException, OSError) as error:
            text = in_one_line(error)
            raise ValueError(f"{path} is no Arrow file, or was cut short: {text}") from None

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

    def batches(
        self, columns: Sequence[str], rows: int, begin: int = 0
    ) -> Iterator[tuple[int, Any]]:
        first = 0
        try:
            for batch in self._all():
                chosen = batch.select(list(columns))
                for at in range(max(0, begin - first) // rows * rows, batch.num_rows, rows):
                    part = chosen.slice(at, rows)
                    part.validate(full=True)  # offsets of a damaged file may point anywhere
                    yield first + at, part
                    self._map.madvise(mmap.MADV_DONTNEED)
                first += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path}, behind row {first}: {in_one_line(error)}") from None

    def close(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)  # unmapped once no reader refers to it


class CopiedRecords(ArrowRecords):
    """The copy of a text file, or of what a query gives. Errors name the original.

    Args:
        path: The copy.
        name: What errors call the original. Its rows are counted from 1, as in other text files.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self.name = name

    def row_name(self, row: int) -> str:
        return f"row {row + 1} of {self.name}"


class TableRecords:
    """The rows of a table: those of its files, one after the other.

    Args:
        spec: The table.
        files: Its files, opened.

    Attributes:
        columns: The type of each column; of a dictionary, that of its values.
        num_rows: Number of rows.

    Raises:
        ValueError: If a column is missing, is there twice, or is of another type in another file.
    """

    def __init__(self, spec: TableSpec, files: Sequence[Records]) -> None:
        self.spec, self._files = spec, files
        first = files[0]
        self.columns: dict[str, pa.DataType] = {}
        for column in first.schema:
            if column.name in self.columns:
                raise ValueError(
                    f"table {spec.name!r}: {first.name} has two columns {column.name!r}"
                )
            self.columns[column.name] = _plain(column.type)
        named = [spec.pkey, spec.time_col, *spec.fkeys, *spec.stypes, *spec.drop]
        for name in named:
            if name is not None and name not in self.columns:
                raise ValueError(
                    f"table {spec.name!r}: {first.name} has no column {name!r}, only "
                    f"{', '.join(self.columns)}"
                )
        for other in files[1:]:
            self._compare(first, other)
        self.num_rows = sum(file.num_rows for file in files)

    def _compare(self, first: Records, other: Records) -> None:
        found = {column.name: _plain(column.type) for column in other.schema}
        for name, kind in self.columns.items():
            if name not in found:
                raise ValueError(f"table {self.spec.name!r}: {other.name} has no column {name!r}")
            if found[name] != kind:
                raise ValueError(
                    f"table {self.spec.name!r}, column {name!r} changes its type: {kind} in "
                    f"{first.name}, {found[name]} in {other.name}"
                )

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[tuple[int, Any]]:
        """Yield consecutive record batches, each with the number of its first row.

        Raises:
            ValueError: If a file is damaged; names the table.
        """
        before = 0
        for file in self._files:
            try:
                for first, batch in file.batches(columns, rows):
                    yield before + first, batch
            except ValueError as error:
                raise ValueError(f"table {self.spec.name!r}: {error}") from None
            before += file.num_rows

    def row_name(self, row: int, column: str | None = None) -> str:
        """The name of a row, and of a column, in errors."""
        what = f"table {self.spec.name!r}" + ("" if column is None else f", column {column!r}")
        return f"{what}, {self.place(row)}"

    def place(self, row: int) -> str:
        """The file of a row, and its place there."""
        for file in self._files:
            if row < file.num_rows:
                break
            row -= file.num_rows
        return file.row_name(row)

    def close(self) -> None:
        for file in self._files:
            file.close()


def open_files(
    spec: TableSpec, files: Sequence[Path], originals: Mapping[Path, str] | None = None
) -> TableRecords:
    """Open files that can be read again at little cost.

    Args:
        spec: The table.
        files: Its files.
        originals: Of those that are copies, what errors call the original.

    Raises:
        ValueError: If one is of another kind, damaged, or was cut short; names the table.
    """
    try:
        names = originals or {}
        opened = [
            CopiedRecords(path, names[path]) if path in names else _open(path) for path in files
        ]
    except ValueError as error:
        raise ValueError(f"table {spec.name!r}: {error}") from None
    return TableRecords(spec, opened)


def _open(path: Path) -> Records:
    if path.suffix == ".parquet":
        return ParquetRecords(path)
    if path.suffix in (".arrow", ".feather"):
        return ArrowRecords(path)
    raise ValueError(f"{path}: a table is a .parquet, .arrow, .feather, .csv or .tsv file")


def is_text(path: Path) -> bool:
    """Return True for files that are slow to read, and so are copied once."""
    return bool(re.search(r"\.[ct]sv(\.gz)?$", path.name.lower()))


def copy_text(spec: TableSpec, path: Path, file: Path) -> None:
    """Copy a CSV file to an Arrow file.

    Fields that are empty are missing values. Columns get their types from the first megabyte.

    Raises:
        ValueError: If a field does not fit its column; names the row and the column.
    """
    kinds: dict[str, pa.DataType] = {}
    while True:
        with _text_reader(spec, path, kinds) as reader:
            empty = [each.name for each in reader.schema if pa.types.is_null(each.type)]
            if not empty:
                copy_batches(reader.schema, _text_batches(spec, path, reader), file)
                return
        kinds |= dict.fromkeys(empty, pa.string())


def _text_reader(spec: TableSpec, path: Path, kinds: dict[str, pa.DataType]) -> Any:
    try:
        source = pa.input_stream(path, compression="detect")
        return pa.csv.open_csv(
            source,
            pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
            pa.csv.ParseOptions(delimiter=_delimiter(path), newlines_in_values=True),
            pa.csv.ConvertOptions(
                column_types=kinds, strings_can_be_null=True, quoted_strings_can_be_null=False
            ),
        )
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"table {spec.name!r}: {path} cannot be read as CSV: {in_one_line(error)}"
        ) from None


def _text_batches(spec: TableSpec, path: Path, reader: Any) -> Iterator[Any]:
    read, looked = 0, False
    try:
        for batch in reader:
            if not looked and _has_line_break(batch):
                _require_closed_quotes(spec, path)
                looked = True
            yield batch
            read += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        text = in_one_line(error)
        number = re.search(r"CSV column #(\d+)", text)
        column = (
            f", column {reader.schema.names[int(number[1])]!r} changes its type" if (number) else ""
        )
        raise ValueError(
            f"table {spec.name!r}{column}: {path}, behind row {read}: {text}"
        ) from None


def _delimiter(path: Path) -> str:
    return "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else ","


def _has_line_break(batch: pa.RecordBatch) -> bool:
    return any(
        pc.any(pc.match_substring(column, "\n")).as_py()
        for column in batch.columns
        if pa.types.is_string(column.type)
    )


def _require_closed_quotes(spec: TableSpec, path: Path) -> None:
    """Refuse a file in which text follows a quoted field, where Arrow would join two rows.

    A quotation mark that is left open makes a field with a line break, so a file without one need
    not be read for it.

    Raises:
        ValueError: If so; names the row.
    """
    row = -1  # the header comes first
    limit = csv.field_size_limit(_BLOCK)  # Arrow refuses longer ones
    try:
        with pa.input_stream(path, compression="detect") as source:
            text = io.TextIOWrapper(source, "utf-8", "surrogateescape", newline="")
            for _ in csv.reader(text, delimiter=_delimiter(path), strict=True):
                row += 1
    except csv.Error as error:
        raise ValueError(
            f"table {spec.name!r}: {path}, behind row {max(row, 0)}: is a quotation mark not "
            f"closed? ({error})"
        ) from None
    finally:
        csv.field_size_limit(limit)


def copy_batches(schema: pa.Schema, batches: Any, file: Path) -> None:
    """Write record batches to an Arrow file, in batches of few rows."""
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, schema) as writer:
        for batch in batches:
            for begin in range(0, batch.num_rows, BATCH_ROWS):
                writer.write_batch(batch.slice(begin, BATCH_ROWS))


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def in_one_line(error: BaseException) -> str:
    """The text of an error."""
    return " ".join(str(error).split())
