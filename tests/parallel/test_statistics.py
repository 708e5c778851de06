"""Statistics over the rows of all ranks: those of torch where there is one rank; else global."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pyg_scale import parallel
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.statistics import global_batch_norm
from pyg_scale.testing.graph_parallel import opened
from pyg_scale.testing.parallel import CHANNELS, CLASSES
from pyg_scale.testing.processes import WaitingProcesses
from tests.parallel import models


def compare(options: dict[str, Any], training: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.BatchNorm1d(3, **options).double().train(training) for _ in range(2))
    peers = Peers(None, torch.device("cpu"))
    for shape in ((5, 3), (4, 3, 2)):
        x = torch.randn(shape, dtype=torch.float64)
        pair = [x.clone().requires_grad_() for _ in range(2)]
        found, expected = global_batch_norm(ours, peers, pair[0]), theirs(pair[1])
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        for out in (found, expected):
            (out**3).sum().backward()
        assert torch.allclose(pair[0].grad, pair[1].grad, rtol=0, atol=1e-11)
        for name, value in theirs.state_dict().items():
            assert torch.allclose(ours.state_dict()[name], value, rtol=0, atol=1e-12), name
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one.grad, two.grad, rtol=0, atol=1e-11)
    if training:
        with pytest.raises(ValueError, match="more than 1 row"):
            global_batch_norm(ours, peers, torch.randn(1, 3, dtype=torch.float64))


def compare_all() -> None:
    for options in (
        {},
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
    ):
        for training in (True, False):
            if training or options.get("track_running_stats", True):
                compare(options, training)


def test_one_rank_has_the_statistics_of_torch(ranks: WaitingProcesses) -> None:
    ranks.run(compare_all, world_size=1)


# Wrappers ######################################################################################

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "halo": ("halo", {}),
    "remat": ("halo", {"remat": True}),
    "sample": ("halo", {"boundary_sample": 0.5}),
    "stale": ("halo", {"stale": True}),
    "int8": ("halo", {"quantize": "int8"}),
    "feature": ("feature", {}),
    "mesh": ("mesh", {}),
    "mesh with data": ("mesh", {}),
}
"""Every wrapper that divides a graph, and its options."""


class Normed(nn.Module):
    """A norm of the input, of which it is known what its statistics are, before a layer."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.conv = norm, pyg.SAGEConv(CHANNELS, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(self.norm(x), edge_index)
        return out


def normed(path: str, name: str) -> list[Tensor]:
    """Running statistics after a step; other norms over nodes are refused."""
    method, options = WAYS[name]
    with opened(path) as graph:
        mesh = None
        if method == "mesh":
            last = "data" if name == "mesh with data" else "feature"
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("partition", last))
        for norm in (pyg.GraphNorm(CHANNELS), pyg.PairNorm(), nn.InstanceNorm1d(CHANNELS)):
            with pytest.raises(ValueError, match=rf"{type(norm).__name__} \(norm\) takes stat"):
                parallel.wrap(Normed(norm), method, graph=graph, mesh=mesh, **options)
        norm = nn.BatchNorm1d(CHANNELS, momentum=1.0)
        net = Normed(norm).double()
        model = parallel.wrap(net, method, graph=graph, mesh=mesh, **options)
        model.backward(model().square().mean(), 1)
        assert dist.get_world_size() == 4
        return [norm.running_mean, norm.running_var]  # type: ignore[list-item]


@pytest.mark.parametrize("name", list(WAYS))
def test_batch_norm_is_global_and_other_norms_over_nodes_are_refused(
    ranks: WaitingProcesses, tmp_path: Path, name: str
) -> None:
    data, _, _ = models.graph("random")
    whole = data.x if name != "mesh with data" else torch.cat([data.x, data.x])
    for mean, variance in ranks.run(normed, models.write(tmp_path, "random"), name):
        assert torch.allclose(mean, whole.mean(0), rtol=0, atol=1e-12)
        assert torch.allclose(variance, whole.var(0), rtol=0, atol=1e-12)
