"""The expected cost of seeds in a batch, from degrees alone.

A node is expanded once in a batch, however many seeds reach it. So a seed's share of the cost of
what it reaches is smaller the more other seeds of the batch reach it too. In a batch that has
every seed with the same probability, how often a node is reached is taken as Poisson with the mean
that degrees give. Among those who reach a node, its cost is divided equally.

All arithmetic is IEEE addition, multiplication and division, one after the other, so that every
machine finds the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, NodeType, Topology
from pyg_scale.loader.seeds.budget import Costs

_AT_ONCE = 1 << 22  # edges
_SQUARINGS = 6
_ALONE = 2.0**-40  # a share of seeds in which no two reach the same


class CostEstimate:
    """Estimates the cost of seeds. Reads the in-edges of what they reach, once for each hop.

    Args:
        graph: The topology, all of it in this process.
        hops: Neighbours per hop of every edge type.
        replace: Whether neighbours are drawn with replacement.
        disjoint: Whether every seed has a subgraph of its own, so that nothing is shared.
        seeds: The nodes of the seeds: types and ids ``[num_seeds]``, several for links.
        costs: The costs of nodes and edges.
    """

    def __init__(
        self,
        graph: Topology,
        hops: Mapping[EdgeType, Sequence[int]],
        *,
        replace: bool,
        disjoint: bool,
        seeds: Sequence[tuple[NodeType, Tensor]],
        costs: Costs,
    ) -> None:
        self._graph, self._hops, self._costs = graph, hops, costs
        self._replace, self._disjoint = replace, disjoint
        self._seeds = [(kind, node.to("cpu", torch.int64)) for kind, node in seeds]
        self._num_hops = max(map(len, hops.values()), default=0)

    def of_seeds(self, share: float) -> Tensor:
        """The cost that each seed adds, on average, to a batch with this share of all seeds.

        Args:
            share: Above 0, at most 1. With 0 nothing is shared: an upper estimate of the cost of
                each seed in a batch of its own.

        Returns:
            ``float64`` ``[num_seeds]``.
        """
        alone = share == 0 or self._disjoint
        kept = self._kept(_ALONE if alone else share)
        value = {t: self._node_cost(t) for t in self._graph.node_types}
        for hop in reversed(range(self._num_hops)):
            nodes, chance = kept[hop]
            after, value = value, {t: self._node_cost(t) for t in self._graph.node_types}
            for kind, node in nodes.items():
                value[kind][node] += self._expanded(
                    kind, node, hop, after, None if alone else chance
                )
        return torch.stack([value[kind][node] for kind, node in self._seeds]).sum(0)

    def _node_cost(self, kind: NodeType) -> Tensor:
        cost = float(self._costs.node.get(kind, 0))
        return torch.full((self._graph.num_nodes[kind],), cost, dtype=torch.float64)

    def _kept(self, share: float) -> list[tuple[dict[NodeType, Tensor], dict[NodeType, Tensor]]]:
        """For each hop, the nodes that it may expand, and the part of a hit that is a first one."""
        types = self._graph.node_types
        new = {t: torch.zeros(self._graph.num_nodes[t], dtype=torch.float64) for t in types}
        for kind, node in self._seeds:
            new[kind] += torch.bincount(node, minlength=new[kind].numel()) * share
        new = {t: each.clamp(max=1.0) for t, each in new.items()}
        seen = {t: each.clone() for t, each in new.items()}
        found = []
        for hop in range(self._num_hops):
            nodes = {t: each.nonzero().view(-1) for t, each in new.items()}
            hits = {t: torch.zeros_like(each) for t, each in new.items()}
            for edge_type in self._graph.edge_types:
                expanded = self._graph.expanded_type(edge_type)
                reached = hits[self._graph.neighbor_type(edge_type)]
                for owner, neighbor, pick in self._edges(edge_type, hop, nodes[expanded]):
                    rate = pick * new[expanded][nodes[expanded]][owner]
                    reached += torch.bincount(neighbor, rate, reached.numel())
            chance = {t: (1.0 - seen[t]) * _first(hits[t]) for t in types}
            new = {t: chance[t] * hits[t] for t in types}
            seen = {t: (seen[t] + new[t]).clamp(max=1.0) for t in types}
            found.append((nodes, chance))
        return found

    def _expanded(
        self,
        kind: NodeType,
        node: Tensor,
        hop: int,
        after: Mapping[NodeType, Tensor],
        chance: Mapping[NodeType, Tensor] | None,
    ) -> Tensor:
        """The cost of expanding nodes ``[n]`` in a hop, and of what comes after."""
        found = torch.zeros(node.numel(), dtype=torch.float64)
        for edge_type in self._graph.edge_types:
            if self._graph.expanded_type(edge_type) != kind:
                continue
            per_edge = float(self._costs.edge.get(edge_type, 0))
            reached = self._graph.neighbor_type(edge_type)
            worth = after[reached] if chance is None else after[reached] * chance[reached]
            for owner, neighbor, pick in self._edges(edge_type, hop, node):
                cost = pick * (worth[neighbor] + per_edge)
                found += torch.bincount(owner, cost, found.numel())
        return found

    def _edges(
        self, edge_type: EdgeType, hop: int, node: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The in-edges of nodes ``[n]``, some millions at a time.

        Yields:
            The place of the expanded node in ``node``, the neighbour, and how often the edge is
            drawn on average.
        """
        csc, numbers = self._graph.csc[edge_type], self._hops[edge_type]
        k = numbers[hop] if hop < len(numbers) else 0
        if k == 0 or not node.numel():
            return
        begin, degree = csc.indptr[node], csc.indptr[node + 1] - csc.indptr[node]
        total = degree.cumsum(0)
        at = 0
        while at < node.numel():
            before = int(total[at - 1]) if at else 0
            end = int(torch.searchsorted(total, before + _AT_ONCE, right=True))
            end = min(max(end, at + 1), node.numel())
            size = degree[at:end]
            owner = torch.arange(at, end).repeat_interleave(size)
            first = (begin[at:end] - (total[at:end] - size - before)).repeat_interleave(size)
            position = torch.arange(owner.numel()) + first
            if k < 0:
                pick = torch.ones(owner.numel(), dtype=torch.float64)
            else:
                most = k if self._replace else 1
                pick = (k / size.to(torch.float64)).clamp(max=most).repeat_interleave(size)
            yield owner, csc.indices[position].to(torch.int64), pick
            at = end


def _first(hits: Tensor) -> Tensor:
    """The part of hits that are first ones: ``(1 - exp(-h)) / h``, without a math library."""
    power = 1.0 + hits / (1 << _SQUARINGS)
    for _ in range(_SQUARINGS):
        power = power * power
    return torch.where(hits > 0, (1.0 - 1.0 / power) / hits.clamp(min=1e-300), 1.0)
