"""Messages that change tensors in place: what PyG's rows would be, and nothing changes twice."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing

from pyg_scale.nn import accelerate, chunks, fallbacks
from tests.nn.oracle import Square, distance

NODES, EDGES, CHANNELS = 50, 400, 8


class Layer(MessagePassing):
    """A layer with any function as its message, and with state that the function may change."""

    def __init__(self, function):
        super().__init__(aggr="add")
        self.function, self.calls, self.seen = function, 0, []
        self.register_buffer("mean", torch.zeros(1, CHANNELS).double())
        self.norm = nn.BatchNorm1d(CHANNELS).double()
        self.weight = nn.Parameter(torch.rand(EDGES, 1).double())

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_j, e):
        return self.function(self, x_j, e)


def outcome(layer, grad):
    """Result, gradients, state, and the next random number."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NODES, CHANNELS, generator=generator).double().requires_grad_(grad)
    e = torch.randn(EDGES, CHANNELS, generator=generator).double().requires_grad_(grad)
    edge_index = torch.randint(NODES, (2, EDGES), generator=generator)
    torch.manual_seed(3)
    with torch.set_grad_enabled(grad):
        out = layer(x, edge_index, e)
    found = [out, *layer.buffers(), torch.rand(1), torch.tensor([layer.calls, len(layer.seen)])]
    if grad:
        out.sin().sum().backward()
        found += [x.grad, e.grad, *(each.grad for each in layer.parameters())]
    return found


def compared(function, grad):
    torch.manual_seed(0)
    theirs = Layer(function)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    for mine, right in zip(outcome(ours, grad), outcome(theirs, grad), strict=True):
        assert distance(mine, right) < 1e-10
    return ours


def _running(layer, x_j, e):
    out = torch.tanh(x_j + e - layer.mean)
    with torch.no_grad():
        layer.mean.mul_(0.9).add_(e.mean(0, keepdim=True) + 1)
    return out


def _statistics(layer, x_j, e):
    out = torch.tanh(x_j + e - layer.norm.running_mean)
    return layer.norm(out) + out


def _of_edges(layer, x_j, e):
    e = e * 1
    out = x_j + e
    e[:, 0] = 0
    return out * e


def _put_together(layer, x_j, e):
    both = torch.cat([x_j, e], -1)
    x_j.relu_()
    return F.linear(both, torch.ones(CHANNELS, 2 * CHANNELS).double())


def _by_position(layer, x_j, e):
    out = x_j + e
    before = out.tanh()
    F.relu(out, True)
    return out + before


def _out(layer, x_j, e):
    factor = torch.ones(EDGES, 1).double()
    out = x_j * factor
    torch.mul(factor.detach(), 0, out=factor)
    return out.detach() + x_j


WRITES = {f.__name__: f for f in (_running, _statistics, _of_edges, _put_together, _by_position)}
WRITES["_out"] = _out


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_rows_are_those_of_before(name, grad):
    if name == "_out" and grad:
        pytest.skip("PyG has no gradient either")
    compared(WRITES[name], grad)


def test_an_error_of_autograd_is_that_of_pyg():
    def message(layer, x_j, e):
        factor = torch.ones(EDGES, 1).double()
        out = x_j * factor
        factor.mul_(0)
        return out

    compared(message, False)
    layer = Layer(message)
    accelerate(layer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outcome(layer, True)


def _zero_half(layer, x_j, e):
    x_j.view(-1, 2, CHANNELS // 2)[:, 0] = 0
    return x_j


def _view_is_changed(layer, x_j, e):
    view, twice = x_j.view(-1, 2, CHANNELS // 2), x_j * 2
    x_j.mul_(3)
    return view.reshape(-1, CHANNELS) + twice + e


def _unsqueezed(layer, x_j, e):
    view = (x_j * layer.weight).unsqueeze(1)
    view.mul_(3)
    return view.squeeze(1) + e


def _same_shape(layer, x_j, e):
    out = x_j + e
    out.view(EDGES, CHANNELS)[:, 0] = 3
    return out


def _plus_zero(layer, x_j, e):
    out = x_j + e
    other = out + 0
    other.clamp_(min=0)
    return out


def _times_one(layer, x_j, e):
    other = (x_j + e) * 1.0
    third = other * 1
    third.clamp_(min=0)
    return other + third * 2


VIEWS = {
    f.__name__: f
    for f in (_zero_half, _view_is_changed, _unsqueezed, _same_shape, _plus_zero, _times_one)
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory_and_results_do_not(name, grad):
    compared(VIEWS[name], grad)


KEYWORDS = {
    "rounding": lambda x, e: torch.div(x, 0.5, rounding_mode="floor") * e,
    "axis": lambda x, e: x.sum(axis=-1, keepdim=True) * e,
    "dtype": lambda x, e: torch.sum(x, -1, dtype=torch.float64).view(-1, 1) * e,
    "names": lambda x, e: torch.mul(input=x, other=e) + torch.mul(x, other=2.0),
    "alpha": lambda x, e: torch.add(x, e, alpha=2) - torch.sub(x, e, alpha=3),
    "exponents": lambda x, e: x.abs().pow(torch.arange(8.0).double()) + e,
    "new": lambda x, e: torch.cat([x, e], -1).new_zeros(EDGES, CHANNELS) + x,
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_functions_that_rules_do_not_cover_run_once(name):
    def message(layer, x_j, e):
        layer.mean += 1
        layer.calls += 1
        return KEYWORDS[name](x_j, e) * layer.mean

    ours = compared(message, True)
    assert not any("raised" in why for why in fallbacks(ours).get("", {}))


@pytest.mark.parametrize("cut", [False, True])
def test_what_was_changed_is_undone_before_the_message_runs_again(cut, monkeypatch):
    def message(layer, x_j, e):
        layer.mean += torch.rand(1, CHANNELS).double()
        layer.calls += 1
        layer.seen.append(1)
        return Square.apply(x_j) * layer.mean * F.dropout(e)

    if cut:
        monkeypatch.setattr(chunks, "ELEMENTS", 64)
    ours = compared(message, True)
    assert "features of edges are read with gradients disabled" in fallbacks(ours)[""]


def test_what_cannot_be_undone_is_said():
    def message(layer, x_j, e):
        e = e.mul_(2)
        return Square.apply(x_j) * e

    layer = Layer(message)
    accelerate(layer)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NODES, CHANNELS, generator=generator).double().requires_grad_()
    edge_index = torch.randint(NODES, (2, EDGES), generator=generator)
    with pytest.raises(RuntimeError, match="does not cover"):
        layer(x, edge_index, torch.ones(EDGES, CHANNELS).double().requires_grad_() * 1)


def test_rows_that_a_layer_keeps_are_gathered():
    """An optimizer changes parameters after the call."""

    def message(layer, x_j, e):
        layer.kept = torch.tanh(x_j * layer.weight + e)
        return x_j

    layer = Layer(message)
    accelerate(layer)
    outcome(layer, False)
    assert type(layer.kept) is torch.Tensor
    before = layer.kept.clone()
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(layer.kept, before)


def test_inference_mode_reads_features_where_they_are():
    def message(layer, x_j, e):
        return x_j * e[:, :1]

    layer = Layer(message)
    accelerate(layer)
    with torch.inference_mode():
        outcome(layer, False)
    assert not fallbacks(layer)
