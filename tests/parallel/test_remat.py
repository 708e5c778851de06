"""What ``halo(remat=True)`` computes, sends and keeps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch_geometric.nn as pyg
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import pyg_scale
from pyg_scale import parallel
from pyg_scale.parallel.halo import HaloParallel
from pyg_scale.testing.graph_parallel import opened
from pyg_scale.testing.processes import WaitingProcesses
from tests.parallel import models
from tests.parallel.models import CHANNELS, CLASSES, HIDDEN
from tests.parallel.test_inexact import sent_by

LAYERS = [
    "gcn",
    "sage mean",
    "gin",
    "gat",
    "appnp",
    "tag",
    "sg",
    "ssg",
    "arma",
    "gated",
    "shared",
    "lg",
    "mixhop",
    "graph",
    "gcn weights",
    "gat edges",
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(4, limit=120.0) as started:
        yield started


def write(tmp_path: Path, name: str) -> str:
    data, assignment, parts = models.graph(name)
    path = tmp_path / f"{name}-parts"
    pyg_scale.partition(data, parts, path=path, assignment=assignment)
    return str(path)


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
    path, method = write(tmp_path, cut), HaloParallel(remat=True)
    found = ranks.run(models.compare, path, cut, LAYERS, method, world_size=size)
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
            if attends:  # the rows come again, and scores go in messages of their own
                expected += rows * sum(widths) + 2 * (rows + back)
            assert sum(sent) == expected
            assert all(n * widths[0] in sent for n in halo.num_sent if n)


def test_bytes_are_those_of_the_halo(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(count, write(tmp_path, "random"), world_size=3)


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
    for found, halo in ranks.run(keep, write(tmp_path, "random"), world_size=3):
        assert found["halo"] - found["remat"] >= 8 * halo * (HIDDEN + CLASSES), found


def refuse(path: str) -> None:
    with opened(path) as graph:
        wrap = partial(parallel.wrap, method="halo", graph=graph, remat=True)
        for name, layer in (("gatv2", "GATv2Conv"), ("sage max", "SAGEConv"), ("rgcn", "RGCNConv")):
            with pytest.raises(ValueError, match=rf"{layer} \(first\) needs all neighbours"):
                wrap(models.build(name, 0))


def test_what_is_refused(ranks: WaitingProcesses, tmp_path: Path) -> None:
    ranks.run(refuse, write(tmp_path, "random"), world_size=1)
    with pytest.raises(ValueError, match="remat=True goes with no other option"):
        HaloParallel(remat=True, stale=True)
