"""Rows that several coming requests miss, read at once by the first that is served.

The more rows of a file are wanted at a time, the closer they lie, and the fewer and longer are the
reads that bring them.
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


class Coming(Protocol):
    """The missing rows of one request, which were asked for."""

    def take(self, position: Tensor, out: Tensor, given_up: Callable[[], bool]) -> bool:
        """As :meth:`Together.bring`; once."""

    def forget(self) -> None:
        """Say that nobody needs them any more."""


class Together:
    """The rows of a few requests, none of which must be served.

    Args:
        rows: What each of them misses, ``int64``.
        row_bytes: Bytes of a row.

    Attributes:
        coming: Waits for all of them and returns them, if they were asked for already.
        each: What brings those of each request, if these were asked for one by one.
    """

    def __init__(self, rows: Sequence[Tensor], row_bytes: int) -> None:
        self.rows, self.row_bytes = rows, row_bytes
        self.coming: Callable[[], Tensor] | None = None
        self.each: Sequence[Coming] | None = None
        self._ends = list(accumulate(each.numel() for each in rows))
        self._first = threading.Lock()
        self._finished = threading.Event()
        self._values: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """How many rows all of them miss."""
        return self._ends[-1]

    def joined(self) -> Tensor:
        """What all of them miss, one after the other."""
        # NumPy, as torch would start threads for this in every worker thread of a loader.
        return torch.from_numpy(np.concatenate([each.numpy() for each in self.rows]))

    def forget(self, number: int) -> None:
        """Say that a request needs its rows no more."""
        if self.each is not None:
            self.each[number].forget()

    def bring(
        self, number: int, position: Tensor, out: Tensor, read: Read, given_up: Callable[[], bool]
    ) -> bool:
        """Write the rows of a request.

        Args:
            number: Which of them.
            position: ``int64``, where its rows go.
            out: ``uint8`` ``[n, row_bytes]``, written to.
            read: Reads rows.
            given_up: Asked from time to time; if true, there is no point in waiting.

        Returns:
            Whether they were written; if not, the request has to read them itself.
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
        except Exception:  # whose rows those are finds out when it reads them itself
            pass
        finally:
            self.coming = None
            self._finished.set()
