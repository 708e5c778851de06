"""Missing rows of planned requests, and the order in which requests are served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pyg_scale.ops import memory, row_cache

Read = Callable[[Tensor, Tensor, Tensor], None]
"""Writes rows ``int64`` ``[m]`` to the positions ``int64`` ``[m]`` of ``out``
``uint8`` ``[n, row_bytes]``."""

LIMIT = 60.0
"""Seconds that a request waits for earlier ones; after that it reads its rows itself."""

_LOOK = 0.1


class PendingRead(Protocol):
    """The missing rows of one request, which somebody reads for it."""

    def take(self, position: Tensor, out: Tensor, given_up: Callable[[], bool]) -> bool:
        """Wait for the rows and write them; to be called once.

        Args:
            position: ``int64``, the position of each of the request's rows in ``out``.
            out: ``uint8`` ``[n, row_bytes]``, written to.
            given_up: Called from time to time; True ends the wait.

        Returns:
            True if they were written; otherwise the request must read them itself.
        """

    def forget(self) -> None:
        """Release the rows, as nobody needs them any more."""


class CoalescedRead:
    """The missing rows of a few requests, read at once by the first that is served.

    The more rows of a file are read at a time, the closer they are, and the fewer and longer the
    reads. Any of the requests may be dropped.

    Args:
        rows: The missing rows of each request, ``int64``.
        row_bytes: Size of a row in bytes.
        read: Reads rows.

    Attributes:
        coming: If the rows were requested ahead, a function that waits for them and returns them.
    """

    def __init__(self, rows: Sequence[Tensor], row_bytes: int, read: Read) -> None:
        self.rows, self.row_bytes = rows, row_bytes
        self.coming: Callable[[], Tensor] | None = None
        self._read = read
        self._ends = list(accumulate(each.numel() for each in rows))
        self._first = threading.Lock()
        self._finished = threading.Event()
        self._values: Tensor | None = None

    def joined(self) -> Tensor:
        """The missing rows of all requests, one after the other."""
        # NumPy, as torch would start threads for this in every worker thread of a loader.
        return torch.from_numpy(np.concatenate([each.numpy() for each in self.rows]))

    def shares(self) -> list[PendingRead]:
        """The rows of each request."""
        return [_Share(self, number) for number in range(len(self.rows))]

    def take(
        self, number: int, position: Tensor, out: Tensor, given_up: Callable[[], bool]
    ) -> bool:
        """Write the rows of a request, given by its index; see :meth:`PendingRead.take`."""
        if self._first.acquire(blocking=False):
            self._bring()
        deadline = time.monotonic() + LIMIT
        while not self._finished.wait(_LOOK):
            if given_up() or time.monotonic() > deadline:
                return False
        if self._values is None:
            return False
        begin = self._ends[number - 1] if number else 0
        row_cache.scatter(self._values[begin : self._ends[number]], position, out)
        return True

    def _bring(self) -> None:
        try:
            if self.coming is not None:
                self._values = self.coming()
                return
            values = memory.empty([self._ends[-1], self.row_bytes], torch.uint8)
            self._read(self.joined(), torch.from_numpy(np.arange(self._ends[-1])), values)
            self._values = values
        except Exception:  # the requests get the error when they read the rows themselves
            pass
        finally:
            self.coming = None
            self._finished.set()


@dataclass
class _Share:
    of: CoalescedRead
    number: int

    def take(self, position: Tensor, out: Tensor, given_up: Callable[[], bool]) -> bool:
        return self.of.take(self.number, position, out, given_up)

    def forget(self) -> None:
        pass  # the others may still need theirs


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
