"""Random walks: from a node to a neighbour, to one of its neighbours, and so on.

Step ``s`` of walk ``w``, at node ``v``, is drawn with the key ``D = fold(key, w, s, v)``
(:mod:`pyg_scale.ops.keys`). A walk is thus a function of integers, and does not depend on the other
walks. ``Q`` is the number of edges of ``v``, or the sum of their weights as integers; edge number
``t`` is the one at position ``t``, or the first one at which the running sum of weights exceeds
``t``. A walk stays where ``Q = 0``.

* **First order**: edge number ``bounded(D, 0, Q)``.
* **Second order**, as in Grover and Leskovec: "node2vec: Scalable feature learning for networks",
  KDD 2016, from the second step on. Let ``u`` be the node before ``v``. The odds of an edge to
  ``x`` are ``1 / p`` if ``x = u``, else 1 if there is an edge from ``u`` to ``x``, else ``1 / q``;
  as integers, ``max(1, floor(odds / largest odds * 2**62))`` in float64. If ``v`` has one edge, it
  is taken. Else attempt ``a = 0, 1, ...`` draws edge number ``bounded(D, 2 * a, Q)`` and takes it
  if ``draw(D, 2 * a + 1) >> 2`` is less than its odds. There are as many attempts as ``v`` has
  edges, at least 32. Then follows an exact draw, so that a step takes a time in proportion to the
  degree at most, whatever ``p`` and ``q`` are.
* **The exact draw** after ``n`` attempts: let ``W`` be the sum of the weights (the number) of the
  edges back to ``u``, of those to neighbours of ``u``, and of the others, and ``M`` each of these
  times its odds. Shift the ``M`` to the right by as few bits as make their sum less than
  ``2**62``; what was not 0 stays at least 1. ``bounded(D, 2 * n, sum of M)`` falls into one of the
  three, in this order, and ``bounded(D, 2 * n + 1, W)`` is the number of the edge among its edges.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import keys, library
from pyg_scale.ops.csc import expand_pointers

_ATTEMPTS = 32
_BITS = 62


class Odds(NamedTuple):
    """The odds of an edge, of 2**62, by where it leads: to the node before, near it, elsewhere."""

    back: int
    near: int
    far: int


class Walks(NamedTuple):
    """Walks along edges.

    Attributes:
        node: ``int64`` ``[num_walks, length + 1]``, the nodes of each walk, its start first.
        position: ``int64`` ``[num_walks, length]``, the position of the edge of each step, -1 where
            the walk stayed; or ``None``.
    """

    node: Tensor
    position: Tensor | None


def odds_of(p: float, q: float) -> Odds | None:
    """The odds of node2vec; ``None`` if all are equal.

    Raises:
        ValueError: If ``p`` or ``q`` is not a positive number, or so small or large that its
            inverse is not.
    """
    for name, value in (("p", p), ("q", q)):
        if not (value > 0 and math.isfinite(value) and 0 < 1 / value < math.inf):
            raise ValueError(f"{name} must be a positive, finite number (got {value})")
    if p == q == 1:
        return None
    weight = (1 / float(p), 1.0, 1 / float(q))
    return Odds(*(max(1, math.floor(each / max(weight) * 2.0**_BITS)) for each in weight))


def random_walk(
    indptr: Tensor,
    indices: Tensor,
    start: Tensor,
    length: int,
    *,
    walk: Tensor | None = None,
    key: int = 0,
    weight_prefix: Tensor | None = None,
    p: float = 1.0,
    q: float = 1.0,
    is_sorted: bool = False,
    return_position: bool = False,
) -> Walks:
    """Walk along edges: all equally likely, in proportion to weights, or as node2vec does.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, the end of each edge. Walks depend on the
            order within a node. May be strided.
        start: ``int64`` ``[num_walks]``, the first node of each walk.
        length: Number of steps.
        walk: ``int64`` ``[num_walks]``, the number of each walk. ``None``: its position.
        key: Key of all draws.
        weight_prefix: ``int64`` ``[num_entries]``, the running sums of the weights of each node
            (:func:`pyg_scale.ops.csc.weight_prefix`). ``None``: all edges are equally likely.
        p: The larger, the less often a walk goes back where it came from.
        q: The larger, the more a walk stays near where it came from.
        is_sorted: True declares ``indices`` to ascend within each node, so that edges are found by
            bisection where ``q`` needs it. It is not checked.
        return_position: If True, return the positions of the edges, too.

    Raises:
        ValueError: If ``start`` or ``walk`` is of another type or shape, ``length`` negative, or
            ``p`` or ``q`` not positive.
    """
    given = (start,) if walk is None else (start, walk)
    if start.dim() != 1 or any(t.dtype != torch.int64 or t.shape != start.shape for t in given):
        has = ", ".join(f"{t.dtype} {list(t.shape)}" for t in given)
        raise ValueError(f"start and walk must be int64 [n] of the same length (got {has})")
    if length < 0:
        raise ValueError(f"length must not be negative (got {length})")
    odds = odds_of(p, q)
    if not library.compiled():
        walk = torch.arange(start.numel()) if walk is None else walk
        found = random_walk_plain(indptr, indices, weight_prefix, start, walk, length, key, odds)
        return found if return_position else Walks(found.node, None)
    ops, number = torch.ops.pyg_scale, None if walk is None else walk.contiguous()
    last = (start.contiguous(), number, length, keys.to_signed(key))
    how = (return_position, library.num_threads())
    if odds is None:
        node, position = ops.random_walk(indptr, indices, weight_prefix, *last, *how)
    else:
        sorted_indices = indices if is_sorted else None
        graph = (indptr, indices, weight_prefix, sorted_indices)
        node, position = ops.random_walk_biased(*graph, *last, *odds, *how)
    return Walks(node, position if return_position else None)


def random_walk_plain(
    indptr: Tensor,
    indices: Tensor,
    weight_prefix: Tensor | None,
    start: Tensor,
    walk: Tensor,
    length: int,
    key: int,
    odds: Odds | None = None,
) -> Walks:
    """The meaning of the compiled ops."""
    graph = _Graph(indptr, indices, weight_prefix)
    base = keys.fold_tensor(key, walk)
    nodes, positions = [start], []
    for step in range(length):
        node = nodes[-1]
        word = keys.fold_tensor(keys.fold_tensor(base, torch.tensor(step)), node)
        if odds is None or step == 0:
            position = graph.drawn(word, 0, node)
        else:
            position = _second_order(graph, word, node, nodes[-2], odds)
        positions.append(torch.where(graph.total(node) > 0, position, -1))
        nodes.append(graph.ends(node, positions[-1]))
    taken = torch.stack(positions, dim=1) if positions else start.new_empty(start.numel(), 0)
    return Walks(torch.stack(nodes, dim=1), taken)


class _Graph:
    """Edges by node, as the plain meaning reads them."""

    def __init__(self, indptr: Tensor, indices: Tensor, prefix: Tensor | None) -> None:
        self.indptr, self.indices = indptr, indices
        self.num_nodes = indptr.numel() - 1
        source = expand_pointers(indptr, indices.numel()).to(torch.int64)
        self.weight = torch.ones_like(source)
        if prefix is not None:
            self.weight = prefix - torch.cat([prefix.new_zeros(1), prefix])[:-1]
            first = indptr[:-1][indptr.diff() > 0]
            self.weight[first] = prefix[first]
        self.until = self.weight.cumsum(0)  # over all nodes: one bisection finds any edge
        self.pairs = torch.unique(source * self.num_nodes + indices.to(torch.int64))

    def before(self, node: Tensor) -> Tensor:
        """The sum of the weights of all edges before those of each node."""
        return torch.cat([self.until.new_zeros(1), self.until])[self.indptr[node]]

    def total(self, node: Tensor) -> Tensor:
        """The sum of the weights of the edges of each node."""
        return self.before(node + 1) - self.before(node)

    def drawn(self, word: Tensor, index: int, node: Tensor) -> Tensor:
        """The position of an edge of each node, drawn by a word; any where there is none."""
        number = keys.bounded(word, index, self.total(node).clamp(min=1))
        return torch.searchsorted(self.until, self.before(node) + number, right=True)

    def ends(self, node: Tensor, position: Tensor) -> Tensor:
        """The nodes where edges lead, or ``node`` where the position is -1."""
        moves = position >= 0
        out = node.clone()
        out[moves] = self.indices[position[moves]].to(torch.int64)
        return out

    def odds(self, before: Tensor, end: Tensor, odds: Odds) -> Tensor:
        """The odds of going to ``end`` where ``before`` is the node before."""
        near = torch.isin(before * self.num_nodes + end, self.pairs)
        of = torch.where(near, odds.near, odds.far)
        return torch.where(end == before, odds.back, of)


def _second_order(graph: _Graph, word: Tensor, node: Tensor, before: Tensor, odds: Odds) -> Tensor:
    """The position that each walk takes, any where it stays."""
    degree = graph.indptr[node + 1] - graph.indptr[node]
    out = graph.indptr[node].clone()
    left = ((degree > 1) & (graph.total(node) > 0)).nonzero().view(-1)
    attempts = degree.clamp(min=_ATTEMPTS)
    for attempt in range(int(attempts.max()) if attempts.numel() else 0):
        if not left.numel():
            break
        position = graph.drawn(word[left], 2 * attempt, node[left])
        chance = keys.draw(word[left], 2 * attempt + 1) >> 2 & ((1 << _BITS) - 1)
        end = graph.indices[position].to(torch.int64)
        taken = chance < graph.odds(before[left], end, odds)
        out[left[taken]] = position[taken]
        left = left[~taken]
        last = attempts[left] == attempt + 1
        for i in left[last].tolist():
            out[i] = _exact(graph, word[i], attempt + 1, int(node[i]), int(before[i]), odds)
        left = left[~last]
    return out


def _exact(graph: _Graph, word: Tensor, attempts: int, node: int, before: int, odds: Odds) -> int:
    begin, end = int(graph.indptr[node]), int(graph.indptr[node + 1])
    ends = graph.indices[begin:end].to(torch.int64)
    kind = graph.odds(torch.full_like(ends, before), ends, Odds(0, 1, 2))
    weight = graph.weight[begin:end]
    sums = [int(weight[kind == k].sum()) for k in range(3)]
    mass = [total * of for total, of in zip(sums, odds)]
    shift = max(0, sum(mass).bit_length() - _BITS)
    share = [max(1, each >> shift) if each else 0 for each in mass]
    number = int(keys.bounded(word, 2 * attempts, torch.tensor(sum(share))))
    chosen = 0
    while number >= share[chosen]:
        number -= share[chosen]
        chosen += 1
    number = int(keys.bounded(word, 2 * attempts + 1, torch.tensor(sums[chosen])))
    of_kind = (kind == chosen).nonzero().view(-1)
    at = int(torch.searchsorted(weight[of_kind].cumsum(0), number, right=True))
    return begin + int(of_kind[at])
