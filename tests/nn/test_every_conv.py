"""accelerate() on every layer of PyG: results and gradients are PyG's, in float64."""

import copy
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import aggr

from pyg_scale.nn import FusedConv, accelerate, chunks, fallbacks
from pyg_scale.testing import graphs
from pyg_scale.testing.layers import LAYERS, OTHERS
from pyg_scale.testing.own_layers import OWN
from tests.nn.oracle import distance, run

CHANNELS = 8


@pytest.fixture(scope="module")
def graph():
    data = graphs.hostile()
    x = torch.randn(100, CHANNELS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, data.edge_index


def compared(make, arguments, tolerance=1e-11):
    torch.manual_seed(4)
    theirs = make().double()
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    torch.manual_seed(5)
    out, grads = run(theirs, arguments, {})
    torch.manual_seed(5)
    out_ours, grads_ours = run(ours, arguments, {})
    assert distance(out_ours, out) < tolerance
    floor = max(float(g.norm()) for g in grads if g is not None) / 10
    for ours_, theirs_ in zip(grads_ours, grads, strict=True):
        assert distance(ours_, theirs_, floor) < tolerance
    return ours, report


def test_every_name_is_known():
    assert set(LAYERS) | set(OTHERS) == set(pyg.conv.__all__)
    assert not set(LAYERS) & set(OTHERS)


ROWS = {"DNAConv", "NNConv", "EdgeConv", "PointTransformerConv"}
"""The layers with functions of whole rows in their messages: each edge needs one."""


def test_every_name_has_a_row_in_the_documentation():
    page = Path(__file__).parents[2].joinpath("docs", "convs.md").read_text(encoding="utf-8")
    assert not [name for name in pyg.conv.__all__ if f"| `{name}` | " not in page]


@pytest.mark.parametrize("name", LAYERS)
def test_equals_pyg(name, graph):
    example = LAYERS[name]
    ours, report = compared(lambda: example.make(CHANNELS), example.inputs(*graph))
    assert report.layers and all(layer.switched for layer in report.layers)
    found = {reason for reasons in fallbacks(ours).values() for reason in reasons}
    assert all(reason.startswith("rows of features gathered for") for reason in found), found
    assert bool(found) == (name in ROWS)


@pytest.mark.parametrize("name", OWN)
def test_layers_of_ones_own_need_no_rows(name, graph):
    example = OWN[name]
    ours, report = compared(lambda: example.make(CHANNELS), example.inputs(*graph))
    assert all(layer.switched for layer in report.layers)
    assert not fallbacks(ours)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_equals_pyg_in_chunks(name, graph, monkeypatch):
    monkeypatch.setattr(chunks, "ELEMENTS", 300)
    monkeypatch.setattr(chunks, "LEAST", 4)
    example = LAYERS[name]
    ours, _ = compared(lambda: example.make(CHANNELS), example.inputs(*graph))
    assert not fallbacks(ours)


AGGREGATIONS = {
    "eg, several": lambda: pyg.EGConv(CHANNELS, 8, ["sum", "mean", "min", "max", "var"], 4, 2),
    "eg, symmetric": lambda: pyg.EGConv(CHANNELS, 8, ["std", "symnorm"], 4, add_self_loops=False),
    "eg, one": lambda: pyg.EGConv(CHANNELS, 8, ["std"], 4),
    "fast rgcn, sum": lambda: pyg.FastRGCNConv(CHANNELS, 5, 3, aggr="sum"),
    "fast rgcn, bases": lambda: pyg.FastRGCNConv(CHANNELS, 5, 3, num_bases=2),
    "fast rgcn, blocks": lambda: pyg.FastRGCNConv(CHANNELS, 8, 3, num_blocks=2),
}


SOFTMAX = {
    "of one scale": lambda: aggr.SoftmaxAggregation(2.5),
    "of a learned scale": lambda: aggr.SoftmaxAggregation(0.5, learn=True),
    "of learned scales": lambda: aggr.SoftmaxAggregation(0.5, learn=True, channels=CHANNELS),
    "without its gradient": lambda: aggr.SoftmaxAggregation(2.5, semi_grad=True),
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_on_few_edges(name, graph, monkeypatch):
    monkeypatch.setattr(FusedConv, "min_work", None)
    x, edges = graph
    of_edges = torch.randn(edges.size(1), CHANNELS, dtype=x.dtype)
    given = 300 * x, edges, of_edges  # exp() of such messages is infinite
    ours, _ = compared(lambda: pyg.GENConv(CHANNELS, CHANNELS, SOFTMAX[name](), norm=None), given)
    assert not fallbacks(ours)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations_of_layers_on_few_edges(name, graph, monkeypatch):
    """Edges are counted once, where PyG counts them for every mean or by every relation."""
    monkeypatch.setattr(FusedConv, "min_work", None)
    x, edges = graph
    given = (x, edges, torch.arange(edges.size(1)) % 3) if "rgcn" in name else (x, edges)
    ours, _ = compared(AGGREGATIONS[name], given)
    assert not fallbacks(ours)
    if name in ("fast rgcn, bases", "fast rgcn, blocks"):
        with pytest.raises(RuntimeError, match="out of bounds"):  # PyG's
            ours(x, edges, given[2] - 1)
