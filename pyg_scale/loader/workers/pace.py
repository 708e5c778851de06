"""Small batches: made by threads, or by the thread that asks, as is measured to be faster.

A batch of a few hundred seeds takes less than a millisecond, most of it in Python. Threads that
make such batches wait for the interpreter, for each other and for the consumer, and can be slower
than the consumer alone. That depends on the batches, on the machine, and on what the consumer does
between two batches. So both ways are tried, and the faster one is used until the next trial.
Batches and their order are the same.
"""

from __future__ import annotations

from collections.abc import Generator
from statistics import median

SMALL_SECONDS = 2e-3
"""Seconds to make a batch; the other way is tried only where batches take less."""

WINDOW = 8
"""Batches of a measurement. Each way is measured twice, and its better time counts."""

REST = 1024
"""Batches for which the result of a trial holds."""

Course = Generator[bool, tuple[float, float], None]
"""Yields True if the thread that asks is to make the next batch, and False if other threads are. Is
sent when that batch was handed out (``time.perf_counter``), and the seconds that it took."""


class Pace:
    """The result of the last trial, for all passes over a loader."""

    def __init__(self) -> None:
        self._here = False
        self._rest = 0

    def course(self, ahead: int) -> Course:
        """The course of a pass.

        Args:
            ahead: Batches that threads have under way. So many are made before threads are
                measured, which begin with none.
        """
        while True:
            while self._rest > 0:
                self._rest -= 1
                yield self._here
            best = {False: float("inf"), True: float("inf")}
            for here in (False, True, False, True):
                if here:
                    seconds, _ = yield from _window(True, 0, best[False])
                else:
                    seconds, made = yield from _window(False, ahead, float("inf"))
                    if median(made) > SMALL_SECONDS:
                        best[True] = float("inf")
                        break
                best[here] = min(best[here], seconds)
            self._here, self._rest = best[True] < best[False], REST


def _window(
    here: bool, skipped: int, longest: float
) -> Generator[bool, tuple[float, float], tuple[float, list[float]]]:
    """Measure the seconds between batches that are handed out.

    Args:
        here: True if the thread that asks makes them.
        skipped: Batches before.
        longest: Seconds after which it ends early.

    Returns:
        The seconds for :data:`WINDOW` batches, and those that each took to make.
    """
    for _ in range(skipped):
        yield here
    begin, _ = yield here
    now, made = begin, []
    for _ in range(WINDOW):
        now, seconds = yield here
        made.append(seconds)
        if now - begin > longest:
            break
    return now - begin, made
