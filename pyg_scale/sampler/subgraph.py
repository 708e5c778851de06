"""Subgraphs made of a directional sample: exchanged directions, both directions, all edges.

Shared by every implementation of the contract, so that they cannot differ in it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.ops.both_directions import both_directions
from pyg_scale.ops.first_places import first_places

if TYPE_CHECKING:
    from pyg_scale.sampler.base import Sample


def edges_among(row: Tensor, col: Tensor, edge: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the in-edges of the nodes of a batch those whose sources are in it, too.

    Args:
        row: Row of the source of each edge, ``int64`` ``[m]``; -1 if it is not in the batch.
        col: Row of its destination, ``int64`` ``[m]``.
        edge: Its id, ``int64`` ``[m]``.

    Returns:
        Rows, columns and ids of these, in order of (column, id).
    """
    inside = (row >= 0).nonzero().view(-1)
    row, col, edge = row[inside], col[inside], edge[inside]
    by_edge = edge.argsort()
    order = by_edge[col[by_edge].argsort(stable=True)]
    return row[order], col[order], edge[order]


def swap_directions(sample: Sample) -> Sample:
    """Turn a sample of the reversed graph back: ``row`` is the source and ``col`` the destination.

    With ``sample_direction="backward"`` a sampler expands sources, so that its ``col``, the
    expanded nodes, holds sources. Edges are then grouped by source, and there are no
    destination pointers.
    """
    return dataclasses.replace(sample, row=sample.col, col=sample.row, colptr=None)


def to_bidirectional(sample: Sample) -> Sample:
    """Add the opposite of every sampled edge, each pair of nodes once.

    The same edges as PyG's ``SamplerOutput.to_bidirectional``, but in a defined order and
    with a defined edge id. In a homogeneous graph the smallest edge id among the parallel and
    opposite edges of a pair survives, and edges are sorted by (destination, edge id, source).
    In a heterogeneous graph an edge type is joined with its reverse: the type named
    ``rev_<relation>`` between the same node types, else, if there is exactly one edge type the
    other way, that one; between nodes of one type without such a name, itself. Edge ids
    are dropped (``None``), and edges are sorted by (destination, source).

    The opposite of an edge into a repeated seed comes from its first row, as every edge that
    comes from a seed does, so that nobody hears a neighbour twice.

    The numbers of nodes and edges per hop are dropped, as in PyG.

    Warns:
        UserWarning: If an edge type has no reverse type; its edges are left as they are.
    """
    first = _first_rows(sample)
    if None in sample.node:
        edge_id = sample.edge[None]
        assert edge_id is not None
        both = both_directions(sample.row[None], sample.col[None], edge_id, first[None])
        joined: dict[EdgeType, tuple[Tensor, Tensor, Tensor | None]] = {None: both}
    else:
        joined = _joined_with_reverse(sample.row, sample.col, first)
    row, col, edge = dict(sample.row), dict(sample.col), dict(sample.edge)
    colptr = dict(sample.colptr or {})
    for edge_type, (source, destination, edge_id) in joined.items():
        row[edge_type], col[edge_type], edge[edge_type] = source, destination, edge_id
        node_type = None if edge_type is None else edge_type[2]
        colptr[edge_type] = _pointers(destination, sample.node[node_type].numel())
    return dataclasses.replace(
        sample,
        row=row,
        col=col,
        edge=edge,
        colptr=colptr if len(colptr) == len(row) else None,
        num_sampled_nodes=None,
        num_sampled_edges=None,
    )


def _joined_with_reverse(
    row: Mapping[EdgeType, Tensor],
    col: Mapping[EdgeType, Tensor],
    first: Mapping[NodeType, Tensor],
) -> dict[EdgeType, tuple[Tensor, Tensor, Tensor | None]]:
    out: dict[EdgeType, tuple[Tensor, Tensor, Tensor | None]] = {}
    for edge_type in row:
        assert edge_type is not None
        source, relation, destination = edge_type
        if relation.startswith("rev_"):
            continue
        named: EdgeType = (destination, f"rev_{relation}", source)
        opposite = [key for key in row if key and (key[0], key[2]) == (destination, source)]
        if named in row:
            reverse = named
        elif source == destination:
            reverse = edge_type
        elif len(opposite) == 1:
            reverse = opposite[0]
        else:
            warnings.warn(
                f"subgraph_type='bidirectional': edge type {edge_type} has no reverse edge type, "
                f"so its edges stay as they were sampled; name the reverse type {named}",
                stacklevel=2,
            )
            continue
        opposite_row = first[source][col[reverse].long()]
        out[edge_type] = _union(row[edge_type], col[edge_type], opposite_row, row[reverse])
        if reverse == named:
            opposite_row = first[destination][col[edge_type].long()]
            out[named] = _union(row[named], col[named], opposite_row, row[edge_type])
    return out


def _first_rows(sample: Sample) -> dict[NodeType, Tensor]:
    """For every row the first one of the same node (of the same seed, if disjoint)."""
    out = {}
    for node_type, node in sample.node.items():
        identity = node.long()
        if sample.batch is not None and node.numel():
            identity = sample.batch[node_type] * (int(node.max()) + 1) + identity
        out[node_type] = first_places(identity)
    return out


def _union(row: Tensor, col: Tensor, row2: Tensor, col2: Tensor) -> tuple[Tensor, Tensor, None]:
    """The distinct edges of two lists, sorted by (destination, source)."""
    source, destination = torch.cat([row, row2]), torch.cat([col, col2])
    size = int(source.max()) + 1 if source.numel() else 1
    pair = torch.unique(destination.long() * size + source)
    return (pair % size).to(row.dtype), (pair // size).to(row.dtype), None


def _pointers(destination: Tensor, num_nodes: int) -> Tensor:
    """The pointers of a sorted list of destinations, ``[num_nodes + 1]``."""
    count = torch.bincount(destination, minlength=num_nodes)
    return torch.cat([count.new_zeros(1), count.cumsum(0)])
