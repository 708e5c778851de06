"""The feature store from which a loader reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, HeteroData

from pyg_scale import plugins
from pyg_scale.graph.base import SuppliesFeatures, needs_threads
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.loader.batch.features import HOMOGENEOUS_EDGES, Features
from pyg_scale.loader.seeds.nodes import num_nodes_of
from pyg_scale.ops import memory
from pyg_scale.sampler.base import graph_of
from pyg_scale.store.base import AcceptsSome, BuildsFromData
from pyg_scale.store.directory.data import RecordedAttributes
from pyg_scale.store.mmap import Mmap


def features_of(
    data: Any, feature_store: Any, sampler: Any, only: Collection[str] | None = None
) -> Features | None:
    """The features that a batch takes from a store; ``None`` if all are attributes of ``data``.

    Large ones that are attributes move to huge pages, where they are.

    Args:
        data: ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``.
        feature_store: A name, a store, or ``None``: that of ``data`` if it is a pair of stores.
        sampler: The sampler, which may know the numbers of nodes and edges.
        only: The names of the features to read from the store; ``None``: all.

    Raises:
        TypeError: If it is no feature store.
        ValueError: If a feature does not fit the graph.
    """
    rows_in_huge_pages(data)
    if isinstance(feature_store, str):
        if needs_threads(data):
            raise ValueError(
                f"feature_store={feature_store!r} takes all features from data, some of which are "
                "on other ranks: leave it out, or pass data.rank_features(cache=..., local=...)"
            )
        made = plugins.get("feature_store", feature_store)
        if not (isinstance(made, type) and issubclass(made, FeatureStore)):
            raise TypeError(
                f"feature_store={feature_store!r} must stand for a subclass of FeatureStore (it is "
                f"{made!r}, a fault of the plugin)"
            )
        kind: Any = made
        feature_store = (
            kind.for_data(data) if isinstance(kind, BuildsFromData) else filled(kind(), data)
        )
    elif feature_store is None:
        if isinstance(data, SuppliesFeatures):
            feature_store = data.supply_features()
        elif not isinstance(data, Data | HeteroData):
            feature_store = data[0]
        if feature_store is None:
            return None
    elif isinstance(feature_store, FeatureStore) and not feature_store.get_all_tensor_attrs():
        raise ValueError(
            f"feature_store={feature_store!r} holds no features: put some into it, check its path, "
            "or leave it out"
        )
    if not isinstance(feature_store, FeatureStore):
        raise TypeError(
            f"feature_store must be a name or a FeatureStore (got {type(feature_store).__name__})"
        )
    if isinstance(feature_store, Mmap) and not feature_store.path.exists():
        raise ValueError(f"{feature_store!r}: there is nothing at {feature_store.path}")
    num_nodes, num_edges = sizes_of(data, sampler)
    return Features(feature_store, num_nodes, num_edges, only)


def filled(store: FeatureStore, data: Any) -> FeatureStore:
    """A store with every feature of nodes and edges that ``data`` has.

    A store that has ``accepts(value) -> bool`` gets what it accepts; the rest stays in ``data``.

    Raises:
        RuntimeError: If ``put_tensor`` says that it has not taken a feature.
        ValueError: If ``data`` is a pair of stores, which has a feature store already.
    """
    if isinstance(data, Data):
        _put(store, data._store, None, HOMOGENEOUS_EDGES)
        return store
    if isinstance(data, HeteroData):
        for node_type in data.node_types:
            _put(store, data[node_type], node_type, None)
        for edge_type in data.edge_types:
            _put(store, data[edge_type], None, edge_type)
        return store
    raise ValueError(
        "feature_store= by name is filled from data, but data is a pair of stores and has one: "
        "pass a FeatureStore, or leave it out"
    )


def _put(store: FeatureStore, attributes: Any, node_group: Any, edge_group: Any) -> None:
    for name in list(attributes.keys()):
        if name in ("edge_index", "adj_t"):
            continue
        value = attributes[name]
        if not isinstance(value, Tensor | np.ndarray):
            continue
        of_edges = edge_group is not None and attributes.is_edge_attr(name)
        if of_edges or (hasattr(attributes, "is_node_attr") and attributes.is_node_attr(name)):
            if isinstance(store, AcceptsSome) and not store.accepts(value):
                continue
            group = edge_group if of_edges else node_group
            if not store.put_tensor(value, group_name=group, attr_name=name, index=None):
                raise RuntimeError(
                    f"{type(store).__name__}.put_tensor did not take {name!r} of group {group!r} "
                    f"(it returned no True): what it does not take it must refuse in accepts(value)"
                )


def rows_in_huge_pages(data: Any) -> None:
    """Move large features of nodes and edges in memory to huge pages, where they are."""
    for store in data.stores if isinstance(data, Data | HeteroData) else ():
        for name in store.keys():  # noqa: SIM118
            if isinstance(store, RecordedAttributes) and store.is_waiting(name):
                continue  # in a file
            value = store[name]
            if name in ("edge_index", "adj_t") or not _is_dense(value):
                continue
            if value.nbytes >= memory.MANY_PAGES:
                memory.in_huge_pages(value)


def sizes_of(data: Any, sampler: Any) -> tuple[dict[NodeType, int], dict[EdgeType, int]]:
    """The nodes of each type, and the edges of each, as far as known.

    Args:
        data: ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``.
        sampler: The sampler, which may know them.
    """
    topology = graph_of(sampler)
    if topology is not None:
        return dict(topology.num_nodes), {t: csc.num_edges for t, csc in topology.csc.items()}
    if isinstance(data, Data):
        return {None: num_nodes_of(data, None)}, {None: data.num_edges}
    if isinstance(data, HeteroData):
        nodes: dict[NodeType, int] = {t: num_nodes_of(data, t) for t in data.node_types}
        return nodes, {t: data[t].num_edges for t in data.edge_types}
    types = {t for attr in data[1].get_all_edge_attrs() for t in _ends(attr.edge_type)}
    return {t: num_nodes_of(data, t) for t in sorted(types, key=str)}, {}


def _ends(edge_type: EdgeType) -> tuple[NodeType, NodeType]:
    return (None, None) if edge_type is None else (edge_type[0], edge_type[2])


class RowCounts:
    """Number of edges of a graph, and of rows of each attribute, when a loader is made.

    Args:
        data: The graph. Of two stores nothing is noted.
    """

    def __init__(self, data: Any) -> None:
        self._before = _rows(data) if isinstance(data, Data | HeteroData) else {}

    def check(self, data: Any) -> None:
        """Refuse a graph in which one of these numbers is another now.

        Raises:
            ValueError: If so; names it.
        """
        if not self._before:
            return
        now = _rows(data)
        for name, count in self._before.items():
            if now.get(name, count) != count:
                raise ValueError(
                    f"{name} of the graph had {count} rows when this loader was made, and has "
                    f"{now[name]} now: the loader goes on to sample the edges that it was made "
                    "with, which these no longer fit; make a new loader"
                )


def _rows(data: Any) -> dict[str, int]:
    found = {}
    for store in data.stores:
        kind = "" if store._key is None else f"[{store._key!r}]"
        for name in store.keys():  # noqa: SIM118
            if isinstance(store, RecordedAttributes) and store.is_waiting(name):
                continue  # in a file, and nobody has put anything else in its place
            value = store[name]
            if name in ("edge_index", "adj_t"):
                found[f"data{kind}.edge_index"] = store.num_edges
            elif _is_dense(value) and value.dim():
                found[f"data{kind}.{name}"] = value.size(data.__cat_dim__(name, value, store))
    return found


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided
