"""Negative links: pairs of nodes that stand beside the seed links as examples of no link.

Negative number ``p`` of a batch belongs to seed link ``p mod num_positives``: it has its time
and, in mode ``"triplet"``, its source. Each of its endpoints is drawn as
:mod:`pyg_scale.sampler.keyed_nodes` says: purpose ``NEGATIVE_SRC`` or ``NEGATIVE_DST``, draw
number ``p``, attempts ``a = 0, 1, ...``, and no node later than the seed link.

Attempt 0 counts, unless ``exclude_positives`` is set and the pair is a positive one; then comes
the next attempt (for both endpoints in mode ``"binary"``), up to :data:`ATTEMPTS` of them. If all
give positives, attempt number ``ATTEMPTS`` draws in the same way from what is left: in
mode ``"triplet"`` from the candidates that are not joined to the source; in mode ``"binary"``
the destination from the candidates that are not joined to every candidate of the source, then
the source from the candidates that are not joined to that destination. (Candidates of weight 0
do not count here.)
"""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_geometric.sampler as pyg
from torch import Tensor
from torch_geometric.sampler.base import NegativeSamplingMode

from pyg_scale.graph.topology import EdgeType, NodeType, Topology
from pyg_scale.ops.is_edge import in_edges, is_edge
from pyg_scale.ops.keys import NEGATIVE_DST, NEGATIVE_SRC, fold, to_signed
from pyg_scale.sampler.choose import Ask
from pyg_scale.sampler.keyed_nodes import Candidates, draw_among

ATTEMPTS = 16
"""Attempts to draw a negative before the remaining pairs are enumerated."""


class NegativeSampling(pyg.NegativeSampling):
    """PyG's :class:`~torch_geometric.sampler.NegativeSampling`, with true negatives on request.

    Args:
        mode: ``"binary"`` (negative pairs of nodes) or ``"triplet"`` (negative destinations for
            the source of every seed link).
        amount: Negatives per seed link; an integer in mode ``"triplet"``.
        src_weight: How likely each node is as a negative source, ``[num_src_nodes]``.
        dst_weight: How likely each node is as a negative destination, ``[num_dst_nodes]``.
        exclude_positives: Whether no edge of the seed links' type, of whatever time, and no
            seed link of the loader may come as a negative. As an integer tensor
            ``[2, num_links]``: nor may these (such as the links held out for the test).

    Raises:
        ValueError: If an argument is none of these.
    """

    def __init__(
        self,
        mode: NegativeSamplingMode | str,
        amount: int | float = 1,
        src_weight: Tensor | None = None,
        dst_weight: Tensor | None = None,
        *,
        exclude_positives: bool | Tensor = False,
    ):
        if not math.isfinite(amount):
            raise ValueError(f"amount (neg_sampling_ratio) must be finite (got {amount})")
        super().__init__(mode, amount, src_weight, dst_weight)
        self.exclude_positives = _excluded(exclude_positives)
        self._plans: list[_Plan] = []

    @classmethod
    def cast(cls, *args: Any, **kwargs: Any) -> Any:
        """As in PyG, and an object of PyG's class becomes ours; ``None`` stays ``None``.

        Raises:
            TypeError: If a subclass of PyG's class draws by a ``sample`` of its own.
        """
        other = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(other, pyg.NegativeSampling) or isinstance(other, cls):
            return super().cast(*args, **kwargs)
        if type(other).sample is not pyg.NegativeSampling.sample:
            raise TypeError(
                f"neg_sampling: {type(other).__name__}.sample would not be called, because "
                f"negatives are drawn from keys; pass src_weight= and dst_weight= instead"
            )
        return cls(other.mode, other.amount, other.src_weight, other.dst_weight)

    def with_links(self, links: Tensor) -> NegativeSampling:
        """The same, with further links ``[2, num_links]`` that must not come as negatives."""
        if isinstance(self.exclude_positives, Tensor):
            links = torch.cat([self.exclude_positives.cpu().long(), links.cpu().long()], dim=1)
        return NegativeSampling(
            self.mode, self.amount, self.src_weight, self.dst_weight, exclude_positives=links
        )

    def num_negatives(self, num_positives: int) -> int:
        """Number of negatives for a number of seed links."""
        return math.ceil(num_positives * self.amount)

    def _plan(self, graph: Topology, edge_type: EdgeType) -> _Plan:
        """The tables for drawing from a graph, made once for every graph and edge type."""
        with _lock:
            self._plans = [plan for plan in self._plans if plan.graph() is not None]
            for plan in self._plans:
                if plan.graph() is graph and plan.edge_type == edge_type:
                    return plan
            self._plans.append(_plan(self, graph, edge_type))
            return self._plans[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": []}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.mode.value!r}, amount={self.amount}, "
            f"exclude_positives={self.exclude_positives is not False})"
        )


_lock = threading.Lock()


def _excluded(given: Any) -> bool | Tensor:
    """The argument ``exclude_positives``, checked."""
    if isinstance(given, bool | np.bool_):
        return bool(given)
    if not isinstance(given, Tensor):
        got = repr(given)
    elif given.dim() == 2 and given.size(0) == 2 and given.dtype in (torch.int64, torch.int32):
        return given
    else:
        got = f"{given.dtype} of shape {list(given.shape)}"
    raise ValueError(
        f"exclude_positives must be a bool or an integer tensor [2, num_links] (got {got})"
    )


def sample_negatives(
    neg_sampling: NegativeSampling,
    graph: Topology,
    edge_type: EdgeType,
    src: Tensor,
    dst: Tensor,
    time: Tensor | None,
    key: int,
) -> tuple[Tensor | None, Tensor]:
    """Draw the negatives of a batch of seed links.

    Args:
        neg_sampling: What to draw.
        graph: The graph.
        edge_type: The type of the seed links; it need not be one of the graph.
        src: Sources of the seed links, ``int64`` ``[num_positives]``.
        dst: Destinations of the seed links, ``int64`` ``[num_positives]``.
        time: Their times, ``int64`` (sortable) ``[num_positives]``; if ``None``, the limit of
            an endpoint is the time of the node that the seed link has there.
        key: The key of the batch.

    Returns:
        Sources (``None`` in mode ``"triplet"``) and destinations, ``int64`` ``[num_negatives]``.

    Raises:
        ValueError: If nothing can be a negative. Names which one.
    """
    plan = neg_sampling._plan(graph, edge_type)
    number = torch.arange(neg_sampling.num_negatives(src.numel()))
    owner = number % max(src.numel(), 1)
    dst_draws = _Draws(plan.dst, NEGATIVE_DST, key, owner, plan.dst.until(dst, time))
    if plan.src is None:
        draws, out = [dst_draws], [src[owner], dst_draws(number, 0)]
    else:
        src_draws = _Draws(plan.src, NEGATIVE_SRC, key, owner, plan.src.until(src, time))
        draws, out = [src_draws, dst_draws], [src_draws(number, 0), dst_draws(number, 0)]
    if plan.positives is not None:
        _redraw(draws, out, plan.positives)
    return None if plan.src is None else out[0], out[1]


class _Draws:
    """The draws of one endpoint of the negatives of a batch."""

    def __init__(self, nodes: Candidates, purpose: int, key: int, owner: Tensor, until: Tensor):
        self.nodes = nodes
        self.key = torch.tensor(to_signed(fold(key, purpose)))
        self.count = until[owner]
        self.total = nodes.total(self.count)
        none = (self.total == 0).nonzero()
        if none.numel():
            number = int(none[0])
            reason = "" if nodes.order is None else ": none is as early as the link"
            raise ValueError(
                f"neg_sampling: no node can be the {nodes.describe} of negative number {number}, "
                f"that of seed link {int(owner[number])} of the batch{reason}"
                f"{'' if nodes.prefix is None else ', or none of them has a weight'}"
            )

    def __call__(self, number: Tensor, attempt: int) -> Tensor:
        return self.nodes.draw(self.key, number, attempt, self.total[number])

    def among(self, number: int, node: Tensor, weight: Tensor) -> Tensor:
        return draw_among(self.key, number, ATTEMPTS, node, weight)


def _redraw(draws: list[_Draws], out: list[Tensor], positives: _Positives) -> None:
    """Replace the pairs that are positive, in place."""
    again = torch.arange(out[1].numel())
    for attempt in range(1, ATTEMPTS + 1):
        again = again[positives.contain(out[0][again], out[1][again])]
        if again.numel() == 0:
            return
        if attempt < ATTEMPTS:
            for draw, end in zip(draws, out[-len(draws) :], strict=True):
                end[again] = draw(again, attempt)
    left = _Left(draws, positives)
    for number in again.tolist():
        if len(draws) == 1:
            out[1][number] = left.destination(number, out[0][number])
        else:
            out[0][number], out[1][number] = left.pair(number)


class _Left:
    """The remaining pairs after all attempts have given positives: enumerates them."""

    def __init__(self, draws: list[_Draws], positives: _Positives):
        self.draws = draws
        self.positives = positives
        self._open: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def destination(self, number: int, src: Tensor) -> Tensor:
        draws = self.draws[0]
        node, weight = draws.nodes.first(int(draws.count[number]))
        keep = ~self.positives.contain(src.expand(node.numel()).contiguous(), node)
        if not bool(keep.any()):
            raise ValueError(
                f"neg_sampling: node {int(src)} is joined to every node that could be the "
                f"{draws.nodes.describe} of negative number {number}; leave exclude_positives out"
            )
        return draws.among(number, node[keep], weight[keep])

    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        src_draws, dst_draws = self.draws
        counts = int(src_draws.count[number]), int(dst_draws.count[number])
        if counts not in self._open:
            self._open[counts] = self._open_destinations(*counts)
        node, weight = self._open[counts]
        if node.numel() == 0:
            raise ValueError(
                f"neg_sampling: all pairs of nodes that could be negative number {number} are "
                f"joined; leave exclude_positives out"
            )
        dst = dst_draws.among(number, node, weight)
        node, weight = src_draws.nodes.first(counts[0])
        keep = ~self.positives.contain(node, dst.expand(node.numel()).contiguous())
        return src_draws.among(number, node[keep], weight[keep]), dst

    def _open_destinations(self, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
        """The destinations that are not joined to every source, and their weights."""
        src, _ = self.draws[0].nodes.first(num_src)
        dst, weight = self.draws[1].nodes.first(num_dst)
        joined = self.positives.joined(src, dst)
        return dst[joined < src.numel()], weight[joined < src.numel()]


class _Positives:
    """Pairs of nodes that must not be negatives."""

    def __init__(self, graph: Topology, edge_type: EdgeType, links: Tensor | None):
        source, destination = _ends(edge_type)
        self.num_src, self.num_dst = graph.num_nodes[source], graph.num_nodes[destination]
        # Pointers and neighbours, and whether these are out-edges of sources.
        self.lists: list[tuple[Tensor, Tensor, bool]] = []
        self.routed: RoutedEdges | None = None
        if graph.router is not None and edge_type in graph.edge_types:
            self.routed = RoutedEdges(graph, edge_type)
        if edge_type in graph.csc:
            csc = graph.csc[edge_type]
            self.lists.append((csc.indptr, csc.indices, graph.direction == "backward"))
        if links is not None:
            self.lists.append((*self._in_edges(links.to("cpu", torch.int64)), False))

    def _in_edges(self, links: Tensor) -> tuple[Tensor, Tensor]:
        for end, size in zip(links, (self.num_src, self.num_dst), strict=True):
            if end.numel() and (int(end.min()) < 0 or int(end.max()) >= size):
                raise IndexError(
                    f"exclude_positives: nodes must be from 0 to {size - 1} "
                    f"(got {int(end.min())} to {int(end.max())})"
                )
        count = torch.bincount(links[1], minlength=self.num_dst)
        indptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
        return indptr, links[0][links[1].argsort(stable=True)]

    def contain(self, src: Tensor, dst: Tensor) -> Tensor:
        """For each pair, True if it is positive, ``bool`` ``[n]``."""
        found = torch.zeros(src.numel(), dtype=torch.bool)
        for indptr, indices, out in self.lists:
            found |= is_edge(indptr, indices, *((dst, src) if out else (src, dst)))
        if self.routed is not None:
            found |= self.routed.contain(src, dst)
        return found

    def joined(self, src: Tensor, dst: Tensor) -> Tensor:
        """To how many of some (distinct) sources each destination is joined, ``[num_dst]``."""
        codes = [torch.empty(0, dtype=torch.int64)]
        for indptr, indices, out in self.lists:
            expanded = src if out else dst
            place, position = in_edges(indptr, expanded)
            ends = expanded[place], indices[position].to(torch.int64)
            source, destination = ends if out else ends[::-1]
            codes.append(destination * self.num_src + source)
        if self.routed is not None:
            expanded = src if self.routed.out else dst
            place, other = self.routed.of(expanded)
            ends = (other, expanded[place]) if self.routed.out else (expanded[place], other)
            codes.append(ends[0] * self.num_src + ends[1])
        code = torch.cat(codes).unique()
        is_source = torch.zeros(self.num_src, dtype=torch.bool)
        is_source[src] = True
        code = code[is_source[code % max(self.num_src, 1)]]
        return torch.bincount(code // max(self.num_src, 1), minlength=self.num_dst)[dst]


@dataclass(frozen=True)
class _Plan:
    """The tables for drawing from one graph. Without ``src`` only destinations are drawn."""

    graph: weakref.ref[Topology]
    edge_type: EdgeType
    src: Candidates | None
    dst: Candidates
    positives: _Positives | None


def _plan(neg_sampling: NegativeSampling, graph: Topology, edge_type: EdgeType) -> _Plan:
    def candidates(end: str, node_type: NodeType, weight: Tensor | None) -> Candidates:
        of_type = "" if node_type is None else f" of type {node_type!r}"
        num_nodes, time = graph.num_nodes[node_type], graph.all_times_of(node_type)
        return Candidates.of(f"{end}{of_type}", num_nodes, time, weight)

    source, destination = _ends(edge_type)
    src = positives = None
    if neg_sampling.is_binary():
        src = candidates("source", source, neg_sampling.src_weight)
    dst = candidates("destination", destination, neg_sampling.dst_weight)
    exclude = neg_sampling.exclude_positives
    if exclude is not False:
        links = exclude if isinstance(exclude, Tensor) else None
        positives = _Positives(graph, edge_type, links)
    return _Plan(weakref.ref(graph), edge_type, src, dst, positives)


def _ends(edge_type: EdgeType) -> tuple[NodeType, NodeType]:
    return (None, None) if edge_type is None else (edge_type[0], edge_type[2])


class RoutedEdges:
    """The edges of a type, reached through the router of a graph.

    Args:
        graph: A graph with a router.
        edge_type: One of its edge types.
    """

    def __init__(self, graph: Topology, edge_type: EdgeType) -> None:
        from pyg_scale.sampler.native import NativeSampler  # which needs this package

        self._router, self._edge_type = graph.router, edge_type
        self._sampler = NativeSampler()
        self.out = graph.direction == "backward"
        """True if these are the out-edges of nodes."""
        self._num_others = graph.num_nodes[graph.neighbor_type(edge_type)]

    def of(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """The edges of distinct nodes: the place of each in ``node``, and its other end."""
        assert self._router is not None
        ask = Ask(self._edge_type, 0, -1, 0, node, None, None)
        (picked,) = self._router.expand(self._sampler, [ask])
        place = torch.arange(node.numel()).repeat_interleave(picked.counts)
        return place, picked.neighbor

    def contain(self, src: Tensor, dst: Tensor) -> Tensor:
        """For each pair of nodes, True if there is an edge, ``bool`` ``[n]``."""
        node, other = (src, dst) if self.out else (dst, src)
        distinct, inverse = torch.unique(node, return_inverse=True)
        place, neighbor = self.of(distinct)
        size = max(1, self._num_others)
        return torch.isin(inverse * size + other, place * size + neighbor)
