"""Features of nodes and edges that a batch takes from a feature store."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.loader.stats import Stats
from pyg_scale.ops.lazy_rows import LazyRows
from pyg_scale.store.base import look_ahead_of
from pyg_scale.store.lending import lend, lends_features
from pyg_scale.store.reading import count_lent, take_reads
from pyg_scale.store.rows import Key, key_of

HOMOGENEOUS_EDGES = (None, None)
"""The group of edge features in a feature store of a homogeneous graph, as in
``torch_geometric.distributed``; node features are in the group ``None``. In a heterogeneous
graph a group is a node type or an edge type."""


Group = Any
"""A node type or an edge type; ``None`` in a homogeneous graph."""


class Feature(NamedTuple):
    """One feature of the nodes or edges of a batch, as it was read."""

    of_edges: bool
    type: Group
    name: str
    value: Tensor


class Features:
    """Reads the features of a batch, all in one request, as PyG's loaders do.

    A group that is a tuple holds edge features. In a homogeneous graph so does any group whose
    rows are as many as the edges and not as many as the nodes. Rows of nodes that the graph does
    not have are never asked for, as with PyG's loaders.

    Args:
        store: Any PyG feature store.
        num_nodes: Nodes of each type.
        num_edges: Edges of each type, as far as known.
        only: The names of the features to read; ``None``: all.

    Raises:
        ValueError: If a feature has neither a row for every node nor one per edge.
    """

    def __init__(
        self,
        store: FeatureStore,
        num_nodes: Mapping[NodeType, int],
        num_edges: Mapping[EdgeType, int],
        only: Collection[str] | None = None,
    ) -> None:
        self.store = store
        self._only = None if only is None else frozenset(only)
        self._num_nodes = dict(num_nodes)
        self._num_edges = dict(num_edges)
        self._of_edges: dict[tuple[Any, str], bool] = {}
        self._lent: dict[Key, bool] = {}
        for attr in self._attrs():
            self._is_of_edges(attr)

    def names(self, of_edges: bool, group: Group) -> set[str]:
        """The features that the store has of a node type or an edge type."""
        return {
            attr.attr_name
            for attr in self._attrs()
            if self._is_of_edges(attr) == of_edges and self._group(attr, of_edges) == group
        }

    def read(
        self,
        node: Mapping[NodeType, Tensor],
        edge: Mapping[EdgeType, Tensor | None],
        stats: Stats,
        lazy_x: bool = False,
    ) -> Iterator[Feature]:
        """The features of nodes and edges given by their original ids.

        Edges without ids (both directions in a heterogeneous graph) have no features.

        Args:
            node: Ids of nodes, by type.
            edge: Ids of edges, by type.
            stats: Counts the rows and bytes that were read.
            lazy_x: Whether ``x`` of nodes stays in the store, if that lends its rows.

        Raises:
            ValueError: If the store returns another number of rows than was asked for.
        """
        wanted = self.wanted(node, edge)
        take_reads()
        if lazy_x:
            lazy = [self._lazy(*each, stats) for each in wanted]
            stats.count_reads(take_reads())
            yield from (each for each in lazy if each is not None)
            wanted = [each for each, found in zip(wanted, lazy, strict=True) if found is None]
        if not wanted:
            return
        values = self.store.multi_get_tensor([attr for attr, _, _ in wanted])
        stats.count_reads(take_reads())
        for (attr, of_edges, group), value in zip(wanted, values, strict=True):
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value)
            if value.size(0) != attr.index.numel():
                raise ValueError(
                    f"{self.store} returned {value.size(0)} rows of {attr.attr_name!r} of group "
                    f"{attr.group_name!r} when asked for {attr.index.numel()}"
                )
            stats.count("fetch", rows=value.size(0), num_bytes=value.numel() * value.element_size())
            yield Feature(of_edges, group, attr.attr_name, value)

    def _lazy(self, attr: TensorAttr, of_edges: bool, group: Group, stats: Stats) -> Feature | None:
        """``x`` of nodes where it is; ``None`` for other features."""
        if of_edges or attr.attr_name != "x" or not self._lends(attr):
            return None
        lent = lend(self.store, attr)
        if lent is None or not LazyRows.takes(lent.table):  # it was replaced
            return None
        count, copied = lent.places.numel(), lent.num_copied
        stats.count("fetch", rows=count, num_bytes=copied * lent.row_bytes)
        count_lent(count - copied, (count - copied) * lent.row_bytes)
        return Feature(False, group, "x", LazyRows(*lent))

    def _lends(self, attr: TensorAttr) -> bool:
        key = key_of(attr)
        if key not in self._lent:
            self._lent[key] = lends_features(self.store, attr)
        return self._lent[key]

    def check_lazy(self) -> None:
        """Refuse ``lazy_x=True`` if the store has ``x`` of nodes, and none that it can lend.

        Raises:
            ValueError: Says so.
        """
        given = [a for a in self._attrs() if a.attr_name == "x" and not self._is_of_edges(a)]
        if given and not any(map(self._lends, given)):
            raise ValueError(
                f"lazy_x=True: x of {self.store} cannot be read where it is. That takes a matrix "
                "of floating point numbers in memory, in a mapped file or in a cache "
                "(pyg_scale.store.Cached): use one, or leave lazy_x out"
            )

    def wanted(
        self, node: Mapping[NodeType, Tensor], edge: Mapping[EdgeType, Tensor | None]
    ) -> list[tuple[TensorAttr, bool, Group]]:
        """The requests of :meth:`read`; for each, True if it is of edges, and its type."""
        wanted, wide = [], dict[tuple[bool, Group], Tensor]()
        for attr in self._attrs():
            of_edges = self._is_of_edges(attr)
            group = self._group(attr, of_edges)
            index = (edge if of_edges else node).get(group)
            if index is not None:
                # The same for all features of a type, which stores read together then.
                if (of_edges, group) not in wide:
                    wide[of_edges, group] = index.to(torch.int64)
                attr.index = wide[of_edges, group]
                wanted.append((attr, of_edges, group))
        return wanted

    @property
    def look_ahead(self) -> int:
        """Number of batches to announce to the store before they are read."""
        return look_ahead_of(self.store)

    def _attrs(self) -> list[TensorAttr]:
        """Asked for each time, as PyG's loaders do: a store may get new features."""
        # Copies, as an index is written into them and other threads ask at the same time.
        attrs = [
            copy.copy(attr)
            for attr in self.store.get_all_tensor_attrs()
            if self._only is None or attr.attr_name in self._only
        ]
        for attr in attrs:
            if not attr.is_set("group_name"):  # Data says no more than the name
                attr.group_name = None
        return attrs

    @property
    def _is_hetero(self) -> bool:
        return None not in self._num_nodes

    def _group(self, attr: TensorAttr, of_edges: bool) -> Group:
        if not self._is_hetero:
            return None
        return tuple(attr.group_name) if of_edges else attr.group_name

    def _is_of_edges(self, attr: TensorAttr) -> bool:
        known = (attr.group_name, attr.attr_name)
        if known not in self._of_edges:
            self._of_edges[known] = self._classify(attr)
        return self._of_edges[known]

    def _classify(self, attr: TensorAttr) -> bool:
        if isinstance(attr.group_name, tuple):
            self._check_rows(attr, self._num_edges.get(self._group(attr, True)), "edges")
            return True
        if self._is_hetero:
            self._check_rows(attr, self._num_nodes.get(attr.group_name), "nodes", more=True)
            return False
        num_nodes, num_edges = self._num_nodes[None], self._num_edges.get(None)
        rows = self._rows(attr)
        if rows is None or rows == num_nodes:
            return False
        if rows == num_edges:
            return True
        if rows > num_nodes:
            return False
        raise ValueError(
            f"feature {attr.attr_name!r} of group {attr.group_name!r} has {rows} rows, but the "
            f"graph has {num_nodes} nodes and {num_edges} edges"
        )

    def _check_rows(
        self, attr: TensorAttr, expected: int | None, of: str, more: bool = False
    ) -> None:
        rows = self._rows(attr)
        if expected is None or rows is None or rows == expected:
            return
        if not (more and rows > expected):
            raise ValueError(
                f"feature {attr.attr_name!r} of group {attr.group_name!r} has {rows} rows, but the "
                f"graph has {expected} such {of}"
            )

    def _rows(self, attr: TensorAttr) -> int | None:
        attr.index = None
        size = self.store.get_tensor_size(attr)
        return None if size is None else int(size[0])
