"""A cache that knows the next batches and keeps the rows that are needed soonest.

Evicting the rows that are needed farthest in the future is optimal (Belady, "A study of replacement
algorithms for a virtual-storage computer", IBM Systems Journal 1966). A batch is one step: its rows
are copied before slots are filled. After it, the cache can therefore keep any of its own rows and
those of the batch, as many as there are slots. Among rows needed equally soon, cached ones stay
first, then the first ones of the batch are taken.

Rows that no announced batch needs come last. Among these, a clock hand goes round the slots: a row
that was used since the hand last passed is spared once (CLOCK; Corbato, "A paging experiment with
the Multics system", 1968). A new row that no announced batch needs gets one try: it takes the next
slot of such a row, or is not kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import library
from pyg_scale.ops.row_cache import CachePlan, check_rows, first_of_each, tensor_bytes

MOST = 63
"""The largest number of batches after the next one that can be announced at a time."""

NEVER = 2**31 - 1
_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class Belady:
    """The state of such a cache, without the values of its rows.

    Args:
        num_rows: Number of rows.
        num_slots: Number of rows that can be kept.
        look_ahead: Number of batches after the next one that can be announced, at most
            :data:`MOST`.
    """

    def __init__(self, num_rows: int, num_slots: int, look_ahead: int) -> None:
        self.slot_of = torch.zeros(num_rows, dtype=torch.int32)
        bits = next(bits for bits in _WORDS if bits > look_ahead)
        self.coming = torch.zeros(num_rows, dtype=_WORDS[bits])
        """Bit ``b % bits`` of a row is set if batch ``b``, a future one, needs it."""
        self.owner = torch.full((num_slots,), -1, dtype=torch.int64)
        self.next = torch.full((num_slots,), NEVER, dtype=torch.int32)
        self.visited = torch.zeros(num_slots, dtype=torch.uint8)
        self.state = torch.zeros(2, dtype=torch.int64)  # slots that have an owner, hand
        self.inserted = 0

    @property
    def evictions(self) -> int:
        """Number of rows evicted so far."""
        return self.inserted - int(self.state[0])

    def index_bytes(self) -> int:
        """Size of its tensors in bytes."""
        return tensor_bytes(self)

    def announce(self, index: Tensor, batch: int) -> None:
        """Announce that a batch, later than all announced ones, will need rows ``int64`` ``[n]``.

        Of the batches that are not planned yet, the next one and the ``look_ahead`` after it can be
        announced.
        """
        self._announce(index, batch)

    def forget(self, index: Tensor) -> None:
        """Withdraw all announcements of rows ``int64`` ``[n]``."""
        self._announce(index, -1)

    def _announce(self, index: Tensor, batch: int) -> None:
        if library.compiled():
            torch.ops.pyg_scale.belady_announce(self.slot_of, self.coming, self.next, index, batch)
            return
        check_rows(index, self.slot_of.numel())
        slot = self.slot_of[index]
        slot = slot[slot > 0].long() - 1
        if batch < 0:
            self.coming[index] = 0
            self.next[slot] = NEVER
            return
        self.coming[index] |= self._bit(batch)
        self.next[slot[self.next[slot] == NEVER]] = batch

    def plan(self, index: Tensor, now: int = 0) -> CachePlan:
        """Plan batch number ``now``, and choose the rows that are kept after it.

        Args:
            index: ``int64`` ``[n]``.
            now: The number of the batch; ignored while nothing is announced.

        Raises:
            IndexError: If a row does not exist.
        """
        plan = self._compiled(index, now) if library.compiled() else self._plain(index, now)
        self.inserted += plan.fill.numel()
        return plan

    def _compiled(self, index: Tensor, now: int) -> CachePlan:
        state = (self.slot_of, self.coming, self.owner, self.next, self.visited, self.state)
        return CachePlan(*torch.ops.pyg_scale.belady_plan(*state, index, now))

    # The plain meaning #####################################################################

    def _plain(self, index: Tensor, now: int) -> CachePlan:
        check_rows(index, self.slot_of.numel())
        self.coming[index] &= ~self._bit(now)
        slot = self.slot_of[index] - 1
        hit = slot[slot >= 0].long()
        self.visited[hit] = 1
        self.next[hit] = self._next_use(index[slot >= 0], now)
        miss, again, same = first_of_each(index, (slot < 0).nonzero().view(-1))
        fill, fill_slot = self._keep(index, miss, now)
        return CachePlan(slot, miss, fill, fill_slot, again, same)

    @property
    def _bits(self) -> int:
        return self.coming.element_size() * 8

    def _bit(self, batch: int) -> Tensor:
        bit = 1 << (batch % self._bits)
        if bit >> (self._bits - 1) and self.coming.dtype != torch.uint8:
            bit -= 1 << self._bits
        return torch.tensor(bit, dtype=self.coming.dtype)

    def _next_use(self, rows: Tensor, now: int) -> Tensor:
        """The next batch ``int32`` that needs each row, :data:`NEVER` if none."""
        words, found = self.coming[rows], torch.full((rows.numel(),), NEVER, dtype=torch.int32)
        for batch in range(now + self._bits, now, -1):
            found[(words & self._bit(batch)) != 0] = batch
        return found

    def _keep(self, index: Tensor, miss: Tensor, now: int) -> tuple[Tensor, Tensor]:
        """Choose which misses go into which slots, whose rows are evicted."""
        used, count = int(self.state[0]), self.owner.numel()
        when = self._next_use(index[miss], now)
        spare = count - used
        victims: list[int] = []
        chosen = torch.ones(miss.numel(), dtype=torch.bool)
        if used + miss.numel() > count:
            chosen, victims = self._choose(when, now, spare)
            self.slot_of[self.owner[victims]] = 0
        fill = miss[chosen]
        fresh = min(spare, fill.numel())
        slots = torch.tensor([*range(used, used + fresh), *victims], dtype=torch.int64)
        slots = slots[: fill.numel()]
        self.state[0] = used + fresh
        self.owner[slots] = index[fill]
        self.slot_of[index[fill]] = (slots + 1).int()
        self.next[slots] = when[chosen]
        self.visited[slots] = 0
        return fill, slots.int()

    def _choose(self, when: Tensor, now: int, spare: int) -> tuple[Tensor, list[int]]:
        """The misses that are kept, and the slots that are freed for them."""
        used = int(self.state[0])
        kept, room, nearer = self.next[:used], self.owner.numel(), 0
        chosen = torch.zeros(when.numel(), dtype=torch.bool)
        for batch in range(now + 1, now + 1 + self._bits):
            there, new = int((kept == batch).sum()), when == batch
            if there + int(new.sum()) > room:
                stay = min(there, room)
                taken = new.nonzero().view(-1)[: room - stay]
                chosen[taken] = True
                last = (kept == batch).nonzero().view(-1)[stay:]
                given_up = torch.cat([(kept > batch).nonzero().view(-1), last]).sort().values
                wanted = max(0, int(chosen.sum()) - spare)
                return chosen, given_up[:wanted].tolist()
            chosen |= new
            nearer += int(new.sum())
            room -= there + int(new.sum())
        victims = self._by_hand(max(0, nearer - spare), [])
        unknown = (when == NEVER).nonzero().view(-1)
        direct = min(unknown.numel(), max(0, spare - nearer))
        before = len(victims)
        victims = self._by_trying(unknown.numel() - direct, victims)
        chosen[unknown[: direct + len(victims) - before]] = True
        return chosen, victims

    def _by_hand(self, wanted: int, victims: list[int]) -> list[int]:
        used, at = int(self.state[0]), int(self.state[1])
        while len(victims) < wanted:
            if int(self.next[at]) == NEVER:
                if self.visited[at]:
                    self.visited[at] = 0
                else:
                    self.next[at] = -1  # so that it is not taken twice
                    victims.append(at)
            at = (at + 1) % used
        self.state[1] = at
        return victims

    def _by_trying(self, tries: int, victims: list[int]) -> list[int]:
        used, at = int(self.state[0]), int(self.state[1])
        for _ in range(used):
            if tries <= 0:
                break
            if int(self.next[at]) == NEVER:
                tries -= 1
                if self.visited[at]:
                    self.visited[at] = 0
                else:
                    self.next[at] = -1
                    victims.append(at)
            at = (at + 1) % used
        self.state[1] = at
        return victims
