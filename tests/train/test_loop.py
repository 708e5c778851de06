"""Accumulation, precision, learning rates, seeds, early stops and progress of a training loop."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

from pyg_scale import parallel
from pyg_scale.comm.gloo import Gloo
from pyg_scale.datasets import planted_communities
from pyg_scale.errors import DeviceError
from pyg_scale.loader import NeighborLoader
from pyg_scale.nn import accelerate
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.testing.ranks import run_ranks
from pyg_scale.train import (
    Accumulation,
    Checkpoint,
    EarlyStopping,
    Precision,
    progress,
    scale_learning_rate,
    seed_everything,
)

SEEDS = 50
BATCH = 8


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(2) as started:
        yield started


def graph():
    data = planted_communities(120, 700, 3, 6)
    data.x = data.x.double()
    return data


def loader_of(data, num_seeds=SEEDS, **options):
    """All neighbours, so that no draw depends on how seeds are cut into batches."""
    options = {"batch_size": BATCH, "seed": 3, **options}
    return NeighborLoader(data, [-1, -1], torch.arange(num_seeds), **options)


def model_of(dtype=torch.float64):
    torch.manual_seed(0)
    return GraphSAGE(6, 8, 2, 3).to(dtype)


def loss_of(model, batch):
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    return F.cross_entropy(out, batch.y[: batch.batch_size])


def gradients_of_one_batch(data, seeds):
    model = model_of()
    (batch,) = NeighborLoader(data, [-1, -1], seeds, batch_size=len(seeds), seed=3)
    loss_of(model, batch).backward()
    return [parameter.grad for parameter in model.parameters()]


def accumulated(model, loader, every):
    """The gradients of each step, and how many batches it took."""
    accumulation, found, count = Accumulation(model, every), [], 0
    for batch in accumulation(loader):
        with accumulation.syncing():
            accumulation.backward(loss_of(model, batch), batch.batch_size)
        count += 1
        if accumulation.due:
            found.append((count, [p.grad.clone() for p in model.parameters()]))
            model.zero_grad()
            count = 0
    assert count == 0, "the tail was not flushed"
    return found


def assert_close(found, expected):
    for one, two in zip(found, expected, strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-12)


# Accumulation ##############################################################################


@pytest.mark.parametrize("every", [1, 3, 7, 100])
def test_steps_of_several_batches_are_those_of_one_large_batch(every):
    data = graph()
    found = accumulated(model_of(), loader_of(data), every)
    batches = math.ceil(SEEDS / BATCH)
    assert [count for count, _ in found] == [
        min(every, batches - at) for at in range(0, batches, every)
    ]
    for step, (_, gradients) in enumerate(found):
        begin = step * every * BATCH
        seeds = torch.arange(begin, min(begin + every * BATCH, SEEDS))
        assert_close(gradients, gradients_of_one_batch(data, seeds))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_is_known_without_a_batch_ahead(workers):
    loader = loader_of(graph(), num_workers=workers)
    accumulation = Accumulation(model_of(), 3)
    for number, _ in enumerate(accumulation(loader), 1):
        assert loader.state_dict()["delivered"] == number
        assert accumulation.due == (number in (3, 6, 7))


def test_other_iterables_are_asked_for_one_more():
    accumulation = Accumulation(model_of(), 2)
    assert [(x, accumulation.due) for x in accumulation(iter("abc"))] == [
        ("a", False), ("b", True), ("c", True)
    ]  # fmt: skip
    assert list(accumulation([])) == []

    class Stateful(list):
        def state_dict(self):
            return {}

    with pytest.raises(TypeError, match="has a state"):
        accumulation(Stateful("abc"))


def test_a_loss_of_no_seeds_may_be_nan():
    model = torch.nn.Linear(2, 1, bias=False)
    accumulation, x = Accumulation(model, 2), torch.tensor([[1.0, 2.0]])
    for empty in accumulation([False, True]):
        accumulation.backward(model(x).sum() / 0 * 0 if empty else model(x).sum(), 1 - empty)
    assert torch.equal(model.weight.grad, x)


def test_accumulation_refuses_what_cannot_be():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        Accumulation(3, 2)
    with pytest.raises(ValueError, match="1 or more"):
        Accumulation(model_of(), 0)
    with pytest.raises(ValueError, match="negative"):
        Accumulation(model_of(), 1).backward(torch.ones((), requires_grad=True), -1)


def after_an_early_end(model, to_none=True):
    """The gradient of a step that follows an epoch which was left early, and that of its rows."""
    whole = model if isinstance(model, nn.Linear) else model.module
    rows = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    accumulation = Accumulation(model, 4)
    for number, batch in enumerate(accumulation(rows.split(1))):
        with accumulation.syncing():
            accumulation.backward(model(batch).square().mean(), 1)
        if number == 1:
            break
    model.zero_grad(set_to_none=to_none)
    for batch in accumulation(rows.split(1)):
        with accumulation.syncing():
            accumulation.backward(model(batch).square().mean(), 1)
        if accumulation.due:
            break
    (weight,) = whole.parameters()
    found = weight.grad.clone()
    whole.zero_grad()
    whole(rows[:4]).square().mean().backward()
    assert torch.allclose(found, weight.grad, rtol=0, atol=1e-12)


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False).double()


@pytest.mark.parametrize("to_none", [True, False])
def test_an_epoch_that_is_left_early(to_none):
    after_an_early_end(linear(), to_none)


def early_ends_on_ranks():
    for to_none in (True, False):
        after_an_early_end(DistributedDataParallel(linear()), to_none)
        for kind in ("ddp", "local_sgd"):
            after_an_early_end(parallel.wrap(linear(), kind), to_none)
        stages = nn.Sequential(linear(), nn.Tanh())  # the second one has no gradients
        layer = parallel.wrap(stages, "layer", device_map={"0": 0, "1": 1})
        after_an_early_end(layer, to_none)


def test_an_epoch_that_ranks_leave_early(ranks):
    ranks.run(early_ends_on_ranks)


def test_seeds_of_a_flat_loss_count():
    """Gradients that are zero without ``zero_grad`` are those of seeds, too."""
    model, rows = linear(), torch.ones(4, 2, dtype=torch.float64)
    accumulation = Accumulation(model, 4)
    for number, batch in enumerate(accumulation(rows.split(1))):
        accumulation.backward(model(batch).sum() * (number > 1), 1)
        assert bool(model.weight.grad.any()) == (number > 1)
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 0.5))


def accumulated_on_ranks(kind, every, options):
    """The gradients of each step, and how many collectives of gradients were made."""
    data = graph()
    model = model_of()
    if kind == "ddp":
        model = parallel.wrap(model, "ddp", bucket_cap_mb=100)
    elif kind == "torch":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    counted = []
    if kind == "ddp":
        reduce = model._weights.reduce

        def counting(bucket):
            counted.append(bucket.index())
            return reduce(bucket)

        model._weights.reduce = counting
    loader = loader_of(data, split_seeds="global", **options)
    if kind == "ddp":
        with model.join(model.zero_grad):
            found = accumulated(model, loader, every)
    else:
        found = accumulated(model, loader, every)
    whole = [[getattr(g, "full_tensor", lambda g=g: g)() for g in grads] for _, grads in found]
    return [count for count, _ in found], whole, counted.count(0)


@pytest.mark.parametrize("kind", ["ddp", "torch", "fsdp"])
def test_ranks_exchange_gradients_when_a_step_is_due(ranks, kind):
    options = {"split_batches": True}  # pieces of unequal size
    answers = ranks.run(accumulated_on_ranks, kind, 3, options)
    for counts, gradients, exchanges in answers:
        assert counts == [3, 3, 1]
        assert exchanges == (3 if kind == "ddp" else 0)
        for step, found in enumerate(gradients):
            seeds = torch.arange(step * 3 * BATCH, min((step + 1) * 3 * BATCH, SEEDS))
            assert_close(found, gradients_of_one_batch(graph(), seeds))


def test_where_a_rank_runs_out_of_batches_a_step_ends(ranks):
    """Of 7 batches rank 0 has four and rank 1 three: steps of 2, 1 and, on rank 0 alone, 1."""
    first, second = ranks.run(accumulated_on_ranks, "ddp", 2, {})
    assert first[0] == [2, 1, 1] and second[0] == [2, 1]
    ends = [0, 32, 48, 50]
    for step, found in enumerate(first[1]):
        seeds = torch.arange(ends[step], ends[step + 1])
        assert_close(found, gradients_of_one_batch(graph(), seeds))
    for found, other in zip(first[1], second[1], strict=False):
        assert_close(found, other)


# Precision #################################################################################


def final_loss(name, fused):
    data = planted_communities(300, 2_000, 4, 16, signal=0.8)
    torch.manual_seed(0)
    model = GraphSAGE(16, 16, 2, 4)
    if fused:
        accelerate(model, min_work=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    precision = Precision(name)
    loader = NeighborLoader(data, [5, 5], batch_size=100, shuffle=True, seed=0)
    for _ in range(4):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            with precision.autocast():
                loss = loss_of(model, batch)
            precision.scale(loss).backward()
            precision.step(optimizer)
            total += float(loss.detach())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return total


@pytest.mark.parametrize("fused", [False, True], ids=["pyg", "fused"])
def test_losses_of_16_bits_are_close_to_those_of_32(fused):
    expected = final_loss("fp32", fused)
    for name in ("bf16", "fp16"):
        assert final_loss(name, fused) == pytest.approx(expected, rel=0.02), name


def test_a_step_that_overflows_is_left_out():
    precision = Precision("fp16", init_scale=1024, growth_interval=2)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    schedule = []
    for factor in (1.0, math.inf, 1.0, 1.0):
        optimizer.zero_grad()
        precision.scale((weight * torch.tensor([1.0, factor])).sum()).backward()
        made = precision.step(optimizer)
        schedule.append((made, weight.tolist(), precision.state_dict()["scaler"]["scale"]))
    assert schedule == [
        (True, [0.5, 0.5], 1024),
        (False, [0.5, 0.5], 512),
        (True, [0.0, 0.0], 512),
        (True, [-0.5, -0.5], 1024),
    ]
    assert precision.skipped == 1


def test_the_factor_is_saved_with_a_checkpoint(tmp_path):
    first, second = Precision("fp16", init_scale=8.0), Precision("fp16")
    first.skipped = 3
    with Checkpoint(tmp_path, {"precision": first}) as checkpoint:
        checkpoint.save(1)
    with Checkpoint(tmp_path, {"precision": second}) as checkpoint:
        checkpoint.load()
    assert second.skipped == 3 and float(second.scale(torch.ones(()))) == 8.0
    with pytest.raises(ValueError, match="in fp16, and this one is in bf16"):
        Precision("bf16").load_state_dict(first.state_dict())


def test_clipping_sees_true_gradients():
    precision = Precision("fp16", init_scale=1024)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    precision.scale(weight.sum() * 4).backward()
    precision.unscale(optimizer)
    nn.utils.clip_grad_norm_([weight], 1.0)
    assert precision.step(optimizer) and weight.item() == pytest.approx(0.0, abs=1e-5)


def test_devices_without_a_precision_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="fp32, bf16, fp16"):
        Precision("fp8")
    with pytest.raises(ValueError, match="init_scale"):
        Precision("fp16", init_scale=math.inf)
    with pytest.raises(DeviceError, match="'mps'"):
        Precision("bf16", "mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no CUDA here"):
        Precision("fp32", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(DeviceError, match="Tesla V100 has compute capability 7.0.*'fp16' or"):
        Precision("bf16", "cuda")


# Learning rates ############################################################################


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
@pytest.mark.parametrize(("by", "num_steps", "warm_up"), [(4, 200, 0.05), (1, 10, 0.05), (8, 3, 0)])
def test_rates_are_those_of_the_formula(rule, by, num_steps, warm_up):
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1], "lr": 0.3}, {"params": weights[1:]}], 0.1)
    schedule = scale_learning_rate(optimizer, by, num_steps, rule=rule, warm_up=warm_up)
    grows = max(1, int(num_steps * warm_up))
    for step in range(num_steps + 1):
        share = min(step / grows, 1.0)
        for group, rate in zip(optimizer.param_groups, (0.3, 0.1)):
            peak = rate * (by if rule == "linear" else by**0.5)
            expected = peak / by + (peak - peak / by) * share
            assert group["lr"] == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        schedule.step()


def test_a_rate_that_is_a_tensor_of_two_groups():
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([{"params": [each]} for each in weights], lr=rate)
    schedule = scale_learning_rate(optimizer, 4, num_steps=100)
    for _ in range(10):
        optimizer.step()
        schedule.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.4, 0.4])
    assert float(rate) == pytest.approx(0.1)


def test_a_schedule_is_resumed(tmp_path):
    def parts():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
        return {"optimizer": optimizer, "schedule": scale_learning_rate(optimizer, 4, 100)}

    first, second = parts(), parts()
    for _ in range(3):
        first["optimizer"].step()
        first["schedule"].step()
    with Checkpoint(tmp_path, first) as checkpoint:
        checkpoint.save(3)
    with Checkpoint(tmp_path, second) as checkpoint:
        checkpoint.load()
    for _ in range(4):
        for each in (first, second):
            each["optimizer"].step()
            each["schedule"].step()
        assert first["schedule"].get_last_lr() == second["schedule"].get_last_lr()


@pytest.mark.parametrize("num_steps", [None, math.inf, 2.5, "many"])
def test_a_schedule_needs_a_number_of_steps(num_steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(TypeError, match=r"epochs \* len\(loader\)"):
        scale_learning_rate(optimizer, 2, num_steps)


@pytest.mark.parametrize(
    "options",
    [{"num_steps": 0}, {"by": 0.5}, {"by": math.nan}, {"rule": "cubic"}, {"warm_up": 1.5}],
    ids=str,
)
def test_rates_that_cannot_be(options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(ValueError, match=next(iter(options))):
        scale_learning_rate(optimizer, **{"by": 2, "num_steps": 10, **options})
    assert optimizer.param_groups[0]["lr"] == 0.1


# Seeds #####################################################################################


@pytest.fixture
def undeterministic():
    yield
    torch.use_deterministic_algorithms(False)


def weights_of_a_run(seed):
    seed_everything(seed, deterministic=True)
    data = planted_communities(300, 2_000, 4, 8)
    model = GraphSAGE(8, 16, 2, 4, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in NeighborLoader(data, [5, 5], batch_size=50, shuffle=True, num_workers=2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return [*model.parameters(), torch.tensor([random.random(), np.random.rand()])]


def test_two_seeded_runs_have_equal_weights(undeterministic):
    first, second, other = (weights_of_a_run(seed) for seed in (5, 5, 6))
    assert torch.are_deterministic_algorithms_enabled()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_ranks_draw_differently():
    draws = []
    for rank in (None, 0, 1, 2, 1):
        seed_everything(7, rank=rank)
        draws.append((float(torch.rand(())), random.random(), float(np.random.rand())))
    torch.manual_seed(7)
    assert draws[0] == draws[1] and draws[0][0] == float(torch.rand(()))
    assert draws[2] == draws[4] and len(set(draws)) == 3
    seed_everything(1 << 40)
    with pytest.raises(ValueError, match="seed must be from 0"):
        seed_everything(-1)
    with pytest.raises(TypeError):
        seed_everything(1.5)


# Early stops ###############################################################################


def test_patience(tmp_path):
    stopping = EarlyStopping(2, min_delta=0.1)
    answers = [stopping.step(value) for value in (1.0, 0.95, 0.8, math.nan)]
    assert answers == [False] * 4 and stopping.best == 0.8 and not stopping.is_best
    resumed = EarlyStopping(2, min_delta=0.1)
    resumed.load_state_dict(stopping.state_dict())
    assert resumed.step(0.75) and stopping.step(0.75)
    highest = EarlyStopping(1, mode="max")
    assert [highest.step(value) for value in (0.5, 0.6, 0.6)] == [False, False, True]


def test_all_ranks_stop_together():
    def work(group):
        with Gloo.join(group) as ranks, EarlyStopping(2, comm=ranks) as stopping:
            values = [[1.0, 2.0, 3.0, 0.1], [1.0, 0.5, 0.4, 0.3]][group.rank]
            return [stopping.step(value) for value in values]

    assert run_ranks(2, work) == [[False, False, True, False]] * 2


def test_stops_that_cannot_be():
    for options, match in (
        ({"patience": 0}, "patience"),
        ({"patience": 1, "mode": "best"}, "mode"),
        ({"patience": 1, "min_delta": -1.0}, "min_delta"),
    ):
        with pytest.raises(ValueError, match=match):
            EarlyStopping(**options)


# Progress ##################################################################################


def test_a_bar_is_for_rank_0_and_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for rank, out, speaks in (("0", Terminal(), True), ("1", Terminal(), False),
                              ("0", io.StringIO(), False)):  # fmt: skip
        monkeypatch.setenv("RANK", rank)
        assert list(progress(range(3), "epoch 1", file=out)) == [0, 1, 2]
        assert ("epoch 1" in out.getvalue()) == speaks
