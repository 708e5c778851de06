"""The cached rows of one tensor, for any number of threads.

A request is planned first: plans are made one after the other, and give the place of each row once
all earlier requests are served. Then missing rows are read, by many threads at once, and slots are
copied and filled in the order of the plans. The row in a slot is checked whenever it is copied, so
that a request that fails or is given up costs others one more read, and never gives a wrong value.
Rows that are lent stay in their slots until their :class:`Lease` ends: they are not filled then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pyg_scale.ops import library, memory, row_cache
from pyg_scale.ops.belady import Belady
from pyg_scale.ops.gather import gather
from pyg_scale.ops.row_cache import Placed
from pyg_scale.ops.sieve import Sieve
from pyg_scale.store.cache.hot import hot_of
from pyg_scale.store.cache.pending import PendingRead, Read, Turns
from pyg_scale.store.rows import Key, TensorRows


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
        pending: Its missing rows, if they are read for several requests, or ahead.
    """

    index: Tensor
    plan: row_cache.CachePlan
    turn: int | None = None
    given_up: Callable[[], bool] = field(default=never)
    pending: PendingRead | None = None

    @property
    def hits(self) -> int:
        """Number of rows that need not be read."""
        return self.index.numel() - self.plan.miss.numel()


class Lease:
    """Keeps slots from being refilled as long as it lives.

    Args:
        returned: Gets the places in the end: by this, as whoever ends it may have any lock.
        place: The places of a request, see :func:`pyg_scale.ops.row_cache.pin`.
    """

    def __init__(self, returned: deque[Tensor], place: Tensor) -> None:
        self._returned, self._place = returned, place

    def __del__(self) -> None:
        self._returned.append(self._place)


class Lent(NamedTuple):
    """The rows of a request, of which those in slots stay there."""

    held: Tensor
    """``uint8`` ``[num_slots, row_bytes]``."""
    rest: Tensor
    """``uint8`` ``[m, row_bytes]``, the others."""
    place: Tensor
    """``int64`` ``[n]``: the slot of each row, or ``-1 - p`` for row ``p`` of the others."""
    lease: Lease


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
        self._pins: Tensor | None = None  # once rows were lent
        self._returned = deque[Tensor]()

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
            if plan.miss.numel():
                pending = request.pending
                if pending is None or not pending.take(plan.miss, out, request.given_up):
                    read(gather(index, plan.miss), plan.miss, out)
            in_turn = request.turn is not None and self._turns.wait(request.turn, request.given_up)
            with self._slots:
                late = row_cache.copy(self.rows, self.held, plan.slot_at, index, out)
            if late.numel():
                read(index[late], late, out)
            row_cache.scatter(out, plan.again, out, take=plan.same)
            if request.turn is not None:
                with self._slots:
                    planned = plan.fill, plan.fill_slot
                    self._fill(index, planned, (late, plan.slot_at[late]), out, in_turn)
        finally:
            self.drop(request)

    def lend(self, request: RowRequest, read: Read) -> Lent:
        """Leave the cached rows of a request in their slots, and bring the others.

        No slot is refilled while somebody has its lease. A row that should go there is not cached,
        and is read again when it is needed (``late``).

        Args:
            request: A request of this cache.
            read: Reads rows that are not cached.
        """
        index, plan = request.index, request.plan
        try:
            place, moved = row_cache.places(plan, self.num_slots)
            count = plan.miss.numel()
            brought = plan.miss if not moved.numel() else torch.cat([plan.miss, moved])
            rest = memory.empty([brought.numel(), self.row_bytes], torch.uint8)
            ids = gather(index, brought)
            if count:
                pending, position = request.pending, torch.from_numpy(np.arange(count))
                if pending is None or not pending.take(position, rest, request.given_up):
                    read(ids[:count], position, rest)
            in_turn = request.turn is not None and self._turns.wait(request.turn, request.given_up)
            with self._slots:
                slots = plan.slot_at[moved]
                late = row_cache.copy(self.rows, self.held, slots, ids[count:], rest[count:])
                lost = row_cache.pin(self._pinned(), self.held, place, index, brought.numel())
                lease = Lease(self._returned, place)
            again, owned = late + count, slots[late]
            if lost.numel():
                again = torch.cat([again, torch.arange(lost.numel()) + brought.numel()])
                owned = torch.cat([owned, plan.slot_at[lost]])
                more = rest.new_empty(lost.numel(), self.row_bytes)
                rest, ids = torch.cat([rest, more]), torch.cat([ids, index[lost]])
            if again.numel():
                read(ids[again], again, rest)
            if request.turn is not None:
                with self._slots:
                    filled = -1 - place[plan.fill], plan.fill_slot
                    self._fill(ids, filled, (again, owned), rest, in_turn)
            return Lent(self.rows, rest, place, lease)
        finally:
            self.drop(request)

    def _pinned(self) -> Tensor:
        """The uses of each slot, without those that ended."""
        if self._pins is None:
            self._pins = torch.zeros(self.num_slots, dtype=torch.int32)
        while self._returned:
            row_cache.unpin(self._pins, self._returned.popleft())
        return self._pins

    def drop(self, request: RowRequest) -> None:
        """End a request that was served or never will be."""
        if request.pending is not None:
            request.pending.forget()
        if request.turn is not None:
            self._turns.done(request.turn)

    def _fill(
        self,
        index: Tensor,
        planned: tuple[Tensor, Tensor],
        late: tuple[Tensor, Tensor],
        out: Tensor,
        in_turn: bool,
    ) -> None:
        """Put rows into slots.

        Args:
            index: The rows of ``out``, ``int64`` ``[n]``.
            planned: Positions in ``out``, and the slot that the plan has for each.
            late: The same of rows that the slot should have had.
            out: ``uint8`` ``[n, row_bytes]``.
            in_turn: True if all earlier requests are done.
        """
        self.late += late[0].numel()
        position, slot = planned
        if not in_turn:  # later plans may have assigned the slots to other rows, and filled them
            position, slot = self._still_owned(index, position, slot)
        if late[0].numel():
            again, same_slot = self._still_owned(index, *late)
            position, slot = torch.cat([position, again]), torch.cat([slot, same_slot])
        if self._pins is not None:
            free = self._pinned()[slot.long()] == 0
            position, slot = position[free], slot[free]
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
            "index_bytes": self.policy.index_bytes()
            + (8 if self._pins is None else 12) * self.num_slots,
        }


def _empty(num_slots: int, row_bytes: int) -> Tensor:
    """New memory that takes no space until it is written."""
    if library.compiled():
        return torch.ops.pyg_scale.huge_empty([num_slots, row_bytes], torch.uint8)
    return torch.empty(num_slots, row_bytes, dtype=torch.uint8)


class RowCaches:
    """A cache for every tensor that gets a share of the capacity.

    Replaced as a whole by a write to the store.

    Args:
        rows: The tensors by group and name.
        capacity: Capacity in bytes.
        policy: ``"belady"``, ``"sieve"`` or ``"placed"``.
        hot: For ``"placed"``: ids by group.
        look_ahead: For ``"belady"``.
    """

    def __init__(
        self,
        rows: Mapping[Key, TensorRows],
        capacity: int,
        policy: str,
        hot: Mapping[Any, Tensor] | None,
        look_ahead: int,
    ) -> None:
        self.rows = rows
        self.caches: dict[Key, RowCache] = {}
        listed = {key: _listed(hot or {}, key, each) for key, each in rows.items()}
        useful = {key: replace(each, num_rows=listed[key].numel()) for key, each in rows.items()}
        for key, slots in slots_of(rows if hot is None else useful, capacity).items():
            if not slots:
                continue
            kept = None if hot is None else listed[key]
            made = _policy(rows[key].num_rows, slots, policy, kept, look_ahead)
            self.caches[key] = RowCache(rows[key].row_bytes, slots, made)


def _policy(num_rows: int, slots: int, name: str, listed: Tensor | None, look_ahead: int) -> Policy:
    if listed is not None:
        return Placed(num_rows, listed[:slots])
    if slots == num_rows:
        return Placed(num_rows, torch.arange(num_rows))
    return Sieve(num_rows, slots) if name == "sieve" else Belady(num_rows, slots, look_ahead)


def _listed(hot: Mapping[Any, Tensor], key: Key, rows: TensorRows) -> Tensor:
    ids = hot_of(hot, key[0])
    return torch.empty(0, dtype=torch.int64) if ids is None else ids[ids < rows.num_rows]


def slots_of(tensors: Mapping[Key, TensorRows], capacity: int) -> dict[Key, int]:
    """Number of slots for each tensor, such that their rows have at most ``capacity`` bytes.

    A read of a short row costs about as much as one of a long row, so the shortest rows come first:
    each tensor gets as much as it needs, but at most half of the remainder, and the last one all of
    it. Edges, which are seldom read again, get the remainder after nodes.

    Args:
        tensors: Tensors by group and name; the group of edges is a tuple.
        capacity: Capacity in bytes.
    """
    slots, left = dict.fromkeys(tensors, 0), capacity
    for of_edges in (False, True):
        waiting = [
            (rows.row_bytes, key)
            for key, rows in tensors.items()
            if isinstance(key[0], tuple) == of_edges and rows.row_bytes
        ]
        waiting.sort(key=lambda each: each[0])
        for i, (size, key) in enumerate(waiting):
            share = left if i == len(waiting) - 1 else left // 2
            slots[key] = min(tensors[key].num_rows, share // size)
            left -= slots[key] * size
    return slots
