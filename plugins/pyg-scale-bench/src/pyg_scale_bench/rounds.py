"""Rounds of measurements: every case once per round, so that a slow minute affects all alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch
from tqdm import tqdm

OURS, PYG = "pyg_scale", "PyG"

_MOST_ROUNDS = 100


@dataclass(kw_only=True)
class Case:
    """A case to measure.

    Attributes:
        side: The side that it belongs to, such as :data:`OURS` or :data:`PYG`.
        error: The reason for missing numbers, in one line.
    """

    side: str
    error: str = ""


@dataclass(kw_only=True)
class Turns(Case):
    """A case, and what each round of it gave.

    Attributes:
        name: Its name in the tables.
        run: Measures it once.
        rounds: The results, the first of which only warms up.
    """

    name: str
    run: Callable[[], dict[str, float]]
    rounds: list[dict[str, float]] = field(default_factory=list)


AnyCase = TypeVar("AnyCase", bound=Case)


def take_turns(
    cases: Sequence[AnyCase],
    measure: Callable[[AnyCase], object],
    rounds: int,
    seconds: float = 0.0,
) -> None:
    """Measure every case once per round.

    Args:
        cases: The cases; one with an error is left out from then on.
        measure: A function that measures a case once.
        rounds: Number of rounds.
        seconds: Time for further rounds, at most 100 in all: one interruption is as long as many
            short steps.
    """
    begin = time.perf_counter()
    with tqdm(total=rounds * len(cases), leave=False, disable=None) as progress:
        for turn in range(max(rounds, _MOST_ROUNDS)):
            if turn >= rounds and time.perf_counter() - begin >= seconds:
                break
            for case in cases:
                attempt(case, measure)
                progress.update()


def in_turns(cases: Sequence[Turns], rounds: int) -> list[dict[str, Any]]:
    """The results of so many rounds and one to warm up, as they are kept in JSON."""
    take_turns(cases, lambda case: case.rounds.append(case.run()), rounds + 1)
    return [
        {"name": case.name, "side": case.side, "error": case.error, "rounds": case.rounds[1:]}
        for case in cases
    ]


def rate(case: Mapping[str, Any], count: str) -> float:
    """The median over rounds of a count per second, of a result of :func:`in_turns`."""
    return median(each[count] / each["seconds"] for each in case["rounds"])


def attempt(case: AnyCase, measure: Callable[[AnyCase], object]) -> None:
    """Measure a case, unless it failed before. Failures of other sides are results.

    Raises:
        Exception: If our side fails; the exception that it raised.
    """
    if case.error:
        return
    try:
        measure(case)
    except Exception as error:
        if case.side == OURS:
            raise
        case.error = in_one_line(error)


@contextlib.contextmanager
def threads_of_torch(number: int) -> Iterator[None]:
    """A context in which torch uses so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_one_line(error: Exception) -> str:
    """The type and message of an error; for an error in a worker process, those in the worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "worker process" in lines[0]:
        return lines[-1]
    return f"{type(error).__name__}: {' '.join(lines)}"
