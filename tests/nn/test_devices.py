"""Layers on a device: what they make is made there, and what they compute is what the CPU does."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_scale import nn
from pyg_scale.nn import fallbacks
from pyg_scale.ops import fused

FACTORIES = {
    getattr(torch, name)
    for name in ("arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "randperm")
} | {torch.tensor, torch.zeros}

LAYERS = {
    "gcn": lambda: nn.GCNConv(6, 4),
    "sage": lambda: nn.SAGEConv(6, 4),
    "sage max": lambda: nn.SAGEConv(6, 4, aggr="max"),
    "gin": lambda: nn.GINConv(torch.nn.Linear(6, 4)),
    "graph": lambda: nn.GraphConv(6, 4),
    "gat": lambda: nn.GATConv(6, 4, heads=2),
    "gatv2": lambda: nn.GATv2Conv(6, 4, heads=2, dropout=0.5),
    "transformer": lambda: nn.TransformerConv(6, 4, heads=2),
    "rgcn": lambda: nn.RGCNConv(6, 4, num_relations=3),
}


class MadeElsewhere(TorchFunctionMode):
    """Notes where our code makes a tensor without saying on which device."""

    def __init__(self):
        self.places = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        if (
            func in FACTORIES
            and "device" not in kwargs
            and "/pyg_scale/" in caller.f_code.co_filename
        ):
            self.places.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        return func(*args, **kwargs)


def step(name, device):
    torch.manual_seed(0)
    layer = LAYERS[name]().double().to(device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 6, dtype=torch.float64, generator=generator).to(device).requires_grad_()
    edge_index = torch.randint(30, (2, 200), generator=generator)
    edge_index[1, :10] = edge_index[0, :10]  # loops
    edge_index = edge_index.to(device)
    more = (torch.arange(200, device=device) % 3,) if name == "rgcn" else ()
    if name == "gatv2":
        layer.eval()  # without a draw
    out = layer(x, edge_index, *more)
    gradients = torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))
    return layer, [out.detach(), *gradients]


@pytest.mark.parametrize("name", LAYERS)
def test_whatever_is_made_is_made_on_the_device_of_the_inputs(name):
    with MadeElsewhere() as made:
        layer, _ = step(name, "cpu")
    assert made.places == []
    assert not fallbacks(layer)


def test_a_tensor_without_a_device_would_be_seen(monkeypatch):
    from pyg_scale.nn import loops

    monkeypatch.setattr(loops, "_inverse_sqrt", lambda degree: degree * eval(CODE))
    with MadeElsewhere() as made:
        step("gcn", "cpu")
    assert len(made.places) == 1


CODE = compile("torch.ones(1, dtype=torch.float64)", "/pyg_scale/loops.py", "eval")


class AddsTwice(TorchDispatchMode):
    """Notes operations that add floating point numbers to one place in no certain order on CUDA."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in ("index_add", "scatter_add", "scatter_reduce") and args[0].is_floating_point():
            index = args[2]
            if index.numel() > index.unique().numel():
                self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*LAYERS, "gcn weighted", "graph weighted"])
def test_nothing_is_added_by_atomics(name):
    layer = LAYERS[name.removesuffix(" weighted")]().double()
    x, more = torch.rand(30, 6, dtype=torch.float64, requires_grad=True), ()
    edge_index = torch.randint(30, (2, 200), generator=torch.Generator().manual_seed(1))
    if name.endswith("weighted"):
        more = (torch.rand(200, dtype=torch.float64, requires_grad=True),)
    elif name == "rgcn":
        more = (torch.arange(200) % 3,)
    with AddsTwice() as adds:
        layer(x, edge_index, *more).sum().backward()
    assert adds.found == []
    assert not fallbacks(layer)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", LAYERS)
def test_on_cuda_they_are_fused_and_compute_what_they_do_on_the_cpu(name, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    layer, found = step(name, "cuda")
    assert not fallbacks(layer)
    for a, b in zip(found, step(name, "cpu")[1]):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-9, atol=1e-10)


def test_without_kernels_for_the_device_they_take_the_path_of_pyg(monkeypatch):
    from pyg_scale.nn.conv import base
    from pyg_scale.nn.fallback import NotFused

    monkeypatch.setattr(fused, "usable", lambda tensor: False)
    x = torch.empty(2, 2, device="meta")
    monkeypatch.setattr(torch.Tensor, "device", property(lambda self: torch.device("cuda", 0)))
    with pytest.raises(NotFused, match="no kernels for this CUDA device"):
        base.check_features(x)
