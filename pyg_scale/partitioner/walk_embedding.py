"""Nodes as points, which are close if random walks from the nodes meet.

Walks are as in DeepWalk (Perozzi, Al-Rfou, Skiena, KDD 2014); instead of training, random vectors
are smoothed along them, as in FastRP (Chen, Sultan, Tian, Chen, Skiena: "Fast and accurate network
embeddings via very sparse random projection", CIKM 2019).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.ops import keys
from pyg_scale.ops.neighbor_sum import neighbor_sum
from pyg_scale.ops.random_walk import random_walk

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
            found = random_walk(indptr, indices, start, length, walk=number, key=key)
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
