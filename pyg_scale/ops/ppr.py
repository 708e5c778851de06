"""Nodes of the largest personalised PageRank, approximated by pushing mass from a seed.

The personalised PageRank of a node for a seed is the probability that a walk from the seed ends
there, if it ends at each step with probability ``alpha``, and at a node without edges for certain.
Andersen, Chung, Lang: "Local graph partitioning using PageRank vectors", FOCS 2006, section 3
(without its lazy steps): mass lies on nodes, at first all of it on the seed, and a node with much
of it keeps a part as its score and pushes the rest to its neighbours.

All numbers are integers, so that every implementation gives the same bits: ``alpha``, ``eps``,
masses and scores are in units of ``2**-62``, and the mass of a seed is 1. A node of degree ``d``
pushes from a mass of ``eps * max(1, d)`` on; the seed always does, once. With mass ``m`` and
``d > 0`` each neighbour gets ``(m - max(1, m * alpha >> 62)) // d``, and the rest becomes score;
without neighbours all does. Nodes push in the order in which they got enough; one that already
waits keeps its place. What is left at the end, less than ``eps * max(1, d)`` at each node, counts
for nothing. So scores are too small, never too large (but for rounding, of ``2**-62 * d`` a push):
where all edges go both ways by less than ``eps * d``, in every graph by what is left in all.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library

_ONE = 1 << 62
LEAST_ALPHA = 2.0**-16
LEAST_EPS = 2.0**-50


class TopNodes(NamedTuple):
    """The nodes of each seed by descending score, equal ones by id.

    Attributes:
        node: ``int64`` ``[num_seeds, num_ranges, k]``, -1 where there are no more.
        score: ``float64`` ``[num_seeds, num_ranges, k]``, 0 where there are no more.
    """

    node: Tensor
    score: Tensor


def ppr(
    indptr: Tensor,
    indices: Tensor,
    seed: Tensor,
    k: int,
    *,
    alpha: float,
    eps: float,
    bounds: Tensor | None = None,
) -> TopNodes:
    """The ``k`` nodes of the largest scores for each seed.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, the nodes to which each node pushes.
        seed: ``int64`` ``[num_seeds]``.
        k: Number of nodes, for each range.
        alpha: The probability that a walk ends, at least ``2**-16`` and less than 1.
        eps: The mass, by degree, that is not pushed, from ``2**-50`` to less than 1.
        bounds: ``int64`` ``[num_ranges + 1]``: the best of nodes ``bounds[0]`` to
            ``bounds[1] - 1`` come first, and so on. ``None``: one range, of all nodes.

    Raises:
        ValueError: If ``alpha``, ``eps`` or ``k`` is out of range, or a seed is not a node.
    """
    if not LEAST_ALPHA <= alpha < 1:
        raise ValueError(
            f"alpha must be at least 2**-16 and less than 1 (got {alpha}): 0.15 ends walks after "
            "6.7 nodes on average; with 0 they never end, with 1 at the seed"
        )
    if not LEAST_EPS <= eps < 1:
        raise ValueError(
            f"eps must be from 2**-50 to less than 1 (got {eps}): 1e-4 is usual; the smaller, the "
            "more exact, and the longer it takes"
        )
    if k < 1:
        raise ValueError(f"k must be at least 1 (got {k})")
    whole, least = math.floor(alpha * _ONE), math.floor(eps * _ONE)
    if bounds is None:
        bounds = torch.tensor([0, indptr.numel() - 1])
    if library.compiled():
        node, score = torch.ops.pyg_scale.ppr(
            indptr, indices, seed.contiguous(), bounds, whole, least, k, library.num_threads()
        )
    else:
        node, score = ppr_plain(indptr, indices, seed, bounds, whole, least, k)
    return TopNodes(node, score.to(torch.float64) / _ONE)


def ppr_plain(
    indptr: Tensor, indices: Tensor, seed: Tensor, bounds: Tensor, alpha: int, eps: int, k: int
) -> tuple[Tensor, Tensor]:
    """The meaning of the compiled op, with integers for ``alpha``, ``eps`` and scores."""
    begin, limits = indptr.tolist(), bounds.tolist()
    shape = (seed.numel(), len(limits) - 1, k)
    node, score = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for i, start in enumerate(seed.tolist()):
        found = _push(begin, indices, start, alpha, eps)
        for r, (low, high) in enumerate(itertools.pairwise(limits)):
            own = [(-s, v) for v, s in found.items() if s > 0 and low <= v < high]
            for j, (s, v) in enumerate(sorted(own)[:k]):
                node[i, r, j], score[i, r, j] = v, -s
    return node, score


def _push(begin: list[int], indices: Tensor, seed: int, alpha: int, eps: int) -> dict[int, int]:
    """The score of each node that has one."""
    score: dict[int, int] = {}
    mass, turn, waits = {seed: _ONE}, [seed], {seed}
    for node in turn:  # it grows
        waits.discard(node)
        own = mass.pop(node)
        degree = begin[node + 1] - begin[node]
        share = (own - max(1, own * alpha >> 62)) // degree if degree else 0
        score[node] = score.get(node, 0) + own - share * degree
        if not share:
            continue
        for v in indices[begin[node] : begin[node + 1]].tolist():
            mass[v] = mass.get(v, 0) + share
            if mass[v] >= eps * max(1, begin[v + 1] - begin[v]) and v not in waits:
                waits.add(v)
                turn.append(v)
    return score
