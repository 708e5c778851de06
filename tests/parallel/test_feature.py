"""What ``feature`` computes, against the whole graph in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch_geometric.nn as pyg
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch_geometric import utils
from torch_geometric.utils import add_self_loops, degree

import pyg_scale
from pyg_scale import parallel
from pyg_scale.parallel.mesh import DIMENSIONS
from pyg_scale.testing.graph_parallel import opened
from pyg_scale.testing.processes import WaitingProcesses
from tests.parallel import models
from tests.parallel.models import BY_CHANNEL, BY_HEAD, CHANNELS, CLASSES, HIDDEN
from tests.parallel.test_inexact import sent_by


@pytest.mark.parametrize(
    ("cut", "size"),
    [
        ("empty", 3),
        *(
            pytest.param(cut, size, marks=pytest.mark.slow)
            for cut, size in (("random", 1), ("random", 2), ("apart", 3), ("untrained", 3))
        ),
    ],
)
def test_models_are_those_of_the_whole_graph(
    ranks: WaitingProcesses, tmp_path: Path, cut: str, size: int
) -> None:
    path, names = models.write(tmp_path, cut), [*BY_CHANNEL, *BY_HEAD]
    assert ranks.run(models.compare, path, cut, names, "feature", world_size=size) == [{}] * size


@pytest.mark.parametrize(("method", "shape"), [("feature", ()), ("mesh", (1, 2, 1))])
def test_edges_may_be_followed_the_other_way(
    ranks: WaitingProcesses, tmp_path: Path, method: str, shape: tuple[int, ...]
) -> None:
    path, names = models.write(tmp_path, "random"), list(models.BOTH_WAYS)
    found = ranks.run(models.compare, path, "random", names, method, False, shape, world_size=2)
    assert found == [{}] * 2


TYPED = ["sage", "max", "graph", "to_hetero", "gat heads", "gatv2", "transformer heads"]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_models_of_typed_nodes_are_those_of_the_whole_graph(
    ranks: WaitingProcesses, tmp_path: Path, size: int
) -> None:
    data, cuts = models.typed_graph()
    pyg_scale.partition(data, 4, path=tmp_path / "parts", assignment=cuts)
    path = str(tmp_path / "parts")
    found = ranks.run(models.compare_typed, path, TYPED, "feature", world_size=size)
    assert found == [{}] * size


@pytest.mark.slow
def test_typed_nodes_on_a_mesh(ranks: WaitingProcesses, tmp_path: Path) -> None:
    data, cuts = models.typed_graph()
    pyg_scale.partition(data, 4, path=tmp_path / "parts", assignment=cuts)
    path = str(tmp_path / "parts")
    found = ranks.run(models.compare_typed, path, TYPED, "mesh", (2, 2, 1), world_size=4)
    assert found == [{}] * 4


@pytest.mark.slow
def test_there_may_be_fewer_channels_than_ranks(ranks: WaitingProcesses, tmp_path: Path) -> None:
    path = models.write(tmp_path, "random")
    found = ranks.run(models.compare, path, "random", ["mixhop"], "feature", world_size=4)
    assert found == [{}] * 4


def count(path: str) -> None:
    """Every propagate is two messages forward and two back, of all channels of a rank's nodes."""
    with opened(path) as graph:
        model = parallel.wrap(models.pair(pyg.SAGEConv).double(), "feature", graph=graph)
        own, nodes = len(model.own_nodes), graph.num_nodes
        share = {width: width // 3 + (model.peers.rank < width % 3) for width in (CHANNELS, HIDDEN)}
        for step in range(2):
            model.zero_grad()
            sent = sent_by(lambda: model.backward(model().square().mean(), 1))
            first = [own * CHANNELS] if step == 0 else []  # of the graph's own features, once
            back = [nodes * share[CHANNELS]]
            second = [own * HIDDEN, nodes * share[HIDDEN]]
            assert [n // 8 for n in sent] == [*first, *back, *second, *second]


def test_messages_do_not_depend_on_the_cut(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(count, models.write(tmp_path, "random"), world_size=3)


class Changed(nn.Module):
    """A layer on edges that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(CHANNELS, CLASSES)


class Looped(Changed):
    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.conv(x, add_self_loops(edge_index, num_nodes=x.size(0))[0])


class LoopedByModule(Changed):
    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.conv(x, utils.add_remaining_self_loops(edge_index, num_nodes=x.size(0))[0])


class Dropped(Changed):
    def forward(self, x: Any, edge_index: Any) -> Any:
        from torch_geometric.utils import dropout_edge

        return self.conv(x, dropout_edge(edge_index, training=self.training)[0])


class Scaled(Changed):
    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.conv(x, edge_index) / degree(edge_index[1], x.size(0)).view(-1, 1)


class Softmax(Changed):
    """Methods of tensors that have the names of functions of PyG."""

    def forward(self, x: Any, edge_index: Any) -> Any:
        edge_index = utils.remove_self_loops(edge_index)[0]
        out = self.conv(x, edge_index).softmax(dim=-1)
        return out.scatter(1, out.argmax(1, keepdim=True), 1.0)


def refuse(path: str) -> None:
    with opened(path) as graph:
        parallel.wrap(Softmax().double(), "feature", graph=graph)()
        mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=DIMENSIONS)
        with pytest.raises(ValueError, match=r"Looped .* calls add_self_loops"):
            parallel.wrap(Looped(), "mesh", graph=graph, mesh=mesh)
        stack = pyg.Sequential(
            "x, edge_index",
            [
                (lambda edges: add_self_loops(edges)[0], "edge_index -> edge_index"),
                (pyg.SAGEConv(CHANNELS, CLASSES), "x, edge_index -> x"),
            ],
        )
        for reason, model in (
            (r"Looped \(the model itself\) calls add_self_loops .*T.AddSelfLoops", Looped()),
            (r"LoopedByModule .* calls add_remaining_self_loops", LoopedByModule()),
            (r"Dropped .* calls dropout_edge .* would draw other edges .*'halo'", Dropped()),
            (r"Scaled .* calls degree .* attribute of edges .*'halo'", Scaled()),
            (r"Sequential .* calls add_self_loops", stack),
            (r"GATConv .* has 3 heads, which 2 ranks do not divide: 'halo'", pyg.GATConv(5, 2, 3)),
            (r"GATConv .* has features of edges", pyg.GATConv(5, 2, 2, edge_dim=2)),
            (r"EdgeConv .* is not known .*'halo'", models.last(pyg.EdgeConv(pyg.Linear(8, 4)))),
            (r"SAGEConv .* has aggr='median'", pyg.SAGEConv(CHANNELS, CLASSES, aggr="median")),
        ):
            with pytest.raises(ValueError, match=reason):
                parallel.wrap(model, "feature", graph=graph)


def test_what_is_refused(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(refuse, models.write(tmp_path, "random"), world_size=2)
