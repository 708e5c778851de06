"""Ids of any kind to node numbers 0, 1, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from pyg_scale.convert.array_file import Array
from pyg_scale.convert.table import Table


class IdMap:
    """From ids to their numbers.

    Args:
        ids: Node ``k`` has id ``ids[k]``; none twice.
        what: What errors call the list.
        row_name: Names a row of the table that has the list, if one has.

    Raises:
        ValueError: If an id is there twice; says where.
    """

    def __init__(
        self, ids: Array, what: str, row_name: Callable[[int], str] = "row {}".format
    ) -> None:
        self.ids = ids
        self.what = what
        self._order: Array | None = None
        self._sorted = ids
        if len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
            self._order = np.argsort(ids, kind="stable")
            self._sorted = ids[self._order]
            same = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
            if len(same):
                first, second = self._order[same[0]], self._order[same[0] + 1]
                raise ValueError(
                    f"{row_name(int(first))} and {row_name(int(second))} have the same id "
                    f"{_shown(ids[first])}"
                )

    def numbers(self, ids: Array, table: Table, begin: int) -> Array:
        """The number of each id, ``int64``.

        Args:
            ids: What was read.
            table: Where from.
            begin: The row of the first.

        Raises:
            ValueError: If one is not in the list; names the row.
            TypeError: If one is text and the other a number.
        """
        if (ids.dtype.kind == "S") != (self.ids.dtype.kind == "S") and len(self.ids):
            kinds = ["text" if each.dtype.kind == "S" else "numbers" for each in (ids, self.ids)]
            raise TypeError(
                f"{table.path} has {kinds[0]} as ids, {self.what} has {kinds[1]}: make both text "
                "(of CSV, set dtypes={NAME: 'text'} for the columns of numbers)"
            )
        keys = _bits(ids)
        at = np.searchsorted(self._sorted, keys)
        if len(self.ids):
            bad = self._sorted[np.minimum(at, len(self.ids) - 1)] != keys
        else:
            bad = np.ones(len(ids), dtype=bool)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"{table.row_name(begin + row)} has id {_shown(ids[row])}, which is not in "
                f"{self.what}"
            )
        return at if self._order is None else self._order[at]


def collect(columns: Sequence[tuple[Table, str]], memory: int, rows: int) -> Array:
    """All ids in some columns, each once, ascending.

    Raises:
        ValueError: If they do not fit into memory, or cannot be told from each other.
        TypeError: If some are text and some are numbers.
    """
    found: list[Array] = []
    negative: dict[bool, str] = {}  # by whether they stand for ids from 2**63 on
    for table, name in columns:
        unsigned = table.columns[name].dtype == "uint64"
        for chunk in _read(table, name, rows):
            if chunk.dtype.kind == "i" and bool((chunk < 0).any()):
                negative[unsigned] = f"{table.path}, column {name!r}"
            if len(negative) > 1:
                raise ValueError(
                    f"{negative[True]} has ids from 2**63 on and {negative[False]} negative ones, "
                    "which are the same 64 bits: make all of them text, or number them anew"
                )
            found.append(_unique(chunk))
            kinds = {each.dtype.kind == "S" for each in found}
            if len(kinds) > 1:
                raise TypeError(
                    f"{table.path}, column {name!r}: some ids are text, some numbers: make all of "
                    "them text (of CSV, set dtypes={NAME: 'text'} for the columns of numbers)"
                )
            while len(found) > 1 and len(found[-2]) <= 2 * len(found[-1]):
                check_memory(4 * (found[-1].nbytes + found[-2].nbytes), memory, table.path)
                last = found.pop()
                found[-1] = _unique(np.concatenate([found[-1], last]))
    while len(found) > 1:
        last = found.pop()
        found[-1] = _unique(np.concatenate([found[-1], last]))
    return found[0] if found else np.empty(0, np.int64)


def in_order(table: Table, name: str, memory: int, rows: int) -> Array:
    """All ids in a column, in the order of its rows.

    Raises:
        ValueError: If they do not fit into memory.
    """
    found = []
    size = 0
    for chunk in _read(table, name, rows):
        found.append(chunk)
        size += chunk.nbytes
        check_memory(4 * size, memory, table.path)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def check_memory(needed: int, memory: int, path: Path) -> None:
    """Refuse more ids than memory holds."""
    if needed > memory:
        raise ValueError(
            f"the ids in {path} need {needed / 1e6:.0f} MB or more to be numbered, the conversion "
            f"has {memory / 1e6:.0f} MB: raise memory, or give row numbers and ids='position'"
        )


def _read(table: Table, name: str, rows: int) -> Iterable[Array]:
    for (chunk,) in table.read([name], 0, rows):
        if chunk.dtype.kind not in "iuS":
            raise TypeError(
                f"{table.path}, column {name!r} holds {chunk.dtype}: ids must be integers of at "
                "most 64 bits or text: correct them, or read them as text (of CSV, set "
                f"dtypes={{{name!r}: 'text'}})"
            )
        yield _bits(chunk)


def _unique(ids: Array) -> Array:
    """Each id once, ascending; by sorting, as ``numpy.unique`` hashes numbers and is slower."""
    ids = np.sort(ids)
    first = np.ones(len(ids), dtype=bool)
    first[1:] = ids[1:] != ids[:-1]
    return ids[first]


def _bits(ids: Array) -> Array:
    """Ids as they are compared: text, or ``int64``, where those from 2**63 on are negative."""
    return ids if ids.dtype.kind == "S" else ids.astype(np.int64, copy=False)


def _shown(value: object) -> str:
    return repr(value.decode(errors="replace")) if isinstance(value, bytes) else str(value)
