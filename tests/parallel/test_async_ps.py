"""`async_ps` under a schedule that says who is next, beside the same formulas in one process."""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_scale import parallel
from pyg_scale.errors import CommError
from pyg_scale.parallel.async_ps import AsyncPS, ParameterServer
from pyg_scale.testing.parallel import Batch, Net, batch_of
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.train import Checkpoint

SGD = partial(torch.optim.SGD, lr=0.1)
ORDER = [0, 1, 1, 2, 1, 0, 2, 2, 2, 0, 1, 0]  # who sends next
STALENESS = [0, 1, 0, 3, 1, 4, 2, 0, 0, 3, 5, 1]


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(3) as started:
        yield started


def loss_of(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.x, batch.edge_index)[: batch.num_seeds], batch.y)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def expected(rule: str, order: Sequence[int]) -> tuple[Net, list[int]]:
    """The model after the steps of an order, and the staleness of each, by the formulas."""
    now = net()
    seen = [(0, [p.detach().clone() for p in now.parameters()]) for _ in range(3)]
    found = []
    for version, worker in enumerate(order):
        before, old = seen[worker]
        model = net()
        model.load_state_dict(now.state_dict())
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), old):
                parameter.copy_(value)
        loss_of(model, batch_of(worker, before, worker + 2)).backward()
        staleness = version - before
        found.append(staleness)
        rate = {"linear": 0.1 / (1 + 0.1 * staleness), "inverse": 0.1 / (1 + staleness)}
        with torch.no_grad():
            for parameter, own, value in zip(now.parameters(), model.parameters(), old):
                gradient = own.grad
                if gradient is None:
                    continue
                if rule == "dc":
                    gradient = gradient + 0.5 * gradient * gradient * (parameter - value)
                parameter -= rate.get(rule, 0.1) * gradient
        seen[worker] = version + 1, [p.detach().clone() for p in now.parameters()]
    return now, found


def in_turns(model: Any, order: Sequence[int], first: int, seen: int) -> tuple[list[int], int]:
    """Make the steps of this rank in an order; what it sends is of what it got last."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    found = []
    for turn in range(first, first + len(order)):
        if order[turn - first] != rank:
            continue
        if turn > first:
            store.wait([f"turn {turn}"], timedelta(seconds=20))
        model.optimizer.zero_grad()
        batch = batch_of(rank, seen % 100, rank + 2)  # of another step each time
        model.backward(loss_of(model, batch), batch.num_seeds)
        model.optimizer.step()
        seen = turn + 1
        found.append(model.staleness)
        store.set(f"turn {turn + 1}", "")
    return found, seen


def scheduled(rule: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = parallel.wrap(Net(), "async_ps", staleness=rule, optimizer=SGD, compensation=0.5)
    dist.barrier()
    with model.join(model.optimizer):
        found, _ = in_turns(model, ORDER, 0, 0)
    alone, staleness = expected(rule, ORDER)
    assert staleness == STALENESS
    assert found == [each for each, worker in zip(staleness, ORDER) if worker == rank]
    for name, value in alone.state_dict().items():
        assert torch.allclose(model.module.state_dict()[name], value, rtol=0, atol=1e-12), name
    model.close()


@pytest.mark.parametrize("rule", ["linear", "inverse", "dc"])
def test_the_rule_of_staleness(ranks: WaitingProcesses, rule: str) -> None:
    ranks.run(scheduled, rule)


def resumed(folder: str) -> None:
    """Gradients that were under way are of what their worker had, also after it was saved."""
    models = []
    for number in range(2):
        torch.manual_seed(dist.get_rank())
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        model = parallel.wrap(Net(), AsyncPS("dc", optimizer))
        with Checkpoint(folder, {"model": model}) as checkpoint:
            seen = 0
            if number == 0:
                _, seen = in_turns(model, ORDER[:6], 100, 0)
                checkpoint.save(6, seen=seen)
            else:
                assert checkpoint.load().step == 6
                seen = next(turn + 101 for turn in (5, 4, 3) if ORDER[turn] == dist.get_rank())
        dist.barrier()
        found, _ = in_turns(model, ORDER[6:], 200 + 100 * number, seen)
        wanted = [each for each, who in zip(STALENESS[6:], ORDER[6:]) if who == dist.get_rank()]
        assert found == wanted
        with model.join(model.optimizer):
            pass
        models.append(model)
    for one, two in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(one, two)


def test_a_run_that_is_resumed(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(resumed, str(tmp_path))


def slow_to_hear() -> None:
    """Rank 2 hears of the end of an epoch after rank 1 has made a step of the next one."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    model = parallel.wrap(Net(), "async_ps", optimizer=SGD)
    end = model._rounds.end

    def heard_late(tensors: list[Tensor]) -> Any:
        ended = end(tensors)
        store.wait(["a step of the next epoch"], timedelta(seconds=20))
        return ended

    if rank == 2:
        model._rounds.end = heard_late
    with model.join(model.optimizer):
        step_of(model, 0)
    weight = model.module.last.lin_l.weight.detach().clone()
    if rank == 1:
        step_of(model, 1)
        store.set("a step of the next epoch", "")
    every = [torch.empty_like(weight) for _ in range(3)]
    dist.all_gather(every, weight)
    assert torch.equal(every[1], every[0]) and torch.equal(every[1], every[2])
    if rank == 2:
        step_of(model, 2)
        assert model.staleness == 1
    dist.barrier()
    model.close()


def step_of(model: Any, step: int) -> None:
    batch = batch_of(dist.get_rank(), step, 3)
    model.optimizer.zero_grad()
    model.backward(loss_of(model, batch), 3)
    model.optimizer.step()


def test_all_have_the_same_at_the_end_of_an_epoch(ranks: WaitingProcesses) -> None:
    ranks.run(slow_to_hear)


def saved_at_the_end(folder: str) -> None:
    """Rank 0 is late in saving and in loading, and the others would go on at once."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    model = parallel.wrap(Net(), "async_ps", optimizer=SGD)

    def late(step: int) -> None:
        with suppress(RuntimeError):  # also of a file, whose time is over
            store.wait([f"step {step} in {folder}"], timedelta(seconds=1))

    def loaded(state: Any) -> None:
        late(2)
        assert state["version"] == 3
        assert [version for version, _ in state["seen"].values()] == [3, 3, 3]
        load(state)

    with Checkpoint(folder, {"model": model}) as checkpoint:
        for step in (1, 2):
            if step == 1:
                with model.join(model.optimizer):
                    step_of(model, 0)
                if rank == 0:
                    late(1)
                checkpoint.save(1)
            else:
                if rank == 0:
                    load, model.server.load_state_dict = model.server.load_state_dict, loaded
                assert checkpoint.load().step == 1
            if rank == 1:
                step_of(model, step)
                store.set(f"step {step} in {folder}", "")
            dist.barrier()
            if rank == 0:
                assert model.server.version == 4
    dist.barrier()
    model.close()


def test_what_is_saved_is_of_one_moment(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(saved_at_the_end, str(tmp_path))


def test_a_state_stays_as_it_was() -> None:
    method = AsyncPS("linear", partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    server = ParameterServer([torch.ones(1)], method)
    server.pull(0)
    server.push(0, [torch.ones(1)])
    state = server.state_dict()
    expected = [t.clone() for t in (*state["parameters"], *buffers_of(state), *state["seen"][0][1])]
    server.push(0, [torch.ones(1)])
    found = [*state["parameters"], *buffers_of(state), *state["seen"][0][1]]
    assert all(map(torch.equal, found, expected))


def buffers_of(state: Any) -> list[Tensor]:
    return [each["momentum_buffer"] for each in state["optimizer"]["state"].values()]


def one_worker() -> None:
    """To the bit what the optimizer does alone, also where a parameter is not used."""
    adam = partial(torch.optim.Adam, lr=0.01)
    model, alone = parallel.wrap(net(), AsyncPS("linear", adam)), net()
    optimizer = adam(list(alone.parameters()))
    for step in range(4):
        batch = batch_of(0, step, 3)
        for each, of_each in ((model, model.optimizer), (alone, optimizer)):
            of_each.zero_grad()
            out = each(batch.x, batch.edge_index, step % 2 == 1)[: batch.num_seeds]
            loss = F.cross_entropy(out, batch.y)
            model.backward(loss, 1) if each is model else loss.backward()
            of_each.step()
    for one, two in zip(model.parameters(), alone.parameters()):
        assert torch.equal(one, two)


def test_one_worker_is_sgd(ranks: WaitingProcesses) -> None:
    ranks.run(one_worker, world_size=1)


@pytest.mark.parametrize("rule", ["linear", "inverse"])
def test_where_stale_gradients_diverge(rule: str) -> None:
    """Of x²/2, from 8 workers in turn: a rate above 2 sin(π / 30) = 0.209 diverges."""
    for method, ends in ((AsyncPS(rule, partial(torch.optim.SGD, lr=0.3)), True), (None, False)):
        server = ParameterServer([torch.ones(1)], method or AsyncPS("dc", compensation=0.0))
        if method is None:
            server.optimizer.param_groups[0]["lr"] = 0.3
        at = [server.pull(worker)[1][0] for worker in range(8)]
        for step in range(600):
            worker = step % 8
            *_, (at[worker],) = server.push(worker, [at[worker].clone()])
        assert (float(at[worker].abs()) < 1e-3) == ends
        if not ends:
            assert float(at[worker].abs()) > 1e3


class Watched(torch.optim.Optimizer):
    """Counts steps; in each one, a scheduler of another thread looks at the rate and changes it."""

    def __init__(self, parameters: Any, lr: Any) -> None:
        super().__init__(parameters, {"lr": lr, "steps": 0})
        self.meanwhile, self.last = lambda: None, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        self.meanwhile()
        for parameter in group["params"]:
            count = self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
            parameter -= group["lr"] * count * parameter.grad
        group["steps"] += 1
        self.last = group["steps"]


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_a_rate_that_is_changed_during_a_step(rate: Any) -> None:
    server = ParameterServer([torch.ones(1)], AsyncPS("inverse", partial(Watched, lr=rate)))
    optimizer: Any = server.optimizer
    hooked, seen = [], []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for name in ("register_step_pre_hook", "register_step_post_hook"):
        getattr(optimizer, name)(lambda of, *_: hooked.append((of, float(rate_of(of)))))

    def rate_of(optimizer: Any) -> Any:
        return optimizer.param_groups[0]["lr"]

    def meanwhile() -> None:
        seen.append(float(rate_of(optimizer)))
        if len(seen) > 1:
            scheduler.step()

    optimizer.meanwhile = meanwhile
    for worker in range(3):
        server.pull(worker)
    for worker in range(3):  # of staleness 0, 1 and 2
        server.push(worker, [torch.ones(1)])
    assert seen == [0.5, 0.5, 0.25]
    expected = 1 - 0.5 - 2 * 0.5 / 2 - 3 * 0.25 / 3
    assert float(server.parameters[0]) == pytest.approx(expected, abs=1e-7)
    assert hooked == [(optimizer, each) for each in (0.5, 0.5, 0.5, 0.25, 0.25, 0.125)]
    saved = server.state_dict()["optimizer"]
    assert saved["param_groups"][0]["lr"] == 0.125 and saved["param_groups"][0]["steps"] == 3
    assert saved["state"][0]["count"] == 3 and optimizer.last == 3


def test_an_optimizer_within_another_is_refused() -> None:
    class Outer(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters)
            self.inner = torch.optim.SGD(parameters)

    with pytest.raises(TypeError, match="with no other within"):
        ParameterServer([torch.ones(1)], AsyncPS(optimizer=Outer))


def killed() -> None:
    rank = dist.get_rank()
    model = parallel.wrap(Net(), "async_ps", optimizer=SGD)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with model.join(model.optimizer):
            for step in range(3):
                if (rank, step) == (1, 2):
                    os.kill(os.getpid(), signal.SIGKILL)
                model.optimizer.zero_grad()
                batch = batch_of(rank, step, 3)
                model.backward(loss_of(model, batch), 3)
                model.optimizer.step()
    if rank == 0:
        assert list(model.gone) == [1] and str(said[0].message).startswith("rank 1 has left")
        assert model.server is not None and model.server.version == 8
    weights = model.module.last.lin_l.weight.detach()
    model.close()
    return weights


def in_which_rank_0_is_killed() -> None:
    model = parallel.wrap(Net(), "async_ps", optimizer=SGD)
    with suppress(RuntimeError):  # rank 0 may be gone before others know that it came
        dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    batch = batch_of(0, 0, 3)

    def steps() -> None:
        for _ in range(1000):  # rank 0 may answer until it is killed
            model.optimizer.zero_grad()
            model.backward(loss_of(model, batch), 3)
            model.optimizer.step()

    with pytest.raises(CommError, match="rank 0"):
        steps()


@pytest.mark.parametrize(("what", "rank"), [(killed, 1), (in_which_rank_0_is_killed, 0)])
def test_a_worker_that_is_killed_is_named(ranks: WaitingProcesses, what: Any, rank: int) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        ranks.run(what)
    (error,) = raised.value.exceptions
    assert str(error) == f"the process of rank {rank} ended (-9)"


def poisoned() -> None:
    model = parallel.wrap(nn.Linear(1, 1), "async_ps", optimizer=SGD)
    before = model.module.weight.detach().clone()
    model.backward(model(torch.full((1, 1), math.inf)).sum(), 1)
    with pytest.raises(FloatingPointError, match="'weight' on rank 0 is NaN or infinite"):
        model.optimizer.step()
    assert torch.equal(model.module.weight, before)


def test_gradients_that_are_not_finite(ranks: WaitingProcesses) -> None:
    ranks.run(poisoned, world_size=1)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="staleness must be one of linear, inverse, dc"):
        AsyncPS("constant")
    with pytest.raises(ValueError, match="compensation must not be negative"):
        AsyncPS(compensation=math.nan)
    with pytest.raises(ValueError, match="timeout must be above 0"):
        AsyncPS(timeout=0)
