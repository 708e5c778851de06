"""Reads the graph of a ``(FeatureStore, GraphStore)``."""

from __future__ import annotations

import copy
from typing import Any

from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore, TensorAttr

from pyg_scale.graph.source import (
    Edges,
    GraphSource,
    coo,
    index_column,
    is_edge_level,
    no_edges,
    of,
    one_level,
)
from pyg_scale.graph.topology import EdgeType, NodeType


def read_stores(
    feature_store: FeatureStore,
    graph_store: GraphStore,
    time_attr: str | None,
    weight_attr: str | None,
) -> GraphSource:
    """Read a graph, homogeneous if the edge type is ``None``.

    Edge types are in the order of ``get_all_edge_attrs()``, node types in the order of
    ``get_all_tensor_attrs()``, followed by those that occur only in edge types. If a store has the
    edges of a type in several layouts, the first one that it lists defines the edge ids.

    Raises:
        ValueError: If ``time_attr`` or ``weight_attr`` is missing, of another length, or nodes
            and edges have that time.
        TypeError: If the edges are not integers.
    """
    attrs = [_copy(attr) for attr in feature_store.get_all_tensor_attrs()]
    edge_attrs: dict[EdgeType, EdgeAttr] = {}
    for edge_attr in graph_store.get_all_edge_attrs():
        edge_attrs.setdefault(_edge_type(edge_attr.edge_type), edge_attr)
    groups = list(dict.fromkeys(attr.group_name for attr in attrs))
    if None in edge_attrs and len(edge_attrs) > 1:
        raise ValueError(
            "the graph store has edges with and without a type: give all a type, or none"
        )
    if not edge_attrs and not any(isinstance(group, str) for group in groups):
        source = GraphSource((None,), (None,), {None: None}, {None: no_edges()})
    else:
        source = _edges(graph_store, edge_attrs, groups)
    _count_nodes(source, feature_store, attrs)
    if time_attr is not None:
        _read_time(source, feature_store, attrs, time_attr)
    if weight_attr is not None:
        _read_weight(source, feature_store, attrs, weight_attr)
    return source


def _edges(
    graph_store: GraphStore, edge_attrs: dict[EdgeType, EdgeAttr], groups: list[Any]
) -> GraphSource:
    edge_types = tuple(edge_attrs)
    node_types: list[NodeType] = [None]
    if edge_types != (None,):
        ends = [t for edge_type in edge_types if edge_type for t in (edge_type[0], edge_type[2])]
        node_types = list(dict.fromkeys([g for g in groups if isinstance(g, str)] + ends))
    source = GraphSource(tuple(node_types), edge_types, dict.fromkeys(node_types), {})
    for edge_type, attr in edge_attrs.items():
        row, col = graph_store.get_edge_index(attr)  # PyG's Data fills in attr.size in this call
        name = f"the edge index{of(edge_type)}"
        layout = attr.layout.value
        if layout == "coo":
            edges = coo(row, col, name, bool(attr.is_sorted))
        else:
            edges = Edges(layout, index_column(row, name), index_column(col, name))
        edges.size = tuple(attr.size) if attr.size is not None else (None, None)
        source.edges[edge_type] = edges
        source.owners += [row, col]
        node_ends = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
        for node_type, size in zip(node_ends, edges.size):
            if size is not None:
                source.num_nodes[node_type] = max(size, source.num_nodes[node_type] or 0)
    return source


def _count_nodes(source: GraphSource, feature_store: FeatureStore, attrs: list[TensorAttr]) -> None:
    """Fill in numbers of nodes that the graph store does not know, from the features."""
    for attr in attrs:
        if attr.group_name not in source.num_nodes:
            continue
        if source.num_nodes[attr.group_name] is not None:
            continue
        size = feature_store.get_tensor_size(_copy(attr))
        edges = source.edges.get(None)
        if size is None or (edges is not None and edges.num_edges and size[0] == edges.num_edges):
            continue  # in a homogeneous graph this may also be an attribute of edges
        source.num_nodes[attr.group_name] = int(size[0])


def _read_time(
    source: GraphSource, feature_store: FeatureStore, attrs: list[TensorAttr], name: str
) -> None:
    found = _named(source, attrs, name)
    of_nodes = [attr.group_name for _, of_edges, attr in found if of_edges is False]
    of_edges = [attr.group_name for _, of_edges, attr in found if of_edges]
    if of_nodes or of_edges:
        one_level(name, of_nodes, of_edges)
    for (kind, level, _), value in zip(found, _fetch(feature_store, found)):
        if level is None:
            edges = source.edges[None]
            num_nodes = source.num_nodes[None]
            if num_nodes is None:
                num_nodes = max(edges.least_size())
            level = is_edge_level(  # PyG decides by the name alone
                len(value), num_nodes, edges.num_edges, f"time_attr={name!r}", tie=name != "time"
            )
        source.add_time(kind, value, name, level)


def _read_weight(
    source: GraphSource, feature_store: FeatureStore, attrs: list[TensorAttr], name: str
) -> None:
    found = [entry for entry in _named(source, attrs, name) if entry[1] is not False]
    if not found:
        raise ValueError(f"weight_attr={name!r} is not an attribute of edges in the feature store")
    for (kind, _, _), value in zip(found, _fetch(feature_store, found)):
        source.add_weight(kind, value, name)


Found = tuple[Any, bool | None, TensorAttr]
"""A type, True for an attribute of edges (``None``: its length decides), and the attribute."""


def _named(source: GraphSource, attrs: list[TensorAttr], name: str) -> list[Found]:
    """The attributes of this name, in the order of the types."""
    groups = {attr.group_name: attr for attr in attrs if attr.attr_name == name}
    if not groups:
        raise ValueError(f"the feature store has no attribute {name!r}")
    known: dict[Any, tuple[Any, bool | None]]
    if source.node_types == (None,):
        # (None, None) are the edges of a homogeneous graph, as in torch_geometric.distributed
        known = {None: (None, None), (None, None): (None, True)}
        if len(groups) > 1 and set(groups) <= set(known):
            one_level(name, [None], [(None, None)])
    else:
        known = {t: (t, False) for t in source.node_types}
        known |= {t: (t, True) for t in source.edge_types}
    if unknown := [group for group in groups if group not in known]:
        raise ValueError(f"{name!r} is stored for {unknown[0]!r}, which is not a type of the graph")
    return [(*known[group], groups[group]) for group in known if group in groups]


def _fetch(feature_store: FeatureStore, found: list[Found]) -> list[Any]:
    values: list[Any] = feature_store.multi_get_tensor([_copy(attr) for _, _, attr in found])
    return values


def _copy(attr: TensorAttr) -> TensorAttr:
    """A copy of the attribute, for all nodes or edges: stores change the objects they get."""
    attr = copy.copy(attr)
    attr.index = None
    if not attr.is_set("group_name"):
        attr.group_name = None
    elif isinstance(attr.group_name, list):
        attr.group_name = tuple(attr.group_name)
    return attr


def _edge_type(edge_type: Any) -> EdgeType:
    return None if edge_type is None else tuple(edge_type)
