"""`local_sgd` beside `ddp`, and beside the same steps of all ranks in one process."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pyg_scale import parallel
from pyg_scale.comm import roll_call
from pyg_scale.errors import CommError
from pyg_scale.parallel.local_sgd import LocalSGD
from pyg_scale.testing.parallel import Batch, Net, batch_of
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.train import Checkpoint

SEEDS = [[3], [2, 5, 1, 4, 6], [1, 0, 6]]  # of each rank in each step


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(3) as started:
        yield started


def loss_of(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.x, batch.edge_index)[: batch.num_seeds], batch.y)


def epoch_of(model: Any, optimizer: Any, epoch: int, steps: Sequence[int]) -> None:
    for step, count in enumerate(steps):
        optimizer.zero_grad()
        batch = batch_of(dist.get_rank(), 100 * epoch + step, count)
        model.backward(loss_of(model, batch), count)
        optimizer.step()


def as_ddp() -> None:
    """One step and plain SGD: the mean of parameters is a step by the mean of gradients."""
    found = []
    for method, options in (("ddp", {}), ("local_sgd", {"every": 1})):
        torch.manual_seed(dist.get_rank())
        model = parallel.wrap(Net(), method, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
        for epoch in range(2):
            with model.join(optimizer):
                epoch_of(model, optimizer, epoch, SEEDS[dist.get_rank()])
        found.append(model.module.state_dict())
    for name, value in found[0].items():
        assert torch.allclose(found[1][name], value, rtol=0, atol=1e-12), name


def test_with_one_step_it_is_ddp(ranks: WaitingProcesses) -> None:
    ranks.run(as_ddp)


def averaged(models: list[Any], seeds: list[int]) -> None:
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models)):
            mean = sum(p * n for p, n in zip(parameters, seeds)) / sum(seeds)
            for parameter in parameters:
                parameter.copy_(mean)


def in_rounds(every: int) -> None:
    """A rank whose batches end within a round counts in its mean by the seeds that it had."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    first = Net()
    torch.manual_seed(rank)
    model = parallel.wrap(Net(), LocalSGD(every))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **how: (
        calls.append(tensor.numel()),
        all_reduce(tensor, *args, **how),
    )[1]
    try:
        for epoch in range(2):
            with model.join(optimizer):
                epoch_of(model, optimizer, epoch, SEEDS[rank])
    finally:
        dist.all_reduce = all_reduce
    alone = [copy.deepcopy(first) for _ in SEEDS]
    steps_of = [torch.optim.Adam(each.parameters(), lr=0.01) for each in alone]
    rounds = 0
    for epoch in range(2):
        longest = max(map(len, SEEDS))
        for start in range(0, longest, every):
            counted = [0, 0, 0]
            for other, counts in enumerate(SEEDS):
                for step in range(start, min(start + every, len(counts))):
                    batch = batch_of(other, 100 * epoch + step, counts[step])
                    alone[other].zero_grad()
                    (loss_of(alone[other], batch) * bool(counts[step])).backward()
                    steps_of[other].step()
                    counted[other] += counts[step]
            averaged(alone, counted)
            rounds += 1
    for mine, theirs in zip(model.module.parameters(), alone[rank].parameters()):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)
    size = sum(t.numel() for t in first.parameters())  # the buffer is the same on all ranks
    assert calls.count(size) == rounds, "one exchange of parameters in each round"


@pytest.mark.parametrize("every", [2, 3, 50])
def test_rounds_of_several_steps(ranks: WaitingProcesses, every: int) -> None:
    ranks.run(in_rounds, every)


def frozen() -> None:
    """What is the same on all ranks stays so to the bit; the rest is averaged, frozen or not."""
    rank = dist.get_rank()
    net = torch.nn.Linear(50, 50)
    net.bias.requires_grad_(False)
    net.register_buffer("mask", torch.rand(1000).double())
    net.mask[0] = -torch.inf
    net.register_buffer("own", torch.zeros(1))
    model = parallel.wrap(net, LocalSGD(1))
    bias, mask = net.bias.clone(), net.mask.clone()
    net.own.data.fill_(float(rank))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with model.join(optimizer):
        for step in range(20):
            optimizer.zero_grad()
            count = 3 + rank + step % 5
            model.backward(model(torch.randn(count, 50)).square().mean(), count)
            optimizer.step()
            if step == 0:
                model.average()
                assert float(net.own) == pytest.approx((4 + 2 * 5) / 12)
                net.mask += 0.1  # on all ranks
                mask += 0.1
    assert torch.equal(net.bias, bias) and torch.equal(net.mask, mask)


def test_what_is_frozen_stays_to_the_bit(ranks: WaitingProcesses) -> None:
    ranks.run(frozen)


def resumed(folder: str) -> None:
    """In the middle of a round, when every rank has parameters and moments of its own."""
    rank = dist.get_rank()

    def parts() -> tuple[Any, Any]:
        torch.manual_seed(rank)
        model = parallel.wrap(Net(), LocalSGD(3))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            batch = batch_of(rank, step, rank + 2)
            model.backward(loss_of(model, batch), batch.num_seeds)
            optimizer.step()

    model, optimizer = parts()
    with Checkpoint(folder, {"model": model, "optimizer": optimizer}) as checkpoint:
        train(model, optimizer, range(5))
        checkpoint.save(5)
        train(model, optimizer, range(5, 8))
    again, optimizer = parts()
    with Checkpoint(folder, {"model": again, "optimizer": optimizer}) as checkpoint:
        assert checkpoint.load().step == 5
    train(again, optimizer, range(5, 8))
    for one, two in zip(model.parameters(), again.parameters()):
        assert torch.equal(one, two)
    weight = model.module.last.lin_l.weight.detach()
    all_of_them = [torch.empty_like(weight) for _ in range(3)]
    dist.all_gather(all_of_them, weight)
    assert not torch.equal(*all_of_them[:2]), "within a round ranks differ"
    model.average()
    dist.all_gather(all_of_them, weight)
    assert torch.equal(*all_of_them[:2])


def test_a_run_that_is_resumed(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(resumed, str(tmp_path))


def lost() -> None:
    roll_call._GRACE = 1.0
    model = parallel.wrap(Net(), LocalSGD(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with model.join(optimizer):
            for step in range(4):
                if dist.get_rank() == 2 and step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                epoch_of(model, optimizer, step, [3])

    with pytest.raises(CommError, match="rank 2 ended while the others"):
        train()


def test_a_rank_that_is_killed_is_named(ranks: WaitingProcesses) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        ranks.run(lost)
    (error,) = raised.value.exceptions
    assert str(error) == "the process of rank 2 ended (-9)"


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="every must be 1 or more"):
        LocalSGD(0)
    with pytest.raises(RuntimeError, match="have not met"):
        parallel.wrap(Net(), "local_sgd")
