"""The parts of a graph in memory, as separate graphs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.partitioner.assigned import Assigned, check_assignment
from pyg_scale.partitioner.base import Partition
from pyg_scale.partitioner.rows import RowsByPart

_EDGES = ("edge_index", "adj_t", "adj")


def subgraphs(
    data: Data | HeteroData,
    parts: Partition | Mapping[NodeType, Tensor] | Tensor,
    *,
    num_parts: int | None = None,
    halo: bool = False,
) -> list[Data] | list[HeteroData]:
    """Cut a graph in memory into one graph per part.

    A part has its nodes in ascending order of their original ids (``n_id``), and the edges between
    them in the order of the graph, with original ids ``e_id``. Attributes of nodes and edges go
    with them; all other attributes are shared.

    Args:
        data: The graph, with ``edge_index``.
        parts: The part of every node.
        num_parts: Number of parts, if the assignment does not determine it.
        halo: If True, also take the edges from other parts. Their sources follow the part's own
            nodes, in ascending order; ``is_halo`` ``[num_nodes]`` marks them.

    Returns:
        ``num_parts`` graphs of the type of ``data``.

    Raises:
        TypeError: If ``data`` is not a graph in memory, or the assignment not an integer tensor.
        ValueError: If the assignment does not fit the graph, or it has edges in another form.
    """
    if isinstance(data, Data):
        counts: dict[NodeType, int] = {None: int(data.num_nodes or 0)}
        edge_types: list[EdgeType] = [None]
    elif isinstance(data, HeteroData):
        counts = {name: int(data[name].num_nodes or 0) for name in data.node_types}
        edge_types = list(data.edge_types)
    else:
        raise TypeError(f"data must be Data or HeteroData (got {type(data).__name__})")
    for name in edge_types:
        if missing := [end for end in _ends(name) if end not in counts]:
            raise ValueError(f"edge type {name!r}: set num_nodes of the node type {missing[0]!r}")
    assigned = check_assignment(parts, counts, num_parts)
    edges = {name: _edges(_store(data, name), name) for name in edge_types}
    nodes = {name: _by_part(part, assigned.num_parts) for name, part in assigned.part.items()}
    kept = {name: _kept(edges[name], name, assigned, halo) for name in edge_types}
    return [
        _part(data, number, nodes, edges, kept, assigned, halo)
        for number in range(assigned.num_parts)
    ]


def _store(data: Any, kind: NodeType | EdgeType) -> Any:
    return data._store if kind is None else data[kind]


def _ends(edge_type: EdgeType) -> tuple[NodeType, NodeType]:
    return (None, None) if edge_type is None else (edge_type[0], edge_type[2])


def _edges(store: Any, edge_type: EdgeType) -> Tensor:
    edge_index = store.get("edge_index")
    if edge_index is None:
        if any(store.get(name) is not None for name in _EDGES):
            raise ValueError(
                "subgraphs needs edge_index: turn the sparse matrix into one first "
                f"(edge type {edge_type!r})"
            )
        return torch.empty(2, 0, dtype=torch.int64)
    return edge_index


def _by_part(part: Tensor, num_parts: int) -> list[Tensor]:
    """Positions ``int64`` of each part, ascending."""
    split = RowsByPart(part, num_parts)
    return list(split.order.split(split.counts.tolist()))


def _kept(edge_index: Tensor, edge_type: EdgeType, assigned: Assigned, halo: bool) -> list[Tensor]:
    """The ids of the edges of each part, ascending."""
    source, destination = _ends(edge_type)
    part = assigned.part[destination][edge_index[1].long()]
    edge_id = torch.arange(part.numel())
    if not halo:
        edge_id = edge_id[assigned.part[source][edge_index[0].long()] == part]
    return [edge_id[each] for each in _by_part(part[edge_id], assigned.num_parts)]


def _part(
    data: Any,
    number: int,
    nodes: dict[NodeType, list[Tensor]],
    edges: dict[EdgeType, Tensor],
    kept: dict[EdgeType, list[Tensor]],
    assigned: Assigned,
    halo: bool,
) -> Any:
    own = {name: lists[number] for name, lists in nodes.items()}
    outside: dict[NodeType, list[Tensor]] = {name: [] for name in own}
    for edge_type, edge_index in edges.items():
        source = _ends(edge_type)[0]
        node = edge_index[0, kept[edge_type][number]].long()
        outside[source].append(node[assigned.part[source][node] != number])
    out = copy.copy(data)
    local = {}
    for name, mine in own.items():
        others = torch.cat([*outside[name], mine[:0]]).unique()
        ids = torch.cat([mine, others])
        local[name] = torch.empty(assigned.part[name].numel(), dtype=torch.int64)
        local[name][ids] = torch.arange(ids.numel())
        store, whole = _store(out, name), _store(data, name)
        _select(store, whole, ids, whole.is_node_attr)
        store.num_nodes, store.n_id = ids.numel(), ids
        if halo:
            store.is_halo = torch.arange(ids.numel()) >= mine.numel()
    for edge_type, edge_index in edges.items():
        source, destination = _ends(edge_type)
        ids = kept[edge_type][number]
        store, whole = _store(out, edge_type), _store(data, edge_type)
        _select(store, whole, ids, whole.is_edge_attr)
        row, col = edge_index[:, ids].long()
        pair = torch.stack([local[source][row], local[destination][col]])
        store.edge_index, store.e_id = pair.to(edge_index.dtype), ids
    return out


def _select(store: Any, whole: Any, ids: Tensor, is_one: Any) -> None:
    for name, value in whole.items():
        if name not in _EDGES and isinstance(value, Tensor) and is_one(name):
            store[name] = value[ids]
