"""NeighborLoader in the hands of the code that uses PyG's."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.loader as pyg
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import CachedLoader, ImbalancedSampler, PrefetchLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.models import GraphSAGE
from torch_geometric.utils import trim_to_layer

from pyg_scale.datasets.read import read_npz
from pyg_scale.loader import NeighborLoader
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same, assert_same_batches


def test_training_learns(data_dir: Any) -> None:
    """Two layers on a real graph do better than its features, or its most common class, alone."""
    data = read_npz(data_dir / "cora.npz")
    torch.manual_seed(0)
    model = GraphSAGE(data.x.size(1), 32, 2, out_channels=int(data.y.max()) + 1)
    order = torch.randperm(data.num_nodes)
    train, test = order[:500], order[500:]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = NeighborLoader(data, [10, 10], train, batch_size=64, shuffle=True, num_workers=2)
    for _ in range(8):
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
    model.eval()
    everything = model(data.x, data.edge_index).argmax(1)
    accuracy = float((everything[test] == data.y[test]).float().mean())
    common = float(data.y.bincount().max()) / data.num_nodes
    assert accuracy > common + 0.35


def test_inference_layer_by_layer_is_the_whole_graph() -> None:
    data = graphs.hostile()
    torch.manual_seed(0)
    model = GraphSAGE(6, 8, 2, out_channels=3).eval()
    expected = model(data.x, data.edge_index)
    for kwargs in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        loader = NeighborLoader(data, [-1], batch_size=17, **kwargs)
        for cache in (False, True):
            found = model.inference(loader, cache=cache)
            assert torch.allclose(found, expected, atol=1e-5)


def test_trimmed_layers_give_the_same_for_the_seeds() -> None:
    data = graphs.hostile()
    torch.manual_seed(0)
    convs = [SAGEConv(6, 6) for _ in range(3)]
    for batch in NeighborLoader(data, [4, 3, 2], batch_size=10):
        whole, trimmed, edges = batch.x, batch.x, batch.edge_index
        for i, conv in enumerate(convs):
            whole = conv(whole, batch.edge_index)
            trimmed, edges, _ = trim_to_layer(
                i, batch.num_sampled_nodes, batch.num_sampled_edges, trimmed, edges
            )
            trimmed = conv(trimmed, edges)
        assert torch.allclose(whole[:10], trimmed[:10], atol=1e-5)


def test_the_imbalanced_sampler_with_repeated_seeds() -> None:
    data = graphs.hostile()
    data.y = (torch.arange(100) >= 5).long()  # five nodes of class 0
    mask = torch.arange(100) < 60
    sampler = ImbalancedSampler(data, input_nodes=mask)
    loader = NeighborLoader(data, [3, 2], mask, batch_size=20, sampler=sampler, num_workers=2)
    seen: list[int] = []
    for batch in loader:
        seeds = batch.n_id[: batch.batch_size]
        assert torch.equal(seeds, batch.input_id) and torch.equal(batch.x, data.x[batch.n_id])
        pairs = data.edge_index[:, batch.e_id]
        assert torch.equal(batch.n_id[batch.edge_index], pairs)
        seen += batch.y[: batch.batch_size].tolist()
    assert len(seen) == 60 and 10 < sum(seen) < 50


def test_inside_pygs_other_loaders() -> None:
    data = graphs.hostile()
    expected = list(NeighborLoader(data, [3], batch_size=30, seed=1))
    for workers in ({}, {"num_workers": 2}):
        assert_same_batches(
            expected, PrefetchLoader(NeighborLoader(data, [3], batch_size=30, seed=1, **workers))
        )
        cached = CachedLoader(NeighborLoader(data, [3], batch_size=30, seed=1, **workers))
        assert_same_batches(expected, cached)
        assert_same_batches(expected, cached)
    pair = pyg.ZipLoader(
        [NeighborLoader(data, [3], list(range(8))), NeighborLoader(data, [2], list(range(6)))],
        batch_size=4,
    )
    for left, right in pair:
        assert torch.equal(left.n_id[: left.batch_size], right.n_id[: right.batch_size])


def test_float_timestamps() -> None:
    data = graphs.hostile()
    data.time = data.time.double() / 7 + 1e9
    batch = next(iter(NeighborLoader(data, [-1, -1], [50], time_attr="time")))
    assert (batch.time <= data.time[50]).all()
    whole = next(iter(NeighborLoader(data, [-1, -1], [50])))
    assert batch.num_nodes < whole.num_nodes
    later = NeighborLoader(data, [-1, -1], [50], torch.tensor([2e9]), time_attr="time")
    assert set(next(iter(later)).n_id.tolist()) == set(whole.n_id.tolist())


def test_with_all_neighbors_the_batch_is_the_neighborhood() -> None:
    data = graphs.hostile()
    row, col = data.edge_index.tolist()
    for batch in NeighborLoader(data, [-1, -1], batch_size=7, num_workers=2):
        nodes = set(batch.input_id.tolist())
        edges: set[int] = set()
        for _ in range(2):
            hop = {e for e in range(len(row)) if col[e] in nodes}
            edges |= hop
            nodes |= {row[e] for e in hop}
        assert set(batch.n_id.tolist()) == nodes
        assert sorted(batch.e_id.tolist()) == sorted(edges)


def test_directed_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="subgraph_type='induced'"):
        old = NeighborLoader(graphs.hostile(), [3], directed=False, seed=1, batch_size=9)
    new = NeighborLoader(graphs.hostile(), [3], subgraph_type="induced", seed=1, batch_size=9)
    assert_same_batches(new, old)


def test_num_neighbors_can_be_changed_as_lightning_does() -> None:
    loader = NeighborLoader(graphs.hostile(), [3, 2], batch_size=9)
    evaluation = copy.copy(loader.node_sampler)
    evaluation.num_neighbors = [-1]
    whole = pyg.NodeLoader(loader.data, evaluation, batch_size=100)
    assert len(next(iter(whole)).num_sampled_nodes) == 2
    assert len(next(iter(loader)).num_sampled_nodes) == 3
    assert len(evaluation.num_neighbors) == 1


def test_loaders_of_one_graph_share_its_topology() -> None:
    data = graphs.hostile()
    train, val = NeighborLoader(data, [3]), NeighborLoader(data, [-1])
    assert train.node_sampler.topology is val.node_sampler.topology


def test_a_batch_is_as_large_as_pygs_memory_wise() -> None:
    """What a worker process sends is a batch, not the tensors that it was cut from."""
    data = graphs.hostile()
    data.x = torch.randn(100, 1000)
    batch = next(iter(NeighborLoader(data, [0], [3], num_workers=1, worker_type="process")))
    assert batch.x.untyped_storage().nbytes() == 4000


# PyTorch Lightning #########################################################################


@pytest.fixture
def lightning() -> Iterator[Any]:
    environment = dict(os.environ)
    yield pytest.importorskip("pytorch_lightning")
    os.environ.clear()  # Lightning leaves settings behind
    os.environ.update(environment)


def lightning_module(lightning: Any) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GraphSAGE(6, 8, 2, out_channels=3)
            self.seen: list[Tensor] = []

        def training_step(self, batch: Data, number: int) -> Tensor:
            self.seen.append(batch.input_id)
            out = self.model(batch.x, batch.edge_index)[: batch.batch_size]
            return F.cross_entropy(out, batch.y[: batch.batch_size])

        def validation_step(self, batch: Data, number: int) -> None:
            self.log("size", float(batch.batch_size), batch_size=1)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer, Module()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_with_loaders(lightning: Any, workers: int) -> None:
    trainer, module = lightning_module(lightning)
    data = graphs.hostile()
    train = NeighborLoader(
        data,
        [3, 2],
        range(60),
        batch_size=20,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    val = NeighborLoader(data, [3, 2], range(60, 100), batch_size=20, num_workers=workers)
    trainer.fit(module, train, val)
    for epoch in (module.seen[:3], module.seen[3:]):
        assert torch.cat(epoch).sort().values.tolist() == list(range(60))


@pytest.mark.filterwarnings("ignore")
def test_lightnings_data_module_with_our_sampler(lightning: Any) -> None:
    from torch_geometric.data.lightning import LightningNodeData

    trainer, module = lightning_module(lightning)
    data = graphs.hostile()
    sampler = NeighborLoader(data, [3, 2]).node_sampler
    nodes = torch.arange(100)
    module_data = LightningNodeData(
        data,
        input_train_nodes=nodes[:60],
        input_val_nodes=nodes[60:],
        node_sampler=sampler,
        batch_size=20,
        eval_loader_kwargs={"num_neighbors": [-1, -1]},
    )
    trainer.fit(module, module_data)
    assert len(module.seen) == 6
    assert module_data.eval_graph_sampler.num_neighbors.values == [-1, -1]
    assert sampler.num_neighbors.values == [3, 2]


@pytest.mark.filterwarnings("ignore")
def test_lightning_builds_the_loader_again_with_another_sampler(lightning: Any) -> None:
    fabric = pytest.importorskip("lightning_fabric.utilities.data")
    data = graphs.hostile()
    with fabric._replace_dunder_methods(torch.utils.data.DataLoader, "dataset"):
        loader = NeighborLoader(data, [3], range(30), batch_size=2, seed=4, worker_type="thread")
    again = fabric._update_dataloader(loader, sampler=[5, 6, 7])
    assert type(again) is NeighborLoader and again.seed == 4
    assert [b.input_id.tolist() for b in again] == [[5, 6], [7]]


def test_a_batch_made_twice_is_the_same() -> None:
    loader = NeighborLoader(graphs.hostile(), [3, 2], seed=2)
    assert_same(loader([1, 2, 3]), loader([1, 2, 3]))
