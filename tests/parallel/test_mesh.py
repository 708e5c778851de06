"""What ``mesh`` computes, against the whole graph in one process."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch_geometric.data import Batch

import pyg_scale
from pyg_scale import parallel
from pyg_scale.comm import connect, roll_call
from pyg_scale.errors import CommError
from pyg_scale.parallel.compression import TopK
from pyg_scale.parallel.mesh import DIMENSIONS, MeshParallel
from pyg_scale.testing.graph_parallel import opened
from pyg_scale.testing.processes import WaitingProcesses
from tests.parallel import models
from tests.parallel.models import BY_CHANNEL, BY_HEAD, CHANNELS, CLASSES, HIDDEN, MODELS, OF_EDGES
from tests.parallel.test_inexact import sent_by


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS)


# Exact results #################################################################################

QUICK = ["gcn", "sage mean", "sage max", "gin", "gat heads"]


@pytest.mark.parametrize(
    ("cut", "shape", "names"),
    [
        ("random", (2, 2, 1), QUICK),
        *(
            pytest.param(cut, shape, names, marks=pytest.mark.slow)
            for cut, shape, names in (
                ("random", (2, 2, 1), [*BY_CHANNEL, *BY_HEAD]),
                ("empty", (2, 2, 1), [*BY_CHANNEL, *BY_HEAD]),
                ("empty", (3, 1, 1), [*MODELS, *OF_EDGES]),
                ("apart", (1, 3, 1), [*BY_CHANNEL, *BY_HEAD]),
                ("untrained", (1, 2, 1), [*BY_CHANNEL, *BY_HEAD]),
                ("random", (1, 1, 1), [*MODELS, *OF_EDGES]),
                ("random", (1, 4, 1), ["gcn", "sage max", "mixhop"]),
            )
        ),
    ],
)
def test_models_are_those_of_the_whole_graph(
    ranks: WaitingProcesses, tmp_path: Path, cut: str, shape: tuple[int, ...], names: list[str]
) -> None:
    path, size = models.write(tmp_path, cut), shape[0] * shape[1] * shape[2]
    found = ranks.run(models.compare, path, cut, names, "mesh", False, shape, world_size=size)
    assert found == [{}] * size


def train_replicas(path: str, shape: tuple[int, ...], names: list[str]) -> dict[str, str]:
    """Replicas have features and training nodes of their own: together, a batch of graphs."""
    replicas = []
    for number in range(shape[2]):
        data, _, _ = models.graph("random")
        data.x = data.x * (number + 1)
        data.train_mask = data.train_mask & (torch.arange(data.num_nodes) % 3 != number)
        replicas.append(data)
    union = Batch.from_data_list(replicas)
    found = {}
    mesh = mesh_of(*shape)
    with opened(path) as graph:
        for name in names:
            place = mesh.get_local_rank("data")
            data = replicas[place]
            model = models.build(name, dist.get_rank())
            model = parallel.wrap(model, "mesh", graph=graph, mesh=mesh)
            own = model.own_nodes
            forward = partial(model, x=data.x[own])
            ours = models.train(model, forward, data.y[own], data.train_mask[own])
            plain = models.build(name, 0)
            forward = partial(plain, union.x, union.edge_index)
            theirs = models.train(plain, forward, union.y, union.train_mask)
            rows = own + place * graph.num_nodes
            found[name] = models.difference(ours, theirs, rows)
    return {name: said for name, said in found.items() if said}


@pytest.mark.parametrize("shape", [(1, 2, 2), pytest.param((2, 1, 2), marks=pytest.mark.slow)])
def test_replicas_are_a_batch_of_graphs(
    ranks: WaitingProcesses, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    path = models.write(tmp_path, "random")
    found = ranks.run(train_replicas, path, shape, ["gcn", "sage max", "gin", "gat heads"])
    assert found == [{}] * 4


# What is sent ##################################################################################


def count(path: str) -> None:
    """Every propagate is a transposition, an exchange and a transposition, and all three back."""
    with opened(path) as graph:
        model = parallel.wrap(
            models.pair(pyg.SAGEConv).double(), "mesh", graph=graph, mesh=mesh_of(2, 2, 1)
        )
        own, halo = len(model.own_nodes), model.shard.halos[None]
        width = HIDDEN // 2
        for step in range(2):
            model.zero_grad()
            sent = [n // 8 for n in sent_by(lambda: model.backward(model().square().mean(), 1))]
            narrow = CHANNELS // 2 + (model.shard.own[None].start == 0) * (CHANNELS % 2)
            features = [own * CHANNELS, len(halo.send) * narrow]  # of the graph: once
            aggregated = halo.num_own * narrow
            second = [own * HIDDEN, len(halo.send) * width, halo.num_own * width]
            back = [own * HIDDEN, halo.num_halo * width, halo.num_own * width]
            assert sent == [*(features if step == 0 else []), aggregated, *second, *back]


def test_messages_are_those_of_both(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(count, models.write(tmp_path, "random"), world_size=4)


# Gradients in fewer bytes ######################################################################


def compress(path: str, shape: tuple[int, ...]) -> None:
    """What was sent and what was left is what there would have been, step by step."""
    with opened(path) as graph:
        mesh = mesh_of(*shape)
        models_ = [
            parallel.wrap(models.build("gcn", 0), method, graph=graph, mesh=mesh)
            for method in (MeshParallel(), MeshParallel(compress=TopK(0.1)))
        ]
        before: Any = 0
        for _ in range(3):
            flat = []
            for model in models_:
                model.zero_grad()
                loss = (model() - 1).square().mean()
                model.backward(loss, len(model.own_nodes))
                flat.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
            left = next(iter(models_[1].rank_state.state_dict()["left"].values())).clone()
            dist.all_reduce(left)
            # The parameters stay as they are, so the whole gradient is that of the first model.
            assert torch.allclose(flat[1] + left, flat[0] + before, rtol=0, atol=1e-13)
            assert 0 < int((flat[1] != 0).sum()) <= 4 * -(-len(flat[1]) // 10)
            before = left
        for name in ("fp16", "bf16", "powersgd"):
            model = parallel.wrap(
                models.build("gcn", 0), "mesh", graph=graph, mesh=mesh, compress=name
            )
            model.backward((model() - 1).square().mean(), len(model.own_nodes))
            again = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            assert float((again - flat[0]).abs().max()) < 0.02 * float(flat[0].abs().max())
        loss = model().mean() * (float("nan") if dist.get_rank() == 2 else 1.0)
        model.zero_grad()
        with pytest.raises(FloatingPointError, match=r"on rank \d is NaN"):
            model.backward(loss, 1)


def test_gradients_in_fewer_bytes(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(compress, models.write(tmp_path, "random"), (2, 1, 2))


# What is refused ###############################################################################


def refuse(path: str) -> None:
    model = models.pair(pyg.SAGEConv)
    with opened(path) as graph:
        wrap = partial(parallel.wrap, model, "mesh", graph=graph)
        with pytest.raises(TypeError, match=r"mesh must be a DeviceMesh \(got str\)"):
            wrap(mesh="mesh")
        few = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("partition",))
        with pytest.raises(ValueError, match=r"the mesh has 3 = 3 ranks, and there are 4"):
            wrap(mesh=few)
        with pytest.raises(ValueError, match=r"some of partition, feature, data \(got rows"):
            wrap(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "feature")))
        with pytest.raises(ValueError, match=r"some of partition.*\(got \)"):
            wrap(mesh=init_device_mesh("cpu", (2, 2)))
        with pytest.raises(ValueError, match=r"GATConv .* has 3 heads, which 2 ranks do not"):
            parallel.wrap(
                pyg.GATConv(CHANNELS, CLASSES, 3), "mesh", graph=graph, mesh=mesh_of(2, 2, 1)
            )
        with pytest.raises(ValueError, match="ratio is for compress='topk'"):
            wrap(ratio=0.5)
        with pytest.raises(ValueError, match="ranks have different options"):
            wrap(compress=TopK(0.1 + 0.1 * dist.get_rank()))


def test_what_is_refused(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(refuse, models.write(tmp_path, "random"))


# Lost ranks ####################################################################################


def steps_that_end(model: Any, how: str) -> None:
    """Two steps; in the second rank 3 ends, or an error is raised in its forward."""
    for step in range(2):
        if dist.get_rank() == 3 and step == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            model.module.between.forward = lambda x: {}["thing"]
        model.backward(model().square().mean(), 1)
        model.zero_grad()


def lose_rank_3(path: str, how: str) -> None:
    """The others are told, also rank 0, which shares no smaller group with it."""
    roll_call._GRACE = 1.0
    with connect(timeout=30.0, name="graph") as comm:
        graph = pyg_scale.open(path, comm=comm)
        model = parallel.wrap(
            models.pair(pyg.GCNConv).double(), "mesh", graph=graph, mesh=mesh_of(2, 2, 1)
        )
        if dist.get_rank() == 3:
            with pytest.raises(KeyError):
                steps_that_end(model, how)
        else:
            told = r"^rank 3 (ended while the others|failed: KeyError: 'thing')"
            with pytest.raises(CommError, match=told):
                steps_that_end(model, how)
        graph.close(0.0)


@pytest.mark.parametrize("how", ["failed", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_is_named_by_all(tmp_path: Path, how: str) -> None:
    with WaitingProcesses(4, limit=120.0) as ranks:
        run = partial(ranks.run, lose_rank_3, models.write(tmp_path, "random"), how)
        if how == "failed":
            run()
        else:
            with pytest.raises(ExceptionGroup) as raised:
                run()
            (error,) = raised.value.exceptions
            assert str(error) == "the process of rank 3 ended (-9)"
