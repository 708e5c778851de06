"""Rounds of measurements: every case once per round, so that a slow minute affects all alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
