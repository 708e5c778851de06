"""Reads the graph of PyG's ``Data`` and ``HeteroData``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import SparseTensor

from pyg_scale.graph.grouped import KnowsEdges, read_attribute
from pyg_scale.graph.source import Edges, GraphSource, coo, index_column, no_edges, of
from pyg_scale.graph.topology import EdgeType


def read_data(data: Data, time_attr: str | None, weight_attr: str | None) -> GraphSource:
    """Read a homogeneous graph.

    Raises:
        ValueError: If ``time_attr`` or ``weight_attr`` is missing or of another length.
        TypeError: If the edges are not integers.
    """
    edges, owner = _edges(data, None)
    source = GraphSource(
        node_types=(None,),
        edge_types=(None,),
        num_nodes={None: data.num_nodes},
        edges={None: edges},
        owners=owner,
    )
    if time_attr is not None:
        _require(data, time_attr, "time_attr")
        value = read_attribute(source, "time", data._store, None, time_attr)
        of_edges = is_edge_level(
            len(value),
            source.num_nodes[None],
            edges.num_edges,
            f"time_attr={time_attr!r}",
            tie="edge" in time_attr,
        )
        source.add_time(None, value, time_attr, of_edges)
    if weight_attr is not None:
        _require(data, weight_attr, "weight_attr")
        value = read_attribute(source, "weight", data._store, None, weight_attr)
        source.add_weight(None, value, weight_attr)
    return source


def read_hetero_data(
    data: HeteroData, time_attr: str | None, weight_attr: str | None
) -> GraphSource:
    """Read a heterogeneous graph; types are in the order of ``data.metadata()``.

    Raises:
        ValueError: If ``time_attr`` or ``weight_attr`` is missing, or both nodes and edges have it.
        TypeError: If the edges are not integers.
    """
    node_types, edge_types = data.metadata()
    for src, _, dst in edge_types:  # node types that occur only in edge types
        node_types += [t for t in dict.fromkeys((src, dst)) if t not in node_types]
    known = set(data.node_types)
    source = GraphSource(
        node_types=tuple(node_types),
        edge_types=tuple(edge_types),
        num_nodes={t: data[t].num_nodes if t in known else None for t in node_types},
        edges={},
    )
    for edge_type in edge_types:
        source.edges[edge_type], owner = _edges(data[edge_type], edge_type)
        source.owners += owner
    if time_attr is not None:
        nodes = [t for t in node_types if t in known and time_attr in data[t]]
        edges = [t for t in edge_types if time_attr in data[t]]
        one_level(time_attr, nodes, edges)
        for kind in nodes or edges:
            value = read_attribute(source, "time", data[kind], kind, time_attr)
            source.add_time(kind, value, time_attr, not nodes)
    if weight_attr is not None:
        weighted = [t for t in edge_types if weight_attr in data[t]]
        if not weighted:
            raise ValueError(f"weight_attr={weight_attr!r}: no edge type has this attribute")
        for edge_type in weighted:
            value = read_attribute(source, "weight", data[edge_type], edge_type, weight_attr)
            source.add_weight(edge_type, value, weight_attr)
    return source


def one_level(time_attr: str, nodes: list[Any], edges: list[Any]) -> None:
    """Refuse a time that neither nodes nor edges have, or both."""
    if nodes and edges:
        raise ValueError(
            f"time_attr={time_attr!r} is an attribute of nodes ({nodes[0]!r}) and of edges "
            f"({edges[0]!r}): rename one of them"
        )
    if not nodes and not edges:
        raise ValueError(f"time_attr={time_attr!r} is neither an attribute of nodes nor of edges")


def is_edge_level(
    length: int, num_nodes: int | None, num_edges: int, name: str, *, tie: bool
) -> bool:
    """Return True if an attribute of a homogeneous graph is one of edges, judged by its length.

    Args:
        length: Number of its entries.
        num_nodes: Number of nodes.
        num_edges: Number of edges.
        name: Its name in errors.
        tie: The answer for a graph with as many edges as nodes.

    Raises:
        ValueError: If its length is neither the number of nodes nor that of edges.
    """
    if length == num_edges == num_nodes:
        return tie
    if length in (num_nodes, num_edges):
        return length == num_edges
    raise ValueError(
        f"{name} has {length} entries; expected one for each of the {num_nodes} nodes, or for "
        f"each of the {num_edges} edges"
    )


def _require(data: Data, name: str, argument: str) -> None:
    if name not in data or data[name] is None:
        raise ValueError(f"{argument}={name!r}: the graph has no such attribute")


def _edges(store: Any, edge_type: EdgeType) -> tuple[Edges, list[Any]]:
    """The edges of a ``Data`` or of an edge store, and the object that holds them."""
    if isinstance(store, Data):
        store = store._store
    if isinstance(store, KnowsEdges):
        grouped = store.grouped_edges()
        if grouped is not None:
            return grouped, [grouped.owner]
    if "edge_index" in store and store["edge_index"] is not None:
        value = store["edge_index"]
        return _from_edge_index(value, f"edge_index{of(edge_type)}"), [value]
    for name in ("adj_t", "adj"):
        value = store.get(name)
        edges = _from_matrix(value, f"{name}{of(edge_type)}", name == "adj_t")
        if edges is not None:
            return edges, [value]
    return no_edges(), []


def _from_edge_index(value: Any, name: str) -> Edges:
    if isinstance(value, EdgeIndex):
        value = value.as_tensor()
    if not isinstance(value, Tensor) or value.dim() != 2 or value.size(0) != 2:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a tensor of shape [2, num_edges] (got {got})")
    return coo(value[0], value[1], name)


def _from_matrix(value: Any, name: str, transposed: bool) -> Edges | None:
    """The edges of a sparse matrix; ``None`` if ``value`` is not one."""
    if isinstance(value, SparseTensor):  # a matrix of torch-sparse, kept by rows
        pointers, index, _ = value.csr()
        by_rows, size = True, _ends(value.sparse_sizes(), transposed)
    elif not isinstance(value, Tensor) or value.layout == torch.strided:
        return None
    elif value.layout == torch.sparse_coo:
        rows, cols = value._indices()  # the edges unchanged, coalesced or not
        edges = coo(cols, rows, name) if transposed else coo(rows, cols, name)
        edges.size = _ends(value.shape, transposed)
        return edges
    elif value.layout == torch.sparse_csr:
        pointers, index = value.crow_indices(), value.col_indices()
        by_rows, size = True, _ends(value.shape, transposed)
    elif value.layout == torch.sparse_csc:
        pointers, index = value.ccol_indices(), value.row_indices()
        by_rows, size = False, _ends(value.shape, transposed)
    else:
        raise TypeError(f"{name} must have the layout COO, CSR or CSC (got {value.layout})")
    pointers, index = index_column(pointers, name), index_column(index, name)
    if by_rows == transposed:
        return Edges("csc", index, pointers, size=size)
    return Edges("csr", pointers, index, size=size)


def _ends(shape: Any, transposed: bool) -> tuple[int, int]:
    """The numbers of source and destination nodes of a matrix."""
    rows, cols = shape
    return (cols, rows) if transposed else (rows, cols)
