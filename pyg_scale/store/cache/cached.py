"""A cache in memory over any feature store."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale.errors import was_interrupted
from pyg_scale.files.byte_size import byte_size
from pyg_scale.ops import memory, row_cache
from pyg_scale.ops.belady import MOST
from pyg_scale.ops.lazy_rows import Table
from pyg_scale.ops.stored_rows import StoredRows
from pyg_scale.store.announced import served_now
from pyg_scale.store.base import RowReader, RowRequester, is_read_only, returns_views
from pyg_scale.store.cache.hot import hot_lists, hot_of
from pyg_scale.store.cache.pending import CoalescedRead, PendingRead, Read
from pyg_scale.store.cache.row_cache import RowCache, RowCaches, RowRequest
from pyg_scale.store.cache.schedule import TOGETHER, Schedule
from pyg_scale.store.lending import LentRows, lend
from pyg_scale.store.reading import count_hits
from pyg_scale.store.rows import (
    Key,
    TensorRows,
    key_of,
    listed_ids,
    name_of,
    raw_rows,
    rows_in,
    title_of,
)
from pyg_scale.store.rows import (
    request as request_of,
)

_COUNTS = ("hits", "misses", "late", "evictions")

POLICIES = ("belady", "sieve", "placed")


class Cached(FeatureStore):
    """Keeps rows of another feature store in memory.

    Rows requested by a one-dimensional index go through the cache; whole tensors and slices are
    read from the store. Values are those of the store, whatever is cached. Any number of threads
    may read it. Writes through it are visible at once; direct writes to the store are not.

    ``policy`` chooses the rows to keep:

    * ``"belady"``: those that the next batches need soonest. Loaders announce the batches that they
      will read (:class:`~pyg_scale.store.cache.Schedule`), as sampling ahead costs little; see
      :mod:`pyg_scale.ops.belady` for rows that no announced batch needs.
    * ``"sieve"``: SIEVE, which uses only past reads (:mod:`pyg_scale.ops.sieve`).
    * ``"placed"``: the rows of ``hot``, as many as fit, each from its first request on.

    Tensors share the capacity: those of nodes with the shortest rows are served first, edges last
    (:func:`~pyg_scale.store.cache.budget.slots_of`). It bounds the bytes of cached rows. The index
    of the cache (4 bytes for every row of the store, 2 more with 15 announced batches, up to 33 for
    every cached row) is ``index_bytes`` of :meth:`stats`.

    Args:
        store: Any feature store.
        capacity: Size in bytes, or text such as ``"2GB"``.
        policy: ``"belady"``, ``"sieve"`` or ``"placed"``.
        hot: For ``"placed"``, original ids in order of priority: a tensor, an ``.npy`` file, or
            either by group; :func:`~pyg_scale.store.cache.by_degree` makes them.
        look_ahead: For ``"belady"``, number of batches that loaders announce before they are read,
            at most 63; fewer once they have four times the rows of the cache.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If arguments contradict each other.
        IndexError: If ``hot`` has an id that is not a row.

    Example::

        store = Cached(store, "2GB")
        loader = NeighborLoader((store, graph_store), [15, 10, 5], num_workers=2)
    """

    def __init__(
        self,
        store: FeatureStore,
        capacity: int | str = "2GB",
        policy: str = "belady",
        hot: Any = None,
        *,
        look_ahead: int = 15,
    ) -> None:
        super().__init__()
        if not isinstance(store, FeatureStore):
            raise TypeError(f"store must be a FeatureStore (got {type(store).__name__})")
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)} (got {policy!r})")
        if (hot is None) == (policy == "placed"):
            raise ValueError(
                "policy='placed' needs hot=, the ids to keep"
                if hot is None
                else f"hot= is for policy='placed' (got {policy!r})"
            )
        if not isinstance(look_ahead, int) or not 0 <= look_ahead <= MOST:
            raise ValueError(f"look_ahead must be a number from 0 to {MOST} (got {look_ahead!r})")
        self.store = store
        self.capacity = byte_size(capacity, "capacity")
        self.policy = policy
        self._hot = None if hot is None else hot_lists(hot)
        self._check_hot()
        self._look_ahead = look_ahead if policy == "belady" else 0
        self._begin()

    @classmethod
    def for_data(cls, data: Any) -> Cached:
        """The store for ``feature_store="cached"``: a cache over the feature store of a pair.

        Raises:
            ValueError: If ``data`` is not a pair of stores: its features are already in memory.
        """
        if isinstance(data, tuple | list) and len(data) == 2:
            return cls(data[0])
        raise ValueError(
            "feature_store='cached' is a cache over the feature store of data, which has none: "
            "pass data=(feature_store, graph_store) or pyg_scale.store.Cached(store)"
        )

    def _check_hot(self) -> None:
        """Refuse ids that a tensor lacks; tensors that are put later may have fewer rows."""
        for attr in self.store.get_all_tensor_attrs() if self._hot else []:
            ids, size = hot_of(self._hot or {}, key_of(attr)[0]), self.store.get_tensor_size(attr)
            if ids is not None and size is not None and ids.numel() and int(ids.max()) >= size[0]:
                raise IndexError(
                    f"hot has the id {int(ids.max())}, but {name_of(attr)} has only {size[0]} rows"
                )

    def _begin(self) -> None:
        self._pid = os.getpid()
        self.planning = threading.RLock()
        self._writing = threading.RLock()
        self._state: RowCaches | None = None
        self._schedules: list[Schedule] = []
        self._planner: Schedule | None = None
        self._before: Counter[str] = Counter()  # of dropped caches, and of tensors without a cache

    @property
    def look_ahead(self) -> int:
        """Number of batches that loaders should announce before they are read."""
        return max(self._look_ahead, self.asked_ahead)

    @property
    def foresight(self) -> int:
        """Number of announced batches on which the choice of rows depends."""
        return self._look_ahead

    @property
    def asked_ahead(self) -> int:
        """Number of announced batches whose missing rows are requested ahead."""
        return 2 * self.together - 1 if isinstance(self.store, RowRequester) else 0

    def read_together(
        self, missing: Mapping[Key, Sequence[Tensor]]
    ) -> Sequence[Sequence[PendingRead]]:
        """Arrange that rows are read at once, ahead if the store can be asked for them.

        Args:
            missing: The missing rows of a few requests, by tensor.

        Returns:
            The rows of each request, by tensor; errors are raised when these are read again.
        """
        wanted = [(TensorAttr(*key), key, rows) for key, rows in missing.items()]
        state = self._current()
        shared = [
            CoalescedRead(rows, state.rows[key].row_bytes, self._reader(attr, state.rows[key]))
            for attr, key, rows in wanted
        ]
        if isinstance(self.store, RowRequester):
            with contextlib.suppress(Exception):
                asked = [(attr, each.joined()) for (attr, _, _), each in zip(wanted, shared)]
                for each, take in zip(shared, self.store.ask_rows(asked)):
                    each.coming = take
        return [each.shares() for each in shared]

    @property
    def together(self) -> int:
        """Largest number of announced batches whose missing rows are read at once."""
        return TOGETHER if isinstance(self.store, RowReader) else 1

    @property
    def group_bytes(self) -> int | None:
        """Largest size in bytes of the missing rows read at once for several batches."""
        return None if self.asked_ahead else self.capacity // 2

    @property
    def read_only(self) -> bool:
        """True if the store refuses writes."""
        return is_read_only(self.store)

    lends_rows = True
    """Rows in the cache can be read where they are."""

    @property
    def returns_views(self) -> bool:
        """True if whole tensors and slices may share memory with the store."""
        return returns_views(self.store)

    def stats(self) -> dict[str, Any]:
        """Numbers of rows found (``hits``), read (``misses``), read again because an earlier
        request failed or took too long (``late``), and dropped (``evictions``), since the store was
        made; bytes of cached rows, of the index, and of ``capacity``. ``tensors`` has those of each
        tensor, such as ``"x"`` or ``"paper/x"``, since the last write to the store.
        """
        with self.planning:
            each = self._each()
            total: dict[str, Any] = {name: self._before[name] for name in _COUNTS}
        for name in (*_COUNTS, "cached_bytes", "index_bytes"):
            total[name] = total.get(name, 0) + sum(stats[name] for stats in each.values())
        return {**total, "policy": self.policy, "capacity": self.capacity, "tensors": each}

    def _each(self) -> dict[str, dict[str, int]]:
        caches = {} if self._state is None else self._state.caches
        return {title_of(key): cache.stats() for key, cache in caches.items()}

    def schedule(self) -> Schedule:
        """A schedule for a loader that announces the batches of an iteration."""
        made = Schedule(self)
        with self.planning:
            self._schedules.append(made)
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store!r}, {self.capacity}, {self.policy!r})"

    # Reading ###############################################################################

    def _get_tensor(self, attr: TensorAttr) -> Any:
        """Read rows from the cache or the store.

        Raises:
            KeyError: If the store has no such tensor.
            IndexError: If a row does not exist; names it and the number of rows.
        """
        try:
            return self._rows_of(attr)
        except BaseException as error:
            if was_interrupted(error):  # the plan may be half done, and others may wait for it
                self.forget_all()
            raise

    def lend_rows(self, attr: TensorAttr) -> LentRows | None:
        """Rows of a matrix where they are: in slots of the cache, beside those that it lacks.

        A row in a slot stays there as long as somebody holds it. ``None`` if rows of this tensor
        have to be read: they are no matrix, or it has no slots and the store lends none.

        Raises:
            KeyError: If the store has no such tensor.
            IndexError: If a row does not exist.
        """
        try:
            return self._lent_of(attr)
        except BaseException as error:
            if was_interrupted(error):
                self.forget_all()
            raise

    def _rows_of(self, attr: TensorAttr) -> Any:
        self._begin_after_fork()
        index = listed_ids(attr.index)
        if index is None or index.device.type != "cpu":
            return self._from_store(attr, attr.index)
        while True:
            state, cache, request = self._planned(attr, index)
            if cache is None or request is None:
                with self.planning:
                    self._before["misses"] += index.numel()
                return self._from_store(attr, index)
            out = self._serve(cache, state.rows[key_of(attr)], request, attr)
            if self._is_current(state, cache, request):
                return out

    def _lent_of(self, attr: TensorAttr) -> LentRows | None:
        self._begin_after_fork()
        index = listed_ids(attr.index)
        with self.planning:
            rows = self._current().rows.get(key_of(attr))
        if index is None or index.device.type != "cpu" or rows is None or len(rows.row) != 1:
            return None
        while True:
            state, cache, request = self._planned(attr, index)
            if cache is None or request is None:
                return lend(self.store, request_of(attr, index))
            rows = state.rows[key_of(attr)]
            held, rest, place, lease = cache.lend(request, self._reader(attr, rows))
            if self._is_current(state, cache, request):
                both = held.view(rows.dtype), rest.view(rows.dtype)
                stored = StoredRows(both[0], rows.dtype, both[1], lease=lease)
                return LentRows(Table(stored), place)

    def _begin_after_fork(self) -> None:
        if self._pid != os.getpid():  # a fork may have copied locked locks
            self._begin()

    def _planned(
        self, attr: TensorAttr, index: Tensor
    ) -> tuple[RowCaches, RowCache | None, RowRequest | None]:
        with self.planning:
            state, key = self._current(), key_of(attr)
            cache = state.caches.get(key)
            try:
                return state, cache, None if cache is None else self._request(cache, key, index)
            except IndexError as error:
                raise IndexError(f"{name_of(attr)}: {error}") from None

    def _is_current(self, state: RowCaches, cache: RowCache, request: RowRequest) -> bool:
        """Return True if rows that were served are those of the store; counts them then."""
        if self._state is state:
            count_hits(request.hits, request.hits * cache.row_bytes)
            return True
        with self._writing:  # after a write meanwhile: never mix rows of two versions
            return False

    def _request(self, cache: RowCache, key: Key, index: Tensor) -> RowRequest:
        served = served_now(self)
        if served is not None:
            schedule, batch = served
            if self.plans_for(schedule):
                planned = schedule.request(batch, key, index)
                if planned is not None:
                    return planned
        if self._active() is not None:  # announced batches decide which rows are kept
            return cache.peek(index)
        return cache.request(index)

    def _serve(
        self, cache: RowCache, rows: TensorRows, request: RowRequest, attr: TensorAttr
    ) -> Tensor:
        count = request.index.numel()
        out = memory.empty([count, *rows.row], rows.dtype)
        if count == 0:
            cache.drop(request)
            return out
        cache.serve(request, raw_rows(out), self._reader(attr, rows))
        return out

    def _reader(self, attr: TensorAttr, rows: TensorRows) -> Read:
        if isinstance(self.store, RowReader):
            return partial(self.store.read_rows, attr)
        return partial(self._read, attr, rows)

    def _read(
        self, attr: TensorAttr, rows: TensorRows, wanted: Tensor, position: Tensor, out: Tensor
    ) -> None:
        value = self._from_store(attr, wanted)
        value = rows.checked(value, wanted.numel(), name_of(attr), repr(self.store))
        row_cache.scatter(raw_rows(value.contiguous()), position, out)

    def _from_store(self, attr: TensorAttr, index: Any) -> Any:
        return self.store.get_tensor(request_of(attr, index))

    def _get_tensor_size(self, attr: TensorAttr) -> Any:
        return self.store._get_tensor_size(attr)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """The attributes of the store."""
        return [copy.copy(attr) for attr in self.store.get_all_tensor_attrs()]

    # Writing ###############################################################################

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        return self._write(partial(self.store.put_tensor, tensor, attr))

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Replace a tensor, or rows of it, in the store."""
        return self._write(partial(self.store.update_tensor, tensor, *args, **kwargs))

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._write(partial(self.store._remove_tensor, attr))

    def _write(self, write: Callable[[], bool]) -> bool:
        with self._writing:
            try:
                self.forget_all()
                return write()
            finally:
                self.forget_all()

    def forget_all(self) -> None:
        """Start with empty caches, as rows were written or a plan may be half done."""
        with self.planning:
            for stats in self._each().values():
                self._before.update({name: stats[name] for name in _COUNTS})
            self._state = None

    # Caches: under the lock ``planning`` ###################################################

    def row_caches(self) -> dict[Key, RowCache]:
        """The cache of every tensor that has one."""
        return self._current().caches

    def plans_for(self, schedule: Schedule) -> bool:
        """Return True if the batches of a schedule decide which rows are kept."""
        active = self._active()
        if active is not self._planner:
            if self._planner is not None:
                self._planner.rest()
            self._planner = active
        return active is schedule

    def _active(self) -> Schedule | None:
        """The open schedule that was made last."""
        for schedule in [each for each in self._schedules if each.closed]:
            schedule.retire()
            self._schedules.remove(schedule)
            if self._planner is schedule:
                self._planner = None
        return self._schedules[-1] if self._schedules else None

    def _current(self) -> RowCaches:
        if self._state is not None:
            return self._state
        self._state = RowCaches(
            rows_in(self.store), self.capacity, self.policy, self._hot, self._look_ahead
        )
        return self._state

    def __getstate__(self) -> dict[str, Any]:
        # Cached rows stay in this process.
        left = ("planning", "_writing", "_state", "_schedules", "_planner", "_before", "_pid")
        return {k: v for k, v in self.__dict__.items() if k not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()
