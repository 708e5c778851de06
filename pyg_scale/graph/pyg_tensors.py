"""The topology of the tensors that PyG's own sampler passes to its ops."""

from __future__ import annotations

import threading
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from pyg_scale.graph.source import of
from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology, sortable_time
from pyg_scale.ops.csc import from_pointers, order_by_time, weight_prefix

_UNKNOWN_SIZE = 2**31 - 1  # of a node type without in-edges: enough for any seed


class PyGTensors(NamedTuple):
    """A graph as PyG's sampler has it: in-edges by destination; edge ids are positions.

    ``rowptr``, ``col``, ``edge_time`` and ``weight`` are by edge type, ``node_time`` by node type.
    """

    node_types: tuple[NodeType, ...]
    edge_types: tuple[EdgeType, ...]
    rowptr: Mapping[EdgeType, Tensor]
    col: Mapping[EdgeType, Tensor]
    node_time: Mapping[NodeType, Tensor | None]
    edge_time: Mapping[EdgeType, Tensor | None]
    weight: Mapping[EdgeType, Tensor | None]


class _Known(NamedTuple):
    shape: Any
    versions: list[int]
    parts: list[TensorWeakRef]
    graph: Topology


_known: MutableMapping[Tensor, list[_Known]] = WeakTensorKeyDictionary()
_lock = threading.Lock()


def topology_of_tensors(given: PyGTensors) -> Topology:
    """The topology of the graph; made once for as long as PyG's sampler keeps the tensors.

    Raises:
        ValueError: If pointers, times or weights do not fit the graph.
        IndexError: If an edge has a node that does not exist.
    """
    everything = [tensor for each in given[2:] for tensor in each.values()]
    parts = [part for part in everything if part is not None]
    shape = (given.node_types, given.edge_types, [part is not None for part in everything])
    # Tensors of inference mode have no version counter; PyG's sampler changes none of its own.
    versions = [0 if part.is_inference() else part._version for part in parts]
    with _lock:
        for known in _known.get(parts[0], []) if parts else []:
            same = known.shape == shape and known.versions == versions
            if same and all(ref() is part for ref, part in zip(known.parts, parts, strict=True)):
                return known.graph
        graph = _build(given)
        if parts:
            # The topology must not reference the tensor whose deletion is to delete it.
            references = [TensorWeakRef(part) for part in parts]
            _known.setdefault(parts[0], []).append(_Known(shape, versions, references, graph))
        return graph


def _build(given: PyGTensors) -> Topology:
    num_nodes = _num_nodes(given)
    times = [*given.node_time.values(), *given.edge_time.values()]
    float_time = any(time is not None and time.is_floating_point() for time in times)

    def sortable(time: Tensor, what: str, kind: NodeType | EdgeType) -> Tensor:
        return sortable_time(time.detach(), float_time, f"times of {what}{of(kind)}")

    node_time = {
        t: sortable(time, "nodes", t) for t, time in given.node_time.items() if time is not None
    }
    csc = {}
    for edge_type in given.edge_types:
        neighbor, expanded = _ends(edge_type)
        pointers = given.rowptr[edge_type].detach()
        part = from_pointers(
            pointers, given.col[edge_type], num_nodes[expanded], num_nodes[neighbor]
        )
        when, weight = given.edge_time[edge_type], given.weight[edge_type]
        edge_time = None if when is None else sortable(when, "edges", edge_type)
        if neighbor in node_time:
            part = order_by_time(part, node_time[neighbor], of_edges=False)
        elif edge_time is not None:
            part = order_by_time(part, edge_time, of_edges=True)
            if part.edge_id is not None:
                edge_time = edge_time[part.edge_id.to(torch.int64)]
        prefix = None if weight is None else weight_prefix(part, weight.detach())
        csc[edge_type] = CSC(part.indptr, part.indices, part.edge_id, edge_time, prefix)
    first = next(iter(given.rowptr.values()), None)
    narrow = first is not None and first.dtype == torch.int32
    return Topology(
        given.node_types,
        given.edge_types,
        num_nodes,
        csc,
        node_time,
        index_dtype=torch.int32 if narrow else torch.int64,
        float_time=float_time,
    )


def _num_nodes(given: PyGTensors) -> dict[NodeType, int]:
    """Number of nodes of each type, as far as the tensors tell."""
    num_nodes: dict[NodeType, int] = dict.fromkeys(given.node_types, _UNKNOWN_SIZE)
    for node_type, time in given.node_time.items():
        if time is not None:
            num_nodes[node_type] = time.numel()
    for edge_type in given.edge_types:
        num_nodes[_ends(edge_type)[1]] = given.rowptr[edge_type].numel() - 1
    return num_nodes


def _ends(edge_type: EdgeType) -> tuple[NodeType, NodeType]:
    return (None, None) if edge_type is None else (edge_type[0], edge_type[2])
