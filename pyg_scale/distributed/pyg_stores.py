"""``LocalGraphStore`` and ``LocalFeatureStore``: what a process has of a graph, as PyG's stores.

Made of tensors they hold these, and can be written to. ``from_partition`` gives those of one part
of a graph directory, see :mod:`pyg_scale.distributed.pyg_part_stores`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore, TensorAttr

from pyg_scale.store.base import EdgeType, NodeType

_UNSET: Any = TensorAttr().group_name
OF_EDGES = (None, None)
"""What PyG calls the group of the edges of a graph without types."""


class LocalGraphStore(GraphStore):
    """The edges of one part, those that lead to its nodes, with original ids.

    As ``torch_geometric.distributed.LocalGraphStore``. Loaders of several ranks need
    :attr:`node_pb`, :attr:`num_partitions` and :attr:`partition_idx`, which :meth:`from_partition`
    sets and whoever uses :meth:`from_data` sets by hand.

    Attributes:
        num_partitions: Number of parts of the graph.
        partition_idx: The number of this part.
        node_pb: The part ``[num_nodes]`` of every node of the graph; by node type if there are
            types. ``None``: all are here.
        edge_pb: The part ``[num_edges]`` of every edge; by edge type if there are types. Only
            :meth:`get_partition_ids_from_eids` needs it.
        meta: The words of PyG's ``META.json``, of which only ``is_hetero`` is needed.
        is_sorted: Whether edges are sorted by destination.
        opened: The graphs that loaders opened with other ranks, by the address where they met.
    """

    num_partitions: int = 1
    partition_idx: int = 0
    node_pb: Any = None
    edge_pb: Any = None
    meta: Any = None
    is_sorted: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.opened: dict[tuple[str, int], Any] = {}
        self._edge_index: dict[tuple[EdgeType, str], Any] = {}
        self._edge_attr: dict[tuple[EdgeType, str], EdgeAttr] = {}
        self._edge_id: dict[tuple[EdgeType, str], Tensor] = {}

    @classmethod
    def from_data(
        cls, edge_id: Tensor, edge_index: Tensor, num_nodes: int, is_sorted: bool = False
    ) -> LocalGraphStore:
        """A store of edges in memory.

        Args:
            edge_id: The original id ``int64`` ``[num_edges]`` of every edge.
            edge_index: ``int64`` ``[2, num_edges]``, with original node ids.
            num_nodes: How many nodes the graph has, in all parts.
            is_sorted: Whether edges are sorted by destination; else they are sorted here.

        Raises:
            ValueError: If there are not as many ids as edges.
        """
        out = cls()
        out.meta = {"is_hetero": False}
        out._add(None, edge_index, edge_id, (num_nodes, num_nodes), is_sorted)
        return out

    @classmethod
    def from_hetero_data(
        cls,
        edge_id_dict: Mapping[tuple[str, str, str], Tensor],
        edge_index_dict: Mapping[tuple[str, str, str], Tensor],
        num_nodes_dict: Mapping[str, int],
        is_sorted: bool = False,
    ) -> LocalGraphStore:
        """A store of edges with types in memory; see :meth:`from_data`.

        Args:
            edge_id_dict: Original ids of edges, by edge type.
            edge_index_dict: Edges, by edge type.
            num_nodes_dict: Nodes of each type, in all parts.
            is_sorted: Whether edges of all types are sorted by destination.

        Raises:
            ValueError: If there are not as many ids as edges.
            KeyError: If a type of edges has no ids, or a type of nodes no number.
        """
        out = cls()
        out.meta = {"is_hetero": True}
        for edge_type, edge_index in edge_index_dict.items():
            size = (num_nodes_dict[edge_type[0]], num_nodes_dict[edge_type[2]])
            out._add(edge_type, edge_index, edge_id_dict[edge_type], size, is_sorted)
        return out

    @classmethod
    def from_partition(cls, root: str | PathLike[str], pid: int) -> LocalGraphStore:
        """One part of a graph directory; nothing is read before it is asked for.

        Args:
            root: The directory.
            pid: The number of the part.

        Raises:
            GraphDirectoryError: If it is no graph directory, or the part is not on this machine.
            IndexError: If there is no such part.
        """
        from pyg_scale.distributed.pyg_part_stores import PartGraphStore

        return PartGraphStore(root, pid)

    def _add(
        self,
        edge_type: EdgeType,
        edge_index: Tensor,
        edge_id: Tensor,
        size: tuple[int, int],
        is_sorted: bool,
    ) -> None:
        if edge_id.dim() != 1 or tuple(edge_index.shape) != (2, edge_id.numel()):
            of = "" if edge_type is None else f" of {edge_type}"
            raise ValueError(
                f"edge_id{of} must be [num_edges] and edge_index [2, num_edges] (got "
                f"{list(edge_id.shape)} and {list(edge_index.shape)})"
            )
        if not is_sorted:
            order = edge_index[1].argsort(stable=True)
            edge_index, edge_id = edge_index[:, order], edge_id[order]
        attr = {"edge_type": edge_type, "layout": "coo", "size": size, "is_sorted": True}
        self.put_edge_index(edge_index, **attr)
        self.put_edge_id(edge_id, **attr)

    @property
    def is_hetero(self) -> bool:
        """Whether the graph has types."""
        if self.meta is not None and "is_hetero" in self.meta:
            return bool(self.meta["is_hetero"])
        return any(attr.edge_type is not None for attr in self.get_all_edge_attrs())

    @staticmethod
    def key(attr: EdgeAttr) -> tuple[EdgeType, str]:
        """Under which edges are kept."""
        return attr.edge_type, attr.layout.value

    def get_partition_ids_from_nids(self, ids: Tensor, node_type: NodeType = None) -> Tensor:
        """The parts ``[n]`` of nodes ``[n]``.

        Raises:
            KeyError: If there is no such node type.
            ValueError: If :attr:`node_pb` was not set.
        """
        return _looked_up("node_pb", self.node_pb, node_type, ids)

    def get_partition_ids_from_eids(self, eids: Tensor, edge_type: EdgeType = None) -> Tensor:
        """The parts ``[n]`` of edges ``[n]``.

        Raises:
            KeyError: If there is no such edge type.
            ValueError: If :attr:`edge_pb` was not set.
        """
        return _looked_up("edge_pb", self.edge_pb, edge_type, eids)

    def put_edge_id(self, edge_id: Tensor, *args: Any, **kwargs: Any) -> bool:
        """Keep the original ids ``int64`` ``[num_edges]`` of edges, in the order of these."""
        attr: Any = self._edge_attr_cls.cast(*args, **kwargs)
        self._edge_id[self.key(attr)] = edge_id
        return True

    def get_edge_id(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The original ids ``int64`` ``[num_edges]`` of edges; ``None`` if there are none."""
        attr: Any = self._edge_attr_cls.cast(*args, **kwargs)
        return self._edge_id.get(self.key(attr))

    def remove_edge_id(self, *args: Any, **kwargs: Any) -> bool:
        """Drop the ids of edges; whether there were any."""
        attr: Any = self._edge_attr_cls.cast(*args, **kwargs)
        return self._edge_id.pop(self.key(attr), None) is not None

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """The edges that there are."""
        return [self._edge_attr[key] for key in self._edge_index]

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        self._edge_index[self.key(edge_attr)] = edge_index
        self._edge_attr[self.key(edge_attr)] = edge_attr
        return True

    def _get_edge_index(self, edge_attr: EdgeAttr) -> Any:
        return self._edge_index.get(self.key(edge_attr))

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        self._edge_attr.pop(self.key(edge_attr), None)
        return self._edge_index.pop(self.key(edge_attr), None) is not None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.partition_idx} of {self.num_partitions}, in memory)"


@dataclass
class LocalTensorAttr(TensorAttr):
    """As PyG's: an attribute whose ``index`` need not be given."""

    def __init__(self, group_name: Any = _UNSET, attr_name: Any = _UNSET, index: Any = None):
        super().__init__(group_name, attr_name, index)


class LocalFeatureStore(FeatureStore):
    """The features of the nodes and edges of one part.

    As ``torch_geometric.distributed.LocalFeatureStore``. A group is a node type (``None`` in a
    graph without types) or an edge type (there ``(None, None)``). Row ``i`` belongs to the node or
    edge ``get_global_id(group)[i]``; rows of nodes that other parts own are not used. Loaders fetch
    rows of other parts by themselves.

    Attributes:
        num_partitions: Number of parts of the graph.
        partition_idx: The number of this part.
        node_feat_pb: As ``node_pb`` of :class:`LocalGraphStore`, whose own is what counts.
        edge_feat_pb: As ``edge_pb`` there.
        meta: As there.
        labels_are_used: Whether a loader has the labels already.
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
        """A store of features in memory.

        Args:
            node_id: The original id ``int64`` ``[n]`` of every node that has rows here.
            x: Features ``[n, channels]``.
            y: Labels ``[n, ...]``.
            edge_id: The original id ``int64`` ``[e]`` of every edge that has rows here.
            edge_attr: Their features ``[e, ...]``.

        Raises:
            ValueError: If there is ``edge_attr`` without ``edge_id``, or rows are not as many as
                ids.
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
        """A store of features with types in memory; see :meth:`from_data`.

        Args:
            node_id_dict: Original ids of nodes, by node type.
            x_dict: Features, by node type.
            y_dict: Labels, by node type.
            edge_id_dict: Original ids of edges, by edge type.
            edge_attr_dict: Features, by edge type.

        Raises:
            ValueError: If a type has rows without ids, or rows are not as many as ids.
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
        """One part of a graph directory; see :meth:`LocalGraphStore.from_partition`.

        Raises:
            GraphDirectoryError: As there.
            IndexError: As there.
        """
        from pyg_scale.distributed.pyg_part_stores import PartFeatureStore

        return PartFeatureStore(root, pid)

    def _add(self, group: Any, ids: Tensor | None, rows: Mapping[str, Tensor | None]) -> None:
        if ids is not None:
            self.put_global_id(ids, group_name=group)
        for name, value in rows.items():
            if value is None:
                continue
            if ids is None:
                which = "edge_id" if isinstance(group, tuple) else "node_id"
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
        attribute ``y``, if there is one. To be set before a loader is made.
        """
        return self._labels

    @labels.setter
    def labels(self, value: Any) -> None:
        if self.labels_are_used:
            raise RuntimeError("labels were set after a loader was made: set them before")
        self._labels = value

    @staticmethod
    def key(attr: TensorAttr) -> tuple[Any, Any]:
        """Under which a tensor is kept."""
        return attr.group_name, attr.attr_name

    def put_global_id(self, global_id: Tensor, group_name: Any) -> bool:
        """Say which nodes or edges the rows of a group belong to: ids ``int64`` ``[n]``."""
        self._global_id[group_name] = global_id
        return True

    def get_global_id(self, group_name: Any) -> Tensor | None:
        """The original ids ``int64`` ``[n]`` of the rows of a group; ``None`` if there is none."""
        return self._global_id.get(group_name)

    def remove_global_id(self, group_name: Any) -> bool:
        """Drop the ids of a group; whether there were any."""
        return self._global_id.pop(group_name, None) is not None

    def get_tensor_from_global_id(self, *args: Any, **kwargs: Any) -> Any:
        """Rows of an attribute by original ids, in ``index`` ``[n]``.

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
        """Whether edges have an ``edge_attr``."""
        return any(attr.attr_name == "edge_attr" for attr in self.get_all_tensor_attrs())

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """The attributes that there are."""
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.partition_idx} of {self.num_partitions}, in memory)"


def places_of(ids: Tensor, wanted: Tensor) -> tuple[Tensor, int | None]:
    """Where ids stand among others.

    Args:
        ids: ``[n]``, in any order, each once.
        wanted: ``[m]``.

    Returns:
        Positions in ``ids`` ``int64`` ``[m]``, and the first that is not there, if any.
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


def _looked_up(name: str, book: Any, kind: Any, ids: Tensor) -> Tensor:
    if book is None:
        raise ValueError(f"{name} was not set: a store made of tensors does not know other parts")
    found = book[kind] if isinstance(book, Mapping) else book
    parts: Tensor = found[ids]
    return parts
