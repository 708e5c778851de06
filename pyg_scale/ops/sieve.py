"""SIEVE, a cache that uses past requests only.

Slots are in a queue by age. A row that is used is marked; a new row enters at the head. To make
room, a hand moves from old to new rows, unmarks marked ones and evicts the first unmarked one
(Zhang et al.: "SIEVE is simpler than LRU", NSDI 2024). The rows of a request are processed one
after the other, like requests for single rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import library
from pyg_scale.ops.row_cache import CachePlan, check_rows, tensor_bytes


class Sieve:
    """The state of such a cache, without the values of its rows.

    Args:
        num_rows: Number of rows.
        num_slots: Number of rows that can be kept, at least 1.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.slot_of = torch.zeros(num_rows, dtype=torch.int32)
        self.owner = torch.full((num_slots,), -1, dtype=torch.int64)
        self.newer = torch.full((num_slots,), -1, dtype=torch.int32)
        self.older = torch.full((num_slots,), -1, dtype=torch.int32)
        self.visited = torch.zeros(num_slots, dtype=torch.uint8)
        self.since = torch.full((num_slots,), -1, dtype=torch.int64)
        """The running number of the requested row that filled each slot."""
        self.state = torch.tensor([0, -1, -1, -1, 0])
        """Number of slots in use, head, tail, hand, and number of rows requested so far."""
        self.inserted = 0

    @property
    def evictions(self) -> int:
        """Number of rows evicted so far."""
        return self.inserted - int(self.state[0])

    def index_bytes(self) -> int:
        """Size of its tensors in bytes."""
        return tensor_bytes(self)

    def plan(self, index: Tensor, now: int = 0) -> CachePlan:
        """The plan of a request for rows ``int64`` ``[n]``; ``now`` is ignored.

        Raises:
            IndexError: If a row does not exist.
        """
        plan = self._compiled(index) if library.compiled() else self._plain(index)
        self.inserted += plan.miss.numel()
        return plan

    def _compiled(self, index: Tensor) -> CachePlan:
        slots = (self.owner, self.newer, self.older, self.visited, self.since, self.state)
        return CachePlan(*torch.ops.pyg_scale.sieve_plan(self.slot_of, *slots, index))

    # The plain meaning #####################################################################

    def _plain(self, index: Tensor) -> CachePlan:
        check_rows(index, self.slot_of.numel())
        base = int(self.state[4])
        slot_at = torch.full((index.numel(),), -1, dtype=torch.int32)
        miss, again, same = [], [], []
        for i, row in enumerate(index.tolist()):
            slot = int(self.slot_of[row]) - 1
            if slot < 0:
                miss.append(i)
                self.since[self._insert(row)] = base + i
                continue
            self.visited[slot] = 1
            if int(self.since[slot]) < base:
                slot_at[i] = slot
            else:
                again.append(i)
                same.append(int(self.since[slot]) - base)
        self.state[4] += index.numel()
        fill = [i for i in miss if self._brought(int(index[i]), base + i)]
        into = [int(self.slot_of[int(index[i])]) - 1 for i in fill]
        as_long = [torch.tensor(each, dtype=torch.int64) for each in (miss, fill, again, same)]
        into_slot = torch.tensor(into, dtype=torch.int32)
        return CachePlan(slot_at, as_long[0], as_long[1], into_slot, as_long[2], as_long[3])

    def _brought(self, row: int, number: int) -> bool:
        slot = int(self.slot_of[row]) - 1
        return slot >= 0 and int(self.since[slot]) == number

    def _insert(self, row: int) -> int:
        used, head = int(self.state[0]), int(self.state[1])
        if used < self.owner.numel():
            slot = used
            self.state[0] += 1
        else:
            slot = self._evict()
            head = int(self.state[1])
        self.owner[slot] = row
        self.slot_of[row] = slot + 1
        self.visited[slot] = 0
        self.newer[slot], self.older[slot] = -1, head
        if head >= 0:
            self.newer[head] = slot
        self.state[1] = slot
        if int(self.state[2]) < 0:
            self.state[2] = slot
        return slot

    def _evict(self) -> int:
        at = int(self.state[3])
        at = int(self.state[2]) if at < 0 else at
        while self.visited[at]:
            self.visited[at] = 0
            at = int(self.newer[at])
            at = int(self.state[2]) if at < 0 else at
        newer, older = int(self.newer[at]), int(self.older[at])
        self.state[3] = newer
        if newer < 0:
            self.state[1] = older
        else:
            self.older[newer] = older
        if older < 0:
            self.state[2] = newer
        else:
            self.newer[older] = newer
        self.slot_of[int(self.owner[at])] = 0
        return at
