"""The edges of several relations, grouped by relation and destination."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops.adjacency import Adjacency, from_edge_index, rows_of, sorted_by_key


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
