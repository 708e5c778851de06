"""Partitioning by random walks, which map nodes to points that are clustered."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import keys
from pyg_scale.ops.refine_partition import refine_partition
from pyg_scale.partitioner.balanced_clusters import balanced_clusters
from pyg_scale.partitioner.base import Partitioner, PartitionGraph
from pyg_scale.partitioner.bisection import least_of_parts
from pyg_scale.partitioner.walk_embedding import embed


class RandomWalkPartitioner(Partitioner):
    """Parts that random walks seldom leave.

    The walks from each node give it a point (:mod:`pyg_scale.partitioner.walk_embedding`). Points
    are clustered with capacities (:mod:`pyg_scale.partitioner.balanced_clusters`). At last single
    nodes move, to complete the balance and to cut fewer edges. The method finds planted
    communities; without such communities it cuts more edges than ``multilevel``. It takes about
    ``40 * (walks * length + dim)`` bytes per node.

    Args:
        max_imbalance: A part may hold this many times its fair share.
        walks: Number of walks from each node.
        length: Number of steps of each walk.
        dim: Number of dimensions of the points.
        rounds: Number of times that each point is replaced by the mean of those that its walks
            visit.
        passes: Number of passes of refinement at the end; 0 only balances.

    Raises:
        ValueError: If an option is out of range.
    """

    minimises_cut = True

    def __init__(
        self,
        *,
        max_imbalance: float = 1.1,
        walks: int = 10,
        length: int = 6,
        dim: int = 64,
        rounds: int = 4,
        passes: int = 8,
    ) -> None:
        counts = {"walks": walks, "length": length, "dim": dim, "rounds": rounds}
        for name, value in {**counts, "passes": passes}.items():
            least = 0 if name == "passes" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a number of at least {least} (got {value!r})")
        if not max_imbalance >= 1:
            raise ValueError(f"max_imbalance must be at least 1 (got {max_imbalance!r})")
        self.max_imbalance = max_imbalance
        self.walks = walks
        self.length = length
        self.dim = dim
        self.rounds = rounds
        self.passes = passes

    def assign(self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor) -> Tensor:
        """See :meth:`pyg_scale.partitioner.base.Partitioner.assign`."""
        points = embed(
            graph.indptr,
            graph.indices,
            walks=self.walks,
            length=self.length,
            dim=self.dim,
            rounds=self.rounds,
            key=keys.fold(0, seed, keys.RANDOM_WALK),
        )
        capacity = self.capacity(graph, shares)
        key = keys.fold(0, seed, keys.CLUSTERING)
        return refine_partition(
            graph.indptr,
            graph.indices,
            balanced_clusters(points, graph.weights, capacity, key).to(torch.int32),
            capacity,
            node_weights=graph.weights,
            minimum=least_of_parts(graph.weights, shares, self.max_imbalance),
            passes=self.passes,
            key=key,
        )
