"""The edges of several relations, grouped by relation and by the node at one end."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops.adjacency import (
    Adjacency,
    Transpose,
    from_edge_index,
    rows_of,
    sorted_by_key,
)


class Relations(NamedTuple):
    """Edges grouped by relation, then by destination. A row is a pair of both that has edges."""

    rows: Adjacency
    """From source nodes to rows; the rows of a relation are consecutive."""
    row_counts: list[int]
    """Number of rows of each relation."""
    destinations: Adjacency
    """From rows to destination nodes."""
    edge_type: Tensor
    """The relation of each edge, in the order of ``rows``."""


def group_relations(graph: Adjacency, edge_type: Tensor, num_relations: int) -> Relations:
    """Group edges by relation and destination.

    There are never more rows than edges, however many relations and nodes there are.

    Args:
        graph: The edges.
        edge_type: ``[num_edges]``, by edge id, from 0 to ``num_relations - 1``.
        num_relations: Number of relations.
    """
    relation = edge_type if graph.edge_id is None else edge_type[graph.edge_id.to(torch.int64)]
    # Positions are already grouped by destination.
    order = sorted_by_key(relation, num_relations)[1]
    relation = relation[order]
    dst = rows_of(graph.indptr, graph.num_edges)[order]
    new = torch.ones_like(dst, dtype=torch.bool)
    new[1:] = (dst[1:] != dst[:-1]) | (relation[1:] != relation[:-1])
    first = new.nonzero().view(-1)
    indptr = torch.cat([first, first.new_tensor([dst.numel()])])
    rows = Adjacency.of_checked(indptr, graph.indices[order], graph.num_src)
    dst_of_row = dst[first]
    pointers, by_dst = sorted_by_key(dst_of_row, graph.num_dst)
    row_counts = torch.bincount(relation[first], minlength=num_relations).tolist()
    return Relations(
        rows, row_counts, Adjacency.of_checked(pointers, by_dst, first.numel()), relation
    )


def rows_of_relations(graph: Adjacency, edge_type: Tensor, num_relations: int) -> Adjacency:
    """The edges from source nodes to a row for each destination and relation.

    The rows of a destination lie side by side, one for each relation, with edges or without. Ids of
    edges are positions of ``graph``.

    Args:
        graph: The edges.
        edge_type: ``[num_edges]``, by edge id, from 0 to ``num_relations - 1``.
        num_relations: Number of relations.
    """
    relation = edge_type if graph.edge_id is None else edge_type[graph.edge_id.to(torch.int64)]
    row = rows_of(graph.indptr, graph.num_edges) * num_relations + relation
    num_rows = graph.num_dst * num_relations
    edges = torch.stack([graph.indices.to(torch.int64), row])
    return from_edge_index(edges, graph.num_src, num_rows)


class Pairs(NamedTuple):
    """The pairs of a relation and of a node at one end of its edges, relation by relation."""

    nodes: Adjacency
    """From nodes to pairs, of which each has one edge."""
    counts: list[int]
    """Number of pairs of each relation."""
    edges: Adjacency
    """The edges, with the pairs as their sources."""
    edge_index: Tensor
    """``int64`` ``[2, num_edges]``, by edge id: the pair and the destination of each edge."""


def group_pairs(
    graph: Adjacency, edge_type: Tensor, num_relations: int, of_sources: bool
) -> Pairs | None:
    """Find the pairs of relations and nodes that have edges: never more than edges.

    Args:
        graph: The edges.
        edge_type: ``int64`` or ``int32`` ``[num_edges]``, by edge id.
        num_relations: Number of relations.
        of_sources: True for pairs with the sources of edges, else with their destinations.

    Returns:
        The pairs; ``None`` if a type is not between 0 and ``num_relations - 1``.
    """
    size = graph.num_edges
    low, high = torch.aminmax(edge_type)
    if low < 0 or high >= num_relations:
        return None
    id_of = graph.edge_id
    relation = edge_type if id_of is None else edge_type[id_of.to(torch.int64)]
    destination = rows_of(graph.indptr, size)
    node = graph.indices.to(torch.int64) if of_sources else destination
    position = graph.transpose().position.to(torch.int64) if of_sources else None  # by node
    by_node = relation if position is None else relation[position]
    order = sorted_by_key(by_node, num_relations)[1]
    order = order if position is None else position[order]
    relation, node = relation[order], node[order]
    new = torch.ones_like(relation, dtype=torch.bool)
    new[1:] = (node[1:] != node[:-1]) | (relation[1:] != relation[:-1])
    first = new.nonzero().view(-1)
    num_pairs = first.numel()
    pair = torch.empty_like(order)
    pair[order] = new.cumsum(0) - 1
    kind = graph.indices.dtype
    by_pair = Transpose(
        torch.cat([first, first.new_tensor([size])]), destination[order].to(kind), order
    )
    edges = Adjacency.of_checked(graph.indptr, pair.to(kind), num_pairs, id_of, by_pair)
    ends = torch.stack([pair, destination])
    if id_of is not None:
        ends = torch.empty_like(ends).index_copy_(1, id_of.to(torch.int64), ends)
    pointers = torch.arange(num_pairs + 1, device=graph.device)
    num_nodes = graph.num_src if of_sources else graph.num_dst
    nodes = Adjacency.of_checked(pointers, node[first].to(kind), num_nodes)
    counts = torch.bincount(relation[first], minlength=num_relations).tolist()
    return Pairs(nodes, counts, edges, ends)
