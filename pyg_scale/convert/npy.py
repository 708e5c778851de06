"""Edge lists and attributes in ``.npy`` files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyg_scale.convert.array_file import Array, ArrayReader
from pyg_scale.convert.table import Column, Table
from pyg_scale.convert.tables import Tables

_KINDS = {"b": "bool", "u": "uint", "i": "int", "f": "float", "c": "complex"}


def column_of(dtype: np.dtype[Any], row: tuple[int, ...], what: object) -> Column:
    """The column that an array makes.

    Raises:
        TypeError: If torch has no such dtype.
    """
    kind, bits = _KINDS.get(dtype.kind), dtype.itemsize * 8
    name = "bool" if kind == "bool" else f"{kind}{bits}"
    if kind is None or name in ("float128", "complex256"):
        raise TypeError(f"{what} holds {dtype}, which torch does not have: convert it to numbers")
    return Column(name, row)


class NpyEdges(Table):
    """An edge list ``[2, num_edges]`` or ``[num_edges, 2]``, or two files ``[num_edges]``.

    Two edges ``[2, 2]`` are sources in the first row, as in PyG.

    Args:
        path: One file, or that of the sources.
        dst: The file of the destinations.

    Raises:
        ValueError: If it has another shape.
        TypeError: If it holds no integers.
    """

    positions = True

    def __init__(self, path: str | os.PathLike[str], dst: str | os.PathLike[str] | None = None):
        self.path = Path(path)
        self._src = ArrayReader(self.path)
        self._dst = None if dst is None else ArrayReader(Path(dst))
        for each in filter(None, (self._src, self._dst)):
            if each.dtype.kind not in "iu":
                raise TypeError(f"{each.file} holds {each.dtype}; node ids must be integers")
        shape = tuple(self._src.shape)
        if self._dst is not None:
            other = tuple(self._dst.shape)
            if len(shape) != 1 or shape != other:
                raise ValueError(
                    f"{self._src.file} and {self._dst.file} must have the same shape [num_edges] "
                    f"(they have {list(shape)} and {list(other)})"
                )
            self.num_rows = shape[0]
        elif len(shape) == 2 and 2 in shape:
            self._by_column = (shape[0] == 2) != self._src.fortran
            self.num_rows = shape[1] if shape[0] == 2 else shape[0]
        else:
            raise ValueError(
                f"{self.path} must have the shape [2, num_edges] or [num_edges, 2] (it has "
                f"{list(shape)})"
            )
        dtypes = [self._src.dtype, (self._dst or self._src).dtype]
        self.columns = {
            name: column_of(dtype, (), self.path) for name, dtype in zip(("src", "dst"), dtypes)
        }

    @property
    def files(self) -> list[Path]:
        return [self.path, *([] if self._dst is None else [self._dst.file])]

    def read(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[Array, ...]]:
        total = self.num_rows or 0
        for first in range(begin, total, rows):
            last = min(total, first + rows)
            pair = dict(zip(("src", "dst"), self._pair(first, last)))
            yield tuple(pair[name] for name in names)

    def _pair(self, first: int, last: int) -> tuple[Array, Array]:
        total = self.num_rows or 0
        if self._dst is not None:
            return self._src.flat(first, last), self._dst.flat(first, last)
        if self._by_column:
            return self._src.flat(first, last), self._src.flat(total + first, total + last)
        both = self._src.flat(2 * first, 2 * last).reshape(-1, 2)
        return np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1])

    def close(self) -> None:
        self._src.close()
        if self._dst is not None:
            self._dst.close()


class NpyColumn(Table):
    """An array ``[num_rows, ...]``: one column, called as the file.

    Raises:
        TypeError: If torch has no such dtype.
        ValueError: If it is a single number, or in Fortran order.
    """

    positions = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._array = ArrayReader(self.path)
        self._array.check_rows()
        shape = self._array.shape
        self.num_rows = shape[0]
        row = tuple(shape[1:])
        self.columns = {self.path.stem: column_of(self._array.dtype, row, self.path)}

    def read(self, names: Sequence[str], begin: int, rows: int) -> Iterator[tuple[Array, ...]]:
        total = self.num_rows or 0
        for first in range(begin, total, rows):
            values = self._array.rows(first, min(total, first + rows))
            yield tuple(values for _ in names)

    def column_file(self, name: str) -> Path | None:
        return self.path

    def close(self) -> None:
        self._array.close()


class NpyReader(Tables):
    """``edges.npy``: integers ``[2, num_edges]`` or ``[num_edges, 2]``.

    Args:
        source: The file, or two of them, ``src.npy,dst.npy``.
        **options: Of :class:`~pyg_scale.convert.tables.Tables`, such as ``nodes``.
    """

    def __init__(self, source: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(source, **options)

    @classmethod
    def open_edges(cls, source: str, options: Mapping[str, Any]) -> Table:
        """The edge list in a file, or in two."""
        first, comma, second = source.partition(",")
        if comma and not Path(source).exists():
            return NpyEdges(first, second, **options)
        return NpyEdges(source, **options)

    @classmethod
    def open_nodes(cls, source: str, options: Mapping[str, Any]) -> Table:
        """The array in a file."""
        return NpyColumn(source, **options)
