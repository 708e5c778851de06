"""A lazy x of stores with fewer bytes, and of caches: the bits of training with x gathered."""

import copy

import pytest
import torch
from torch_geometric.testing import MyFeatureStore

import pyg_scale
from pyg_scale import nn
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.nn import fallbacks
from pyg_scale.ops.lazy_rows import LazyRows
from pyg_scale.store import Cached, Disk, Mmap, Quantized

CHANNELS = 12


@pytest.fixture(scope="module")
def data():
    return planted_communities(400, 4_000, num_classes=3, num_features=CHANNELS)


def batches(data, **options):
    return NeighborLoader(data, [6, 3], batch_size=64, seed=3, shuffle=True, **options)


def pair(batch):
    return batch.x, batch.x[: sum(batch.num_sampled_nodes[:2])]


def filled(store, x):
    store.put_tensor(x, group_name=None, attr_name="x", index=None)
    return store


def on_disk(data, tmp_path, **options):
    pyg_scale.save(data, tmp_path / "graph")
    return Disk(tmp_path / "graph", attributes=["x"], **options)


STORES = {
    "int8": lambda data, path: filled(Quantized("memory"), data.x),
    "int8, columns": lambda data, path: filled(Quantized("memory", axis="column"), data.x),
    "fp16": lambda data, path: filled(Quantized("memory", "fp16"), data.x),
    "bf16": lambda data, path: filled(Quantized("memory", "bf16"), data.x),
    "int8, mapped": lambda data, path: filled(Quantized(Mmap(path / "x")), data.x),
    "cached": lambda data, path: Cached(filled(MyFeatureStore(), data.x), "4kB"),
    "cached, sieve": lambda data, path: Cached(filled(MyFeatureStore(), data.x), "4kB", "sieve"),
    "all cached": lambda data, path: Cached(filled(MyFeatureStore(), data.x), "1MB"),
    "int8, cached": lambda data, path: filled(
        Quantized(Cached(MyFeatureStore(), "4kB", "sieve")), data.x
    ),
    "decoded, cached": lambda data, path: Cached(
        filled(Quantized(MyFeatureStore()), data.x), "4kB"
    ),
    "disk": lambda data, path: on_disk(data, path, cache="4kB"),
    "disk, no look-ahead": lambda data, path: on_disk(data, path, cache="4kB", look_ahead=0),
}
LAYERS = {
    "sage": lambda: nn.SAGEConv(CHANNELS, 32),
    "sage, max": lambda: nn.SAGEConv(CHANNELS, 32, aggr="max"),
    "sage, lists": lambda: nn.SAGEConv(CHANNELS, 32, aggr=["mean", "min"]),
    "graph": lambda: nn.GraphConv(CHANNELS, 32),
    "gin": lambda: nn.GINConv(torch.nn.Linear(CHANNELS, 32)),
}
KINDS = ["int8", "int8, columns", "fp16", "bf16", "cached", "int8, cached"]


def stepped(layer, x, edge_index, *weights):
    out = layer(x, edge_index, *weights)
    wanted = [*layer.parameters(), *(w for w in weights if w.requires_grad)]
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_has_the_same_bits_and_leaves_x_unread(kind, name, data, tmp_path):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    store = STORES[kind](data, tmp_path)
    gathered = batches(data, feature_store=STORES[kind](data, tmp_path / "usual"))
    for usual, lazy in zip(gathered, batches(data, lazy_x=True, feature_store=store), strict=True):
        assert isinstance(lazy.x, LazyRows)
        expected = stepped(layer, pair(usual), usual.edge_index)
        found = stepped(layer, pair(lazy), lazy.edge_index)
        assert all(map(torch.equal, found, expected))
        assert lazy.x.unread() is not None
        assert torch.equal(lazy.x, usual.x)
    assert not fallbacks(layer)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", STORES)
def test_an_epoch_of_training_has_the_same_bits(kind, workers, data, tmp_path):
    trained = []
    for lazy in (False, True):
        torch.manual_seed(0)
        first, second = nn.SAGEConv(CHANNELS, 32), nn.SAGEConv(32, 3)
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        store = STORES[kind](data, tmp_path / str(lazy))
        options = {"num_workers": 2, "worker_type": "thread"} if workers else {}
        loader = batches(data, lazy_x=lazy, feature_store=store, **options)
        for batch in [*loader, *loader]:  # all are held at once
            hidden = first(pair(batch), batch.edge_index).relu()
            inner = batch.edge_index[:, : batch.num_sampled_edges[0]]
            out = second((hidden, hidden[: batch.batch_size]), inner)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
        trained.append([each.detach() for each in parameters])
        counts = loader.stats()["total"]["fetch"]
        assert (counts["lent_rows"] > 0) == lazy
    assert all(map(torch.equal, *trained))


def test_layers_are_those_of_float64(data):
    x = data.x.double()
    store = filled(Quantized("memory"), x)
    bound = store.error_bound("x").max()
    whole = copy.copy(data)
    whole.x = x
    layer = nn.SAGEConv(CHANNELS, 16).double()
    for usual, lazy in zip(
        batches(whole), batches(data, lazy_x=True, feature_store=store), strict=True
    ):
        out, found = (layer(pair(b), b.edge_index) for b in (usual, lazy))
        largest = bound * sum(
            w.abs().sum(1).max() for w in (layer.lin_l.weight, layer.lin_r.weight)
        )
        assert lazy.x.unread() is not None and (out - found).abs().max() <= largest


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_edges_and_second_derivatives(kind, data, tmp_path):
    store = STORES[kind](data, tmp_path)
    usual, lazy = (
        next(iter(batches(data, lazy_x=lazy, feature_store=store))) for lazy in (False, True)
    )
    graph, sage = nn.GraphConv(CHANNELS, 32), nn.SAGEConv(CHANNELS, 32)
    weight = torch.rand(usual.edge_index.size(1))
    found = [stepped(graph, pair(b), b.edge_index, weight) for b in (usual, lazy)]
    assert all(map(torch.equal, *found)) and lazy.x.unread() is not None
    twice = []
    for b in (usual, lazy):
        loss = sage(pair(b), b.edge_index).pow(3).sum()
        (first,) = torch.autograd.grad(loss, sage.lin_l.weight, create_graph=True)
        twice.append(torch.autograd.grad(first.square().sum(), sage.lin_l.weight)[0])
    assert torch.allclose(*twice, rtol=1e-4) and lazy.x.unread() is not None
    found = [stepped(graph, pair(b), b.edge_index, weight.requires_grad_()) for b in (usual, lazy)]
    assert all(map(torch.equal, *found))  # the gradient of weights takes the rows themselves


def test_quantised_features_that_were_changed_since_are_refused(data):
    inner = filled(Quantized("memory"), data.x).store
    store = Quantized(inner)
    batch = next(iter(batches(data, lazy_x=True, feature_store=store)))
    (name,) = (attr.attr_name for attr in inner.get_all_tensor_attrs())
    inner.get_tensor(None, name, None).zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        nn.SAGEConv(CHANNELS, 32)(pair(batch), batch.edge_index)
    store.put_tensor(-data.x, group_name=None, attr_name="x", index=None)  # replaces it
    batch = next(iter(batches(data, lazy_x=True, feature_store=store)))
    store.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    assert torch.allclose(batch.x, -data.x[batch.n_id], atol=0.05)


def test_statistics_of_a_cache(data):
    store = Cached(filled(MyFeatureStore(), data.x), "1MB")
    loader = batches(data, lazy_x=True, feature_store=store)
    rows = [sum(batch.num_nodes for batch in loader) for _ in range(2)]
    counts = loader.stats()["total"]["fetch"]
    assert counts["rows"] == sum(rows) * 6  # of x, y and four more
    assert counts["lent_rows"] == counts["cache_hits"] == sum(rows) - store.stats()["misses"]
    assert store.stats()["misses"] <= data.num_nodes and store.stats()["late"] == 0
