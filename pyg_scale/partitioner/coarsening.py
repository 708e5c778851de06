"""Levels of ever smaller graphs, for methods that partition the smallest one first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_scale.ops import keys
from pyg_scale.ops.cluster_nodes import cluster_nodes
from pyg_scale.ops.contract_graph import contract_graph
from pyg_scale.ops.csc import expand_pointers

_ENOUGH = 0.95  # a level with more than this share of the nodes is the last


@dataclass(frozen=True)
class Level:
    """An undirected graph with weights.

    Attributes:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``.
        weights: ``int64`` ``[num_nodes, num_constraints]``.
        edge_weights: ``int64`` ``[num_entries]``; ``None``: 1 each.
        cluster: ``int64`` ``[num_nodes]``, the node of the next level that each node belongs to;
            ``None`` in the last level.
    """

    indptr: Tensor
    indices: Tensor
    weights: Tensor
    edge_weights: Tensor | None = None
    cluster: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1

    def cut(self, assignment: Tensor) -> int:
        """The weight of the edges between parts."""
        row = expand_pointers(self.indptr, self.indices.numel())
        apart = assignment[row.to(torch.int64)] != assignment[self.indices.to(torch.int64)]
        if self.edge_weights is None:
            return int(apart.sum()) // 2
        return int(self.edge_weights[apart].sum()) // 2

    def induced(self, nodes: Tensor) -> Level:
        """The subgraph of some nodes, ``int64`` ascending, numbered in their order."""
        place = torch.full((self.num_nodes,), -1, dtype=torch.int64)
        place[nodes] = torch.arange(nodes.numel())
        row = place[expand_pointers(self.indptr, self.indices.numel()).to(torch.int64)]
        col = place[self.indices.to(torch.int64)]
        kept = (row >= 0) & (col >= 0)
        degree = torch.bincount(row[kept], minlength=nodes.numel())
        return Level(
            torch.cat([degree.new_zeros(1), degree.cumsum(0)]),
            col[kept].to(torch.int32),
            self.weights[nodes],
            None if self.edge_weights is None else self.edge_weights[kept],
        )


def coarsen(
    level: Level,
    num_nodes: int,
    limit: Tensor,
    key: int,
    *,
    rounds: int,
    group: Tensor | None = None,
) -> list[Level]:
    """Coarsen a graph until it has at most ``num_nodes`` nodes, or hardly gets smaller.

    Args:
        level: The graph.
        num_nodes: Number of nodes at which to stop.
        limit: ``int64`` ``[num_constraints]``, the largest weight of a node made of several.
        key: Key of the order in which nodes choose a cluster.
        rounds: Number of rounds of label propagation for each level.
        group: ``int32`` ``[num_nodes]``: only nodes of the same group are joined.

    Returns:
        The levels, from ``level`` to the smallest graph.
    """
    levels: list[Level] = []
    while level.num_nodes > num_nodes:
        order = _few_edges_first(level.indptr.diff(), keys.fold(key, len(levels)))
        cluster = cluster_nodes(
            level.indptr,
            level.indices,
            level.weights,
            limit,
            order,
            edge_weights=level.edge_weights,
            group=group,
            rounds=rounds,
            key=keys.fold(key, len(levels)),
        )
        size = int(cluster.max()) + 1
        if size > _ENOUGH * level.num_nodes:
            break
        levels.append(replace(level, cluster=cluster))
        weights = level.weights.new_zeros(size, level.weights.size(1))
        weights.index_add_(0, cluster, level.weights)
        indptr, indices, edge_weights = contract_graph(
            level.indptr, level.indices, cluster, size, edge_weights=level.edge_weights
        )
        if group is not None:
            group = group.new_zeros(size).scatter_(0, cluster, group)
        level = Level(indptr, indices, weights, edge_weights)
    return [*levels, level]


def _few_edges_first(degree: Tensor, key: int) -> Tensor:
    """Nodes by order of magnitude of their degree, in random order within each."""
    order = keys.permutation(key, degree.numel())
    magnitude = degree[order].clamp(min=1).to(torch.float64).log2().floor()
    return order[magnitude.argsort(stable=True)]
