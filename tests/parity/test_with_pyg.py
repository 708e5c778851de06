"""Our loaders where PyG's are expected: models, samplers, data modules, and PyG's own batches."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.loader as pyg
import torch_geometric.typing
from torch import Tensor
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import ImbalancedSampler
from torch_geometric.nn import HeteroConv, SAGEConv, to_hetero
from torch_geometric.nn.models import GraphSAGE
from torch_geometric.utils import trim_to_layer

import pyg_scale.loader
from pyg_scale import compat
from pyg_scale.datasets import read_npz
from pyg_scale.loader import HGTLoader, LinkNeighborLoader, NeighborLoader, ZipLoader
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same, contents

pytestmark = pytest.mark.matrix(2)

OURS = [n for n in pyg.__all__ if getattr(pyg_scale.loader, n) is not getattr(pyg, n)]
LINK = ("paper", "to", "term")


@pytest.fixture(scope="module")
def pages(data_dir: Path) -> Data:
    data = read_npz(data_dir / "facebook_pages.npz")
    data.x = data.x[:, :16].contiguous()
    return data


@pytest.fixture(scope="module")
def dblp(data_dir: Path) -> HeteroData:
    data = read_npz(data_dir / "dblp.npz")
    generator = torch.Generator().manual_seed(0)
    for node_type in data.node_types:
        data[node_type].x = torch.randn(data[node_type].num_nodes, 8, generator=generator)
    return data


# Classes ###################################################################################


def test_ours_are_these() -> None:
    assert set(OURS) == {
        *("NodeLoader", "NeighborLoader", "LinkLoader", "LinkNeighborLoader", "HGTLoader"),
        *("ZipLoader", "ClusterData", "ClusterLoader", "ShaDowKHopSampler", "RandomNodeLoader"),
        "TemporalDataLoader",
        *("GraphSAINTNodeSampler", "GraphSAINTEdgeSampler", "GraphSAINTRandomWalkSampler"),
    }


@pytest.mark.parametrize("name", OURS)
def test_pygs_parameters_come_first(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (pyg_scale.loader, pyg))
    named = [p for p in theirs.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    first = list(ours.values())[: len(named)]
    assert [(p.name, p.default) for p in first] == [(p.name, p.default) for p in named]
    rest = {p.kind for p in list(ours.values())[len(named) :]}
    assert rest <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


def test_classes_and_names() -> None:
    data, hetero = graphs.hostile(), graphs.hetero()
    loaders = {
        "NeighborLoader": NeighborLoader(data, [2]),
        "LinkNeighborLoader": LinkNeighborLoader(data, [2]),
        "HGTLoader": HGTLoader(hetero, [2], "item"),
    }
    for name, loader in loaders.items():
        assert repr(loader) == str(loader) == f"{name}()"
        assert isinstance(loader, getattr(pyg, name)) and type(loader).__name__ == name
        base = "LinkLoader" if name.startswith("Link") else "NodeLoader"
        for module in (pyg, pyg_scale.loader):
            assert isinstance(loader, getattr(module, base))
            assert isinstance(loader, getattr(module, name))
    pair = [NeighborLoader(data, [2]), NeighborLoader(data, [2])]
    zipped = ZipLoader(pair)
    assert isinstance(zipped, pyg.ZipLoader)
    assert repr(zipped) == "ZipLoader(loaders=[NeighborLoader(), NeighborLoader()])"


# PyG's own loaders on our sampler ##########################################################


@pytest.fixture
def installed() -> Iterator[None]:
    if torch_geometric.typing.WITH_PYG_LIB:
        pytest.skip("pyg-lib is installed: there is nothing to stand in for")
    with compat.install():
        yield


def alike(ours: Any, theirs: Any) -> None:
    """The same attributes, with the same types, dtypes and numbers of dimensions."""
    left, right = contents(ours), contents(theirs)
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert type(value) is type(right[key]), key
        if isinstance(value, Tensor):
            assert (value.dtype, value.dim()) == (right[key].dtype, right[key].dim()), key
            assert value.device == right[key].device, key


@pytest.mark.parametrize(
    "neg_sampling", [None, "binary", "triplet", {"mode": "triplet", "amount": 3}], ids=str
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disjoint": True},
        {"subgraph_type": "bidirectional"},
        {"edge_label_time": torch.full((400,), 20), "time_attr": "time"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_link_batches_are_as_pygs(
    installed: None, options: dict[str, Any], neg_sampling: Any
) -> None:
    data = graphs.hostile()
    links = torch.arange(800).view(2, 400) % 100
    label = torch.arange(400) % 3 if neg_sampling in (None, "binary") else None
    ours, theirs = (
        module.LinkNeighborLoader(
            data, [-1, 3], links, label, neg_sampling=neg_sampling, batch_size=40, **options
        )
        for module in (pyg_scale.loader, pyg)
    )
    for left, right in islice(zip(ours, theirs, strict=True), 4):
        alike(left, right)
        assert torch.equal(left.input_id, right.input_id)
        if label is not None:
            assert torch.equal(left.edge_label, right.edge_label)


@pytest.mark.parametrize("neg_sampling", [None, "binary", "triplet"])
@pytest.mark.parametrize("disjoint", [False, True])
def test_heterogeneous_link_batches_are_as_pygs(
    installed: None, dblp: HeteroData, neg_sampling: str | None, disjoint: bool
) -> None:
    links = LINK, dblp[LINK].edge_index[:, ::100]
    ours, theirs = (
        module.LinkNeighborLoader(
            dblp, [2, 2], links, neg_sampling=neg_sampling, disjoint=disjoint, batch_size=30
        )
        for module in (pyg_scale.loader, pyg)
    )
    for left, right in islice(zip(ours, theirs, strict=True), 2):
        alike(left, right)


@pytest.mark.parametrize("kind", ["item", "user"])
@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"time_attr": "time"}], ids=str)
def test_heterogeneous_batches_are_pygs(
    installed: None, kind: str, options: dict[str, Any]
) -> None:
    data = graphs.hetero()
    ours, theirs = (
        module.NeighborLoader(data, [-1, -1], kind, batch_size=5, **options)
        for module in (pyg_scale.loader, pyg)
    )
    for left, right in zip(ours, theirs, strict=True):
        alike(left, right)
        for node_type in data.node_types:
            assert left[node_type].num_sampled_nodes == right[node_type].num_sampled_nodes
            nodes = [b[node_type].n_id.sort().values for b in (left, right)]
            assert torch.equal(*nodes)


# Models ####################################################################################


def test_inference_of_a_real_graph(pages: Data) -> None:
    torch.manual_seed(0)
    model = GraphSAGE(16, 8, 2, out_channels=4).eval()
    loader = NeighborLoader(pages, [-1], batch_size=4096, num_workers=2)
    found = model.inference(loader)
    assert torch.allclose(found, model(pages.x, pages.edge_index), atol=1e-4)


def test_to_hetero_on_batches(dblp: HeteroData) -> None:
    torch.manual_seed(0)
    model = to_hetero(GraphSAGE(8, 8, 2, out_channels=4), dblp.metadata()).eval()
    with torch.no_grad():
        expected = model(dblp.x_dict, dblp.edge_index_dict)["author"]
        loader = NeighborLoader(dblp, [-1, -1], "author", batch_size=20, shuffle=True)
        for batch in islice(loader, 3):
            found = model(batch.x_dict, batch.edge_index_dict)["author"][:20]
            seeds = batch["author"].n_id[:20]
            assert torch.allclose(found, expected[seeds], atol=1e-4)


def test_trimming_of_heterogeneous_layers(dblp: HeteroData) -> None:
    torch.manual_seed(0)
    convs = [HeteroConv({t: SAGEConv(8, 8) for t in dblp.edge_types}) for _ in range(2)]
    batch = next(iter(NeighborLoader(dblp, [6, 4], "paper", batch_size=10)))
    outs = []
    for trim in (False, True):
        x, edge_index = batch.x_dict, batch.edge_index_dict
        for i, conv in enumerate(convs):
            if trim:
                x, edge_index, _ = trim_to_layer(
                    i, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict, x, edge_index
                )
            x = conv(x, edge_index)
        outs.append(x["paper"][:10])
    assert torch.allclose(*outs, atol=1e-5)


def test_adj_t_of_a_real_graph(pages: Data) -> None:
    n = pages.num_nodes
    adj_t = torch.sparse_coo_tensor(pages.edge_index.flip(0), torch.ones(pages.num_edges), (n, n))
    sparse = Data(x=pages.x, adj_t=adj_t.to_sparse_csr())
    torch.manual_seed(0)
    model = GraphSAGE(16, 8, 2, out_channels=4, aggr="sum").eval()
    expected = model(pages.x, pages.edge_index)
    for batch in islice(NeighborLoader(sparse, [-1, -1], batch_size=25), 3):
        assert "edge_index" not in batch and batch.adj_t.layout == torch.sparse_csr
        found = model(batch.x, batch.adj_t)[: batch.batch_size]
        assert torch.allclose(found, expected[batch.input_id], atol=1e-3, rtol=1e-4)


# Which seeds ###############################################################################


@pytest.mark.parametrize("numbers", [[-1, -1], [4, 4]])
def test_repeated_seeds_have_equal_outputs(pages: Data, numbers: list[int]) -> None:
    torch.manual_seed(0)
    model = GraphSAGE(16, 8, 2, out_channels=4).eval()
    expected = model(pages.x, pages.edge_index)
    nodes = torch.arange(60)
    loader = NeighborLoader(
        pages, numbers, nodes, sampler=ImbalancedSampler(pages, nodes, 600), batch_size=200
    )
    for batch in loader:
        seeds = batch.n_id[: batch.batch_size]
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        unique, inverse = seeds.unique(return_inverse=True)
        assert len(unique) < len(seeds)
        if numbers[0] == -1:
            assert torch.allclose(out, expected[seeds], atol=1e-4)
        first = torch.stack([(inverse == i).nonzero()[0, 0] for i in range(len(unique))])
        assert torch.allclose(out, out[first][inverse], atol=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_the_seeds(pages: Data, workers: int) -> None:
    seeds = torch.arange(0, 1001)
    seen = []
    for epoch in range(2):
        for rank in range(2):
            sampler = DistributedSampler(seeds, num_replicas=2, rank=rank, seed=3, drop_last=True)
            loader = NeighborLoader(
                pages, [3], seeds, sampler=sampler, batch_size=100, num_workers=workers
            )
            sampler.set_epoch(epoch)
            seen.append(torch.cat([batch.input_id for batch in loader]))
    for first, second in (seen[:2], seen[2:]):
        assert len(first) == len(second) == 500
        assert torch.cat([first, second]).unique().numel() == 1000
    assert not torch.equal(seen[0], seen[2])


# PyTorch Lightning #########################################################################


@pytest.fixture
def lightning() -> Iterator[Any]:
    environment = dict(os.environ)
    yield pytest.importorskip("pytorch_lightning")
    os.environ.clear()  # Lightning leaves settings behind
    os.environ.update(environment)


@pytest.mark.filterwarnings("ignore")
def test_lightnings_link_data_with_our_sampler(lightning: Any) -> None:
    from torch_geometric.data.lightning import LightningLinkData

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GraphSAGE(6, 8, 2)
            self.seen: list[Tensor] = []

        def training_step(self, batch: Data, number: int) -> Tensor:
            self.seen.append(batch.n_id[batch.edge_label_index[:, batch.edge_label == 1]])
            z = self.model(batch.x, batch.edge_index)
            source, destination = batch.edge_label_index
            score = (z[source] * z[destination]).sum(1)
            return torch.nn.functional.binary_cross_entropy_with_logits(score, batch.edge_label)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    data = graphs.hostile()
    links = data.edge_index[:, :120]
    sampler = LinkNeighborLoader(data, [3, 2]).link_sampler
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        module,
        LightningLinkData(
            data, input_train_edges=links, link_sampler=sampler, neg_sampling="binary",
            batch_size=30, shuffle=False,
        ),
    )  # fmt: skip
    assert len(module.seen) == 4
    given = {tuple(link) for link in links.t().tolist()}
    assert {tuple(link) for seen in module.seen for link in seen.t().tolist()} <= given


def test_a_batch_of_the_same_seed_is_the_same_in_every_loader(pages: Data) -> None:
    """NodeLoader with the sampler of a NeighborLoader is that NeighborLoader."""
    ours = NeighborLoader(pages, [5, 5], batch_size=64, seed=3)
    again = pyg_scale.loader.NodeLoader(pages, ours.node_sampler, batch_size=64, seed=3)
    for left, right in islice(zip(ours, again, strict=True), 3):
        assert_same(left, right)
