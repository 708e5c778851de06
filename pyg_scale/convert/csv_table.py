"""Tables in text files: CSV, TSV and the like, compressed or not."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyg_scale.convert.array_file import Array
from pyg_scale.convert.table import Column, Table
from pyg_scale.convert.tables import Tables

_WHITESPACE = "whitespace"
_LOOK = 1000  # rows that dtypes are inferred from
_DTYPES = ("int64", "int32", "uint64", "float64", "float32", "text")
_UNREADABLE = (csv.Error, EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError)
_PADDED = re.compile(r"^0[0-9]+$", re.MULTILINE)  # an integer with leading zeros


class CsvTable(Table):
    """A text file with a header and one row a line.

    Lines at the beginning that are empty or begin with ``#``, as in edge lists of SNAP, are passed
    over, and empty ones at the end. Columns are ``int64`` if the first 1,000 rows hold integers
    only (``uint64`` if some of them need it), ``float64`` if numbers only, else text, of which only
    ids can be made. Integers with leading zeros, as postcodes have, are text, as they would not be
    told from those without.

    Args:
        path: The file; unpacked while it is read if it ends in ``.gz``.
        delimiter: Between columns: by default a comma, in ``.tsv`` a tab; ``"whitespace"`` for any
            number of spaces and tabs, the default in ``.txt``.
        header: Whether the first line names the columns; else they are ``"0"``, ``"1"``, ... By
            default ``True``, in ``.txt`` ``False``. Numbers alone name no columns, and words alone
            above columns of numbers are no row.
        dtypes: The dtype of some columns, ``int64``, ``int32``, ``uint64``, ``float64``,
            ``float32`` or ``text``, where another one is wanted.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is empty, a header is wrong, or a dtype.
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
        if not isinstance(self._delimiter, str) or (
            len(self._delimiter) != 1 and self._delimiter != _WHITESPACE
        ):
            raise ValueError(f"delimiter must be one character or 'whitespace' (got {delimiter!r})")
        if header is not None and not isinstance(header, bool):
            raise ValueError(f"header must be True or False (got {header!r})")
        self._header = stem.suffix.lower() != ".txt" if header is None else header
        self.columns = self._look(dict(dtypes or {}))

    def row_name(self, row: int) -> str:
        return f"{self.path}, row {row + 1}"

    def _look(self, dtypes: dict[str, str]) -> dict[str, Column]:
        try:
            with self._open() as lines:
                first = next(self._reader(lines), None)
        except _UNREADABLE as error:
            raise ValueError(f"{self.path}, at its beginning: {error}") from None
        if first is None:
            raise ValueError(f"{self.path} is empty: it must have a header, or header=False")
        if self._header and first and all(_fits(name, "float64") for name in first):
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
        rows = next(self._rows(0, _LOOK), [])
        found = {
            name: Column(dtypes.get(name) or _infer([row[i] for row in rows]))
            for i, name in enumerate(names)
        }
        if not self._header and len(rows) > 1 and all(c.dtype == "text" for c in found.values()):
            self._refuse_header(rows, dtypes)
        return found

    def _refuse_header(self, rows: list[list[str]], dtypes: Mapping[str, str]) -> None:
        """Words above numbers would make text of all ids, and an edge of the words."""
        below = [_infer(column) for column in zip(*rows[1:])]
        if "text" not in below and not dtypes and not any(_fits(v, "float64") for v in rows[0]):
            raise ValueError(
                f"{self.path} begins with {' '.join(rows[0])!r} above rows of numbers: if these "
                "are names of columns, pass header=True, or -o header=True to `pyg-scale convert`; "
                "if it is a comment, delete the line; if it is an edge, pass dtypes={'0': 'text'}"
            )

    def read(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[Array, ...]]:
        places = [list(self.columns).index(name) for name in names]
        at = begin
        for chunk in self._rows(begin, rows):
            columns = list(zip(*chunk))
            yield tuple(self._array(name, columns[place], at) for name, place in zip(names, places))
            at += len(chunk)

    def _rows(self, begin: int, rows: int) -> Iterator[list[list[str]]]:
        width = len(self.columns)
        with self._open() as lines:
            reader = self._reader(lines)
            at = 0
            try:
                for _ in itertools.islice(reader, begin + self._header):
                    pass
                at = begin
                while chunk := list(itertools.islice(reader, rows)):
                    for number, row in enumerate(chunk):
                        if len(row) != width:
                            raise ValueError(
                                f"{self.row_name(at + number)} has {len(row)} columns, expected "
                                f"{width}: correct the row, or set delimiter (it is "
                                f"{self._delimiter!r})"
                            )
                    yield chunk
                    at += len(chunk)
            except _UNREADABLE as error:
                raise ValueError(f"{self.path}, behind row {at}: {error}") from None

    def _array(self, name: str, values: Sequence[str], begin: int) -> Array:
        dtype = self.columns[name].dtype
        if dtype == "text":
            return _text(values)
        strict = dtype in ("int64", "uint64") and name not in self._given
        try:
            if strict and _PADDED.search("\n".join(values)):
                raise ValueError("an integer with leading zeros")
            return np.array(list(map(_PARSE[dtype], values)), dtype=dtype)
        except (ValueError, OverflowError):
            row = next(
                i
                for i, value in enumerate(values)
                if (strict and _PADDED.search(value)) or not _fits(value, dtype)
            )
            raise ValueError(
                f"{self.row_name(begin + row)}, column {name!r}: {values[row]!r} is no {dtype}, as "
                f"the rows at the beginning are: correct it, or set dtypes={{{name!r}: ...}}"
            ) from None

    def _open(self) -> Any:
        if self.path.suffix == ".gz":
            return io.TextIOWrapper(gzip.open(self.path), encoding="utf-8-sig", newline="")
        return self.path.open(encoding="utf-8-sig", newline="")

    def _reader(self, lines: Any) -> Iterator[list[str]]:
        lines = itertools.dropwhile(lambda line: line.startswith("#") or not line.strip(), lines)
        if self._delimiter == _WHITESPACE:
            return _without_end(map(str.split, lines))
        return _without_end(csv.reader(lines, delimiter=self._delimiter, strict=True))


class CsvReader(Tables):
    """``edges.csv``: two columns or more, with a header; ids are anything.

    Args:
        source: The file; ``.csv``, ``.tsv`` or ``.txt``, each of them with ``.gz``, too.
        **options: Of :class:`~pyg_scale.convert.tables.Tables` and :class:`CsvTable`.
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


def _without_end(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """Rows, but for empty ones behind the last that is not."""
    empty = 0
    for row in rows:
        if not row:
            empty += 1
            continue
        for _ in range(empty):
            yield []
        empty = 0
        yield row


def _int(value: str) -> int:
    if "_" in value:
        raise ValueError(value)
    return int(value)


def _float(value: str) -> float:
    if "_" in value:
        raise ValueError(value)
    return float(value)


_PARSE = {"int64": _int, "int32": _int, "uint64": _int, "float64": _float, "float32": _float}


def _fits(value: str, dtype: str) -> bool:
    try:
        np.array([_PARSE[dtype](value)], dtype=dtype)
    except (ValueError, OverflowError):
        return False
    return True


def _infer(values: Sequence[str]) -> str:
    if any(map(_PADDED.search, values)):
        return "text"
    for dtype in ("int64", "uint64", "float64"):
        if values and all(_fits(value, dtype) for value in values):
            return dtype
    return "text" if values else "int64"


def _text(values: Sequence[str]) -> Array:
    try:
        return np.array(values, dtype="S")
    except UnicodeEncodeError:
        return np.array([value.encode() for value in values], dtype="S")
