"""The cached rows of one tensor, for any number of threads.

A request is planned first: plans are made one after the other and say where rows will be once all
earlier requests are served. Then what is missing is read, by many at once, and slots are copied
and filled in the order of the plans. What a slot holds is checked whenever it is copied, so that a
request that fails, or is given up, costs others one more read and never a wrong value.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pyg_scale.ops import library, row_cache
from pyg_scale.ops.gather import gather
from pyg_scale.store.cache.together import Read, Together
from pyg_scale.store.cache.turns import Turns


class Policy(Protocol):
    """What decides which rows are kept."""

    slot_of: Tensor
    """``int32`` ``[num_rows]``, see :mod:`pyg_scale.ops.row_cache`."""

    @property
    def evictions(self) -> int:
        """Rows that had to go so far."""

    def plan(self, index: Tensor, now: int = 0) -> row_cache.Plan:
        """Plan a request for rows ``int64`` ``[n]``."""

    def index_bytes(self) -> int:
        """Bytes of what it keeps in mind."""


def never() -> bool:
    """For a request that is never given up."""
    return False


@dataclass
class Request:
    """Rows that were asked for, and what is to be done about it.

    Attributes:
        index: ``int64`` ``[n]``.
        plan: Where they are.
        turn: When its turn to touch the slots is; ``None`` if it changes none.
        given_up: Whether nobody waits for earlier requests any more.
        together: What brings its missing rows together with those of others, and its number there.
    """

    index: Tensor
    plan: row_cache.Plan
    turn: int | None = None
    given_up: Callable[[], bool] = field(default=never)
    together: tuple[Together, int] | None = None

    @property
    def hits(self) -> int:
        """Rows that are not read."""
        return self.index.numel() - self.plan.miss.numel()


class RowCache:
    """Slots for rows of one tensor.

    Args:
        row_bytes: Bytes of a row.
        num_slots: How many slots.
        policy: Decides what is in them.
    """

    def __init__(self, row_bytes: int, num_slots: int, policy: Policy) -> None:
        self.policy = policy
        self.num_slots = num_slots
        self.row_bytes = row_bytes
        self.rows = _empty(num_slots, row_bytes)
        self.held = torch.full((num_slots,), -1, dtype=torch.int64)
        self.hits = self.misses = self.late = 0
        self._turns = Turns()
        self._planning = threading.Lock()
        self._slots = threading.Lock()

    def request(self, index: Tensor, now: int = 0, given_up: Callable[[], bool] = never) -> Request:
        """Plan a request that may change what is kept; it must be served or dropped.

        Raises:
            IndexError: If a row does not exist.
        """
        with self._planning:
            made = Request(index, self.policy.plan(index, now), self._turns.take(), given_up)
            self._count(made)
            return made

    def peek(self, index: Tensor) -> Request:
        """A request that takes what is there and changes nothing.

        Raises:
            IndexError: If a row does not exist.
        """
        with self._planning:
            made = Request(index, row_cache.lookup(self.policy.slot_of, index))
            self._count(made)
            return made

    def serve(self, request: Request, out: Tensor, read: Read) -> None:
        """Write the rows of a request to ``out``.

        Args:
            request: One of this cache.
            out: ``uint8`` ``[n, row_bytes]``.
            read: Reads what is not cached.
        """
        index, plan = request.index, request.plan
        try:
            if plan.miss.numel() and not self._brought(request, out, read):
                read(gather(index, plan.miss), plan.miss, out)
            in_turn = request.turn is not None and self._turns.wait(request.turn, request.given_up)
            with self._slots:
                late = row_cache.copy(self.rows, self.held, plan.slot_at, index, out)
            if late.numel():
                read(index[late], late, out)
            row_cache.scatter(out, plan.again, out, take=plan.same)
            if request.turn is not None:
                with self._slots:
                    self._fill(request, late, out, in_turn)
        finally:
            self.drop(request)

    def _brought(self, request: Request, out: Tensor, read: Read) -> bool:
        if request.together is None:
            return False
        shared, number = request.together
        return shared.bring(number, request.plan.miss, out, read, request.given_up)

    def drop(self, request: Request) -> None:
        """Say that a request is served, or never will be."""
        if request.together is not None:
            shared, number = request.together
            shared.forget(number)
        if request.turn is not None:
            self._turns.done(request.turn)

    def _fill(self, request: Request, late: Tensor, out: Tensor, in_turn: bool) -> None:
        self.late += late.numel()
        index, plan = request.index, request.plan
        position, slot = plan.fill, plan.fill_slot
        if not in_turn:  # later plans may have given the slots to other rows, and filled them
            position, slot = self._still_owned(index, position, slot)
        if late.numel():
            again, same_slot = self._still_owned(index, late, plan.slot_at[late])
            position, slot = torch.cat([position, again]), torch.cat([slot, same_slot])
        if position.numel():
            row_cache.fill(self.rows, self.held, slot, position, index, out)

    def _still_owned(self, index: Tensor, position: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        mine = self.policy.slot_of[index[position]] - 1 == slot
        return position[mine], slot[mine]

    def _count(self, request: Request) -> None:
        self.hits += request.hits
        self.misses += request.plan.miss.numel()

    def stats(self) -> dict[str, int]:
        """Rows by what became of them, and bytes in use."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "late": self.late,
            "evictions": self.policy.evictions,
            "slots": self.num_slots,
            "cached_bytes": int((self.held >= 0).sum()) * self.row_bytes,
            "index_bytes": self.policy.index_bytes() + 8 * self.num_slots,
        }


def _empty(num_slots: int, row_bytes: int) -> Tensor:
    """Memory of its own that costs nothing until it is written."""
    if library.compiled():
        return torch.ops.pyg_scale.huge_empty([num_slots, row_bytes], torch.uint8)
    return torch.empty(num_slots, row_bytes, dtype=torch.uint8)
