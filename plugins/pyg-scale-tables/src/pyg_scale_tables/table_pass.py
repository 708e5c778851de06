"""One pass over a table: its columns to arrays, its times, and the rows its keys refer to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pyg_scale.convert.array_file import ArrayReader, ArrayWriter, save_array
from pyg_scale.convert.base import Workspace
from pyg_scale.convert.table import Array
from pyg_scale.files.npy import dtype_name, numpy_dtype
from pyg_scale.store.directory.frame import CONSTANT, FRAME
from pyg_scale.store.directory.paths import quoted
from pyg_scale.store.directory.values import tensor_in
from pyg_scale_tables.columns import (
    Encoder,
    TextEmbedder,
    array_name,
    encoder_of,
    inferred,
    nanoseconds,
    row_shape,
)
from pyg_scale_tables.keys import KeyIndex, plain_keys, shown
from pyg_scale_tables.manifest import ColumnType
from pyg_scale_tables.records import TableRecords

_LOOK = 1 << 16  # rows by which columns of text are judged
_MOST_ROWS, _LEAST_ROWS = 1 << 17, 1 << 10  # of a batch
_ORDER = ("numerical", "categorical", "multicategorical", "timestamp", "embedding")


@dataclass
class ForeignKey:
    """The edges of a column of foreign keys.

    Attributes:
        parent: The table that it refers to.
        index: The rows of its primary keys.
    """

    parent: str
    index: KeyIndex


@dataclass
class TableArrays:
    """The result of a pass: files in the workspace and what is in them, as JSON.

    Attributes:
        num_rows: Number of rows.
        arrays: Dtype and shape of a row of each array, by attribute.
        other: The value ``tf_columns``, as JSON.
        edges: By column of foreign keys: ``edges``, ``null`` and ``missing`` (keys that no row
            has), and whether there is a file of the child rows.
        files: Files of ``other``, by their path in the graph directory.
        left_out: Columns without a stype.
    """

    num_rows: int = 0
    arrays: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    edges: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


class TablePass:
    """Reads a table.

    Args:
        records: Its rows.
        prefix: What the names of its files begin with.
        work: Where files go, and how much memory there is.
        foreign: What each column of foreign keys refers to.
        drop_missing: Whether a key that no row has is left out, or an error.
        embedder: Embeds texts.
    """

    def __init__(
        self,
        records: TableRecords,
        prefix: str,
        work: Workspace,
        foreign: Mapping[str, ForeignKey],
        *,
        drop_missing: bool,
        embedder: TextEmbedder | None,
    ) -> None:
        self._records, self._spec = records, records.spec
        self._prefix, self._work, self._foreign = prefix, work, foreign
        self._drop_missing, self._embedder = drop_missing, embedder
        self._out = TableArrays(records.num_rows)
        self._columns: dict[str, list[Encoder]] = {}

    def run(self) -> dict[str, Any]:
        """Read it; returns a :class:`TableArrays` as JSON.

        Raises:
            ValueError: If a value does not fit its column, or a key refers to no row; names the
                table, the column and the row.
            TypeError: If a column cannot be what the manifest says.
        """
        self._choose()
        rows = self._rows()
        self._measure(rows)
        self._read(rows)
        for column in self._foreign:
            self._pack_edges(column)
        self._describe()
        return vars(self._out)

    # Columns ###############################################################################

    def _choose(self) -> None:
        """Give every column that is a feature its encoder."""
        spec, kinds = self._spec, self._records.columns
        keys = {spec.pkey, *spec.fkeys, *spec.drop}
        names = [name for name in kinds if name not in keys]
        if spec.time_col not in spec.stypes:  # its time already; a feature where it is said
            names = [name for name in names if name != spec.time_col]
        unknown = [name for name in names if name not in spec.stypes]
        first = next(iter(self._records.batches(unknown, _LOOK)), (0, None))[1]
        for name in names:
            wanted = spec.stypes.get(name) or self._inferred(name, kinds[name], first)
            if wanted is None:
                self._out.left_out.append(name)
                continue
            encoder = encoder_of(
                name,
                kinds[name],
                wanted,
                self._records.num_rows,
                partial(self._records.row_name, column=name),
                self._embedder,
                spec.time_unit if name == spec.time_col else None,
            )
            self._columns.setdefault(array_name(encoder.stype), []).append(encoder)
        self._columns = {s: self._columns[s] for s in _ORDER if s in self._columns}

    def _inferred(self, name: str, kind: pa.DataType, first: Any) -> ColumnType | None:
        values = pa.array([], kind) if first is None else first.column(name)
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        return inferred(kind, values)

    def _rows(self) -> int:
        """Rows of a batch, so that it fits into memory."""
        width = 64 + 32 * len(self._records.columns)
        for encoders in self._columns.values():
            item = numpy_dtype(encoders[0].dtype).itemsize
            width += 4 * item * int(np.prod(row_shape(encoders), dtype=object))
        return max(_LEAST_ROWS, min(_MOST_ROWS, self._work.memory // (4 * width)))

    def _measure(self, rows: int) -> None:
        measured = [e for each in self._columns.values() for e in each if e.measures]
        if measured:
            with self._work.progress(
                f"Measuring {self._spec.name}", self._records.num_rows, "rows"
            ) as bar:
                for begin, batch in self._records.batches([e.name for e in measured], rows):
                    for encoder in measured:
                        encoder.measure(batch.column(encoder.name), begin)
                    bar.update(batch.num_rows)
        empty = [e for each in self._columns.values() for e in each if 0 in e.shape]
        for encoder in empty:  # no list tells the length
            self._columns[array_name(encoder.stype)].remove(encoder)
            self._out.left_out.append(encoder.name)
        self._columns = {stype: each for stype, each in self._columns.items() if each}

    # Rows ##################################################################################

    def _file(self, name: str) -> Path:
        return self._work.folder / f"{self._prefix}-{quoted(name)}.npy"

    def _writer(self, stack: ExitStack, name: str, dtype: str, row: tuple[int, ...]) -> ArrayWriter:
        shape = (self._records.num_rows, *row)
        return stack.enter_context(ArrayWriter(self._file(name), dtype, shape, fresh=True))

    def _read(self, rows: int) -> None:
        spec, records = self._spec, self._records
        wanted = [e.name for each in self._columns.values() for e in each]
        wanted += self._foreign
        if spec.time_col is not None:
            wanted.append(spec.time_col)
        with ExitStack() as stack:
            writers = {
                stype: self._writer(stack, f"{FRAME}_{stype}", each[0].dtype, row_shape(each))
                for stype, each in self._columns.items()
            }
            if not writers:
                writers["numerical"] = self._writer(stack, f"{FRAME}_numerical", "float32", (1,))
            parents = {
                column: self._writer(stack, _parents(column), _index_dtype(key.index), ())
                for column, key in self._foreign.items()
            }
            time = None
            if spec.time_col is not None:
                time = self._writer(stack, TIME, "int64", ())
            bar = stack.enter_context(
                self._work.progress(f"Reading {spec.name}", records.num_rows, "rows")
            )
            batches = records.batches(list(dict.fromkeys(wanted)), rows)
            for begin, batch in _ahead(batches):
                for stype, writer in writers.items():
                    writer.write(begin, self._encoded(stype, batch, begin))
                if time is not None and spec.time_col is not None:
                    name = partial(records.row_name, column=spec.time_col)
                    values = batch.column(spec.time_col)
                    time.write(begin, nanoseconds(values, begin, spec.time_unit, name))
                for column, writer in parents.items():
                    found = self._parents(column, batch.column(column), begin)
                    writer.write(begin, found.astype(_index_dtype(self._foreign[column].index)))
                bar.update(batch.num_rows)
            for writer in (*writers.values(), *parents.values()):
                writer.sync()
            if time is not None:
                time.sync()

    def _encoded(self, stype: str, batch: Any, begin: int) -> Array:
        encoders = self._columns.get(stype)
        if encoders is None:
            return np.ones((batch.num_rows, 1), np.float32)
        shape = (batch.num_rows, *row_shape(encoders))
        out = np.empty(shape, numpy_dtype(encoders[0].dtype))
        at = 0
        for number, encoder in enumerate(encoders):
            if stype == "embedding":
                into, at = out[:, at : at + encoder.shape[0]], at + encoder.shape[0]
            else:
                into = out[:, number]
            encoder.encode(batch.column(encoder.name), begin, into)
        return out

    def _parents(self, column: str, values: Any, begin: int) -> Array:
        """The row that each foreign key refers to, ``int64`` ``[n]``; -1 for none."""
        key = self._foreign[column]
        name = partial(self._records.row_name, column=column)
        keys, has = plain_keys(values, begin, name)
        is_text = keys.dtype.kind == "S"
        if len(keys) and len(key.index.keys) and is_text != (key.index.kind == "text"):
            kind = "text" if is_text else "integers"
            raise TypeError(
                f"{name(begin)} holds {kind}, but the primary key of {key.parent!r} is "
                f"{key.index.kind}: make both the same"
            )
        found = key.index.rows(keys)
        counts = self._out.edges.setdefault(column, {"null": 0, "missing": 0})
        counts["null"] += len(values) - len(keys)
        missing = found < 0
        if missing.any():
            counts["missing"] += int(missing.sum())
            if not self._drop_missing:
                place = int(missing.argmax())
                row = place if has is None else int(has.nonzero()[0][place])
                raise ValueError(
                    f"{name(begin + row)} is {shown(keys[place])}, which no row of table "
                    f"{key.parent!r} has as its primary key: correct it, or pass "
                    "on_missing='drop' to leave out such edges"
                )
        if has is None:
            return found
        out = np.full(len(values), -1, np.int64)
        out[has] = found
        return out

    def _pack_edges(self, column: str) -> None:
        """Leave out rows without an edge, and note the rows that have one."""
        counts = self._out.edges.setdefault(column, {"null": 0, "missing": 0})
        rows = self._records.num_rows
        counts["edges"] = rows - counts["null"] - counts["missing"]
        counts["packed"] = counts["edges"] != rows
        if not counts["packed"]:
            return
        source, size = ArrayReader(self._file(_parents(column))), (counts["edges"],)
        dtype = dtype_name_of(source.dtype)
        child = "int32" if rows < 2**31 else "int64"
        with (
            ArrayWriter(self._file(f"{column}-packed"), dtype, size, fresh=True) as parents,
            ArrayWriter(self._file(_children(column)), child, size, fresh=True) as children,
        ):
            at = 0
            for begin in range(0, rows, _MOST_ROWS):
                found = source.rows(begin, min(rows, begin + _MOST_ROWS))
                there = (found >= 0).nonzero()[0]
                parents.write(at, found[there])
                children.write(at, (there + begin).astype(child))
                at += len(there)
            parents.sync()
            children.sync()
        source.close()
        self._file(f"{column}-packed").replace(self._file(_parents(column)))

    # The result ############################################################################

    def _describe(self) -> None:
        out, details = self._out, dict[str, Any]()
        for stype, encoders in self._columns.items():
            out.arrays[f"{FRAME}_{stype}"] = [encoders[0].dtype, list(row_shape(encoders))]
            for encoder in encoders:
                details[encoder.name] = {
                    name: self._detail(encoder.name, name, value)
                    for name, value in encoder.details().items()
                }
        names = {s: [e.name for e in each] for s, each in self._columns.items()}
        if not names:
            out.arrays[f"{FRAME}_numerical"] = ["float32", [1]]
            names = {"numerical": [CONSTANT]}
            details[CONSTANT] = {"MEAN": 1.0, "STD": 0.0, "QUANTILES": [1.0] * 5}
        out.other = {"stypes": names, "details": {"$dict": details}}
        if embedded := self._columns.get("embedding"):
            ends = np.cumsum([0, *(e.shape[0] for e in embedded)]).tolist()
            out.other["offsets"] = {"embedding": ends}
        if self._spec.time_col is not None:
            out.arrays[TIME] = ["int64", []]

    def _detail(self, column: str, name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        file = self._file(f"{column}-{name}")
        save_array(file, value)
        table = quoted(self._spec.name)
        path = f"graph/{table}/columns/{quoted(column)}-{name}.npy"
        self._out.files[path] = file.name
        return tensor_in(path, dtype_name_of(value.dtype), value.shape)


class TableFiles:
    """The files that a pass over a table left.

    Args:
        folder: Where they are.
        prefix: What their names begin with.
        found: The result of the pass, as JSON.
    """

    def __init__(self, folder: Path, prefix: str, found: Mapping[str, Any]) -> None:
        self._folder, self._prefix = folder, prefix
        self.result = TableArrays(**found)

    def file(self, name: str) -> Path:
        """The file of an attribute."""
        return self._folder / f"{self._prefix}-{quoted(name)}.npy"

    def parents(self, column: str) -> Path:
        """The row of the parent of each edge of a column."""
        return self.file(_parents(column))

    def children(self, column: str) -> Path | None:
        """The row of each edge itself; ``None`` if every row has one."""
        return self.file(_children(column)) if self.result.edges[column]["packed"] else None

    def details(self) -> dict[str, Path]:
        """Files of the values beside the arrays, by their path in the graph directory."""
        return {path: self._folder / name for path, name in self.result.files.items()}


TIME = "time"
"""The attribute of the times of a table's rows."""


def _parents(column: str) -> str:
    return f"{column}-parents"


def _children(column: str) -> str:
    return f"{column}-children"


def _index_dtype(index: KeyIndex) -> str:
    return "int32" if len(index.keys) < 2**31 else "int64"


def dtype_name_of(dtype: Any) -> str:
    """The name that torch has for a dtype of NumPy."""
    import torch

    return dtype_name(torch.from_numpy(np.empty(0, dtype)).dtype)


def _ahead(batches: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Batches, of which the next is decoded meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(next, batches, None)
        while (found := pending.result()) is not None:
            pending = pool.submit(next, batches, None)
            yield found
