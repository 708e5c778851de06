"""Requests rows of the next batches of an iteration before they are read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import TensorAttr

from pyg_scale.store.base import look_ahead_of

if TYPE_CHECKING:
    from pyg_scale.distributed.features.plan import ReadPlan
    from pyg_scale.distributed.features.store import RankFeatures


class RankSchedule:
    """Returned by ``RankFeatures.schedule()``; used like :class:`~pyg_scale.store.cache.Schedule`.

    Rows of other ranks are requested when a batch is announced. A cache, and a store of local rows,
    are told their share of the batch instead.

    Args:
        store: The store that reads the batches.
    """

    def __init__(self, store: RankFeatures) -> None:
        self._store = store
        self._plans: dict[int, ReadPlan] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._of_local = _schedule_of(store.local)
        self._of_cache = _schedule_of(store.cache)

    def announce(self, batch: int, wanted: Sequence[TensorAttr]) -> None:
        """Announce the rows of a batch; rows that cannot be requested raise when they are read."""
        try:
            plan = self._store.plan(wanted)
        except Exception:
            plan = None
        for schedule, attrs in (
            (self._of_local, [] if plan is None else plan.local_attrs()),
            (self._of_cache, [] if plan is None else plan.cache_attrs()),
        ):
            if schedule is not None:
                schedule.announce(batch, attrs)
        if plan is not None:
            self._store.begin(plan)
            with self._lock:
                if not self._closed:
                    self._plans[batch] = plan

    def suffices(self, ahead: int) -> bool:
        """Return True if batches need not be announced any further ahead.

        Args:
            ahead: Number of announced batches after the one to be read next.
        """
        inner = [each for each in (self._of_local, self._of_cache) if each is not None]
        if ahead < self._store.in_flight - 1:
            return False
        return all(each.suffices(ahead) for each in inner)

    @contextlib.contextmanager
    def serving(self, batch: int) -> Iterator[None]:
        """Within this context, reads of this thread belong to an announced batch."""
        with contextlib.ExitStack() as stack:
            for each in (self._of_local, self._of_cache):
                if each is not None:
                    stack.enter_context(each.serving(batch))
            _serving.now = (self, batch)
            try:
                yield
            finally:
                _serving.now = None
                with self._lock:
                    self._plans.pop(batch, None)

    def take(self, batch: int, attrs: Sequence[TensorAttr]) -> ReadPlan | None:
        """Take the plan of a batch, if it was announced with these attributes."""
        with self._lock:
            plan = self._plans.pop(batch, None)
        if plan is None or len(plan.attrs) != len(attrs):
            return None
        same = all(_same(one, two) for one, two in zip(plan.attrs, attrs))
        return plan if same else None

    @property
    def paused(self) -> bool:
        """True while reading ahead is paused."""
        return any(each.paused for each in (self._of_local, self._of_cache) if each is not None)

    @paused.setter
    def paused(self, value: bool) -> None:
        for each in (self._of_local, self._of_cache):
            if each is not None:
                each.paused = value

    def close(self) -> None:
        """Announce that no batch will follow. Never waits, so that a finalizer may call it."""
        self._closed = True
        self._plans = {}  # without the lock, which the finalizer's own thread may hold
        for each in (self._of_local, self._of_cache):
            if each is not None:
                each.close()


class _Serving(threading.local):
    now: tuple[RankSchedule, int] | None = None


_serving = _Serving()


def announced_plan(store: object, attrs: Sequence[TensorAttr]) -> ReadPlan | None:
    """The plan of this thread's current read, if it was announced to the store."""
    now = _serving.now
    if now is None or now[0]._store is not store:
        return None
    return now[0].take(now[1], attrs)


def _schedule_of(store: Any) -> Any:
    return store.schedule() if look_ahead_of(store) > 0 else None


def _same(one: TensorAttr, two: TensorAttr) -> bool:
    if (one.group_name, one.attr_name) != (two.group_name, two.attr_name):
        return False
    a: Any = one.index
    b: Any = two.index
    return a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))
