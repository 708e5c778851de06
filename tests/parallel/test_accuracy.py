"""Real graphs are learned by exact wrappers as by one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import pyg_scale
from pyg_scale import parallel
from pyg_scale.datasets import read_npz
from pyg_scale.testing.graph_parallel import opened
from pyg_scale.testing.processes import WaitingProcesses

EPOCHS, CHANNELS = 12, 32


def real(path: Path) -> Data:
    """A real graph with the features that most nodes have."""
    data = read_npz(str(path))
    x = data.x.to_dense() if data.x.layout != torch.strided else data.x
    most = x.sum(dim=0).topk(CHANNELS).indices
    found = Data(x=x[:, most].float(), y=data.y, edge_index=data.edge_index.long())
    found.train_mask, found.test_mask = data.train_mask, data.test_mask
    return found


def learned(model: Any, forward: Any, y: Tensor, train: Tensor) -> Tensor:
    """The classes that a model says after some epochs."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward()[train], y[train])
        if parallel.is_parallel_module(model):
            model.backward(loss, int(train.sum()))
        else:
            loss.backward()
        optimizer.step()
    with torch.no_grad():
        return forward().argmax(dim=1)


def model_of(classes: int) -> GraphSAGE:
    torch.manual_seed(0)
    return GraphSAGE(CHANNELS, 16, 2, classes)


def train(path: str, method: str, options: dict[str, Any], classes: int) -> tuple[Tensor, Tensor]:
    """The nodes of this rank, and their classes."""
    with opened(path) as graph:
        model = parallel.wrap(model_of(classes), method, graph=graph, **options)
        own = model.own_nodes
        return own, learned(model, model, graph.y[own], graph.train_mask[own])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["facebook_pages", "cornell5"])
def test_real_graphs_are_learned_as_by_one_process(
    name: str, data_dir: Path, tmp_path: Path
) -> None:
    data = real(data_dir / f"{name}.npz")
    classes = int(data.y.max()) + 1
    pyg_scale.partition(data, 2, path=tmp_path / "parts")
    alone = model_of(classes)
    said = learned(alone, lambda: alone(data.x, data.edge_index), data.y, data.train_mask)
    right = (said == data.y)[data.test_mask].float().mean()
    assert right > {"facebook_pages": 0.7, "cornell5": 0.58}[name]
    with WaitingProcesses(2, limit=240.0) as ranks:
        for method, options in (("halo", {}), ("halo", {"remat": True}), ("feature", {})):
            found = torch.empty_like(said)
            for own, classes_of_own in ranks.run(
                train, str(tmp_path / "parts"), method, options, classes
            ):
                found[own] = classes_of_own
            accuracy = (found == data.y)[data.test_mask].float().mean()
            assert abs(float(accuracy - right)) <= 0.01, (method, options)
