"""``LocalFeatureStore``: the features of a process, as PyG's store.

A store made of tensors holds these, and can be written to. ``from_partition`` returns the store of
one part of a graph directory, see :mod:`pyg_scale_migrate.pyg_distributed.part`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale_migrate.pyg_distributed.graph_store import check_integers

_UNSET: Any = TensorAttr().group_name
OF_EDGES = (None, None)
"""PyG's group name of edges in a graph without types."""


@dataclass
class LocalTensorAttr(TensorAttr):
    """An attribute with an optional ``index``, as in PyG."""

    def __init__(self, group_name: Any = _UNSET, attr_name: Any = _UNSET, index: Any = None):
        super().__init__(group_name, attr_name, index)


class LocalFeatureStore(FeatureStore):
    """The features of the nodes and edges of one part.

    It replaces ``torch_geometric.distributed.LocalFeatureStore``. A group is a node type (``None``
    in a graph without types) or an edge type (``(None, None)`` in a graph without types). Row ``i``
    belongs to the node or edge ``get_global_id(group)[i]``; rows of nodes that other parts own are
    not used. Loaders fetch rows of other parts.

    Attributes:
        num_partitions: Number of parts of the graph.
        partition_idx: The number of this part.
        node_feat_pb: As ``node_pb`` of :class:`LocalGraphStore`; only the latter is used.
        edge_feat_pb: As ``edge_pb`` of :class:`LocalGraphStore`.
        meta: As ``meta`` of :class:`LocalGraphStore`.
        labels_are_used: True if a loader already has the labels.
    """

    num_partitions: int = 1
    partition_idx: int = 0
    node_feat_pb: Any = None
    edge_feat_pb: Any = None
    meta: Any = None
    labels_are_used: bool = False

    def __init__(self) -> None:
        super().__init__(tensor_attr_cls=LocalTensorAttr)
        self._features: dict[tuple[Any, str], Tensor] = {}
        self._global_id: dict[Any, Tensor] = {}
        self._labels: Any = None

    @classmethod
    def from_data(
        cls,
        node_id: Tensor,
        x: Tensor | None = None,
        y: Tensor | None = None,
        edge_id: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> LocalFeatureStore:
        """Make a store of features in memory.

        Args:
            node_id: The original id ``int64`` ``[n]`` of every node with rows.
            x: Features ``[n, channels]``.
            y: Labels ``[n, ...]``.
            edge_id: The original id ``int64`` ``[e]`` of every edge with rows.
            edge_attr: Their features ``[e, ...]``.

        Raises:
            TypeError: If ids are no tensors of integers, or rows no tensors.
            ValueError: If there is ``edge_attr`` without ``edge_id``, or the numbers of rows and
                ids differ.
        """
        out = cls()
        out._add(None, node_id, {"x": x, "y": y})
        out._add(OF_EDGES, edge_id, {"edge_attr": edge_attr})
        return out

    @classmethod
    def from_hetero_data(
        cls,
        node_id_dict: Mapping[str, Tensor],
        x_dict: Mapping[str, Tensor] | None = None,
        y_dict: Mapping[str, Tensor] | None = None,
        edge_id_dict: Mapping[tuple[str, str, str], Tensor] | None = None,
        edge_attr_dict: Mapping[tuple[str, str, str], Tensor] | None = None,
    ) -> LocalFeatureStore:
        """Make a store of features with types in memory; see :meth:`from_data`.

        Args:
            node_id_dict: Original ids of nodes, by node type.
            x_dict: Features, by node type.
            y_dict: Labels, by node type.
            edge_id_dict: Original ids of edges, by edge type.
            edge_attr_dict: Features, by edge type.

        Raises:
            TypeError: As of :meth:`from_data`.
            ValueError: If a type has rows without ids, or the numbers of rows and ids differ.
        """
        out = cls()
        nodes: list[tuple[str, Mapping[Any, Tensor]]] = [("x", x_dict or {}), ("y", y_dict or {})]
        edges: list[tuple[str, Mapping[Any, Tensor]]] = [("edge_attr", edge_attr_dict or {})]
        for ids, values in ((node_id_dict, nodes), (edge_id_dict or {}, edges)):
            for group in dict.fromkeys([*ids, *(group for _, each in values for group in each)]):
                rows = {name: each.get(group) for name, each in values}
                out._add(group, ids.get(group), rows)
        return out

    @classmethod
    def from_partition(cls, root: str | PathLike[str], pid: int) -> LocalFeatureStore:
        """Open one part of a graph directory; see :meth:`LocalGraphStore.from_partition`.

        Raises:
            GraphDirectoryError: As there.
            TypeError: As there.
            IndexError: As there.
        """
        from pyg_scale_migrate.pyg_distributed.part import PartFeatureStore

        return PartFeatureStore(root, pid)

    def _add(self, group: Any, ids: Tensor | None, rows: Mapping[str, Tensor | None]) -> None:
        which = "edge_id" if isinstance(group, tuple) else "node_id"
        if ids is not None:
            check_integers(which if group in (None, OF_EDGES) else f"{which} of {group!r}", ids)
            self.put_global_id(ids, group_name=group)
        for name, value in rows.items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{name!r} of {group!r} must be a tensor (got {type(value).__name__})"
                )
            if ids is None:
                raise ValueError(f"{name!r} of {group!r} was given without {which}")
            if value.dim() == 0 or value.size(0) != ids.numel():
                raise ValueError(
                    f"{name!r} of {group!r} must have a row for each of {ids.numel()} ids (got "
                    f"{list(value.shape)})"
                )
            self.put_tensor(value, group_name=group, attr_name=name)

    @property
    def labels(self) -> Any:
        """Labels ``[num_nodes, ...]`` of all nodes of the graph: ``y`` of batches.

        With types a dictionary by node type, or a tensor for the type of the seeds. ``None``: the
        attribute ``y``, if there is one. Must be set before a loader is made.
        """
        return self._labels

    @labels.setter
    def labels(self, value: Any) -> None:
        if self.labels_are_used:
            raise RuntimeError("labels were set after a loader was made: set them before")
        self._labels = value

    @staticmethod
    def key(attr: TensorAttr) -> tuple[Any, Any]:
        """The key of a tensor."""
        return attr.group_name, attr.attr_name

    def put_global_id(self, global_id: Tensor, group_name: Any) -> bool:
        """Set the ids ``int64`` ``[n]`` of the nodes or edges of a group's rows."""
        self._global_id[group_name] = global_id
        return True

    def get_global_id(self, group_name: Any) -> Tensor | None:
        """The original ids ``int64`` ``[n]`` of the rows of a group; ``None`` if there is none."""
        return self._global_id.get(group_name)

    def remove_global_id(self, group_name: Any) -> bool:
        """Remove the ids of a group; return True if there were any."""
        return self._global_id.pop(group_name, None) is not None

    def get_tensor_from_global_id(self, *args: Any, **kwargs: Any) -> Any:
        """Rows of an attribute by original ids, given as ``index`` ``[n]``.

        Raises:
            KeyError: If there is no such attribute.
            IndexError: If a node or edge belongs to another part; names the first.
        """
        attr: Any = LocalTensorAttr.cast(*args, **kwargs)
        ids = self.get_global_id(attr.group_name)
        if ids is None:
            raise KeyError(f"{self!r} has no group {attr.group_name!r}")
        wanted = torch.as_tensor(attr.index, dtype=torch.int64)
        place, missing = places_of(ids, wanted)
        if missing is not None:
            raise IndexError(
                f"{missing} of {attr.group_name!r} is not in part {self.partition_idx}: loaders "
                "fetch rows of other parts"
            )
        return self.get_tensor(attr.group_name, attr.attr_name, index=place)

    def has_edge_attr(self) -> bool:
        """Return True if edges have an ``edge_attr``."""
        return any(attr.attr_name == "edge_attr" for attr in self.get_all_tensor_attrs())

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """All attributes."""
        return [LocalTensorAttr(*key) for key in self._features]

    def _get_tensor(self, attr: TensorAttr) -> Tensor | None:
        found = self._features.get(self.key(attr))
        return found if found is None or attr.index is None else found[attr.index]

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        found = self._get_tensor(attr)
        return None if found is None else tuple(found.size())

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        if attr.index is not None:
            raise NotImplementedError("put_tensor: whole tensors only, index must be None")
        self._features[self.key(attr)] = tensor
        return True

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._features.pop(self.key(attr), None) is not None

    def contents(self) -> list[tuple[Any, Any]]:
        """All tensors that loaders read, with their names."""
        return [*self._features.items(), *self._global_id.items()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.partition_idx} of {self.num_partitions}, in memory)"


def places_of(ids: Tensor, wanted: Tensor) -> tuple[Tensor, int | None]:
    """The positions of ids among others.

    Args:
        ids: Distinct ids ``[n]``, in any order.
        wanted: The ids to find, ``[m]``.

    Returns:
        Positions in ``ids`` ``int64`` ``[m]``, and the first missing id, if any.
    """
    if not ids.numel():
        return torch.zeros_like(wanted), int(wanted[0]) if wanted.numel() else None
    ordered, order = ids, None
    if not bool((ids[1:] > ids[:-1]).all()):
        ordered, order = ids.sort()
    place = torch.searchsorted(ordered, wanted).clamp_(max=ids.numel() - 1)
    absent = ordered[place] != wanted
    missing = int(wanted[absent][0]) if bool(absent.any()) else None
    return place if order is None else order[place], missing
