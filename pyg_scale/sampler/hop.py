"""Sampling hop by hop in plain torch: a subclass says only which in-edges are taken.

The nodes that hop ``h`` expands are those that hop ``h - 1`` added (the seeds, at first). Edge
types are taken in the order of the graph's metadata and nodes in the order of the batch; a
neighbour that is not in the batch yet is appended to it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch_geometric.sampler.base import SubgraphType

from pyg_scale.ops.keys import NEIGHBOR, edge_type_hash, fold, fold_tensor
from pyg_scale.sampler.base import NeighborSampler
from pyg_scale.sampler.frontier import Chosen, Frontier
from pyg_scale.sampler.output import Sample
from pyg_scale.sampler.subgraph import swap_directions, to_bidirectional
from pyg_scale.store.base import EdgeType, NodeType, Topology


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
                keep = bounded(fold_tensor(frontier.key[row], position), 0, d) < k
                return Chosen(row[keep], position[keep])
    """

    supports = frozenset(
        {
            "hetero",
            "disjoint",
            "node_time",
            "edge_time",
            "last",
            "bidirectional",
            "induced",
            "backward",
            "links",
        }
    )

    @abstractmethod
    def pick(self, frontier: Frontier, k: int) -> Chosen:
        """Choose about ``k`` of the candidates of every row.

        Called for every edge type and hop, also where there is no row or ``k`` is 0. It must
        depend on nothing but its arguments and the options of the sampler.

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
        graph, hops = self.topology, self._hops()
        assert graph is not None
        nodes, time = self._seeds(graph, seed, seed_time)
        edges = {edge_type: _Edges() for edge_type in graph.edge_types}
        expanded = dict.fromkeys(graph.node_types, 0)
        for hop in range(max(map(len, hops.values()), default=0)):
            rows = {t: torch.arange(expanded[t], nodes[t].size) for t in graph.node_types}
            expanded = {t: nodes[t].size for t in graph.node_types}
            for edge_type in graph.edge_types:
                k = hops[edge_type][hop]
                row = rows[graph.expanded_type(edge_type)]
                frontier = _frontier(graph, edge_type, hop, nodes, row, time, key)
                if self.temporal_strategy == "last" and k >= 0 and _timed(graph, edge_type):
                    last = torch.maximum(frontier.begin, frontier.end - k)
                    frontier = replace(frontier, begin=last)
                chosen = self.pick_all(frontier) if k < 0 else self.pick(frontier, k)
                edges[edge_type].add(graph, edge_type, nodes, row, chosen)
            for node_type in graph.node_types:
                nodes[node_type].per_hop.append(nodes[node_type].size - expanded[node_type])
        self._check_attrs_are_kept(edges)
        if self.subgraph_type == SubgraphType.induced:
            edges = _induced(graph, nodes, time, key)
            expanded = {t: nodes[t].size for t in graph.node_types}
        return self._finish(_sample(graph, nodes, edges, expanded))

    def _seeds(
        self,
        graph: Topology,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
    ) -> tuple[dict[NodeType, _Nodes], Tensor | None]:
        """The batch before the first hop, and the time of every seed."""
        none = torch.empty(0, dtype=torch.int64)
        nodes, time, position = {}, [none], 0
        for node_type in graph.node_types:
            node = seed.get(node_type, none).to(torch.int64)
            batch = torch.arange(position, position + node.numel()) if self.disjoint else None
            position += node.numel()
            nodes[node_type] = _Nodes(graph.num_nodes[node_type], node, batch, [node.numel()])
            if seed_time is not None and node.numel():
                time.append(seed_time[node_type])
        return nodes, None if seed_time is None else torch.cat(time)

    def _check_attrs_are_kept(self, edges: Mapping[EdgeType, _Edges]) -> None:
        names = {name: None for e in edges.values() for attrs in e.attrs for name in attrs}
        if names and self.subgraph_type != SubgraphType.directional:
            raise NotImplementedError(
                f"{type(self).__name__} has tensors per sampled edge ({', '.join(names)}), which "
                f"subgraph_type={self.subgraph_type.value!r} does not keep; use 'directional'"
            )

    def _finish(self, sample: Sample) -> Sample:
        """What the direction and the type of the subgraph make of the sampled edges."""
        if self.subgraph_type == SubgraphType.induced:
            sample.num_sampled_nodes = sample.num_sampled_edges = None
        if self.sample_direction == "backward":
            sample = swap_directions(sample)
        if self.subgraph_type == SubgraphType.bidirectional:
            sample = to_bidirectional(sample)
        return sample


@dataclass
class _Nodes:
    """The nodes of one type in the batch; the row of a node is its place in ``node``."""

    num_nodes: int
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
        node, batch, first = self._with(node, batch)
        new = first == torch.arange(first.numel())
        new[: self.size] = True  # a repeated seed keeps its row
        row = new.cumsum(0) - 1
        found = row[first[self.size :]]
        self.node, self.batch = node[new], None if batch is None else batch[new]
        return found

    def find(self, node: Tensor, batch: Tensor | None) -> Tensor:
        """The rows of nodes, -1 for a node that has none."""
        _, _, first = self._with(node, batch)
        found = first[self.size :]
        return torch.where(found < self.size, found, -1)

    def _with(self, node: Tensor, batch: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Our nodes followed by others, and for each the place where the same one is first."""
        node = torch.cat([self.node, node.to(torch.int64)])
        if batch is not None:
            assert self.batch is not None
            batch = torch.cat([self.batch, batch])
        identity = node if batch is None else batch * self.num_nodes + node
        distinct, group = torch.unique(identity, return_inverse=True)
        place = torch.arange(identity.numel())
        first = torch.zeros_like(distinct).scatter_reduce_(
            0, group, place, "amin", include_self=False
        )
        return node, batch, first[group]


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
        chosen: Chosen,
    ) -> None:
        """Append the edges that the nodes at ``row`` have chosen, and the nodes they lead to."""
        csc = graph.csc[edge_type]
        order = chosen.row.argsort(stable=True)
        col, position = row[chosen.row[order]], chosen.position[order]
        component = nodes[graph.expanded_type(edge_type)].component(col)
        neighbors = nodes[graph.neighbor_type(edge_type)]
        self.row.append(neighbors.add(csc.indices[position], component))
        self.col.append(col)
        self.edge.append(csc.original_id(position))
        self.attrs.append({k: v[order] for k, v in (chosen.edge_attrs or {}).items()})

    @property
    def per_hop(self) -> list[int]:
        return [edge.numel() for edge in self.edge]


def _timed(graph: Topology, edge_type: EdgeType) -> bool:
    """Whether the candidates of an edge type are limited by time."""
    return (
        graph.csc[edge_type].time is not None or graph.neighbor_type(edge_type) in graph.node_time
    )


def _frontier(
    graph: Topology,
    edge_type: EdgeType,
    hop: int,
    nodes: Mapping[NodeType, _Nodes],
    row: Tensor,
    seed_time: Tensor | None,
    key: int,
) -> Frontier:
    """The nodes at ``row``, with the in-edges that are not later than their seeds."""
    csc = graph.csc[edge_type]
    expanded = nodes[graph.expanded_type(edge_type)]
    node, component = expanded.node[row], expanded.component(row)
    node_key = fold_tensor(fold(key, NEIGHBOR, hop, edge_type_hash(edge_type)), node)
    if component is not None:
        node_key = fold_tensor(node_key, component)
    frontier = Frontier(
        csc, node, csc.indptr[node], csc.indptr[node + 1], node_key, edge_type, hop, key
    )
    if seed_time is None or not _timed(graph, edge_type):
        return frontier
    assert component is not None
    latest = seed_time[component]
    node_time = graph.node_time.get(graph.neighbor_type(edge_type))

    def too_late(position: Tensor) -> Tensor:
        if csc.time is not None:
            return csc.time[position] > latest
        assert node_time is not None
        return node_time[csc.indices[position].to(torch.int64)] > latest

    return replace(frontier, end=frontier.first_where(too_late))


def _induced(
    graph: Topology, nodes: Mapping[NodeType, _Nodes], seed_time: Tensor | None, key: int
) -> dict[EdgeType, _Edges]:
    """All edges among the nodes of the batch, sorted by (destination row, edge id)."""
    out = {}
    for edge_type in graph.edge_types:
        csc = graph.csc[edge_type]
        expanded = nodes[graph.expanded_type(edge_type)]
        neighbors = nodes[graph.neighbor_type(edge_type)]
        # Nodes are in the batch because of their time: only times of edges are looked at.
        time = None if csc.time is None else seed_time
        rows = torch.arange(expanded.size)
        col, position = _frontier(graph, edge_type, 0, nodes, rows, time, key).candidates()
        row = neighbors.find(csc.indices[position], expanded.component(col))
        edge = csc.original_id(position)
        by_edge = edge.argsort()
        order = by_edge[col[by_edge].argsort(stable=True)]
        order = order[row[order] >= 0]
        out[edge_type] = _Edges([row[order]], [col[order]], [edge[order]])
    return out


def _sample(
    graph: Topology,
    nodes: Mapping[NodeType, _Nodes],
    edges: Mapping[EdgeType, _Edges],
    expanded: Mapping[NodeType, int],
) -> Sample:
    """The result in the dtypes that the contract asks for."""
    none = torch.empty(0, dtype=torch.int64)
    dtype = graph.index_dtype
    sample = Sample(
        node={t: nodes[t].node.to(dtype) for t in graph.node_types},
        row={t: torch.cat([none, *edges[t].row]).to(dtype) for t in graph.edge_types},
        col={t: torch.cat([none, *edges[t].col]).to(dtype) for t in graph.edge_types},
        edge={t: torch.cat([none, *edges[t].edge]) for t in graph.edge_types},
        num_sampled_nodes={t: nodes[t].per_hop for t in graph.node_types},
        num_sampled_edges={t: edges[t].per_hop for t in graph.edge_types},
        colptr={},
    )
    batch = {t: n.batch for t, n in nodes.items() if n.batch is not None}
    sample.batch = batch or None
    for t in graph.edge_types:
        count = torch.bincount(sample.col[t], minlength=expanded[graph.expanded_type(t)])
        sample.colptr[t] = torch.cat([count.new_zeros(1), count.cumsum(0)])  # type: ignore[index]
        for name in edges[t].attrs[0] if edges[t].attrs else ():
            values = torch.cat([attrs[name] for attrs in edges[t].attrs])
            sample.edge_attrs.setdefault(name, {})[t] = values
    return sample
