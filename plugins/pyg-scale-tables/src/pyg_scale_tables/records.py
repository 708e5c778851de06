"""Rows of a table as Arrow record batches, from files of any kind or from DuckDB."""

from __future__ import annotations

import abc
import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from pyg_scale_tables.manifest import Manifest, TableSpec

_READ_AHEAD = 1 << 20  # bytes of a column
_BLOCK = 1 << 20  # bytes of text parsed at a time
_ROWS = 1 << 16  # rows of a batch that is copied


class Records(abc.ABC):
    """The rows of one file. They can be read again, by columns.

    Attributes:
        path: The file.
        schema: Its columns.
        num_rows: Number of its rows.
    """

    path: Path
    schema: pa.Schema
    num_rows: int

    @abc.abstractmethod
    def batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """Yield all rows, with some columns, at most ``rows`` at a time.

        Raises:
            ValueError: If the file is damaged; names the row, and the column if it is one.
        """

    def close(self) -> None:  # noqa: B027
        """Let go of the file."""


class ParquetRecords(Records):
    """A Parquet file.

    Args:
        path: The file.

    Raises:
        ValueError: If it is no Parquet file, or was cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_AHEAD)
            self.schema = self._file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{path} is no Parquet file, or was cut short: {_line(error)}"
            ) from None
        self.num_rows = self._file.metadata.num_rows

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        read = 0
        try:
            if not columns:
                for begin in range(0, self.num_rows, rows):
                    size = min(rows, self.num_rows - begin)
                    yield pa.RecordBatch.from_struct_array(pa.array([{}] * size, pa.struct([])))
                return
            for batch in self._file.iter_batches(rows, columns=list(columns), use_threads=True):
                yield batch
                read += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            column = self._damaged(columns, rows)
            where = f", column {column!r}" if column is not None else ""
            raise ValueError(f"{self.path}{where}, behind row {read}: {_line(error)}") from None
        if read != self.num_rows:
            raise ValueError(f"{self.path} has {read} rows, its end says {self.num_rows}")

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
    """An Arrow IPC file or stream, mapped.

    Args:
        path: The file.

    Raises:
        ValueError: If it is no Arrow file, or was cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            magic = file.read(6)
            if not magic:
                raise ValueError(f"{path} is no Arrow file: it is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._is_stream = magic != b"ARROW1"
        try:
            self.schema = self._reader().schema
            self.num_rows = sum(batch.num_rows for batch in self._all())
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} is no Arrow file, or was cut short: {_line(error)}") from None

    def _reader(self) -> Any:
        source = pa.BufferReader(pa.py_buffer(self._map))
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

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        read = 0
        try:
            for batch in self._all():
                chosen = batch.select(list(columns))
                chosen.validate(full=True)  # offsets of a damaged file may point anywhere
                for begin in range(0, batch.num_rows, rows):
                    yield chosen.slice(begin, rows)
                read += batch.num_rows
                self._map.madvise(mmap.MADV_DONTNEED)  # not to count as memory for long
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path}, behind row {read}: {_line(error)}") from None

    def close(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)  # unmapped once no reader refers to it


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
                    f"table {spec.name!r}: {first.path} has two columns {column.name!r}"
                )
            self.columns[column.name] = _plain(column.type)
        named = [spec.pkey, spec.time_col, *spec.fkeys, *spec.stypes, *spec.drop]
        for name in named:
            if name is not None and name not in self.columns:
                raise ValueError(
                    f"table {spec.name!r}: {first.path} has no column {name!r}, only "
                    f"{', '.join(self.columns)}"
                )
        for other in files[1:]:
            self._compare(first, other)
        self.num_rows = sum(file.num_rows for file in files)

    def _compare(self, first: Records, other: Records) -> None:
        found = {column.name: _plain(column.type) for column in other.schema}
        for name, kind in self.columns.items():
            if name not in found:
                raise ValueError(f"table {self.spec.name!r}: {other.path} has no column {name!r}")
            if found[name] != kind:
                raise ValueError(
                    f"table {self.spec.name!r}, column {name!r} changes its type: {kind} in "
                    f"{first.path}, {found[name]} in {other.path}"
                )

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[tuple[int, Any]]:
        """Yield consecutive record batches, each with the number of its first row.

        Raises:
            ValueError: If a file is damaged; names the table.
        """
        begin = 0
        for file in self._files:
            try:
                for batch in file.batches(columns, rows):
                    yield begin, batch
                    begin += batch.num_rows
            except ValueError as error:
                raise ValueError(f"table {self.spec.name!r}: {error}") from None

    def row_name(self, row: int, column: str | None = None) -> str:
        """The name of a row, and of a column, in errors."""
        what = f"table {self.spec.name!r}" + ("" if column is None else f", column {column!r}")
        for file in self._files:
            if row < file.num_rows:
                break
            row -= file.num_rows
        return f"{what}, row {row} of {file.path}"

    def close(self) -> None:
        for file in self._files:
            file.close()


def open_files(spec: TableSpec, files: Sequence[Path]) -> TableRecords:
    """Open files that can be read again at little cost.

    Raises:
        ValueError: If there is one of another kind; says which kinds there are.
    """
    return TableRecords(spec, [_open(path) for path in files])


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
        with _text_reader(path, kinds) as reader:
            empty = [each.name for each in reader.schema if pa.types.is_null(each.type)]
            if not empty:
                _copy(reader.schema, _text_batches(spec, path, reader), file)
                return
        kinds |= dict.fromkeys(empty, pa.string())


def _text_reader(path: Path, kinds: dict[str, pa.DataType]) -> Any:
    stem = path.name.lower().removesuffix(".gz")
    try:
        source = pa.input_stream(path, compression="detect")
        return pa.csv.open_csv(
            source,
            pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
            pa.csv.ParseOptions(
                delimiter="\t" if stem.endswith(".tsv") else ",", newlines_in_values=True
            ),
            pa.csv.ConvertOptions(
                column_types=kinds, strings_can_be_null=True, quoted_strings_can_be_null=False
            ),
        )
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as CSV: {_line(error)}") from None


def _text_batches(spec: TableSpec, path: Path, reader: Any) -> Iterator[Any]:
    read = 0
    try:
        for batch in reader:
            yield batch
            read += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        text = _line(error)
        number = re.search(r"CSV column #(\d+)", text)
        column = (
            f", column {reader.schema.names[int(number[1])]!r} changes its type" if (number) else ""
        )
        raise ValueError(
            f"table {spec.name!r}{column}: {path}, behind row {read}: {text}"
        ) from None


def check_query(spec: TableSpec, manifest: Manifest) -> None:
    """Refuse a query that cannot be run, before any work.

    Raises:
        ModuleNotFoundError: If DuckDB is not installed.
        FileNotFoundError: If the database is missing.
        ValueError: If the query is no single SELECT.
    """
    duckdb = _duckdb(spec)
    if manifest.database is not None and not _attached(manifest.database):
        path = manifest.path.parent / manifest.database
        if not path.is_file():
            raise FileNotFoundError(f"{manifest.path}: there is no database {str(path)!r}")
    with closing(duckdb.connect()) as connection:
        _statement(duckdb, connection, spec)


def _duckdb(spec: TableSpec) -> Any:
    try:
        import duckdb
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"table {spec.name!r} comes from a query, and DuckDB is not installed: pip install "
            "'pyg-scale-tables[duckdb]'"
        ) from None
    return duckdb


def _statement(duckdb: Any, connection: Any, spec: TableSpec) -> Any:
    assert spec.query is not None
    try:
        found = connection.extract_statements(spec.query)
    except duckdb.Error as error:
        raise ValueError(f"table {spec.name!r}, query: {_line(error)}") from None
    if len(found) != 1 or found[0].type != duckdb.StatementType.SELECT:
        raise ValueError(f"table {spec.name!r}: the query must be one SELECT (got {spec.query!r})")
    return found[0]


def _attached(database: str) -> bool:
    """Return True for a database that DuckDB reads through an extension."""
    return database.partition(":")[0] in ("sqlite", "postgres", "mysql")


def copy_query(spec: TableSpec, manifest: Manifest, file: Path, memory: int) -> None:
    """Copy the result of a DuckDB query to an Arrow file, once, as its order may be another one.

    Args:
        spec: The table with the query.
        manifest: Says which database.
        file: The file to write.
        memory: Bytes that DuckDB may use.

    Raises:
        ValueError: If DuckDB refuses it.
    """
    duckdb = _duckdb(spec)
    try:
        with closing(_connection(duckdb, manifest, file.parent, memory)) as connection:
            statement = _statement(duckdb, connection, spec)
            reader = connection.execute(statement).to_arrow_reader(_ROWS)
            _copy(reader.schema, reader, file)
    except (duckdb.Error, pa.ArrowException) as error:
        raise ValueError(f"table {spec.name!r}, query: {_line(error)}") from None


def _connection(duckdb: Any, manifest: Manifest, folder: Path, memory: int) -> Any:
    """A connection that only reads, with the database of a manifest."""
    kind, _, rest = (manifest.database or "").partition(":")
    config = {
        "memory_limit": f"{max(64, memory >> 20)}MiB",
        "temp_directory": str(folder / "duckdb"),
        "autoinstall_known_extensions": False,
        "file_search_path": str(manifest.path.parent.absolute()),
    }
    if manifest.database is None:
        return duckdb.connect(config=config)
    if _attached(manifest.database):
        connection = duckdb.connect(config=config)
        name = str(manifest.path.parent / rest) if kind == "sqlite" else rest
        connection.execute(
            f"ATTACH '{name.replace(chr(39), chr(39) * 2)}' AS attached (TYPE {kind}, READ_ONLY)"
        )
        connection.execute("USE attached")
        return connection
    path = manifest.path.parent / manifest.database
    return duckdb.connect(str(path), read_only=True, config=config)


def _copy(schema: pa.Schema, batches: Any, file: Path) -> None:
    """Write batches to an Arrow file, in batches of few rows."""
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, schema) as writer:
        for batch in batches:
            for begin in range(0, batch.num_rows, _ROWS):
                writer.write_batch(batch.slice(begin, _ROWS))


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
