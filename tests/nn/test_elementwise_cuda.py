"""Messages of steps on single numbers on CUDA: beside PyG's, and that no row is gathered."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from pyg_scale.nn import accelerate, elementwise, fallbacks
from pyg_scale.ops import fused
from pyg_scale.testing import graphs
from tests.nn.on_cuda import on_cuda
from tests.nn.oracle import distance, run
from tests.nn.test_elementwise import LAYERS, PARTS, STEPS, SUMS, Message, of_edges

CUDA = torch.device("cuda", 0)
needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def given_to(name):
    edge_index = graphs.hostile().edge_index
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(100, 8, generator=generator, dtype=torch.float64)
    _, columns = LAYERS[name]
    return x, edge_index, *([of_edges(edge_index, columns)] if columns else [])


def pair(make):
    torch.manual_seed(0)
    theirs = make().double()
    ours = copy.deepcopy(theirs)
    accelerate(ours, min_work=0)
    return theirs, ours


def assert_emulated(theirs, ours, given, monkeypatch):
    """Results and gradients are PyG's, by a generated kernel and without waiting for the device."""
    out, grads = run(theirs, given, {})
    with on_cuda(monkeypatch) as launches:
        mine, found = run(ours, given, {})
    assert not fallbacks(ours)
    assert launches.waits == 0
    assert "pyg_scale::edge_formula_compiled" in launches.names
    assert distance(mine, out) < 1e-12
    floor = max(float(g.norm()) for g in grads if g is not None) / 10
    for a, b in zip(found, grads, strict=True):
        assert distance(a, b, floor) < 1e-12


EMULATED = ("gine", "gen, learned", "resgated, edges", "film", "cg", "cg, max", "edge, relu")


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", EMULATED)
def test_layers_in_the_emulator(name, monkeypatch):
    given = given_to(name)
    theirs, ours = pair(LAYERS[name][0])
    assert_emulated(theirs, ours, given, monkeypatch)


FUNCTIONS = {
    f"{kind}, {name}": function
    for kind, functions in (("steps", STEPS), ("sums", SUMS), ("parts", PARTS))
    for name, function in functions.items()
}


@pytest.mark.parametrize("name", ["sums, of both ends", "sums, mean", "parts, chunks"])
def test_functions_of_the_user_in_the_emulator(name, monkeypatch):
    monkeypatch.setattr(elementwise, "_HEADS", 0)  # parts of few columns are no numbers of heads
    given = given_to("gine")
    layer = Message(FUNCTIONS[name])
    ours = copy.deepcopy(layer)
    accelerate(ours, min_work=0)
    assert_emulated(layer, ours, given, monkeypatch)


def test_why_rows_are_gathered_is_counted(monkeypatch):
    given = given_to("gine")
    theirs, ours = pair(LAYERS["gine"][0])
    with on_cuda(monkeypatch):
        monkeypatch.setattr(fused, "why_not_generated", lambda device: "there is no NVRTC. Run: x")
        out = ours(*given)
    assert distance(out, theirs(*given)) < 1e-12
    said = "rows of features gathered for add: there is no NVRTC. Run: x"
    assert fallbacks(ours) == {"": {said: 1}}


def test_a_formula_that_is_too_long_gathers_rows(monkeypatch):
    def steps(i, j, e):
        for k in range(1, 40):
            i = (i + e * k).abs()
        return i + j

    given = given_to("gine")
    layer = Message(steps)
    ours = copy.deepcopy(layer)
    accelerate(ours, min_work=0)
    with on_cuda(monkeypatch):
        out = ours(*given)
    assert distance(out, layer(*given)) < 1e-12
    (said,) = fallbacks(ours)[""]
    assert said.startswith("rows of features gathered for aggregation: 79 steps on ")
    assert said.endswith(", where a kernel takes 30 on 12")


def test_autocast_is_that_of_the_device(monkeypatch):
    given = given_to("gine")
    _, ours = pair(LAYERS["gine"][0])
    torch.set_autocast_enabled("cuda", True)  # torch.autocast asks for a device
    try:
        with on_cuda(monkeypatch):
            ours(*given)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert list(fallbacks(ours)[""]) == ["rows of features gathered for add"]


EXTREMES = ("cg, max", "edge", "edge, relu", "edge, several")
"""Layers in which the largest of numbers that ``float32`` rounds to one may be another edge's."""
COMPARED = [
    *((name, torch.float64) for name in LAYERS if name != "point"),
    *((name, torch.float32) for name in LAYERS if name not in ("point", *EXTREMES)),
]


class TestOnCuda:
    pytestmark = needs_cuda

    @pytest.mark.parametrize(("name", "dtype"), COMPARED, ids=str)
    def test_layers_beside_those_of_pyg(self, name, dtype, monkeypatch):
        monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
        assert fused.why_not_generated(CUDA) == ""
        wide = given_to(name)
        theirs, ours = (each.to(CUDA, dtype) for each in pair(LAYERS[name][0]))
        given = [x.to(CUDA, dtype) if x.is_floating_point() else x.to(CUDA) for x in wide]
        out, grads = run(theirs.cpu().double(), wide, {})
        mine, found = run(ours, given, {})
        assert not fallbacks(ours)
        limit = 1e-11 if dtype == torch.float64 else 1e-4
        assert distance(mine.cpu(), out) < limit
        floor = max(float(g.norm()) for g in grads if g is not None) / 10
        for a, b in zip(found, grads, strict=True):
            assert distance(None if a is None else a.cpu(), b, floor) < limit

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_functions_of_the_user(self, name):
        wide = given_to("gine")
        layer = Message(FUNCTIONS[name], node_dim=0)
        ours = copy.deepcopy(layer)
        accelerate(ours, min_work=0)
        out, grads = run(layer, wide, {})
        mine, found = run(ours, [x.to(CUDA) for x in wide], {})
        assert not fallbacks(ours)
        assert distance(mine.cpu(), out) < 1e-11
        for a, b in zip(found, grads, strict=True):
            assert distance(a.cpu(), b) < 1e-11

    @pytest.mark.parametrize(
        "make",
        [
            lambda: pyg.ResGatedGraphConv(64, 64),
            lambda: pyg.GENConv(64, 64),
            lambda: pyg.FiLMConv(64, 64),
            lambda: pyg.CGConv(64, aggr="max"),
            lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(128, 64), nn.ReLU())),
        ],
        ids=["resgated", "gen", "film", "cg", "edge"],
    )
    def test_no_tensor_of_edges_by_channels(self, make):
        nodes, edges = 5_000, 500_000
        x = torch.randn(nodes, 64, device=CUDA, requires_grad=True)
        edge_index = torch.randint(nodes, (2, edges), device=CUDA)
        layer = make().to(CUDA)
        accelerate(layer)
        for _ in range(2):  # the first groups the edges
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            layer(x, edge_index).square().sum().backward()
            torch.cuda.synchronize()
        assert not fallbacks(layer)
        # Partial results of long rows, and tensors of nodes by channels; not 128 MB of messages.
        assert torch.cuda.max_memory_allocated() - before < edges * 64 * 4 // 2

    def test_the_same_bits_on_another_stream(self):
        torch.manual_seed(0)
        layer = pyg.ResGatedGraphConv(24, 20).to(CUDA)
        accelerate(layer, min_work=0)
        x = torch.randn(300, 24, device=CUDA)
        edge_index = torch.randint(300, (2, 9000), device=CUDA)
        with torch.no_grad():
            wanted = layer(x, edge_index)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = layer(x, edge_index)
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(found, wanted)
        assert not fallbacks(layer)
