"""Loads equal closed forms; slow ranks get fewer seeds, gradients stay exact; moves and advice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import pyg_scale
from pyg_scale import parallel
from pyg_scale.comm import connect
from pyg_scale.datasets import planted_communities
from pyg_scale.errors import CommError
from pyg_scale.loader import Budget, NeighborLoader
from pyg_scale.parallel import CountsWaiting, base
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.train import (
    AdaptivePartition,
    Checkpoint,
    Load,
    LoadMonitor,
    ScalingAdvisor,
    SpeedShares,
)
from pyg_scale.train.balance import UNITS, shares_of
from pyg_scale.train.load import MEASURES, imbalance_of, variation_of

NUM_SEEDS, STEP = 120, 30


def load_with(**columns):
    """A load of as many ranks as the columns have values."""
    size = len(next(iter(columns.values())))
    zeros = dict.fromkeys(MEASURES, 0.0)
    return Load(tuple(zeros | {k: float(v[r]) for k, v in columns.items()} for r in range(size)))


def test_figures_are_their_closed_forms():
    load = load_with(
        load=[1, 2, 0], compute=[1, 2, 3], wait=[9, 0, 1], edges=[10, 20, 30], seeds=[4] * 3
    )
    assert load.busy == [2, 4, 3]
    assert load.imbalance == pytest.approx(4 / 3) and load.efficiency == pytest.approx(3 / 4)
    assert load.time_variation == pytest.approx(statistics.pstdev([2, 4, 3]) / 3)
    assert load.size_variation == pytest.approx(statistics.pstdev([10, 20, 30]) / 20)
    assert load.speeds == pytest.approx([2, 1, 4 / 3])
    assert load_with(seeds=[1, 3]).size_variation == pytest.approx(0.5)
    for values, expected in (([], 1.0), ([0, 0], 1.0), ([5], 1.0), ([1, 3], 1.5)):
        assert imbalance_of(values) == expected
    assert [variation_of(v) for v in ([], [0, 0], [2, 2])] == [0, 0, 0]
    assert load_with(seeds=[1, 1]).speeds == [0, 0] and load_with(seeds=[1]).efficiency == 1


def test_shares_are_proportional():
    assert shares_of([1, 1]) == [UNITS // 2] * 2
    assert shares_of([3, 1]) == [UNITS * 3 // 4, UNITS // 4]
    assert shares_of([0, 2, 4]) == pytest.approx([UNITS / 3, UNITS * 2 / 9, UNITS * 4 / 9], abs=1)
    assert shares_of([0, 0]) == [UNITS // 2] * 2
    assert shares_of([1000, 1])[1] == round(UNITS * 0.05 / 2)
    for speeds in ([-1, 1], [math.nan, 1], [math.inf, 1]):
        with pytest.raises(ValueError, match="speeds"):
            shares_of(speeds)


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(3) as started:
        yield started


def loader_of(**options):
    data = planted_communities(200, 1_500, 3, 8)
    data.x = data.x.double()
    options = {"shuffle": True, "seed": 7, "split_batches": True, **options}
    if "batch_cost" not in options:
        options["batch_size"] = STEP
    return NeighborLoader(data, [-1, -1], torch.arange(NUM_SEEDS), **options)


def model_of():
    torch.manual_seed(0)
    return GraphSAGE(8, 8, 2, 3).double()


def loss_of(model, batch):
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    return F.cross_entropy(out, batch.y[: batch.batch_size])


def gradients(shares):
    """The seeds of each step of this rank, and the gradients of each step."""
    loader, model = loader_of(num_workers=1), model_of()
    if dist.is_initialized():
        model = parallel.wrap(model, "ddp")
        loader.set_speed_shares(shares)
    seeds, found = [], []
    for batch in loader:
        model.zero_grad()
        loss = loss_of(model, batch)
        if dist.is_initialized():
            model.backward(loss, batch.batch_size)
        else:
            loss.backward()
        seeds.append(batch.n_id[: batch.batch_size].tolist())
        found.append([p.grad.clone() for p in model.parameters()])
    return seeds, found


@pytest.mark.parametrize("shares", [(2, 1), (1, 2, 5), (1, 0, 1), (1, 1000)])
def test_unequal_shares_have_the_gradients_of_one_process(ranks, shares):
    steps, expected = gradients(None)
    answers = ranks.run(gradients, shares, world_size=len(shares))
    for number, step in enumerate(steps):
        pieces = [seeds[number] for seeds, _ in answers]
        assert [each for piece in pieces for each in piece] == step, "in order"
        for piece, share in zip(pieces, shares, strict=True):
            assert abs(len(piece) - len(step) * share / sum(shares)) < 1
        for _, found in answers:
            for one, two in zip(found[number], expected[number], strict=True):
                assert torch.allclose(one, two, rtol=0, atol=1e-12)


def shares_beside_cost():
    loader = loader_of(split_batches=False, batch_cost=Budget("edges", 900))
    for shares in ((1, 3), None):
        with pytest.raises(ValueError, match="batches of its own, of equal cost"):
            loader.set_speed_shares(shares)
    with (
        connect("gloo", name="cost", timeout=30) as comm,
        LoadMonitor(comm=comm) as monitor,
        pytest.raises(ValueError, match="batch_cost= each rank has batches of its own"),
    ):
        SpeedShares(loader, monitor)


def test_batches_of_equal_cost_have_no_shares(ranks):
    ranks.run(shares_beside_cost, world_size=2)


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    perf_counter = __call__


def balanced(name, costs, epochs, noise=0.0):
    """A training on a clock on which a seed takes so many seconds: the state of each epoch."""
    rank = dist.get_rank()
    clock, model, loader, found = Clock(), parallel.wrap(model_of(), "ddp"), loader_of(), []
    draw = torch.Generator().manual_seed(rank)
    real, base.time = base.time, clock  # nobody waits on this clock
    try:
        with (
            connect("gloo", name=name, timeout=30) as comm,
            LoadMonitor(model=model, comm=comm, clock=clock) as monitor,
        ):
            shares = SpeedShares(loader, monitor)
            for _ in range(epochs):
                seeds = []
                for batch in monitor(loader):
                    wobble = 1 + noise * float(torch.rand((), generator=draw) - 0.5)
                    clock.now += 0.001 + costs[rank] * batch.batch_size * wobble
                    model.zero_grad()
                    model.backward(loss_of(model, batch), batch.batch_size)
                    seeds.append(batch.batch_size)
                load = shares.step()
                found.append((sum(seeds), load.imbalance, shares.shares))
            return found
    finally:
        base.time = real


def waits(wrapper):
    """Seconds that a model waited before and after a step."""
    made = parallel.wrap(model_of(), wrapper)
    assert isinstance(made, CountsWaiting)
    (batch, *_), before = loader_of(), made.seconds_waited
    with made.join(torch.optim.SGD(made.parameters(), lr=0.1)):
        made.backward(loss_of(made, batch), batch.batch_size)
    return before, made.seconds_waited


def waits_on_a_graph(folder, wrapper):
    with pyg_scale.open(folder, comm=connect("gloo", name=f"{wrapper}-graph", timeout=30)) as data:
        made = parallel.wrap(model_of(), wrapper, graph=data)
        before = made.seconds_waited
        made.backward(made().square().sum(), 1)
        assert isinstance(made, CountsWaiting)
        return before, made.seconds_waited


@pytest.mark.parametrize("wrapper", ["ddp", "local_sgd", "federated", "async_ps"])
def test_models_count_their_waiting(ranks, wrapper):
    found = ranks.run(waits, wrapper, world_size=2)
    assert all(after > before >= 0 for before, after in found)


@pytest.mark.parametrize("wrapper", ["halo", "feature"])
def test_models_on_a_graph_count_their_waiting(ranks, tmp_path, wrapper):
    data = planted_communities(200, 1_500, 3, 8)
    data.x = data.x.double()
    pyg_scale.save(data, tmp_path / "whole")
    pyg_scale.partition(tmp_path / "whole", 2, "hash", tmp_path / "parts")
    found = ranks.run(waits_on_a_graph, str(tmp_path / "parts"), wrapper, world_size=2)
    assert all(after > before > 0 for before, after in found), "parameters were exchanged, too"


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_of_half_the_speed_gets_half_the_seeds(ranks, slow):
    costs = [0.01, 0.01]
    costs[slow] = 0.02
    answers = ranks.run(balanced, f"half-{slow}", costs, 5, world_size=2)
    assert [a[2] for a in answers[0]] == [a[2] for a in answers[1]], "the same shares everywhere"
    assert answers[0][0][1] == pytest.approx(4 / 3, abs=0.05)
    for epoch in (2, 3, 4):
        ratio = answers[slow][epoch][0] / answers[1 - slow][epoch][0]
        assert 0.4 <= ratio <= 0.6 and answers[0][epoch][1] <= 1.2
        assert answers[0][epoch][0] + answers[1][epoch][0] == NUM_SEEDS


def test_noise_moves_nothing(ranks):
    (found, _) = ranks.run(balanced, "noise", [0.01, 0.01], 4, 0.05, world_size=2)
    assert [shares for _, _, shares in found] == [None] * 4


def resumed(folder, name):
    """Stop in the middle of the second epoch, after the shares of the third were said."""

    def seeds_of(loader, steps=None):
        found = []
        for batch in loader:
            found.append(batch.n_id[: batch.batch_size].tolist())
            if len(found) == steps:
                break
        return found

    whole = loader_of()
    whole.set_speed_shares((3, 1))
    expected = [seeds_of(whole), seeds_of(whole)]
    whole.set_speed_shares((1, 4))
    expected.append(seeds_of(whole))
    first, second = loader_of(), loader_of()
    first.set_speed_shares((3, 1))
    seeds_of(first)
    made = seeds_of(first, 2)
    first.set_speed_shares((1, 4))
    with connect("gloo", name=name, timeout=30) as comm:
        with Checkpoint(folder, {"loader": first}, comm=comm) as checkpoint:
            checkpoint.save(2)
        with Checkpoint(folder, {"loader": second}, comm=comm) as checkpoint:
            checkpoint.load()
    assert made + seeds_of(second) == expected[1]
    assert seeds_of(second) == expected[2]


def test_shares_are_part_of_the_state(ranks, tmp_path):
    ranks.run(resumed, str(tmp_path), "resumed", world_size=2)
    ranks.run(fewer, str(tmp_path), "fewer", world_size=3)


def fewer(folder, name):
    """Another number of ranks forgets shares that are not theirs."""
    loader = loader_of()
    with (
        connect("gloo", name=name, timeout=30) as comm,
        Checkpoint(folder, {"loader": loader}, comm=comm) as checkpoint,
    ):
        checkpoint.load()
    assert [batch.batch_size for batch in loader] == [10, 10]
    assert [batch.batch_size for batch in loader] == [10] * 4


def refusals():
    for options in (
        {"split_batches": False, "split_seeds": "global"},
        {"split_seeds": False, "split_batches": False},
    ):
        with pytest.raises(ValueError, match="split_batches=True"):
            loader_of(**options).set_speed_shares((1, 1))
    loader = loader_of()
    for shares in ((1,), (1, 2, 3), (-1, 2), (0, 0), (1 << 31, 1)):
        with pytest.raises(ValueError, match="shares must be 2 integers"):
            loader.set_speed_shares(shares)
    loader.set_speed_shares((1, 2 + dist.get_rank()))
    with pytest.raises(CommError, match="speed_shares"):
        next(iter(loader))


def test_shares_that_cannot_be(ranks):
    ranks.run(refusals, world_size=2)
    loader = loader_of()
    loader.set_speed_shares(None)
    loader.set_speed_shares((1,))
    with pytest.raises(ValueError, match="several ranks"):
        loader.set_speed_shares((1, 2))
    for options, match in (({"smoothing": 0}, "smoothing"), ({"tolerance": -1}, "tolerance")):
        with pytest.raises(ValueError, match=match):
            SpeedShares(loader, LoadMonitor(), **options)


def test_speeds_are_saved(tmp_path):
    first, second = (SpeedShares(loader_of(), LoadMonitor()) for _ in range(2))
    first.speeds, first.shares = [2.0], [UNITS]
    with Checkpoint(tmp_path, {"shares": first}) as checkpoint:
        checkpoint.save(1)
    with Checkpoint(tmp_path, {"shares": second}) as checkpoint:
        checkpoint.load()
    assert second.state_dict() == {"speeds": [2.0], "shares": [UNITS]}


# Partitions ################################################################################


def busy_load(assignment, costs):
    """The load of ranks whose edges take so long, one part each."""
    sizes = torch.bincount(assignment, minlength=len(costs)).tolist()
    return load_with(
        edges=[10 * n for n in sizes], compute=[10 * n * c for n, c in zip(sizes, costs)]
    )


def test_a_partition_adapts_to_speeds_and_comes_to_rest():
    data = planted_communities(600, 4_000, 4, 2)
    assignment = pyg_scale.partition(data, 2, "fennel")
    adaptive = AdaptivePartition(data, assignment, threshold=1.2, patience=2, cooldown=3)
    moved = []
    for _ in range(12):
        load = busy_load(torch.as_tensor(adaptive.assignment), [0.001, 0.002])
        result = adaptive.step(load)
        moved.append(result.num_moved if result else 0)
    assert [i for i, n in enumerate(moved) if n] == [1]
    sizes = torch.bincount(torch.as_tensor(adaptive.assignment)).tolist()
    assert sizes[0] / sizes[1] == pytest.approx(2, rel=0.16)  # each within 5 % of its target
    assert load.imbalance < 1.2


def test_a_short_peak_moves_nothing():
    data = planted_communities(100, 500, 2, 2)
    adaptive = AdaptivePartition(data, torch.arange(100) % 2, patience=3, cooldown=0)
    peak, even = load_with(edges=[1, 1], compute=[1, 3]), load_with(edges=[1, 1], compute=[1, 1])
    assert [adaptive.step(load) for load in (peak, peak, even, peak, peak, even)] == [None] * 6
    assert [bool(adaptive.step(peak)) for _ in range(3)] == [False, False, True]


def test_partitions_that_cannot_be():
    for options, match in (({"threshold": 1}, "threshold"), ({"patience": 0}, "patience")):
        with pytest.raises(ValueError, match=match):
            AdaptivePartition(None, None, **options)


# Advice ####################################################################################


@pytest.mark.parametrize(
    ("throughputs", "efficiency", "action"),
    [
        ([100] * 9, 1.0, "hold"),
        ([100] * 5 + [104] * 5, 1.0, "grow"),
        ([100] * 5 + [104] * 5, 0.7, "hold"),
        ([100] * 5 + [106] * 5, 1.0, "hold"),
        ([100] * 5 + [94] * 5, 1.0, "shrink"),
        ([0] * 5 + [100] * 5, 1.0, "hold"),
        ([1] * 20 + [100] * 10, 1.0, "grow"),
    ],
)
def test_advice_compares_five_epochs_with_the_five_before(throughputs, efficiency, action):
    advisor = ScalingAdvisor()
    advice = [advisor.step(each, efficiency) for each in throughputs][-1]
    assert advice.action == action
    if advice.growth is not None:
        last, before = throughputs[-5:], throughputs[-10:-5]
        assert advice.growth == pytest.approx(sum(last) / sum(before) - 1)


def test_advice_that_cannot_be():
    with pytest.raises(ValueError, match="window"):
        ScalingAdvisor(0)
    advisor = ScalingAdvisor(1)
    with pytest.raises(ValueError, match="throughput"):
        advisor.step(math.nan)
    advisor.step(1.0)
    advisor.reset()
    assert advisor.step(1.0).growth is None
