"""Conformance of a partitioner: complete, balanced as declared, and a function of its input."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_scale.ops.cut_edges import cut_edges
from pyg_scale.partitioner import (
    BALANCES,
    Partitioner,
    PartitionGraph,
    equal_shares,
    partition,
    partition_graph,
)
from pyg_scale.partitioner.random import RandomPartitioner
from pyg_scale.testing import graphs, shapes
from pyg_scale.testing.generators import assert_leaves_generators_alone

GRAPHS: dict[str, Callable[[], Data | HeteroData]] = {
    **graphs.HOMOGENEOUS,
    "hetero": graphs.hetero,
    "path": lambda: shapes.path(60),
    "star": lambda: shapes.star(60),
    "disconnected": lambda: shapes.cliques(6, 10, joined=False),
    "grid": lambda: shapes.grid(8),
}
"""Graphs that a partitioner may refuse with a ``ValueError``, or else must partition correctly."""


class PartitionerTests:
    """Tests of a partitioner and its declarations.

    The method may refuse a graph with a ``ValueError``, but not cliques, nor the planted blocks and
    the graph of hubs and isolated nodes that most tests use.

    Example::

        class TestMyPartitioner(PartitionerTests):
            @pytest.fixture
            def partitioner(self):
                return MyPartitioner()
    """

    @pytest.fixture
    def partitioner(self) -> Partitioner:
        """The partitioner under test."""
        raise NotImplementedError("return your partitioner, such as MyPartitioner()")

    # The contract ##########################################################################

    def test_is_a_partitioner(self, partitioner: Partitioner) -> None:
        assert isinstance(partitioner, Partitioner)
        unknown = set(partitioner.balances) - set(BALANCES)
        assert not unknown, f"balances has {sorted(unknown)}; possible are {BALANCES}"
        assert partitioner.max_imbalance >= 1, "max_imbalance must be at least 1"

    def test_options_make_it_again(self, partitioner: Partitioner) -> None:
        kept = json.loads(json.dumps([partitioner.options(), partitioner.extra()]))[0]
        again = type(partitioner)(**kept)
        graph = view(partitioner, hostile())
        assert torch.equal(run(again, graph, 4), run(partitioner, graph, 4))

    def test_can_be_pickled(self, partitioner: Partitioner) -> None:
        graph = view(partitioner, hostile())
        again = pickle.loads(pickle.dumps(partitioner))
        assert torch.equal(run(again, graph, 4), run(partitioner, graph, 4))

    # Every node once #######################################################################

    @pytest.mark.parametrize("num_parts", [2, 3, 8])
    @pytest.mark.parametrize("name", GRAPHS)
    def test_every_graph(self, partitioner: Partitioner, name: str, num_parts: int) -> None:
        graph = view(partitioner, GRAPHS[name]())
        if graph.num_nodes >= num_parts:
            run(partitioner, graph, num_parts, may_refuse=True)

    def test_as_many_parts_as_nodes(self, partitioner: Partitioner) -> None:
        graph = view(partitioner, graphs.written_out())
        run(partitioner, graph, graph.num_nodes, may_refuse=True)

    def test_one_part(self, partitioner: Partitioner) -> None:
        found = partition(hostile(), 1, partitioner)
        assert isinstance(found, Tensor) and found.tolist() == [0] * 100

    def test_more_parts_than_nodes_are_refused(self, partitioner: Partitioner) -> None:
        with pytest.raises(ValueError, match="num_parts"):
            partition(graphs.written_out(), 8, partitioner)

    @pytest.mark.parametrize("num_parts", [2, 4, 10])
    def test_no_part_is_empty(self, partitioner: Partitioner, num_parts: int) -> None:
        for data in (hostile(), shapes.blocks(4, 60)):
            part = run(partitioner, view(partitioner, data), num_parts)
            size = torch.bincount(part, minlength=num_parts)
            assert int(size.min()) > 0, f"part {int(size.argmin())} of {num_parts} is empty"

    def test_isolated_nodes_have_parts(self, partitioner: Partitioner) -> None:
        data = shapes.cliques(2, 10)
        data.num_nodes += 40
        part = run(partitioner, view(partitioner, data), 2)
        if "nodes" in partitioner.balances:
            assert_within(partitioner, view(partitioner, data), part, equal_shares(2))

    def test_each_type_is_covered(self, partitioner: Partitioner) -> None:
        try:
            found = partition(graphs.hetero(), 2, partitioner)
        except ValueError as refused:
            pytest.skip(f"refused: {refused}")
        sizes = graphs.EdgeLists.of(graphs.hetero()).num_nodes
        assert isinstance(found, dict)
        assert {t: p.numel() for t, p in found.items()} == sizes
        assert list(found) == list(sizes), "types must stay in their order"

    # Balance ###############################################################################

    @pytest.mark.parametrize("kind", BALANCES)
    @pytest.mark.parametrize("num_parts", [2, 4, 7])
    def test_balance(self, partitioner: Partitioner, kind: str, num_parts: int) -> None:
        if kind not in partitioner.balances:
            pytest.skip(f"balances does not name {kind!r}")
        for data in (hostile(), shapes.blocks(4, 60), graphs.hetero()):
            graph = view(partitioner, data, kind)
            part = run(partitioner, graph, num_parts, may_refuse=isinstance(data, HeteroData))
            assert_within(partitioner, graph, part, equal_shares(num_parts))

    def test_balance_of_several_things(self, partitioner: Partitioner) -> None:
        if len(partitioner.balances) < 2:
            pytest.skip("balances at most one quantity")
        graph = view(partitioner, shapes.blocks(4, 60), partitioner.balances)
        part = run(partitioner, graph, 4, may_refuse=True)
        assert_within(partitioner, graph, part, equal_shares(4))

    def test_shares(self, partitioner: Partitioner) -> None:
        if "nodes" not in partitioner.balances:
            pytest.skip("balances does not name 'nodes'")
        graph, shares = view(partitioner, shapes.blocks(4, 60)), torch.tensor([0.5, 0.3, 0.2])
        part = run(partitioner, graph, 3, shares=shares.double())
        assert_within(partitioner, graph, part, shares.double())
        size = torch.bincount(part, minlength=3)
        assert bool((size[:-1] > size[1:]).all()), f"shares 0.5, 0.3, 0.2 gave {size.tolist()}"

    # The cut ###############################################################################

    def test_two_cliques(self, partitioner: Partitioner) -> None:
        """Two cliques joined by one edge, with shuffled nodes."""
        data = shapes.cliques(2, 12)
        graph = view(partitioner, data)
        part = run(partitioner, graph, 2)
        if partitioner.minimises_cut:
            cut = cut_edges(graph.indptr, graph.indices, part)
            assert cut == 1, f"minimises_cut is declared, but {cut} edges are cut instead of 1"

    def test_planted_blocks(self, partitioner: Partitioner) -> None:
        if not partitioner.minimises_cut:
            pytest.skip("minimises_cut is not declared")
        graph = view(partitioner, shapes.blocks(4, 60))
        mine, other = run(partitioner, graph, 4), run(RandomPartitioner(), graph, 4)
        cut, at_random = (cut_edges(graph.indptr, graph.indices, p) for p in (mine, other))
        assert cut < at_random / 2, f"{cut} edges are cut, at random {at_random}"

    # A function of its arguments ###########################################################

    def test_the_same_again(self, partitioner: Partitioner) -> None:
        graph = view(partitioner, hostile())
        first = run(partitioner, graph, 4, seed=3)
        run(partitioner, view(partitioner, shapes.path(60)), 3, seed=1, may_refuse=True, skip=False)
        assert torch.equal(run(partitioner, graph, 4, seed=3), first), "the result changed"

    def test_another_seed(self, partitioner: Partitioner) -> None:
        graph = view(partitioner, hostile())
        for seed in (1, 2**40, -1):
            part = run(partitioner, graph, 4, seed=seed)
            if "nodes" in partitioner.balances:
                assert_within(partitioner, graph, part, equal_shares(4))

    def test_leaves_global_generators_alone(self, partitioner: Partitioner) -> None:
        graph = view(partitioner, hostile())
        with torch.random.fork_rng():
            torch.manual_seed(1)
            first = assert_leaves_generators_alone(lambda: run(partitioner, graph, 4))
            torch.manual_seed(2)
            assert torch.equal(run(partitioner, graph, 4), first), "depends on torch's generator"

    def test_leaves_the_graph_alone(self, partitioner: Partitioner) -> None:
        graph = view(partitioner, hostile())
        tensors = (graph.indptr, graph.indices, graph.weights)
        before = [tensor.clone() for tensor in tensors]
        shares = equal_shares(4)
        run(partitioner, graph, 4, shares=shares)
        assert all(torch.equal(a, b) for a, b in zip(tensors, before)), "the graph was changed"
        assert torch.equal(shares, equal_shares(4)), "shares were changed"

    def test_the_order_of_edges_is_nothing(self, partitioner: Partitioner) -> None:
        data = shapes.blocks(4, 60)
        first = run(partitioner, view(partitioner, data), 4)
        generator = torch.Generator().manual_seed(9)
        order = torch.randperm(data.num_edges, generator=generator)
        data.edge_index = data.edge_index[:, order]
        again = run(partitioner, view(partitioner, data), 4)
        assert torch.equal(again, first), "the order of edges changed the result"

    def test_the_number_of_threads_is_nothing(self, partitioner: Partitioner) -> None:
        graph, before = view(partitioner, shapes.blocks(4, 60)), torch.get_num_threads()
        try:
            found = []
            for threads in (1, 4):
                torch.set_num_threads(threads)
                found.append(run(partitioner, graph, 4))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(*found), "the number of threads changed the result"

    def test_the_size_of_chunks_is_nothing(self, partitioner: Partitioner) -> None:
        options = partitioner.options()
        if "chunk_size" not in options:
            pytest.skip("there is no option chunk_size")
        graph = view(partitioner, hostile())
        first = run(partitioner, graph, 4)
        for size in (1, 7, 10_000):
            again = type(partitioner)(**{**options, "chunk_size": size})
            assert torch.equal(run(again, graph, 4), first), f"chunk_size={size} changed the result"

    def test_how_the_graph_lies_in_memory_is_nothing(self, partitioner: Partitioner) -> None:
        graph = view(partitioner, hostile())
        first = run(partitioner, graph, 4)
        wide = graph.indices.to(torch.int64)
        side_by_side = torch.stack([graph.indices, -graph.indices], dim=1)[:, 0]
        for indices in (wide, side_by_side):
            again = run(partitioner, replace(graph, indices=indices), 4)
            assert torch.equal(again, first), "int64 or strided neighbours changed the result"
        again = run(partitioner, replace(graph, weights=graph.weights.contiguous()), 4)
        assert torch.equal(again, first), "contiguous weights changed the result"


# Graphs and checks of the tests ###############################################################


def hostile() -> Data:
    """Hubs, loops, copies and isolated nodes, with training nodes."""
    data = graphs.hostile()
    data.train_mask = torch.arange(100) % 3 == 0
    return data


def view(
    partitioner: Partitioner, data: Data | HeteroData, balance: Any = "nodes"
) -> PartitionGraph:
    """The graph as :func:`pyg_scale.partition` passes it to the method.

    Neighbours are in ascending order only if the method needs that.
    """
    train = None
    if "train" in balance and "train_mask" not in data:
        facts = graphs.EdgeLists.of(data)
        train = {t: torch.arange(0, n, 2) for t, n in facts.num_nodes.items()}
    graph = partition_graph(data, balance=balance, train=train)
    if partitioner.needs_sorted:
        return graph
    indices = graph.indices.clone()
    for v in range(graph.num_nodes):
        begin, end = int(graph.indptr[v]), int(graph.indptr[v + 1])
        indices[begin:end] = graph.indices[begin:end].flip(0)
    return replace(graph, indices=indices, is_sorted=False)


def run(
    partitioner: Partitioner,
    graph: PartitionGraph,
    num_parts: int,
    *,
    seed: int = 0,
    shares: Tensor | None = None,
    may_refuse: bool = False,
    skip: bool = True,
) -> Tensor:
    """Run a partitioner; checks that every node has a part, and returns parts as ``int64``."""
    shares = equal_shares(num_parts) if shares is None else shares
    try:
        part = partitioner.assign(graph, num_parts, seed=seed, shares=shares)
    except ValueError as refused:
        if not may_refuse:
            raise AssertionError(f"this graph must not be refused: {refused}") from refused
        if len(str(refused)) < 10:
            raise AssertionError(f"a refusal must give a reason (got {refused!r})") from refused
        if skip:
            pytest.skip(f"refused: {refused}")
        return torch.empty(0, dtype=torch.int64)
    assert isinstance(part, Tensor), f"expected a tensor (got {type(part).__name__})"
    whole = not part.is_floating_point() and part.dtype != torch.bool
    assert whole, f"expected integers (got {part.dtype})"
    assert part.shape == (graph.num_nodes,), f"{list(part.shape)} for {graph.num_nodes} nodes"
    low, high = int(part.min()), int(part.max())
    assert low >= 0, f"node {int(part.argmin())} has part {low}"
    assert high < num_parts, f"node {int(part.argmax())} has part {high} of {num_parts}"
    return part.to(torch.int64)


def assert_within(
    partitioner: Partitioner, graph: PartitionGraph, part: Tensor, shares: Tensor
) -> None:
    """Check that every part is within the bounds of ``max_imbalance``."""
    held = torch.zeros(shares.numel(), graph.weights.size(1), dtype=torch.int64)
    held.index_add_(0, part, graph.weights)
    total = graph.weights.sum(0).to(torch.float64)
    # that of the base class, so that a partitioner cannot widen its own bounds
    room = Partitioner.capacity(partitioner, graph, shares)
    for p, c in (held > room).nonzero().tolist():
        times = int(held[p, c]) / float(shares[p] * total[c])
        raise AssertionError(
            f"part {p} holds {int(held[p, c])} {graph.names[c]}, {times:.2f} times its share; "
            f"max_imbalance is {partitioner.max_imbalance}"
        )
