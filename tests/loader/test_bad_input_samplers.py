"""Samplers and loaders of subgraphs give typed errors with a way out, or the right empty result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import Node2Vec

from pyg_scale import compat
from pyg_scale.loader import (
    Budget,
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    IBMBBatchLoader,
    IBMBNodeLoader,
    LinkNeighborLoader,
    NeighborLoader,
    NodeLoader,
    RandomNodeLoader,
    ShaDowKHopSampler,
)
from pyg_scale.sampler import PPRSampler, ppr, random_walk

EDGES = torch.randint(20, (2, 120), generator=torch.Generator().manual_seed(0))
BOTH = torch.cat([EDGES, EDGES.flip(0)], 1).unique(dim=1)
ALONE = torch.arange(20, 30)  # nodes without edges


def graph(edges: Tensor = EDGES, **attributes: Any) -> Data:
    x = torch.arange(30.0).view(-1, 1)
    return Data(x=x, edge_index=edges, y=torch.arange(30) % 3, **attributes)


DATA, UNDIRECTED, EMPTY = graph(), graph(BOTH), graph(EDGES[:, :0])
SAMPLERS = ("native", "labor", "ladies", "fastgcn")
SAINT = (GraphSAINTNodeSampler, GraphSAINTEdgeSampler, GraphSAINTRandomWalkSampler)


def neighbors(data: Data, sampler: Any = "native", **kwargs: Any) -> NeighborLoader:
    return NeighborLoader(data, [3, 3], neighbor_sampler=sampler, **({"batch_size": 30} | kwargs))


def saint(cls: Any, data: Data, **kwargs: Any) -> Any:
    length = {"walk_length": 2} if cls is GraphSAINTRandomWalkSampler else {}
    return cls(data, 5, num_steps=2, log=False, seed=1, **length, **kwargs)


# Weights ###################################################################################


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_weights_that_are_missing_or_wrong(sampler: str) -> None:
    with pytest.raises(ValueError, match="weight_attr='weight': the graph has no such attribute"):
        neighbors(DATA, sampler, weight_attr="weight")
    for wrong in (-1.0, math.nan, math.inf):
        weight = torch.ones(120)
        weight[7] = wrong
        with pytest.raises(
            ValueError, match=r"weight_attr: the weight of edge 7 is .* not negative"
        ):
            neighbors(graph(weight=weight), sampler, weight_attr="weight")
    with pytest.raises(ValueError, match="there are 7 weights for 120 edges"):
        neighbors(graph(weight=torch.ones(7)), sampler, weight_attr="weight")


def test_weights_of_walks_that_are_missing_or_wrong() -> None:
    start = torch.arange(4)
    with pytest.raises(ValueError, match="weight='weight': the graph has no such attribute"):
        random_walk(DATA, start, 3, weight="weight")
    for wrong in (-1.0, math.nan, math.inf):
        weight = torch.ones(120)
        weight[7] = wrong
        for data, given in ((EDGES, weight), (graph(weight=weight), "weight")):
            with pytest.raises(ValueError, match=r"weight of edge 7 is .* not negative"):
                random_walk(data, start, 3, weight=given)
    walks = random_walk(EDGES, start, 3, weight=torch.zeros(120))
    assert torch.equal(walks, start.view(-1, 1).expand(-1, 4))  # no edge may be taken


# Budgets ###################################################################################


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_budgets_below_the_smallest_neighbourhood(sampler: str) -> None:
    budget = Budget("edges", 2)
    with pytest.raises(ValueError, match=r"alone costs \d+, more than batch_cost=2 edges: raise"):
        NeighborLoader(DATA, [3, 3], neighbor_sampler=sampler, batch_cost=budget, seed=0)


def test_budgets_of_loaders() -> None:
    budget = {"batch_cost": Budget("nodes", 2)}
    for make in (
        lambda: ShaDowKHopSampler(DATA, 2, 5, **budget),
        lambda: LinkNeighborLoader(DATA, [5], EDGES, **budget),
    ):
        with pytest.raises(ValueError, match=r"alone costs \d+, more than batch_cost=2 nodes"):
            make()
    for refused in (
        lambda: RandomNodeLoader(DATA, 4, **budget),
        lambda: ClusterLoader(ClusterData(DATA, 4, log=False), **budget),
        lambda: IBMBNodeLoader(UNDIRECTED, "rand", torch.arange(5), 4, 3, **budget),
        *(lambda cls=cls: saint(cls, DATA, **budget) for cls in SAINT),
    ):
        with pytest.raises(NotImplementedError, match="batch_cost= is not for .*: leave it out"):
            refused()


# Clusters and parts ########################################################################


@pytest.mark.parametrize(
    "make",
    [
        lambda number: ClusterData(DATA, number, log=False),
        lambda number: RandomNodeLoader(DATA, number),
        lambda number: IBMBBatchLoader(UNDIRECTED, "rand", number, torch.arange(5)),
    ],
    ids=["clusters", "random nodes", "IBMB"],
)
def test_more_parts_than_nodes(make: Callable[[Any], Any]) -> None:
    assert make(30) is not None
    with pytest.raises(ValueError, match="31, but the graph has only 30 nodes: ask for at most 30"):
        make(31)
    for wrong in (0, -1, 2.5, True, "3", None):
        with pytest.raises(ValueError, match="num_part.* must be a number of at least 1"):
            make(wrong)


def test_graphs_without_nodes_or_edges() -> None:
    with pytest.raises(ValueError, match="data has no nodes"):
        RandomNodeLoader(Data(edge_index=EDGES[:, :0], num_nodes=0), 1)
    for cls in SAINT:
        with pytest.raises(ValueError, match=r"needs data.edge_index .* with edges"):
            saint(cls, EMPTY)
    empty = [
        *(neighbors(EMPTY, sampler) for sampler in SAMPLERS),
        ShaDowKHopSampler(EMPTY, 2, 3, batch_size=30),
        RandomNodeLoader(EMPTY, 1),
        ClusterLoader(ClusterData(EMPTY, 3, log=False), batch_size=3),
        IBMBBatchLoader(EMPTY, "rand", 1, torch.arange(30)),
    ]
    for loader in empty:
        (batch,) = loader
        assert batch.edge_index.shape == (2, 0)
        assert torch.equal(batch.x.view(-1).sort().values, torch.arange(30.0))


# Isolated nodes ############################################################################


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_seeds_without_edges(sampler: str) -> None:
    (batch,) = neighbors(DATA, sampler, input_nodes=ALONE)
    assert torch.equal(batch.n_id, ALONE) and batch.edge_index.shape == (2, 0)
    if sampler != "native":
        assert batch.edge_weight.shape == (0,)


def test_roots_and_output_nodes_without_edges() -> None:
    (shadow,) = ShaDowKHopSampler(DATA, 2, 3, ALONE, batch_size=10)
    assert torch.equal(shadow.x.view(-1), ALONE.float()) and shadow.edge_index.shape == (2, 0)
    for loader in (
        IBMBNodeLoader(UNDIRECTED, "rand", ALONE, 4, 3),
        IBMBBatchLoader(UNDIRECTED, "rand", 4, ALONE, method="hash"),
    ):
        batches = list(loader)
        assert all(batch.output_node_mask.all() and not batch.num_edges for batch in batches)
        assert torch.equal(torch.cat([batch.x for batch in batches]).view(-1).sort().values, ALONE)
    (ranked,) = NodeLoader(DATA, PPRSampler(DATA, k=4), ALONE, batch_size=10)
    assert torch.equal(ranked.n_id, ALONE) and ranked.score.tolist() == [1.0] * 10


@pytest.mark.parametrize("cls", SAINT)
def test_norms_of_nodes_without_edges_are_finite(cls: Any) -> None:
    loader = saint(cls, DATA, sample_coverage=3)
    for norm in (loader.node_norm, loader.edge_norm):
        assert bool((norm > 0).all()) and bool(norm.isfinite().all())


def test_walks_from_nodes_without_edges_stay() -> None:
    assert torch.equal(random_walk(DATA, ALONE, 3), ALONE.view(-1, 1).expand(-1, 4))
    with compat.install():
        model = Node2Vec(EDGES, 8, walk_length=4, context_size=3, num_nodes=30)
        positive, negative = model.sample(ALONE)
        assert bool((positive == positive[:, :1]).all())
        assert bool(model.loss(positive, negative).isfinite())


# PageRank ##################################################################################


def test_zero_scores_and_probabilities() -> None:
    found = ppr(DATA, ALONE[:2], 3)
    assert found.node.tolist() == [[20, -1, -1], [21, -1, -1]]
    assert found.score.tolist() == [[1, 0, 0], [1, 0, 0]]
    for wrong in (0, 1, -1, math.nan):
        for make in (
            lambda wrong: ppr(DATA, ALONE, 3, alpha=wrong),
            lambda wrong: PPRSampler(DATA, k=3, alpha=wrong),
            lambda wrong: IBMBNodeLoader(UNDIRECTED, "rand", ALONE, 4, 3, alpha=wrong),
            lambda wrong: IBMBBatchLoader(UNDIRECTED, "rand", 4, ALONE, alpha=wrong),
        ):
            with pytest.raises(ValueError, match="alpha must be"):
                make(wrong)
    for wrong in (None, "0.1", True):
        for make in (
            lambda wrong: ppr(DATA, ALONE, 3, alpha=wrong),
            lambda wrong: PPRSampler(DATA, k=3, alpha=wrong),
            lambda wrong: IBMBNodeLoader(UNDIRECTED, "rand", ALONE, 4, 3, alpha=wrong),
        ):
            with pytest.raises(TypeError, match="alpha must be a number"):
                make(wrong)
    for name in ("num_auxiliary_nodes", "num_nodes_per_batch"):
        numbers = {"num_auxiliary_nodes": 4, "num_nodes_per_batch": 3, name: True}
        with pytest.raises(ValueError, match=f"{name} must be an integer of 1 or more"):
            IBMBNodeLoader(UNDIRECTED, "rand", ALONE, **numbers)


# What a sampler cannot do ##################################################################


@pytest.mark.parametrize("sampler", SAMPLERS[1:])
def test_importance_samplers_have_no_trees_and_no_times(sampler: str) -> None:
    for kwargs in (
        {"disjoint": True},
        {"time_attr": "time"},
        {"replace": True},
        {"subgraph_type": "induced"},
        {"temporal_strategy": "last"},
    ):
        name = next(iter(kwargs))
        with pytest.raises(NotImplementedError, match=f"does not support {name}=.*native' does"):
            neighbors(graph(time=torch.arange(30)), sampler, **kwargs)


@pytest.mark.parametrize("name", ["disjoint", "time_attr", "weight_attr", "no_such_option"])
def test_loaders_without_options_of_sampling(name: str) -> None:
    way = "leave it out" + ("" if name == "no_such_option" else ", or use NeighborLoader")
    given = {name: True if name == "disjoint" else "weight"}
    for make in (
        lambda: ShaDowKHopSampler(DATA, 2, 3, **given),
        lambda: RandomNodeLoader(DATA, 3, **given),
        lambda: ClusterLoader(ClusterData(DATA, 3, log=False), **given),
        lambda: IBMBNodeLoader(UNDIRECTED, "rand", ALONE, 4, 3, **given),
        *(lambda cls=cls: saint(cls, DATA, **given) for cls in SAINT),
    ):
        with pytest.raises(TypeError, match=rf"^\w+ takes no {name}=: {way}"):
            make()
