"""``LocalGraphStore`` and ``LocalFeatureStore``: one part of a graph directory, as PyG's stores."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore, TensorAttr

from pyg_scale.distributed.pyg_part import READ_ONLY, PartInfo
from pyg_scale.store.base import EdgeType, NodeType

_UNSET: Any = TensorAttr().group_name


class LocalGraphStore(PartInfo, GraphStore):
    """The edges of one part, those that lead to its nodes, with original ids.

    As ``torch_geometric.distributed.LocalGraphStore``; made by :meth:`from_partition`. Edges are
    sorted by destination; ``"coo"`` is the layout that there is.
    """

    def __init__(self, root: str | PathLike[str], pid: int) -> None:
        super().__init__(root, pid)
        self.is_sorted = True
        self.opened: dict[tuple[str, int], Any] = {}
        """The graphs that loaders opened with other ranks, by the address where they met."""

    def get_edge_id(self, edge_type: EdgeType = None, layout: Any = "coo", **_: Any) -> Tensor:
        """The original ids ``int64`` ``[edges of the part]``, in the order of the edge index.

        Raises:
            KeyError: If there is no such edge type or layout.
        """
        attr = EdgeAttr(edge_type, layout)
        if attr.edge_type not in self.directory.meta.edges or attr.layout.value != "coo":
            raise KeyError(f"{self!r} has no edges {edge_type} in layout {attr.layout.value!r}")
        csc = self.part.csc(attr.edge_type)
        if csc.edge_id is None:
            return torch.arange(csc.indices.numel())
        return csc.edge_id.to(torch.int64)

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """The edges that there are."""
        return [self._attr(edge_type) for edge_type in self.directory.meta.edges]

    def _attr(self, edge_type: EdgeType) -> EdgeAttr:
        source, destination = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
        nodes = self.directory.meta.nodes
        size = (nodes[source].num_nodes, nodes[destination].num_nodes)
        return EdgeAttr(edge_type, "coo", is_sorted=True, size=size)

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        edge_type, meta = edge_attr.edge_type, self.directory.meta
        if edge_type not in meta.edges or edge_attr.layout.value != "coo":
            return None
        csc = self.part.csc(edge_type)
        grouped = self.part.orig_id(meta.grouped_by(edge_type))
        own = grouped.repeat_interleave(csc.indptr.diff())
        other = csc.indices.to(torch.int64)
        by_src = meta.partition is not None and meta.partition.edge_assign_strategy == "by_src"
        return (own, other) if by_src else (other, own)

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        raise NotImplementedError(f"put_edge_index: {READ_ONLY}")

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        raise NotImplementedError(f"remove_edge_index: {READ_ONLY}")


@dataclass
class LocalTensorAttr(TensorAttr):
    """As PyG's: an attribute whose ``index`` need not be given."""

    def __init__(self, group_name: Any = _UNSET, attr_name: Any = _UNSET, index: Any = None):
        super().__init__(group_name, attr_name, index)


class LocalFeatureStore(PartInfo, FeatureStore):
    """The features of the nodes and edges of one part.

    As ``torch_geometric.distributed.LocalFeatureStore``; made by :meth:`from_partition`. A group is
    a node type (``None`` in a graph without types) or an edge type (there ``(None, None)``). Row
    ``i`` belongs to the node or edge ``get_global_id(group)[i]``. Loaders fetch rows of other parts
    by themselves.
    """

    def __init__(self, root: str | PathLike[str], pid: int) -> None:
        self._labels: Any = None
        self.labels_are_used = False
        """Whether a loader has them already."""
        PartInfo.__init__(self, root, pid)
        self.__dict__["_tensor_attr_cls"] = LocalTensorAttr

    @property
    def labels(self) -> Any:
        """Labels ``[num_nodes, ...]`` of all nodes of the graph: ``y`` of batches.

        With types a dictionary by node type, or a tensor for the type of the seeds. ``None``: the
        directory's ``y``, if it has one. To be set before a loader is made.
        """
        return self._labels

    @labels.setter
    def labels(self, value: Any) -> None:
        if self.labels_are_used:
            raise RuntimeError("labels were set after a loader was made: set them before")
        self._labels = value

    @property
    def node_feat_pb(self) -> Any:
        """PyG's name of :attr:`node_pb` here."""
        return self.node_pb

    @property
    def edge_feat_pb(self) -> Any:
        """PyG's name of :attr:`edge_pb` here."""
        return self.edge_pb

    def get_global_id(self, group_name: Any) -> Tensor | None:
        """The original ids ``int64`` ``[n]`` of the rows of a group; ``None`` if there is none."""
        of_edges, name = _group(group_name)
        if not of_edges:
            return self.part.orig_id(name) if name in self.directory.meta.nodes else None
        if name not in self.directory.meta.edges:
            return None
        ids = self.part.edge_ids(name)
        return torch.arange(self.part.num_edges(name)) if ids is None else ids.to(torch.int64)

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
        place = torch.searchsorted(ids, wanted).clamp_(max=max(ids.numel() - 1, 0))
        here = ids[place] == wanted if ids.numel() else torch.zeros_like(wanted, dtype=torch.bool)
        if not bool(here.all()):
            raise IndexError(
                f"{int(wanted[~here][0])} of {attr.group_name!r} is not in part "
                f"{self.partition_idx}: loaders fetch rows of other parts"
            )
        return self.get_tensor(attr.group_name, attr.attr_name, index=place)

    def has_edge_attr(self) -> bool:
        """Whether edges have an ``edge_attr``."""
        edges = self.directory.meta.edges.values()
        return any("edge_attr" in edge.attributes for edge in edges)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """The attributes that there are."""
        meta = self.directory.meta
        found: list[TensorAttr] = [
            LocalTensorAttr(name, attribute)
            for name, node in meta.nodes.items()
            for attribute in node.attributes
        ]
        for edge_type, edge in meta.edges.items():
            group = (None, None) if edge_type is None else edge_type
            found.extend(LocalTensorAttr(group, attribute) for attribute in edge.attributes)
        return found

    def _get_tensor(self, attr: TensorAttr) -> Tensor | None:
        of_edges, name = _group(attr.group_name)
        known: Any = self.directory.meta.edges if of_edges else self.directory.meta.nodes
        if name not in known or attr.attr_name not in known[name].attributes:
            return None
        read: Any = self.part.edge_attribute if of_edges else self.part.node_attribute
        found: Tensor = read(name, attr.attr_name)
        return found if attr.index is None else found[attr.index]

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        found = self._get_tensor(attr)
        return None if found is None else tuple(found.size())

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        raise NotImplementedError(f"put_tensor: {READ_ONLY}; labels= may be set")

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise NotImplementedError(f"remove_tensor: {READ_ONLY}")


def _group(name: Any) -> tuple[bool, NodeType | EdgeType]:
    """Whether a group is of edges, and its type."""
    if isinstance(name, tuple):
        return True, None if name == (None, None) else name
    return False, name
