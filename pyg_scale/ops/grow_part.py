"""A piece of a graph of a given size with few edges to the rest, grown from a node.

Greedy graph growing (Karypis and Kumar: "A fast and high quality multilevel scheme for partitioning
irregular graphs", SIAM J. Sci. Comput. 1998, section 4.2):

* The *gain* of a node is the weight of its edges into the piece less that of its other edges.
* The neighbour of the piece with the largest gain is added; ties go to the smaller
  ``fold(key, node) >> 1``, then to the smaller node. If there is no neighbour (left), the first
  node of ``order`` that was not considered yet is added.
* Growth ends when the piece weighs ``target``. A node is left out for good if the piece would
  exceed its target with it by more than it lacks without it.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from pyg_scale.ops import keys, library


def grow_part(
    indptr: Tensor,
    indices: Tensor,
    size: Tensor,
    order: Tensor,
    target: int,
    *,
    edge_weights: Tensor | None = None,
    key: int = 0,
) -> Tensor:
    """Grow a piece of an undirected graph from the first node of ``order``.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, each edge in both directions.
        size: ``int64`` ``[num_nodes]``, the weight of each node, at least 0, together less than
            ``2**59``.
        order: ``int64`` ``[num_nodes]``, the nodes in the order in which growth starts from them.
        target: Weight that the piece should have.
        edge_weights: ``int64`` ``[num_entries]``, the same in both directions, at least 0, together
            less than ``2**59``. ``None``: 1 each.
        key: Key of the order among equal gains (:mod:`pyg_scale.ops.keys`).

    Returns:
        ``bool`` ``[num_nodes]``: True for nodes in the piece.
    """
    none = torch.empty(0, dtype=torch.int64)
    path = torch.ops.pyg_scale.grow_part if library.compiled() else grow_part_plain
    weights = none if edge_weights is None else edge_weights
    return path(indptr, indices, weights, size, order, target, keys.to_signed(key))


def grow_part_plain(
    indptr: Tensor,
    indices: Tensor,
    edge_weights: Tensor,
    size: Tensor,
    order: Tensor,
    target: int,
    key: int,
) -> Tensor:
    """The meaning of the compiled op, with its arguments (``edge_weights`` empty: 1 each)."""
    begin, neighbor = indptr.tolist(), indices.tolist()
    weight = edge_weights.tolist() or [1] * len(neighbor)
    sizes, starts = size.tolist(), iter(order.tolist())
    grown, skipped = [False] * len(sizes), [False] * len(sizes)
    gain = [-sum(weight[begin[v] : begin[v + 1]]) for v in range(len(sizes))]
    queue: list[tuple[int, int, int]] = []

    def push(v: int) -> None:
        heapq.heappush(queue, (-gain[v], keys.fold(key, v) >> 1, v))

    total = 0
    while total < target:
        if not queue:
            start = next((v for v in starts if not grown[v] and not skipped[v]), None)
            if start is None:
                break
            push(start)
        negative, _, v = heapq.heappop(queue)
        if grown[v] or skipped[v] or gain[v] != -negative:
            continue
        if total + sizes[v] - target > target - total:
            skipped[v] = True
            continue
        grown[v] = True
        total += sizes[v]
        for e in range(begin[v], begin[v + 1]):
            u = neighbor[e]
            gain[u] += 2 * weight[e]
            if not grown[u] and not skipped[u]:
                push(u)
    return torch.tensor(grown, dtype=torch.bool)
