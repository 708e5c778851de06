"""Partitioning by random walks, which map nodes to points that are clustered."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.ops import keys
from pyg_scale.ops.neighbor_sum import neighbor_sum
from pyg_scale.ops.random_walk import random_walk
from pyg_scale.ops.refine_partition import refine_partition
from pyg_scale.partitioner.balanced_clusters import balanced_clusters
from pyg_scale.partitioner.base import (
    Partitioner,
    PartitionGraph,
    check_count,
    check_imbalance,
)
from pyg_scale.partitioner.bisection import least_of_parts


class RandomWalkPartitioner(Partitioner):
    """Parts that random walks seldom leave.

    The walks from each node give it a point (:mod:`pyg_scale.partitioner.random_walk`). Points
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
        for name, value in counts.items():
            check_count(name, value)
        check_count("passes", passes, least=0)
        check_imbalance(max_imbalance)
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


_CHUNK = 1 << 16  # nodes whose walks are in memory at a time


def visits(
    indptr: Tensor, indices: Tensor, walks: int, length: int, key: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes visited by walks from each node, and their shares of the steps.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, ascending within a node.
        walks: Number of walks from each node.
        length: Number of steps of each walk.
        key: Key of all draws.

    Returns:
        ``indptr`` (``int64``), ``indices`` (``int64``, ascending within a node) and ``share``
        (``float64``, sum 1 for each node) of a sparse matrix.
    """
    num_nodes = indptr.numel() - 1
    counts, columns, shares = [torch.zeros(1, dtype=torch.int64)], [], []
    with tqdm(total=num_nodes, desc="Walking", unit=" nodes", disable=None, delay=1) as bar:
        for begin in range(0, num_nodes, _CHUNK):
            nodes = torch.arange(begin, min(num_nodes, begin + _CHUNK))
            number = (nodes.view(-1, 1) * walks + torch.arange(walks)).view(-1)
            start = nodes.repeat_interleave(walks)
            found = random_walk(indptr, indices, start, length, walk=number, key=key).node
            seen = found[:, 1:].reshape(nodes.numel(), walks * length).sort(dim=1).values
            first = torch.ones_like(seen, dtype=torch.bool)
            first[:, 1:] = seen[:, 1:] != seen[:, :-1]
            at = first.view(-1).nonzero().view(-1)
            times = torch.diff(at, append=torch.tensor([seen.numel()]))
            counts.append(first.sum(1))
            columns.append(seen.view(-1)[at])
            shares.append(times.to(torch.float64) / (walks * length))
            bar.update(nodes.numel())
    return torch.cat(counts).cumsum(0), torch.cat(columns), torch.cat(shares)


def embed(
    indptr: Tensor,
    indices: Tensor,
    *,
    walks: int,
    length: int,
    dim: int,
    rounds: int,
    key: int,
) -> np.ndarray:
    """Give every node of an undirected graph a point on the unit sphere.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, ascending within a node.
        walks: Number of walks from each node.
        length: Number of steps of each walk.
        dim: Number of dimensions.
        rounds: Number of times that each point is replaced by the mean of those that its walks
            visit.
        key: Key of all draws.

    Returns:
        ``float64`` ``[num_nodes, dim]``.
    """
    num_nodes = indptr.numel() - 1
    seen, where, share = visits(indptr, indices, walks, length, keys.fold(key, 0))
    word = keys.fold_tensor(keys.fold(key, 1), torch.arange(num_nodes * dim))
    x = ((word >> 63) * 2 + 1).to(torch.float64).view(num_nodes, dim)
    for _ in tqdm(range(rounds), desc="Smoothing", disable=None, delay=1):
        x = neighbor_sum(seen, where, x, weights=share)
        # The common component of all nodes is useless, and would soon dominate.
        points = x.numpy()
        points = points - points.sum(0) / num_nodes
        x = torch.from_numpy(points / max(np.abs(points).max(), 1e-300))
    points = x.numpy()
    length_of = np.sqrt((points * points).sum(1, keepdims=True))
    return points / np.maximum(length_of, 1e-300)
