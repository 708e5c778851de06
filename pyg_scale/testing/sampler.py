"""Conformance of a sampler: real edges, exact numbers, no later edges, unbiased draws by key."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

import pyg_scale
from pyg_scale.partitioner.base import Partition
from pyg_scale.partitioner.write import write_partition
from pyg_scale.sampler.base import NeighborSampler
from pyg_scale.sampler.capabilities import CAPABILITIES
from pyg_scale.sampler.parts import parts_topology
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.testing import graphs
from pyg_scale.testing.ask import ask, bind, draw, unbound
from pyg_scale.testing.draws import DrawTests, assert_equal
from pyg_scale.testing.graphs import EdgeLists
from pyg_scale.testing.oracle import SampleRequest, edge_list, first_rows, identities

OPTIONS: list[dict[str, Any]] = [
    {},
    {"replace": True},
    {"disjoint": True},
    {"disjoint": True, "replace": True},
    {"sample_direction": "backward"},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "replace": True},
    {"time_attr": "time"},
    {"time_attr": "when"},
    {"time_attr": "when", "replace": True},
    {"time_attr": "time", "temporal_strategy": "last"},
    {"time_attr": "when", "temporal_strategy": "last"},
    {"time_attr": "when", "temporal_strategy": "last", "replace": True},
    {"time_attr": "when", "weight_attr": "weight"},
    {"time_attr": "time", "sample_direction": "backward"},
    {"time_attr": "time", "time_window": 3},
    {"time_attr": "when", "time_window": 4, "temporal_strategy": "last"},
    {"time_attr": "when", "time_window": 5, "weight_attr": "weight", "replace": True},
    {"time_attr": "time", "time_window": 4, "strictly_earlier": True, "temporal_strategy": "last"},
]
"""Combinations of options; those that a sampler does not support are skipped."""

HOPS = [[3, 2], [-1, -1], [2, 0, 4], [1], [70, 12], [0, 0], [-1, 1, 1, 1]]
SEEDS = [0, 7, 5, 99, 98, 4, 8, 6]
ITEMS_AND_USERS = {"user": [19, 2, 0], "item": [3, 0, 11]}


def name(value: Any) -> str:
    """A short name for a parameter."""
    if isinstance(value, dict):
        return "-".join(str(v) if isinstance(v, str) else k for k, v in value.items()) or "plain"
    return str(value)


PART_SEEDS: dict[bool, Any] = {
    False: [0, 7, 5, 99, 98, 4, 8, 6, 40, 41],
    True: {"user": [19, 2, 0], "item": [3, 0, 11]},
}
"""Options for the graph without types, and for the one with types."""


class AcrossPartsTests:
    """The tests of :class:`~pyg_scale.testing.SamplerTests` for graphs of several parts."""

    @pytest.mark.parametrize(
        ("typed", "options"),
        [
            (False, {}),
            (False, {"replace": True}),
            (False, {"disjoint": True}),
            (False, {"disjoint": True, "redraw": False}),
            (False, {"weight_attr": "weight"}),
            (False, {"time_attr": "when"}),
            (False, {"time_attr": "when", "temporal_strategy": "last"}),
            (False, {"time_attr": "when", "time_window": 4, "strictly_earlier": True}),
            (False, {"subgraph_type": "induced"}),
            (True, {}),
        ],
        ids=str,
    )
    def test_parts_give_the_batches_of_the_whole_graph(
        self, unbound: NeighborSampler, typed: bool, options: dict[str, Any]
    ) -> None:
        if not unbound.across_parts:
            pytest.skip("the sampler declares across_parts = False")
        data = graphs.hetero() if typed else graphs.hostile()
        attrs = {name: options[name] for name in ("time_attr", "weight_attr") if name in options}
        time = [4, 0, 7, 3, 3, 5, 1, 4, 9, 2] if "time_attr" in options else None
        whole = bind(unbound, data, [3, 2], **options)
        in_parts = bind(unbound, data, [3, 2], **options)
        with tempfile.TemporaryDirectory() as folder:
            in_parts.topology = parts_topology(_in_parts(data, Path(folder), **attrs), **attrs)
            for key in (1, 2):
                expected = draw(whole, PART_SEEDS[typed], key, time)
                found = draw(in_parts, PART_SEEDS[typed], key, time)
                try:
                    assert_equal(found, expected)
                except AssertionError as error:
                    raise AssertionError(
                        f"three parts give a different batch from the whole graph: {error}. Each "
                        "part is asked for its own nodes, and has edges in other places: draw "
                        "by the index among the in-edges of a node (position - "
                        "frontier.begin[row]), and not by the place of a node in the frontier; or "
                        "declare across_parts = False"
                    ) from None


def _in_parts(data: Data | HeteroData, folder: Path, **attrs: Any) -> GraphDirectory:
    """The graph in three parts with random nodes."""
    pyg_scale.save(data, folder / "whole", **attrs)
    generator = torch.Generator().manual_seed(3)
    assignment = {
        t: torch.randint(3, (size,), generator=generator).int()
        for t, size in graphs.EdgeLists.of(data).num_nodes.items()
    }
    partition = Partition(assignment, 3, "random")
    return write_partition(folder / "whole", partition, folder / "parts")


class SamplerTests(DrawTests, AcrossPartsTests):
    """Tests of an unbound sampler. Capabilities that it does not declare must raise.

    Example::

        class TestMySampler(SamplerTests):
            @pytest.fixture
            def sampler(self):
                return MySampler()
    """

    @pytest.fixture
    def sampler(self) -> NeighborSampler | str:
        """A sampler made without data, or its name."""
        raise NotImplementedError("return your sampler, made without data, such as MySampler()")

    @pytest.fixture
    def unbound(self, sampler: NeighborSampler | str) -> NeighborSampler:
        """The sampler under test."""
        return unbound(sampler)

    # The contract ##########################################################################

    def test_declares_known_capabilities(self, unbound: NeighborSampler) -> None:
        unknown = set(unbound.supports) - set(CAPABILITIES)
        assert not unknown, f"supports has {sorted(unknown)}; possible are {sorted(CAPABILITIES)}"

    @pytest.mark.parametrize("capability", CAPABILITIES)
    def test_what_is_not_declared_raises(self, unbound: NeighborSampler, capability: str) -> None:
        asked: dict[str, tuple[Data | HeteroData, dict[str, Any]]] = {
            "hetero": (graphs.hetero(), {}),
            "replace": (graphs.hostile(), {"replace": True}),
            "disjoint": (graphs.hostile(), {"disjoint": True}),
            "weighted": (graphs.hostile(), {"weight_attr": "weight"}),
            "node_time": (graphs.hostile(), {"time_attr": "time"}),
            "edge_time": (graphs.hostile(), {"time_attr": "when"}),
            "last": (graphs.hostile(), {"time_attr": "when", "temporal_strategy": "last"}),
            "window": (graphs.hostile(), {"time_attr": "when", "time_window": 2}),
            "strict": (graphs.hostile(), {"time_attr": "when", "strictly_earlier": True}),
            "bidirectional": (graphs.hostile(), {"subgraph_type": "bidirectional"}),
            "induced": (graphs.hostile(), {"subgraph_type": "induced"}),
            "backward": (graphs.hostile(), {"sample_direction": "backward"}),
            "fixed": (graphs.hostile(), {"redraw": False}),
            "links": (graphs.hostile(), {}),
        }
        data, options = asked[capability]

        def use() -> None:
            bound = unbound.bind(data, num_neighbors=[2], **options)
            if capability == "links":
                links = EdgeSamplerInput(None, torch.tensor([0]), torch.tensor([1]))
                bound.sample_from_edges(links, key=1)

        if capability in unbound.supports:
            use()
        else:
            with pytest.raises(NotImplementedError, match=capability):
                use()

    def test_binding_leaves_the_unbound_sampler_alone(self, unbound: NeighborSampler) -> None:
        first = unbound.bind(graphs.written_out(), num_neighbors=[1])
        second = unbound.bind(graphs.hostile(), num_neighbors=[-1, -1])
        assert not unbound.is_bound
        assert first.topology is not second.topology
        assert draw(first, [0]).num_sampled_edges == {None: [1]} or not unbound.exact_count

    def test_can_be_pickled(self, unbound: NeighborSampler) -> None:
        pickle.loads(pickle.dumps(unbound)).bind(graphs.hostile(), num_neighbors=[3])
        bound = bind(unbound, graphs.hostile(), [3, 2])
        again = pickle.loads(pickle.dumps(bound))
        assert_equal(draw(again, SEEDS, 4), draw(bound, SEEDS, 4))

    @pytest.mark.parametrize(
        ("seed", "error"),
        [
            (torch.tensor([0, 100]), IndexError),
            (torch.tensor([-1]), IndexError),
            (torch.tensor([0.0, 1.0]), TypeError),
            (torch.tensor([[0, 1]]), TypeError),
        ],
        ids=["too large", "negative", "float", "matrix"],
    )
    def test_seeds_that_are_none_raise(
        self, unbound: NeighborSampler, seed: torch.Tensor, error: type[Exception]
    ) -> None:
        bound = bind(unbound, graphs.hostile(), [2])
        with pytest.raises(error, match="seed"):
            bound.sample_from_nodes(NodeSamplerInput(None, seed), key=1)

    def test_gives_what_pyg_loaders_expect(self, unbound: NeighborSampler) -> None:
        bound = bind(unbound, graphs.hostile(), [3, 2])
        inputs = NodeSamplerInput(torch.tensor([5, 2]), torch.tensor([0, 7]))
        out, sample = bound.sample_from_nodes(inputs, key=3), draw(bound, [0, 7], 3)
        assert torch.equal(out.node, sample.node[None])
        assert torch.equal(out.row, sample.row[None])
        assert out.num_sampled_nodes == (sample.num_sampled_nodes or {}).get(None)
        assert torch.equal(out.metadata[0], torch.tensor([5, 2]))
        assert out.metadata[1] is None

    @pytest.mark.parametrize("disjoint", [False, True])
    def test_links(self, unbound: NeighborSampler, disjoint: bool) -> None:
        if "links" not in unbound.supports:
            pytest.skip(f"{type(unbound).__name__} does not declare 'links'")
        bound = bind(unbound, graphs.hostile(), [3, 2], disjoint=disjoint)
        links = torch.tensor([[0, 5, 3, 0], [7, 5, 4, 8]])
        out = bound.sample_from_edges(EdgeSamplerInput(None, *links), key=3)
        rows = out.metadata[1]
        assert torch.equal(out.node[rows], links), "edge_label_index does not lead to the links"
        source, destination = graphs.hostile().edge_index[:, out.edge]
        assert torch.equal(out.node[out.row], source)
        assert torch.equal(out.node[out.col], destination)

    @pytest.mark.parametrize("strategy", ["last", "uniform"])
    def test_a_link_is_not_in_its_own_neighborhood(
        self, unbound: NeighborSampler, strategy: str
    ) -> None:
        if "links" not in unbound.supports:
            pytest.skip(f"{type(unbound).__name__} does not declare 'links'")
        data, seeds = graphs.hostile(), torch.arange(40)
        bound = bind(
            unbound,
            data,
            [4, 4],
            time_attr="when",
            temporal_strategy=strategy,
            strictly_earlier=True,
        )
        links, time = data.edge_index[:, seeds], data.when[seeds]
        out = bound.sample_from_edges(EdgeSamplerInput(None, *links, None, time), key=2)
        assert out.edge.numel()
        early = data.when[out.edge] < time[out.batch[out.col]]
        assert bool(early.all()), "a link sees an edge that is as late as itself"

    def test_windows_of_some_edge_types(self, unbound: NeighborSampler) -> None:
        data = graphs.hetero()
        for attr in ("when", "time"):
            timed = EdgeLists.of(data, attr)
            types = [t for t in timed.edges if timed.time_of(t) is not None]
            windows = {types[0]: 2, types[-1]: 5}
            time = {"user": [4, 7, 3], "item": [3, 9, 5]}
            for hops in ([3, 2], [-1, -1]):
                ask(
                    unbound,
                    data,
                    ITEMS_AND_USERS,
                    hops,
                    time=time,
                    time_attr=attr,
                    time_window=windows,
                )

    @pytest.mark.parametrize(
        ("window", "error"),
        [
            (0, ValueError),
            (-3, ValueError),
            (2.5, TypeError),
            (True, TypeError),
            ("1d", TypeError),
            ({("a", "b", "c"): 1}, ValueError),
        ],
        ids=str,
    )
    def test_windows_that_are_none_raise(
        self, unbound: NeighborSampler, window: Any, error: type[Exception]
    ) -> None:
        with pytest.raises(error, match="time_window"):
            bind(unbound, graphs.hostile(), [2], time_attr="when", time_window=window)

    # Subgraphs #############################################################################

    @pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
    @pytest.mark.parametrize("graph", graphs.HOMOGENEOUS)
    def test_every_graph(
        self, unbound: NeighborSampler, graph: str, index_dtype: torch.dtype
    ) -> None:
        data = graphs.HOMOGENEOUS[graph](index_dtype)
        for seeds in (range(min(data.num_nodes, 4)), [data.num_nodes - 1], []):
            for num_neighbors in HOPS:
                ask(unbound, data, seeds, num_neighbors, key=1)

    def test_a_graph_without_nodes(self, unbound: NeighborSampler) -> None:
        ask(unbound, graphs.nothing(0), [], [2, 2])

    @pytest.mark.parametrize("seeds", graphs.WRITTEN_OUT, ids=str)
    def test_the_whole_neighborhood(self, unbound: NeighborSampler, seeds: tuple[int, ...]) -> None:
        node, nodes_per_hop, edges = graphs.WRITTEN_OUT[seeds]
        sample, _ = ask(unbound, graphs.written_out(), seeds, [-1, -1])
        assert sorted(sample.node[None].tolist()) == sorted(node)
        assert sample.num_sampled_nodes == {None: nodes_per_hop}
        listed = edge_list(sample, None)
        assert sorted(edge for _, _, edge in listed) == sorted(edges[0] + edges[1])
        assert sample.num_sampled_edges == {None: [len(hop) for hop in edges]}

    @pytest.mark.parametrize("num_neighbors", HOPS, ids=name)
    @pytest.mark.parametrize("options", OPTIONS, ids=name)
    def test_options(
        self, unbound: NeighborSampler, options: dict[str, Any], num_neighbors: list[int]
    ) -> None:
        times = [None] if "time_attr" not in options else [[4, 0, 7, 3, 3, 5, -1, 4], [9] * 8]
        for key, time in enumerate(times):
            ask(unbound, graphs.hostile(), SEEDS, num_neighbors, key=key, time=time, **options)

    def test_seeds_have_the_times_of_their_nodes(self, unbound: NeighborSampler) -> None:
        ask(unbound, graphs.hostile(), range(40), [3, 2], time_attr="time")

    @pytest.mark.parametrize("options", OPTIONS, ids=name)
    def test_types(self, unbound: NeighborSampler, options: dict[str, Any]) -> None:
        data = graphs.hetero()
        per_type = {edge_type: [2, 1 + i % 3] for i, edge_type in enumerate(data.edge_types)}
        per_type["user", "follows", "user"] = [-1, 0]
        time = {"user": [4, 7, 0], "item": [3, 9, 5]} if "time_attr" in options else None
        for num_neighbors in ([3, 2], [-1, -1], per_type):
            ask(unbound, data, ITEMS_AND_USERS, num_neighbors, time=time, **options)
        one_time = None if time is None else {"item": time["item"]}
        ask(unbound, data, {"item": [3, 0, 11]}, [2, 2, 2], time=one_time, **options)

    @pytest.mark.parametrize("graph", [graphs.hostile, graphs.hetero])
    def test_stores(self, unbound: NeighborSampler, graph: Callable[[], Data | HeteroData]) -> None:
        data = graph()
        seeds = ITEMS_AND_USERS if isinstance(data, HeteroData) else SEEDS
        of_data = draw(bind(unbound, data, [3, 2]), seeds, 5)
        of_stores = unbound.bind(graphs.stores(data), num_neighbors=[3, 2])
        assert_equal(draw(of_stores, seeds, 5), of_data)

    @pytest.mark.parametrize(
        "options", [{}, {"disjoint": True}, {"time_attr": "when"}, {"replace": True}], ids=name
    )
    def test_repeated_seeds(self, unbound: NeighborSampler, options: dict[str, Any]) -> None:
        seeds = [4, 0, 4, 4, 5, 0, 99, 99]
        time = [4, 4, 2, 9, 4, 7, 0, 1] if "time_attr" in options else None
        for num_neighbors in ([2, 2], [-1, -1]):
            ask(unbound, graphs.hostile(), seeds, num_neighbors, time=time, **options)
        by_type = {"user": [2, 2, 3], "item": [1, 1]}
        if "hetero" in unbound.supports:
            times = {"user": [1, 8, 3], "item": [6, 2]} if "time_attr" in options else None
            ask(unbound, graphs.hetero(), by_type, [2, 2], time=times, **options)

    @pytest.mark.parametrize(
        "options",
        [
            {"disjoint": True},
            {"disjoint": True, "replace": True},
            {"disjoint": True, "weight_attr": "weight"},
            {"time_attr": "when"},
        ],
        ids=name,
    )
    def test_kept_draws_are_those_of_a_seed_alone(
        self, unbound: NeighborSampler, options: dict[str, Any]
    ) -> None:
        data, seeds = graphs.hostile(), [0, 7, 5, 0, 98, 4]
        time = [4, 0, 7, 9, 3, 3] if "time_attr" in options else None
        bound = bind(unbound, data, [3, 2], redraw=False, **options)
        together = draw(bound, seeds, 6, time)
        assert together.batch is not None
        edge = together.edge[None]
        assert edge is not None
        for place, seed in enumerate(seeds):
            alone = draw(bound, [seed], 6, None if time is None else [time[place]])
            rows = (together.batch[None] == place).nonzero().view(-1)
            edges = torch.isin(together.col[None], rows).nonzero().view(-1)
            assert torch.equal(together.node[None][rows], alone.node[None]), (
                "with redraw=False a seed has other neighbours where others are in its batch: draw "
                "from frontier.key alone"
            )
            assert edge[edges].tolist() == alone.edge[None].tolist()  # type: ignore[union-attr]
            assert torch.equal(rows[alone.row[None]], together.row[None][edges].long())
            assert torch.equal(rows[alone.col[None]], together.col[None][edges].long())

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"disjoint": True},
            {"time_attr": "time"},
            {"time_attr": "when"},
            {"time_attr": "time", "time_window": 5, "strictly_earlier": True},
            {"time_attr": "when", "time_window": 4},
            {"sample_direction": "backward"},
        ],
        ids=name,
    )
    @pytest.mark.parametrize("graph", [graphs.hostile, graphs.hetero])
    def test_induced(
        self,
        unbound: NeighborSampler,
        graph: Callable[[], Data | HeteroData],
        options: dict[str, Any],
    ) -> None:
        data, seeds = graph(), [0, 8, 0, 17]
        by_type = {"user": seeds} if isinstance(data, HeteroData) else seeds
        time: Any = None
        if "time_attr" in options:
            time = {"user": [4, 9, 5, 7]} if isinstance(data, HeteroData) else [4, 9, 5, 7]
        sample, request = ask(
            unbound, data, by_type, [3, 2], time=time, subgraph_type="induced", **options
        )
        for edge_type in request.facts.edges:
            assert edge_list(sample, edge_type) == _among(sample, request, edge_type), (
                f"not all edges{'' if edge_type is None else f' of {edge_type}'} among the nodes"
            )
        assert sample.num_sampled_nodes is None
        assert sample.num_sampled_edges is None

    @pytest.mark.parametrize("disjoint", [False, True])
    @pytest.mark.parametrize("seeds", [SEEDS, [4, 0, 4, 5, 0]], ids=name)
    def test_bidirectional(
        self, unbound: NeighborSampler, seeds: list[int], disjoint: bool
    ) -> None:
        data = graphs.hostile()
        directional, _ = ask(unbound, data, seeds, [3, 2], key=2, disjoint=disjoint)
        both, _ = ask(
            unbound, data, seeds, [3, 2], key=2, disjoint=disjoint, subgraph_type="bidirectional"
        )
        assert torch.equal(both.node[None], directional.node[None])
        pairs = list(zip(both.row[None].tolist(), both.col[None].tolist()))
        one_way = set(zip(directional.row[None].tolist(), directional.col[None].tolist()))
        first = first_rows(directional, None)
        assert len(pairs) == len(set(pairs)), "a pair of nodes has more than one edge"
        assert set(pairs) == one_way | {(first[col], row) for row, col in one_way}
        assert bool((both.col[None].diff() >= 0).all()), "edges are not sorted by destination"

    def test_bidirectional_with_types(self, unbound: NeighborSampler) -> None:
        data, buys = graphs.hetero(), ("user", "buys", "item")
        reverse = ("item", "rev_buys", "user")
        directional, _ = ask(unbound, data, ITEMS_AND_USERS, [3, 2], key=2)
        bound = bind(unbound, data, [3, 2], subgraph_type="bidirectional")
        both = draw(bound, ITEMS_AND_USERS, 2)
        expected = set(zip(directional.row[buys].tolist(), directional.col[buys].tolist()))
        expected |= set(zip(directional.col[reverse].tolist(), directional.row[reverse].tolist()))
        assert set(zip(both.row[buys].tolist(), both.col[buys].tolist())) == expected
        assert set(zip(both.col[reverse].tolist(), both.row[reverse].tolist())) == expected
        assert both.edge[buys] is None


def _among(sample: Any, request: SampleRequest, edge_type: Any) -> list[tuple[int, int, int]]:
    """All edges of a type among the nodes of a sample, for every row of the destination."""
    facts = request.facts
    source_type, destination_type = facts.source_type(edge_type), facts.destination_type(edge_type)
    rows = dict(zip(identities(sample, source_type), first_rows(sample, source_type)))
    time, source = facts.time_of(edge_type), facts.edges[edge_type][0].tolist()
    limited = bool(facts.edge_time) or request.strict or edge_type in request.windows
    out = []
    for col, (component, node) in enumerate(identities(sample, destination_type)):
        if time is not None and request.times and limited:
            edges = request.visible(edge_type, node, component)
        else:
            edges = facts.in_edges(edge_type, node)
        for edge in edges:
            if (component, source[edge]) in rows:
                out.append((rows[component, source[edge]], col, edge))
    return sorted(out)
