"""What ``ddp`` has besides the contract."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from pyg_scale import parallel
from pyg_scale.errors import UnknownPluginError
from pyg_scale.loader import Budget, NeighborLoader
from pyg_scale.parallel.ddp import DDP
from pyg_scale.parallel.seed_weights import mean_unread
from pyg_scale.testing.processes import WaitingProcesses


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(2) as started:
        yield started


def loss_of(model, rank):
    x = torch.arange(6, dtype=torch.float64).view(3, 2) + rank
    return model(x).square().sum(dim=1).mean()


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 3).double()


def means():
    """`loss.backward()` is the mean over ranks, `backward` over seeds, both together an error."""
    rank = dist.get_rank()
    model = parallel.wrap(linear(), "ddp", bucket_cap_mb=1e-5)  # a bucket for each parameter
    assert isinstance(model, DistributedDataParallel)
    loss_of(model, rank).backward()
    over_ranks = model.module.weight.grad.clone()
    model.zero_grad()
    model.backward(loss_of(model, rank), 3)
    assert torch.allclose(model.module.weight.grad, over_ranks, rtol=0, atol=1e-13)
    model.zero_grad()
    model.backward(loss_of(model, rank), 0)
    assert not model.module.weight.grad.any(), "no seeds at all: no gradient"
    model.zero_grad()
    counted = loss_of(model, rank)
    backward = counted.backward if rank == 0 else lambda: model.backward(counted, 3)
    with pytest.raises(RuntimeError, match="all must do the same"):
        backward()
    alone = linear()
    ((loss_of(alone, 0) + loss_of(alone, 1)) / 2).backward()
    assert torch.allclose(alone.weight.grad, over_ranks, rtol=0, atol=1e-13)


def test_means(ranks):
    ranks.run(means)


class Centred(nn.Linear):
    """Rows minus the sum of all ranks' rows, so that a loss depends on those of others."""

    def forward(self, x):
        rows = super().forward(x)
        return rows - all_reduce(rows.sum(dim=0))


def without_seeds():
    """A rank without seeds brings nothing of its loss, but its share of what others' depend on."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = parallel.wrap(Centred(2, 3).double(), "ddp")
    loss = loss_of(model, rank)
    model.backward(loss / 0 * 0 if rank else loss, 0 if rank else 3)
    torch.manual_seed(0)
    alone = nn.Linear(2, 3).double()
    x = torch.arange(6, dtype=torch.float64).view(3, 2)
    rows = alone(x) - alone(torch.cat([x, x + 1])).sum(dim=0)
    rows.square().sum(dim=1).mean().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12)


def test_a_loss_of_no_seeds_leaves_gradients_of_others(ranks):
    ranks.run(without_seeds)


def several_models():
    """What is wrapped apart can neither be joined together nor get seeds through one loss."""
    rank = dist.get_rank()
    one, two = parallel.wrap(linear(), "ddp"), parallel.wrap(linear(), "ddp")
    step = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=1.0)
    within = "join.. of another wrapped module"
    with pytest.raises(RuntimeError, match=within), one.join(step), two.join(step):
        pass
    with pytest.raises(RuntimeError, match=within), one.join(step):
        two.backward(loss_of(two, rank), 3)
    with pytest.raises(RuntimeError, match="as one"):
        two.backward(loss_of(two, one(torch.ones(1, 2, dtype=torch.float64)).sum()), 3)
    for model in (parallel.wrap(linear(), "ddp"), parallel.wrap(linear(), "ddp")):
        with model.join(step):  # one after the other they go
            for _ in range(rank + 1):
                model.zero_grad()
                model.backward(loss_of(model, rank), 3)


def test_several_models(ranks):
    ranks.run(several_models)


def static_graph():
    """Torch's first step of a static graph has sums that a rank without a batch cannot make."""
    rank = dist.get_rank()
    model = parallel.wrap(linear(), "ddp", static_graph=True)
    step = torch.optim.SGD(model.parameters(), lr=1.0)

    def epoch():
        with model.join(step):
            for _ in range(1 - rank):
                model.backward(loss_of(model, rank), 3)

    with pytest.raises(RuntimeError, match="a batch in the first step" if rank else ""):
        epoch()


def test_a_static_graph_needs_a_batch_on_every_rank(ranks):
    ranks.run(static_graph)


@pytest.mark.parametrize("unused", [False, True])
def test_buckets_are_in_the_order_of_gradients(ranks, unused):
    ranks.run(buckets, unused, world_size=1)


def buckets(unused):
    """From the first step on; in what order it is decides the last bits of sums."""
    model = parallel.wrap(
        nn.Sequential(linear(), nn.ReLU(), nn.Linear(3, 2).double(), nn.Linear(2, 2).double()),
        bucket_cap_mb=1e-5,
        find_unused_parameters=unused,
    )

    def order():
        made = model.reducer._get_zeros_like_grad_buckets()
        return [id(parameter) for bucket in made for parameter in bucket.parameters()]

    expected = [id(parameter) for parameter in reversed(list(model.parameters()))]
    assert order() == expected
    for _ in range(2):
        loss_of(model, 0).backward()
        model.zero_grad()
    assert order() == expected


def torchs_join():
    """Torch's own `Join` works as torch says, with and without a count of seeds."""
    rank = dist.get_rank()
    for counted in (False, True):
        for by_initial in (True, False):
            model = parallel.wrap(linear(), "ddp")
            with Join([model], divide_by_initial_world_size=by_initial):
                for _ in range(rank + 1):
                    model.zero_grad()
                    loss = loss_of(model, rank)
                    model.backward(loss, 3) if counted else loss.backward()
            if rank == 1:
                alone = linear()
                loss_of(alone, 1).backward()
                share = 0.5 if by_initial and not counted else 1.0
                expected = alone.weight.grad * share
                assert torch.allclose(model.module.weight.grad, expected, rtol=0, atol=1e-13)


def test_torchs_join(ranks):
    ranks.run(torchs_join)


class Counts(nn.Module):
    """Notes what its buffer is when a forward begins."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2).double()
        self.seen = []

    def forward(self, x):
        self.seen.append(self.norm.running_mean.clone())
        return self.norm(x)


def buffers():
    rank = dist.get_rank()
    model = parallel.wrap(Counts(), "ddp")
    for _ in range(2):
        model.zero_grad()
        model.backward(loss_of(model, rank), 3)
    mine = model.module.seen[1]
    zeros = mine.clone() if rank == 0 else torch.empty_like(mine)
    dist.broadcast(zeros, 0)
    assert torch.equal(mine, zeros) and mine.any(), "a forward begins with the buffers of rank 0"
    with torch.no_grad():
        if rank == 0:  # alone: the module itself waits for nobody
            model.module(torch.ones(3, 2, dtype=torch.float64))


def test_buffers_are_those_of_rank_0(ranks):
    ranks.run(buffers)


def refused():
    with pytest.raises(ValueError, match=r"'lin_l.weight' has no shape yet"):
        parallel.wrap(SAGEConv(-1, 4), "ddp")
    with pytest.raises(ValueError, match="no parameter that needs a gradient"):
        parallel.wrap(linear().requires_grad_(False))
    with pytest.raises(NotImplementedError, match="no SyncBatchNorm on cpu"):
        parallel.wrap(Counts(), "ddp", sync_batchnorm=True)
    with pytest.raises(TypeError, match="group must be a process group"):
        parallel.wrap(linear(), "ddp", group="all")
    with pytest.raises(TypeError, match="buckets"):
        parallel.wrap(linear(), "ddp", buckets=3)
    with pytest.raises(ValueError, match="constructor"):
        parallel.wrap(linear(), DDP(), bucket_cap_mb=3)
    with pytest.raises(TypeError, match="instance"):
        parallel.wrap(linear(), DDP)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        parallel.wrap("model")
    with pytest.raises(UnknownPluginError, match="did you mean 'ddp'"):
        parallel.wrap(linear(), "dpp")


def test_what_is_refused(ranks):
    ranks.run(refused, world_size=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("totals", "divisor"),
    [((257, 2, 0, 0), 257), ((0, 2, 0, 0), 1), ((0, 0, 2, 3), 3), ((5, 1, 1, 1), float("nan"))],
)
def test_on_a_device_nothing_is_read(dtype, totals, divisor):
    buffer = torch.tensor([514.0, -3.0], dtype=dtype)
    expected = (buffer.double() / divisor).to(dtype)
    found = mean_unread(buffer.clone(), torch.tensor(totals, dtype=torch.float64))
    assert found.dtype == dtype and torch.equal(found.nan_to_num(7.5), expected.nan_to_num(7.5))


def test_ranks_that_have_not_met():
    with pytest.raises(RuntimeError, match="have not met"):
        parallel.wrap(linear())


class Alone(parallel.Parallel):
    """Returns what is no parallel module."""

    def wrap(self, module, group=None):
        return module


def test_a_wrapper_must_keep_the_contract():
    with pytest.raises(TypeError, match=r"Alone.wrap returned a Linear without"):
        parallel.wrap(linear(), Alone())


def pieces_of_planned_batches():
    """A step is a planned batch of each rank, whatever the number of its pieces."""
    torch.manual_seed(0)
    nodes, edges = 300, torch.randint(300, (2, 3000))
    data = Data(x=torch.randn(nodes, 4).double(), edge_index=edges, num_nodes=nodes)
    model = parallel.wrap(SAGEConv(4, 3).double(), "ddp")
    whole = SAGEConv(4, 3).double()
    whole.load_state_dict(model.module.state_dict())

    def loss_of_seeds(model, batch):
        return model(batch.x, batch.edge_index)[: batch.batch_size].square().sum(dim=1).mean()

    budget = {"batch_cost": Budget(seeds_that_differ, 30), "shuffle": True, "seed": 1}
    loader = NeighborLoader(data, [-1], split_seeds="global", **budget)
    cut = 0
    for batch in loader:
        if batch.piece == 0:
            model.zero_grad()
            own = []
        own.append(batch.input_id)
        cut += batch.num_pieces > 1
        last = batch.piece + 1 == batch.num_pieces
        with contextlib.nullcontext() if last else model.no_sync():
            model.backward(loss_of_seeds(model, batch), batch.batch_size)
        if not last:
            continue
        everyone = [None, None]
        dist.all_gather_object(everyone, torch.cat(own).tolist())
        seeds = torch.tensor([seed for each in everyone for seed in each])
        (alone,) = NeighborLoader(data, [-1], seeds, batch_size=len(seeds), split_seeds=False)
        whole.zero_grad()
        loss_of_seeds(whole, alone).backward()
        for ours, expected in zip(model.module.parameters(), whole.parameters()):
            assert torch.allclose(ours.grad, expected.grad, rtol=0, atol=1e-12)
    found = torch.tensor([cut])
    dist.all_reduce(found)
    assert int(found) > 0


def seeds_that_differ(out):
    seeds = out.metadata[0]
    return len(seeds) + 30 * bool((seeds % 100 == 11).any() and len(seeds) > 5)


def test_pieces_of_planned_batches(ranks):
    ranks.run(pieces_of_planned_batches)


def reductions_of(number, together):
    """Numbers in each reduction of an epoch of batches, some of which are one step."""
    rank = dist.get_rank()
    model, alone = parallel.wrap(linear(), "ddp"), linear()
    batches = torch.randn(2, number, 3, 2, generator=torch.Generator().manual_seed(0)).double()
    plain, numbers = dist.all_reduce, []

    def counted(tensor, **kwargs):
        numbers.append(tensor.numel())
        return plain(tensor, **kwargs)

    dist.all_reduce = counted
    try:
        for step, x in enumerate(batches[rank]):
            if step % together == 0:
                model.zero_grad()
                alone.zero_grad()
                first = step
            last = (step + 1) % together == 0 or step + 1 == number
            with contextlib.nullcontext() if last else model.no_sync():
                model.backward(model(x).square().sum(dim=1).mean(), len(x))
            if last:
                whole = batches[:, first : step + 1].reshape(-1, 2)
                alone(whole).square().sum(dim=1).mean().backward()
                for ours, expected in zip(model.module.parameters(), alone.parameters()):
                    assert torch.allclose(ours.grad, expected.grad, rtol=0, atol=1e-12)
    finally:
        dist.all_reduce = plain
    return numbers


@pytest.mark.parametrize(("number", "together"), [(5, 1), (5, 2), (6, 3), (2, 4)])
def test_batches_that_are_one_step_are_reduced_once(ranks, number, together):
    steps = math.ceil(number / together)
    for found in ranks.run(reductions_of, number, together):
        assert found == [4, 9] * steps  # the counts of seeds; all parameters


def accumulated_bfloat16():
    """Counts are exact also where the gradients' dtype has not every number."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = parallel.wrap(nn.Linear(2, 3).bfloat16(), "ddp")
    out = model(torch.ones(1, 2, dtype=torch.bfloat16))
    model.backward(F.mse_loss(out, torch.zeros_like(out)), 257 if rank == 0 else 1)
    assert model.module.weight.grad.dtype == torch.bfloat16
    assert model.module.weight.grad.isfinite().all()


def test_bfloat16(ranks):
    ranks.run(accumulated_bfloat16)
