"""The cached rows of one tensor, for any number of threads.

A request is planned first: plans are made one after the other, and give the place of each row once
all earlier requests are served. Then missing rows are read, by many threads at once, and slots are
copied and filled in the order of the plans. The row in a slot is checked whenever it is copied, so
that a request that fails or is given up costs others one more read, and never gives a wrong value.
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
from pyg_scale.store.cache.coalesced_read import CoalescedRead, Read
from pyg_scale.store.cache.turns import Turns


class Policy(Protocol):
    """Decides which rows are kept."""

    slot_of: Tensor
    """``int32`` ``[num_rows]``, see :mod:`pyg_scale.ops.row_cache`."""

    @property
    def evictions(self) -> int:
        """Number of rows evicted so far."""

    def plan(self, index: Tensor, now: int = 0) -> row_cache.CachePlan:
        """Plan a request for rows ``int64`` ``[n]``."""

    def index_bytes(self) -> int:
        """Size of its own state in bytes."""


def never() -> bool:
    """Return False, for a request that is never given up."""
    return False


@dataclass
class RowRequest:
    """A request for rows, and its plan.

    Attributes:
        index: The rows, ``int64`` ``[n]``.
        plan: The places of the rows.
        turn: Its turn to access the slots; ``None`` if it changes none.
        given_up: Returns True once nobody waits for earlier requests any more.
        together: The joint read of its missing rows and those of other requests, and its index in
            it.
    """

    index: Tensor
    plan: row_cache.CachePlan
    turn: int | None = None
    given_up: Callable[[], bool] = field(default=never)
    together: tuple[CoalescedRead, int] | None = None

    @property
    def hits(self) -> int:
        """Number of rows that need not be read."""
        return self.index.numel() - self.plan.miss.numel()


class RowCache:
    """Slots for rows of one tensor.

    Args:
        row_bytes: Size of a row in bytes.
        num_slots: Number of slots.
        policy: Decides which rows are in them.
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

    def request(
        self, index: Tensor, now: int = 0, given_up: Callable[[], bool] = never
    ) -> RowRequest:
        """Plan a request that may change the cached rows; it must be served or dropped.

        Raises:
            IndexError: If a row does not exist.
        """
        with self._planning:
            made = RowRequest(index, self.policy.plan(index, now), self._turns.take(), given_up)
            self._count(made)
            return made

    def peek(self, index: Tensor) -> RowRequest:
        """Make a request that uses cached rows and changes none.

        Raises:
            IndexError: If a row does not exist.
        """
        with self._planning:
            made = RowRequest(index, row_cache.lookup(self.policy.slot_of, index))
            self._count(made)
            return made

    def serve(self, request: RowRequest, out: Tensor, read: Read) -> None:
        """Write the rows of a request to ``out``.

        Args:
            request: A request of this cache.
            out: ``uint8`` ``[n, row_bytes]``.
            read: Reads rows that are not cached.
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

    def _brought(self, request: RowRequest, out: Tensor, read: Read) -> bool:
        if request.together is None:
            return False
        shared, number = request.together
        return shared.bring(number, request.plan.miss, out, read, request.given_up)

    def drop(self, request: RowRequest) -> None:
        """End a request that was served or never will be."""
        if request.together is not None:
            shared, number = request.together
            shared.forget(number)
        if request.turn is not None:
            self._turns.done(request.turn)

    def _fill(self, request: RowRequest, late: Tensor, out: Tensor, in_turn: bool) -> None:
        self.late += late.numel()
        index, plan = request.index, request.plan
        position, slot = plan.fill, plan.fill_slot
        if not in_turn:  # later plans may have assigned the slots to other rows, and filled them
            position, slot = self._still_owned(index, position, slot)
        if late.numel():
            again, same_slot = self._still_owned(index, late, plan.slot_at[late])
            position, slot = torch.cat([position, again]), torch.cat([slot, same_slot])
        if position.numel():
            row_cache.fill(self.rows, self.held, slot, position, index, out)

    def _still_owned(self, index: Tensor, position: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        mine = self.policy.slot_of[index[position]] - 1 == slot
        return position[mine], slot[mine]

    def _count(self, request: RowRequest) -> None:
        self.hits += request.hits
        self.misses += request.plan.miss.numel()

    def stats(self) -> dict[str, int]:
        """Numbers of rows by outcome, and bytes in use."""
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
    """New memory that takes no space until it is written."""
    if library.compiled():
        return torch.ops.pyg_scale.huge_empty([num_slots, row_bytes], torch.uint8)
    return torch.empty(num_slots, row_bytes, dtype=torch.uint8)
