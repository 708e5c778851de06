"""What caches should keep, in plain Python: SIEVE, and the farthest next use, told step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

NEVER = 10**9


def sieve_misses(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """Misses of SIEVE (Zhang et al., NSDI 2024), row by row, after its paper's listing."""
    newer: dict[int, int | None] = {}
    older: dict[int, int | None] = {}
    visited: dict[int, bool] = {}
    head = tail = hand = None
    misses = 0
    for row in (row for request in requests for row in request):
        if row in visited:
            visited[row] = True
            continue
        misses += 1
        if len(visited) == capacity:
            at = tail if hand is None else hand
            while visited[at]:
                visited[at] = False
                at = tail if newer[at] is None else newer[at]
            hand = newer[at]
            before, after = older.pop(at), newer.pop(at)
            if after is None:
                head = before
            else:
                older[after] = before
            if before is None:
                tail = after
            else:
                newer[before] = after
            del visited[at]
        visited[row], newer[row], older[row] = False, None, head
        if head is not None:
            newer[head] = row
        head = row
        tail = row if tail is None else tail
    return misses


def min_misses(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """The fewest misses there can be: after each request, any of its rows and of those kept."""
    kept: set[int] = set()
    misses = 0
    for b, request in enumerate(requests):
        misses += len(set(request) - kept)
        coming: dict[int, int] = {}
        for later in range(len(requests) - 1, b, -1):
            coming.update(dict.fromkeys(requests[later], later))
        candidates = sorted(kept | set(request), key=lambda row: coming.get(row, NEVER))
        kept = set(candidates[:capacity])
    return misses


def fewest_misses(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """The same by trying everything; for very few rows."""
    best = {frozenset[int](): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for kept, misses in best.items():
            cost = misses + len(set(request) - kept)
            candidates = kept | set(request)
            for size in range(min(capacity, len(candidates)) + 1):
                for chosen in map(frozenset, combinations(sorted(candidates), size)):
                    after[chosen] = min(after.get(chosen, NEVER), cost)
        best = after
    return min(best.values())


class WindowedCache:
    """A cache that knows a window of coming requests; see :mod:`pyg_scale.ops.belady`.

    Args:
        capacity: Rows that it can keep.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: list[int] = []
        self.marked: set[int] = set()
        self.hand = 0
        self.hits = self.misses = self.evictions = 0

    def request(self, rows: Sequence[int], window: Sequence[Sequence[int]]) -> None:
        """Ask for different rows, with the requests that are known to come after."""
        due: dict[int, int] = {}
        for distance in range(len(window), 0, -1):
            due.update(dict.fromkeys(window[distance - 1], distance))
        there = set(self.slots)
        missing = [row for row in rows if row not in there]
        self.hits += len(rows) - len(missing)
        self.misses += len(missing)
        self.marked.update(row for row in rows if row in there)
        victims, chosen = self._choose(missing, due)
        self.evictions += len(victims)
        for row in chosen:
            self.marked.discard(row)
            if len(self.slots) < self.capacity:
                self.slots.append(row)
            else:
                self.slots[victims.pop(0)] = row

    def _choose(self, missing: list[int], due: dict[int, int]) -> tuple[list[int], list[int]]:
        if len(self.slots) + len(missing) <= self.capacity:
            return [], missing
        spare = self.capacity - len(self.slots)
        wanted = sorted({due[row] for row in (*self.slots, *missing) if row in due})
        taken = 0
        for distance in wanted:
            here = [slot for slot, row in enumerate(self.slots) if due.get(row) == distance]
            new = [row for row in missing if due.get(row) == distance]
            if taken + len(here) + len(new) > self.capacity:
                stay = min(len(here), self.capacity - taken)
                added = set(new[: self.capacity - taken - stay])
                chosen = [r for r in missing if due.get(r, NEVER) < distance or r in added]
                gone = set(here[stay:]) | {
                    slot for slot, row in enumerate(self.slots) if due.get(row, NEVER) > distance
                }
                return sorted(gone)[: max(0, len(chosen) - spare)], chosen
            taken += len(here) + len(new)
        known = [row for row in missing if row in due]
        unknown = [row for row in missing if row not in due]
        victims: list[int] = []
        while len(victims) < len(known) - spare:
            self._turn(due, victims)
        direct = max(0, spare - len(known))
        tries, before = len(unknown[direct:]), len(victims)
        for _ in range(len(self.slots)):
            if tries == 0:
                break
            tries -= self._turn(due, victims)
        lucky = set(unknown[: direct + len(victims) - before])
        return victims, [row for row in missing if row in due or row in lucky]

    def _turn(self, due: dict[int, int], victims: list[int]) -> int:
        """Move the hand by one slot; whether there was one that nobody is known to need."""
        slot, row = self.hand, self.slots[self.hand]
        self.hand = (self.hand + 1) % len(self.slots)
        if row in due or slot in victims:
            return 0
        if row in self.marked:
            self.marked.discard(row)
        else:
            victims.append(slot)
        return 1
