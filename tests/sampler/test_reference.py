"""The reference sampler against the same rules written once more, with integers and dicts.

``scalar_sample`` follows the specification of the draws edge by edge, from the edge list
alone; it shares nothing with the sampler but :func:`edge_type_hash`.
"""

from __future__ import annotations

import bisect
import itertools
import math

import pytest
import torch
from torch_geometric.sampler import NodeSamplerInput

from pyg_scale.ops.keys import GOLDEN, NEIGHBOR, edge_type_hash, fold, mix
from pyg_scale.sampler.base import Sample
from pyg_scale.sampler.frontier import Chosen
from pyg_scale.sampler.hop import HopSampler
from pyg_scale.sampler.reference import ReferenceSampler
from pyg_scale.testing import graphs

MASK = (1 << 64) - 1
KEY = 0xFEDCBA9876543210


def bounded(key: int, index: int, size: int) -> int:
    word = mix(key + (index + 1) * GOLDEN)
    while (word * size) & MASK < 2**64 % size:
        word = mix(word + GOLDEN)
    return word * size >> 64


def fixed_point(weights: list[float], largest: float) -> list[int]:
    return [max(1, math.floor(w / largest * 2**32)) if w else 0 for w in weights]


def scalar_pick(key, edges, weights, k, replace):
    """The edges that one node takes of its candidates, in order."""
    d = len(edges)
    if k < 0 or (not replace and k >= d):
        return edges
    if replace and weights is None:
        return [edges[bounded(key, i, d)] for i in range(k)] if d else []
    if replace:
        sums = list(itertools.accumulate(weights))
        if not d or not sums[-1]:
            return []
        return [edges[bisect.bisect_right(sums, bounded(key, i, sums[-1]))] for i in range(k)]
    if weights is None:
        taken: list[int] = []
        for i in range(k):
            t = bounded(key, i, d - k + i + 1)
            taken.append(d - k + i if t in taken else t)
        return [edges[t] for t in taken]
    # Successive sampling: draw, take out, draw from the rest.
    rest, out = list(zip(edges, weights)), []
    for i in range(k):
        total = sum(w for _, w in rest)
        if not total:
            break
        t = bounded(key, i, total)
        at = bisect.bisect_right(list(itertools.accumulate(w for _, w in rest)), t)
        out.append(rest.pop(at)[0])
    return out


def scalar_sample(
    facts, node_types, seeds, hops, key, *, replace=False, disjoint=False, times=None, last=False
):
    """Lists of nodes and edges: what the specification says, one edge after the other."""
    nodes = {t: [] for t in node_types}  # (component, id)
    row_of, edges, position = {t: {} for t in node_types}, {t: [] for t in facts.edges}, 0
    for t in node_types:
        for node in seeds.get(t, []):
            identity = (position if disjoint else 0, node)
            row_of[t].setdefault(identity, len(nodes[t]))
            nodes[t].append(identity)
            position += 1
    begin = dict.fromkeys(node_types, 0)
    for hop in range(len(next(iter(hops.values())))):
        end = {t: len(nodes[t]) for t in node_types}
        for et in facts.edges:
            dst, src = facts.destination_type(et), facts.source_type(et)
            base = fold(key, NEIGHBOR, hop, edge_type_hash(et))
            for row in range(begin[dst], end[dst]):
                component, node = nodes[dst][row]
                node_key = fold(base, node, component) if disjoint else fold(base, node)
                everything = facts.in_edges(et, node)
                candidates = everything
                if times is not None:
                    candidates = facts.in_edges(et, node, times[component])
                k = hops[et][hop]
                if last and k >= 0 and facts.time_of(et) is not None:
                    candidates = candidates[max(0, len(candidates) - k) :]
                weights = None
                if et in facts.weight:
                    all_weights = facts.weight[et][everything].double().tolist()
                    q = fixed_point(all_weights, max(all_weights, default=0.0))
                    weights = [q[everything.index(e)] for e in candidates]
                for edge in scalar_pick(node_key, candidates, weights, k, replace):
                    neighbor = (component, int(facts.edges[et][0][edge]))
                    if neighbor not in row_of[src]:
                        row_of[src][neighbor] = len(nodes[src])
                        nodes[src].append(neighbor)
                    edges[et].append((row_of[src][neighbor], row, edge))
        begin = end
    return nodes, row_of, edges


def assert_same(out: Sample, nodes, edges, disjoint: bool) -> None:
    for t, expected in nodes.items():
        assert out.node[t].tolist() == [node for _, node in expected], t
        if disjoint:
            assert out.batch[t].tolist() == [component for component, _ in expected], t
    for et, expected in edges.items():
        found = zip(out.row[et].tolist(), out.col[et].tolist(), out.edge[et].tolist())
        assert list(found) == expected, et


CASES = [
    {},
    {"replace": True},
    {"disjoint": True},
    {"disjoint": True, "replace": True},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "replace": True},
    {"weight_attr": "weight", "disjoint": True},
    {"time_attr": "time"},
    {"time_attr": "when"},
    {"time_attr": "time", "replace": True},
    {"time_attr": "when", "temporal_strategy": "last"},
    {"time_attr": "time", "temporal_strategy": "last"},
    {"time_attr": "when", "temporal_strategy": "last", "replace": True},
    {"time_attr": "when", "weight_attr": "weight"},
    {"time_attr": "when", "weight_attr": "weight", "temporal_strategy": "last"},
    {"time_attr": "time", "weight_attr": "weight", "replace": True},
]


def case_name(case: dict) -> str:
    return "-".join(f"{v}" if isinstance(v, str) else k for k, v in case.items()) or "plain"


def compare(data, seeds, num_neighbors, hops, case, direction="forward", key=KEY):
    sampler = ReferenceSampler().bind(
        data, num_neighbors=num_neighbors, sample_direction=direction, **case
    )
    facts = graphs.EdgeLists.of(data, case.get("time_attr"), case.get("weight_attr"))
    facts = facts.reversed() if direction == "backward" else facts
    time = times = None
    if "time_attr" in case:
        time = {t: torch.tensor([3 + i % 4 for i in range(len(s))]) for t, s in seeds.items()}
        times = [i for t in sampler.topology.node_types if t in time for i in time[t].tolist()]
    out = sampler.sample_checked({t: torch.tensor(s) for t, s in seeds.items()}, time, key)
    nodes, _, edges = scalar_sample(
        facts,
        list(facts.num_nodes),
        seeds,
        hops,
        key,
        times=times,
        replace=case.get("replace", False),
        last="temporal_strategy" in case,
        disjoint=case.get("disjoint", False) or times is not None,
    )
    if direction == "backward":
        edges = {t: [(c, r, e) for r, c, e in listed] for t, listed in edges.items()}
    assert_same(out, nodes, edges, sampler.disjoint)


@pytest.mark.parametrize("case", CASES, ids=case_name)
@pytest.mark.parametrize("num_neighbors", [[3, 2], [-1, 1], [2, 0, 4], [70, 12], [1]], ids=str)
def test_follows_the_specification(case, num_neighbors):
    seeds = {None: [0, 7, 5, 99, 98, 4, 8, 5, 0]}
    compare(graphs.hostile(), seeds, num_neighbors, {None: num_neighbors}, case)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_follows_the_specification_with_types(case):
    data = graphs.hetero()
    hops = {t: [2, 1 + len(t[1]) % 3] for t in data.edge_types}
    hops["user", "follows", "user"] = [-1, 0]
    compare(data, {"item": [3, 0, 3], "user": [19, 2]}, hops, hops, case)


@pytest.mark.parametrize("data", [graphs.hostile(), graphs.hetero()], ids=["homo", "hetero"])
def test_follows_the_specification_backward(data):
    types = list(graphs.EdgeLists.of(data).edges)
    seeds = {None if types == [None] else "user": [0, 3, 17]}
    compare(data, seeds, [3, 2], {t: [3, 2] for t in types}, {}, "backward")


@pytest.mark.parametrize("case", CASES[:1] + CASES[4:5], ids=case_name)
def test_follows_the_specification_for_many_keys(case):
    for key in range(200):
        compare(graphs.hostile(), {None: [0, 8]}, [2], {None: [2]}, case, key=key)


def test_agrees_with_what_is_written_out():
    sampler = ReferenceSampler().bind(graphs.written_out(), num_neighbors=[-1, -1])
    for seeds, (nodes, per_hop, edges) in graphs.WRITTEN_OUT.items():
        out = sampler.sample_checked({None: torch.tensor(seeds)}, None, KEY)
        assert out.node[None].tolist() == nodes
        assert out.num_sampled_nodes == {None: per_hop}
        assert out.edge[None].tolist() == edges[0] + edges[1]
        assert out.num_sampled_edges == {None: [len(e) for e in edges]}


def scalar_induced(facts, nodes, row_of, disjoint, times):
    """Every edge among the sampled nodes, for every row of its destination."""
    out = {}
    for et, (source, _) in facts.edges.items():
        out[et] = [
            (row_of[facts.source_type(et)][component, int(source[edge])], row, edge)
            for row, (component, node) in enumerate(nodes[facts.destination_type(et)])
            for edge in sorted(facts.in_edges(et, node))
            if (component, int(source[edge])) in row_of[facts.source_type(et)]
            and (
                times is None
                or et not in facts.edge_time
                or facts.edge_time[et][edge] <= times[component]
            )
        ]
    return out


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[7], CASES[8]], ids=case_name)
@pytest.mark.parametrize("data", [graphs.hostile(), graphs.hetero()], ids=["homo", "hetero"])
def test_induced(data, case):
    types = list(graphs.EdgeLists.of(data).edges)
    seeds = {None if types == [None] else "user": [0, 8, 0, 17]}
    sampler = ReferenceSampler().bind(data, num_neighbors=[3, 2], subgraph_type="induced", **case)
    facts = graphs.EdgeLists.of(data, case.get("time_attr"))
    times = [7, 3, 5, 4] if "time_attr" in case else None
    out = sampler.sample_checked(
        {t: torch.tensor(s) for t, s in seeds.items()},
        None if times is None else {t: torch.tensor(times) for t in seeds},
        KEY,
    )
    nodes, row_of, _ = scalar_sample(
        facts,
        list(facts.num_nodes),
        seeds,
        {t: [3, 2] for t in types},
        KEY,
        disjoint=sampler.disjoint,
        times=times,
    )
    edges = scalar_induced(facts, nodes, row_of, sampler.disjoint, times)
    assert sum(map(len, edges.values())) > 30
    assert_same(out, nodes, edges, sampler.disjoint)
    assert out.num_sampled_nodes is None
    assert out.num_sampled_edges is None
    for et in types:
        size = len(nodes[facts.destination_type(et)])
        assert (
            out.colptr[et].diff().tolist() == torch.bincount(out.col[et], minlength=size).tolist()
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dtypes(dtype):
    sampler = ReferenceSampler().bind(graphs.hostile(dtype), num_neighbors=[2, 2], disjoint=True)
    out = sampler.sample_checked({None: torch.tensor([1, 2], dtype=torch.int32)}, None, KEY)
    assert {out.node[None].dtype, out.row[None].dtype, out.col[None].dtype} == {dtype}
    assert out.edge[None].dtype == out.batch[None].dtype == out.colptr[None].dtype == torch.int64


class Weighted(HopSampler):
    """Takes the first edges and says with which probability it would have taken them."""

    exact_count = uniform = False

    def pick(self, frontier, k):
        row, position = frontier.candidates()
        place = position - frontier.begin[row]
        row, position = row[place < k], position[place < k]
        # In the wrong order on purpose: edges of one row stay in the order given.
        order = torch.arange(row.numel()).flip(0)
        return Chosen(row[order], position[order], {"chance": 1.0 / position[order].double()})

    def pick_all(self, frontier):
        row, position = frontier.candidates()
        return Chosen(row, position, {"chance": 1.0 / position.double()})


def test_extra_tensors_stay_with_their_edges():
    sampler = Weighted().bind(graphs.hetero(), num_neighbors=[2, -1])
    out = sampler.sample_checked({"user": torch.tensor([1, 19, 4])}, None, KEY)
    assert set(out.edge_attrs["chance"]) == set(out.edge)  # where there are no edges, empty ones
    csc = sampler.topology.csc
    for edge_type, chance in out.edge_attrs["chance"].items():
        position = (1.0 / chance).round().long()
        assert torch.equal(csc[edge_type].original_id(position), out.edge[edge_type])
        col = out.col[edge_type]
        assert bool((col[1:] >= col[:-1]).all())
    output = sampler.sample_from_nodes(
        NodeSamplerInput(None, torch.tensor([1]), input_type="user"), key=KEY
    )
    assert "chance" in output.edge_attrs


@pytest.mark.parametrize("subgraph_type", ["induced", "bidirectional"])
def test_extra_tensors_are_never_dropped_silently(subgraph_type):
    sampler = Weighted().bind(graphs.hostile(), num_neighbors=[2], subgraph_type=subgraph_type)
    with pytest.raises(NotImplementedError, match=r"chance.*directional"):
        sampler.sample_checked({None: torch.tensor([1])}, None, KEY)


def test_a_fan_out_beyond_all_degrees_costs_nothing():
    sampler = ReferenceSampler().bind(graphs.hostile(), num_neighbors=[10**9])
    out = sampler.sample_checked({None: torch.tensor([0])}, None, KEY)
    assert out.row[None].numel() == graphs.EdgeLists.of(graphs.hostile()).edges[None][1].eq(0).sum()
