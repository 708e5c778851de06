"""What ``halo(remat=True)`` computes, sends and keeps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.data import Data

import pyg_scale
from pyg_scale import parallel
from pyg_scale.parallel import sequential
from pyg_scale.parallel.halo import HaloParallel
from pyg_scale.parallel.live import LiveBytes
from pyg_scale.testing.graph_parallel import opened
from pyg_scale.testing.processes import WaitingProcesses
from tests.parallel import models
from tests.parallel.models import CHANNELS, CLASSES, HIDDEN
from tests.parallel.test_inexact import sent_by


def in_pieces(path: str, cut: str, names: list[str], method: HaloParallel) -> dict[str, str]:
    """What differs, if there are several pieces of each rank's edges."""
    sequential.EDGES_AT_ONCE = 20
    return models.compare(path, cut, names, method)


def tie(path: str) -> None:
    """Equal messages, and those that are 0, share gradients as in PyG."""
    sequential.EDGES_AT_ONCE = 20
    with opened(path) as graph:
        values = torch.arange(graph.num_nodes * CHANNELS).view(-1, CHANNELS)
        x = (values * values % 7 % 3 - 1).double()
        for aggr in ("max", "min"):
            torch.manual_seed(0)
            conv = pyg.SAGEConv(CHANNELS, CLASSES, aggr=aggr, root_weight=False).double()
            model = parallel.wrap(conv, "halo", graph=graph, remat=True)
            own = model.own_nodes
            given, whole = x[own].requires_grad_(), x.clone().requires_grad_()
            model.backward(model(x=given).square().mean(), len(own))
            conv(whole, graph.edge_index[:]).square().mean().mul(len(x)).backward()
            assert torch.allclose(given.grad, whole.grad[own], rtol=0, atol=1e-12)


def test_equal_messages_share_gradients(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(tie, models.write(tmp_path, "random"), world_size=2)


def draw(path: str) -> None:
    """The backward pass draws what the forward pass has drawn."""
    with opened(path) as graph:
        conv = pyg.TransformerConv(CHANNELS, CLASSES, dropout=0.5).double()
        model = parallel.wrap(conv, "halo", graph=graph, remat=True)
        weight = conv.lin_value.weight

        def loss() -> Tensor:
            torch.manual_seed(dist.get_rank())
            return model().sum()

        model.backward(loss(), 1)
        assert weight.grad is not None
        moved = 1e-3 * torch.randn_like(weight, generator=torch.Generator().manual_seed(0))
        before = loss().detach()
        with torch.no_grad():
            weight.add_(moved)
        by = loss().detach() - before
        dist.all_reduce(by)
        # It is linear in the values: the change is the gradient times what was added.
        assert torch.allclose(by, dist.get_world_size() * (weight.grad * moved).sum(), rtol=1e-9)


def test_dropout_is_drawn_again(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(draw, models.write(tmp_path, "random"), world_size=2)


@pytest.mark.parametrize(
    ("cut", "size"),
    [
        ("random", 3),
        *(
            pytest.param(cut, size, marks=pytest.mark.slow)
            for cut, size in (
                ("random", 1),
                ("random", 4),
                ("empty", 3),
                ("apart", 3),
                ("untrained", 2),
            )
        ),
    ],
)
def test_models_are_those_of_the_whole_graph(
    ranks: WaitingProcesses, tmp_path: Path, cut: str, size: int
) -> None:
    path, method = models.write(tmp_path, cut), HaloParallel(remat=True)
    found = ranks.run(in_pieces, path, cut, models.SEQUENTIAL, method, world_size=size)
    assert found == [{}] * size


def count(path: str) -> None:
    """The numbers are those of ``halo``, in a message for each rank; attention asks again."""
    with opened(path) as graph:
        for conv, widths in ((pyg.SAGEConv, [CHANNELS, HIDDEN]), (pyg.GATConv, [HIDDEN, CLASSES])):
            model = parallel.wrap(models.pair(conv).double(), "halo", graph=graph, remat=True)
            halo, attends = model.shard.halos[None], conv is pyg.GATConv
            model()  # the scores and degrees of the graph itself, if any, are known from now on
            sent = [n // 8 for n in sent_by(lambda model=model: model.backward(model().mean(), 1))]
            rows, back = len(halo.send), halo.num_halo
            # The features of the graph need no gradient.
            expected = rows * sum(widths) + back * sum(widths[not attends :])
            if attends:  # the rows come again, with a score each
                expected += rows * sum(widths) + 2 * (2 * rows + back)
            assert sum(sent) == expected
            assert all(n * (widths[0] + attends) in sent for n in halo.num_sent if n)


def test_bytes_are_those_of_the_halo(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(count, models.write(tmp_path, "random"), world_size=3)


# The order ######################################################################################


@pytest.mark.parametrize("size", range(1, 8))
def test_in_a_round_every_rank_sends_to_one_and_gets_from_one(size: int) -> None:
    rounds = [sequential.rounds_of(rank, size) for rank in range(size)]
    assert all(len(each) == size - 1 for each in rounds)
    for at_once in zip(*rounds, strict=True):
        assert sorted(to for to, _ in at_once) == list(range(size))
        assert all(at_once[to][1] == rank for rank, (to, _) in enumerate(at_once))
    assert all(sorted(to for to, _ in each) == sorted({*range(size)} - {rank})
               for rank, each in enumerate(rounds))  # fmt: skip


def in_order(path: str) -> list[tuple[list[int], list[int]]]:
    """The ranks that each message of a step goes to, and comes from, in the order of messages."""
    found: list[tuple[list[int], list[int]]] = []
    plain = dist.all_to_all_single

    def noting(out: Any, given: Any, received: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(tuple([rank for rank, n in enumerate(each) if n] for each in (sent, received)))
        return plain(out, given, received, sent, *args, **kwargs)

    with opened(path) as graph:
        model = parallel.wrap(models.build("gat", 0), "halo", graph=graph, remat=True)
        model.backward(model().mean(), 1)
        model.zero_grad()
        dist.all_to_all_single = noting
        try:
            model.backward(model().mean(), 1)
        finally:
            dist.all_to_all_single = plain
    return found


def test_messages_go_in_rounds(ranks: WaitingProcesses, tmp_path: Path) -> None:
    """All messages of a step, forward and backward, are of rounds, with all their rows in one."""
    found = ranks.run(in_order, models.write(tmp_path, "random"), world_size=4)
    # Two layers; each asks twice for rows, and gives gradients back.
    assert all(len(each) == 2 * 3 * 3 for each in found)
    for at_once in zip(*found, strict=True):
        assert all(len(to) <= 1 and len(of) <= 1 for to, of in at_once)
        assert all(at_once[to[0]][1] == [rank] for rank, (to, _) in enumerate(at_once) if to)


def kept(model: Any) -> int:
    """Bytes that a forward keeps for the backward pass, each storage once."""
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model()
    del out
    return sum(each.untyped_storage().nbytes() for each in storages.values())


def keep(path: str) -> tuple[dict[str, int], int]:
    found = {}
    with opened(path) as graph:
        for name, method in (
            ("halo", HaloParallel()),
            ("remat", HaloParallel(remat=True)),
        ):
            model = parallel.wrap(models.build("gat", 0), method, graph=graph)
            found[name] = kept(model)
        return found, model.shard.halos[None].num_halo


def test_neither_halo_rows_nor_messages_are_kept(ranks: WaitingProcesses, tmp_path: Path) -> None:
    """Of each layer ``halo`` keeps rows of the halo, 6 and 4 numbers, and a message per edge."""
    for found, halo in ranks.run(keep, models.write(tmp_path, "random"), world_size=3):
        assert found["halo"] - found["remat"] >= 8 * halo * (HIDDEN + CLASSES), found


# Memory ########################################################################################

NODES, WIDTH, DEPTH = 900, 32, 3


def peaks(path: str, names: list[str]) -> dict[str, list[int]]:
    """By layer, the bytes that live at most with ``halo``, without and with ``remat``."""
    sequential.EDGES_AT_ONCE = 300
    convs: dict[str, Any] = {
        "max": lambda: pyg.SAGEConv(WIDTH, WIDTH, aggr="max"),
        "gatv2": lambda: pyg.GATv2Conv(WIDTH, WIDTH // 4, heads=4),
        "transformer": lambda: pyg.TransformerConv(WIDTH, WIDTH // 4, heads=4),
    }
    found: dict[str, list[int]] = {}
    with opened(path) as graph:
        for name in names:
            for method in (HaloParallel(), HaloParallel(remat=True)):
                layers = [(convs[name](), "x, e -> x") for _ in range(DEPTH)]
                model = parallel.wrap(pyg.Sequential("x, e", layers), method, graph=graph)
                x = graph.x[model.own_nodes]
                for _ in range(2):  # at first it makes what it keeps
                    model.zero_grad()
                    with LiveBytes([x]) as live:
                        model.backward(model(x=x).square().mean(), 1)
                found.setdefault(name, []).append(live.most)
    return found


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, 30 * NODES), generator=generator)
    data = Data(x=torch.randn(NODES, WIDTH, generator=generator), edge_index=edges)
    path = tmp_path_factory.mktemp("wide") / "parts"
    pyg_scale.partition(data, 2, path=path, assignment=torch.arange(NODES) * 2 // NODES)
    return path


@pytest.mark.parametrize(
    "names", [["gatv2"], pytest.param(["max", "transformer"], marks=pytest.mark.slow)]
)
def test_memory_of_other_layers_is_far_below_that_of_messages(
    ranks: WaitingProcesses, wide: Path, names: list[str]
) -> None:
    for found in ranks.run(peaks, str(wide), names, world_size=2):
        for name, (halo, remat) in found.items():
            assert 4 * remat < halo, (name, halo, remat)


# What is refused ###############################################################################


def refuse(path: str) -> None:
    with opened(path) as graph:
        wrap = partial(parallel.wrap, method="halo", graph=graph, remat=True)
        for name, layer in (("median", "SAGEConv"), ("several", "SAGEConv"), ("film", "FiLMConv")):
            with pytest.raises(ValueError, match=rf"{layer} \(first\) needs all neighbours"):
                wrap(models.build(name, 0))


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GATv2Conv(CHANNELS, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index, return_attention_weights=True)[0]


def refuse_weights(path: str) -> None:
    with opened(path) as graph:
        model = parallel.wrap(Asks().double(), "halo", graph=graph, remat=True)
        with pytest.raises(ValueError, match="GATv2Conv is asked for weights of edges"):
            model()


def test_what_is_refused(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(refuse, models.write(tmp_path, "random"), world_size=1)
    ranks.run(refuse_weights, models.write(tmp_path, "empty"), world_size=1)
    with pytest.raises(ValueError, match="remat=True goes with no other option"):
        HaloParallel(remat=True, stale=True)
