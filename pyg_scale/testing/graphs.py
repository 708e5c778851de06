"""Small adversarial graphs, and the edge lists of graphs as the kit reads them.

Symmetric graphs hide reversed edges, sorted ones hide wrong edge ids, simple ones hide faults with
parallel edges. These graphs are directed and asymmetric, edges are unsorted, features are not
contiguous, and there are hubs, self-loops, parallel edges, nodes without in-edges and nodes without
out-edges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from pyg_scale.graph.topology import EdgeType, NodeType


def written_out(index_dtype: torch.dtype = torch.int64) -> Data:
    """Seven nodes whose two-hop neighbourhoods are written out in :data:`WRITTEN_OUT`.

    ::

        0 <- 1 <- 3    0 <- 2 <- 3    2 <- 2 (self-loop)    1 <- 4, twice
        3 <- 0 (a cycle)    5 -> 0 (no in-edges)    6 (isolated)
    """
    source = [2, 4, 3, 1, 5, 4, 2, 0, 3]
    destination = [0, 1, 1, 0, 0, 1, 2, 3, 2]
    edge_index = torch.tensor([source, destination], dtype=index_dtype)
    return Data(edge_index=edge_index, num_nodes=7, x=torch.arange(7.0).view(-1, 1))


WRITTEN_OUT: dict[tuple[int, ...], tuple[list[int], list[int], list[list[int]]]] = {
    # seeds: (all nodes, nodes per hop, edge ids per hop) of the whole two-hop neighbourhood
    (0,): ([0, 2, 1, 5, 3, 4], [1, 3, 2], [[0, 3, 4], [6, 8, 1, 2, 5]]),
    (2,): ([2, 3, 0], [1, 1, 1], [[6, 8], [7]]),
    (6, 5): ([6, 5], [2, 0, 0], [[], []]),
    (3, 1): ([3, 1, 0, 4, 2, 5], [2, 2, 2], [[7, 1, 2, 5], [0, 3, 4]]),
}
"""The result of two hops of -1 for :func:`written_out`.

The edges of a node are in the order of their ids, nodes in the order in which they are reached.
"""


def hostile(index_dtype: torch.dtype = torch.int64, num_nodes: int = 100) -> Data:
    """All known difficult cases in one directed graph.

    Node 0 is a hub, node 5 has two self-loops, 3 -> 4 exists three times, node 6 has one in-edge,
    the last node is isolated and the one before has out-edges only. Attributes: ``x`` (not
    contiguous), ``y``, ``time`` (of nodes, with ties), ``when`` (of edges, with ties), ``weight``
    (of edges; a quarter are zero, as are all into node 7 and all but one into node 8) and
    ``edge_attr`` (the edge id).
    """
    generator = torch.Generator().manual_seed(1)
    last = num_nodes - 2  # first node that cannot have in-edges

    def integers(high: int, size: int) -> Tensor:
        return torch.randint(0, high, (size,), generator=generator)

    source = torch.cat([integers(num_nodes - 1, 60), torch.tensor([5, 5, 3, 3, 3, 9])])
    destination = torch.cat([torch.zeros(60, dtype=torch.int64), torch.tensor([5, 5, 4, 4, 4, 6])])
    more = torch.stack([integers(num_nodes - 1, 400), 1 + integers(last - 1, 400)])
    more = more[:, more[1] != 6]
    edge_index = torch.cat([torch.stack([source, destination]), more], dim=1)
    edge_index = edge_index[:, torch.randperm(edge_index.size(1), generator=generator)]
    num_edges = edge_index.size(1)
    weight = torch.rand(num_edges, generator=generator) + 0.05
    weight[integers(4, num_edges) == 0] = 0.0
    weight[edge_index[1] == 7] = 0.0
    into_8 = (edge_index[1] == 8).nonzero().view(-1)
    weight[into_8] = 0.0
    weight[into_8[0]] = 2.5
    return Data(
        edge_index=edge_index.to(index_dtype),
        num_nodes=num_nodes,
        x=torch.randn(6, num_nodes, generator=generator).t(),
        y=integers(3, num_nodes),
        time=integers(8, num_nodes),
        when=integers(8, num_edges),
        weight=weight,
        edge_attr=torch.arange(num_edges),
    )


def nothing(num_nodes: int, index_dtype: torch.dtype = torch.int64) -> Data:
    """Nodes without edges; an empty graph if ``num_nodes`` is 0."""
    return Data(
        edge_index=torch.empty(2, 0, dtype=index_dtype),
        num_nodes=num_nodes,
        x=torch.arange(float(num_nodes)).view(-1, 1),
    )


def one_loop(index_dtype: torch.dtype = torch.int64) -> Data:
    """One node that is its only neighbour."""
    return Data(edge_index=torch.zeros(2, 1, dtype=index_dtype), num_nodes=1, x=torch.ones(1, 1))


def copies(num_copies: int, degree: int, weight: Tensor | None = None) -> Data:
    """Nodes ``0 ... num_copies - 1``, each with in-edges from the same ``degree`` other nodes.

    Every copy is one experiment, whose outcome is the number of a neighbour (its node id less
    ``num_copies``). ``weight`` ``[degree]`` becomes the ``weight`` of the in-edges.
    """
    source = torch.arange(degree).repeat(num_copies) + num_copies
    destination = torch.arange(num_copies).repeat_interleave(degree)
    data = Data(edge_index=torch.stack([source, destination]), num_nodes=num_copies + degree)
    if weight is not None:
        data.weight = weight.repeat(num_copies)
    return data


def hetero(index_dtype: torch.dtype = torch.int64) -> HeteroData:
    """Users, items, tags, and ghosts without edges.

    Two relations lead from users to items, one of which has a reverse; users follow users in one
    direction; one edge type is empty. Users and items have a ``time``, tags have none; all edges
    have ``when`` and ``weight``.
    """
    generator = torch.Generator().manual_seed(2)
    data = HeteroData()
    size = {"user": 20, "item": 12, "tag": 5, "ghost": 3}
    for name, number in size.items():
        data[name].x = torch.randn(number, 4, generator=generator)
        data[name].num_nodes = number
    for name in ("user", "item"):
        data[name].time = torch.randint(0, 8, (size[name],), generator=generator)
    for edge_type, number in {
        ("user", "buys", "item"): 70,
        ("user", "likes", "item"): 40,
        ("item", "rev_buys", "user"): 60,
        ("user", "follows", "user"): 50,
        ("tag", "of", "item"): 25,
        ("item", "has", "tag"): 0,
        ("ghost", "haunts", "ghost"): 4,
    }.items():
        source, _, destination = edge_type
        row = torch.randint(0, size[source], (number,), generator=generator)
        # The last node of a type has no in-edges.
        col = torch.randint(0, size[destination] - 1, (number,), generator=generator)
        store = data[edge_type]
        store.edge_index = torch.stack([row, col]).to(index_dtype)
        store.when = torch.randint(0, 8, (number,), generator=generator)
        store.weight = torch.randint(0, 4, (number,), generator=generator).float()
    return data


HOMOGENEOUS: dict[str, Callable[..., Data]] = {
    "written_out": written_out,
    "hostile": hostile,
    "no_edges": lambda index_dtype=torch.int64: nothing(5, index_dtype),
    "one_node": lambda index_dtype=torch.int64: nothing(1, index_dtype),
    "one_loop": one_loop,
}
"""Homogeneous graphs with at least one node, by name; each function takes an ``index_dtype``."""


def stores(data: Data | HeteroData) -> tuple[FeatureStore, GraphStore]:
    """The features and edges of a graph in PyG's test stores."""
    features, graph = MyFeatureStore(), MyGraphStore()
    for group in data.node_types if isinstance(data, HeteroData) else [None]:
        store = data if group is None else data[group]
        for name, value in store.items():
            if isinstance(value, Tensor) and store.is_node_attr(name):
                features.put_tensor(value, group_name=group, attr_name=name, index=None)
    facts = EdgeLists.of(data)
    for edge_type, (source, destination) in facts.edges.items():
        size = (
            facts.num_nodes[facts.source_type(edge_type)],
            facts.num_nodes[facts.destination_type(edge_type)],
        )
        graph.put_edge_index((source, destination), edge_type=edge_type, layout="coo", size=size)
    return features, graph


@dataclass
class EdgeLists:
    """A graph as plain edge lists, which the kit compares with samples.

    Attributes:
        num_nodes: Number of nodes by node type.
        edges: Sources and destinations by edge type, in the order of the edge ids.
        node_time: Times of nodes, for the node types that have them.
        edge_time: Times of edges, for the edge types that have them.
        weight: Weights of edges, for the edge types that have them.
    """

    num_nodes: dict[NodeType, int]
    edges: dict[EdgeType, tuple[Tensor, Tensor]]
    node_time: Mapping[NodeType, Tensor] = field(default_factory=dict)
    edge_time: Mapping[EdgeType, Tensor] = field(default_factory=dict)
    weight: Mapping[EdgeType, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        data: Data | HeteroData,
        time_attr: str | None = None,
        weight_attr: str | None = None,
    ) -> EdgeLists:
        """Read a graph, with the attributes that a sampler is given."""
        nodes = (
            {t: data[t] for t in data.node_types} if isinstance(data, HeteroData) else {None: data}
        )
        edges = (
            {t: data[t] for t in data.edge_types} if isinstance(data, HeteroData) else {None: data}
        )
        return cls(
            {t: int(s.num_nodes) for t, s in nodes.items()},
            {t: (s.edge_index[0], s.edge_index[1]) for t, s in edges.items()},
            {
                t: s[time_attr]
                for t, s in nodes.items()
                if time_attr in s and s.is_node_attr(time_attr)
            },
            {
                t: s[time_attr]
                for t, s in edges.items()
                if time_attr in s and s.is_edge_attr(time_attr)
            },
            {t: s[weight_attr] for t, s in edges.items() if weight_attr in s},
        )

    def reversed(self) -> EdgeLists:
        """The graph with every edge reversed; types keep their names."""
        edges = {t: (dst, src) for t, (src, dst) in self.edges.items()}
        return Turned(self.num_nodes, edges, self.node_time, self.edge_time, self.weight)

    def source_type(self, edge_type: EdgeType) -> NodeType:
        return None if edge_type is None else edge_type[0]

    def destination_type(self, edge_type: EdgeType) -> NodeType:
        return None if edge_type is None else edge_type[2]

    def in_edges(self, edge_type: EdgeType, node: int, until: int | None = None) -> list[int]:
        """The ids of edges into a node, in order; with ``until``, without later ones.

        An edge is later if its own time or that of its source is. In a temporal graph the order is
        by time, then by edge id.
        """
        edges = self._in_edges[edge_type].get(node, [])
        time = self._times[edge_type]
        if time is None or until is None:
            return list(edges)
        return [edge for edge in edges if time[edge] <= until]

    @cached_property
    def _times(self) -> dict[EdgeType, list[int] | None]:
        times = {t: self.time_of(t) for t in self.edges}
        return {t: None if time is None else time.tolist() for t, time in times.items()}

    @cached_property
    def _in_edges(self) -> dict[EdgeType, dict[int, list[int]]]:
        out: dict[EdgeType, dict[int, list[int]]] = {}
        for edge_type, (_, destination) in self.edges.items():
            listed = out[edge_type] = defaultdict(list)
            for edge, node in enumerate(destination.tolist()):
                listed[node].append(edge)
            time = self._times[edge_type]
            if time is not None:
                for edges in listed.values():
                    edges.sort(key=time.__getitem__)
        return out

    def time_of(self, edge_type: EdgeType) -> Tensor | None:
        """The time from which each edge can be followed: its own, or that of its source."""
        if edge_type in self.edge_time:
            return self.edge_time[edge_type]
        if self.source_type(edge_type) in self.node_time:
            source = self.edges[edge_type][0].to(torch.int64)
            return self.node_time[self.source_type(edge_type)][source]
        return None


class Turned(EdgeLists):
    """A graph with reversed edges."""

    def source_type(self, edge_type: EdgeType) -> NodeType:
        return None if edge_type is None else edge_type[2]

    def destination_type(self, edge_type: EdgeType) -> NodeType:
        return None if edge_type is None else edge_type[0]
