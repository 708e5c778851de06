"""Memory to which rows of an answer are written as they arrive, instead of to a new tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_scale.ops.sockets import RowPlaces


@dataclass
class Landing:
    """Places for the rows of one tensor of an answer; see :meth:`~pyg_scale.comm.Work.land`.

    Attributes:
        places: The places. Only rows of exactly this number and size are written.
        landed: True if they were written. The tensor of the answer then has their shape, but not
            their values.
    """

    places: RowPlaces
    landed: bool = field(default=False, init=False)

    def takes(self, shape: tuple[int, ...], dtype: Any) -> bool:
        """Return True if an announced tensor has the expected shape and dtype."""
        return dtype == torch.uint8 and shape == (self.places.count, self.places.out.size(1))

    def stand_in(self) -> Tensor:
        """A tensor of the shape of the rows, without memory of its own."""
        return torch.empty(1, 1, dtype=torch.uint8).expand(
            self.places.count, self.places.out.size(1)
        )


class Landings:
    """The landings of the answers that a rank waits for, by the numbers of the requests."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._of: dict[int, Sequence[Landing | None]] = {}
        self._now: dict[int, Callable[[], None]] = {}  # answers being received; a call ends them

    def open(self, number: int) -> None:
        """Register a request whose answer will be waited for."""
        with self._changed:
            self._of[number] = ()

    def expect(self, number: int, landings: Sequence[Landing | None]) -> None:
        """Set where the rows of an answer go, unless it is already being received."""
        with self._changed:
            if number in self._of:
                self._of[number] = landings

    def begin(self, number: int, end: Callable[[], None]) -> Sequence[Landing | None]:
        """Return the places for the rows of an answer that is about to be received.

        Args:
            number: Number of the request.
            end: Aborts the reception.
        """
        with self._changed:
            landings = self._of.pop(number, ())
            if landings:
                self._now[number] = end
            return landings

    def done(self, number: int) -> None:
        """Forget a request whose answer has arrived or never will."""
        with self._changed:
            self._of.pop(number, None)
            if self._now.pop(number, None) is not None:
                self._changed.notify_all()

    def withdraw(self, number: int, seconds: float) -> None:
        """Write no more rows of an answer.

        Args:
            number: Number of the request.
            seconds: Time to wait for the aborted reception to end.
        """
        with self._changed:
            self._of.pop(number, None)
            end = self._now.get(number)
            if end is not None:  # in the middle of a message that does not end
                end()
                self._changed.wait_for(lambda: number not in self._now, seconds)
