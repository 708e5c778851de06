"""Features of nodes and edges on any rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale.comm import Service
from pyg_scale.distributed.failover import Health, PartOwners, Search
from pyg_scale.distributed.features.hot import capacity_of, check_cache, hot_rows
from pyg_scale.distributed.features.parts import PartRows, RowSource
from pyg_scale.distributed.features.plan import ReadPlan, RowsByRank, Splitter
from pyg_scale.distributed.features.requests import RemoteRead
from pyg_scale.ops import memory, row_cache
from pyg_scale.ops.gather import gather
from pyg_scale.store.announced import AnnouncedReads, served_now
from pyg_scale.store.base import LooksAhead, look_ahead_of
from pyg_scale.store.cache import Cached
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory_features import DirectoryFeatures, FeatureColumn
from pyg_scale.store.reading import count_local
from pyg_scale.store.rows import Key, ids_of, is_single, key_of, raw_rows


class RankFeatures(DirectoryFeatures):
    """The features of a partitioned directory on any rank, by original ids.

    Rows of local parts are read from the files, which ranks of one machine share. The other rows
    are requested from the ranks that have them: from all of them at once, each row once, all
    attributes of the same nodes in one request. Loaders announce the next batches, whose rows are
    then requested while earlier batches are in use. Groups are as in
    :class:`~pyg_scale.store.MemoryFeatureStore`. Any number of threads may read; each waits only
    for its own answers.

    With ``cache`` or ``cache_ratio``, rows of other ranks are kept in memory: see
    :class:`~pyg_scale.store.cache.Cached` for policies.

    Args:
        directory: The directory; parts may be missing on this rank.
        service: The service by which other ranks are asked.
        owners: The holders of the parts.
        cache: Bytes of rows of other ranks to keep, or text such as ``"2GB"``.
        cache_ratio: Instead of ``cache``, a share of all features of the graph, from 0 to 1.
        policy: ``"placed"`` (those of ``hot``), ``"belady"`` or ``"sieve"``.
        hot: The nodes to keep for ``"placed"``: original ids by node type, in order of priority.
            ``None``: those that the partitioner listed, then the halo nodes by their number of
            local edges.
        look_ahead: For ``"belady"``.
        in_flight: Number of batches whose rows are requested at a time, including the one that is
            read next. With a cache, announced batches are requested four at a time.
        local: A feature store for local rows, such as :class:`~pyg_scale.store.Disk`; ``None`` for
            the mapped files.
        attributes: Names of the attributes to serve, or groups and names; ``None`` for all.
        health: The ranks that failed recently, shared by all that ask them.

    Raises:
        KeyError: If an attribute does not exist.
        ValueError: If arguments contradict each other, or ``local`` does not fit the directory.
        TypeError: If an argument has a wrong type.

    Example::

        data = pyg_scale.open("parts")  # on every rank
        features = data.rank_features(cache_ratio=0.2, policy="belady")
        loader = NeighborLoader(data, [15, 10], feature_store=features)
    """

    def __init__(
        self,
        directory: GraphDirectory,
        service: Service,
        owners: PartOwners,
        *,
        cache: int | str | None = None,
        cache_ratio: float | None = None,
        policy: str = "placed",
        hot: Any = None,
        look_ahead: int = 15,
        in_flight: int = 4,
        local: FeatureStore | None = None,
        attributes: Sequence[str | Key] | None = None,
        health: Health | None = None,
    ) -> None:
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
            raise ValueError(f"in_flight must be a number of at least 1 (got {in_flight!r})")
        super().__init__(directory, attributes)
        self.service, self.in_flight = service, in_flight
        self._health = Health(service.timeout) if health is None else health
        self._owners = owners
        self._split = Splitter(directory, owners.direct)
        self._parts = PartRows(directory)
        self._pid = os.getpid()
        self.local = local
        """The store of local rows, unless it is the mapped files."""
        if local is not None:
            self._check_local(local)
        self.cache: Cached | None = None
        """The cache of rows of other ranks, or ``None``."""
        self._cached: frozenset[Key] = frozenset()  # attributes that have room in it
        self.keeps: object = None
        """An object to be kept alive as long as this store."""
        here = sorted(owners.direct)
        self._all_here = len(here) == directory.meta.num_parts
        check_cache(cache, cache_ratio, policy)
        capacity = capacity_of(cache, cache_ratio, self.columns.values())
        if hot is not None and (policy != "placed" or not capacity):
            raise ValueError("hot= is for a cache with policy='placed': pass cache= too")
        if capacity and not self._all_here:
            lists = hot_rows(directory, self._split, here, hot) if policy == "placed" else None
            same: dict[str, Any] = {"attributes": attributes, "health": self._health}
            plain = RankFeatures(directory, service, owners, **same)
            self.cache = Cached(plain, capacity, policy, lists, look_ahead=look_ahead)
            with self.cache.planning:
                self._cached = frozenset(self.cache.row_caches())

    def _check_local(self, local: FeatureStore) -> None:
        if not isinstance(local, FeatureStore):
            raise TypeError(f"local must be a FeatureStore (got {type(local).__name__})")
        known = {key_of(attr) for attr in local.get_all_tensor_attrs()}
        for column in self.columns.values():
            if column.key not in known:
                raise ValueError(f"local has no {column}: pass attributes= without it")
            size = local.get_tensor_size(TensorAttr(*column.key))
            if size is not None and tuple(size) != (column.num_rows, *column.row):
                raise ValueError(
                    f"local has {column} of shape {list(size)}, but the directory has "
                    f"{[column.num_rows, *column.row]}"
                )

    @property
    def look_ahead(self) -> int:
        """Number of batches that loaders should announce before they are read."""
        of_local = 0 if self.local is None else look_ahead_of(self.local)
        if self._all_here:
            return of_local
        of_cache = 0 if self.cache is None else self.cache.look_ahead
        return max(of_local, of_cache, self.in_flight - 1)

    def schedule(self) -> RankSchedule:
        """A schedule for a loader that announces the batches of an iteration."""
        return RankSchedule(self)

    def stats(self) -> dict[str, Any]:
        """Those of the cache, see :meth:`~pyg_scale.store.cache.Cached.stats`; else empty."""
        return {} if self.cache is None else self.cache.stats()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.directory.path)!r}, rank={self.service.rank})"

    # Reading ###############################################################################

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        """Read rows of a tensor; see :meth:`_multi_get_tensor`."""
        return self._multi_get_tensor([attr])[0]

    def _multi_get_tensor(self, attrs: Sequence[TensorAttr]) -> list[Tensor]:
        """Read rows of several tensors.

        Raises:
            KeyError: If a tensor does not exist.
            IndexError: If a row does not exist; names it and the number of rows.
            CommTimeoutError: If a rank did not answer in time; names it.
            CommError: If a rank is gone or sent a wrong answer; names it.
            RuntimeError: If this process was forked: connections stay with its parent.
        """
        if self._all_here and self.local is None:
            return self._read_mapped(attrs)
        return self._read_planned(attrs)

    def _read_mapped(self, attrs: Sequence[TensorAttr]) -> list[Tensor]:
        """Rows that are all in local parts; those of the same nodes in one call."""
        out: list[Any] = [None] * len(attrs)
        same: dict[Any, list[tuple[int, FeatureColumn]]] = {}
        for number, attr in enumerate(attrs):
            column = self.column(attr)
            if column.of_edges:
                out[number] = self._read_planned([attr])[0]
            else:
                same.setdefault((column.type, id(attr.index)), []).append((number, column))
        for asked in same.values():
            attr = attrs[asked[0][0]]
            index = ids_of(attr, asked[0][1].num_rows)
            found = self._parts.of_nodes([column for _, column in asked], index)
            for (number, column), value in zip(asked, found, strict=True):
                count_local(index.numel(), index.numel() * column.row_bytes)
                out[number] = value[0] if is_single(attr.index) else value
        return out

    def _read_planned(self, attrs: Sequence[TensorAttr]) -> list[Tensor]:
        announced = served_now(self)
        plan = None if announced is None else announced[0].take(announced[1], attrs)
        if plan is None:
            plan = self.plan(attrs)
            self.begin(plan)
        return self._finish(plan, [is_single(attr.index) for attr in attrs])

    def plan(self, attrs: Sequence[TensorAttr]) -> ReadPlan:
        """Find the ranks that have the rows of a read, without asking them yet.

        Raises:
            KeyError: If a tensor does not exist.
            IndexError: If a row does not exist; names it and the number of rows.
        """
        plan, known = ReadPlan(), dict[Any, int]()
        for attr in attrs:
            column = self.column(attr)
            cached = column.key in self._cached
            same = (column.of_edges, column.type, cached, id(attr.index))
            number = known.get(same)
            if number is None:
                index = ids_of(attr, column.num_rows)
                rows = self._split.split(column.of_edges, column.type, index, ask=not cached)
                number = known[same] = len(plan.wanted)
                plan.wanted.append((rows, []))
                plan.through_cache.append(gather(index, rows.absent) if cached else None)
            rows, columns = plan.wanted[number]
            if column not in columns:
                columns.append(column)
            plan.place.append((number, column))
            plan.attrs.append(TensorAttr(*column.key, index=rows.index))
        return plan

    def begin(self, plan: ReadPlan) -> None:
        """Request the rows that are not looked up in a cache first; returns at once."""
        self._check_process(plan)
        search = Search(self.service.rank, self._owners, self._health, self.service.timeout)
        plan.asked = RemoteRead(self.service, plan.wanted, search)

    def _finish(self, plan: ReadPlan, single: Sequence[bool]) -> list[Tensor]:
        out = [plan.coming(number) for number in range(len(plan.wanted))]
        for number, (rows, columns) in enumerate(plan.wanted):
            read_here(self._parts, self.local, rows, columns, out[number])
        if self.cache is not None:
            self._read_cache(plan, self.cache, out)
        for number, (_, columns) in enumerate(plan.wanted):
            for column in columns:
                self._read_asked(plan, number, column, out[number])
        values = [out[number][column.key] for number, column in plan.place]
        return [each[0] if one else each for each, one in zip(values, single, strict=True)]

    def _read_asked(
        self, plan: ReadPlan, number: int, column: FeatureColumn, out: dict[Key, Tensor]
    ) -> None:
        if plan.wanted[number][0].remote:
            assert plan.asked is not None, "what was planned was begun"
            plan.asked.write(number, column, raw_rows(out[column.key]))

    def _read_cache(self, plan: ReadPlan, cache: Cached, out: list[dict[Key, Tensor]]) -> None:
        found = iter(cache.multi_get_tensor(plan.cache_attrs()))
        for number, ids in enumerate(plan.through_cache):
            rows, columns = plan.wanted[number]
            for column in columns if ids is not None and ids.numel() else ():
                values = column.checked(
                    next(found), rows.absent.numel(), str(column), "the cache"
                ).contiguous()
                if rows.absent.numel() == rows.index.numel():
                    out[number][column.key] = values
                else:
                    target = raw_rows(out[number][column.key])
                    row_cache.scatter(raw_rows(values), rows.absent, target)

    def read_rows(self, attr: TensorAttr, index: Tensor, position: Tensor, out: Tensor) -> None:
        """Write row ``index[i]`` of a tensor to ``out[position[i]]``, for a cache over this store.

        Args:
            attr: The tensor; its own index is ignored.
            index: Original ids ``int64`` ``[n]``, which exist.
            position: ``int64`` ``[n]``, without repetition.
            out: ``uint8`` ``[m, row_bytes]``.

        Raises:
            CommError: See :meth:`_multi_get_tensor`.
        """
        value = self.get_tensor(TensorAttr(*self.column(attr).key, index=index))
        row_cache.scatter(raw_rows(value), position, out)

    def ask_rows(self, wanted: Sequence[tuple[TensorAttr, Tensor]]) -> list[Callable[[], Tensor]]:
        """Request rows that are needed soon, for a cache over this store; returns at once.

        Args:
            wanted: Tensors, and original ids ``int64`` ``[n]`` which exist. Tensors with equal ids
                are requested in one message.

        Returns:
            For each, a function that waits for the rows and returns them, ``uint8``
            ``[n, row_bytes]``. Call it once. It raises the errors of :meth:`_multi_get_tensor`.
        """
        same: list[Tensor] = []
        attrs: list[TensorAttr] = []
        for attr, index in wanted:
            index = next((known for known in same if torch.equal(known, index)), index)
            same.append(index)
            attrs.append(TensorAttr(*self.column(attr).key, index=index))
        # What a cache of its own may have is read when it is needed.
        plan = self.plan([attr for attr in attrs if key_of(attr) not in self._cached])
        self.begin(plan)
        place = iter(plan.place)

        def take(number: int, column: FeatureColumn) -> Tensor:
            out = plan.coming(number, column)
            read_here(self._parts, self.local, plan.wanted[number][0], [column], out)
            self._read_asked(plan, number, column, out)
            return raw_rows(out[column.key])

        return [
            partial(self._read_raw, attr)
            if key_of(attr) in self._cached
            else partial(take, *next(place))
            for attr in attrs
        ]

    def _read_raw(self, attr: TensorAttr) -> Tensor:
        return raw_rows(self.get_tensor(attr))

    def _check_process(self, plan: ReadPlan) -> None:
        if self._pid != os.getpid() and any(rows.absent.numel() for rows, _ in plan.wanted):
            raise RuntimeError(
                "this process was forked, and cannot request features of other ranks: connections "
                "stay with the process that made them. Use worker_type='thread' for workers"
            )

    def __reduce__(self) -> Any:
        raise TypeError(
            "features of other ranks cannot be sent to another process: connections stay with the "
            "process that made them. Use worker_type='thread' for workers"
        )


class RankSchedule(AnnouncedReads):
    """The batches of one iteration of :class:`RankFeatures`.

    Rows of other ranks are requested when a batch is announced. A cache, and a store of local rows,
    are told their share of the batch instead.

    Args:
        store: The store that reads the batches.
    """

    _store: RankFeatures

    def __init__(self, store: RankFeatures) -> None:
        self._plans: dict[int, ReadPlan] = {}
        self._lock = threading.Lock()
        self._of_local, self._of_cache = (
            each.schedule() if isinstance(each, LooksAhead) and each.look_ahead > 0 else None
            for each in (store.local, store.cache)
        )
        inner = [each for each in (self._of_local, self._of_cache) if each is not None]
        super().__init__(store, inner)

    def announce(self, batch: int, wanted: Sequence[TensorAttr]) -> None:
        """Announce the rows of a batch; rows that cannot be requested raise when they are read."""
        try:
            plan = self._store.plan(wanted)
        except Exception:
            plan = None
        if self._of_local is not None:
            self._of_local.announce(batch, [] if plan is None else plan.local_attrs())
        if self._of_cache is not None:
            self._of_cache.announce(batch, [] if plan is None else plan.cache_attrs())
        if plan is not None:
            self._store.begin(plan)
            with self._lock:
                if not self.closed:
                    self._plans[batch] = plan

    def suffices(self, ahead: int) -> bool:
        """Return True if batches need not be announced any further ahead.

        Args:
            ahead: Number of announced batches after the one to be read next.
        """
        return ahead >= self._store.in_flight - 1 and super().suffices(ahead)

    def take(self, batch: int, attrs: Sequence[TensorAttr]) -> ReadPlan | None:
        """Take the plan of a batch, if it was announced with these attributes."""
        with self._lock:
            plan = self._plans.pop(batch, None)
        if plan is None or len(plan.attrs) != len(attrs):
            return None
        same = all(_same(one, two) for one, two in zip(plan.attrs, attrs))
        return plan if same else None

    def finish(self, batch: int) -> None:
        """Forget the plan of a batch."""
        with self._lock:
            self._plans.pop(batch, None)

    def close(self) -> None:
        """Announce that no batch will follow. Never waits, so that a finalizer may call it."""
        super().close()
        self._plans = {}  # without the lock, which the finalizer's own thread may hold


def _same(one: TensorAttr, two: TensorAttr) -> bool:
    if (one.group_name, one.attr_name) != (two.group_name, two.attr_name):
        return False
    a: Any = one.index
    b: Any = two.index
    return a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))


def read_here(
    parts: RowSource,
    store: FeatureStore | None,
    rows: RowsByRank,
    columns: Sequence[FeatureColumn],
    out: dict[Key, Tensor],
) -> None:
    """Read the local ones of some rows.

    Args:
        parts: The mapped files, or what else has the rows.
        store: A store that reads them instead, or ``None``.
        rows: Rows of one type.
        columns: The attributes to read.
        out: Tensors of all rows by attribute; missing ones are created.
    """
    if store is not None:
        _read_store(store, rows, columns, out)
        return
    count = rows.index.numel()
    places = [
        (part, position, _place(parts, rows, part, ids)) for part, position, ids in rows.local
    ]
    for column in columns:
        if len(places) == 1 and places[0][1] is None:  # all of them, of one part
            raw = gather(parts.raw(column, places[0][0]), places[0][2])
            out[column.key] = raw.view(-1).view(column.dtype).view(count, *column.row)
        else:
            target = raw_rows(_made(column, count, out))
            for part, position, place in places:
                assert position is not None, "several parts have some rows each"
                row_cache.scatter(parts.raw(column, part), position, target, take=place)
        here = count - rows.absent.numel()
        count_local(here, here * column.row_bytes)


def _made(column: FeatureColumn, count: int, out: dict[Key, Tensor]) -> Tensor:
    if column.key not in out:
        out[column.key] = memory.empty([count, *column.row], column.dtype)
    return out[column.key]


def _place(parts: RowSource, rows: RowsByRank, part: int, ids: Tensor) -> Tensor:
    return parts.place_of_edges(rows.type, part, ids) if rows.of_edges else ids  # type: ignore[arg-type]


def _read_store(
    store: FeatureStore, rows: RowsByRank, columns: Sequence[FeatureColumn], out: dict[Key, Tensor]
) -> None:
    for column in columns:
        _made(column, rows.index.numel(), out)
    for position, index in rows.here():
        attrs = [TensorAttr(*column.key, index=index) for column in columns]
        for column, value in zip(columns, store.multi_get_tensor(attrs), strict=True):
            values = column.checked(value, index.numel(), str(column), "local").contiguous()
            row_cache.scatter(raw_rows(values), position, raw_rows(out[column.key]))
            count_local(index.numel(), values.nbytes)
