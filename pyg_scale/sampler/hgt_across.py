"""HGT sampling of a graph in parts: hop by hop, in-edges asked of whoever has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, NodeType, Topology
from pyg_scale.ops.expand import number_nodes
from pyg_scale.ops.hgt import hgt_take, score_of
from pyg_scale.ops.keys import HGT, fold
from pyg_scale.sampler.base import Sample
from pyg_scale.sampler.choose import Ask, Picked
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.sampler.subgraph import edges_among


def sample_across(
    graph: Topology,
    seed: Mapping[NodeType, Tensor],
    num_samples: Mapping[NodeType, Sequence[int]],
    type_hash: Mapping[NodeType, int],
    key: int,
) -> Sample:
    """The result of :func:`pyg_scale.ops.hgt.hgt_sample` on the whole graph, to the bit.

    A node's in-edges are asked for once, when it comes into the sample.

    Args:
        graph: A graph with a router.
        seed: Node ids ``int64`` ``[num_seeds]`` of some types.
        num_samples: Per node type, one number per hop; negative for all there are.
        type_hash: The number of each node type in keys.
        key: The key of the batch.
    """
    none = torch.empty(0, dtype=torch.int64)
    nodes = {t: _Nodes(graph.num_nodes[t], seed.get(t, none)) for t in graph.node_types}
    edges = {t: _InEdges() for t in graph.edge_types}
    num_hops = max((len(numbers) for numbers in num_samples.values()), default=0)
    for hop in range(num_hops):
        _ask_for_in_edges(graph, nodes, edges)
        for node_type in graph.node_types:
            budget = [edges[t] for t in graph.edge_types if graph.neighbor_type(t) == node_type]
            into = nodes[node_type]
            into.new = hgt_take(
                [neighbor for each in budget for neighbor in each.neighbor],
                [counts for each in budget for counts in each.counts],
                [score for each in budget for score in each.score],
                taken=into.node,
                num_nodes=into.num_nodes,
                k=num_samples[node_type][hop],
                key=fold(key, HGT, hop, type_hash[node_type]),
            )
        for into in nodes.values():
            into.node = torch.cat([into.node, into.new])
            into.first = torch.ones_like(into.new)
    _ask_for_in_edges(graph, nodes, edges)
    return _sample(graph, nodes, edges)


class _Nodes:
    """The nodes of one type in the sample; ``new`` are the last of them, of the hop before.

    ``first`` is 0 for those of them that are there already, as seeds may be, else 1.
    """

    def __init__(self, num_nodes: int, seed: Tensor) -> None:
        self.num_nodes = num_nodes
        self.node = self.new = seed.to(torch.int64).contiguous()
        self.first = (self.rows_of(self.node) == torch.arange(self.node.numel())).to(torch.int64)

    def rows_of(self, node: Tensor) -> Tensor:
        """The (first) row of each node, -1 where it is not in the sample."""
        num_nodes, size = self.num_nodes, self.node.numel()
        return number_nodes(self.node, None, node, None, num_nodes, size, append=False)[2]


@dataclass
class _InEdges:
    """The in-edges of one edge type of all nodes in the sample, in order of rows, hop by hop."""

    neighbor: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    score: list[Tensor] = field(default_factory=list)
    edge: list[Tensor] = field(default_factory=list)

    def add(self, picked: Picked, first: Tensor) -> None:
        """Append those of new nodes, which count where ``first`` is 1."""
        self.neighbor.append(picked.neighbor)
        self.counts.append(picked.counts)
        self.score.append(score_of(picked.counts) * first)
        self.edge.append(picked.edge)


def _ask_for_in_edges(
    graph: Topology, nodes: Mapping[NodeType, _Nodes], edges: Mapping[EdgeType, _InEdges]
) -> None:
    """All in-edges of the nodes that the hop before took, of all edge types at once."""
    assert graph.router is not None
    asks = [
        Ask(edge_type, 0, -1, 0, nodes[graph.expanded_type(edge_type)].new, None, None)
        for edge_type in graph.edge_types
    ]
    for ask, picked in zip(asks, graph.router.expand(NativeSampler(), asks), strict=True):
        edges[ask.edge_type].add(picked, nodes[graph.expanded_type(ask.edge_type)].first)


def _sample(
    graph: Topology, nodes: Mapping[NodeType, _Nodes], edges: Mapping[EdgeType, _InEdges]
) -> Sample:
    dtype = graph.index_dtype
    out = Sample({t: nodes[t].node.to(dtype) for t in graph.node_types}, {}, {}, {})
    out.colptr = {}
    for edge_type, found in edges.items():
        counts, edge = torch.cat(found.counts), torch.cat(found.edge)
        every = torch.arange(counts.numel()).repeat_interleave(counts, output_size=edge.numel())
        source = nodes[graph.neighbor_type(edge_type)].rows_of(torch.cat(found.neighbor))
        row, col, out.edge[edge_type] = edges_among(source, every, edge)
        out.row[edge_type], out.col[edge_type] = row.to(dtype), col.to(dtype)
        degree = torch.bincount(col, minlength=counts.numel())
        out.colptr[edge_type] = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    return out
