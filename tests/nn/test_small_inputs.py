"""Calls that are too small to gain anything are PyG's, and are counted."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg

from pyg_scale import nn
from pyg_scale.nn import FusedConv, accelerate, fallbacks, restore
from pyg_scale.nn.check import convs
from pyg_scale.ops import colptr
from tests.nn.test_devices import LAYERS

SMALL = {"": {"small input": 1}}


@pytest.fixture(autouse=True)
def as_measured(fused, monkeypatch):
    """Here, small graphs are left to PyG."""
    monkeypatch.setattr(FusedConv, "min_work", None)


def edges(num_edges, seed=0):
    return torch.randint(60, (2, num_edges), generator=torch.Generator().manual_seed(seed))


def features(channels=16):
    return torch.randn(60, channels, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", LAYERS)
def test_small_graphs_take_the_path_of_pyg(name, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    torch.manual_seed(0)
    layer, x, edge_index = LAYERS[name]().eval(), features(6), edges(300)
    more = (torch.arange(300) % 3,) if name == "rgcn" else ()
    out = layer(x, edge_index, *more)
    assert fallbacks(layer) == SMALL
    assert torch.equal(out, type(layer).replaces.forward(layer, x, edge_index, *more))
    layer.min_work = 0
    fused = layer(x, edge_index, *more)
    assert fallbacks(layer) == SMALL
    torch.testing.assert_close(fused, out, rtol=1e-4, atol=1e-5)


def test_the_border_is_edges_times_channels(monkeypatch):
    monkeypatch.setattr(nn.SAGEConv, "crossover", (1000, 520))
    layer, x = nn.SAGEConv(16, 4), features()

    def left_to_pyg(edge_index, x=x):
        nn.forget_fallbacks()
        layer(x, edge_index)
        return fallbacks(layer) == SMALL

    assert left_to_pyg(edges(99)) and not left_to_pyg(edges(100))  # 10 of 16 channels count
    assert left_to_pyg((edges(100)), (x, x)) is False
    for size, small in ((39, True), (40, False)):  # 13 of 16, in a batch
        batch = edges(size)
        batch = batch[:, batch[1].argsort()].contiguous()
        assert left_to_pyg(batch)
        count = torch.bincount(batch[1], minlength=60)
        colptr.remember(batch, torch.cat([count.new_zeros(1), count.cumsum(0)]))
        assert left_to_pyg(batch) is small
    layer.min_work = 100
    assert left_to_pyg(edges(9)) and not left_to_pyg(edges(10))
    monkeypatch.setattr(nn.SAGEConv, "crossover", (0, 0))
    del layer.min_work
    assert not left_to_pyg(edges(1), x) and not left_to_pyg(edges(0), x)


def test_earlier_calls_do_not_count(monkeypatch):
    """Or a run that is resumed would go on with other bits."""
    layer, other, edge_index = nn.GCNConv(16, 4), nn.GCNConv(16, 4), edges(300)
    other.min_work = 0
    first = layer(features(), edge_index)
    other(features(), edge_index)
    assert torch.equal(layer(features(), edge_index), first)
    assert fallbacks(layer) == {"": {"small input": 2}} and not fallbacks(other)


def test_edges_whose_gradients_pyg_gets_wrong_are_not_left_to_it():
    layer = nn.SAGEConv(16, 4)
    layer(features(), edges(300).int())
    assert not fallbacks(layer)


def test_a_model_says_from_where_on_it_is_fused():
    model = torch.nn.ModuleList([pyg.SAGEConv(16, 4), pyg.GCNConv(16, 4)])
    report = accelerate(model)
    for layer in model:
        layer(features(), edges(300))
    assert report.fallbacks() == {"0": {"small input": 1}, "1": {"small input": 1}}
    assert str(report).count("small input (1 calls)") == 2
    nn.forget_fallbacks()
    report = accelerate(model, min_work=0)
    for layer in copy.deepcopy(model):
        layer(features(), edges(300))
        assert not fallbacks(layer)
    restore(model)
    assert "min_work" not in vars(model[0])
    report = accelerate(model, min_work=0)
    report.restore()
    assert "min_work" not in vars(model[0])
    with pytest.raises(ValueError, match="edges times channels"):
        accelerate(model, min_work=-1)


def test_the_doctor_takes_it_for_no_fault():
    nn.SAGEConv(16, 4)(features(), edges(300))
    check = convs()
    assert check.ok is not False
    assert "SAGEConv: small input" in check.detail
