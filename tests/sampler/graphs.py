"""Small random graphs as samplers see them, built edge by edge without the code under test."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology
from pyg_scale.sampler.base import NeighborSampler

Sampler = TypeVar("Sampler", bound=NeighborSampler)


def csc(
    num_nodes: int,
    edges: Sequence[tuple[int, int]],
    *,
    time: Sequence[int] | None = None,
    order_time: Sequence[int] | None = None,
    weight: Sequence[float] | None = None,
    dtype: torch.dtype = torch.int64,
    interleaved: bool = False,
) -> CSC:
    """The in-edges of ``num_nodes`` nodes; edges are (neighbour, expanded node) pairs.

    Args:
        time: Of each edge, kept in the result.
        order_time: Of each edge, which only orders neighbourhoods (node times do).
        weight: Of each edge.
    """
    by_time = time or order_time or [0] * len(edges)
    order = sorted(range(len(edges)), key=lambda e: (edges[e][1], by_time[e], e))
    count = [0] * num_nodes
    for _, node in edges:
        count[node] += 1
    indptr = torch.tensor([0, *count]).cumsum(0)
    indices = torch.tensor([edges[e][0] for e in order], dtype=dtype)
    edge_id: Tensor | None = torch.tensor(order, dtype=dtype)
    if order == list(range(len(edges))):
        edge_id = None
    elif interleaved:
        pairs = torch.stack([indices, torch.tensor(order, dtype=dtype)], dim=1)
        indices, edge_id = pairs[:, 0], pairs[:, 1]
    prefix: list[int] = []
    for _, mine in itertools.groupby(order, key=lambda e: edges[e][1]):
        weights = [weight[e] for e in mine] if weight is not None else []
        total, largest = 0, max(weights, default=0)
        for w in weights:
            total += max(1, int(w / largest * 2**32)) if w else 0
            prefix.append(total)
    return CSC(
        indptr,
        indices,
        edge_id,
        torch.tensor([time[e] for e in order], dtype=torch.int64) if time is not None else None,
        torch.tensor(prefix, dtype=torch.int64) if weight is not None else None,
    )


def random_topology(rng: random.Random, **forced: Any) -> Topology:
    """A graph of some kind: hubs, isolated nodes, self-loops, parallel edges, times, weights."""

    def choose(name: str, options: Sequence[Any]) -> Any:
        return forced.get(name, rng.choice(options))

    hetero, dtype = choose("hetero", [False, True]), choose("dtype", [torch.int32, torch.int64])
    temporal = choose("temporal", [None, None, "node", "edge"])
    weighted, interleaved = choose("weighted", [False, True]), choose("interleaved", [False, True])
    direction = choose("direction", ["forward", "forward", "backward"])
    node_types: tuple[NodeType, ...] = ("b", "a", "c") if hetero else (None,)
    edge_types: tuple[EdgeType, ...] = (None,)
    if hetero:
        edge_types = (("a", "x", "b"), ("b", "rev_x", "a"), ("b", "to", "b"), ("c", "to", "a"))
    num_nodes = {t: choose("num_nodes", [1, 2, 5, 20, 40, 60]) for t in node_types}
    timed = {t for t in node_types if temporal == "node" and (not hetero or t != "c")}
    node_time = {t: torch.tensor([rng.randrange(8) for _ in range(num_nodes[t])]) for t in timed}
    graph = Topology(
        node_types,
        edge_types,
        num_nodes,
        {},
        node_time,
        choose("index_dtype", [torch.int32, torch.int64]),
        direction,
    )
    csc_of = {}
    for edge_type in edge_types:
        neighbor, expanded = graph.neighbor_type(edge_type), graph.expanded_type(edge_type)
        n, m = num_nodes[expanded], num_nodes[neighbor]
        count = choose("num_edges", [0, n, 3 * n, 12 * n, 12 * n])
        hub = rng.randrange(n)
        edges = [
            (rng.randrange(m), hub if rng.random() < 0.2 else rng.randrange(n))
            for _ in range(count)
        ]
        if rng.random() < 0.2:
            edges.sort(key=lambda edge: edge[1])  # then edge ids are positions
        times = node_time[neighbor].tolist() if neighbor in node_time else None
        csc_of[edge_type] = csc(
            n,
            edges,
            time=[rng.randrange(8) for _ in edges] if temporal == "edge" else None,
            order_time=[times[edge[0]] for edge in edges] if times else None,
            weight=[rng.choice([0.0, 1e-12, 0.3, 1.0, 7.5]) for _ in edges] if weighted else None,
            dtype=dtype,
            interleaved=interleaved,
        )
    return Topology(
        node_types, edge_types, num_nodes, csc_of, node_time, graph.index_dtype, direction
    )


def bound(cls: type[Sampler], topology: Topology, **options: Any) -> Sampler:
    """A sampler of a graph that is given as its topology."""
    sampler = cls(sample_direction=topology.direction, **options)
    sampler.topology = topology
    return sampler


def random_seeds(
    rng: random.Random, topology: Topology, most: int = 12
) -> tuple[dict[NodeType, Tensor], dict[NodeType, Tensor] | None]:
    """Seeds of some node types, with repeats, and their times if the graph has any."""
    seed, time = {}, {}
    for node_type in topology.node_types:
        if topology.is_hetero and rng.random() < 0.3:
            continue
        count = rng.choice([0, 1, 3, most, most])
        nodes = [rng.randrange(topology.num_nodes[node_type]) for _ in range(count)]
        seed[node_type] = torch.tensor(nodes, dtype=rng.choice([torch.int32, torch.int64]))
        time[node_type] = torch.tensor([rng.randrange(9) for _ in range(count)], dtype=torch.int64)
    return seed, time if topology.is_temporal else None


def random_options(rng: random.Random, topology: Topology) -> dict[str, Any]:
    """Options of a sampler."""
    hops = rng.choice([0, 1, 2, 2, 3])
    fanouts = [-1, 0, 1, 2, 2, 3, 3, 10, 100]

    def per_hop() -> list[int]:
        return [rng.choice(fanouts) for _ in range(hops)]

    num_neighbors: Any = per_hop()
    if topology.is_hetero and rng.random() < 0.5:
        num_neighbors = {edge_type: per_hop() for edge_type in topology.edge_types}
    options = {
        "num_neighbors": num_neighbors,
        "replace": rng.random() < 0.3,
        "disjoint": rng.random() < 0.4,
        "subgraph_type": rng.choice(["directional"] * 3 + ["induced", "bidirectional"]),
        "temporal_strategy": rng.choice(["uniform", "last"]),
    }
    if not topology.is_temporal:
        options["temporal_strategy"] = "uniform"
    timed = [edge_type for edge_type in topology.edge_types if topology.is_timed(edge_type)]
    if timed and rng.random() < 0.5:
        window: Any = rng.choice([1, 2, 3, 5, 8])
        if topology.is_hetero and rng.random() < 0.5:
            some = timed[: 1 + len(timed) // 2]
            window = {edge_type: rng.choice([1, 3, 6]) for edge_type in some}
        options["time_window"] = window
    if timed and rng.random() < 0.3:
        options["strictly_earlier"] = True
    return options


def difference(a: Any, b: Any) -> Mapping[str, Any]:
    """The fields in which two samples differ, dtypes and orders of keys included."""
    return {
        name: (vars(a)[name], vars(b)[name])
        for name in vars(a)
        if not same(vars(a)[name], vars(b)[name])
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b
