"""What a CUDA graph records must group the edges that are there when it is replayed.

There need be no device: the recorder is torch's, which keeps the operations of a call and takes
every tensor that was there before for a constant, as a CUDA graph does, and cannot wait for a
number either. Layers are told that a CUDA graph is recorded.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pyg_scale import nn
from pyg_scale.nn import fallbacks
from pyg_scale.ops import colptr
from tests.nn.test_devices import LAYERS

RECORDED = {name: make for name, make in LAYERS.items() if name != "rgcn"}
FLOWS = {
    "gcn, other way": lambda: nn.GCNConv(6, 4, flow="target_to_source"),
    "sage, other way": lambda: nn.SAGEConv(6, 4, flow="target_to_source"),
}
WEIGHTED = ("gcn", "gcn, other way", "graph")


@pytest.fixture
def recorded(monkeypatch):
    """A recorder of calls."""

    def record(function, *args):
        with monkeypatch.context() as pretending:
            pretending.setattr(torch.cuda, "is_initialized", lambda: True)
            pretending.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            return make_fx(function)(*args)

    return record


def inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 6, dtype=torch.float64, generator=generator)
    edge_index, other = torch.randint(30, (2, 2, 200), generator=generator)
    edge_index, other = edge_index.clone(), other.clone()
    weight = torch.rand(200, dtype=torch.float64, generator=generator)
    return x, edge_index, other, weight


@pytest.mark.parametrize("name", [*RECORDED, *FLOWS])
def test_a_replay_reads_the_edges_that_are_there(recorded, name):
    layer = (RECORDED | FLOWS)[name]().double().eval().requires_grad_(False)
    x, edge_index, other, weight = inputs()

    def step(x, edge_index, weight):
        given = [x.detach().requires_grad_()]
        more = ()
        if name in WEIGHTED:
            more = (weight.detach().requires_grad_(),)
        out = layer(given[0], edge_index, *more)
        return out, *torch.autograd.grad(out.pow(2).sum(), [*given, *more])

    step(x, edge_index, weight)  # as one warms up: what is made of these edges is kept
    replay = recorded(step, x, edge_index, weight)
    edge_index.copy_(other)
    for mine, right in zip(replay(x, edge_index, weight), step(x, other, weight), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    assert not fallbacks(layer)


def test_nor_does_it_read_the_pointers_of_a_batch(recorded):
    layer = nn.SAGEConv(6, 4).double().requires_grad_(False)
    x, edge_index, other, _ = inputs()
    edge_index = edge_index[:, edge_index[1].argsort()].contiguous()
    count = torch.bincount(edge_index[1], minlength=30)
    colptr.remember(edge_index, torch.cat([count.new_zeros(1), count.cumsum(0)]))
    replay = recorded(layer, x, edge_index)
    edge_index.copy_(other)
    assert torch.allclose(replay(x, edge_index), layer(x, other))


def test_nothing_of_a_recording_is_kept(recorded):
    """Its tensors hold nothing until it is replayed."""
    layer = nn.GATConv(6, 4).double().requires_grad_(False)
    x, edge_index, _, _ = inputs()
    recorded(layer, x, edge_index)
    assert torch.equal(layer(x, edge_index), layer(x, edge_index.clone()))
    with pytest.raises(RuntimeError, match="tracing"):  # the recorder sees who waits for a number
        recorded(lambda x: float(x.sum()), x)
