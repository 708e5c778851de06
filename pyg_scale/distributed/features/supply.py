"""Supplies loaders with the features of a graph that several ranks opened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch_geometric.data import FeatureStore

from pyg_scale.distributed.features.store import RankFeatures
from pyg_scale.distributed.ranks import Ranks
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.rows import Key


class SuppliedFeatures:
    """Makes feature stores for a graph and its copies; its loaders share one store and its cache.

    Args:
        directory: The directory.
        ranks: The ranks that have it open.
        options: Options of :class:`~pyg_scale.distributed.features.store.RankFeatures`.

    Raises:
        ValueError: If options contradict each other.
        TypeError: If one has a wrong type.
    """

    def __init__(self, directory: GraphDirectory, ranks: Ranks, **options: Any) -> None:
        self._directory, self._ranks, self._options = directory, ranks, options
        self._lock = threading.Lock()
        self._shared: dict[frozenset[Key], RankFeatures] = {}
        self.make(**options)

    def make(self, **options: Any) -> RankFeatures:
        """A new feature store."""
        ranks = self._ranks
        options["health"] = ranks.health
        made = RankFeatures(self._directory, ranks.service, ranks.owners, **options)
        made.keeps = ranks  # they serve until nobody needs them
        return made

    def of(self, stored: frozenset[Key]) -> FeatureStore:
        """The store that loaders share.

        Args:
            stored: Groups and names of the attributes that were not replaced since the graph was
                opened.
        """
        with self._lock:
            if stored not in self._shared:
                self._shared[stored] = self.make(
                    **self._options, attributes=sorted(stored, key=str)
                )
            return self._shared[stored]


def stored_attributes(data: Any, directory: GraphDirectory, is_stored: Callable[..., bool]) -> Any:
    """Groups and names of the attributes with a row per node or edge that nobody replaced.

    Args:
        data: The graph.
        directory: The directory from which it was opened.
        is_stored: Returns True for an attribute of a storage that was not replaced.
    """
    meta, found = directory.meta, set[Key]()
    if not meta.is_hetero:
        edge = meta.edges.get(None)
        groups: list[tuple[Any, Any]] = [(None, meta.nodes[None])]
        groups += [] if edge is None else [((None, None), edge)]
        found = {(g, n) for g, of in groups for n in of.attributes if is_stored(data._store, n)}
        return frozenset(found)
    for node in meta.nodes.values():
        if node.name in data.node_types:
            found |= {(node.name, n) for n in node.attributes if is_stored(data[node.name], n)}
    for edge in meta.edges.values():
        if edge.name in data.edge_types:
            found |= {(edge.name, n) for n in edge.attributes if is_stored(data[edge.name], n)}
    return frozenset(found)
