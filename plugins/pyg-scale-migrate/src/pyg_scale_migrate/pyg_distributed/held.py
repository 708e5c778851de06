"""The share of a graph in a rank's stores of tensors, checked and in ascending order of ids."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyg_scale.files.npy import dtype_name
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory import PartitionBook
from pyg_scale_migrate.pyg_distributed.feature_store import OF_EDGES, LocalFeatureStore, places_of
from pyg_scale_migrate.pyg_distributed.graph_store import (
    LocalGraphStore,
    check_integers,
    checked_integer,
)

Rows: TypeAlias = dict[str, Tensor]


@dataclass
class HeldEdges:
    """The edges of one type in the order of their ids."""

    src: Tensor
    dst: Tensor
    """Local ids."""
    ids: Tensor
    attributes: Rows


@dataclass
class Held:
    """The share of a graph of one rank."""

    part: int
    num_parts: int
    is_hetero: bool
    books: dict[NodeType, PartitionBook]
    orig_id: dict[NodeType, Tensor]
    nodes: dict[NodeType, Rows] = field(default_factory=dict)
    edges: dict[EdgeType, HeldEdges] = field(default_factory=dict)

    def said(self) -> dict[str, Any]:
        """The description of the share for other ranks, as JSON."""
        return {
            "error": "",
            "part": self.part,
            "num_parts": self.num_parts,
            "is_hetero": self.is_hetero,
            "nodes": [
                [name, book.num_nodes, _checksum(book), _forms(self.nodes[name])]
                for name, book in self.books.items()
            ],
            "edges": [[name, _forms(each.attributes)] for name, each in self.edges.items()],
            "part_edges": [each.ids.numel() for each in self.edges.values()],
        }


def _checksum(book: PartitionBook) -> int:
    start = zlib.crc32(book.offsets.numpy().tobytes())
    return start if book.part is None else zlib.crc32(book.part.numpy().tobytes(), start)


def _forms(rows: Rows) -> dict[str, list[Any]]:
    return {name: [dtype_name(v.dtype), list(v.shape[1:])] for name, v in rows.items()}


def read_held(features: LocalFeatureStore, graph: LocalGraphStore, num_ranks: int) -> Held:
    """Read stores of tensors.

    Args:
        features: Rows of at least the nodes and edges of the part.
        graph: The edges that lead to them.
        num_ranks: Number of ranks, each with a part.

    Raises:
        TypeError: If ids are no integers.
        ValueError: If their content contradicts itself; names the contradiction.
        IndexError: If an edge has a node that does not exist.
    """
    part, parts = graph.partition_idx, graph.num_partitions
    if not 0 <= part < parts:
        raise ValueError(f"partition_idx is {part}, but there are {parts} parts (num_partitions)")
    if parts != num_ranks:
        raise ValueError(
            f"{graph!r} needs {parts} ranks with a part each, current_ctx has {num_ranks}: set "
            "num_partitions and partition_idx, or write the graph with "
            "pyg_scale.distributed.Partitioner, whose parts any number of ranks can share"
        )
    books = {
        name: _book(graph, name, size, parts) for name, size in _num_nodes(features, graph).items()
    }
    own = Held(
        part,
        parts,
        graph.is_hetero,
        books,
        {name: book.nodes_of(part) for name, book in books.items()},
    )
    by_group: dict[Any, list[str]] = {}
    for tensor in features.get_all_tensor_attrs():
        by_group.setdefault(tensor.group_name, []).append(str(tensor.attr_name))
    for name, wanted in own.orig_id.items():
        own.nodes[name] = _rows(features, name, wanted, by_group.pop(name, []), part)
    for edge in graph.get_all_edge_attrs():
        if edge.layout.value != "coo":
            raise ValueError(f"edges {edge.edge_type} have layout {edge.layout.value!r}, not 'coo'")
        group = OF_EDGES if edge.edge_type is None else edge.edge_type
        names = by_group.pop(group, [])
        own.edges[edge.edge_type] = _edges(own, features, graph, edge.edge_type, group, names)
    if by_group:
        group = next(iter(by_group))
        raise ValueError(f"there are features of {group!r}, but no such nodes or edges")
    return own


def _num_nodes(features: LocalFeatureStore, graph: LocalGraphStore) -> dict[NodeType, int]:
    """Number of nodes of each type in all parts."""
    if graph.node_pb is not None:
        books = graph.node_pb if graph.is_hetero else {None: graph.node_pb}
        if not isinstance(books, Mapping):
            raise ValueError("node_pb of a graph with types must be a dictionary by node type")
        return {name: torch.as_tensor(book).numel() for name, book in books.items()}
    found: dict[NodeType, int] = {}
    for edge in graph.get_all_edge_attrs():
        ends = (None, None) if edge.edge_type is None else (edge.edge_type[0], edge.edge_type[2])
        if edge.size is None:
            raise ValueError(f"edges {edge.edge_type} have no size: put_edge_index(..., size=...)")
        for end, size in zip(ends, edge.size, strict=True):
            count = 0 if size is None else checked_integer(f"size of {edge.edge_type}", size)
            found[end] = max(found.get(end, 0), count)
    for tensor in features.get_all_tensor_attrs():
        ids = features.get_global_id(tensor.group_name)
        if not isinstance(tensor.group_name, tuple) and tensor.group_name not in found:
            found[tensor.group_name] = int(ids.max()) + 1 if ids is not None and len(ids) else 0
    return found


def _book(graph: LocalGraphStore, name: NodeType, size: int, parts: int) -> PartitionBook:
    if graph.node_pb is None:
        if parts > 1:
            raise ValueError(
                "node_pb was not set: ranks need the part [num_nodes] of every node "
                "(graph_store.node_pb = ...)"
            )
        return PartitionBook.from_assignment(torch.zeros(size, dtype=torch.uint8), 1)
    book = graph.node_pb[name] if graph.is_hetero else graph.node_pb
    return PartitionBook.from_assignment(torch.as_tensor(book).cpu(), parts)


def _rows(
    features: LocalFeatureStore, group: Any, wanted: Tensor, names: list[str], part: int
) -> Rows:
    """The rows of the nodes or edges of the part, in the order of ``wanted``."""
    if not names:
        return {}
    ids = features.get_global_id(group)
    if ids is None:
        raise ValueError(f"features of {group!r} have no ids: put_global_id(ids, {group!r})")
    check_integers(f"ids of features of {group!r}", ids)
    place, missing = places_of(ids.cpu().to(torch.int64), wanted)
    distinct, count = ids.unique(return_counts=True)
    if distinct.numel() < ids.numel():
        raise ValueError(
            f"{names[0]!r} of {group!r} has several rows of {int(distinct[count > 1][0])}: each id "
            "must be there once"
        )
    if missing is not None:
        raise ValueError(
            f"{names[0]!r} of {group!r} has no row of {missing}, which part {part} owns"
        )
    as_given = place.numel() == ids.numel() and bool((place[1:] > place[:-1]).all())
    out = {}
    for name in names:
        value = features.get_tensor(group, name)
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value)
        value = value.detach().cpu()
        if value.dim() == 0 or value.size(0) != ids.numel():
            raise ValueError(
                f"{name!r} of {group!r} must have a row for each of {ids.numel()} ids (got "
                f"{list(value.shape)})"
            )
        out[name] = value.contiguous() if as_given else value[place]
    return out


def _edges(
    own: Held,
    features: LocalFeatureStore,
    graph: LocalGraphStore,
    edge_type: EdgeType,
    group: Any,
    names: list[str],
) -> HeldEdges:
    found: Any = graph.get_edge_index(edge_type, "coo")
    for each in (found[0], found[1]):
        check_integers(f"edge_index of edges {edge_type}", each)
    src, dst = (each.cpu().to(torch.int64) for each in (found[0], found[1]))
    ids = graph.get_edge_id(edge_type, "coo")
    if ids is None:
        if own.num_parts > 1:
            raise ValueError(f"edges {edge_type} have no ids: put_edge_id(ids, ...)")
        ids = torch.arange(dst.numel())
    check_integers(f"ids of edges {edge_type}", ids)
    ids = ids.cpu().to(torch.int64)
    if ids.numel() != dst.numel():
        raise ValueError(f"there are {ids.numel()} ids for {dst.numel()} edges {edge_type}")
    ids, order = ids.sort()
    if bool((ids[1:] == ids[:-1]).any()):
        twice = int(ids[1:][ids[1:] == ids[:-1]][0])
        raise ValueError(f"two edges {edge_type} have the id {twice}")
    src, dst = src[order], dst[order]
    source, target = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
    for what, node, end in (("source", src, source), ("destination", dst, target)):
        if end not in own.books:
            raise ValueError(f"node_pb lacks the node type {end!r} of edges {edge_type}")
        size = own.books[end].num_nodes
        wrong = (node < 0) | (node >= size)
        if bool(wrong.any()):
            raise IndexError(
                f"edge {int(ids[wrong][0])} {edge_type or ''} has {what} {int(node[wrong][0])}, "
                f"but there are {size} nodes"
            )
    elsewhere = own.books[target].part_of(dst) != own.part
    if bool(elsewhere.any()):
        raise ValueError(
            f"edge {int(ids[elsewhere][0])} {edge_type or ''} leads to node "
            f"{int(dst[elsewhere][0])}, which part {own.part} does not own (node_pb): each edge "
            "belongs to the part of its destination"
        )
    rows = _rows(features, group, ids, names, own.part)
    return HeldEdges(src, own.books[target].local_of(dst), ids, rows)
