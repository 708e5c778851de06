"""Sampling hop by hop in plain torch: a subclass says only which in-edges are taken.

The nodes that hop ``h`` expands are those that hop ``h - 1`` added (the seeds, at first). Edge
types are taken in the order of the graph's metadata and nodes in the order of the batch; a
neighbour that is not in the batch yet is appended to it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch_geometric.sampler.base import SubgraphType

from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology
from pyg_scale.ops.expand import number_nodes
from pyg_scale.sampler.base import NeighborSampler, Sample
from pyg_scale.sampler.choose import Ask, Picked, choose
from pyg_scale.sampler.frontier import Chosen, Frontier
from pyg_scale.sampler.subgraph import edges_among
from pyg_scale.sampler.times import TimeLimits, rows_of


class HopSampler(NeighborSampler):
    """Everything about sampling hop by hop but the choice of the edges; implement :meth:`pick`.

    Times, disjoint components, edge types, both directions and all subgraph types are taken
    care of here; a subclass adds to :attr:`supports` what its ``pick`` can do beyond that. A
    complete sampler, which keeps each of ``d`` in-edges by itself with probability ``k / d``::

        class Bernoulli(HopSampler):
            exact_count = uniform = False

            def pick(self, frontier, k):
                row, position = frontier.candidates()
                d = frontier.num_candidates[row]
                number = position - frontier.begin[row]
                keep = bounded(fold_tensor(frontier.key[row], number), 0, d) < k
                return Chosen(row[keep], position[keep])
    """

    supports = frozenset(
        {
            "hetero",
            "disjoint",
            "node_time",
            "edge_time",
            "last",
            "window",
            "strict",
            "bidirectional",
            "induced",
            "backward",
            "fixed",
            "links",
        }
    )

    across_parts = True

    every_layer: bool = False
    """True if each hop expands all nodes of the batch, not only those that the last one added."""

    @property
    def draws_by_node(self) -> bool:
        """See :class:`.DrawsByNode`; if disjoint, seeds count, too."""
        return not self.disjoint or not self.redraw

    @abstractmethod
    def pick(self, frontier: Frontier, k: int) -> Chosen:
        """Choose about ``k`` of the candidates of every row.

        Called for every edge type and hop, also where there is no row or ``k`` is 0. It must
        depend on nothing but its arguments and the options of the sampler. Unless
        ``across_parts = False`` is declared, what a row gets must depend on that row alone, and
        on positions only as they count from ``frontier.begin``: a part is asked for its own nodes.

        Args:
            frontier: The nodes to expand, their candidates and their keys.
            k: How many edges are wanted for each row, at least 0. ("All", -1, is
                :meth:`pick_all`.)
        """

    def pick_all(self, frontier: Frontier) -> Chosen:
        """All candidates of every row, for ``num_neighbors`` of -1.

        Override it if :meth:`pick` gives ``edge_attrs``.
        """
        return Chosen(*frontier.candidates())

    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        graph, hops = self.topology, self.hops()
        assert graph is not None
        nodes, time = self._seeds(graph, seed, seed_time)
        limits = None if time is None else self.time_limits(time)
        edges = {edge_type: _Edges() for edge_type in graph.edge_types}
        expanded = dict.fromkeys(graph.node_types, 0)
        for hop in range(max(map(len, hops.values()), default=0)):
            first = dict.fromkeys(graph.node_types, 0) if self.every_layer else expanded
            rows = {t: torch.arange(first[t], nodes[t].size) for t in graph.node_types}
            expanded = {t: nodes[t].size for t in graph.node_types}
            asks = [
                _ask(graph, t, hop, hops[t][hop], key, nodes, rows[graph.expanded_type(t)], limits)
                for t in graph.edge_types
            ]
            for edge_type, picked in zip(graph.edge_types, self.expand(asks), strict=True):
                row = rows[graph.expanded_type(edge_type)]
                edges[edge_type].add(graph, edge_type, nodes, row, picked)
            for node_type in graph.node_types:
                nodes[node_type].per_hop.append(nodes[node_type].size - expanded[node_type])
        self._check_attrs_are_kept(edges)
        if self.subgraph_type == SubgraphType.induced:
            edges = self._induced(graph, nodes, limits, key)
            expanded = {t: nodes[t].size for t in graph.node_types}
        return self._finish(_sample(graph, nodes, edges, None if self.every_layer else expanded))

    def expand(self, asks: Sequence[Ask]) -> list[Picked]:
        """The in-edges that the nodes of a hop get, from wherever the graph has them.

        Args:
            asks: Of a hop, one for each edge type: they are asked for at once.
        """
        graph = self.topology
        assert graph is not None
        if graph.router is not None:
            return graph.router.expand(self, asks)
        return [
            self.choose(
                graph.csc[ask.edge_type],
                ask,
                None,
                graph.node_time.get(graph.neighbor_type(ask.edge_type)),
                graph.num_nodes[graph.neighbor_type(ask.edge_type)],
            )
            for ask in asks
        ]

    def choose(
        self,
        csc: CSC,
        ask: Ask,
        place: Tensor | None,
        neighbor_time: Tensor | None,
        num_neighbor_nodes: int,
    ) -> Picked:
        """:func:`~pyg_scale.sampler.choose.choose`, unless a subclass knows a faster way.

        Args:
            csc: As there, as are those that are not named here.
            ask: As there.
            place: As there.
            neighbor_time: As there.
            num_neighbor_nodes: Nodes of the neighbours' type.
        """
        return choose(self, csc, ask, place, neighbor_time)

    def _seeds(
        self,
        graph: Topology,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
    ) -> tuple[dict[NodeType, _Nodes], Tensor | None]:
        """The batch before the first hop, and the time of every seed."""
        none = torch.empty(0, dtype=torch.int64)
        nodes, time, position = {}, [none], 0
        num_seeds = sum(node.numel() for node in seed.values())
        for node_type in graph.node_types:
            node = seed.get(node_type, none).to(torch.int64)
            batch = torch.arange(position, position + node.numel()) if self.disjoint else None
            position += node.numel()
            nodes[node_type] = _Nodes(
                graph.num_nodes[node_type], num_seeds, node, batch, [node.numel()]
            )
            if seed_time is not None and node.numel():
                time.append(seed_time[node_type])
        return nodes, None if seed_time is None else torch.cat(time)

    def _check_attrs_are_kept(self, edges: Mapping[EdgeType, _Edges]) -> None:
        given = [tuple(sorted(attrs)) for e in edges.values() for attrs in e.attrs]
        if len(set(given)) > 1:
            raise ValueError(
                f"{type(self).__name__} gives edge_attrs {list(given[0])} along one edge type and "
                f"hop, and {list(next(g for g in given if g != given[0]))} along another: give the "
                "same names every time, and override pick_all() if num_neighbors has -1"
            )
        names = given[0] if given else ()
        if names and self.subgraph_type != SubgraphType.directional:
            raise NotImplementedError(
                f"{type(self).__name__} has tensors per sampled edge ({', '.join(names)}), which "
                f"subgraph_type={self.subgraph_type.value!r} does not keep; use 'directional'"
            )

    def _induced(
        self,
        graph: Topology,
        nodes: Mapping[NodeType, _Nodes],
        limits: TimeLimits | None,
        key: int,
    ) -> dict[EdgeType, _Edges]:
        """All edges among the nodes of the batch, sorted by (destination row, edge id)."""
        out = {}
        asks = []
        rows_of = {t: torch.arange(nodes[t].size) for t in graph.node_types}
        for edge_type in graph.edge_types:
            # Nodes are in the batch because of their time: only times of edges are looked at,
            # unless nodes come by ways that have other limits.
            matters = limits is not None and (graph.has_edge_time or limits.limits_rows(edge_type))
            rows = rows_of[graph.expanded_type(edge_type)]
            within = limits if matters else None
            asks.append(_ask(graph, edge_type, 0, -1, key, nodes, rows, within))
        for edge_type, picked in zip(graph.edge_types, self.expand(asks), strict=True):
            component = nodes[graph.expanded_type(edge_type)].component
            neighbors = nodes[graph.neighbor_type(edge_type)]
            rows = rows_of[graph.expanded_type(edge_type)]
            col = rows.repeat_interleave(picked.counts, output_size=picked.edge.numel())
            row = neighbors.find(picked.neighbor, component(col))
            row, col, edge = edges_among(row, col, picked.edge)
            out[edge_type] = _Edges([row], [col], [edge])
        return out


@dataclass
class _Nodes:
    """The nodes of one type in the batch; the row of a node is its place in ``node``."""

    num_nodes: int
    num_seeds: int
    node: Tensor
    batch: Tensor | None
    per_hop: list[int]

    @property
    def size(self) -> int:
        return self.node.numel()

    def component(self, row: Tensor) -> Tensor | None:
        """The positions of the seeds to which rows belong, if disjoint."""
        return None if self.batch is None else self.batch[row]

    def add(self, node: Tensor, batch: Tensor | None) -> Tensor:
        """The rows of nodes; a node that has none gets the next one."""
        self.node, self.batch, row = self._number(node, batch, append=True)
        return row

    def find(self, node: Tensor, batch: Tensor | None) -> Tensor:
        """The rows of nodes, -1 for a node that has none."""
        return self._number(node, batch, append=False)[2]

    def _number(
        self, node: Tensor, batch: Tensor | None, append: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        return number_nodes(
            self.node,
            self.batch,
            node.to(torch.int64),
            batch,
            self.num_nodes,
            self.num_seeds,
            append=append,
        )


@dataclass
class _Edges:
    """The sampled edges of one edge type, hop after hop."""

    row: list[Tensor] = field(default_factory=list)
    col: list[Tensor] = field(default_factory=list)
    edge: list[Tensor] = field(default_factory=list)
    attrs: list[Mapping[str, Tensor]] = field(default_factory=list)

    def add(
        self,
        graph: Topology,
        edge_type: EdgeType,
        nodes: Mapping[NodeType, _Nodes],
        row: Tensor,
        picked: Picked,
    ) -> None:
        """Append the edges that the nodes at ``row`` got, and the nodes they lead to."""
        col = row.repeat_interleave(picked.counts, output_size=picked.edge.numel())
        component = nodes[graph.expanded_type(edge_type)].component(col)
        neighbors = nodes[graph.neighbor_type(edge_type)]
        self.row.append(neighbors.add(picked.neighbor, component))
        self.col.append(col)
        self.edge.append(picked.edge)
        self.attrs.append(picked.attrs)

    @property
    def per_hop(self) -> list[int]:
        return [edge.numel() for edge in self.edge]


def _ask(
    graph: Topology,
    edge_type: EdgeType,
    hop: int,
    num_neighbors: int,
    key: int,
    nodes: Mapping[NodeType, _Nodes],
    row: Tensor,
    limits: TimeLimits | None,
) -> Ask:
    """The nodes at ``row``, with the limits of their seeds where the edge type has times."""
    expanded = nodes[graph.expanded_type(edge_type)]
    component = expanded.component(row)
    latest = after = None
    if limits is not None and graph.is_timed(edge_type):
        latest = rows_of(limits.latest, component)
        after = rows_of(limits.after.get(edge_type), component)
    return Ask(edge_type, hop, num_neighbors, key, expanded.node[row], component, latest, after)


def _sample(
    graph: Topology,
    nodes: Mapping[NodeType, _Nodes],
    edges: Mapping[EdgeType, _Edges],
    expanded: Mapping[NodeType, int] | None,
) -> Sample:
    """The result in the dtypes that the contract asks for; no pointers without ``expanded``."""
    none = torch.empty(0, dtype=torch.int64)
    dtype = graph.index_dtype
    sample = Sample(
        node={t: nodes[t].node.to(dtype) for t in graph.node_types},
        row={t: torch.cat([none, *edges[t].row]).to(dtype) for t in graph.edge_types},
        col={t: torch.cat([none, *edges[t].col]).to(dtype) for t in graph.edge_types},
        edge={t: torch.cat([none, *edges[t].edge]) for t in graph.edge_types},
        num_sampled_nodes={t: nodes[t].per_hop for t in graph.node_types},
        num_sampled_edges={t: edges[t].per_hop for t in graph.edge_types},
        colptr=None if expanded is None else {},
    )
    batch = {t: n.batch for t, n in nodes.items() if n.batch is not None}
    sample.batch = batch or None
    for t in graph.edge_types:
        if expanded is not None and sample.colptr is not None:
            count = torch.bincount(sample.col[t], minlength=expanded[graph.expanded_type(t)])
            sample.colptr[t] = torch.cat([count.new_zeros(1), count.cumsum(0)])
        for name in edges[t].attrs[0] if edges[t].attrs else ():
            values = torch.cat([attrs[name] for attrs in edges[t].attrs])
            sample.edge_attrs.setdefault(name, {})[t] = values
    return sample
