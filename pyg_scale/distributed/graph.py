"""PyG's ``Data`` and ``HeteroData`` of a graph whose parts are read by several ranks."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Self

from torch_geometric.data import FeatureStore
from torch_geometric.data.storage import BaseStorage

from pyg_scale.comm import Communicator
from pyg_scale.distributed.columns import Columns
from pyg_scale.distributed.features.store import RankFeatures
from pyg_scale.distributed.features.supply import SuppliedFeatures, stored_attributes
from pyg_scale.distributed.owners import Owners
from pyg_scale.distributed.ranks import Ranks
from pyg_scale.distributed.router import RankRouter
from pyg_scale.graph.base import TopologyOptions
from pyg_scale.graph.topology import NodeType, Topology
from pyg_scale.sampler.parts import parts_topology
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory.book import PartitionBook
from pyg_scale.store.directory.data import DirectoryData, DirectoryHeteroData
from pyg_scale.store.directory.lazy import EDGE_INDEX, LazyMapping
from pyg_scale.store.directory.opening import fill_hetero, fill_homogeneous


class _OverRanks:
    """Mixin: members of a graph that several ranks opened."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that have it open; copies of the graph share them."""
        return self.__dict__["_over"].ranks

    @property
    def comm(self) -> Communicator:
        """Collectives between the ranks; give calls a tag."""
        return self.ranks.comm

    @property
    def owners(self) -> Owners:
        """The ranks that answer for each part."""
        return self.ranks.owners

    @property
    def partition_books(self) -> dict[NodeType, PartitionBook]:
        """The part of every node, by node type."""
        return self.__dict__["_over"].directory.books

    def close(self, timeout: float | None = None) -> None:
        """Serve until all ranks have closed the graph, then stop.

        Args:
            timeout: Seconds to wait for the others, by default the limit of ``open()``; 0 to stop
                at once.

        Raises:
            CommTimeoutError: If not all ranks closed it in time; names those that did not.
        """
        self.ranks.close(timeout)

    @property
    def needs_threads(self) -> str:
        """The reason why worker processes cannot read the graph; empty if they can."""
        if self.owners.all_direct:
            return ""
        return f"{self.ranks.path} has parts on other ranks, which only this process can reach"

    def supply_topology(self, options: TopologyOptions) -> Topology | None:
        """See :class:`~pyg_scale.graph.base.SuppliesTopology`."""
        return self.__dict__["_over"].topology(self, options)

    def supply_features(self) -> FeatureStore | None:
        """See :class:`~pyg_scale.graph.base.SuppliesFeatures`."""
        return self.__dict__["_over"].features(self)

    def rank_features(self, **options: Any) -> RankFeatures:
        """Features of the graph as it was opened, for the ``feature_store=`` of a loader.

        Args:
            options: Options of :class:`~pyg_scale.distributed.features.store.RankFeatures`: the
                cache, the store of local rows, the number of batches in flight.
        """
        return self.__dict__["_over"].supplied.make(**options)


class RankData(_OverRanks, DirectoryData):
    """A ``Data`` that :func:`pyg_scale.open` makes on several ranks."""


class RankHeteroData(_OverRanks, DirectoryHeteroData):
    """A ``HeteroData`` that :func:`pyg_scale.open` makes on several ranks."""


def graph_of(directory: GraphDirectory, ranks: Ranks, **options: Any) -> RankData | RankHeteroData:
    """The graph of a directory that several ranks have opened.

    Args:
        directory: The directory.
        ranks: The ranks that have it open.
        options: Options of :class:`~pyg_scale.distributed.features.store.RankFeatures`.
    """
    read = Columns(ranks)
    out: RankData | RankHeteroData
    if directory.meta.is_hetero:
        out = fill_hetero(directory, RankHeteroData(), read)
    else:
        out = fill_homogeneous(directory, RankData(), read)
    supplied = SuppliedFeatures(directory, ranks, **options)
    out.__dict__["_over"] = _Over(directory, ranks, read, supplied)
    return out


class _Over:
    """State that all copies of a graph share."""

    def __init__(
        self,
        directory: GraphDirectory,
        ranks: Ranks,
        columns: Columns,
        supplied: SuppliedFeatures,
    ) -> None:
        self.directory, self.ranks, self._columns = directory, ranks, columns
        self.supplied = supplied
        self._topologies: weakref.WeakValueDictionary[TopologyOptions, Topology] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    @property
    def _is_whole(self) -> bool:
        """True if the graph is one part, which this rank maps like a single process."""
        return self.directory.meta.num_parts == 1 and self.ranks.owners.all_direct

    def topology(self, data: Any, options: TopologyOptions) -> Topology | None:
        if self._is_whole or _has_other_edges(data):
            return None
        _check_unchanged(data, self.directory, options)
        if options.is_sorted:
            raise ValueError(
                f"is_sorted=True: the parts of {self.directory.path} are already sorted, so leave "
                "it out"
            )
        with self._lock:
            found = self._topologies.get(options)
            if found is None:
                found = self._topologies[options] = parts_topology(
                    self.directory,
                    direction=options.direction,
                    time_attr=options.time_attr,
                    weight_attr=options.weight_attr,
                    make_router=None
                    if self.ranks.owners.all_direct
                    else lambda local: RankRouter(self.ranks, local, self._columns, options),
                )
            return found

    def features(self, data: Any) -> FeatureStore | None:
        if self._is_whole:
            return None
        stored = stored_attributes(data, self.directory, _is_stored)
        return self.supplied.of(stored) if stored else None

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def _has_other_edges(data: Any) -> bool:
    """Return True if all edges were replaced: they are then in memory, as in any other graph."""
    stores = data.edge_stores
    return bool(stores) and not any(_is_stored(store, EDGE_INDEX) for store in stores)


def _is_stored(store: BaseStorage, name: str) -> bool:
    mapping = store._mapping
    entry = mapping.entry(name) if isinstance(mapping, LazyMapping) else None
    return entry is not None and entry.intact


def _check_unchanged(data: Any, directory: GraphDirectory, options: TopologyOptions) -> None:
    """Refuse a graph that differs from the one that other ranks know."""
    meta = directory.meta
    advice = "ranks sample the graph as it was opened; change it before partitioning it"
    if meta.is_hetero:
        listed = [node_type for node_type, node in meta.nodes.items() if node.listed]
        if data.metadata() != (listed, list(meta.edges)):
            raise ValueError(f"node or edge types of {directory.path} were changed: {advice}")
    for store in data.edge_stores:
        if not _is_stored(store, EDGE_INDEX):
            raise ValueError(f"edges of {directory.path} were changed: {advice}")
    for store in data.node_stores:
        size = meta.nodes[store._key].num_nodes
        if store.num_nodes != size:
            raise ValueError(
                f"num_nodes of {directory.path} was changed from {size} to {store.num_nodes}: "
                f"{advice}"
            )
    stores = {id(store): store for store in [*data.node_stores, *data.edge_stores]}
    for argument, name in (("time_attr", options.time_attr), ("weight_attr", options.weight_attr)):
        for store in stores.values():
            if name is not None and name in store and not _is_stored(store, name):
                raise ValueError(
                    f"{argument}={name!r} of {directory.path} was changed on this rank: {advice}"
                )
