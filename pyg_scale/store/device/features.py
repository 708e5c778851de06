"""A feature store that returns rows on a device, the hottest ones from the device's memory."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale.errors import DeviceError
from pyg_scale.files.byte_size import byte_size
from pyg_scale.ops.mapped_rows import MappedRows, why_not_mapped
from pyg_scale.store.base import returns_views
from pyg_scale.store.cache.hot import by_degree, hot_lists, hot_of
from pyg_scale.store.device.placement import NOTHING, DeviceShare, place
from pyg_scale.store.device.shares import SHARES
from pyg_scale.store.device.table import DeviceSplit, DeviceTable
from pyg_scale.store.device.target import budget_of, device_of
from pyg_scale.store.reading import count_device
from pyg_scale.store.rows import (
    Key,
    ReadOnlyFeatures,
    TensorRows,
    as_tensor,
    key_of,
    listed_ids,
    name_of,
    request,
    rows_in,
    title_of,
)

_HOST = ("auto", "mapped", "staged")


class DeviceFeatures(ReadOnlyFeatures):
    """Features of another store, kept on a device within a budget.

    Rows requested by a one-dimensional index are returned on the device; whole tensors and slices
    are returned as the store has them. The device has whole tensors as far as the budget allows, or
    their hottest rows (:func:`~pyg_scale.store.device.place`). Other rows

    * are read by the device itself from the memory of the host (``"mapped"``: the pages are locked
      and mapped for it, called UVA by DGL and GLT), in the same kernel that looks up cached rows,
      or
    * are read on the host into pinned memory, and copied (``"staged"``), if the tensor is not in
      memory but in files or elsewhere, or without CUDA kernels.

    Copies and kernels use the current stream. The budget limits the device memory of this store's
    tensors; batches need more. Later writes to the underlying store are not visible.
    ``device="cpu"`` gives the same results without a device.

    Args:
        store: Any feature store.
        device: ``"cuda"``, ``"cuda:1"``, a ``torch.device``, or ``"cpu"``.
        memory: The budget: bytes, 0 for none, or text such as ``"4GB"``; ``None``: what is left of
            the half of the device that all stores and loaders without a budget share.
        hot: Original ids in order of priority: a tensor, an ``.npy`` file, or either by group. By
            default nodes by degree, if there is a ``graph``.
        graph: The graph for :func:`~pyg_scale.store.cache.by_degree`; used only if not everything
            fits.
        host: ``"mapped"``, ``"staged"``, or ``"auto"``: mapped if possible. :meth:`stats` returns
            the choice and its reason.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If one is out of range, or a tensor cannot be mapped with ``host="mapped"``.
        IndexError: If ``hot`` has an id that is not a row.
        DeviceError: If the device does not exist, or has less memory.

    Example::

        store = MemoryFeatureStore()
        store["paper", "x", None] = x
        features = DeviceFeatures(store, "cuda", memory="4GB", graph=data)
        train = NeighborLoader(data, [15, 10], feature_store=features, device="cuda")
        val = NeighborLoader(data, [15, 10], feature_store=features, device="cuda")
    """

    why_read_only = "DeviceFeatures is read-only: write to the underlying store before making it"

    def __init__(
        self,
        store: FeatureStore,
        device: Any = "cuda",
        memory: int | str | None = None,
        hot: Any = None,
        *,
        graph: Any = None,
        host: str = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(store, FeatureStore):
            raise TypeError(f"store must be a FeatureStore (got {type(store).__name__})")
        if host not in _HOST:
            raise ValueError(f"host must be one of {', '.join(_HOST)} (got {host!r})")
        if memory is not None and memory != 0:
            byte_size(memory, "memory")
        lists = None if hot is None else hot_lists(hot)
        self.store = store
        self.device = device_of(device)
        self.budget = budget_of(memory, self.device)
        self._host = host
        self._lists = lists
        self._reasons: dict[Key, str] = {}
        self._tables = self._place(graph)
        if memory is None:
            SHARES.take(self, self.device, self.used)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # from now on any stream may read

    @property
    def returns_views(self) -> bool:
        """True if whole tensors and slices may share memory with the store."""
        return returns_views(self.store)

    @property
    def used(self) -> int:
        """Bytes of this store's tensors on the device; never more than ``budget``."""
        return sum(table.num_bytes for table in self._tables.values() if table.place.num_bytes)

    def stats(self) -> dict[str, Any]:
        """The device, ``budget`` and ``used`` bytes, and of each tensor (such as ``"x"`` or
        ``"paper/x"``) the number of ``rows`` on the device ``of`` all, their ``bytes``, and
        ``where`` the others are: ``"device"`` (there are none), ``"mapped"`` or ``"staged"``, with
        the reason ``why``.
        """
        tensors = {}
        for key, table in self._tables.items():
            tensors[title_of(key)] = {
                "where": table.where,
                "why": self._reasons.get(key, "") if table.where == "staged" else "",
                "rows": table.place.rows,
                "of": table.rows.num_rows,
                "bytes": table.num_bytes,
            }
        return {
            "device": str(self.device),
            "budget": self.budget,
            "used": self.used,
            "tensors": tensors,
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store!r}, {str(self.device)!r}, {self.budget})"

    def __reduce__(self) -> Any:
        make = partial(type(self), host=self._host)
        return make, (self.store, str(self.device), self.budget, self._lists)

    # Reading ###############################################################################

    def _get_tensor(self, attr: TensorAttr) -> Any:
        """Read rows to the device.

        Raises:
            KeyError: If the store has no such tensor.
            IndexError: If a row does not exist; names it and the number of rows.
        """
        return self._multi_get_tensor([attr])[0]

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Any]:
        """Like :meth:`_get_tensor`, with one request to the underlying store."""
        found: list[Any] = [None] * len(attrs)
        waiting: list[tuple[int, DeviceTable, Tensor, DeviceSplit]] = []
        asked: list[TensorAttr] = []
        on_host: dict[int, Tensor] = {}  # an index of several tensors is copied once
        for i, attr in enumerate(attrs):
            table, index = self._tables.get(key_of(attr)), listed_ids(attr.index)
            if table is None or index is None:
                found[i] = self.store.get_tensor(request(attr, attr.index))
                continue
            try:
                table.check(index)
            except IndexError as error:
                raise IndexError(f"{name_of(attr)}: {error}") from None
            if index.device.type != "cpu" and table.where == "staged":
                known = on_host.get(id(attr.index))
                index = on_host[id(attr.index)] = index.cpu() if known is None else known
            split = table.split(index) if index.device.type == "cpu" else None
            if index.device.type == "cpu" or table.place.whole:
                hits = table.hits(index, split)
                count_device(hits, hits * table.rows.row_bytes)
            if split is None:
                found[i] = table.take(index, None, None)
            else:
                waiting.append((i, table, index, split))
                asked.append(request(attr, split.missing))
        staged = self.store.multi_get_tensor(asked) if asked else []
        for (i, table, index, split), rows in zip(waiting, staged, strict=True):
            count, name = split.missing.numel(), name_of(attrs[i])
            found[i] = table.take(index, split, table.rows.checked(rows, count, name, self.store))
        return found

    def _get_tensor_size(self, attr: TensorAttr) -> Any:
        return self.store._get_tensor_size(attr)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """The attributes of the store."""
        return [copy.copy(attr) for attr in self.store.get_all_tensor_attrs()]

    # Placing ###############################################################################

    def _place(self, graph: Any) -> dict[Key, DeviceTable]:
        """Decide the place of each tensor, and copy rows to the device."""
        rows = rows_in(self.store)
        there: dict[Key, Tensor] = {}  # already on the device
        candidates: dict[Key, Tensor] = {}
        for attr in self.store.get_all_tensor_attrs():
            key = key_of(attr)
            whole = self._view(attr) if key in rows else None
            if whole is not None and whole.device == self.device and self.device.type == "cuda":
                there[key] = whole
            elif whole is not None:
                candidates[key] = whole
        self._check_hot(rows)
        mappable = {key: each for key, each in candidates.items() if self._may_map(key, each)}
        placed = {k: each for k, each in rows.items() if k not in there}
        places = place(placed, self.budget, {}, frozenset(mappable))
        if not all(each.whole for each in places.values()):
            hot = self._hot_ids(graph, placed)
            listed = {key: ids.numel() for key, ids in hot.items()}
            places = place(placed, self.budget, listed, frozenset(mappable))
        else:
            hot = {}
        found = {}
        for key, each in rows.items():
            if key in there:
                whole_place = DeviceShare(each.num_rows, True, 0)
                found[key] = DeviceTable(
                    each, whole_place, self.device, None, self._reader(key), None, there[key]
                )
                continue
            where = places.get(key, NOTHING)
            mapped = None if where.whole else self._map(key, mappable.get(key))
            ids = hot[key][: where.rows] if where.rows and not where.whole else None
            found[key] = DeviceTable(each, where, self.device, ids, self._reader(key), mapped)
        return found

    def _view(self, attr: TensorAttr) -> Tensor | None:
        """The tensor itself, if the store has it in memory."""
        if not self.returns_views:
            return None
        whole = self.store.get_tensor(request(attr, None))
        return whole if isinstance(whole, Tensor) else None

    def _may_map(self, key: Key, tensor: Tensor) -> bool:
        if self._host == "staged":
            self._reasons[key] = "host='staged'"
            return False
        self._reasons[key] = why_not_mapped(tensor, self.device)
        return not self._reasons[key]

    def _map(self, key: Key, tensor: Tensor | None) -> MappedRows | None:
        if tensor is None:
            reason = self._reasons.setdefault(key, "the underlying store has no tensor to map")
            if self._host == "mapped":
                raise ValueError(f"host='mapped': {title_of(key)} cannot be mapped: {reason}")
            return None
        try:
            return MappedRows(tensor, self.device)
        except DeviceError as error:
            if self._host == "mapped":
                raise
            self._reasons[key] = str(error)
            return None

    def _check_hot(self, rows: dict[Key, TensorRows]) -> None:
        for key, each in rows.items() if self._lists else ():
            ids = hot_of(self._lists or {}, key[0])
            if ids is not None and ids.numel() and int(ids.max()) >= each.num_rows:
                raise IndexError(
                    f"hot has the id {int(ids.max())}, but {title_of(key)} has only "
                    f"{each.num_rows} rows"
                )

    def _hot_ids(self, graph: Any, rows: dict[Key, TensorRows]) -> dict[Key, Tensor]:
        """The listed ids of each tensor, in order of priority."""
        lists = self._lists
        if lists is None:
            lists = {} if graph is None else by_degree(graph)
        found = {key: hot_of(lists, key[0]) for key in rows}
        return {key: ids[ids < rows[key].num_rows] for key, ids in found.items() if ids is not None}

    def _reader(self, key: Key) -> Any:
        group, name = key

        def read(ids: Tensor) -> Tensor:
            return as_tensor(self.store.get_tensor(TensorAttr(group, name, ids)))

        return read
