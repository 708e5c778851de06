"""Missing rows of several planned requests, read at once by the first that is served.

The more rows of a file are read at a time, the closer they are, and the fewer and longer the reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pyg_scale.ops import memory, row_cache
from pyg_scale.store.cache.turns import LIMIT

Read = Callable[[Tensor, Tensor, Tensor], None]
"""Writes rows ``int64`` ``[m]`` to the positions ``int64`` ``[m]`` of ``out``
``uint8`` ``[n, row_bytes]``."""

_LOOK = 0.1


class PendingRead(Protocol):
    """The missing rows of one request, which are being read ahead."""

    def take(self, position: Tensor, out: Tensor, given_up: Callable[[], bool]) -> bool:
        """Like :meth:`CoalescedRead.bring`; to be called once."""

    def forget(self) -> None:
        """Release the rows, as nobody needs them any more."""


class CoalescedRead:
    """The missing rows of a few requests, any of which may be dropped.

    Args:
        rows: The missing rows of each request, ``int64``.
        row_bytes: Size of a row in bytes.

    Attributes:
        coming: If all rows are being read ahead, a function that waits for them and returns them.
        each: If the rows are read ahead per request, the object that supplies those of each.
    """

    def __init__(self, rows: Sequence[Tensor], row_bytes: int) -> None:
        self.rows, self.row_bytes = rows, row_bytes
        self.coming: Callable[[], Tensor] | None = None
        self.each: Sequence[PendingRead] | None = None
        self._ends = list(accumulate(each.numel() for each in rows))
        self._first = threading.Lock()
        self._finished = threading.Event()
        self._values: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of missing rows of all requests."""
        return self._ends[-1]

    def joined(self) -> Tensor:
        """The missing rows of all requests, one after the other."""
        # NumPy, as torch would start threads for this in every worker thread of a loader.
        return torch.from_numpy(np.concatenate([each.numpy() for each in self.rows]))

    def forget(self, number: int) -> None:
        """Release the rows of a request, which no longer needs them."""
        if self.each is not None:
            self.each[number].forget()

    def bring(
        self, number: int, position: Tensor, out: Tensor, read: Read, given_up: Callable[[], bool]
    ) -> bool:
        """Write the missing rows of a request.

        Args:
            number: The index of the request.
            position: ``int64``, the positions of its rows in ``out``.
            out: ``uint8`` ``[n, row_bytes]``, written to.
            read: Reads rows.
            given_up: Called from time to time; True ends the wait.

        Returns:
            True if they were written; otherwise the request must read them itself.
        """
        if self.each is not None:
            return self.each[number].take(position, out, given_up)
        if self._first.acquire(blocking=False):
            self._read(read)
        deadline = time.monotonic() + LIMIT
        while not self._finished.wait(_LOOK):
            if given_up() or time.monotonic() > deadline:
                return False
        if self._values is None:
            return False
        begin = self._ends[number - 1] if number else 0
        row_cache.scatter(self._values[begin : self._ends[number]], position, out)
        return True

    def _read(self, read: Read) -> None:
        try:
            if self.coming is not None:
                self._values = self.coming()
                return
            values = memory.empty([self.num_rows, self.row_bytes], torch.uint8)
            read(self.joined(), torch.from_numpy(np.arange(self.num_rows)), values)
            self._values = values
        except Exception:  # the requests get the error when they read the rows themselves
            pass
        finally:
            self.coming = None
            self._finished.set()
