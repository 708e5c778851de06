"""Gradients that `ddp` sends in fewer bytes, beside the same methods in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from pyg_scale import parallel
from pyg_scale.parallel.compression import Half, PowerSGD, TopK
from pyg_scale.parallel.ddp import DDP
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.train import Checkpoint

SEEDS = [[4, 1, 0], [1, 6, 2], [3]]  # of each rank in each step
RATIO = 0.07


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(3) as started:
        yield started


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 6)).double()


def loss_of(model: nn.Module, rank: int, step: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(count, 6, dtype=torch.float64, generator=generator)
    return (model(x) - x.flip(1)).square().sum(dim=1).mean()


def parts_of(model: nn.Module) -> Tensor:
    """All parameters, last first, as gradients come."""
    return torch.cat([p.detach().flatten() for p in reversed(list(model.parameters()))])


class Sent:
    """Notes what a rank sends; the exchange goes on."""

    def __init__(self) -> None:
        self.messages: list[Tensor] = []
        self.received = self.reduced = 0
        self._all_gather, self._all_reduce = dist.all_gather, dist.all_reduce

    def __enter__(self) -> Sent:
        dist.all_gather, dist.all_reduce = self.all_gather, self.all_reduce
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_gather, dist.all_reduce = self._all_gather, self._all_reduce

    def all_gather(self, into: list[Tensor], tensor: Tensor, **how: Any) -> Any:
        self.messages.append(tensor.clone())
        self.received += sum(each.nbytes for each in into)
        return self._all_gather(into, tensor, **how)

    def all_reduce(self, tensor: Tensor, *args: Any, **how: Any) -> Any:
        if tensor.numel() > 4:  # not the counts of seeds, nor those of `Join`
            self.reduced += tensor.nbytes
        return self._all_reduce(tensor, *args, **how)

    def decoded(self, length: int) -> list[Tensor]:
        """Each message as gradients of which most are 0."""
        found = []
        for message in self.messages:
            count = message.numel() // 12
            at, values = message[: 4 * count], message[4 * count :].clone()
            whole = torch.zeros(length, dtype=torch.float64)
            whole[at.view(torch.int32).long()] = values.view(torch.float64)
            found.append(whole)
        return found


def top_k() -> None:
    """Rank 2 runs out of batches after a step, and goes on to send what it has left out."""
    rank, epochs = dist.get_rank(), 3
    model = parallel.wrap(net(), "ddp", compress="topk", ratio=RATIO)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Sent() as sent:
        for epoch in range(epochs):
            with model.join(optimizer):
                for step, count in enumerate(SEEDS[rank]):
                    optimizer.zero_grad()
                    loss = loss_of(model, rank, 10 * epoch + step, count) if count else None
                    if loss is None:  # an empty batch
                        loss = model(torch.zeros(0, 6, dtype=torch.float64)).sum()
                    model.backward(loss, count)
                    optimizer.step()
    alone = net()
    step_of = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    length = parts_of(alone).numel()
    k = math.ceil(RATIO * length)
    left = [torch.zeros(length, dtype=torch.float64) for _ in SEEDS]
    mine = sent.decoded(length)
    assert sent.received == len(mine) * k * (8 + 4) * 3 and not sent.reduced
    assert len(mine) == 3 * epochs
    for epoch in range(epochs):
        for step in range(3):
            total = sum(each[step] for each in SEEDS if step < len(each))
            whole = torch.zeros(length, dtype=torch.float64)
            for other, each in enumerate(SEEDS):
                gradient = torch.zeros(length, dtype=torch.float64)
                if step < len(each) and each[step]:
                    alone.zero_grad()
                    loss = loss_of(alone, other, 10 * epoch + step, each[step])
                    (loss * each[step]).backward()
                    found = [p.grad.flatten() for p in reversed(list(alone.parameters()))]
                    gradient = torch.cat(found) / total
                before = gradient + left[other]
                largest = before.abs().sort(descending=True).indices[:k]
                chosen = torch.zeros_like(before).index_put((largest,), before[largest])
                left[other] = before - chosen
                whole += chosen
                if other == rank:
                    now = mine[3 * epoch + step]
                    assert torch.equal(now, chosen), "sent"
                    assert torch.equal(now + left[other], before), "nothing is lost"
            alone.zero_grad()
            start = 0
            for parameter in reversed(list(alone.parameters())):
                values = whole[start : start + parameter.numel()]
                parameter.grad = values.view_as(parameter).clone()
                start += parameter.numel()
            step_of.step()
    assert torch.equal(model.rank_state.state_dict()["left"][0], left[rank])
    assert torch.equal(parts_of(model.module), parts_of(alone))
    assert left[rank].any()


def test_top_k_sends_the_largest_and_loses_nothing(ranks: WaitingProcesses) -> None:
    ranks.run(top_k)


def dense() -> None:
    """From `ratio = 1 / ranks` on, everything is sent, and what was left out before, too."""
    rank = dist.get_rank()
    found = []
    for options in ({"compress": TopK(1 / 3)}, {}):
        model = parallel.wrap(net(), "ddp", **options)
        if options:
            left = torch.full_like(parts_of(model.module), 1.0 + rank)
            model.rank_state.load_state_dict({"left": {0: left}, "step": 0})
        with Sent() as sent:
            model.backward(loss_of(model, rank, 0, rank + 1), rank + 1)
        assert sent.reduced == left.nbytes and not sent.received
        found.append([p.grad.clone() for p in model.parameters()])
        if options:
            assert not model.rank_state.state_dict()["left"][0].any()
    for compressed, plain in zip(*found):
        assert torch.allclose(compressed, plain + 6.0, rtol=0, atol=1e-12)


def test_a_large_ratio_is_an_all_reduce(ranks: WaitingProcesses) -> None:
    ranks.run(dense)


def warm_up() -> list[int]:
    """Entries that are sent in each step; a step whose gradients are not finite does not count."""
    model = parallel.wrap(net(), "ddp", compress=TopK(0.01, warmup=4))
    found = []
    for step in range(8):
        model.zero_grad()
        with Sent() as sent:
            loss = loss_of(model, dist.get_rank(), step, 3) * (math.nan if step == 2 else 1)
            if step == 2:
                with pytest.raises(FloatingPointError):
                    model.backward(loss, 3)
            else:
                model.backward(loss, 3)
        found.append(sent.messages[0].numel() // 12)
        if step == 4:  # a process that goes on from here
            state = model.rank_state.state_dict()
            model = parallel.wrap(net(), "ddp", compress=TopK(0.01, warmup=4))
            model.rank_state.load_state_dict(state)
    return found


def test_a_warm_up_sends_more_at_first(ranks: WaitingProcesses) -> None:
    length = parts_of(net()).numel()
    shares = [0.25 * (0.01 / 0.25) ** (step / 4) for step in (0, 1, 2, 2, 3)] + [0.01] * 3
    assert ranks.run(warm_up) == [[math.ceil(share * length) for share in shares]] * 3


def half(name: str, dtype: torch.dtype) -> None:
    """What is rounded is the gradient of the mean over all seeds: sums would be too large."""
    rank, count = dist.get_rank(), 400_000
    model = parallel.wrap(net(), "ddp", compress=name)
    with Sent() as sent:
        model.backward(loss_of(model, rank, 0, 3), count + rank)
    assert sent.reduced == 2 * parts_of(model.module).numel()
    alone, total = net(), 3 * count + 3
    whole: Any = 0
    for other in range(3):
        alone.zero_grad()
        (loss_of(alone, other, 0, 3) * (count + other)).backward()
        found = torch.cat([p.grad.flatten() for p in alone.parameters()])
        assert float(found.abs().max()) > torch.finfo(torch.float16).max
        whole = whole + (found / total).to(dtype).double()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    # Two more roundings, of the sums of two and of three, which are not above 4.
    assert torch.allclose(got, whole, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert float(whole.abs().max()) < 2
    assert not torch.equal(got, whole.float().double()), "it was rounded"


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision(ranks: WaitingProcesses, name: str, dtype: torch.dtype) -> None:
    ranks.run(half, name, dtype)


def power_sgd() -> None:
    """With equal numbers of seeds it is torch's, and its exchanges do not meet between buckets."""
    rank = dist.get_rank()
    ours = parallel.wrap(net(), DDP(compress=PowerSGD(2, 2), bucket_cap_mb=1e-5))
    theirs = DistributedDataParallel(net(), bucket_cap_mb=1e-5)
    state = powerSGD_hook.PowerSGDState(None, 2, 2)

    def one_after_the_other(state, bucket):  # type: ignore[no-untyped-def]
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        future.wait()
        return future

    theirs.register_comm_hook(state, one_after_the_other)
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step, 3)
            ours.backward(loss, 3) if model is ours else loss.backward()
            optimizer.step()
    assert torch.allclose(parts_of(ours.module), parts_of(theirs.module), rtol=0, atol=1e-12)
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        (sum(loss_of(plain, other, step, 3) for other in range(3)) / 3).backward()
        optimizer.step()
    difference = (parts_of(ours.module) - parts_of(plain)).abs().max()
    assert 1e-4 < difference < 0.1, "gradients were of low rank, and near"


def test_power_sgd_is_torchs(ranks: WaitingProcesses) -> None:
    ranks.run(power_sgd)


COMPRESSIONS: list[Callable[[], Any]] = [
    lambda: TopK(0.1, warmup=3),
    lambda: Half(torch.float16),
    lambda: PowerSGD(1, 2),
]


def poisoned(which: int, value: float, buckets: float) -> None:
    """Rank 1 brings a gradient that is none in the third step; rank 2 has no batch any more."""
    rank = dist.get_rank()
    how = {"bucket_cap_mb": buckets, "find_unused_parameters": buckets < 1e-4}
    model = parallel.wrap(net(), DDP(compress=COMPRESSIONS[which](), **how))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last = model.module[2].weight

    def poison(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed.view(-1)[7] = value
        return changed

    def train(steps: range) -> None:
        with model.join(optimizer):
            for step in steps:
                optimizer.zero_grad()
                handle = last.register_hook(poison) if (step, rank) == (2, 1) else None
                try:
                    model.backward(loss_of(model, rank, step, 3), 3)
                finally:
                    if handle is not None:
                        handle.remove()
                optimizer.step()

    train(range(2))
    before = parts_of(model.module)
    left = model.rank_state.state_dict().get("left", {})
    text = r"the gradient of parameter '2.weight' on rank 1 is NaN, infinite, or too large"
    with pytest.raises(FloatingPointError, match=text):
        train(range(2, 2 if rank == 2 else 3))
    assert torch.equal(parts_of(model.module), before)
    for index, each in model.rank_state.state_dict().get("left", {}).items():
        assert torch.equal(each, left[index]), "what was left out is still what it was"
    model.zero_grad()
    train(range(3, 5))
    assert parts_of(model.module).isfinite().all() and not torch.equal(
        parts_of(model.module), before
    )
    others = [torch.empty_like(before) for _ in range(3)]
    dist.all_gather(others, parts_of(model.module))
    assert all(torch.equal(each, others[0]) for each in others)


@pytest.mark.parametrize(
    ("which", "value", "buckets"),
    [
        (0, math.nan, 1e-3),
        (1, 1e9, 25.0),
        (2, math.inf, 25.0),
        *(
            pytest.param(which, value, buckets, marks=pytest.mark.slow)
            for which in range(3)
            for value in (math.nan, -math.inf)
            for buckets in (1e-3, 1e-5)
        ),
    ],
)
def test_gradients_that_are_not_finite(
    ranks: WaitingProcesses, which: int, value: float, buckets: float
) -> None:
    ranks.run(poisoned, which, value, buckets)


def train_some(model: Any, optimizer: Any, steps: range) -> None:
    rank = dist.get_rank()
    for step in steps:
        optimizer.zero_grad()
        model.backward(loss_of(model, rank, step, rank + 1), rank + 1)
        optimizer.step()


def resumed(which: int, folder: str) -> None:
    """What was left out is part of a checkpoint."""

    def parts() -> tuple[Any, Any]:
        model = parallel.wrap(net(), DDP(compress=COMPRESSIONS[which](), bucket_cap_mb=1e-3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = parts()
    path = Path(folder, str(which))
    with Checkpoint(path, {"model": model, "optimizer": optimizer}) as checkpoint:
        train_some(model, optimizer, range(4))
        checkpoint.save(4)
        train_some(model, optimizer, range(4, 8))
    again, optimizer = parts()
    with Checkpoint(path, {"model": again, "optimizer": optimizer}) as checkpoint:
        assert checkpoint.load().step == 4
        train_some(again, optimizer, range(4, 8))
    assert torch.equal(parts_of(again.module), parts_of(model.module))
    again, optimizer = parts()
    with Checkpoint(path, {"model": again, "optimizer": optimizer}) as checkpoint:
        checkpoint.load(only=["model", "optimizer"])
        train_some(again, optimizer, range(4, 8))
    same = torch.equal(parts_of(again.module), parts_of(model.module))
    assert same == (which == 1), "half precision leaves nothing out, the others do"


@pytest.mark.parametrize("which", range(len(COMPRESSIONS)), ids=["topk", "fp16", "powersgd"])
def test_a_run_that_is_resumed(ranks: WaitingProcesses, which: int, tmp_path: Path) -> None:
    ranks.run(resumed, which, str(tmp_path))


def test_what_is_refused() -> None:
    for ratio in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="ratio must be above 0 and at most 1"):
            DDP(compress="topk", ratio=ratio)
    with pytest.raises(ValueError, match="warmup must be at least 0"):
        TopK(warmup=-1)
    with pytest.raises(ValueError, match="ratio is for compress='topk'"):
        DDP(ratio=0.1)
    with pytest.raises(ValueError, match="ratio is for compress='topk'"):
        DDP(compress="fp16", ratio=0.1)
    with pytest.raises(ValueError, match="compress must be one of topk, fp16, bf16, powersgd"):
        DDP(compress="top-k")
    with pytest.raises(TypeError, match="a name or an instance"):
        DDP(compress=0.1)
    with pytest.raises(ValueError, match=r"float16 or torch.bfloat16"):
        Half(torch.float32)
    with pytest.raises(ValueError, match="start_powerSGD_iter"):
        PowerSGD(start_powerSGD_iter=1)
    assert DDP().exact and not DDP(compress="topk").exact


def refused_on_ranks() -> None:
    with pytest.raises(NotImplementedError, match=r"gradients of '0' are sparse"):
        parallel.wrap(nn.Sequential(nn.Embedding(4, 2, sparse=True)), "ddp", compress="topk")


def test_sparse_gradients_are_refused(ranks: WaitingProcesses) -> None:
    ranks.run(refused_on_ranks, world_size=1)
