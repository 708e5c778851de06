"""Checkpoints of sharded parameters: read by as many ranks, by more, by fewer, and by one alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from pyg_scale.comm import connect
from pyg_scale.testing.processes import WaitingProcesses
from pyg_scale.train import Checkpoint
from pyg_scale.train.tree import flatten


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(3) as started:
        yield started


def parts(sharded: bool, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}


def train(state: dict[str, Any], steps: range) -> None:
    """The same batch on every rank, so that all numbers of ranks make the same steps."""
    for step in steps:
        x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5) * (step + 1)
        state["optimizer"].zero_grad()
        state["model"](x).square().mean().backward()
        state["optimizer"].step()


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = dict(state["model"].state_dict())
    for i, moments in state["optimizer"].state_dict()["state"].items():
        found |= {f"{i}.{key}": value for key, value in moments.items()}
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}


def trained(folder: str | None, load: bool, steps: range, sharded: bool = True) -> Any:
    """What there is after some steps, from what was saved or from the beginning."""
    state = parts(sharded, seed=1 if load else 0)
    if folder is None:
        train(state, steps)
        return whole(state)
    alone = not dist.is_initialized()
    name = f"{Path(folder).name}-{load}-{0 if alone else dist.get_world_size()}"
    with (
        connect("local" if alone else "gloo", name=name, timeout=30) as comm,
        Checkpoint(folder, state, comm=comm) as checkpoint,
    ):
        if load:
            assert checkpoint.load().step == 3
        train(state, steps)
        if not load:
            checkpoint.save(3)
    return whole(state)


def saved(folder: Path) -> dict[str, dict[str, Any]]:
    (path,) = folder.iterdir()
    return {file.name: json.loads(file.read_text()) for file in sorted(path.glob("rank-*.json"))}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("world_size", [3, 2])
def test_shards_are_saved_by_those_that_have_them(ranks, tmp_path, world_size):
    expected = trained(None, False, range(6), sharded=False)
    ranks.run(trained, str(tmp_path), False, range(3), world_size=world_size)
    files = saved(tmp_path)
    rows = [
        chunk["shape"][0]
        for file in files.values()
        for chunk in file["tensors"].get("model.0.weight", {"chunks": []})["chunks"]
    ]
    assert len(files) == world_size and len(rows) == world_size and sum(rows) == 7
    again = ranks.run(trained, str(tmp_path), True, range(3, 6), world_size=world_size)
    unbroken = ranks.run(trained, None, False, range(6), world_size=world_size)
    for mine, theirs in zip(again, unbroken, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)  # to the bit
    for name, value in expected.items():
        assert torch.allclose(again[0][name], value, rtol=0, atol=1e-12), name
    for others in {1, 2, 3} - {world_size}:
        for found in ranks.run(trained, str(tmp_path), True, range(3, 6), world_size=others):
            for name, value in expected.items():
                assert torch.allclose(found[name], value, rtol=0, atol=1e-12), (others, name)
    alone = trained(str(tmp_path), True, range(3, 6), sharded=False)
    for name, value in expected.items():
        assert torch.allclose(alone[name], value, rtol=0, atol=1e-12), name


def test_what_one_process_saved_is_read_by_shards(ranks, tmp_path):
    expected = trained(None, False, range(6), sharded=False)
    trained(str(tmp_path), False, range(3), sharded=False)
    for found in ranks.run(trained, str(tmp_path), True, range(3, 6), world_size=3):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name


def refusals() -> None:
    mesh = init_device_mesh("cpu", (1,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(NotImplementedError, match=r"state\.x is a DTensor of placement P"):
        flatten({"x": partial}, "state")
    replicated = distribute_tensor(torch.arange(3.0), mesh)
    assert flatten({"x": replicated}, "s")[1]["s.x"].values.tolist() == [0, 1, 2]
    old = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="fully_shard"):
        Checkpoint("nowhere", {"model": old})


def test_what_is_neither_sharded_nor_replicated_is_refused(ranks):
    ranks.run(refusals, world_size=1)
