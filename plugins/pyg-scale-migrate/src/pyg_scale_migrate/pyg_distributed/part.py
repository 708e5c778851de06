"""``LocalGraphStore`` and ``LocalFeatureStore`` as read-only views of a part of a directory."""

from __future__ import annotations

from functools import cached_property
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import EdgeAttr, TensorAttr

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory import GraphDirectory, Part
from pyg_scale_migrate.pyg_distributed.feature_store import (
    OF_EDGES,
    LocalFeatureStore,
    LocalTensorAttr,
)
from pyg_scale_migrate.pyg_distributed.graph_store import LocalGraphStore, checked_integer

READ_ONLY = (
    "a part of a graph directory is read-only, and loaders read the directory: change the graph "
    "before it is partitioned, or write the attribute with "
    "pyg_scale.store.directory.additions.add_node_attribute"
)


class PartInfo:
    """Mixin for a part and the books of its graph. Data is read only when requested."""

    def _open(self, root: str | PathLike[str], pid: int) -> None:
        pid = checked_integer("pid", pid)
        self.directory = GraphDirectory.shared(root)
        self.part: Part = self.directory.part(pid)
        self.num_partitions = self.directory.meta.num_parts
        self.partition_idx = pid

    @property
    def is_hetero(self) -> bool:
        """True if the graph has types."""
        return self.directory.meta.is_hetero

    @cached_property
    def meta(self) -> dict[str, Any]:
        """Entries of PyG's ``META.json``: ``num_parts``, ``is_hetero``, types, ``is_sorted``."""
        meta = self.directory.meta
        return {
            "num_parts": meta.num_parts,
            "is_hetero": meta.is_hetero,
            "node_types": list(meta.nodes) if meta.is_hetero else None,
            "edge_types": list(meta.edges) if meta.is_hetero else None,
            "is_sorted": True,
        }

    @cached_property
    def node_pb(self) -> Any:
        """The part ``int64`` ``[num_nodes]`` of every node; by node type if there are types.

        It is made on request, with 8 bytes per node. :meth:`get_partition_ids_from_nids` does not
        need it.
        """
        found = {name: book.assignment() for name, book in self.directory.books.items()}
        return found if self.is_hetero else found[None]

    @cached_property
    def edge_pb(self) -> Any:
        """The part ``int64`` ``[num_edges]`` of every edge; by edge type if there are types.

        Raises:
            GraphDirectoryError: If edges have no attributes, so that there is no such book, and
                some parts are not on this machine.
        """
        found = {name: self._edge_book(name).to(torch.int64) for name in self.directory.meta.edges}
        return found if self.is_hetero else found[None]

    def get_partition_ids_from_nids(self, ids: Tensor, node_type: NodeType = None) -> Tensor:
        """The parts ``int64`` ``[n]`` of nodes ``[n]``.

        Raises:
            KeyError: If there is no such node type.
        """
        return self.directory.books[node_type].part_of(ids)

    def get_partition_ids_from_eids(self, eids: Tensor, edge_type: EdgeType = None) -> Tensor:
        """The parts ``int64`` ``[n]`` of edges ``[n]``.

        Raises:
            KeyError: If there is no such edge type.
            GraphDirectoryError: As of :attr:`edge_pb`.
        """
        return self._edge_book(edge_type)[eids.to(torch.int64)].to(torch.int64)

    def _edge_book(self, edge_type: EdgeType) -> Tensor:
        found = self.directory.edge_book(edge_type)
        if found is not None:
            return found
        directory = self.directory
        sizes = directory.meta.edges[edge_type].part_edges
        filled = [part for part, size in enumerate(sizes) if size]
        if absent := [part for part in filled if part not in directory.parts and len(filled) > 1]:
            raise GraphDirectoryError(
                f"{directory.path} does not say the parts of the edges {edge_type}, as these have "
                f"no attributes, and part {absent[0]}, which would, is not here: copy it, or give "
                "the edges an attribute before the graph is partitioned"
            )
        book = torch.full((sum(sizes),), filled[0] if filled else 0, dtype=torch.int32)
        for part in filled[1:]:
            ids = directory.part(part).edge_ids(edge_type)
            assert ids is not None, "a graph of several parts has edge ids"
            book[ids.to(torch.int64)] = part
        return book

    def __repr__(self) -> str:
        path = str(self.directory.path)
        return f"{type(self).__name__}({path!r}, {self.partition_idx} of {self.num_partitions})"


class PartGraphStore(PartInfo, LocalGraphStore):
    """The edges of a part, sorted by destination, only in the layout ``"coo"``.

    Args:
        root: The directory.
        pid: The number of the part.

    Raises:
        GraphDirectoryError: If it is not a graph directory, or the part is not on this machine.
        IndexError: If there is no such part.
    """

    is_sorted = True

    def __init__(self, root: str | PathLike[str], pid: int) -> None:
        LocalGraphStore.__init__(self)
        self._open(root, pid)

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
        """The attributes of all edges."""
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

    def put_edge_id(self, edge_id: Tensor, *args: Any, **kwargs: Any) -> bool:
        """Raise, as the store is read-only.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"put_edge_id: {READ_ONLY}")

    def remove_edge_id(self, *args: Any, **kwargs: Any) -> bool:
        """Raise, as the store is read-only.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"remove_edge_id: {READ_ONLY}")


class PartFeatureStore(PartInfo, LocalFeatureStore):
    """The features of a part, mapped; see :class:`PartGraphStore`."""

    def __init__(self, root: str | PathLike[str], pid: int) -> None:
        LocalFeatureStore.__init__(self)
        self._open(root, pid)

    @property
    def node_feat_pb(self) -> Any:
        """PyG's name for :attr:`node_pb`."""
        return self.node_pb

    @property
    def edge_feat_pb(self) -> Any:
        """PyG's name for :attr:`edge_pb`."""
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

    def has_edge_attr(self) -> bool:
        """Return True if edges have an ``edge_attr``."""
        edges = self.directory.meta.edges.values()
        return any("edge_attr" in edge.attributes for edge in edges)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """All attributes."""
        meta = self.directory.meta
        found: list[TensorAttr] = [
            LocalTensorAttr(name, attribute)
            for name, node in meta.nodes.items()
            for attribute in node.attributes
        ]
        for edge_type, edge in meta.edges.items():
            group = OF_EDGES if edge_type is None else edge_type
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

    def put_global_id(self, global_id: Tensor, group_name: Any) -> bool:
        """Raise, as the store is read-only.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"put_global_id: {READ_ONLY}")

    def remove_global_id(self, group_name: Any) -> bool:
        """Raise, as the store is read-only.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"remove_global_id: {READ_ONLY}")


def _group(name: Any) -> tuple[bool, NodeType | EdgeType]:
    """A pair: True if a group is of edges, and its type."""
    if isinstance(name, tuple):
        return True, None if name == OF_EDGES else name
    return False, name
