"""The topology of a graph: built once from the user's graph, and shared by all its users."""

from __future__ import annotations

import dataclasses
import threading
import warnings
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData

from pyg_scale.graph.base import SuppliesTopology, TopologyOptions
from pyg_scale.graph.read_stores import read_stores
from pyg_scale.graph.source import Edges, GraphSource, GroupedEdges, of, read_data, read_hetero_data
from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology, sortable_time
from pyg_scale.ops.csc import (
    Compressed,
    build_csc,
    check_edges,
    checked_weights,
    expand_pointers,
    from_pointers,
    order_by_time,
    weight_prefix,
)
from pyg_scale.store.mapped_topology import KeepsTopology


def topology_of(
    data: Any,
    *,
    direction: str = "forward",
    time_attr: str | None = None,
    weight_attr: str | None = None,
    is_sorted: bool = False,
) -> Topology:
    """The topology of ``data``. While it is in use, the same graph has the same object.

    The graph is the same if its tensors are the same objects and were not changed in place. Edge
    ids are positions in the user's graph: in the edge list, or in the rows or columns of a sparse
    matrix.

    Args:
        data: ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``, with its edges as an edge
            list, as a sparse matrix ``adj_t`` or ``adj`` (of torch or torch-sparse), or, in a
            graph store, in any layout.
        direction: ``"forward"`` for in-edges, ``"backward"`` for out-edges.
        time_attr: The attribute, of nodes or of edges, that holds times.
        weight_attr: The attribute of edges that holds weights.
        is_sorted: Declares edge lists to be sorted by destination; checked. An ``int32`` edge list
            is then used without a copy, so it must not be changed while the topology is in use.

    Raises:
        ValueError: If an attribute is missing, has the wrong length or invalid values, or if edges
            are not sorted despite ``is_sorted``.
        IndexError: If an edge has a node that does not exist.
        TypeError: If ``data`` is of another type, or edges are not integers.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction must be 'forward' or 'backward' (got {direction!r})")
    options = TopologyOptions(direction, time_attr, weight_attr, is_sorted)
    if isinstance(data, SuppliesTopology):
        supplied = data.supply_topology(options)
        if supplied is not None:
            return supplied

    def shared(source: GraphSource) -> Topology:
        return _shared(source, options, lambda: _build(source, direction, is_sorted))

    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], KeepsTopology):
        return data[1].keep_topology(
            data[0], options, lambda: _read(data, time_attr, weight_attr), shared
        )
    return shared(_read(data, time_attr, weight_attr))


def checked_source(
    data: Any,
    *,
    direction: str = "forward",
    time_attr: str | None = None,
    weight_attr: str | None = None,
    is_sorted: bool = False,
) -> GraphSource:
    """The graph as it is read, for samplers that order edges themselves.

    Takes the arguments of :func:`topology_of`. Missing attributes, their lengths, weights and edge
    lists are checked as there; nothing is built or kept.

    Raises:
        ValueError, IndexError, TypeError: As :func:`topology_of`.
    """
    source = _read(data, time_attr, weight_attr)
    num_nodes = _num_nodes(source)
    _check_lengths(source, num_nodes)
    for edge_type, edges in source.edges.items():
        if isinstance(edges, GroupedEdges):
            if not is_sorted or edges.csc.edge_id is None:
                continue  # they were checked when they were grouped
            edges = edges.as_coo(edge_type)
        if edges.layout == "coo":
            src, dst = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
            check_edges(
                edges.col,
                edges.row,
                num_nodes[dst],
                num_nodes[src],
                is_sorted=_declared(edges, direction, is_sorted),
                what=f"edge {{}}{of(edge_type)}",
            )
    for edge_type, weight in source.weight.items():
        with _named_weights(edge_type):
            checked_weights(weight)
    return source


def _read(data: Any, time_attr: str | None, weight_attr: str | None) -> GraphSource:
    if isinstance(data, Data):
        return read_data(data, time_attr, weight_attr)
    if isinstance(data, HeteroData):
        return read_hetero_data(data, time_attr, weight_attr)
    if isinstance(data, tuple | list) and len(data) == 2:
        features, graph = data
        if isinstance(features, FeatureStore) and isinstance(graph, GraphStore):
            return read_stores(features, graph, time_attr, weight_attr)
    raise TypeError(
        f"data must be Data, HeteroData or (FeatureStore, GraphStore) (got {type(data).__name__})"
    )


# Sharing ##################################################################################

_lock = threading.RLock()
_built: dict[Any, tuple[list[weakref.ref], weakref.ref]] = {}


def _shared(source: GraphSource, options: tuple, build: Any) -> Topology:
    """The topology built earlier from the same objects, if it is still in use."""
    owners = source.owners
    if any(isinstance(owner, Tensor) and owner.is_inference() for owner in owners):
        return build()  # changes of such tensors cannot be detected
    key = (
        tuple((id(owner), _version(owner)) for owner in owners),
        source.node_types,
        source.edge_types,
        tuple(source.num_nodes.values()),
        tuple((edges.layout, edges.is_sorted) for edges in source.edges.values()),
        options,
    )
    with _lock:
        known, before = _built.get(key, ([], None))
        if before is not None and all(ref() is owner for ref, owner in zip(known, owners)):
            topology = before()
            if topology is not None:
                return topology
        topology = build()

        def forget(_: Any) -> None:
            _built.pop(key, None)

        if owners:
            refs = [weakref.ref(owner, forget) for owner in owners]
            _built[key] = (refs, weakref.ref(topology, forget))
        return topology


def _version(owner: Any) -> int:
    """A number that changes with the values: the version of a tensor, the checksum of an array."""
    if isinstance(owner, Tensor):
        return owner._version
    if isinstance(owner, np.ndarray):  # an array has no version counter
        return zlib.crc32(np.ascontiguousarray(owner).data)
    return 0


# Building #################################################################################


def _build(source: GraphSource, direction: str, is_sorted: bool) -> Topology:
    num_nodes = _num_nodes(source)
    _check_lengths(source, num_nodes)
    times = [*source.node_time.values(), *source.edge_time.values()]
    float_time = any(time.is_floating_point() for time in times)
    node_time = {
        t: sortable_time(v, float_time, f"times of nodes{of(t)}")
        for t, v in source.node_time.items()
    }
    edge_time = {
        t: sortable_time(v, float_time, f"times of edges{of(t)}")
        for t, v in source.edge_time.items()
    }
    kinds = source.edges.values()
    held = {e.index_dtype for e in kinds if e.num_edges} or {e.index_dtype for e in kinds}
    topology = Topology(
        node_types=source.node_types,
        edge_types=source.edge_types,
        num_nodes=num_nodes,
        csc={},
        node_time=node_time,
        index_dtype=torch.int32 if held == {torch.int32} else torch.int64,
        direction=direction,
        float_time=float_time,
    )
    csc = {t: _csc(source, t, topology, edge_time.get(t), is_sorted) for t in source.edge_types}
    topology.csc.update(csc)  # type: ignore[attr-defined]
    return topology


def _csc(
    source: GraphSource,
    edge_type: EdgeType,
    topology: Topology,
    of_edges: Tensor | None,
    is_sorted: bool,
) -> CSC:
    """The edges of one type, ordered, with their times and weights."""
    edges = source.edges[edge_type]
    expanded, neighbor = topology.expanded_type(edge_type), topology.neighbor_type(edge_type)
    weight = source.weight.get(edge_type)
    if isinstance(edges, GroupedEdges):
        reason = edges.why_not(source, edge_type, topology, is_sorted)
        if reason is None:
            return _grouped(edges, source, edge_type)
        if not is_sorted:
            warnings.warn(
                f"edges{of(edge_type)} are grouped in the memory of this process instead of "
                f"mapped: {reason}; give the loader the time_attr of pyg_scale.save(...), or save "
                "the graph with that of the loader",
                stacklevel=2,
            )
        edges = edges.as_coo(edge_type)
    part = _compress(
        edges,
        edge_type,
        topology.direction,
        is_sorted,
        topology.num_nodes[expanded],
        topology.num_nodes[neighbor],
    )
    of_neighbors = topology.node_time.get(neighbor)
    if of_neighbors is not None:
        part = order_by_time(part, of_neighbors, of_edges=False)
    elif of_edges is not None:
        part = order_by_time(part, of_edges, of_edges=True)
    return CSC(
        indptr=part.indptr,
        indices=part.indices,
        edge_id=part.edge_id,
        time=_by_position(of_edges, part.edge_id),
        weight_prefix=None if weight is None else _weights(part, weight, edge_type),
    )


def _grouped(edges: GroupedEdges, source: GraphSource, edge_type: EdgeType) -> CSC:
    """The in-edges of edges that are already grouped and ordered."""
    csc, weight = edges.csc, source.weight.get(edge_type)
    time = csc.time if edge_type in source.edge_time else None
    prefix = None
    if weight is not None:
        prefix = csc.weight_prefix
        if prefix is None or source.recorded.get(("weight", edge_type)) != edges.weight_attr:
            part = Compressed(csc.indptr, csc.indices, csc.edge_id)
            prefix = _weights(part, weight, edge_type)
    return dataclasses.replace(csc, time=time, weight_prefix=prefix)


def _num_nodes(source: GraphSource) -> dict[NodeType, int]:
    """Numbers of nodes; if unknown, as many as the edges need."""
    least: dict[NodeType, int] = dict.fromkeys(source.node_types, 0)
    for edge_type, edges in source.edges.items():
        ends = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
        if any(source.num_nodes[end] is None for end in ends):
            sizes = zip(ends, edges.size, edges.least_size())
            for end, size, needed in sizes:
                least[end] = max(least[end], needed if size is None else size)
    return {t: least[t] if n is None else int(n) for t, n in source.num_nodes.items()}


def _check_lengths(source: GraphSource, num_nodes: dict[NodeType, int]) -> None:
    for node_type, time in source.node_time.items():
        _check_length("times", time, num_nodes[node_type], f"nodes{of(node_type)}")
    for edge_type, edges in source.edges.items():
        for name, values in (("times", source.edge_time), ("weights", source.weight)):
            if edge_type in values:
                what = f"edges{of(edge_type)}"
                _check_length(name, values[edge_type], edges.num_edges, what)


def _check_length(name: str, value: Tensor, size: int, what: str) -> None:
    if value.numel() != size:
        raise ValueError(f"there are {value.numel()} {name} for {size} {what}: give one each")


def _by_position(of_edges: Tensor | None, edge_id: Tensor | None) -> Tensor | None:
    """Edge times by position."""
    if of_edges is None or edge_id is None:
        return of_edges
    return torch.index_select(of_edges, 0, edge_id)


def _weights(part: Compressed, weight: Tensor, edge_type: EdgeType) -> Tensor:
    with _named_weights(edge_type):
        return weight_prefix(part, weight)


@contextmanager
def _named_weights(edge_type: EdgeType) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"weight_attr{of(edge_type)}: {error}") from None


def _compress(
    edges: Edges,
    edge_type: EdgeType,
    direction: str,
    is_sorted: bool,
    expanded: int,
    neighbors: int,
) -> Compressed:
    """The edges of one type, grouped by the node that a sampler expands."""
    what = f"edge {{}}{of(edge_type)}"
    forward = direction == "forward"
    dst, src = (edges.col, edges.row) if forward else (edges.row, edges.col)
    grouped, other = ("csc", "csr") if forward else ("csr", "csc")
    if edges.layout == grouped:
        return from_pointers(_padded(dst, expanded), src, expanded, neighbors, what=what)
    if edges.layout == other:
        checked = from_pointers(_padded(src, neighbors), dst, neighbors, expanded, what=what)
        src = expand_pointers(checked.indptr, edges.num_edges)
    declared = _declared(edges, direction, is_sorted)
    names = ("destination", "source") if forward else ("source", "destination")
    return build_csc(dst, src, expanded, neighbors, is_sorted=declared, what=what, names=names)


def _declared(edges: Edges, direction: str, is_sorted: bool) -> bool:
    """True if an edge list is declared to be sorted by the nodes that are expanded."""
    return direction == "forward" and edges.layout == "coo" and (is_sorted or edges.is_sorted)


def _padded(indptr: Tensor, size: int) -> Tensor:
    """Pointers for ``size`` nodes; nodes beyond a smaller matrix have no edges."""
    missing = size + 1 - indptr.numel()
    if missing <= 0:
        return indptr
    last = indptr[-1:] if indptr.numel() else indptr.new_zeros(1)
    return torch.cat([indptr, last.expand(missing)])
