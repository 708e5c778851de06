"""What ``halo`` computes, against the whole graph in one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree

import pyg_scale
from pyg_scale import parallel
from pyg_scale.comm import connect, roll_call
from pyg_scale.errors import CommError
from pyg_scale.testing.graph_parallel import opened
from pyg_scale.testing.processes import WaitingProcesses
from tests.parallel import models
from tests.parallel.models import CHANNELS, CLASSES, HIDDEN, MODELS, MORE, OF_EDGES

# Exact results #################################################################################


@pytest.mark.parametrize(
    ("cut", "size"),
    [
        ("random", 3),
        *(
            pytest.param(cut, size, marks=pytest.mark.slow)
            for cut, size in (
                ("random", 1),
                ("random", 2),
                ("random", 4),
                ("empty", 3),
                ("apart", 3),
                ("untrained", 2),
                ("untrained", 3),
            )
        ),
    ],
)
def test_models_are_those_of_the_whole_graph(
    ranks: WaitingProcesses, tmp_path: Path, cut: str, size: int
) -> None:
    names = [*MODELS, *OF_EDGES]
    path = models.write(tmp_path, cut)
    assert ranks.run(models.compare, path, cut, names, "halo", world_size=size) == [{}] * size


def test_accelerated_models_are_those_of_the_whole_graph(
    ranks: WaitingProcesses, tmp_path: Path
) -> None:
    names = ["gcn", "sage mean", "gin", "gat", "gatv2", "transformer", "rgcn"]
    path = models.write(tmp_path, "random")
    found = ranks.run(models.compare, path, "random", names, "halo", True, world_size=2)
    assert found == [{}] * 2


@pytest.mark.slow
def test_further_models_are_those_of_the_whole_graph(
    ranks: WaitingProcesses, tmp_path: Path
) -> None:
    path = models.write(tmp_path, "random")
    found = ranks.run(models.compare, path, "random", list(MORE), "halo", world_size=3)
    assert found == [{}] * 3


def test_what_never_changes_may_go_beside_what_does(
    ranks: WaitingProcesses, tmp_path: Path
) -> None:
    path, names = models.write(tmp_path, "random"), list(models.BESIDE)
    assert ranks.run(models.compare, path, "random", names, "halo", world_size=2) == [{}] * 2


def test_models_of_typed_nodes_are_those_of_the_whole_graph(
    ranks: WaitingProcesses, tmp_path: Path
) -> None:
    data, cuts = models.typed_graph()
    pyg_scale.partition(data, 4, path=tmp_path / "parts", assignment=cuts)
    names = ["sage", "gat", "transformer", "graph", "to_hetero"]
    path = str(tmp_path / "parts")
    assert ranks.run(models.compare_typed, path, names, "halo", world_size=3) == [{}] * 3


# What is sent ##################################################################################


def count(path: str) -> list[Any]:
    """Bytes of every all-to-all of a step, as torch is asked for them, and the formula."""
    sent: list[int] = []
    plain = dist.all_to_all_single

    def counting(output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(given.nbytes)
        return plain(output, given, *args, **kwargs)

    with opened(path) as graph:
        found: list[Any] = []
        for conv, widths in (
            # The features are sent once, and then known; GCN's degrees, too.
            (pyg.SAGEConv, [HIDDEN, HIDDEN]),
            (pyg.GCNConv, [HIDDEN, CLASSES, CLASSES, HIDDEN]),
            # Sources are sent once for both of `edge_updater` and `propagate`.
            (pyg.GATv2Conv, [HIDDEN, CLASSES, CLASSES, HIDDEN]),
            # Keys and values are one message.
            (pyg.TransformerConv, [2 * HIDDEN, 2 * CLASSES, 2 * CLASSES, 2 * HIDDEN]),
        ):
            model = parallel.wrap(models.pair(conv).double(), "halo", graph=graph)
            halo = model.shard.halos[None]
            for step in range(2):
                if step == 1:
                    dist.all_to_all_single = counting
                try:
                    model.backward(model().square().mean(), 1)
                finally:
                    dist.all_to_all_single = plain
                model.zero_grad()
            forward = len(widths) // 2
            rows = [sum(halo.num_sent)] * forward + [halo.num_halo] * (len(widths) - forward)
            found.append((list(sent), [8 * n * w for n, w in zip(rows, widths, strict=True)]))
            sent.clear()
    return found


def test_one_message_before_each_propagate_and_one_back(
    ranks: WaitingProcesses, tmp_path: Path
) -> None:
    for each in ranks.run(count, models.write(tmp_path, "random"), world_size=3):
        for sent, expected in each:
            assert sent == expected


# What is refused ###############################################################################


class Own(pyg.MessagePassing):
    """A layer whose propagate is not PyG's."""

    def propagate(self, edge_index: Any, **kwargs: Any) -> Any:
        return kwargs["x"]

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.propagate(edge_index, x=x)


class Degrees(pyg.MessagePassing):
    """A layer with degrees of sources."""

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.propagate(edge_index, x=x / degree(edge_index[1], x.size(0)).view(-1, 1))


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SAGEConv(CHANNELS, CLASSES)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return pyg.global_mean_pool(self.conv(x, edge_index), None)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(CHANNELS, CLASSES, normalize=False)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.conv(x, *gcn_norm(edge_index, num_nodes=x.size(0)))


class Reversed(nn.Module):
    """A layer that follows edges the other way."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.conv(x, edge_index.flip(0))


def reverse(path: str, conv: str, options: dict[str, Any]) -> None:
    with opened(path) as graph:
        model = Reversed(getattr(pyg, conv)(CHANNELS, CLASSES)).double()
        model = parallel.wrap(model, "halo", graph=graph, **options)
        reason = rf"{conv} is given edges that end at nodes of other ranks"
        with pytest.raises((ValueError, CommError), match=reason):
            model()


@pytest.mark.parametrize(
    ("conv", "options"),
    [("SAGEConv", {}), ("GCNConv", {}), ("GATConv", {}), ("SAGEConv", {"remat": True})],
    ids=str,
)
def test_edges_the_other_way_are_refused_on_all_ranks(
    ranks: WaitingProcesses, tmp_path: Path, conv: str, options: dict[str, Any]
) -> None:
    ranks.run(reverse, models.write(tmp_path, "random"), conv, options, world_size=2)


def refuse(path: str) -> None:
    def between(norm: nn.Module) -> nn.Module:
        return models.pair(pyg.SAGEConv, between=norm)

    refused: list[tuple[str, nn.Module]] = [
        (r"GraphNorm \(between\) takes statistics over all nodes", between(pyg.GraphNorm(HIDDEN))),
        (r"PairNorm \(between\)", between(pyg.PairNorm())),
        (r"LayerNorm \(between\)", between(pyg.LayerNorm(HIDDEN, mode="graph"))),
        (r"InstanceNorm1d \(between\)", between(nn.InstanceNorm1d(HIDDEN))),
        (r"MeanAggregation \(between\) pools nodes", between(pyg.MeanAggregation())),
        (r"Pools .* calls global_mean_pool", Pools()),
        (r"ChebConv \(first\) calls get_laplacian", models.pair(pyg.ChebConv, K=3)),
        (r"GCNConv \(first\) has cached=True", models.pair(pyg.GCNConv, cached=True)),
        (r"flow='target_to_source'", models.pair(pyg.SAGEConv, flow="target_to_source")),
        (r"has no shape yet", pyg.SAGEConv(-1, CLASSES)),
        (r"no parameter that needs a gradient", pyg.SAGEConv(2, 2).requires_grad_(False)),
        (r"Own .* has a propagate of its own", Stacked(Own())),
        (r"calls degree", Stacked(Degrees())),
        (r"DirGNNConv \(conv\) also follows edges the other way", models.build("both ways", 0)),
        (r"HypergraphConv \(first\) follows hyperedges", models.pair(pyg.HypergraphConv)),
        (r"Norms .* calls gcn_norm", Norms()),
    ]
    with opened(path) as graph:
        for reason, model in refused:
            with pytest.raises(ValueError, match=reason):
                parallel.wrap(model, "halo", graph=graph)
        with pytest.raises(TypeError, match="mesh"):
            parallel.wrap(pyg.SAGEConv(CHANNELS, 2), "halo", graph=graph, mesh="mesh")
        with pytest.raises(TypeError, match="group must be a process group"):
            parallel.wrap(pyg.SAGEConv(CHANNELS, 2), "halo", graph=graph, group="all")
        rank = dist.get_rank()  # what one rank has is an error of all
        norm = pyg.GraphNorm(HIDDEN) if rank == 1 else nn.Identity()
        who = "" if rank == 1 else "rank 1: "
        with pytest.raises(ValueError, match=rf"^{who}GraphNorm"):
            parallel.wrap(between(norm), "halo", graph=graph)
        inputs = ("x", "edge_index" if rank else "colour")
        who = "rank 0: " if rank else ""
        with pytest.raises(ValueError, match=rf"^{who}the graph has no colour"):
            parallel.wrap(models.pair(pyg.SAGEConv).double(), "halo", graph=graph, inputs=inputs)
        if rank == 0:
            graph.x = graph.x + 1
        who = "rank 0: " if rank else ""
        with pytest.raises(ValueError, match=rf"^{who}the graph was changed"):
            parallel.wrap(models.pair(pyg.SAGEConv).double(), "halo", graph=graph)


class Stacked(nn.Module):
    """A layer with a parameter beside it."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.lin, self.conv = nn.Linear(2, 2), conv


def test_what_is_refused(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(refuse, models.write(tmp_path, "random"), world_size=2)


def test_a_graph_is_needed_where_one_is_divided_and_only_there() -> None:
    model = pyg.SAGEConv(CHANNELS, CLASSES)
    with pytest.raises(TypeError, match="divides a graph"):
        parallel.wrap(model, "halo")
    with pytest.raises(TypeError, match=r"takes batches, not a graph: leave out graph="):
        parallel.wrap(model, "ddp", graph="parts")


# Lost ranks ####################################################################################


def steps_that_end(model: Any, where: str) -> None:
    """Three steps, of which rank 1 does not end the last."""
    for step in range(3):
        ends = dist.get_rank() == 1 and step == 2
        if ends and where == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        out = model()
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)
        model.backward(out.square().mean(), 1)
        model.zero_grad()


def lose_rank_1(path: str, where: str) -> None:
    """Rank 1 ends within a step, and the others are told."""
    roll_call._GRACE = 1.0
    with connect(timeout=30.0, name="graph") as comm:
        graph = pyg_scale.open(path, comm=comm)
        model = parallel.wrap(models.pair(pyg.GCNConv).double(), "halo", graph=graph)
        with pytest.raises(CommError, match=r"^rank 1 ended while the others"):
            steps_that_end(model, where)
        graph.close(0.0)


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_named(tmp_path: Path, where: str) -> None:
    with WaitingProcesses(3, limit=120.0) as ranks, pytest.raises(ExceptionGroup) as raised:
        ranks.run(lose_rank_1, models.write(tmp_path, "random"), where)
    (error,) = raised.value.exceptions
    assert str(error) == "the process of rank 1 ended (-9)"


class Picky(nn.Module):
    """Fails on one rank, in a forward or a backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.conv, self.where = pyg.SAGEConv(CHANNELS, CLASSES).double(), where

    def forward(self, x: Any, edge_index: Any) -> Any:
        x = self.conv(x, edge_index)
        if dist.get_rank() == 2 and self.where == "forward":
            raise KeyError("no such thing")
        if dist.get_rank() == 2:
            x.register_hook(lambda grad: grad.view(0))
        return x


def fail_alone(path: str, method: str, where: str) -> None:
    with opened(path) as graph:
        model = parallel.wrap(Picky(where), method, graph=graph)

        def steps() -> None:
            for _ in range(2):  # ranks meet at the latest in the second step
                model.backward(model().square().mean(), 1)
                model.zero_grad()

        if dist.get_rank() == 2:
            with pytest.raises((KeyError, RuntimeError)):
                steps()
        else:  # and not the time limit of the group
            with pytest.raises(CommError, match=r"^rank 2 failed: (KeyError: 'no such|Runtime)"):
                steps()


@pytest.mark.parametrize(("method", "where"), [("halo", "forward"), ("feature", "backward")])
def test_an_error_of_one_rank_ends_all_by_its_name(
    tmp_path: Path, ranks: WaitingProcesses, method: str, where: str
) -> None:
    ranks.run(fail_alone, models.write(tmp_path, "random"), method, where, world_size=3)
