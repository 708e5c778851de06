"""Nodes drawn from keys: uniformly or by weight, and none that is later than it may be.

This is how the endpoints of negatives are drawn; :mod:`pyg_scale.sampler.negative` says when.
``docs/draws.md`` specifies both, with vectors.
In the notation of :mod:`pyg_scale.ops.keys`, with the key ``K`` of the batch, attempt ``a`` at
draw number ``p`` for a purpose is

    D = fold(K, purpose, p, a)
    t = bounded(D, 0, T)           the word number 0 of the stream of D

* The *candidates* are all nodes in order of their id; where the nodes have a time, those whose
  time is not later than the limit of draw ``p``, in order of (time, id).
* Without weights ``T`` is the number of candidates and the node is candidate number ``t``.
* With weights, those of all nodes become integers once: ``q = 0`` where ``w = 0``, else
  ``max(1, floor(w / max(w) * 2**32))`` in float64. ``T`` is their sum over the candidates
  and the node is the first candidate at which their running sum exceeds ``t``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_scale.ops.keys import bounded, fold_tensor

_BITS = 32  # of a fixed-point weight


@dataclass(frozen=True)
class Candidates:
    """The nodes of one type, ready to be drawn from.

    Attributes:
        describe: What a node is drawn as, for errors.
        num_nodes: How many there are.
        node_time: Their times, ``int64`` (sortable) ``[num_nodes]``, or ``None``.
        order: The nodes in order of (time, id), or ``None`` if they have no time.
        time: ``node_time[order]``.
        prefix: Running sums of the fixed-point weights, in ``order`` (else in order of id), or
            ``None`` if nodes are drawn uniformly.
    """

    describe: str
    num_nodes: int
    node_time: Tensor | None = None
    order: Tensor | None = None
    time: Tensor | None = None
    prefix: Tensor | None = None

    @classmethod
    def of(
        cls, describe: str, num_nodes: int, node_time: Tensor | None, weight: Tensor | None
    ) -> Candidates:
        """Sort nodes by time and turn weights into integers, once.

        Raises:
            ValueError: If there is not one finite, non-negative weight per node.
        """
        order, time = (None, None) if node_time is None else _by_time(node_time)
        prefix = None
        if weight is not None:
            fixed = _fixed_point(weight, num_nodes, describe)
            prefix = (fixed if order is None else fixed[order]).cumsum(0)
        return cls(describe, num_nodes, node_time, order, time, prefix)

    def until(self, node: Tensor, limit: Tensor | None) -> Tensor:
        """Number of candidates of each draw, ``int64`` ``[n]``.

        Args:
            node: The nodes ``[n]`` whose times are the limits if none are given.
            limit: The limits, ``int64`` (sortable) ``[n]``, or ``None``.
        """
        if self.node_time is None or self.time is None:
            return torch.full((node.numel(),), self.num_nodes)
        limit = self.node_time[node] if limit is None else limit
        return torch.searchsorted(self.time, limit.contiguous(), right=True)

    def total(self, count: Tensor) -> Tensor:
        """The ``T`` of the first ``count`` candidates, ``int64``."""
        if self.prefix is None or self.num_nodes == 0:
            return count
        return torch.where(count > 0, self.prefix[(count - 1).clamp(min=0)], 0)

    def draw(self, key: Tensor, number: Tensor, attempt: int, total: Tensor) -> Tensor:
        """The nodes that draws give, ``int64`` ``[n]``.

        Args:
            key: ``fold(K, purpose)``.
            number: The number ``p`` of each draw ``[n]``.
            attempt: The attempt ``a``.
            total: The ``T`` of each draw, at least 1, ``[n]``.
        """
        t = _below(key, number, attempt, total)
        place = t if self.prefix is None else torch.searchsorted(self.prefix, t, right=True)
        return place if self.order is None else self.order[place]

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Those of the first ``count`` candidates that have a weight, and their weights."""
        node = torch.arange(count) if self.order is None else self.order[:count]
        if self.prefix is None:
            return node, torch.ones_like(node)
        weight = self.prefix[:count].diff(prepend=self.prefix.new_zeros(1))
        return node[weight > 0], weight[weight > 0]


def draw_among(key: Tensor, number: int, attempt: int, node: Tensor, weight: Tensor) -> Tensor:
    """One draw as in :meth:`Candidates.draw`, from nodes and integer weights that are listed."""
    prefix = weight.cumsum(0)
    t = _below(key, torch.tensor([number]), attempt, prefix[-1:])
    return node[torch.searchsorted(prefix, t, right=True)][0]


def _below(key: Tensor, number: Tensor, attempt: int, size: Tensor) -> Tensor:
    return bounded(fold_tensor(fold_tensor(key, number), torch.tensor(attempt)), 0, size)


_sorted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _by_time(node_time: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes in order of (time, id), and their times: one copy for all who ask for it."""
    found = _sorted.get(node_time)
    if found is None:
        time, order = node_time.sort(stable=True)
        found = _sorted[node_time] = order, time
    return found


def _fixed_point(weight: Tensor, num_nodes: int, describe: str) -> Tensor:
    """Weights as integers, see the head of this file."""
    if weight.dim() != 1 or weight.numel() != num_nodes:
        raise ValueError(
            f"the weights of the {describe} must be one per node, of shape [{num_nodes}] "
            f"(got {list(weight.shape)})"
        )
    if num_nodes >= 1 << (63 - _BITS):
        raise ValueError(
            f"the weights of the {describe} do not fit: at most 2**{63 - _BITS} - 1 nodes can "
            f"be drawn by weight (got {num_nodes})"
        )
    wide = weight.detach().to("cpu", torch.float64)
    if not bool(wide.isfinite().all()) or bool((wide < 0).any()):
        raise ValueError(f"the weights of the {describe} must be finite and not negative")
    if num_nodes == 0 or float(wide.max()) == 0:
        return torch.zeros(num_nodes, dtype=torch.int64)
    fixed = (wide / wide.max() * 2**_BITS).floor().to(torch.int64)
    return torch.where(wide == 0, 0, fixed.clamp(min=1))
