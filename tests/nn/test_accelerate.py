"""accelerate(): in place, reversible, and it says what it did."""

import json

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import pyg_scale
from pyg_scale import hookimpl, plugins
from pyg_scale.errors import UnknownPluginError
from pyg_scale.nn import FusedConv, GCNConv, SAGEConv, accelerate, restore
from pyg_scale.testing import graphs
from tests.nn.oracle import distance


@pytest.fixture
def edge_index():
    return graphs.hostile().edge_index


@pytest.fixture
def x():
    return torch.randn(100, 6, generator=torch.Generator().manual_seed(1))


class Mine(pyg.SAGEConv):
    """A class of the user."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = pyg.GCNConv(6, 8)
        self.body = pyg.Sequential(
            "x, edge_index", [(pyg.SAGEConv(8, 8), "x, edge_index -> x"), nn.ReLU()]
        )
        self.mine = Mine(8, 8)
        self.cheb = pyg.ChebConv(8, 4, K=2)

    def forward(self, x, edge_index):
        x = self.body(self.first(x, edge_index).relu(), edge_index)
        return self.cheb(self.mine(x, edge_index), edge_index)


def test_only_classes_change(x, edge_index):
    model = Model()
    called = []
    model.first.register_forward_hook(lambda *args: called.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: id(value) for name, value in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(x, edge_index)
    attributes = set(vars(model.first))
    report = accelerate(model)
    assert type(model.first) is GCNConv
    assert {name: id(value) for name, value in model.named_parameters()} == before
    assert list(model.state_dict()) == list(state)
    assert set(vars(model.first)) == attributes
    out = model(x, edge_index)
    assert distance(out, expected) < 1e-5
    assert len(called) == 2
    out.sum().backward()
    optimizer.step()
    assert not torch.equal(model.first.lin.weight, state["first.lin.weight"])
    report.restore()
    report.restore()
    assert type(model.first) is pyg.GCNConv
    again = model(x, edge_index)
    assert accelerate(model).num_switched == 4
    assert distance(model(x, edge_index), again) < 1e-5


def test_the_report(x, edge_index):
    model = Model()
    report = accelerate(model)
    found = {layer.name: layer for layer in report.layers}
    names = [
        name for name, module in model.named_modules() if isinstance(module, pyg.MessagePassing)
    ]
    assert list(found) == names
    assert found["first"].switched and found["first"].type == "GCNConv"
    assert not found["first"].traced
    for name in ("mine", "cheb"):
        assert found[name].switched and found[name].traced and not found[name].reason
    model.first.explain = False
    handle = model.first.register_message_forward_hook(lambda *args: None)
    model(x, edge_index)
    assert report.fallbacks() == {"first": {"message hook": 1}}
    text = str(report)
    assert "message hook (1 calls)" in text and "cheb" in text
    assert len({line.find("fused") for line in text.splitlines()[:1]}) == 1
    assert json.loads(json.dumps(report.to_dict()))["num_switched"] == 4
    handle.remove()
    assert str(accelerate(nn.Linear(2, 2))) == "no message passing layers"


def test_layers_as_they_are_when_switched(edge_index):
    layer = pyg.SAGEConv(6, 4, aggr="mean", decomposed_layers=2)
    (found,) = accelerate(layer).layers
    assert found.switched and found.reason == "decomposed_layers"
    (found,) = accelerate(layer).layers
    assert found.reason == "has a fused path already"


def test_explained_layers_stay_so(x, edge_index):
    """Whatever is switched when: the mask of edges counts, on both classes."""
    for cls in (pyg.SAGEConv, pyg.GraphConv, pyg.GCNConv):
        for _ in range(2):
            layer = cls(6, 4)
            layer.explain = True
            layer._edge_mask, layer._apply_sigmoid = torch.zeros(edge_index.size(1)), False
            layer._loop_mask = edge_index[0] != edge_index[1]
            expected = layer(x, edge_index)
            report = accelerate(layer)
            assert distance(layer(x, edge_index), expected) < 1e-6
            layer.explain = False
            plain = layer(x, edge_index)
            report.restore()
            assert distance(layer(x, edge_index), plain) < 1e-5
            assert not torch.allclose(plain, expected)


def test_restore_of_a_model_of_ours(x, edge_index):
    model = nn.ModuleList([SAGEConv(6, 4), GCNConv(4, 4)])
    expected = model[1](model[0](x, edge_index), edge_index)
    assert restore(model) == 2
    assert [type(layer) for layer in model] == [pyg.SAGEConv, pyg.GCNConv]
    assert distance(model[1](model[0](x, edge_index), edge_index), expected) < 1e-5


def test_models_of_pyg(x, edge_index):
    for cls in (pyg.GraphSAGE, pyg.GCN, pyg.GAT, pyg.GIN):
        torch.manual_seed(0)
        model = cls(6, 8, num_layers=2, out_channels=3).eval()
        expected = model(x, edge_index)
        report = accelerate(model)
        assert report.num_switched == 2
        assert distance(model(x, edge_index), expected) < 1e-5
        assert not report.fallbacks()


def test_what_cannot_be_accelerated():
    with pytest.raises(TypeError, match="Module"):
        accelerate([pyg.GCNConv(2, 2)])
    with pytest.raises(TypeError, match="compiled"):
        accelerate(torch.compile(pyg.GCNConv(2, 2)))
    with pytest.raises(TypeError, match="not a subclass of"):
        accelerate(pyg.GCNConv(2, 2), [pyg.GCNConv])
    with pytest.raises(UnknownPluginError):
        accelerate(pyg.GCNConv(2, 2), ["nothing"])


class Other(FusedConv, pyg.GCNConv):
    """Another replacement of a class that we replace."""

    replaces = pyg.GCNConv

    def forward(self, x, edge_index, edge_weight=None):
        return self.run(x, edge_index, edge_weight)

    def fused(self, x, edge_index, edge_weight=None):
        return self.lin(x) * 0 + 7


def test_plugins_and_preferences(x, edge_index):
    class Plugin:
        @hookimpl
        def pyg_scale_convs():
            return {"other": Other, "wrong": pyg.GCNConv, "gone": "pyg_scale.nn:Nothing"}

    plugins.register(Plugin, "somebody")
    try:
        layer = pyg.GCNConv(6, 4)
        report = accelerate(layer)
        assert type(layer) is GCNConv  # built in comes first
        assert len(report.failures) == 2
        assert "could not be loaded" in str(report)
        for convs in (["somebody:other"], "other", [Other], Other):
            report.restore()
            report = accelerate(layer, convs)
            assert type(layer) is Other
            assert (layer(x, edge_index) == 7).all()
    finally:
        plugins.unregister("somebody")


def test_every_name_of_pyg_can_be_imported():
    for ours, theirs in ((pyg_scale.nn, pyg), (pyg_scale.nn.conv, pyg.conv)):
        for name in dir(theirs):
            if not name.startswith("_"):
                assert hasattr(ours, name), name
        assert set(theirs.__all__) <= set(ours.__all__)
    from pyg_scale.nn import GAT, MessagePassing, global_mean_pool
    from pyg_scale.nn.conv import ChebConv

    assert (GAT, MessagePassing, ChebConv) == (pyg.GAT, pyg.MessagePassing, pyg.ChebConv)
    assert global_mean_pool is pyg.global_mean_pool
    with pytest.raises(AttributeError):
        pyg_scale.nn.Nothing  # noqa: B018
