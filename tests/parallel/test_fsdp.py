"""What ``fsdp`` computes and keeps, besides what the kit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch.distributed.tensor import DTensor

from pyg_scale import parallel
from pyg_scale.parallel.fsdp import FSDP
from pyg_scale.testing.parallel import batch_of, concatenated
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.train import Checkpoint
from tests.parallel import models

CHANNELS, CLASSES = 5, 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(3, limit=120.0) as started:
        yield started


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    return pyg.GraphSAGE(CHANNELS, 64, 3, CLASSES, act="tanh").double()


def train(dtype: torch.dtype, folder: str, shards: int | None) -> None:
    """Adam, three steps; every rank has a share of parameters and moments; a checkpoint."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = parallel.wrap(build(rank).to(dtype), "fsdp", reshard_after_forward=True, shards=shards)
    plain = build(0).to(dtype)
    total = sum(p.numel() for p in plain.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    other = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(3):
        batch = batch_of(rank, step, 3 + 4 * rank)
        optimizer.zero_grad()
        out = model(batch.x.to(dtype), batch.edge_index)[: batch.num_seeds]
        model.backward(F.cross_entropy(out, batch.y), batch.num_seeds)
        optimizer.step()
        x, edge_index, rows, y = concatenated([batch_of(r, step, 3 + 4 * r) for r in range(size)])
        other.zero_grad()
        F.cross_entropy(plain(x.to(dtype), edge_index)[rows], y).backward()
        other.step()
    near = 1e-9 if dtype == torch.float64 else 1e-3  # Adam divides by small numbers
    for (name, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DTensor), name
        assert float((p.full_tensor() - q).abs().max()) <= near, name
    local = sum(p.to_local().numel() for p in model.module.parameters())
    moments = sum(s["exp_avg"].to_local().numel() for s in optimizer.state.values())
    assert local == moments <= 1.1 * total / (shards or size)
    checkpoint = Checkpoint(folder, {"model": model, "optimizer": optimizer})
    checkpoint.save(step=3)
    before = [p.full_tensor() for p in model.module.parameters()]
    with torch.no_grad():
        for p in model.module.parameters():
            p.zero_()
    assert checkpoint.load().step == 3
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.module.parameters()))


@pytest.mark.parametrize(
    ("dtype", "size", "shards"),
    [
        (torch.float64, 2, None),
        (torch.float64, 4, 2),
        pytest.param(torch.float64, 2, 1, marks=pytest.mark.slow),
        pytest.param(torch.float32, 2, None, marks=pytest.mark.slow),
    ],
)
def test_a_rank_has_its_share_of_everything(
    dtype: torch.dtype, size: int, shards: int | None, tmp_path: Path
) -> None:
    with WaitingProcesses(size, limit=120.0) as ranks:  # all have met in no other group
        ranks.run(train, dtype, str(tmp_path / "checkpoints"), shards)


class Normed(torch.nn.Module):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = pyg.GCNConv(CHANNELS, 8), torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, CLASSES)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.last(self.norm(self.conv(x, edge_index)))


class Variadic(Normed):
    """Takes any number of arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def shadow(kind: type[Normed], by_name: bool) -> tuple[torch.Tensor, int]:
    """Rank 0 has one batch, and others more: its statistics are of what it had."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = parallel.wrap(kind().double(), "fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(optimizer):
        for step in range(1 + rank):
            batch = batch_of(rank, step, 4)
            optimizer.zero_grad()
            edges = {"edge_index": batch.edge_index}
            out = model(batch.x, **edges) if by_name else model(batch.x, batch.edge_index)
            model.backward(F.cross_entropy(out[:4], batch.y), 4)
            optimizer.step()
        if rank == 1:
            with torch.no_grad():  # an evaluation takes part, too
                model(batch.x, batch.edge_index)
    return model.module.last.weight.full_tensor(), int(model.module.norm.num_batches_tracked)


@pytest.mark.parametrize(
    ("kind", "by_name"), [(Normed, False), (Variadic, False), (Variadic, True)]
)
def test_a_rank_without_batches_takes_part(
    ranks: WaitingProcesses, kind: type[Normed], by_name: bool
) -> None:
    (first, tracked), (second, _) = ranks.run(shadow, kind, by_name, world_size=2)
    assert torch.equal(first, second)
    assert tracked == 1


def refuse() -> None:
    with pytest.raises(TypeError, match=r"fully_shard has no option mesh .*mp_policy"):
        FSDP(mesh=None)
    model = parallel.wrap(build(0), "fsdp")
    with pytest.raises(ValueError, match="sharded already"):
        parallel.wrap(model.module, "fsdp")
    with pytest.raises(ValueError, match="no shape yet"):
        parallel.wrap(pyg.SAGEConv(-1, 4), "fsdp")
    batch = batch_of(0, 0, 4)
    x, step = batch.x, torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"x must be a tensor.*\(got list\)"), model.join(step):
        model([x], batch.edge_index)


def refuse_shards() -> None:
    with pytest.raises(ValueError, match="shards=2 does not divide 3 ranks"):
        parallel.wrap(build(0), "fsdp", shards=2)
    with pytest.raises(ValueError, match="ranks have different shards="):
        parallel.wrap(build(0), "fsdp", shards=3 if dist.get_rank() else 1)
    with pytest.raises(ValueError, match="shards must be at least 1"):
        FSDP(shards=0)


def test_what_is_refused(ranks: WaitingProcesses) -> None:
    ranks.run(refuse, world_size=1)
    ranks.run(refuse_shards, world_size=3)


def typed() -> None:
    """Nodes of several types; rank 1 has a batch less."""
    data, _ = models.typed_graph()
    rank, count = dist.get_rank(), 4
    model, plain = (models.build_typed("sage", data, seed) for seed in (rank, 0))
    model = parallel.wrap(model, "fsdp", find_unused_parameters=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]

    def loss(net: Any, of: int, step: int) -> torch.Tensor:
        rows = slice(count * (2 * step + of), count * (2 * step + of + 1))
        out = net(data.x_dict, data.edge_index_dict)["paper"]
        return F.cross_entropy(out[rows], data["paper"].y[rows])

    with model.join(optimizers[0]):
        for step in range(2 - rank):
            optimizers[0].zero_grad()
            model.backward(loss(model, rank, step), count)
            optimizers[0].step()
    for step in range(2):
        optimizers[1].zero_grad()
        losses = [loss(plain, of, step) for of in range(2 - step)]
        torch.stack(losses).mean().backward()
        optimizers[1].step()
    for p, q in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert float((p.full_tensor() - q).abs().max()) <= 1e-12


def test_typed_nodes_and_a_rank_without_batches(ranks: WaitingProcesses) -> None:
    ranks.run(typed, world_size=2)
