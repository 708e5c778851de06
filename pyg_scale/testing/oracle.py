"""Checks that a sample is correct, derived only from the edge list of the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.sampler.base import Sample
from pyg_scale.testing.graphs import EdgeLists


@dataclass
class SampleRequest:
    """A request to a sampler.

    Attributes:
        facts: The graph, reversed for ``sample_direction="backward"``.
        seeds: Seeds by node type.
        hops: Neighbours per hop of every edge type.
        times: Times of the seeds, over all node types in their order; ``None`` if not temporal.
        replace: True if sampling with replacement.
        disjoint: True if every seed has its own subgraph.
        last: True for ``temporal_strategy="last"``.
        windows: The lengths of time that seeds look back along an edge type.
        strict: True for ``strictly_earlier=True``.
        exact_count: The declaration of the sampler.
    """

    facts: EdgeLists
    seeds: Mapping[NodeType, list[int]]
    hops: Mapping[EdgeType, list[int]]
    times: list[int] | None = None
    replace: bool = False
    disjoint: bool = False
    last: bool = False
    windows: Mapping[EdgeType, int] = field(default_factory=dict)
    strict: bool = False
    exact_count: bool = True

    def visible(self, edge_type: EdgeType, node: int, component: int) -> list[int]:
        """The in-edges of a node that a seed sees, in order: none too late, and none too early."""
        if self.times is None:
            return self.facts.in_edges(edge_type, node)
        now, time = self.times[component], self.facts.time_of(edge_type)
        edges = self.facts.in_edges(edge_type, node, now - 1 if self.strict else now)
        if edge_type not in self.windows or time is None:
            return edges
        return [edge for edge in edges if now - self.windows[edge_type] < time[edge]]

    @property
    def num_hops(self) -> int:
        return max(map(len, self.hops.values()), default=0)


def verify(sample: Sample, request: SampleRequest) -> None:
    """Fail unless a directional sample fulfils a request, naming the first fault."""
    verify_nodes(sample, request)
    verify_edges(sample, request)
    _verify_pointers(sample)
    begin, end = _hops_of_rows(sample, request)
    _verify_order(sample, request, begin, end)
    for edge_type in request.facts.edges:
        _verify_expansion(sample, request, edge_type, begin, end)


def verify_nodes(sample: Sample, request: SampleRequest) -> None:
    """Check that seeds come first and in order, and that each other node occurs once."""
    facts, position = request.facts, 0
    assert set(sample.node) == set(facts.num_nodes), "every node type must be a key of node"
    assert (sample.batch is not None) == request.disjoint, "batch must exist only if disjoint"
    for node_type, node in sample.node.items():
        seeds = request.seeds.get(node_type, [])
        listed, what = node.tolist(), f"node{_of(node_type)}"
        assert listed[: len(seeds)] == seeds, f"{what} does not begin with the seeds, in order"
        wrong = [v for v in listed if not 0 <= v < facts.num_nodes[node_type]]
        assert not wrong, f"{what}: {wrong[0]} is not a node of the graph"
        identity = identities(sample, node_type)
        extra = identity[len(seeds) :]
        known = set(identity[: len(seeds)])
        repeated = [i for i, n in Counter(extra).items() if n > 1 or i in known]
        assert not repeated, f"{what}: {repeated[:3]} (component, node) occurs more than once"
    if sample.batch is not None:
        for node_type in facts.num_nodes:  # seeds are numbered over all types, in their order
            number = len(request.seeds.get(node_type, []))
            found = sample.batch[node_type][:number].tolist()
            assert found == list(range(position, position + number)), (
                f"batch{_of(node_type)} of the seeds is not their position"
            )
            position += number


def verify_edges(sample: Sample, request: SampleRequest, both_ways: bool = False) -> None:
    """Check that every edge is an edge of the graph with the same ends.

    Args:
        sample: The sample.
        request: The request.
        both_ways: If True, an edge may also be reversed.
    """
    facts = request.facts
    for name in ("row", "col", "edge"):
        assert set(getattr(sample, name)) == set(facts.edges), (
            f"every edge type must be a key of {name}"
        )
    for edge_type, (source, destination) in facts.edges.items():
        row, col, edge = sample.row[edge_type], sample.col[edge_type], sample.edge[edge_type]
        where = _of(edge_type)
        assert row.dtype == col.dtype == source.dtype, f"row and col{where} are not {source.dtype}"
        sources = sample.node[facts.source_type(edge_type)]
        destinations = sample.node[facts.destination_type(edge_type)]
        assert sources.dtype == destinations.dtype == source.dtype, f"node is not {source.dtype}"
        assert row.shape == col.shape, f"row and col{where} differ in size"
        if row.numel():
            assert 0 <= int(row.min()) <= int(row.max()) < sources.numel(), f"row{where} is no row"
            assert 0 <= int(col.min()) <= int(col.max()) < destinations.numel(), (
                f"col{where} is no row"
            )
        if edge is not None:
            assert edge.dtype == torch.int64, f"edge{where} must be int64"
            assert edge.shape == row.shape, f"edge{where} and row differ in size"
            wrong = (edge < 0) | (edge >= source.numel())
            assert not bool(wrong.any()), f"edge{where}: {edge[wrong][0]} is not an edge"
            ends = sources[row.long()], destinations[col.long()]
            real = (source[edge] == ends[0]) & (destination[edge] == ends[1])
            if both_ways:
                real |= (source[edge] == ends[1]) & (destination[edge] == ends[0])
            bad = (~real).nonzero().view(-1)[:1].tolist()
            assert not bad, (
                f"edge {edge[bad]} {where} is {source[edge[bad]]} -> {destination[edge[bad]]} in "
                f"the graph, but {ends[0][bad]} -> {ends[1][bad]} in the sample"
            )
        _verify_lookup(sample, request, edge_type)
    for name, of_type in sample.edge_attrs.items():
        for edge_type, values in of_type.items():
            assert values.size(0) == sample.row[edge_type].numel(), f"edge_attrs[{name!r}]"
    for name, of_node in sample.node_attrs.items():
        for node_type, values in of_node.items():
            assert values.size(0) == sample.node[node_type].numel(), f"node_attrs[{name!r}]"


def _verify_lookup(sample: Sample, request: SampleRequest, edge_type: EdgeType) -> None:
    """Check that neighbours are first rows of their nodes, in the expanded node's component."""
    facts = request.facts
    source_type = facts.source_type(edge_type)
    if sample.batch is not None:
        from_batch = sample.batch[source_type][sample.row[edge_type].long()]
        to_batch = sample.batch[facts.destination_type(edge_type)][sample.col[edge_type].long()]
        assert torch.equal(from_batch, to_batch), (
            f"disjoint: an edge{_of(edge_type)} leads from one component to another"
        )
    wrong = set(sample.row[edge_type].tolist()) - set(first_rows(sample, source_type))
    assert not wrong, (
        f"edges{_of(edge_type)} come from row {min(wrong)}, a repeated seed: they must come "
        f"from the first row of that node"
    )


def _verify_pointers(sample: Sample) -> None:
    for edge_type, col in sample.col.items():
        where = _of(edge_type)
        assert bool((col[1:] >= col[:-1]).all()), f"col{where} decreases"
        if sample.colptr is not None:
            colptr = sample.colptr[edge_type]
            assert colptr.dtype == torch.int64, f"colptr{where} must be int64"
            assert colptr.numel() > (int(col.max()) + 1 if col.numel() else 0), (
                f"colptr{where} does not cover all expanded nodes"
            )
            count = torch.bincount(col.long(), minlength=colptr.numel() - 1)
            assert torch.equal(colptr, torch.cat([count.new_zeros(1), count.cumsum(0)])), (
                f"colptr{where} does not agree with col"
            )


def _hops_of_rows(
    sample: Sample, request: SampleRequest
) -> tuple[dict[NodeType, list[int]], dict[NodeType, list[int]]]:
    """Check the numbers per hop; return the bounds of the rows of each hop."""
    begin, end = {}, {}
    assert sample.num_sampled_nodes is not None, "num_sampled_nodes is missing"
    assert sample.num_sampled_edges is not None, "num_sampled_edges is missing"
    for node_type, node in sample.node.items():
        number = sample.num_sampled_nodes[node_type]
        what = f"num_sampled_nodes{_of(node_type)} = {number}"
        assert len(number) == request.num_hops + 1, f"{what}: one for the seeds and one per hop"
        assert sum(number) == node.numel(), f"{what} does not add up to {node.numel()} nodes"
        assert number[0] == len(request.seeds.get(node_type, [])), f"{what}: seeds come first"
        total = torch.tensor(number).cumsum(0).tolist()
        begin[node_type], end[node_type] = [0, *total[:-1]], total
    for edge_type, row in sample.row.items():
        number = sample.num_sampled_edges[edge_type]
        what = f"num_sampled_edges{_of(edge_type)} = {number}"
        assert len(number) == request.num_hops, f"{what}: one per hop"
        assert sum(number) == row.numel(), f"{what} does not add up to {row.numel()} edges"
    return begin, end


def _edges_of_hop(sample: Sample, edge_type: EdgeType, hop: int) -> slice:
    assert sample.num_sampled_edges is not None
    number = sample.num_sampled_edges[edge_type]
    return slice(sum(number[:hop]), sum(number[: hop + 1]))


def _verify_order(
    sample: Sample,
    request: SampleRequest,
    begin: Mapping[NodeType, list[int]],
    end: Mapping[NodeType, list[int]],
) -> None:
    """Check that nodes are in the order in which they were first reached, each in its hop."""
    facts = request.facts
    for hop in range(request.num_hops):
        reached: dict[NodeType, dict[int, None]] = {t: {} for t in facts.num_nodes}
        for edge_type in facts.edges:
            row = sample.row[edge_type][_edges_of_hop(sample, edge_type, hop)]
            reached[facts.source_type(edge_type)].update(dict.fromkeys(row.tolist()))
        for node_type, rows in reached.items():
            new = [row for row in rows if row >= end[node_type][hop]]
            expected = list(range(begin[node_type][hop + 1], end[node_type][hop + 1]))
            assert sorted(new) == expected, (
                f"hop {hop}: rows {expected[:5]}... of node{_of(node_type)} are said to be new, "
                f"but its edges reach {sorted(new)[:5]}..."
            )
            assert new == expected, (
                f"hop {hop}: new nodes{_of(node_type)} are not in the order of the edges"
            )


def _verify_expansion(
    sample: Sample,
    request: SampleRequest,
    edge_type: EdgeType,
    begin: Mapping[NodeType, list[int]],
    end: Mapping[NodeType, list[int]],
) -> None:
    """Check that every node is expanded once, in the hop after it was reached, and its edges."""
    edge = sample.edge[edge_type]
    assert edge is not None, f"edge{_of(edge_type)} is missing"
    node_type = request.facts.destination_type(edge_type)
    node, components = sample.node[node_type].tolist(), _components(sample, node_type)
    for hop in range(request.num_hops):
        hop_edges = _edges_of_hop(sample, edge_type, hop)
        taken: dict[int, list[int]] = {
            row: [] for row in range(begin[node_type][hop], end[node_type][hop])
        }
        col = sample.col[edge_type][hop_edges]
        for row, edge_id in zip(col.tolist(), edge[hop_edges].tolist()):
            assert row in taken, (
                f"hop {hop} expands node {node[row]}{_of(edge_type)}, which was not reached in "
                f"hop {hop - 1}"
            )
            taken[row].append(edge_id)
        for row, edges in taken.items():
            what = f"hop {hop}, node {node[row]}{_of(edge_type)}"
            _verify_choice(request, edge_type, hop, node[row], components[row], edges, what)


def _verify_choice(
    request: SampleRequest,
    edge_type: EdgeType,
    hop: int,
    node: int,
    component: int,
    edges: list[int],
    what: str,
) -> None:
    facts, k = request.facts, request.hops[edge_type][hop]
    until = None if request.times is None else request.times[component]
    candidates = request.visible(edge_type, node, component)
    weight = facts.weight.get(edge_type)
    late = set(edges) - set(facts.in_edges(edge_type, node, until))
    assert not late, f"{what}: edge {min(late)} is later than the seed ({until})"
    hidden = set(edges) - set(candidates)
    assert not hidden, (
        f"{what}: edge {min(hidden)} is not in the window of the seed ({until}): time_window="
        f"{dict(request.windows)}, strictly_earlier={request.strict}"
    )
    if request.last and k >= 0 and facts.time_of(edge_type) is not None:
        candidates = candidates[max(0, len(candidates) - k) :]
        early = set(edges) - set(candidates)
        assert not early, f"{what}: edge {min(early)} is not one of the last {k}"
    if not request.replace or k < 0:
        repeated = [e for e, n in Counter(edges).items() if n > 1]
        assert not repeated, f"{what}: edge {repeated[:1]} was taken more than once"
    everything = k < 0 or (not request.replace and k >= len(candidates))
    possible = candidates
    if weight is not None and not everything:
        possible = [e for e in candidates if weight[e] > 0]
        zero = set(edges) - set(possible)
        assert not zero, f"{what}: edge {min(zero)} has weight 0"
    if request.exact_count or k <= 0:
        expected = len(possible) if everything else min(k, len(possible))
        if request.replace and not everything and possible:
            expected = k
        assert len(edges) == expected, (
            f"{what}: {len(edges)} in-edges were taken instead of {expected} "
            f"(num_neighbors={k}, {len(candidates)} candidates)"
        )


def _components(sample: Sample, node_type: NodeType) -> list[int]:
    if sample.batch is None:
        return [0] * sample.node[node_type].numel()
    batch = sample.batch[node_type]
    assert batch.dtype == torch.int64, "batch must be int64"
    assert batch.numel() == sample.node[node_type].numel(), "batch and node differ in size"
    return batch.tolist()


def identities(sample: Sample, node_type: NodeType) -> list[tuple[int, int]]:
    """Seed position (0 if not disjoint) and id of every node."""
    return list(zip(_components(sample, node_type), sample.node[node_type].tolist()))


def first_rows(sample: Sample, node_type: NodeType) -> list[int]:
    """The first row of the same node, for every row."""
    first: dict[tuple[int, int], int] = {}
    return [first.setdefault(v, row) for row, v in enumerate(identities(sample, node_type))]


def edge_list(sample: Sample, edge_type: EdgeType) -> list[tuple[int, int, int]]:
    """``(row, col, edge id)`` of every edge, sorted."""
    edge: Tensor | None = sample.edge[edge_type]
    assert edge is not None
    row, col = sample.row[edge_type], sample.col[edge_type]
    return sorted(zip(row.tolist(), col.tolist(), edge.tolist()))


def _of(of_type: NodeType | EdgeType) -> str:
    return "" if of_type is None else f" of type {of_type!r}"
