"""Tables in text files such as CSV and TSV, compressed or not."""

from __future__ import annotations

import bisect
import csv
import functools
import gzip
import io
import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from pyg_scale.convert.table import Array, Column, Table
from pyg_scale.convert.tables import Tables
from pyg_scale_tables.columnar import byte_strings

_WHITESPACE = "whitespace"
_LOOK = 1000  # rows from which dtypes are inferred
_DTYPES = ("int64", "int32", "uint64", "float64", "float32", "text")
_BLOCK = 1 << 20  # bytes parsed at a time
_LONGEST = 1 << 24  # bytes of the longest row
_BOM = b"\xef\xbb\xbf"
_NO_DELIMITER = "\x1f"  # does not occur in text
_PADDED = "^0[0-9]+$"  # an integer with leading zeros
_UNREADABLE = (csv.Error, EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError)


class CsvTable(Table):
    """A text file with a header and one row per line.

    Lines at the beginning that are empty or begin with ``#``, as in edge lists of SNAP, are
    skipped, and empty lines at the end. Columns are ``int64`` if the first 1,000 rows have only
    integers (``uint64`` if some need it), ``float64`` if they have only numbers, else text, which
    can only be used for ids. Integers with leading zeros, such as postcodes, are text, to keep them
    distinct from those without. A field that is read must not be empty.

    Args:
        path: The file; decompressed while it is read if it ends in ``.gz``.
        delimiter: The delimiter of columns: by default a comma, in ``.tsv`` a tab; ``"whitespace"``
            for any number of spaces and tabs, the default in ``.txt``.
        header: True if the first line has the names of the columns; otherwise these are ``"0"``,
            ``"1"``, ... By default ``True``, in ``.txt`` ``False``. A header of numbers, or a first
            row of words above columns of numbers, is an error.
        dtypes: Dtypes of columns that differ from the inferred ones: ``int64``, ``int32``,
            ``uint64``, ``float64``, ``float32`` or ``text``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is empty, or a header or a dtype is wrong.
        TypeError: If ``dtypes`` is no mapping.
    """

    fast = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        delimiter: str | None = None,
        header: bool | None = None,
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        stem = self.path.with_suffix("") if self.path.suffix == ".gz" else self.path
        default = {".tsv": "\t", ".txt": _WHITESPACE}.get(stem.suffix.lower(), ",")
        self._delimiter = default if delimiter is None else delimiter
        if self._delimiter != _WHITESPACE and (
            not isinstance(self._delimiter, str)
            or len(self._delimiter) != 1
            or self._delimiter in '"\r\n\0'
        ):
            raise ValueError(
                "delimiter must be one character or 'whitespace', and neither a quotation mark nor "
                f"the end of a line (got {delimiter!r})"
            )
        if header is not None and not isinstance(header, bool):
            raise ValueError(f"header must be True or False (got {header!r})")
        self._header = stem.suffix.lower() != ".txt" if header is None else header
        # pyarrow splits at ASCII characters only; other lines are read as a whole
        self._is_split = self._delimiter == _WHITESPACE or not self._delimiter.isascii()
        self._start = 0
        if dtypes is not None and not isinstance(dtypes, Mapping):
            raise TypeError(f"dtypes must map names of columns to dtypes (got {dtypes!r})")
        self.columns = self._look(dict(dtypes or {}))

    def row_name(self, row: int) -> str:
        return f"{self.path}, row {row + 1}"

    # Columns #################################################################################

    def _look(self, dtypes: dict[str, str]) -> dict[str, Column]:
        try:
            first = self._first()
        except _UNREADABLE as error:
            raise ValueError(f"{self.path}, at its beginning: {error}") from None
        if not first:
            raise ValueError(f"{self.path} is empty: it must have a header, or header=False")
        if self._header and _fits(pa.array(first, pa.string()), "float64"):
            raise ValueError(
                f"{self.path} begins with numbers ({', '.join(first[:4])}), where names of columns "
                "are expected: pass header=False, or -o header=False to `pyg-scale convert`"
            )
        names = (
            [name.strip() for name in first] if self._header else list(map(str, range(len(first))))
        )
        if len(set(names)) < len(names) or "" in names:
            raise ValueError(f"{self.path}: every column must have its own name (got {names})")
        for name, dtype in dtypes.items():
            if name not in names or dtype not in _DTYPES:
                raise ValueError(
                    f"dtypes: {name}={dtype!r}; columns of {self.path} are {', '.join(names)}, "
                    f"dtypes {', '.join(_DTYPES)}"
                )
        self._given = frozenset(dtypes)
        self.columns = {name: Column("text") for name in names}
        rows = self._head()
        found = {
            name: Column(dtypes.get(name) or _dtype(values)) for name, values in zip(names, rows)
        }
        if not self._header and len(rows[0]) > 1 and not dtypes:
            self._refuse_header(rows)
        return found

    def _first(self) -> list[str]:
        """The fields of the first row after the skipped lines."""
        with self._open() as file:
            self._start = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        with io.TextIOWrapper(self._open(), encoding="utf-8-sig", newline="") as lines:
            for line in lines:
                if line.startswith("#") or not line.strip():
                    self._start += len(line.encode())
                elif self._delimiter == _WHITESPACE:
                    return line.split()
                else:
                    rest = itertools.chain([line], lines)
                    return next(csv.reader(rest, delimiter=self._delimiter, strict=True))
        return []

    def _head(self) -> list[Any]:
        """The columns of the first 1,000 rows."""
        parts = [[pa.array([], pa.string())] for _ in self.columns]
        for begin, columns in self._blocks(0):
            for part, values in zip(parts, columns):
                self._check_text(begin, values)
                part.append(values.slice(0, _LOOK - begin))
            if begin + len(columns[0]) >= _LOOK:
                break
        return [pa.concat_arrays(part) for part in parts]

    def _refuse_header(self, rows: list[Any]) -> None:
        """Refuse words above numbers, which would make all ids text, and the words an edge."""
        first = [column[0].as_py() for column in rows]
        words = not any(_fits(column.slice(0, 1), "float64") for column in rows)
        if words and all(_dtype(column.slice(1)) != "text" for column in rows):
            raise ValueError(
                f"{self.path} begins with {' '.join(first)!r} above rows of numbers: if these "
                "are names of columns, pass header=True, or -o header=True to `pyg-scale convert`; "
                "if it is a comment, delete the line; if it is an edge, pass dtypes={'0': 'text'}"
            )

    # Reading #################################################################################

    def read(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[Array, ...]]:
        places = [list(self.columns).index(name) for name in names]
        for first, columns in self._blocks(begin):
            for at in range(0, len(columns[0]), rows):
                yield tuple(
                    self._array(name, columns[place].slice(at, rows), first + at)
                    for name, place in zip(names, places)
                )

    def _array(self, name: str, values: Any, begin: int) -> Array:
        self._check_text(begin, values)
        row = pc.index(values, "").as_py()
        if row >= 0:
            raise ValueError(f"{self.row_name(begin + row)} has no value in column {name!r}")
        dtype = self.columns[name].dtype
        if dtype == "text":
            return byte_strings(
                values, lambda row: f"{self.row_name(begin + row)}, column {name!r},"
            )
        convert = functools.partial(_numbers, dtype=dtype, padded=name in self._given)
        try:
            return convert(values)
        except pa.ArrowInvalid:
            row = _first_refused(values, convert)
            raise ValueError(
                f"{self.row_name(begin + row)}, column {name!r}: {values[row].as_py()!r} is no "
                f"{dtype}, as the rows at the beginning are: correct it, or set "
                f"dtypes={{{name!r}: ...}}"
            ) from None

    def _check_text(self, begin: int, values: Any) -> None:
        try:
            values.validate(full=True)
        except pa.ArrowInvalid:
            row = _first_refused(values, lambda some: some.validate(full=True))
            raise ValueError(
                f"{self.row_name(begin + row)} holds bytes that are no UTF-8: save the file as "
                "UTF-8"
            ) from None

    def _blocks(self, begin: int) -> Iterator[tuple[int, list[Any]]]:
        """Yield the text of all columns in blocks of consecutive rows, each with its first row."""
        at, size = begin, _BLOCK
        while True:
            try:
                for columns in self._parsed(at, size):
                    yield at, columns
                    at += len(columns[0])
                return
            except pa.ArrowInvalid as error:
                if "straddles" not in str(error):  # a row longer than a block
                    raise ValueError(f"{self.path}, behind row {at}: {error}") from None
                if size >= _LONGEST:
                    raise ValueError(
                        f"{self.path}, behind row {at}: a row is longer than {_LONGEST >> 20} MB: "
                        "is a quotation mark not closed?"
                    ) from None
                size *= 4
            except _UNREADABLE as error:
                raise ValueError(f"{self.path}, behind row {at}: {error}") from None

    def _parsed(self, begin: int, size: int) -> Iterator[list[Any]]:
        wrong = []

        def refuse(row: Any) -> str:
            wrong.append(row)
            return "error"

        names = ["line"] if self._is_split else list(map(str, range(len(self.columns))))
        with self._open() as file:
            file.read(self._start)
            blank = b" \t\v\f\r\n" if self._delimiter == _WHITESPACE else b"\r\n"
            try:
                with pyarrow.csv.open_csv(
                    _WithoutEnd(file, blank),
                    pyarrow.csv.ReadOptions(
                        use_threads=False,
                        block_size=size,
                        column_names=names,
                        skip_rows_after_names=begin + self._header,
                    ),
                    pyarrow.csv.ParseOptions(
                        delimiter=_NO_DELIMITER if self._is_split else self._delimiter,
                        quote_char=False if self._is_split else '"',
                        newlines_in_values=not self._is_split,
                        ignore_empty_lines=False,
                        invalid_row_handler=refuse,
                    ),
                    pyarrow.csv.ConvertOptions(
                        column_types=dict.fromkeys(names, pa.string()), check_utf8=False
                    ),
                ) as reader:
                    for batch in reader:
                        columns = self._fields(begin, batch.columns)
                        begin += batch.num_rows
                        if batch.num_rows:
                            yield columns
            except pa.ArrowInvalid:
                if not wrong:
                    raise
                row = wrong[0].number - 1 - self._header
                raise self._ragged(row, wrong[0].actual_columns, wrong[0].text) from None

    def _fields(self, begin: int, columns: list[Any]) -> list[Any]:
        """The columns of rows; checks that each row has all of them."""
        if not self._is_split:
            empty = pc.equal(columns[0], "")
            for values in columns[1:] if pc.any(empty).as_py() else ():
                empty = pc.and_(empty, pc.equal(values, ""))
            if pc.any(empty).as_py():
                raise self._ragged(begin + pc.index(empty, True).as_py(), 0)
            return columns
        (lines,) = columns
        self._check_text(begin, lines)
        if self._delimiter == _WHITESPACE:
            lines = pc.utf8_trim_whitespace(lines)
            parts = pc.utf8_split_whitespace(lines)
        else:
            parts = pc.split_pattern(lines, self._delimiter)
        counts = pc.if_else(pc.equal(lines, ""), 0, pc.list_value_length(parts)).to_numpy()
        width = len(self.columns)
        if (counts != width).any():
            row = int((counts != width).argmax())
            raise self._ragged(begin + row, int(counts[row]))
        if self._delimiter != _WHITESPACE and pc.any(pc.match_substring(lines, '"')).as_py():
            raise ValueError(
                f"{self.path}, behind row {begin}: fields in quotation marks need a delimiter that "
                f"is an ASCII character (it is {self._delimiter!r})"
            )
        return [pc.list_element(parts, place) for place in range(width)]

    def _ragged(self, row: int, count: int, text: str = "") -> ValueError:
        name, width = self.row_name(row), len(self.columns)
        if self._is_split and text:
            return ValueError(f"{name} holds the control character 0x1f: delete it")
        if count == 0:
            return ValueError(f"{name} is empty, expected {width} columns: delete the line")
        if text.count('"') % 2:
            return ValueError(f"{name} has a quotation mark that is not closed: {text[:60]!r}")
        return ValueError(
            f"{name} has {count} columns, expected {width}: correct the row, or set delimiter (it "
            f"is {self._delimiter!r})"
        )

    def _open(self) -> BinaryIO:
        return gzip.open(self.path) if self.path.suffix == ".gz" else self.path.open("rb")


class CsvReader(Tables):
    """Reads ``edges.csv`` with two or more columns and a header; ids may be anything.

    Args:
        source: The file, ``.csv``, ``.tsv`` or ``.txt``, also with ``.gz``.
        **options: Options of :class:`~pyg_scale.convert.tables.Tables` and :class:`CsvTable`.
    """

    table_options = frozenset({"delimiter", "header", "dtypes"})

    def __init__(self, source: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(source, **options)

    @classmethod
    def open_edges(cls, source: str, options: Mapping[str, Any]) -> Table:
        """The edge list in a file."""
        return CsvTable(source, **options)

    @classmethod
    def open_nodes(cls, source: str, options: Mapping[str, Any]) -> Table:
        """The table in a file."""
        return CsvTable(source, **options)


class _WithoutEnd:
    """A file without the empty lines at its end.

    Args:
        file: The file.
        blank: The characters of empty lines.
    """

    closed = False

    def __init__(self, file: BinaryIO, blank: bytes) -> None:
        self._file, self._blank = file, blank
        self._ready = self._held = b""
        self._ended = False

    def read(self, size: int) -> bytes:
        """The next bytes, which pyarrow takes for a block.

        There are fewer than ``size`` only at the end, as a block must hold the end of a row. The
        last byte is never a carriage return, after which pyarrow drops a line feed, even in a
        quoted field.
        """
        while len(self._ready) < size and not self._ended:
            data = self._file.read(size)
            if data:
                data = self._held + data
                kept = data.rstrip(self._blank)
                self._ready += kept
                self._held = data[len(kept) :]
            else:
                self._ready, self._ended = self._ready + b"\n", True
        data = self._ready[:size]
        data = data.rstrip(b"\r") or data
        self._ready = self._ready[len(data) :]
        return data


def _first_refused(values: Any, check: Callable[[Any], Any]) -> int:
    """The position of the first value that fails a check of all values."""

    def fails(place: int) -> bool:
        try:
            check(values.slice(0, place + 1))
        except pa.ArrowInvalid:
            return True
        return False

    return bisect.bisect_left(range(len(values)), True, key=fails)


def _numbers(values: Any, dtype: str, padded: bool = False) -> Array:
    """Convert text to numbers.

    Raises:
        pyarrow.ArrowInvalid: If one is not a number of the dtype, or is an integer with leading
            zeros and ``padded`` is False.
    """
    if dtype.startswith("float"):
        try:
            found = pc.cast(values, pa.float64())
        except pa.ArrowInvalid:
            found = pc.cast(pc.utf8_trim_whitespace(values), pa.float64())
        return found.to_numpy().astype(dtype)
    kind = pa.type_for_alias(dtype)
    try:
        found = pc.cast(values, kind)
        plain = pc.all(pc.equal(pc.cast(found, pa.string()), values)).as_py()
    except pa.ArrowInvalid:
        plain = False
    if not plain:  # with a sign, spaces or zeros; pyarrow would also accept hexadecimal numbers
        if not padded and _is_padded(values):
            raise pa.ArrowInvalid("an integer with leading zeros")
        values = pc.utf8_trim_whitespace(values)
        if not pc.all(pc.match_substring_regex(values, "^[+-]?[0-9]+$")).as_py():
            raise pa.ArrowInvalid("no integer")
        digits = pc.replace_substring_regex(values, r"^(?:\+|(-))?0*([0-9]+)$", r"\1\2")
        found = pc.cast(digits, kind)
    return found.to_numpy().astype(dtype)


def _is_padded(values: Any) -> bool:
    """Return True if any text is an integer with leading zeros."""
    return bool(pc.any(pc.match_substring_regex(values, _PADDED)).as_py())


def _fits(values: Any, dtype: str) -> bool:
    try:
        _numbers(values, dtype, padded=True)
    except pa.ArrowInvalid:
        return False
    return True


def _dtype(values: Any) -> str:
    """The dtype of a column that begins with the given text, of which some may be missing."""
    values = values.filter(pc.not_equal(values, ""))
    if len(values) == 0:
        return "int64"
    if _is_padded(values):
        return "text"
    return next((d for d in ("int64", "uint64", "float64") if _fits(values, d)), "text")
