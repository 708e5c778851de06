"""Where rows of an answer are written as they come, instead of to a tensor of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_scale.ops.sockets import Places


@dataclass
class Landing:
    """Places for the rows of one tensor of an answer; see :meth:`~pyg_scale.comm.Work.land`.

    Attributes:
        places: Where they go. Only rows of exactly this number and size are written.
        landed: Whether they were. The tensor of the answer has their shape then, and not their
            values.
    """

    places: Places
    landed: bool = field(default=False, init=False)

    def takes(self, shape: tuple[int, ...], dtype: Any) -> bool:
        """Whether a tensor that was announced is what is waited for."""
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
        self._now: dict[int, Callable[[], None]] = {}  # answers that come now; ends them

    def open(self, number: int) -> None:
        """An answer is going to be waited for."""
        with self._changed:
            self._of[number] = ()

    def expect(self, number: int, landings: Sequence[Landing | None]) -> None:
        """Say where the rows of an answer go, unless it is coming already."""
        with self._changed:
            if number in self._of:
                self._of[number] = landings

    def begin(self, number: int, end: Callable[[], None]) -> Sequence[Landing | None]:
        """Where the rows of an answer go that comes now.

        Args:
            number: Of the request.
            end: Breaks off what is being received.
        """
        with self._changed:
            landings = self._of.pop(number, ())
            if landings:
                self._now[number] = end
            return landings

    def done(self, number: int) -> None:
        """An answer has come, or does not."""
        with self._changed:
            self._of.pop(number, None)
            if self._now.pop(number, None) is not None:
                self._changed.notify_all()

    def withdraw(self, number: int, seconds: float) -> None:
        """Let no rows of an answer be written any more.

        Args:
            number: Of the request.
            seconds: How long what is being written may take to end, once it was broken off.
        """
        with self._changed:
            self._of.pop(number, None)
            end = self._now.get(number)
            if end is not None:  # in the middle of a message that does not come to its end
                end()
                self._changed.wait_for(lambda: number not in self._now, seconds)
