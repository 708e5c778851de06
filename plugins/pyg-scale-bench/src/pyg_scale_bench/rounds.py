"""Rounds of measurements: every case once per round, so that a slow minute hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tqdm import tqdm

OURS, PYG = "pyg_scale", "PyG"

_MOST_ROUNDS = 100


@dataclass(kw_only=True)
class Case:
    """Something that is measured.

    Attributes:
        side: Whose it is, such as :data:`OURS` or :data:`PYG`.
        error: Why there are no numbers, in one line.
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
        cases: Left out from when on there is an error.
        measure: Measures a case once.
        rounds: How often.
        seconds: Within which there are more rounds, at most 100: one interruption is as long as
            many short steps.
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
    """Measure a case, unless it has failed before. What others cannot do is a finding.

    Raises:
        Exception: What ours raised.
    """
    if case.error:
        return
    try:
        measure(case)
    except Exception as error:
        if case.side == OURS:
            raise
        case.error = in_one_line(error)


def in_one_line(error: Exception) -> str:
    """An error's type and message; of one from a worker process, that of the worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "worker process" in lines[0]:
        return lines[-1]
    return f"{type(error).__name__}: {' '.join(lines)}"
