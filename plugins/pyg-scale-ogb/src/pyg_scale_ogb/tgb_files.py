"""The files of the Temporal Graph Benchmark, as their archives unpack."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Array = NDArray[Any]

LARGEST = 2**53
"""Integers up to here are exact as floating point numbers."""

_MOST_WORDS = 5000  # by which tgbl-comment divides numbers of words
_LETTERS = 8  # of a call sign and of a type of aircraft, in tgbl-flight


@dataclass(frozen=True)
class TGBFacts:
    """A data set of links.

    Attributes:
        name: Such as ``"tgbl-wiki"``.
        form: The columns of its table: ``"jodie"``, ``"weights"``, ``"comments"``, ``"flights"``.
        version: Of its files.
    """

    name: str
    form: str
    version: int = 1

    @property
    def folder(self) -> str:
        return self.name.replace("-", "_")

    def file(self, kind: str, suffix: str) -> str:
        """The name of a file, such as the table of events or the negatives of a split."""
        version = f"_v{self.version}" if self.version > 1 else ""
        return f"{self.name}_{kind}{version}.{suffix}"


_SETS = {
    facts.name: facts
    for facts in (
        TGBFacts("tgbl-wiki", "jodie", 2),
        TGBFacts("tgbl-subreddit", "jodie"),
        TGBFacts("tgbl-lastfm", "jodie"),
        TGBFacts("tgbl-uci", "jodie"),
        TGBFacts("tgbl-enron", "jodie"),
        TGBFacts("tgbl-review", "weights", 2),
        TGBFacts("tgbl-coin", "weights", 2),
        TGBFacts("tgbl-comment", "comments"),
        TGBFacts("tgbl-flight", "flights", 2),
    )
}
_OTHER_TASKS = {
    "tgbn-": "node properties",
    "tkgl-": "knowledge graphs",
    "thgl-": "heterogeneous graphs",
}


def tgb_facts(name: str) -> TGBFacts:
    """The facts about a data set.

    Raises:
        ValueError: If it is unknown; says what there is.
        NotImplementedError: If it is one of another task of TGB.
    """
    if name in _SETS:
        return _SETS[name]
    if task := _OTHER_TASKS.get(name[:5]):
        raise NotImplementedError(
            f"{name} is a data set of {task}, whose files are not read: only those of links are, "
            f"{', '.join(_SETS)}. Build a TemporalData of what TGB's own package loads"
        )
    near = difflib.get_close_matches(name, _SETS, 1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown data set {name!r}: {meant}There are {', '.join(_SETS)}")


def tgb_folder(facts: TGBFacts, root: str | PathLike[str]) -> Path:
    """The folder of a data set.

    Raises:
        FileNotFoundError: If its table of events is not there; names it.
    """
    folder = Path(root) / facts.folder
    table = folder / facts.file("edgelist", "csv")
    if not table.is_file():
        raise FileNotFoundError(
            f"there is no file {str(table)!r}: unpack the archive of {facts.name} (version "
            f"{facts.version}) from https://tgb.complexdatalab.com into {str(folder)!r}"
        )
    return folder


class Piece(NamedTuple):
    """Some events in their order: ends ``int64``, times ``int64`` seconds, ``msg`` ``float32``."""

    src: Array
    dst: Array
    t: Array
    msg: Array


class TGBTable:
    """The events of a data set, numbered as in TGB.

    In tables in the form of JODIE, sources are numbers, and destinations are numbered after the
    last source. In the others, nodes are texts, and are numbered as they first occur, the source of
    an event before its destination.

    Args:
        facts: The data set.
        folder: Its folder.
    """

    def __init__(self, facts: TGBFacts, folder: Path) -> None:
        self.facts, self.path = facts, folder / facts.file("edgelist", "csv")

    def pieces(self, rows: int) -> Iterator[Piece]:
        """Events in pieces of at most ``rows``. In the form of JODIE, destinations count from 0:
        :meth:`shift` is to be added.

        Raises:
            ValueError: If the table is damaged; names the row.
        """
        numbers: dict[str, int] = {}
        done = 0
        for table in self._tables(rows):
            try:
                yield _PARSERS[self.facts.form](table, numbers)
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise ValueError(
                    f"{self.path} has a row among rows {done + 1} to {done + len(table)} that is "
                    f"no event of {self.facts.name}: {error}"
                ) from None
            done += len(table)

    def shift(self, largest_source: int) -> int:
        """The number of the first destination."""
        return largest_source + 1 if self.facts.form == "jodie" else 0

    def _tables(self, rows: int) -> Iterator[pd.DataFrame]:
        options: dict[str, Any] = {"header": None, "skiprows": 1, "chunksize": max(1, rows)}
        if self.facts.form != "jodie":
            options |= {"dtype": str, "keep_default_na": False}
        try:
            with pd.read_csv(self.path, **options) as opened:
                yield from opened
        except pd.errors.EmptyDataError:
            raise ValueError(f"{self.path} has no events") from None
        except (pd.errors.ParserError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path} is damaged: {error}") from None


def _jodie(table: pd.DataFrame, numbers: dict[str, int]) -> Piece:
    columns = table.to_numpy(np.float64)
    if columns.shape[1] < 4 or not np.isfinite(columns).all():
        raise ValueError("a number is missing or infinite")
    if (np.abs(columns[:, :3]) > LARGEST).any():
        raise ValueError("a node or a time is beyond 2**53")
    ends = columns[:, :2]
    if (ends < 0).any() or (ends != np.floor(ends)).any():
        raise ValueError("a node is no number from 0 on")
    src, dst = (ends[:, i].astype(np.int64) for i in range(2))
    return Piece(src, dst, columns[:, 2].astype(np.int64), columns[:, 4:].astype(np.float32))


def _weights(table: pd.DataFrame, numbers: dict[str, int]) -> Piece:
    src, dst = _ends(table, numbers)
    weight = _finite(table, 3)
    if (weight < 0).any():
        raise ValueError("a weight is negative")
    weight = np.log2(np.where(weight == 0, 1, weight))
    return Piece(src, dst, _times(table), weight.astype(np.float32)[:, None])


def _comments(table: pd.DataFrame, numbers: dict[str, int]) -> Piece:
    src, dst = _ends(table, numbers)
    words, score = (_finite(table, i) for i in (3, 4))
    share = words / _MOST_WORDS  # which TGB has in two columns
    msg = np.stack([share, share, score], axis=1)
    return Piece(src, dst, _times(table), msg.astype(np.float32))


def _finite(table: pd.DataFrame, column: int) -> Array:
    values = table[column].to_numpy(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("a number is missing or infinite")
    return values


def _flights(table: pd.DataFrame, numbers: dict[str, int]) -> Piece:
    src, dst = _ends(table, numbers)
    sign, kind = table[3], table[4]
    kind = kind.where(kind.str.len() <= _LETTERS, "")
    text = sign.str.ljust(_LETTERS, "!") + kind.str.ljust(_LETTERS, "!")
    if (text.str.len() != 2 * _LETTERS).any():
        raise ValueError(f"a call sign has more than {_LETTERS} letters")
    letters = np.array([[_letter(letter) for letter in row] for row in text], np.float32)
    return Piece(src, dst, _times(table), letters.reshape(len(table), 2 * _LETTERS))


def _letter(letter: str) -> float:
    if letter.isnumeric():
        return float(letter)
    return -1.0 if letter == "!" else float(ord(letter.upper()) - 35)


_PARSERS = {"jodie": _jodie, "weights": _weights, "comments": _comments, "flights": _flights}


def _times(table: pd.DataFrame) -> Array:
    """Seconds since 1970; days are those of UTC."""
    times = table[0]
    if times.iloc[0].isdigit():
        return times.to_numpy(np.int64)
    days = pd.to_datetime(times, format="%Y-%m-%d").to_numpy("datetime64[s]")
    return days.astype(np.int64)


def _ends(table: pd.DataFrame, numbers: dict[str, int]) -> tuple[Array, Array]:
    """The numbers of sources and destinations; new ones are numbered in the order of the table."""
    src, dst = table[1].tolist(), table[2].tolist()
    for pair in zip(src, dst, strict=True):
        for text in pair:
            if text not in numbers:
                numbers[text] = len(numbers)
    return tuple(  # type: ignore[return-value]
        np.fromiter((numbers[text] for text in texts), np.int64, len(texts)) for texts in (src, dst)
    )


def parts_of(t: Array) -> Array:
    """The part of each event ``uint8``, 0 for training, 1 for validation, 2 for test, by time."""
    if not len(t):
        return np.empty(0, np.uint8)
    first, second = np.quantile(t, [0.70, 0.85])
    return (t > first).astype(np.uint8) + (t > second).astype(np.uint8)


def negatives_file(facts: TGBFacts, folder: Path, part: str) -> Path:
    """The file of the negatives of a part, ``"val"`` or ``"test"``.

    Raises:
        ValueError: If there are none of such a part.
        FileNotFoundError: If the file is not there.
    """
    if part not in ("val", "test"):
        raise ValueError(f"there are negatives of 'val' and of 'test' (got {part!r})")
    path = folder / facts.file(f"{part}_ns", "pkl")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {os.fspath(path)!r}")
    return path
