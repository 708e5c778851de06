"""Errors that every wrapper makes of the same mistakes and losses, with real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch.distributed.device_mesh import init_device_mesh

import pyg_scale
from pyg_scale import parallel
from pyg_scale.comm import connect, roll_call
from pyg_scale.errors import CommError
from pyg_scale.testing.graph_parallel import opened
from pyg_scale.testing.parallel import batch_of
from pyg_scale.testing.processes import WaitingProcesses
from tests.parallel import models
from tests.parallel.models import CHANNELS, CLASSES

# A rank that dies ##############################################################################

DIVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    "sample": ("halo", {"boundary_sample": 0.5}),
    "stale": ("halo", {"stale": True}),
    "int8": ("halo", {"quantize": "int8"}),
    "remat": ("halo", {"remat": True}),
    "feature": ("feature", {}),
}


def die_on_a_graph(path: str, name: str) -> None:
    """Rank 1 ends between the forward and the backward of its third step."""
    roll_call._GRACE = 1.0
    method, options = DIVIDED[name]
    with connect(timeout=30.0, name="graph") as comm:
        graph = pyg_scale.open(path, comm=comm)
        net = models.pair(pyg.GCNConv).double()
        model = parallel.wrap(net, method, graph=graph, **options)

        def steps() -> None:
            for step in range(5):
                loss = model().square().mean()
                if dist.get_rank() == 1 and step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                model.backward(loss, 1)
                model.zero_grad()

        with pytest.raises(CommError, match=r"^rank 1 ended while the others"):
            steps()
        graph.close(0.0)


def die_with_batches(method: str) -> None:
    """Rank 1 ends before its third step."""
    roll_call._GRACE = 1.0
    torch.manual_seed(0)
    model = parallel.wrap(pyg.GraphSAGE(5, 8, 3, 4).double(), method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        with model.join(optimizer):
            for step in range(5):
                if dist.get_rank() == 1 and step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                batch = batch_of(dist.get_rank(), step, 4)
                optimizer.zero_grad()
                out = model(batch.x, batch.edge_index)[: batch.num_seeds]
                model.backward(F.cross_entropy(out, batch.y), batch.num_seeds)
                optimizer.step()

    with pytest.raises(CommError, match=r"^rank 1 ended"):
        steps()


def ended(run: Any) -> None:
    with WaitingProcesses(3, limit=100.0) as ranks, pytest.raises(ExceptionGroup) as raised:
        run(ranks)
    (error,) = raised.value.exceptions
    assert str(error) == "the process of rank 1 ended (-9)"


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.slow) for each in DIVIDED])
def test_a_rank_that_dies_in_an_exchange_is_named(tmp_path: Path, name: str) -> None:
    path = models.write(tmp_path, "random")
    ended(lambda ranks: ranks.run(die_on_a_graph, path, name))


@pytest.mark.parametrize("method", [pytest.param("fsdp", marks=pytest.mark.slow), "layer"])
def test_a_rank_that_dies_with_batches_is_named(method: str) -> None:
    ended(lambda ranks: ranks.run(die_with_batches, method))


# What no wrapper can do ########################################################################


def too_few_parts(path: str) -> None:
    """Three ranks, two parts."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("partition",))
    with opened(path) as graph:
        for method, given in (("halo", {}), ("mesh", {"mesh": mesh})):
            with pytest.raises(ValueError, match=r"has 2 parts for 3 ranks: partition it"):
                parallel.wrap(pyg.SAGEConv(CHANNELS, CLASSES), method, graph=graph, **given)


def without_shape() -> None:
    for method in ("ddp", "fsdp", "layer", "local_sgd", "async_ps", "federated"):
        options = {"optimizer": torch.optim.Adam} if method == "async_ps" else {}
        with pytest.raises(ValueError, match=r"has no shape yet"):
            parallel.wrap(pyg.GraphSAGE(-1, 8, 2, CLASSES), method, **options)


def test_what_is_an_error_of_all_ranks(ranks: WaitingProcesses, tmp_path: Path) -> None:
    data, _, _ = models.graph("random")
    part = torch.arange(data.num_nodes) % 2
    pyg_scale.partition(data, 2, path=tmp_path / "parts", assignment=part)
    ranks.run(too_few_parts, str(tmp_path / "parts"), world_size=3)
    ranks.run(without_shape, world_size=2)
