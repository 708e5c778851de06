"""Access to the slots of a cache: requests take turns in the order of their plans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LIMIT = 60.0
"""Seconds that a request waits for earlier ones; after that it reads its rows itself."""

_LOOK = 0.1


class Turns:
    """Numbers given out in order, each of which can wait until all smaller ones are done."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._taken = 0
        self._first = 0  # the first number that is not done
        self._done: set[int] = set()

    def take(self) -> int:
        """The next number."""
        with self._condition:
            self._taken += 1
            return self._taken - 1

    def wait(self, number: int, given_up: Callable[[], bool], limit: float = LIMIT) -> bool:
        """Wait until all smaller numbers are done.

        Args:
            number: A number that was taken.
            given_up: Called from time to time; True ends the wait.
            limit: Seconds.

        Returns:
            True if they are done.
        """
        deadline = time.monotonic() + limit
        with self._condition:
            while self._first < number:
                left = deadline - time.monotonic()
                if left <= 0 or given_up():
                    return False
                self._condition.wait(min(left, _LOOK))
            return True

    def done(self, number: int) -> None:
        """Mark a number as done or not to be used; may be called twice."""
        with self._condition:
            if number < self._first:
                return
            self._done.add(number)
            while self._first in self._done:
                self._done.remove(self._first)
                self._first += 1
            self._condition.notify_all()
