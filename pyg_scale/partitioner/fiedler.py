"""The Fiedler vector of a graph, which orders its nodes for a cut in two.

It is the eigenvector of the second smallest eigenvalue of the normalised Laplacian (Fiedler, Czech.
Math. J. 1973; Shi and Malik: "Normalized cuts and image segmentation", PAMI 2000), computed as in
Barnard and Simon ("Fast multilevel implementation of recursive spectral bisection", Concurrency
1994): first for a much smaller graph, whose vector is then the start of some steps of Lanczos'
method on the next larger one. No tensor is as large as the square of the number of nodes.

All sums are in a fixed order, so that the result is the same for any number of threads.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from pyg_scale.ops import keys
from pyg_scale.ops.neighbor_sum import neighbor_sum
from pyg_scale.partitioner.coarsening import Level, coarsen

_SMALLEST = 100  # nodes of the first graph
_STEPS = 20  # steps of Lanczos before a restart
_NEGLIGIBLE = 1e-12


def fiedler_vector(
    level: Level, key: int, *, products: int = 60, tolerance: float = 1e-3
) -> Tensor:
    """Approximate the Fiedler vector of a connected graph.

    Args:
        level: A connected graph of at least two nodes; its ``weights`` are ignored.
        key: Key of the first start vector.
        products: Largest number of products with the matrix of each level.
        tolerance: A level ends when the length of the residual is less than this times the
            eigenvalue.

    Returns:
        ``float64`` ``[num_nodes]``, divided by the roots of the degrees as for a normalised cut.
        The entry of largest magnitude is positive.
    """
    one = torch.ones(level.num_nodes, 1, dtype=torch.int64)
    plain = Level(level.indptr, level.indices, one, level.edge_weights)
    limit = torch.tensor([max(2, level.num_nodes // (_SMALLEST // 2))])
    levels = coarsen(plain, _SMALLEST, limit, key, rounds=1)
    volume = _volumes(levels)
    size = levels[-1].num_nodes
    bits = keys.fold_tensor(key, torch.arange(size)) >> 33
    x = bits.to(torch.float64).numpy()
    for number in reversed(range(len(levels))):
        here = levels[number]
        if here.cluster is not None:
            x = x[here.cluster.numpy()]
        x = _largest(_Walk(here, volume[number]), x, products, tolerance)
    if x[np.argmax(np.abs(x))] < 0:
        x = -x
    return torch.from_numpy(x)


def _volumes(levels: list[Level]) -> list[np.ndarray]:
    """For each node of a level, the sum of the degrees of its nodes in the finest graph."""
    finest = levels[0]
    degree = finest.indptr.diff().to(torch.float64)
    if finest.edge_weights is not None:
        degree = _degree(finest)
    out = [degree]
    for level, smaller in itertools.pairwise(levels):
        assert level.cluster is not None
        out.append(torch.zeros(smaller.num_nodes, dtype=torch.float64))
        out[-1].index_add_(0, level.cluster, out[-2])
    return [volume.numpy() for volume in out]


def _degree(level: Level) -> Tensor:
    ones = torch.ones(level.num_nodes, dtype=torch.float64)
    weights = None if level.edge_weights is None else level.edge_weights.to(torch.float64)
    return neighbor_sum(level.indptr, level.indices, ones, weights=weights)


class _Walk:
    """The random walk on a level, as a symmetric matrix: identity minus normalised Laplacian."""

    def __init__(self, level: Level, volume: np.ndarray) -> None:
        self.level = level
        self.root = np.sqrt(volume)
        weights = level.edge_weights
        self.weights = None if weights is None else weights.to(torch.float64)
        self.inside = 1 - _degree(level).numpy() / volume  # edges inside each node

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        scaled = torch.from_numpy(x / self.root)
        summed = neighbor_sum(self.level.indptr, self.level.indices, scaled, weights=self.weights)
        return summed.numpy() / self.root + self.inside * x


def _largest(matrix: _Walk, x: np.ndarray, products: int, tolerance: float) -> np.ndarray:
    """The scaled eigenvector of the second largest eigenvalue (that of the largest is known)."""
    trivial = matrix.root / _length(matrix.root)
    x = _without(x * matrix.root, [trivial])
    if _length(x) < _NEGLIGIBLE:  # the start vector is useless: take any other
        x = _without(np.arange(matrix.root.size, dtype=np.float64), [trivial])
    left = products
    while left > 0:
        basis, diagonal, beside = [x / _length(x)], [], []
        for _ in range(min(_STEPS, left)):
            y = matrix @ basis[-1]
            diagonal.append(_dot(y, basis[-1]))
            y = _without(_without(y, [trivial, *basis]), [trivial, *basis])
            beside.append(_length(y))
            if beside[-1] < _NEGLIGIBLE or len(basis) >= matrix.root.size - 1:
                break
            basis.append(y / beside[-1])
        left -= len(diagonal)
        small = np.diag(diagonal) + np.diag(beside[: len(diagonal) - 1], 1)
        values, vectors = np.linalg.eigh(small, UPLO="U")
        best = vectors[:, -1]
        x = np.zeros_like(x)
        for coefficient, vector in zip(best, basis):
            x = x + coefficient * vector
        x = _without(x, [trivial])
        if beside[-1] * abs(best[-1]) <= max(tolerance * (1 - values[-1]), _NEGLIGIBLE):
            break
    return x / matrix.root


def _without(x: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    """The component of ``x`` that is orthogonal to orthogonal vectors."""
    for other in others:
        x = x - _dot(x, other) * other
    return x


def _dot(x: np.ndarray, y: np.ndarray) -> float:
    return float((x * y).sum())  # not np.dot, as BLAS has its own order of sums


def _length(x: np.ndarray) -> float:
    return float(np.sqrt(_dot(x, x)))
