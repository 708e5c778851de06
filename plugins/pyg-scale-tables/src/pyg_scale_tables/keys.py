"""Primary keys, and the rows that foreign keys refer to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyg_scale.convert.table import Array
from pyg_scale_tables.columnar import byte_strings

_SPREAD = 4  # a table over all keys may have so many entries a key
_LONGEST = 4096  # bytes of a key
_HUGE = 2.0**63

RowName = Callable[[int], str]
"""The name of a row and its column in errors."""


def plain_keys(values: Any, begin: int, name: RowName) -> tuple[Array, Array | None]:
    """Keys as NumPy has them, and where there are any.

    Args:
        values: An Arrow array of integers, of text, or of floating point numbers that are integers
            (as pandas makes of integers where some are missing).
        begin: The row of the first.
        name: Names a row.

    Returns:
        The keys that are not missing, ``int64`` or text in UTF-8 (dtype ``S``), and a mask
        ``bool`` ``[n]`` of the rows that have one; ``None`` if all have.

    Raises:
        TypeError: If they are something else.
        ValueError: If a number is no integer, or too large.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    has = None
    if values.null_count:
        has = values.is_valid().to_numpy(zero_copy_only=False)
        values = values.drop_null()
    kind = values.type
    if is_text(kind):
        longest = pc.max(pc.binary_length(values)).as_py() or 0
        if longest > _LONGEST:
            row = int(pc.index(pc.binary_length(values), longest).as_py())
            raise ValueError(
                f"{name(begin + _row(has, row))} is a key of {longest} bytes, at most {_LONGEST} "
                "are read"
            )
        return byte_strings(values, lambda row: name(begin + _row(has, row))), has
    if pa.types.is_null(kind):
        return np.empty(0, np.int64), np.zeros(len(has) if has is not None else 0, bool)
    if pa.types.is_floating(kind):
        return _integers(values.to_numpy(zero_copy_only=False), begin, has, name)
    if pa.types.is_integer(kind):
        try:
            return np.asarray(pc.cast(values, pa.int64())), has
        except pa.ArrowInvalid:
            found = np.asarray(values)
            row = int((found > np.uint64(2**63 - 1)).argmax())
            raise ValueError(
                f"{name(begin + _row(has, row))} is {found[row]}: keys are less than 2**63"
            ) from None
    raise TypeError(f"{name(begin)} holds {kind}: keys are integers or text")


def _integers(
    values: Array, begin: int, has: Array | None, name: RowName
) -> tuple[Array, Array | None]:
    there = ~np.isnan(values)
    if not there.all():
        values = values[there]
        mask = np.zeros(len(there) if has is None else len(has), bool)
        mask[there.nonzero()[0] if has is None else has.nonzero()[0][there]] = True
        has = mask
    wrong = (values != np.floor(values)) | (np.abs(values) >= _HUGE)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{name(begin + _row(has, row))} is {values[row]}: keys are integers or text"
        )
    return values.astype(np.int64), has


def _row(has: Array | None, place: int) -> int:
    return place if has is None else int(has.nonzero()[0][place])


def is_text(kind: pa.DataType) -> bool:
    """Return True for a type of text."""
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


class KeyIndex:
    """The row of each primary key of a table.

    Integers that are close together are looked up in a table over all of them, others and text in
    sorted order, text by a hash that is compared with the text itself.

    Args:
        keys: ``int64`` ``[n]`` or text (dtype ``S``) ``[n]``, by row.
        name: Names a row.
        place: Names a row without its table and column.

    Raises:
        ValueError: If a key is there twice; names both rows.
    """

    def __init__(self, keys: Array, name: RowName, place: RowName = "row {}".format) -> None:
        self.keys, self._name, self._place = keys, name, place
        self._first = 0
        self._table: Array | None = None
        self._sorted: Array | None = None
        self._order: Array | None = None
        if keys.dtype.kind == "S":
            self._sort(_hashes(keys))
            self._check_texts()
        elif len(keys):
            low, high = int(keys.min()), int(keys.max())
            if high - low < _SPREAD * len(keys) + (1 << 16):
                self._tabulate(low, high)
            else:
                self._sort(keys)
                same = (self._sorted[1:] == self._sorted[:-1]).nonzero()[0]
                if len(same):
                    self._refuse(*sorted(self._order[same[0] : same[0] + 2].tolist()))

    @property
    def kind(self) -> str:
        """``"text"`` or ``"integers"``."""
        return "text" if self.keys.dtype.kind == "S" else "integers"

    @property
    def is_positions(self) -> bool:
        """True if every key is the number of its row."""
        return self._table is None and self._sorted is None and self._first == 0

    def _tabulate(self, low: int, high: int) -> None:
        size, rows = len(self.keys), np.arange(len(self.keys), dtype=np.int64)
        if high - low + 1 == size and bool((self.keys == rows + low).all()):
            self._first = low
            return
        narrow = np.int32 if size < 2**31 else np.int64
        table = np.full(high - low + 1, -1, narrow)
        table[self.keys - low] = rows
        other = (table[self.keys - low] != rows).nonzero()[0]
        if len(other):
            self._refuse(int(other[0]), int(table[self.keys[other[0]] - low]))
        self._first, self._table = low, table

    def _sort(self, values: Array) -> None:
        self._order = np.argsort(values, kind="stable")
        self._sorted = values[self._order]

    def _check_texts(self) -> None:
        assert self._sorted is not None and self._order is not None
        distance = 1
        same = (self._sorted[1:] == self._sorted[:-1]).nonzero()[0]
        while len(same):
            left, right = self._order[same], self._order[same + distance]
            twice = (self.keys[left] == self.keys[right]).nonzero()[0]
            if len(twice):
                self._refuse(*sorted((int(left[twice[0]]), int(right[twice[0]]))))
            distance += 1
            same = same[same + distance < len(self._sorted)]
            same = same[self._sorted[same] == self._sorted[same + distance]]
        self._most = distance  # keys that share a hash

    def _refuse(self, first: int, second: int) -> None:
        raise ValueError(
            f"{self._name(second)} is the primary key {shown(self.keys[second])}, which "
            f"{self._place(first)} has already: make keys unique"
        )

    def rows(self, keys: Array) -> Array:
        """The row of each key, ``int64`` ``[n]``; -1 where there is none."""
        if not len(self.keys) or not len(keys):
            return np.full(len(keys), -1, np.int64)
        if self.keys.dtype.kind == "S":
            return self._rows_of_texts(keys)
        if self._sorted is None:
            size = len(self.keys) if self._table is None else len(self._table)
            place = keys - self._first
            inside = (place >= 0) & (place < size) & (keys >= self._first)
            if not inside.all():
                place[~inside] = 0
            found = place if self._table is None else self._table[place].astype(np.int64)
            found[~inside] = -1
            return found
        place = self._places(keys)
        assert self._order is not None
        return np.where(self._sorted[place] == keys, self._order[place], -1)

    def _places(self, values: Array) -> Array:
        """The places of values in sorted order; searched one after the other, as caches like it."""
        assert self._sorted is not None
        order = np.argsort(values)
        place = np.empty(len(values), np.int64)
        place[order] = np.searchsorted(self._sorted, values[order])
        return np.minimum(place, len(self._sorted) - 1)

    def _rows_of_texts(self, keys: Array) -> Array:
        assert self._sorted is not None and self._order is not None
        hashes = _hashes(keys)
        place, found = self._places(hashes), np.full(len(keys), -1, np.int64)
        for step in range(self._most):
            at = np.minimum(place + step, len(self._sorted) - 1)
            rows = self._order[at]
            right = (self._sorted[at] == hashes) & (self.keys[rows] == keys)
            found[right] = rows[right]
        return found


def shown(key: Any) -> str:
    """A key in errors."""
    if isinstance(key, bytes):
        text = repr(key.decode(errors="replace"))
        return text if len(text) <= 60 else f"{text[:57]}..."
    return str(key)


def _hashes(texts: Array) -> Array:
    """64 bits of each text, ``uint64`` ``[n]``, whatever the width of the array."""
    width = -(-texts.dtype.itemsize // 8) * 8
    words = texts.astype(f"S{width}").view(np.uint64).reshape(len(texts), width // 8)
    out = np.zeros(len(texts), np.uint64)
    for number in range(words.shape[1]):
        word = words[:, number]
        mixed = (word + np.uint64((number * 0x9E3779B97F4A7C15 + 1) % 2**64)) * _ODD
        mixed ^= mixed >> np.uint64(32)
        mixed *= _ODD
        mixed ^= mixed >> np.uint64(29)
        out += np.where(word != 0, mixed, np.uint64(0))
    return out


_ODD = np.uint64(0xD6E8FEB86659FD93)


def read_keys(
    batches: Iterator[tuple[int, Any]], name: RowName, limit: Callable[[int], None]
) -> Array:
    """All primary keys of a table, by row.

    Args:
        batches: Record batches of the one column, each with its first row.
        name: Names a row.
        limit: Called with the bytes that the keys take so far; refuses too many.

    Raises:
        ValueError: If a key is missing.
        TypeError: If some are text and some are not.
    """
    found: list[Array] = []
    size = 0
    for begin, batch in batches:
        keys, has = plain_keys(batch.column(0), begin, name)
        if has is not None and not has.all():
            row = int((~has).argmax())
            raise ValueError(f"{name(begin + row)} is missing: give every row a primary key")
        found.append(keys)
        size += len(keys)
        limit(size * max(each.dtype.itemsize for each in found))
    return np.concatenate(found) if found else np.empty(0, np.int64)
