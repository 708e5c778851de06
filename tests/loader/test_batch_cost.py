"""Batches of equal cost: within their budget, balanced, resumable at every piece, on ranks too."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import BaseSampler

import pyg_scale
from pyg_scale.errors import BudgetError, CommError
from pyg_scale.loader import (
    Budget,
    GraphSAINTNodeSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    ShaDowKHopSampler,
    ZipLoader,
)
from pyg_scale.loader.batch.source import filled
from pyg_scale.loader.seeds.budget import Costs
from pyg_scale.loader.seeds.estimate import CostEstimate
from pyg_scale.loader.seeds.plan import pack, runs
from pyg_scale.ops import keys
from pyg_scale.store import Cached, MemoryFeatureStore
from pyg_scale.store.topology import topology_of
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches
from tests.loader.ranks import in_turn, on_ranks

WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "worker_type": "process"},
    {"num_workers": 2, "worker_type": "ring"},
    {"num_workers": 1, "filter_per_worker": False},
]


@functools.cache
def star_and_power_law(num_nodes: int = 1500, leaves: int = 500) -> Data:
    """Nodes whose in-degrees fall as a power law, and a hub that is joined to its leaves."""
    draw = torch.Generator().manual_seed(0)
    degree = (3 / torch.rand(num_nodes, generator=draw) ** 0.7).long().clamp(max=300)
    target = torch.arange(num_nodes).repeat_interleave(degree)
    source = (torch.rand(target.numel(), generator=draw) ** 2 * num_nodes).long()
    hub, leaf = num_nodes + leaves, torch.arange(num_nodes, num_nodes + leaves)
    hubs = torch.full_like(leaf, hub)
    edges = torch.stack([torch.cat([source, leaf, hubs]), torch.cat([target, hubs, leaf])])
    return Data(x=torch.randn(hub + 1, 4, generator=draw), edge_index=edges)


def loader(data: Any = None, **kwargs: Any) -> NeighborLoader:
    data = star_and_power_law() if data is None else data
    kwargs = {"num_neighbors": [10, 5], "shuffle": True, "seed": 3} | kwargs
    if "batch_size" not in kwargs:
        kwargs = {"batch_cost": Budget("edges", 2000)} | kwargs
    return NeighborLoader(data, **kwargs)


def edges_of(batches: Any) -> Tensor:
    return torch.tensor([float(batch.num_edges) for batch in batches])


def spread(cost: Tensor) -> float:
    return float(cost.max() / cost.mean())


# Equal cost ################################################################################


@pytest.mark.parametrize(
    ("num_neighbors", "most"), [([10, 5], 1500), ([-1], 1500), ([-1, -1], 6000), ([5], 400)]
)
def test_batches_cost_nearly_the_same(num_neighbors: list[int], most: int) -> None:
    own = loader(num_neighbors=num_neighbors, batch_cost=Budget("edges", most))
    for _ in range(2):
        batches = list(own)
        cost = edges_of(batches)
        assert cost.max() <= most
        assert spread(cost) <= 1.15
        assert cost.mean() >= 0.75 * most  # the budget is made use of
        by_number = loader(num_neighbors=num_neighbors, batch_size=-(-2001 // len(own)))
    assert spread(edges_of(by_number)) > spread(cost)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_seed_comes_once(shuffle: bool) -> None:
    seeds = torch.randperm(2001, generator=torch.Generator().manual_seed(1))[:800]
    own = loader(input_nodes=seeds, shuffle=shuffle)
    epochs = [torch.cat([batch.input_id for batch in own]) for _ in range(2)]
    for found in epochs:
        assert found.sort().values.tolist() == list(range(800))
        assert shuffle or found.tolist() == list(range(800))
    assert shuffle != torch.equal(*epochs)


def test_len_counts_planned_batches() -> None:
    own = loader()
    planned = [batch for batch in own if batch.piece == 0]
    assert len(planned) == len(own) > 1


def test_without_overlap_estimates_are_exact() -> None:
    """In a tree of full neighbourhoods a seed costs what it reaches."""
    edges = torch.tensor([[1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 2, 2]])
    estimate = CostEstimate(
        topology_of(Data(edge_index=edges, num_nodes=7)),
        {None: [-1, -1]},
        replace=False,
        disjoint=False,
        seeds=[(None, torch.arange(7))],
        costs=Costs({None: 10}, {None: 1}),
    )
    assert estimate.of_seeds(0.0).tolist() == [76.0, 32.0, 32.0, 10.0, 10.0, 10.0, 10.0]


def test_estimates_of_all_seeds_add_up_to_the_graph() -> None:
    """In the one batch of all seeds every edge is counted once, whoever it is counted for."""
    data = star_and_power_law()
    estimate = CostEstimate(
        topology_of(data),
        {None: [-1, -1]},
        replace=False,
        disjoint=False,
        seeds=[(None, torch.arange(data.num_nodes))],
        costs=Costs({None: 0}, {None: 1}),
    )
    assert float(estimate.of_seeds(1.0).sum()) == pytest.approx(data.num_edges)


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_packing_is_even(count: int) -> None:
    weight = (torch.rand(400, generator=torch.Generator().manual_seed(2)) ** -1.0 * 100).long()
    weight = weight.clamp(max=3000)
    load = torch.bincount(pack(weight, count), weight, count)
    assert load.sum() == weight.sum() and load.min() > 0
    assert load.max() <= load.mean() + weight.sum() / count / 64 + 1
    cuts = runs(weight, count)
    sums = [int(weight[a:b].sum()) for a, b in itertools.pairwise(cuts)]
    assert cuts[0] == 0 and cuts[-1] == 400 and len(sums) <= count
    assert max(sums) <= weight.sum() / count + weight.max()


@pytest.mark.parametrize("budget", [10, 60, 300])
@pytest.mark.parametrize("hops", [[], [0], [5], [10, 5]], ids=str)
@pytest.mark.parametrize("name", ["ring", "power law"])
def test_without_shuffling_every_seed_comes_once(name: str, hops: list[int], budget: int) -> None:
    """Also where no number of runs fits, as that of equal seeds grows by leaps."""
    ring = torch.arange(200)
    data = Data(x=torch.ones(200, 1), edge_index=torch.stack([ring, (ring + 1) % 200]))
    if name != "ring":
        data = star_and_power_law(200, 1)
    one = loader(data, num_neighbors=hops, shuffle=False, batch_cost=Budget("nodes", budget + 60))
    if name == "ring" and hops:
        one = loader(data, num_neighbors=hops, shuffle=False, batch_cost=Budget("edges", budget))
    plan = one._plan
    assert plan is not None
    assert len(one) == plan.count == len(plan._planned(plan._weight, plan.count, 0, 0)[0]) - 1
    found = torch.cat([batch.input_id for batch in one])
    assert found.tolist() == list(range(data.num_nodes or 0))


def test_no_batch_is_planned_empty() -> None:
    for weight in ([5, 1], [100, 100, 1, 1], [1, 1, 1, 900, 1]):
        found = pack(torch.tensor(weight), len(weight))
        assert found.sort().values.tolist() == list(range(len(weight)))


# The hard budget ###########################################################################


CUT: dict[str, Any] = {
    "batch_cost": Budget("edges", 40),  # of a few seeds, whose second hops differ a lot
    "num_neighbors": [3, 3],
    "input_nodes": torch.arange(200),
}


def alone(out: Any) -> int:
    """A cost that no estimate knows: one seed must be alone in its batch."""
    seeds = out.metadata[0]
    return len(seeds) + 30 * bool((seeds == 11).any() and len(seeds) > 1)


def test_a_batch_that_exceeds_its_budget_is_cut() -> None:
    own = loader(**CUT)
    batches = list(own)
    assert len(batches) > len(own) and any(batch.num_pieces > 1 for batch in batches)
    seeds = torch.cat([batch.input_id for batch in batches])
    assert seeds.sort().values.tolist() == list(range(200))
    for batch in batches:
        assert batch.num_edges <= 40
    for number, group in enumerate(by_planned(batches)):
        assert [each.piece for each in group] == list(range(group[0].num_pieces)), number


def by_planned(batches: list[Any]) -> list[list[Any]]:
    starts = [i for i, batch in enumerate(batches) if batch.piece == 0] + [len(batches)]
    return [batches[a:b] for a, b in itertools.pairwise(starts)]


def test_seeds_draw_the_same_neighbours_in_pieces() -> None:
    """With the key of the planned batch: those that the whole batch would have drawn."""
    own = loader(**CUT)
    groups = by_planned(list(own))
    number = next(n for n, group in enumerate(groups) if len(group) > 1)
    seeds = torch.cat([batch.input_id for batch in groups[number]])
    key = keys.batch_key(3, 0, number)
    expected = own.node_sampler.sample_checked({None: seeds}, None, key)
    drawn: dict[int, list[int]] = {}
    for edge, column in zip(expected.edge[None].tolist(), expected.col[None].tolist()):
        drawn.setdefault(int(expected.node[None][column]), []).append(edge)
    for batch in groups[number]:
        for row, seed in enumerate(batch.input_id.tolist()):
            found = batch.e_id[batch.edge_index[1] == row].tolist()
            assert found == drawn.get(seed, [])


def noisy(batch: Any) -> Any:
    batch.noise = torch.rand(())
    return batch


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_workers_do_not_change_the_batches(workers: dict[str, Any]) -> None:
    kwargs = CUT | {"transform": noisy}
    expected, found = list(loader(**kwargs)), list(loader(**kwargs, **workers))
    assert_same_batches(expected, found)
    assert len({float(batch.noise) for batch in found}) == len(found)  # each has a key of its own


def test_resumes_at_every_piece() -> None:
    kwargs = CUT
    original, resumed = loader(**kwargs, num_workers=2), loader(**kwargs)
    everything, following = list(original), list(original)
    states, had = [], []
    original.load_state_dict(resumed.state_dict())
    for batch in original:
        had.append(batch)
        states.append(pickle.loads(pickle.dumps(original.state_dict())))
    assert_same_batches(everything, had)
    for delivered, state in enumerate(states, start=1):
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert_same_batches(everything[delivered:], resumed)
        assert_same_batches(following[:2], itertools.islice(resumed, 2))


class Once:
    """Fails at its n-th call, and then no more."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, batch: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("not this one")
        return batch


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_error_costs_one_piece(at: int) -> None:
    kwargs = CUT
    expected = list(loader(**kwargs))
    iterator = iter(loader(**kwargs, transform=Once(at)))
    found = list(itertools.islice(iterator, at - 1))
    with pytest.raises(RuntimeError, match="not this one"):
        next(iterator)
    assert_same_batches(expected[: at - 1] + expected[at:], found + list(iterator))


def test_an_interruption_costs_none() -> None:
    kwargs = CUT

    def stop(batch: Any) -> Any:
        calls.append(1)
        if len(calls) in (2, 5):
            raise KeyboardInterrupt
        return batch

    calls: list[int] = []
    iterator, found = iter(loader(**kwargs, transform=stop, num_workers=1)), []
    for _ in range(3):
        with contextlib.suppress(KeyboardInterrupt):
            for batch in iterator:
                found.append(batch)
    assert len(calls) == len(found) + 2
    assert_same_batches(loader(**kwargs), found)


@pytest.mark.parametrize("unit", ["nodes", "bytes"])
def test_other_units(unit: str) -> None:
    data = star_and_power_law().clone()
    data.edge_attr = torch.zeros(data.num_edges, 3)
    own = loader(data, batch_cost=Budget(unit, 900 if unit == "nodes" else "64kB"))

    def cost(batch: Any) -> int:
        if unit == "nodes":
            return int(batch.num_nodes)
        names = ("x", "edge_attr", "edge_index", "n_id", "e_id")
        return sum(batch[name].nbytes for name in names)

    found = torch.tensor([float(cost(batch)) for batch in own])
    most = 900 if unit == "nodes" else 64000
    assert found.max() <= most and found.mean() > 0.75 * most and spread(found) < 1.15


def test_types_and_disjoint_neighbourhoods() -> None:
    data = graphs.hetero()
    kind = data.node_types[0]
    for disjoint in (False, True):
        own = NeighborLoader(
            data,
            [3, 2],
            kind,
            disjoint=disjoint,
            shuffle=True,
            seed=1,
            batch_cost=Budget("edges", 60),
        )
        found = list(own)
        assert max(batch.num_edges for batch in found) <= 60 and len(found) > 1
        seeds = torch.cat([batch[kind].input_id for batch in found])
        assert seeds.sort().values.tolist() == list(range(data[kind].num_nodes))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, WORKERS[4]], ids=str)
def test_features_from_a_store_that_looks_ahead(workers: dict[str, Any]) -> None:
    data = star_and_power_law()
    kwargs = CUT
    store = Cached(filled(MemoryFeatureStore(), data), 400, "belady")
    found = loader(data, **kwargs, feature_store=store, **workers)
    assert_same_batches(loader(**kwargs), found)


# Ranks #####################################################################################


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_list(world_size: int) -> None:
    alone = list(loader())

    def work(comm: Any) -> list[Any]:
        own = loader(comm=comm, split_seeds="global")
        found = list(own)
        assert len(found) == len(own)
        return found

    found = on_ranks(world_size, work)
    assert_same_batches(alone, in_turn(found))
    for step in zip(*found):
        assert spread(edges_of(step)) < 1.15


def test_steps_of_pieces_have_the_gradient_of_one_process() -> None:
    """The sums of the pieces of all ranks over all seeds, as ``backward(loss, num_seeds)`` does."""
    data = star_and_power_law().clone()
    data.x, data.y = data.x.double(), torch.arange(data.num_nodes) % 3
    model = SAGEConv(4, 3).double()
    kwargs = {
        "data": data,
        "input_nodes": torch.arange(400),
        "num_neighbors": [-1],
        "batch_cost": Budget(alone, 30),
    }

    def gradient(batches: list[Any]) -> Tensor:
        model.zero_grad()
        seeds = sum(batch.batch_size for batch in batches)
        for batch in batches:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            (F.cross_entropy(out, batch.y[: batch.batch_size], reduction="sum") / seeds).backward()
        return torch.cat([p.grad.view(-1) for p in model.parameters()])

    def work(comm: Any) -> list[list[Any]]:
        return by_planned(list(loader(comm=comm, split_seeds="global", **kwargs)))

    found = on_ranks(2, work)
    assert any(len(pieces) > 1 for pieces in found[0] + found[1])
    for step in zip(*found):
        pieces = [piece for rank in step for piece in rank]
        seeds = torch.cat([piece.input_id for piece in pieces])
        (whole,) = NeighborLoader(data, [-1], seeds, batch_size=len(seeds))
        assert torch.allclose(gradient(pieces), gradient([whole]), rtol=0, atol=1e-12)


def test_ranks_with_other_budgets_say_so() -> None:
    def work(comm: Any) -> None:
        budget = Budget("edges", 2000 + 500 * comm.rank)
        with pytest.raises(CommError, match="rank 1 has batch_cost=2500 edges"):
            list(loader(comm=comm, split_seeds="global", batch_cost=budget))

    on_ranks(2, work)


def test_other_ranks_resume_within_a_batch() -> None:
    kwargs = CUT
    everything = list(loader(**kwargs))
    pieces = by_planned(everything)
    number = next(n for n, group in enumerate(pieces) if len(group) > 1)
    original = loader(**kwargs)
    iterator = iter(original)
    had = list(itertools.islice(iterator, sum(map(len, pieces[:number])) + 1))
    state = original.state_dict()
    assert had[-1].num_pieces > 1 and state["pieces"] == [number, 1]

    def work(comm: Any) -> list[Any]:
        own = loader(comm=comm, split_seeds="global", **kwargs)
        own.load_state_dict(state)
        return list(own)

    found = on_ranks(2, work)
    expected = [pieces[number][1:], *pieces[number + 1 :]]
    for rank in range(2):
        assert_same_batches([b for group in expected[rank::2] for b in group], found[rank])


# Bad input #################################################################################


def test_a_seed_that_exceeds_the_budget() -> None:
    with pytest.raises(BudgetError, match="node 2000 alone costs 500, more than batch_cost=400"):
        loader(num_neighbors=[-1], batch_cost=Budget("edges", 400))
    with pytest.raises(BudgetError, match="alone costs 2, more than batch_cost=1 nodes"):
        NeighborLoader(
            Data(edge_index=torch.tensor([[1], [0]]), num_nodes=2),
            [1],
            batch_cost=Budget("nodes", 1),
        )


@pytest.mark.parametrize("workers", WORKERS[:4], ids=str)
def test_a_seed_that_exceeds_the_budget_only_now(
    workers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = loader(batch_cost=Budget(changing, 900), input_nodes=torch.arange(20), **workers)
    monkeypatch.setattr(pyg_scale, "_of_this_test", 1000, raising=False)
    with pytest.raises(BudgetError, match="alone costs 1000, more than batch_cost=900 changing"):
        list(own)


def changing(out: Any) -> int:
    """Another cost than when the plan was made."""
    return vars(pyg_scale).get("_of_this_test", 1)


Refused = tuple[dict[str, Any], type[Exception], str]
REFUSED: dict[str, Callable[[], Refused]] = {
    "batch_size": lambda: ({"batch_size": 5}, ValueError, "batch_size=5 and batch_cost=2000"),
    "none": lambda: ({"batch_size": None}, ValueError, "batch_size=None makes no batches"),
    "drop_last": lambda: ({"drop_last": True}, ValueError, "drop_last=True and batch_cost"),
    "sampler": lambda: (
        {"sampler": range(5), "shuffle": False},
        ValueError,
        "both say how seeds are cut",
    ),
    "steps": lambda: ({"split_batches": True}, ValueError, "split_batches=True shares"),
    "parts": lambda: ({"split_seeds": "part"}, ValueError, "groups seeds by part"),
    "number": lambda: ({"batch_cost": 5}, TypeError, "must be a Budget"),
    "foreign": lambda: ({"neighbor_sampler": Foreign()}, NotImplementedError, "Foreign"),
}


class Foreign(BaseSampler):
    def sample_from_nodes(self, index: Any, **kwargs: Any) -> Any:
        raise AssertionError("is never asked")

    sample_from_edges = sample_from_nodes


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    kwargs, error, match = REFUSED[name]()
    kwargs = {"batch_cost": Budget("edges", 2000)} | kwargs
    with pytest.raises(error, match=match):
        loader(**kwargs)


def test_refused_elsewhere() -> None:
    data = star_and_power_law()
    with pytest.raises(ValueError, match="unit of a Budget"):
        Budget("seeds", 3)
    with pytest.raises(ValueError, match="at least 1"):
        Budget("edges", 0)
    with pytest.raises(TypeError, match="must be an integer"):
        Budget("edges", 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ZipLoader"):
        ZipLoader([loader(), loader()], batch_size=3)
    hetero = graphs.hetero()
    with pytest.raises(NotImplementedError, match="HGTSampler does not tell"):
        HGTLoader(hetero, [4], hetero.node_types[0], batch_cost=Budget("edges", 100))
    with pytest.raises(NotImplementedError, match="batch_cost= is not for GraphSAINTNodeSampler"):
        GraphSAINTNodeSampler(data, 50, batch_cost=Budget("edges", 100), log=False)
    with pytest.raises(ValueError, match="batch_cost=2000 edges, this one has none"):
        loader(data, batch_size=7).load_state_dict(loader().state_dict())
    with pytest.raises(ValueError, match="plan"):
        loader(num_neighbors=[5, 5]).load_state_dict(loader().state_dict())
    with pytest.raises(ValueError, match="must return 0 or more"):
        loader(batch_cost=Budget(lambda out: -1, 5))
    with pytest.raises(TypeError, match="must return a number"):
        loader(batch_cost=Budget(lambda out: None, 5))  # type: ignore[arg-type,return-value]


def test_shadow_has_a_budget_too() -> None:
    data = star_and_power_law()
    kwargs: dict[str, Any] = {"shuffle": True, "seed": 1, "node_idx": torch.arange(500)}
    found = list(ShaDowKHopSampler(data, 2, 3, batch_cost=Budget("edges", 2000), **kwargs))
    assert max(batch.num_edges for batch in found) <= 2000
    assert sum(batch.num_graphs for batch in found) == 500


def test_no_seeds() -> None:
    own = loader(input_nodes=torch.empty(0, dtype=torch.int64))
    assert len(own) == 0 and list(own) == []


def test_links_are_planned_by_both_ends() -> None:
    data = star_and_power_law()
    own = LinkNeighborLoader(
        data,
        [5, 5],
        data.edge_index[:, ::9],
        neg_sampling="binary",
        shuffle=True,
        seed=2,
        batch_cost=Budget("edges", 3000),
    )
    batches = list(own)
    cost = edges_of(batches)
    assert cost.max() <= 3000 and spread(cost) < 1.15
    seeds = torch.cat([batch.input_id for batch in batches])
    assert seeds.sort().values.tolist() == list(range(data.edge_index[:, ::9].size(1)))
