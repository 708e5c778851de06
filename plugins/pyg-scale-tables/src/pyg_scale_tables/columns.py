"""Columns of a table as torch_frame's semantic types: arrays with a row each, and statistics."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyg_scale.convert.table import Array
from pyg_scale.store.directory.frame import PADDING, TIME_PARTS
from pyg_scale_tables.keys import RowName, is_text
from pyg_scale_tables.manifest import TIME_UNITS, ColumnType

TextEmbedder = Callable[[list[str]], Any]
"""Embeds texts: ``[n, length]`` numbers of ``n`` texts."""

_SAMPLE = 1 << 17  # rows of which quantiles are taken
_MOST_CATEGORIES = 1 << 20
_LONGEST = 1024  # categories in a row
_DAY = 86_400 * 10**9
_FIRST, _LAST = -(2**63) + 1, 2**63 - 1


class Encoder(abc.ABC):
    """One column on its way to the array of its stype.

    Args:
        name: The column.
        row_name: Names a row of it.

    Attributes:
        shape: What one row of the column takes of a row of the array.
    """

    stype: str
    dtype: str
    shape: tuple[int, ...] = ()

    def __init__(self, name: str, row_name: RowName) -> None:
        self.name, self.row_name = name, row_name

    @abc.abstractmethod
    def encode(self, values: Any, begin: int, out: Array) -> None:
        """Encode consecutive rows.

        Args:
            values: An Arrow array.
            begin: The row of the first.
            out: Where to, ``[n, *shape]``.

        Raises:
            ValueError: If a value does not fit; names the row.
        """

    def measure(self, values: Any, begin: int) -> None:  # noqa: B027
        """Look at rows before all are encoded, if :attr:`measures` says so."""

    measures = False

    @abc.abstractmethod
    def details(self) -> dict[str, Any]:
        """Statistics of all rows, as JSON and arrays."""


class Numerical(Encoder):
    """Numbers as ``float32``; NaN where one is missing."""

    stype, dtype = "numerical", "float32"

    def __init__(self, name: str, row_name: RowName, num_rows: int) -> None:
        super().__init__(name, row_name)
        self._step = max(1, -(-num_rows // _SAMPLE))
        self._sample: list[Array] = []
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def encode(self, values: Any, begin: int, out: Array) -> None:
        if pa.types.is_decimal(values.type):
            values = pc.cast(values, pa.float64())
        elif pa.types.is_boolean(values.type):
            values = pc.cast(values, pa.int8())
        numbers = values.to_numpy(zero_copy_only=False)  # floats with NaN where some are missing
        row = _assign(out, numbers)
        if row is not None:
            raise ValueError(_too_large(self.row_name(begin + row), numbers[row]))
        self._sample.append(out[-begin % self._step :: self._step].copy())
        known = numbers[np.isfinite(numbers)] if numbers.dtype.kind == "f" else numbers
        if len(known):
            # Chan, Golub, LeVeque 1983: the moments of two sets together
            count, mean = len(known), float(known.mean(dtype=np.float64))
            squares = float(known.var(dtype=np.float64)) * count
            total, delta = self._count + count, mean - self._mean
            self._squares += squares + delta * delta * self._count * count / total
            self._mean += delta * count / total
            self._count = total

    def details(self) -> dict[str, Any]:
        sample = np.concatenate(self._sample) if self._sample else np.empty(0, np.float32)
        sample = sample[np.isfinite(sample)].astype(np.float64)
        if not self._count or not len(sample):
            return {"MEAN": 0.0, "STD": 1.0, "QUANTILES": [0.0] * 5}
        quantiles = np.quantile(sample, [0, 0.25, 0.5, 0.75, 1]).tolist()
        std = float(np.sqrt(self._squares / self._count))
        return {"MEAN": self._mean, "STD": std, "QUANTILES": quantiles}


def _assign(out: Array, numbers: Array) -> int | None:
    """Round to ``float32``, and return the place of a finite number that became infinite."""
    with np.errstate(over="ignore"):
        out[:] = numbers
    if numbers.dtype != np.float64:  # integers, too, are less than the largest float32
        return None
    wrong = np.isinf(out)
    if wrong.any():
        wrong &= np.isfinite(numbers)
    return int(wrong.argmax()) if wrong.any() else None


def _too_large(name: str, number: Any) -> str:
    return (
        f"{name} is {number}, beyond the range of float32, in which numbers are kept: scale the "
        "column, or list it under drop"
    )


class Vocabulary:
    """The number of each category, in the order in which they appear.

    Args:
        name: The column in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers: dict[Any, int] = {}
        self._counts = np.zeros(64, np.int64)

    def numbers(self, values: Any) -> Array:
        """The number of each value, ``int64`` ``[n]``; -1 where it is missing.

        Raises:
            ValueError: If there are too many categories.
        """
        if not pa.types.is_dictionary(values.type):
            values = pc.dictionary_encode(values)
        known = [
            -1 if value is None else self._numbers.setdefault(value, len(self._numbers))
            for value in values.dictionary.to_pylist()
        ]
        if len(self._numbers) > _MOST_CATEGORIES:
            raise ValueError(
                f"{self._name} has more than {_MOST_CATEGORIES:,} categories: give it another "
                "stype, or list it under drop"
            )
        codes = pc.fill_null(pc.cast(values.indices, pa.int64()), len(known))
        found = np.asarray([*known, -1], np.int64)[np.asarray(codes)]
        if len(self._counts) < len(self._numbers):
            more = np.zeros(2 * len(self._numbers), np.int64)
            more[: len(self._counts)] = self._counts
            self._counts = more
        there = found if not values.null_count and -1 not in known else found[found >= 0]
        self._counts += np.bincount(there, minlength=len(self._counts))
        return found

    def details(self) -> dict[str, Any]:
        """The categories in the order of their numbers, and how often each is there."""
        values = list(self._numbers)
        if values and isinstance(values[0], str):
            texts = np.array([text.encode() for text in values])
            found: Array = texts.view(np.uint8).reshape(len(values), texts.dtype.itemsize)
        else:
            found = np.array(values, bool if values and type(values[0]) is bool else np.int64)
        return {"categories": found, "counts": self._counts[: len(values)]}


class Categorical(Encoder):
    """Numbers of categories; -1 where one is missing."""

    stype, dtype = "categorical", "int64"

    def __init__(self, name: str, row_name: RowName) -> None:
        super().__init__(name, row_name)
        self._vocabulary = Vocabulary(row_name(0))

    def encode(self, values: Any, begin: int, out: Array) -> None:
        out[:] = self._vocabulary.numbers(values)

    def details(self) -> dict[str, Any]:
        return self._vocabulary.details()


class Multicategorical(Encoder):
    """Lists of categories, or texts in which they are separated, in rows of one length."""

    stype, dtype = "multicategorical", "int32"
    measures = True

    def __init__(self, name: str, row_name: RowName, sep: str | None) -> None:
        super().__init__(name, row_name)
        self._sep, self._vocabulary = sep, Vocabulary(row_name(0))
        self.shape = (1,)

    def measure(self, values: Any, begin: int) -> None:
        lengths = pc.fill_null(pc.list_value_length(self._lists(values)), 1)
        longest = pc.max(lengths).as_py() or 1
        if longest > _LONGEST:
            row = begin + int(np.asarray(lengths).argmax())
            raise ValueError(
                f"{self.row_name(row)} has {longest} categories, at most {_LONGEST} are kept"
            )
        self.shape = (max(self.shape[0], longest),)

    def _lists(self, values: Any) -> Any:
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if not is_text(values.type):
            return values
        if self._sep is None:
            raise ValueError(
                f"{self.row_name(0)} holds text: say which sep separates its categories, as in "
                f"{self.name}: {{stype: multicategorical, sep: ','}}"
            )
        blank = pc.equal(pc.utf8_trim_whitespace(values), "")
        parts = pc.split_pattern(values, self._sep)
        empty = pa.scalar([], parts.type)
        return pc.if_else(pc.fill_null(blank, False), empty, parts)

    def encode(self, values: Any, begin: int, out: Array) -> None:
        lists = self._lists(values)
        lengths = np.asarray(pc.fill_null(pc.list_value_length(lists), 0))
        flat = lists.flatten()
        if self._sep is not None:
            flat = pc.utf8_trim_whitespace(flat)
        numbers = self._vocabulary.numbers(flat)
        out[:] = PADDING
        out[np.arange(out.shape[1]) < lengths[:, None]] = numbers
        if lists.null_count:
            out[np.asarray(lists.is_null()), 0] = -1

    def details(self) -> dict[str, Any]:
        return self._vocabulary.details()


class Timestamps(Encoder):
    """Year, month, day, day of the week, hour, minute, second in UTC; -1 where one is missing."""

    stype, dtype, shape = "timestamp", "int64", (TIME_PARTS,)

    def __init__(self, name: str, row_name: RowName, num_rows: int, unit: str | None) -> None:
        super().__init__(name, row_name)
        self._unit = unit
        self._step = max(1, -(-num_rows // _SAMPLE))
        self._sample: list[Array] = []
        self._least, self._largest = _LAST, _FIRST

    def encode(self, values: Any, begin: int, out: Array) -> None:
        missing = np.asarray(values.is_null()) if values.null_count else None
        time = nanoseconds(values, begin, self._unit, self.row_name, missing_is=0)
        time_parts(time, out)
        if missing is not None:
            out[missing] = -1
        known = time if missing is None else time[~missing]
        self._sample.append(known[:: self._step].copy())
        if len(known):
            self._least = min(self._least, int(known.min()))
            self._largest = max(self._largest, int(known.max()))

    def details(self) -> dict[str, Any]:
        if self._largest < self._least:
            names = ("OLDEST_TIME", "MEDIAN_TIME", "NEWEST_TIME")
            return {"YEAR_RANGE": [-1, -1], **{name: [-1] * TIME_PARTS for name in names}}
        sample = np.sort(np.concatenate(self._sample))
        times = np.array([self._least, sample[len(sample) // 2], self._largest])
        parts = np.empty((3, TIME_PARTS), np.int64)
        time_parts(times, parts)
        oldest, median, newest = parts.tolist()
        return {
            "YEAR_RANGE": [oldest[0], newest[0]],
            "OLDEST_TIME": oldest,
            "MEDIAN_TIME": median,
            "NEWEST_TIME": newest,
        }


class Embedding(Encoder):
    """Lists of numbers, all of one length, as ``float32``; NaN where a list is missing."""

    stype, dtype = "embedding", "float32"
    measures = True

    def __init__(self, name: str, row_name: RowName, kind: pa.DataType) -> None:
        super().__init__(name, row_name)
        self._known = pa.types.is_fixed_size_list(kind)
        self.shape = (kind.list_size if self._known else 0,)

    def measure(self, values: Any, begin: int) -> None:
        if self._known:
            return
        lengths = values.drop_null().value_lengths() if len(values) else values
        if len(lengths):
            self._known, self.shape = True, (lengths[0].as_py(),)

    def encode(self, values: Any, begin: int, out: Array) -> None:
        length = self.shape[0]
        missing = np.asarray(values.is_null()) if values.null_count else np.zeros(len(out), bool)
        lengths = np.asarray(pc.fill_null(pc.list_value_length(values), length))
        if (lengths != length).any():
            row = int((lengths != length).argmax())
            raise ValueError(
                f"{self.row_name(begin + row)} has {lengths[row]} numbers, expected {length} as in "
                "the first row"
            )
        flat = values.drop_null().flatten().to_numpy(zero_copy_only=False)
        out[missing] = np.nan
        if flat.dtype == np.float64:
            wide, flat = flat, np.empty(len(flat), np.float32)
            place = _assign(flat, wide)
            if place is not None:
                row = int((~missing).nonzero()[0][place // length])
                raise ValueError(_too_large(self.row_name(begin + row), wide[place]))
        out[~missing] = flat.reshape(-1, length)

    def details(self) -> dict[str, Any]:
        return {}


class EmbeddedText(Embedding):
    """Texts that an embedder of the user turns into numbers."""

    stype = "text_embedded"
    measures = False

    def __init__(self, name: str, row_name: RowName, embedder: TextEmbedder) -> None:
        super().__init__(name, row_name, pa.list_(pa.float32()))
        self._embedder = embedder
        self.shape = (self._embed([""]).shape[1],)

    def _embed(self, texts: list[str]) -> Array:
        found = np.asarray(self._embedder(texts), np.float32)
        if found.ndim != 2 or len(found) != len(texts):
            raise ValueError(
                f"text_embedder made numbers of shape {list(found.shape)} of {len(texts)} texts, "
                f"expected [{len(texts)}, length]"
            )
        return found

    def encode(self, values: Any, begin: int, out: Array) -> None:
        found = self._embed([text or "" for text in values.to_pylist()])
        if found.shape[1] != out.shape[1]:
            raise ValueError(
                f"{self.row_name(begin)}: text_embedder made {found.shape[1]} numbers of a text, "
                f"{out.shape[1]} before"
            )
        out[:] = found


def encoder_of(
    name: str,
    kind: pa.DataType,
    wanted: ColumnType,
    num_rows: int,
    row_name: RowName,
    embedder: TextEmbedder | None,
    unit: str | None = None,
) -> Encoder:
    """The encoder of a column.

    Args:
        name: The column.
        kind: What it holds.
        wanted: Its stype.
        num_rows: Rows of the table.
        row_name: Names a row of the column.
        embedder: Embeds texts.
        unit: Of times that are integers.

    Raises:
        TypeError: If what it holds cannot be of that stype.
        ValueError: If it is text to be embedded, and there is no embedder.
    """
    stype = wanted.stype
    if not _can_be(stype, kind):
        raise TypeError(
            f"{row_name(0)} holds {kind}, which cannot be {stype}: give it another stype, or list "
            "it under drop"
        )
    if stype == "numerical":
        return Numerical(name, row_name, num_rows)
    if stype == "categorical":
        return Categorical(name, row_name)
    if stype == "multicategorical":
        return Multicategorical(name, row_name, wanted.sep)
    if stype == "timestamp":
        return Timestamps(name, row_name, num_rows, unit)
    if not is_text(kind):
        return Embedding(name, row_name, kind)
    if embedder is None:
        raise ValueError(
            f"{row_name(0)} is text to be embedded: pass text_embedder= in Python, a function from "
            "texts to numbers [n, length], or give lists of numbers"
        )
    return EmbeddedText(name, row_name, embedder)


def _can_be(stype: str, kind: pa.DataType) -> bool:
    types, lists = pa.types, _is_list(kind)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if stype == "numerical":
        return bool(number or types.is_boolean(kind))
    if stype == "categorical":
        integers = types.is_integer(kind) and not types.is_uint64(kind)
        return bool(is_text(kind) or integers or types.is_boolean(kind))
    if stype == "multicategorical":
        of = kind.value_type if lists else kind
        return bool(is_text(of) or (lists and types.is_integer(of)))
    if stype == "timestamp":
        return bool(_is_time(kind) or is_text(kind) or types.is_integer(kind))
    numbers = lists and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type))
    return bool(numbers or (stype == "text_embedded" and is_text(kind)))


def inferred(kind: pa.DataType, first: Any) -> ColumnType | None:
    """The stype of a column for which the manifest has none; ``None`` to leave it out.

    Args:
        kind: What it holds.
        first: Its first rows, an Arrow array: text is categorical if at most half as many texts
            are different as there are.
    """
    types = pa.types
    if types.is_boolean(kind):
        return ColumnType("categorical")
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return ColumnType("numerical")
    if _is_time(kind):
        return ColumnType("timestamp")
    if is_text(kind):
        distinct = pc.count_distinct(first, mode="only_valid").as_py()
        few = 0 < 2 * distinct <= len(first) - first.null_count
        return ColumnType("categorical") if few else None
    if _is_list(kind):
        if types.is_floating(kind.value_type):
            return ColumnType("embedding")
        if is_text(kind.value_type) or types.is_integer(kind.value_type):
            return ColumnType("multicategorical")
    return None


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


# Times ####################################################################################


def nanoseconds(
    values: Any, begin: int, unit: str | None, name: RowName, missing_is: int | None = None
) -> Array:
    """Times as UTC nanoseconds since 1970, ``int64`` ``[n]``.

    A time without a zone is one in UTC, a date its midnight. Text is as in ISO 8601;
    digits after those of nanoseconds are left out.

    Args:
        values: An Arrow array of timestamps, dates, text, or integers in a unit.
        begin: The row of the first.
        unit: ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``, for integers.
        name: Names a row.
        missing_is: The time of a missing value; ``None`` to refuse one.

    Raises:
        ValueError: If a time is missing, cannot be read, or is out of the range of 64 bits (the
            years 1678 to 2261); names the row.
        TypeError: If the values are no times.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.null_count and missing_is is None:
        row = int(np.asarray(values.is_null()).argmax())
        raise ValueError(f"{name(begin + row)} is missing: give every row a time")
    kind, rest = values.type, None
    if is_text(kind):
        times, rest = _read_texts(values, begin, name)
    elif pa.types.is_integer(kind):
        if unit is None:
            raise ValueError(
                f"{name(begin)} holds integers: say their time_unit (s, ms, us or ns) in the "
                "manifest"
            )
        times = values
    elif _is_time(kind):
        if pa.types.is_date(kind):
            values = pc.cast(values, pa.timestamp("s"))
        unit = values.type.unit
        times = values
    else:
        raise TypeError(f"{name(begin)} holds {kind}, which is no time")
    if is_text(kind):
        unit = "us"
    ticks = times if pa.types.is_integer(times.type) else times.view(pa.int64())
    found = np.asarray(pc.fill_null(pc.cast(ticks, pa.int64()), 0))
    factor = TIME_UNITS[unit or "ns"]
    limit = _LAST // factor - (rest is not None)
    if len(found) and (int(found.max()) > limit or int(found.min()) < -limit):
        row = int(((found > limit) | (found < -limit)).argmax())
        raise ValueError(
            f"{name(begin + row)} is {times[row]}: times are kept as 64-bit nanoseconds, from the "
            "year 1678 to 2261"
        )
    found = found * factor if factor != 1 else found
    found = found if rest is None else found + rest
    if values.null_count and missing_is is not None:
        found = np.where(np.asarray(values.is_null()), missing_is, found)
    return found


def _of_text(values: Any) -> tuple[Any, Array | None]:
    """Times in microseconds, and the nanoseconds that come to them, if any text has these."""
    text = pc.utf8_trim_whitespace(pc.cast(values, pa.string()))
    zoned = pc.match_substring_regex(text, r"(Z|[+-]\d\d(:?\d\d)?)$")
    dated = pc.match_substring_regex(text, r"^\d{4}-\d\d-\d\d$")
    zoned = pc.and_(zoned, pc.invert(dated))
    known = pc.if_else(zoned, text, pc.binary_join_element_wise(text, "Z", ""))
    known = pc.if_else(dated, pc.binary_join_element_wise(text, " 00:00:00Z", ""), known)
    kind = pa.timestamp("us", "UTC")
    try:
        return pc.cast(known, kind), None
    except pa.ArrowInvalid:
        short = pc.replace_substring_regex(known, r"(:\d\d\.\d{6})\d+", r"\1")
        times = pc.cast(short, kind)  # fails again if there are other reasons
        digits = pc.extract_regex(known, r":\d\d\.\d{6}(?P<rest>\d{1,3})")
        rest = pc.cast(pc.utf8_rpad(pc.struct_field(digits, "rest"), 3, "0"), pa.int64())
        return times, np.asarray(pc.fill_null(rest, 0))


def _read_texts(values: Any, begin: int, name: RowName) -> tuple[Any, Array | None]:
    try:
        return _of_text(values)
    except pa.ArrowInvalid:
        low, high = 0, len(values)  # the first row that is refused lies in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                _of_text(values.slice(low, middle - low))
                low = middle
            except pa.ArrowInvalid:
                high = middle
        raise ValueError(
            f"{name(begin + low)} is {str(values[low])[:60]!r}, which is no time as in ISO 8601, "
            "such as 2024-05-17 12:30:00"
        ) from None


def time_parts(time: Array, out: Array) -> None:
    """Year, month and day from 0, day of the week, hour, minute, second, as torch_frame has them.

    Args:
        time: UTC nanoseconds ``int64`` ``[n]``.
        out: Where to, ``[n, 7]``.
    """
    days = time // _DAY
    seconds = (time - days * _DAY) // 10**9
    dates = days.astype("M8[D]")
    months = dates.astype("M8[M]")
    since = months.astype(np.int64)
    out[:, 0] = since // 12 + 1970
    out[:, 1] = since % 12
    out[:, 2] = (dates - months.astype("M8[D]")).astype(np.int64)
    out[:, 3] = (days + 3) % 7
    out[:, 4] = seconds // 3600
    out[:, 5] = seconds // 60 % 60
    out[:, 6] = seconds % 60


def array_name(stype: str) -> str:
    """The stype of the array that a column goes to, as torch_frame puts embeddings together."""
    return "embedding" if stype == "text_embedded" else stype


def row_shape(encoders: Sequence[Encoder]) -> tuple[int, ...]:
    """The shape of a row of the array of some encoders, all of one stype."""
    stype = array_name(encoders[0].stype)
    if stype == "embedding":
        return (sum(each.shape[0] for each in encoders),)
    if stype == "multicategorical":
        return len(encoders), max(each.shape[0] for each in encoders)
    return len(encoders), *encoders[0].shape
