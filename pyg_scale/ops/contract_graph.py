"""Contraction: every cluster of nodes becomes one node."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import library
from pyg_scale.ops.csc import expand_pointers


def contract_graph(
    indptr: Tensor,
    indices: Tensor,
    cluster: Tensor,
    num_clusters: int,
    *,
    edge_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make each cluster a node. Edges between the same two clusters become one; weights are added.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, each edge in both directions.
        cluster: ``int64`` ``[num_nodes]``, from 0 to ``num_clusters - 1``.
        num_clusters: At most as many as there are nodes, and less than ``2**31``.
        edge_weights: ``int64`` ``[num_entries]``, the same in both directions, at least 0, together
            less than ``2**59``. ``None``: 1 each.

    Returns:
        ``indptr`` (``int64`` ``[num_clusters + 1]``), ``indices`` (``int32``, ascending within a
        node) and ``edge_weights`` (``int64``) of the smaller graph. It has no self-loops.
    """
    none = torch.empty(0, dtype=torch.int64)
    path = torch.ops.pyg_scale.contract_graph if library.compiled() else contract_graph_plain
    return path(
        indptr, indices, none if edge_weights is None else edge_weights, cluster, num_clusters
    )


def contract_graph_plain(
    indptr: Tensor, indices: Tensor, edge_weights: Tensor, cluster: Tensor, num_clusters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The meaning of the compiled op, with its arguments (``edge_weights`` empty: 1 each)."""
    if edge_weights.numel() == 0:
        edge_weights = torch.ones(indices.numel(), dtype=torch.int64)
    row = cluster[expand_pointers(indptr, indices.numel()).to(torch.int64)]
    col = cluster[indices.to(torch.int64)]
    kept = row != col
    pair, place = torch.unique(row[kept] * num_clusters + col[kept], return_inverse=True)
    weights = torch.zeros(pair.numel(), dtype=torch.int64)
    weights.index_add_(0, place, edge_weights[kept])
    divisor = max(1, num_clusters)
    degree = torch.bincount(pair // divisor, minlength=num_clusters)
    pointers = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    return pointers, (pair % divisor).to(torch.int32), weights
