"""Batches of our loaders: no sorting, PyG's numbers, the same accuracy."""

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import nn
from torch_geometric.nn import HeteroConv, to_hetero
from torch_geometric.utils import trim_to_layer

import pyg_scale.nn
from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.nn import GATConv, GATv2Conv, GCNConv, GraphConv, SAGEConv, accelerate, fallbacks
from pyg_scale.ops import adjacency, csc
from pyg_scale.testing import graphs
from tests.nn.oracle import assert_equal, distance


@pytest.fixture(scope="module")
def batch():
    data = planted_communities(2_000, 30_000, num_classes=4, num_features=8, seed=1)
    loader = NeighborLoader(data, [10, 5], input_nodes=data.train_mask, batch_size=64, seed=2)
    return next(iter(loader))


@pytest.fixture(scope="module")
def pages(data_dir):
    """A real graph, its features projected to 32 numbers, for time's sake."""
    data = load(data_dir / "facebook_pages.npz")
    generator = torch.Generator().manual_seed(0)
    project = torch.randn(data.num_features, 32, generator=generator) / 8
    x = data.x
    data.x = x.float() @ project if not x.is_sparse else torch.sparse.mm(x.float(), project)
    return data


@pytest.mark.parametrize("conv", [GCNConv, SAGEConv, GraphConv, GATConv, GATv2Conv])
def test_batches(batch, conv):
    for out in (4, 20):
        assert_equal(conv, lambda cls, out=out: cls(8, out), (batch.x.double(), batch.edge_index))


@pytest.mark.parametrize("conv", [SAGEConv, GraphConv])
def test_nodes_that_nobody_reaches(batch, conv):
    """The last nodes of a block have no in-edges; whoever listens to a module gets all rows."""
    arguments = (batch.x.double(), batch.edge_index)
    assert batch.edge_index[1].max() < 0.5 * batch.num_nodes
    for kwargs in ({"bias": False}, {"aggr": "max"}):
        assert_equal(conv, lambda cls, kwargs=kwargs: cls(8, 5, **kwargs), arguments)
    layer = conv(8, 5).double()
    first, root = list(layer.children())[-2:]
    expected = layer(*arguments)
    seen = []
    root.register_forward_hook(lambda module, args, out: seen.append((out, out.clone())))
    assert distance(layer(*arguments), expected) < 1e-12
    assert torch.equal(*seen[0])  # what was handed out does not change
    first.register_forward_hook(lambda module, args, out: seen.append(out))
    assert distance(layer(*arguments), expected) < 1e-12
    assert seen[1].size(0) == batch.num_nodes or seen[2].size(0) == batch.num_nodes
    frozen = conv(8, 5).double().requires_grad_(False)
    frozen.get_parameter(next(name for name, _ in frozen.named_parameters())).requires_grad_()
    frozen(*arguments).sum().backward()


def test_sage_on_blocks_without_a_root(batch):
    arguments = (batch.x.double(), batch.edge_index)
    assert_equal(SAGEConv, lambda cls: cls(8, 5, root_weight=False), arguments)
    assert_equal(SAGEConv, lambda cls: cls(8, 5, root_weight=False, bias=False), arguments)


def test_nothing_is_sorted(batch, monkeypatch):
    """The pointers come from the sampler; another layer finds the same adjacency."""

    def refuse(*args, **kwargs):
        raise AssertionError("grouped again")

    made = []
    init = adjacency.Adjacency.__init__
    monkeypatch.setattr(
        adjacency.Adjacency,
        "__init__",
        lambda self, *args, **kwargs: (made.append(1), init(self, *args, **kwargs))[0],
    )
    for module in (csc, adjacency):
        monkeypatch.setattr(module, "build_csc", refuse)
    monkeypatch.setattr(torch, "argsort", refuse)
    monkeypatch.setattr(torch, "sort", refuse)
    again = batch.clone()  # other tensors: their pointers are computed, edges are sorted still
    for edge_index in (batch.edge_index, again.edge_index):
        made.clear()
        for layer in (SAGEConv(8, 8), SAGEConv(8, 8), GraphConv(8, 8)):
            with torch.no_grad():
                layer(batch.x, edge_index)
        assert len(made) <= 2  # the block, and the block without nodes that nobody reaches


def test_trimmed_layers(batch):
    """What trim_to_layer cuts off a batch is a block as well."""
    torch.manual_seed(0)
    ours = nn.ModuleList([SAGEConv(8, 16), SAGEConv(16, 4)])
    theirs = nn.ModuleList([SAGEConv.replaces(8, 16), SAGEConv.replaces(16, 4)])
    theirs.load_state_dict(ours.state_dict())
    results = []
    for layers in (theirs, ours):
        x, edge_index = batch.x, batch.edge_index
        for i, layer in enumerate(layers):
            x, edge_index, _ = trim_to_layer(
                i, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index
            )
            x = layer(x, edge_index)
        results.append(x[: batch.batch_size])
    assert distance(results[1], results[0]) < 1e-5
    assert not fallbacks(ours)


def test_bipartite_blocks_of_a_real_graph(pages):
    loader = NeighborLoader(pages, [5, 5], batch_size=100, seed=1, input_nodes=torch.arange(500))
    batch = next(iter(loader))
    num_dst = sum(batch.num_sampled_nodes[:-1])
    src = batch.x[:, :16].double()
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(batch.edge_index.size(1), dtype=torch.float64, generator=generator)
    for conv in (SAGEConv, GATConv, GATv2Conv):
        arguments = ((src, src[:num_dst]), batch.edge_index)
        assert_equal(conv, lambda cls: cls((16, 16), 8), arguments)
    assert_equal(
        GraphConv, lambda cls: cls(16, 8), ((src, src[:num_dst]), batch.edge_index, weight)
    )


# Heterogeneous #################################################################################


class Two(nn.Module):
    def __init__(self, library):
        super().__init__()
        self.conv1 = library.SAGEConv((-1, -1), 16)
        self.conv2 = library.GATConv((-1, -1), 8, add_self_loops=False, heads=2)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def hetero_batch():
    data = graphs.hetero()
    del data["ghost"], data["ghost", "haunts", "ghost"]
    for store in data.node_stores:
        store.x = store.x.double()
    loader = NeighborLoader(data, [4, 4], input_nodes="item", batch_size=6, seed=3)
    return next(iter(loader))


@pytest.mark.filterwarnings("ignore:There exist node types")
def test_to_hetero_and_back():
    batch = hetero_batch()
    torch.manual_seed(1)
    model = to_hetero(Two(torch_geometric.nn).double(), batch.metadata())
    with torch.no_grad():
        model(batch.x_dict, batch.edge_index_dict)  # lazy channels
    expected = model(batch.x_dict, batch.edge_index_dict)
    report = accelerate(model)
    assert report.num_switched == len(report.layers) == 2 * len(batch.edge_types)
    out = model(batch.x_dict, batch.edge_index_dict)
    assert not report.fallbacks()
    report.restore()
    for found in (out, model(batch.x_dict, batch.edge_index_dict)):
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert (value is None and found[name] is None) or distance(found[name], value) < 1e-11


@pytest.mark.filterwarnings("ignore:There exist node types")
def test_to_hetero_of_ours():
    batch = hetero_batch()
    model = to_hetero(Two(pyg_scale.nn).double(), batch.metadata())
    out = model(batch.x_dict, batch.edge_index_dict)
    theirs = to_hetero(Two(torch_geometric.nn).double(), batch.metadata())
    theirs(batch.x_dict, batch.edge_index_dict)
    theirs.load_state_dict(model.state_dict())
    for name, value in theirs(batch.x_dict, batch.edge_index_dict).items():
        assert value is None or distance(out[name], value) < 1e-11


@pytest.mark.filterwarnings("ignore:There exist node types")
def test_hetero_conv():
    batch = hetero_batch()
    torch.manual_seed(1)
    kinds = (SAGEConv, GraphConv, GATConv, GATv2Conv)

    def layer(i):
        cls = kinds[i % 4].replaces
        return cls((4, 4), 8, **({"add_self_loops": False} if i % 4 > 1 else {}))

    model = HeteroConv({t: layer(i) for i, t in enumerate(batch.edge_types)}).double()
    expected = model(batch.x_dict, batch.edge_index_dict)
    report = accelerate(model)
    out = model(batch.x_dict, batch.edge_index_dict)
    assert report.num_switched == len(batch.edge_types)
    assert not report.fallbacks()
    for name, value in expected.items():
        assert distance(out[name], value) < 1e-11


# Training ######################################################################################


@pytest.mark.parametrize("name", ["SAGEConv", "GATConv"])
def test_the_same_accuracy(pages, name):
    """A model that is trained with the fused layers is as good as one that is not."""
    data, classes = pages, int(pages.y.max()) + 1
    order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0))
    train, test = order[:2_500], order[-4_000:]
    accuracy = []
    for fused in (False, True):
        torch.manual_seed(3)
        cls = getattr(torch_geometric.nn, name)
        model = nn.ModuleList([cls(32, 16), cls(16, classes)])
        report = accelerate(model) if fused else None
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = NeighborLoader(
            data, [5, 5], input_nodes=train, batch_size=500, shuffle=True, seed=4
        )
        for _ in range(3):
            for batch in loader:
                optimizer.zero_grad()
                h = model[0](batch.x, batch.edge_index).relu()
                h = model[1](h, batch.edge_index)[: batch.batch_size]
                F.cross_entropy(h, batch.y[: batch.batch_size]).backward()
                optimizer.step()
        with torch.no_grad():
            h = model[1](model[0](data.x, data.edge_index).relu(), data.edge_index)
        accuracy.append(float((h[test].argmax(1) == data.y[test]).float().mean()))
        assert report is None or not report.fallbacks()
    assert accuracy[0] > 0.5
    assert abs(accuracy[1] - accuracy[0]) < 0.03
