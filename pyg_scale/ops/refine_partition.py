"""Moves of single nodes between parts, to cut fewer edges and keep parts within bounds.

The method is that of Fiduccia and Mattheyses ("A linear-time heuristic for improving network
partitions", DAC 1982), for many parts at once as in Sanders and Schulz ("Engineering multilevel
graph partitioning algorithms", ESA 2011). It uses integer arithmetic and visits one node after the
other, so that the result depends only on the arguments.

* The *excess* of an assignment is the sum, over parts and columns, of the load of a part above its
  ``capacity`` or below its ``minimum``, times ``max(1, 2**40 // total of the column)``.
* The *gain* of moving a node is the weight of its edges into the new part less that of its edges
  into its own. Of two parts with the same gain, the smaller ``(part + node) % num_parts`` is taken.
* A queue gives the node of the largest gain; ties go to the smaller ``fold(key, node) >> 1``, then
  to the smaller node. If a node's gain is now less than when it was queued (because parts have
  filled up), it is queued again with the new gain. A node that cannot move leaves the queue until a
  neighbour moves.
* **Repair**, up to 8 rounds while there is an excess: only moves that lower the excess, to any
  part. The queue begins with the nodes of parts that exceed their capacity in a column in which the
  node has weight (with all nodes, if a part is below its minimum).
* **A pass**: moves to a part with a neighbour of the node, also of negative gain, that do not raise
  the excess. It ends after ``patience`` moves without a new best cut; the moves after the best cut
  are undone. Passes are repeated until one finds no improvement.
* In a round or a pass a node moves at most once.
"""

from __future__ import annotations

import heapq
import itertools

import torch
from torch import Tensor

from pyg_scale.ops import keys, library

_REPAIR_ROUNDS = 8
_WHOLE = 1 << 40
_ID_TYPES = (torch.int64, torch.int32)


def refine_partition(
    indptr: Tensor,
    indices: Tensor,
    assignment: Tensor,
    capacity: Tensor,
    *,
    node_weights: Tensor | None = None,
    edge_weights: Tensor | None = None,
    minimum: Tensor | None = None,
    passes: int = 8,
    patience: int | None = None,
    key: int = 0,
) -> Tensor:
    """Improve an assignment of nodes to parts.

    Parts that are out of bounds are first brought within them (or as near as single moves that
    lower the excess can). Then the cut is lowered, which never raises the excess: an assignment
    within bounds stays within bounds.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``; the neighbours of node ``v`` are the positions
            ``indptr[v]`` to ``indptr[v + 1] - 1``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, each edge in both directions. May be
            strided.
        assignment: ``int32`` or ``int64`` ``[num_nodes]``, the part of each node; not changed.
        capacity: ``int64`` ``[num_parts, num_constraints]``, the largest load of a part.
        node_weights: ``int64`` ``[num_nodes, num_constraints]``, at least 0. ``None``: 1 each,
            and one constraint.
        edge_weights: ``int64`` ``[num_entries]``, above 0, the same in both directions. ``None``:
            1 each.
        minimum: ``int64`` ``[num_parts, num_constraints]``, the smallest load of a part. ``None``:
            0.
        passes: The largest number of passes; 0 only repairs, with few moves.
        patience: Number of moves without a new best cut after which a pass ends. ``None``: a
            hundredth of the nodes, from 300 to 10,000.
        key: Key of the order among equal gains (:mod:`pyg_scale.ops.keys`).

    Returns:
        ``int32`` ``[num_nodes]``.

    Raises:
        ValueError: If shapes, types or ranges do not fit; the message names the argument.
    """
    num_nodes = indptr.numel() - 1
    if node_weights is None:
        node_weights = torch.ones(max(0, num_nodes), 1, dtype=torch.int64)
    if minimum is None:
        minimum = torch.zeros_like(capacity)
    _check(num_nodes, assignment, node_weights, capacity, minimum, edge_weights)
    if patience is None:
        patience = min(10_000, max(300, num_nodes // 100))
    if passes < 0 or patience < 0:
        raise ValueError(f"passes and patience must not be negative (got {passes}, {patience})")
    none = torch.empty(0, dtype=torch.int64)
    path = torch.ops.pyg_scale.refine_partition if library.compiled() else refine_partition_plain
    return path(
        indptr,
        indices,
        none if edge_weights is None else edge_weights.contiguous(),
        node_weights.contiguous(),
        assignment,
        capacity.contiguous(),
        minimum.contiguous(),
        passes,
        patience,
        keys.to_signed(key),
    )


def _check(
    num_nodes: int,
    assignment: Tensor,
    node_weights: Tensor,
    capacity: Tensor,
    minimum: Tensor,
    edge_weights: Tensor | None,
) -> None:
    if assignment.dtype not in _ID_TYPES or assignment.shape != (max(0, num_nodes),):
        raise ValueError(
            f"assignment must be int32 or int64 of shape [{num_nodes}] "
            f"(got {assignment.dtype} of shape {list(assignment.shape)})"
        )
    if capacity.dim() != 2 or capacity.size(0) < 1 or capacity.size(1) < 1:
        raise ValueError(
            f"capacity must be of shape [num_parts, num_constraints], at least one of each "
            f"(got {list(capacity.shape)})"
        )
    if minimum.shape != capacity.shape or node_weights.shape != (num_nodes, capacity.size(1)):
        raise ValueError(
            f"node_weights must be of shape [{num_nodes}, {capacity.size(1)}] and minimum of shape "
            f"{list(capacity.shape)} (got {list(node_weights.shape)}, {list(minimum.shape)})"
        )
    numbers = {"node_weights": node_weights, "capacity": capacity, "minimum": minimum}
    for name, tensor in {**numbers, "edge_weights": edge_weights}.items():
        if tensor is not None and tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 (got {tensor.dtype})")
    if num_nodes > 0:
        low, high = (int(v) for v in torch.aminmax(assignment))
        if low < 0 or high >= capacity.size(0):
            raise ValueError(
                f"assignment has parts {low} to {high}, but capacity has {capacity.size(0)} parts"
            )
        if int(node_weights.min()) < 0:
            raise ValueError("node_weights must not be negative")
    if edge_weights is not None and edge_weights.numel() and int(edge_weights.min()) <= 0:
        raise ValueError("edge_weights must be above 0")


def refine_partition_plain(
    indptr: Tensor,
    indices: Tensor,
    edge_weights: Tensor,
    node_weights: Tensor,
    assignment: Tensor,
    capacity: Tensor,
    minimum: Tensor,
    passes: int,
    patience: int,
    key: int,
) -> Tensor:
    """The meaning of the compiled op, with its arguments (``edge_weights`` empty: 1 each)."""
    refinement = _Refinement(
        indptr, indices, edge_weights, node_weights, assignment, capacity, minimum, key
    )
    refinement.repair()
    for _ in range(passes):
        if refinement.run_pass(patience) == 0:
            break
    return torch.tensor(refinement.part, dtype=torch.int32)


class _Refinement:
    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        edge_weights: Tensor,
        node_weights: Tensor,
        assignment: Tensor,
        capacity: Tensor,
        minimum: Tensor,
        key: int,
    ) -> None:
        begin, neighbor = indptr.tolist(), indices.tolist()
        weight = edge_weights.tolist() or [1] * len(neighbor)
        self.edges = [list(zip(neighbor[a:b], weight[a:b])) for a, b in itertools.pairwise(begin)]
        self.size = len(self.edges)
        self.part: list[int] = assignment.tolist()
        self.weights: list[list[int]] = node_weights.tolist()
        self.most: list[list[int]] = capacity.tolist()
        self.least: list[list[int]] = minimum.tolist()
        self.load = [[0] * len(row) for row in self.most]
        self.scale = [max(1, _WHOLE // max(1, int(total))) for total in node_weights.sum(0)]
        self.joined: list[dict[int, int]] = [{} for _ in self.edges]
        self.tie = [keys.fold(key, v) >> 1 for v in range(self.size)]
        for v, part in enumerate(self.part):
            self._load(v, part, 1)
            for u, w in self.edges[v]:
                self.joined[u][part] = self.joined[u].get(part, 0) + w

    def repair(self) -> None:
        for _ in range(_REPAIR_ROUNDS):
            if self._excess() <= 0:
                return
            self._start()
            everybody = any(
                load < least
                for loads, leasts in zip(self.load, self.least)
                for load, least in zip(loads, leasts)
            )
            for v in range(self.size):
                if everybody or self._too_full(v):
                    self._offer(v, self._to_repair(v)[0])
            moved = 0
            while self.queue and self._excess() > 0:
                top = self._next()
                if top is None:
                    continue
                v, queued = top
                gain, to = self._to_repair(v)
                if gain is None or gain < queued:
                    self._offer(v, gain)
                    continue
                self._move(v, to)
                moved += 1
                for u, _ in self.edges[v]:
                    if not self.locked[u] and (everybody or self._too_full(u)):
                        self._offer(u, self._to_repair(u)[0])
            if not moved:
                return

    def run_pass(self, patience: int) -> int:
        self._start()
        for v in range(self.size):
            self._offer(v, self._best_gain(v))
        moves: list[tuple[int, int]] = []
        total = best = best_size = 0
        while self.queue:
            top = self._next()
            if top is None:
                continue
            v, queued = top
            gain, to = self._allowed(v)
            if gain is None or gain < queued:
                self._offer(v, gain)
                continue
            moves.append((v, self.part[v]))
            self._move(v, to)
            total += gain
            if total > best:
                best, best_size = total, len(moves)
            elif len(moves) - best_size > patience:
                break
            for u, _ in self.edges[v]:
                if not self.locked[u]:
                    self._offer(u, self._best_gain(u))
        for v, before in reversed(moves[best_size:]):
            self._move(v, before)
        return best

    # The queue ############################################################################

    def _start(self) -> None:
        self.queue: list[tuple[int, int, int]] = []
        self.current: list[int | None] = [None] * self.size
        self.locked = [False] * self.size

    def _offer(self, v: int, gain: int | None) -> None:
        if gain != self.current[v]:
            self.current[v] = gain
            if gain is not None:
                heapq.heappush(self.queue, (-gain, self.tie[v], v))

    def _next(self) -> tuple[int, int] | None:
        """The node at the head of the queue and its gain, or ``None`` if that is out of date."""
        negative, _, v = heapq.heappop(self.queue)
        return None if self.locked[v] or self.current[v] != -negative else (v, -negative)

    # Moves ################################################################################

    def _move(self, v: int, to: int) -> None:
        before = self.part[v]
        self._load(v, before, -1)
        self._load(v, to, 1)
        self.part[v], self.locked[v] = to, True
        for u, w in self.edges[v]:
            joined = self.joined[u]
            joined[before] -= w
            joined[to] = joined.get(to, 0) + w

    def _best_gain(self, v: int) -> int | None:
        mine = self.part[v]
        others = [w for part, w in self.joined[v].items() if part != mine and w > 0]
        return max(others) - self.joined[v].get(mine, 0) if others else None

    def _allowed(self, v: int) -> tuple[int | None, int]:
        joined = self.joined[v]
        return self._choose(v, [p for p, w in joined.items() if w > 0 and self._growth(v, p) <= 0])

    def _to_repair(self, v: int) -> tuple[int | None, int]:
        return self._choose(v, [p for p in range(len(self.load)) if self._growth(v, p) < 0])

    def _choose(self, v: int, parts: list[int]) -> tuple[int | None, int]:
        """The best of some parts: its gain and its number."""
        mine, joined = self.part[v], self.joined[v]
        parts = [part for part in parts if part != mine]
        if not parts:
            return None, -1
        to = min(parts, key=lambda p: (-joined.get(p, 0), (p + v) % len(self.load)))
        return joined.get(to, 0) - joined.get(mine, 0), to

    # Loads of parts #######################################################################

    def _load(self, v: int, part: int, sign: int) -> None:
        for c, weight in enumerate(self.weights[v]):
            self.load[part][c] += sign * weight

    def _outside(self, part: int, c: int, change: int = 0) -> int:
        load = self.load[part][c] + change
        return max(0, load - self.most[part][c], self.least[part][c] - load) * self.scale[c]

    def _excess(self) -> int:
        columns = range(len(self.scale))
        return sum(self._outside(part, c) for part in range(len(self.load)) for c in columns)

    def _growth(self, v: int, to: int) -> int:
        """Growth of the excess if ``v`` moves."""
        mine = self.part[v]
        return sum(
            self._outside(mine, c, -w)
            - self._outside(mine, c)
            + self._outside(to, c, w)
            - self._outside(to, c)
            for c, w in enumerate(self.weights[v])
            if w
        )

    def _too_full(self, v: int) -> bool:
        part = self.part[v]
        return any(
            w and load > most
            for w, load, most in zip(self.weights[v], self.load[part], self.most[part])
        )
