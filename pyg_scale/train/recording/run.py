"""A recording as it is read: what every rank wrote, checked line by line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyg_scale.errors import GraphDirectoryError, RecordingError
from pyg_scale.files.npy import open_regular
from pyg_scale.loader.stats import STAGES
from pyg_scale.train.steps import COUNTS, Step

FORMAT = 1
SESSION = "session-{}"
_SESSION = re.compile(r"session-(\d{1,9})")
_RANK = re.compile(r"rank-(\d{1,6})\.jsonl")
_LONGEST = 1 << 20  # bytes of a line
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Span:
    """Something besides steps that took a while, such as a validation; in seconds."""

    name: str
    begin: float
    seconds: float


@dataclass(frozen=True)
class Memory:
    """Bytes that a process had at a time, and on its device."""

    begin: float
    process: int
    device: int = 0


@dataclass(frozen=True)
class Rank:
    """The recording of one rank. Times are seconds since all ranks began together.

    Attributes:
        rank: Which.
        host: The name of its machine.
        pid: The id of its process.
        device: The type of the model's device.
        waiting: Whether waiting for other ranks was told apart from computing.
        steps: In order.
        spans: What else took a while.
        memory: In order.
        torn: Whether its last line is not whole: the process was killed.
    """

    rank: int
    host: str
    pid: int
    device: str
    waiting: bool
    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    memory: tuple[Memory, ...]
    torn: bool


@dataclass(frozen=True)
class Run:
    """A session of a recorded run.

    Attributes:
        path: The folder of the run.
        session: Counts the starts of the run from 1.
        num_sessions: How many there are.
        world_size: How many ranks it had.
        time: When rank 0 began, seconds since 1970.
        version: The pyg_scale that recorded it.
        ranks: Those whose files are there, by rank.
    """

    path: Path
    session: int
    num_sessions: int
    world_size: int
    time: float
    version: str
    ranks: tuple[Rank, ...]


def sessions(path: Path) -> list[int]:
    """The numbers of the sessions in the folder of a run, ascending.

    Raises:
        OSError: If it cannot be read.
    """
    return sorted(int(m[1]) for each in path.iterdir() if (m := _SESSION.fullmatch(each.name)))


def read_run(path: str | Path, session: int | None = None) -> Run:
    """Read a recording.

    Args:
        path: The folder that was given to a :class:`~pyg_scale.train.recording.Recorder`.
        session: Which start of the run; by default the last one.

    Raises:
        RecordingError: If there is none, or one is damaged or of another version; names the file.
    """
    folder = Path(path)
    try:
        there = sessions(folder)
    except OSError as error:
        raise RecordingError(f"{folder} cannot be read: {error.strerror}") from None
    if not there:
        raise RecordingError(
            f"{folder} is not the folder of a recorded run: it has no session-1; give the folder "
            "that was given to Recorder"
        )
    chosen = there[-1] if session is None else session
    if chosen not in there:
        raise RecordingError(
            f"{folder} has no session {chosen}; it has {', '.join(map(str, there))}"
        )
    place = folder / SESSION.format(chosen)
    names = [each.name for each in place.iterdir() if _RANK.fullmatch(each.name)]
    if not names:
        raise RecordingError(f"{place} has no file of a rank")
    read = [_read_rank(place / name) for name in names]
    read.sort(key=lambda pair: pair[1].rank)
    headers = [header for header, _ in read]
    for header, rank in read:
        for name in ("session", "world_size"):
            if header[name] != headers[0][name]:
                raise RecordingError(
                    f"{place}: rank {rank.rank} has {name} {header[name]}, rank "
                    f"{read[0][1].rank} has {headers[0][name]}: the files are of different runs"
                )
    return Run(
        folder,
        chosen,
        len(there),
        headers[0]["world_size"],
        headers[0]["time"],
        headers[0]["version"],
        tuple(rank for _, rank in read),
    )


def _read_rank(path: Path) -> tuple[dict[str, Any], Rank]:
    header: dict[str, Any] = {}
    steps: list[Step] = []
    spans: list[Span] = []
    memory: list[Memory] = []
    torn = False
    try:
        with open(open_regular(path.name, path.parent), "rb") as source:
            number = 0
            while data := source.readline(_LONGEST):
                number += 1
                if torn := not data.endswith(b"\n"):
                    if len(data) == _LONGEST:
                        raise _Wrong(number, "is too long")
                    break  # the process was killed while it wrote
                line = _Line(_object(data, number), number)
                if number == 1:
                    header = _header(line)
                elif "step" in line.found:
                    steps.append(_step(line))
                elif "span" in line.found:
                    spans.append(
                        Span(line.text("span"), line.number("begin"), line.positive("seconds"))
                    )
                else:
                    device = int(line.positive("device_memory", 0))
                    size = int(line.positive("memory"))
                    memory.append(Memory(line.number("begin"), size, device))
        if not header:
            raise _Wrong(1, "is missing")
        match = _RANK.fullmatch(path.name)
        if match is None or int(match[1]) != header["rank"]:
            raise _Wrong(1, f"is of rank {header['rank']}")
        if header["rank"] >= header["world_size"]:
            raise _Wrong(1, f"is of rank {header['rank']} of {header['world_size']}")
    except _Wrong as error:
        raise RecordingError(f"{path}: line {error.line} {error}") from None
    except (OSError, GraphDirectoryError) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from None
    rank = Rank(
        header["rank"],
        header["host"],
        header["pid"],
        header["device"],
        header["waiting"],
        tuple(steps),
        tuple(spans),
        tuple(memory),
        torn,
    )
    return header, rank


class _Wrong(Exception):
    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


def _object(data: bytes, number: int) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise _Wrong(number, "is not JSON") from None
    if not isinstance(found, dict):
        raise _Wrong(number, "is no object")
    return found


@dataclass(frozen=True)
class _Line:
    """A line, whose values are what they must be or raise."""

    found: Mapping[str, Any]
    line: int

    def number(self, name: str, default: float | None = None) -> float:
        value = self.found.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Wrong(self.line, f"has no number {name!r}")
        if not abs(value) < 1e18:
            raise _Wrong(self.line, f"has {name!r} out of range")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value < 0:
            raise _Wrong(self.line, f"has a negative {name!r}")
        return value

    def whole(self, name: str) -> int:
        value = self.found.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 60:
            raise _Wrong(self.line, f"has no whole number {name!r}")
        return value

    def text(self, name: str) -> str:
        value = self.found.get(name)
        if not isinstance(value, str) or len(value) > 1000:
            raise _Wrong(self.line, f"has no text {name!r}")
        return value

    def part(self, name: str) -> _Line:
        value = self.found.get(name, {})
        if not isinstance(value, dict):
            raise _Wrong(self.line, f"has no object {name!r}")
        return _Line(value, self.line)


def _header(line: _Line) -> dict[str, Any]:
    found = line.found.get("recording")
    if found is None:
        raise _Wrong(1, "is not the first line of a recording")
    if found != FORMAT:
        raise _Wrong(1, f"has format {found!r}, and this is format {FORMAT}: use the other release")
    waiting = line.found.get("waiting")
    return {
        **{name: line.whole(name) for name in ("session", "rank", "world_size", "pid")},
        **{name: line.text(name) for name in ("host", "device", "version")},
        "time": line.number("time"),
        "waiting": waiting is True,
    }


def _step(line: _Line) -> Step:
    stages, counts, values = line.part("stages"), line.part("counts"), line.part("values")
    return Step(
        number=line.whole("step"),
        epoch=line.whole("epoch"),
        begin=line.number("begin"),
        load=line.positive("load"),
        body=line.positive("body"),
        exchange=line.positive("exchange"),
        seeds=line.whole("seeds"),
        stages={name: stages.positive(name, 0) for name in STAGES if name in stages.found},
        counts={name: int(counts.positive(name, 0)) for name in COUNTS if name in counts.found},
        values={str(name): _value(values, name) for name in values.found},
    )


def _value(line: _Line, name: str) -> float:
    """A value that a user noted: of any size, as a loss that diverges is."""
    found = line.found[name]
    if isinstance(found, str) and found in _WORDS:
        return _WORDS[found]
    if not isinstance(found, int | float):
        raise _Wrong(line.line, f"has no number {name!r}")
    return as_float(found)


def as_float(value: Any) -> float:
    """A real number of any size as a float; beyond all of them it is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
