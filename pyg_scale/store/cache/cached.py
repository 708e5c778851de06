"""A cache in memory over any feature store."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale.errors import was_interrupted
from pyg_scale.files.byte_size import byte_size
from pyg_scale.ops import memory, row_cache
from pyg_scale.ops.belady import MOST, Belady
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.ops.row_cache import Placed
from pyg_scale.ops.sieve import Sieve
from pyg_scale.store.base import RowReader, RowRequester, is_read_only, returns_views
from pyg_scale.store.cache.budget import TensorRows, slots_of
from pyg_scale.store.cache.coalesced_read import CoalescedRead
from pyg_scale.store.cache.hot import hot_lists, hot_of
from pyg_scale.store.cache.row_cache import Policy, RowCache, RowRequest
from pyg_scale.store.cache.schedule import TOGETHER, Key, Schedule, being_served
from pyg_scale.store.memory import _key, _name
from pyg_scale.store.reading import count_hits

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
            ids, size = hot_of(self._hot or {}, _key(attr)[0]), self.store.get_tensor_size(attr)
            if ids is not None and size is not None and ids.numel() and int(ids.max()) >= size[0]:
                raise IndexError(
                    f"hot has the id {int(ids.max())}, but {_name(attr)} has only {size[0]} rows"
                )

    def _begin(self) -> None:
        self._pid = os.getpid()
        self.planning = threading.RLock()
        self._writing = threading.RLock()
        self._state: State | None = None
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

    def ask_ahead(self, wanted: list[tuple[TensorAttr, CoalescedRead]]) -> None:
        """Have the store request rows ahead; errors are raised when they are read."""
        with contextlib.suppress(Exception):
            coming = self.store.ask_rows([(attr, each.joined()) for attr, each in wanted])
            for (_, each), take in zip(wanted, coming):
                each.coming = take

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
        return {_title(key): cache.stats() for key, cache in caches.items()}

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

    def _rows_of(self, attr: TensorAttr) -> Any:
        if self._pid != os.getpid():  # a fork may have copied locked locks
            self._begin()
        index, key = _as_rows(attr.index), self.key_of(attr)
        if index is None:
            return self._from_store(attr, attr.index)
        while True:
            with self.planning:
                state = self._current()
                cache = state.caches.get(key)
                try:
                    request = None if cache is None else self._request(cache, key, index)
                except IndexError as error:
                    raise IndexError(f"{_name(attr)}: {error}") from None
            if cache is None or request is None:
                with self.planning:
                    self._before["misses"] += index.numel()
                return self._from_store(attr, index)
            out = self._serve(cache, state.rows[key], request, attr)
            if self._state is state:
                count_hits(request.hits, request.hits * cache.row_bytes)
                return out
            with self._writing:  # after a write meanwhile: never mix rows of two versions
                pass

    def _request(self, cache: RowCache, key: Key, index: Tensor) -> RowRequest:
        served = being_served(self)
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
        raw = (
            out.view(count, -1).view(torch.uint8) if rows.row else out.view(-1, 1).view(torch.uint8)
        )
        if isinstance(self.store, RowReader):
            read = partial(self.store.read_rows, attr)
        else:
            read = partial(self._read, attr, rows)
        cache.serve(request, raw, read)
        return out

    def _read(
        self, attr: TensorAttr, rows: TensorRows, wanted: Tensor, position: Tensor, out: Tensor
    ) -> None:
        value = self._from_store(attr, wanted)
        value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        expected = (wanted.numel(), *rows.row)
        if tuple(value.shape) != expected or value.dtype != rows.dtype:
            raise ValueError(
                f"{self.store!r} returned {value.dtype} of shape {list(value.shape)} for "
                f"{_name(attr)}, expected {rows.dtype} of shape {list(expected)}"
            )
        raw = raw_bytes(value.contiguous()).view(wanted.numel(), -1)
        row_cache.scatter(raw, position, out)

    def _from_store(self, attr: TensorAttr, index: Any) -> Any:
        asked = copy.copy(attr)
        asked.index = index
        if not asked.is_set("group_name"):  # Data has only the name
            asked.group_name = None
        return self.store.get_tensor(asked)

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

    def key_of(self, attr: TensorAttr) -> Key:
        """The group and name of a tensor."""
        return _key(attr)

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

    def _current(self) -> State:
        if self._state is not None:
            return self._state
        rows = {}
        for attr in self.store.get_all_tensor_attrs():
            size = self.store.get_tensor_size(attr)
            if size is not None:
                none = self._from_store(attr, torch.empty(0, dtype=torch.int64))
                none = torch.from_numpy(none) if isinstance(none, np.ndarray) else none
                rows[self.key_of(attr)] = TensorRows(
                    int(size[0]), tuple(none.shape[1:]), none.dtype
                )
        self._state = State(rows, self.capacity, self.policy, self._hot, self._look_ahead)
        return self._state

    def __getstate__(self) -> dict[str, Any]:
        # Cached rows stay in this process.
        left = ("planning", "_writing", "_state", "_schedules", "_planner", "_before", "_pid")
        return {k: v for k, v in self.__dict__.items() if k not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def _title(key: Key) -> str:
    group, name = key
    where = (
        [] if group is None else [",".join(map(str, group)) if isinstance(group, tuple) else group]
    )
    return "/".join([*where, name])


def _as_rows(index: Any) -> Tensor | None:
    """The rows ``int64`` ``[n]`` if the index is one-dimensional and of integers; else ``None``."""
    if isinstance(index, np.ndarray):
        index = torch.from_numpy(index)
    if not isinstance(index, Tensor) or index.dim() != 1:
        return None
    if index.dtype not in (torch.int64, torch.int32) or index.device.type != "cpu":
        return None
    return index.to(torch.int64).contiguous()


class State:
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
        useful = {key: each._replace(num_rows=listed[key].numel()) for key, each in rows.items()}
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
