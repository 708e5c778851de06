"""The rows that the next batches of an iteration will read from a store.

A loader announces batches in order, well before it reads them. A store with ``look_ahead`` plans
them in the same order, however many threads read: the cached rows and the hit rate depend only on
the announced batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch_geometric.data import TensorAttr

from pyg_scale.ops.belady import Belady
from pyg_scale.ops.gather import gather
from pyg_scale.store.announced import AnnouncedReads
from pyg_scale.store.cache.row_cache import RowCache, RowRequest
from pyg_scale.store.rows import Key, key_of

if TYPE_CHECKING:
    from pyg_scale.store.cache.cached import Cached

ENOUGH = 4
"""Batches are announced until they have this many times the rows of the cache, as more make no
difference (and at most ``look_ahead`` of them).
"""

TOGETHER = 4
"""Largest number of batches whose missing rows are read at once, from a store that gains from it.
Fewer if those rows take more memory than ``group_bytes`` of the cache.
"""


Requests = dict[Key, tuple[RowCache, RowRequest]]
"""The planned requests of a batch, by tensor, each with its cache."""


class Schedule(AnnouncedReads):
    """The batches of one iteration, in order; made by ``store.schedule()``.

    If several are open, only the one made last is planned; until it is closed, reads of the others
    use cached rows and change none.

    Example::

        with contextlib.closing(store.schedule()) as schedule:
            schedule.announce(0, [TensorAttr(None, "x", index=n_id_0)])
            schedule.announce(1, [TensorAttr(None, "x", index=n_id_1)])
            with schedule.serving(0):
                store.multi_get_tensor([TensorAttr(None, "x", index=n_id_0)])
    """

    _store: Cached

    def __init__(self, store: Cached) -> None:
        super().__init__(store)
        self._announced: deque[tuple[int, dict[Key, Tensor]]] = deque()  # not planned yet
        self._last = -1
        self._planned = 0
        """The number of the next batch to be planned; these numbers start from 0."""
        self._foreseen: dict[Key, int] = {}
        """For each tensor, the number of announced batches that its cache was told of."""
        self._began = -1
        """The first batch of the group that was planned last."""
        self._requests: dict[int, Requests] = {}
        self._caches: dict[Key, RowCache] = {}

    def announce(self, batch: int, wanted: Sequence[TensorAttr]) -> None:
        """Announce the rows of a batch.

        Args:
            batch: Its number, larger than that of every batch announced before.
            wanted: Tensors and rows, as for ``store.multi_get_tensor``; empty if it will not read.

        Raises:
            ValueError: If a later batch was already announced.
        """
        with self._store.planning:
            if batch <= self._last:
                raise ValueError(f"batch {batch} was announced after batch {self._last}")
            self._last, caches = batch, self._store.row_caches()
            rows = {}
            for attr in wanted:
                key = key_of(attr)
                if key in caches and _exist(attr.index, caches[key]):
                    rows[key] = attr.index
            self._announced.append((batch, rows))

    def suffices(self, ahead: int) -> bool:
        """Return True if batches need not be announced any further ahead.

        Args:
            ahead: Number of announced batches after the one to be read next.
        """
        # the last batch that is planned at once, or whose rows are already requested
        after = max(self._store.together - 1, self._store.asked_ahead)
        if ahead >= self._store.foresight + after:
            return True
        if ahead < self._store.asked_ahead:
            return False
        with self._store.planning:
            caches = self._store.row_caches()
            coming = list(self._announced)[-ahead:][after:] if ahead else []
        return all(
            sum(rows[key].numel() for _, rows in coming if key in rows) >= ENOUGH * cache.num_slots
            for key, cache in caches.items()
            if isinstance(cache.policy, Belady)
        )

    def finish(self, batch: int) -> None:
        """End a batch, and drop its plans that were not used."""
        with self._store.planning:
            self._plan_until(batch)
            self._drop(batch)
            if not self._store.plans_for(self):  # it was read while another schedule was active
                self._announced = deque(each for each in self._announced if each[0] != batch)

    def interrupted(self) -> None:
        """Start with empty caches, as a plan may be half done, and others may wait for it."""
        self._store.forget_all()

    def request(self, batch: int, key: Key, index: Tensor) -> RowRequest | None:
        """The plan for a read of a batch; ``None`` if it was not announced with these rows.

        The caller holds the store's lock.
        """
        self._plan_until(batch)
        cache, made = self._requests.get(batch, {}).get(key, (None, None))
        if made is None or cache is not self._store.row_caches().get(key):
            return None
        if not (made.index is index or torch.equal(made.index, index)):
            return None
        del self._requests[batch][key]
        return made

    # Under the store's lock ################################################################

    def retire(self) -> None:
        """Release everything, after it was closed."""
        self.rest()
        for batch in list(self._requests):
            self._drop(batch)
        self._announced.clear()

    def rest(self) -> None:
        """Make the caches forget the batches of this schedule, as another one takes precedence."""
        for key, count in self._foreseen.items():
            policy = self._caches[key].policy
            assert isinstance(policy, Belady)
            for _, rows in list(self._announced)[:count]:
                if key in rows:
                    policy.forget(rows[key])
        self._foreseen.clear()
        for made in self._requests.values():  # now unwaited for, so they change nothing
            for cache, request in made.values():
                cache.drop(request)
                request.turn = None

    def _plan_until(self, batch: int) -> None:
        if not self._store.plans_for(self):
            return
        asks = self._store.asked_ahead > 0
        # if rows can be requested ahead, the next group of batches is planned too
        while self._announced and (self._began if asks else self._announced[0][0]) <= batch:
            self._began = self._announced[0][0]
            group = [self._plan_next()]
            most, limit = self._store.together, self._store.group_bytes
            while self._announced and len(group) < most and _has_room(group, limit):
                group.append(self._plan_next())
            self._read_together(group, 1 if asks else 2)

    def _read_together(self, group: Sequence[Requests], at_least: int) -> None:
        """Read the missing rows of a few batches at once, if at least so many have a tensor."""
        requests: dict[Key, list[RowRequest]] = {}
        for key, (_, request) in (item for made in group for item in made.items()):
            requests.setdefault(key, []).append(request)
        missing = {
            key: [gather(request.index, request.plan.miss) for request in each]
            for key, each in requests.items()
            if len(each) >= at_least and any(request.plan.miss.numel() for request in each)
        }
        for key, pending in zip(missing, self._store.read_together(missing)):
            for request, each in zip(requests[key], pending):
                request.pending = each

    def _plan_next(self) -> Requests:
        self._refresh()
        self._foresee()
        number, rows = self._announced.popleft()
        self._requests[number] = made = {}
        for key, index in rows.items():
            if key in self._caches:
                cache = self._caches[key]
                made[key] = cache, cache.request(index, self._planned, self._given_up)
        self._planned += 1
        self._foreseen = {key: max(0, n - 1) for key, n in self._foreseen.items()}
        return made

    def _refresh(self) -> None:
        """Start again with new caches, as a write to the store replaced them."""
        current = self._store.row_caches()
        if any(current.get(key) is not cache for key, cache in self._caches.items()):
            self._foreseen.clear()
        self._caches = dict(current)

    def _foresee(self) -> None:
        """Tell the caches of the batches after the next one, as far as it is useful."""
        for key, cache in self._caches.items():
            if not isinstance(cache.policy, Belady):
                continue
            told, rows_ahead = self._foreseen.get(key, 0), 0
            for i, (_, rows) in enumerate(self._announced):
                index = rows.get(key)
                if i > self._store.foresight or rows_ahead >= ENOUGH * cache.num_slots:
                    break
                if i >= max(told, 1) and index is not None:
                    cache.policy.announce(index, self._planned + i)
                if i > 0 and index is not None:
                    rows_ahead += index.numel()
                self._foreseen[key] = max(self._foreseen.get(key, 0), i + 1)

    def _drop(self, batch: int) -> None:
        for cache, request in self._requests.pop(batch, {}).values():
            cache.drop(request)

    def _given_up(self) -> bool:
        return self.closed or self.paused


def _has_room(group: list[Requests], limit: int | None) -> bool:
    """Return True if the missing rows of these batches and one more like them fit the limit."""
    if limit is None:
        return True
    missing = sum(
        request.plan.miss.numel() * cache.row_bytes
        for made in group
        for cache, request in made.values()
    )
    return missing * (len(group) + 1) <= limit * len(group)


def _exist(index: Tensor, cache: RowCache) -> bool:
    """Return True if all rows exist; a read of others raises when it is made."""
    if index.numel() == 0:
        return True
    low, high = torch.aminmax(index)
    return int(low) >= 0 and int(high) < cache.policy.slot_of.numel()
