"""What the coming batches of an iteration will ask a store for.

A loader announces batches in their order, well before it reads them. A store with ``look_ahead``
makes its plans for them in that order too, however many threads read: what is kept, and how often
it hits, is a function of what was announced.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import TensorAttr

from pyg_scale.errors import was_interrupted
from pyg_scale.ops.belady import Belady
from pyg_scale.ops.gather import gather
from pyg_scale.store.cache.row_cache import Request, RowCache
from pyg_scale.store.cache.together import Together

if TYPE_CHECKING:
    from pyg_scale.store.cache.cached import Cached

ENOUGH = 4
"""Batches are announced until they have so many times more rows than the cache, which makes no
difference any more (and at most ``look_ahead`` of them)."""

TOGETHER = 4
"""The most batches whose missing rows are read at once, from a store that gains from that. Fewer
where those rows take more memory than ``group_bytes`` of the cache."""

Key = tuple[Any, str]
"""Group and name of a tensor."""


class Schedule:
    """The batches of one iteration, in order; made by ``store.schedule()``.

    Of several at a time, the one that began last is planned for; reads of the others take what is
    cached and change nothing, until it is closed.

    Example::

        with contextlib.closing(store.schedule()) as schedule:
            schedule.announce(0, [TensorAttr(None, "x", index=n_id_0)])
            schedule.announce(1, [TensorAttr(None, "x", index=n_id_1)])
            with schedule.serving(0):
                store.multi_get_tensor([TensorAttr(None, "x", index=n_id_0)])
    """

    def __init__(self, store: Cached) -> None:
        self.closed = False
        self.paused = False
        """Whether reads of announced batches may fail to be made for now."""
        self._store = store
        self._announced: deque[tuple[int, dict[Key, Tensor]]] = deque()  # not planned yet
        self._last = -1
        self._planned = 0
        """The number of the next batch to be planned; batches are numbered from 0 here."""
        self._foreseen: dict[Key, int] = {}
        """How many of the announced ones, of each tensor, a cache was told of."""
        self._began = -1
        """The first of the batches that were planned at once last."""
        self._requests: dict[int, dict[Key, tuple[RowCache, Request]]] = {}
        self._caches: dict[Key, RowCache] = {}

    def announce(self, batch: int, wanted: Sequence[TensorAttr]) -> None:
        """Say what a batch will ask for.

        Args:
            batch: Its number, larger than that of every batch announced before.
            wanted: Tensors and rows, as for ``store.multi_get_tensor``; none if it will not ask.

        Raises:
            ValueError: If a later batch was announced already.
        """
        with self._store.planning:
            if batch <= self._last:
                raise ValueError(f"batch {batch} was announced after batch {self._last}")
            self._last, caches = batch, self._store.row_caches()
            rows = {}
            for attr in wanted:
                key = self._store.key_of(attr)
                if key in caches and _exist(attr.index, caches[key]):
                    rows[key] = attr.index
            self._announced.append((batch, rows))

    def suffices(self, ahead: int) -> bool:
        """Whether batches need not be announced any further ahead.

        Args:
            ahead: How many of the announced batches come after the one to be read next.
        """
        # the last of those that are planned at once, or whose rows are asked for already
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

    @contextlib.contextmanager
    def serving(self, batch: int) -> Iterator[None]:
        """Within it, and on this thread, reads are those of a batch that was announced."""
        _serving.now.append((self, batch))
        try:
            try:
                yield
            finally:
                _serving.now.remove((self, batch))
                with self._store.planning:
                    self._finish(batch)
        except BaseException as error:
            if was_interrupted(error):
                self._store.forget_all()
            raise

    def request(self, batch: int, key: Key, index: Tensor) -> Request | None:
        """The plan for a read of a batch; ``None`` if it was not announced so.

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

    def close(self) -> None:
        """Say that no batch is coming any more. Never waits, so that a finalizer may call it."""
        self.closed = True

    # Under the store's lock ################################################################

    def retire(self) -> None:
        """Let go of everything, after it was closed."""
        self.rest()
        for batch in list(self._requests):
            self._drop(batch)
        self._announced.clear()

    def rest(self) -> None:
        """Let the caches forget what is coming here, as another schedule goes first."""
        for key, count in self._foreseen.items():
            policy = self._caches[key].policy
            assert isinstance(policy, Belady)
            for _, rows in list(self._announced)[:count]:
                if key in rows:
                    policy.forget(rows[key])
        self._foreseen.clear()
        for made in self._requests.values():  # nobody may wait for them now, so they change nothing
            for cache, request in made.values():
                cache.drop(request)
                request.turn = None

    def _plan_until(self, batch: int) -> None:
        if not self._store.plans_for(self):
            return
        asks = self._store.asked_ahead > 0
        # where rows can be asked for ahead, the group of batches after this one is planned too
        while self._announced and (self._began if asks else self._announced[0][0]) <= batch:
            self._began = self._announced[0][0]
            group = [self._plan_next()]
            most, limit = self._store.together, self._store.group_bytes
            while self._announced and len(group) < most and _has_room(group, limit):
                group.append(self._plan_next())
            shared = _join(group, 1 if asks else 2)
            if asks:
                self._ask(shared)

    def _ask(self, shared: dict[Key, Together]) -> None:
        """Ask for the missing rows of a few batches; who asks for them in vain reads them later."""
        self._store.ask_ahead(
            [(TensorAttr(*key), each) for key, each in shared.items() if each.num_rows]
        )

    def _plan_next(self) -> dict[Key, tuple[RowCache, Request]]:
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

    def _finish(self, batch: int) -> None:
        """The batch has read what it did; what else was planned for it will not be."""
        self._plan_until(batch)
        self._drop(batch)
        if not self._store.plans_for(self):  # it went by while others were planned for
            self._announced = deque(each for each in self._announced if each[0] != batch)

    def _refresh(self) -> None:
        """Begin anew with caches that were replaced because somebody wrote to the store."""
        current = self._store.row_caches()
        if any(current.get(key) is not cache for key, cache in self._caches.items()):
            self._foreseen.clear()
        self._caches = dict(current)

    def _foresee(self) -> None:
        """Tell the caches of the batches after the next one, as far as is of use."""
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


def _has_room(group: list[dict[Key, tuple[RowCache, Request]]], limit: int | None) -> bool:
    """Whether what these batches miss, and one more like them, has at most so many bytes."""
    if limit is None:
        return True
    missing = sum(
        request.plan.miss.numel() * cache.row_bytes
        for made in group
        for cache, request in made.values()
    )
    return missing * (len(group) + 1) <= limit * len(group)


def _join(
    group: list[dict[Key, tuple[RowCache, Request]]], at_least: int = 2
) -> dict[Key, Together]:
    """Let the missing rows of a few batches be read at once, if there are as many batches."""
    found = {}
    for key in dict.fromkeys(key for made in group for key in made):
        of_key = [made[key] for made in group if key in made]
        if len(of_key) >= at_least:
            cache = of_key[0][0]
            rows = [gather(request.index, request.plan.miss) for _, request in of_key]
            found[key] = shared = Together(rows, cache.row_bytes)
            for number, (_, request) in enumerate(of_key):
                request.together = shared, number
    return found


def _exist(index: Tensor, cache: RowCache) -> bool:
    """Whether a cache has all rows; a read of others raises when it is its turn."""
    if index.numel() == 0:
        return True
    low, high = torch.aminmax(index)
    return int(low) >= 0 and int(high) < cache.policy.slot_of.numel()


class _Serving(threading.local):
    def __init__(self) -> None:
        self.now: list[tuple[Schedule, int]] = []  # of several stores, where one reads from others


_serving = _Serving()


def being_served(store: object) -> tuple[Schedule, int] | None:
    """The schedule and the batch of what this thread reads now, if they are the store's."""
    for schedule, batch in _serving.now:
        if schedule._store is store:
            return schedule, batch
    return None
