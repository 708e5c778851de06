"""torch.compile, autocast, short types, threads, and the plain path."""

import io

import pytest
import torch
from torch import nn

from pyg_scale.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
    fallbacks,
    forget_fallbacks,
)
from pyg_scale.testing import graphs
from tests import compiling
from tests.nn.oracle import assert_equal, distance, pair, run

pytestmark = pytest.mark.matrix(3)

CONVS = [GCNConv, SAGEConv, GraphConv, GATConv, GATv2Conv, TransformerConv]
ALL = [*CONVS, GINConv, RGCNConv]
OTHERS = [GCNConv, GraphConv, GATv2Conv, TransformerConv]
SLOW = [GCNConv, GraphConv, GATConv, TransformerConv]


@pytest.fixture
def edge_index():
    return graphs.hostile().edge_index


@pytest.fixture
def x():
    return torch.randn(100, 6, generator=torch.Generator().manual_seed(1))


class Two(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.one, self.two = conv(6, 8), conv(8, 3)

    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize(
    "conv", [SAGEConv, GATConv, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_two_layers_compile_to_one_graph(conv, x, edge_index):
    """Also for other edges, and other numbers of nodes, than it was compiled for."""
    torch._dynamo.reset()
    forget_fallbacks()
    torch.manual_seed(0)
    model = Two(conv)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(5)
    for size, edges in (
        (100, edge_index),
        (100, edge_index.flip(1)),
        (50, torch.randint(0, 50, (2, 333), generator=generator)),
    ):
        found = []
        for each in (model, compiled):
            value = x[:size].clone().requires_grad_()
            model.zero_grad()
            out = each(value, edges)
            out.square().sum().backward()
            found.append([out, value.grad, *(p.grad for p in model.parameters())])
        floor = max(float(grad.detach().norm()) for grad in found[0]) / 10
        for ours, expected in zip(found[1], found[0], strict=True):
            assert distance(ours, expected, floor) < 1e-5
    assert fallbacks() == {}
    torch._dynamo.reset()


@pytest.mark.slow
def test_two_layers_compile_with_inductor(x, edge_index):
    torch.manual_seed(0)
    model = Two(SAGEConv)
    with compiling.in_this_process():
        out = torch.compile(model, fullgraph=True)(x, edge_index)
    assert distance(out, model(x, edge_index)) < 1e-5


def test_weights_and_loops_in_a_compiled_graph(x, edge_index):
    torch._dynamo.reset()
    weight = torch.rand(edge_index.size(1), generator=torch.Generator().manual_seed(3))
    weight[(edge_index[0] == 5) & (edge_index[1] == 5)] = 0.25  # both, as which one counts is open
    for kwargs in ({"improved": True}, {"add_self_loops": False}, {"flow": "target_to_source"}):
        layer = GCNConv(6, 4, **kwargs)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for arguments in ((x, edge_index), (x, edge_index, weight)):
            assert distance(compiled(*arguments), layer(*arguments)) < 1e-5
    torch._dynamo.reset()


def test_what_does_not_compile_is_counted(x, edge_index):
    torch._dynamo.reset()
    forget_fallbacks()
    layer = RGCNConv(6, 4, 2)
    edge_type = torch.arange(edge_index.size(1)) % 2
    compiled = torch.compile(layer, backend="eager")
    assert distance(compiled(x, edge_index, edge_type), layer(x, edge_index, edge_type)) < 1e-5
    if fallbacks():  # torch 2.11 leaves the whole layer to Python, where it is fused
        assert any("torch.compile" in reason for reason in fallbacks()["RGCNConv"])
    else:
        assert torch.__version__ < "2.13"
    torch._dynamo.reset()


def build(cls):
    """A layer of 6 channels, with the options that make most of its parts work."""
    if issubclass(cls, GINConv.replaces):
        torch.manual_seed(0)
        return cls(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)))
    if issubclass(cls, RGCNConv.replaces):
        return cls(6, 8, 3)
    return cls(6, 8)


def arguments_of(conv, x, edge_index):
    if conv is RGCNConv:
        return x, edge_index, torch.arange(edge_index.size(1)) % 3
    return x, edge_index


@pytest.mark.parametrize("conv", ALL)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)]
)
def test_short_types_against_double(conv, x, edge_index, dtype, tolerance):
    """Against PyG's layer in double precision, on the same rounded numbers."""
    theirs, ours = pair(conv, build, dtype)
    theirs = theirs.double()
    rounded = x.to(dtype)
    out, grads = run(theirs, arguments_of(conv, rounded.double(), edge_index), {})
    out_ours, grads_ours = run(ours, arguments_of(conv, rounded, edge_index), {})
    assert not fallbacks(ours)
    # PyG's RGCNConv adds what it computes to zeros of torch's default type.
    assert out_ours.dtype == (torch.float32 if conv is RGCNConv else dtype)
    assert distance(out_ours, out) < tolerance
    floor = max(float(grad.norm()) for grad in grads) / 10
    for a, b in zip(grads_ours, grads, strict=True):
        # Gradients of logits are differences, and are rounded to the short type, as PyG's are.
        assert distance(a, b, floor) < 4 * tolerance


@pytest.mark.parametrize("conv", ALL)
def test_autocast(conv, x, edge_index):
    theirs, ours = pair(conv, build, torch.float32)
    expected = theirs.double()(*arguments_of(conv, x.double(), edge_index))
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(*arguments_of(conv, x, edge_index))
    assert distance(out, expected) < 3e-2
    out.float().sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in ours.parameters())
    assert not fallbacks(ours)


@pytest.mark.parametrize("channels", [(40, 8), (8, 40)])
@pytest.mark.parametrize("conv", [SAGEConv, GraphConv])
def test_autocast_gives_one_type_wherever_the_linear_map_is_made(conv, channels, edge_index):
    x = torch.randn(100, channels[0])
    ours = conv(*channels)
    theirs = conv.replaces(*channels)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = ours(x, edge_index), theirs(x, edge_index)
    assert out.dtype == expected.dtype == torch.bfloat16
    assert not fallbacks(ours)


@pytest.mark.parametrize("conv", ALL)
def test_the_same_bits_in_every_run_and_for_any_number_of_threads(conv, x, edge_index):
    layer = build(conv)
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 8, 1):
            torch.set_num_threads(number)
            value = x.clone().requires_grad_()
            out = layer(*arguments_of(conv, value, edge_index.clone()))
            layer.zero_grad()
            out.square().sum().backward()
            grads = [p.grad for p in layer.parameters() if p.grad is not None]
            found.append([out.detach(), value.grad, *grads])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("conv", ALL)
def test_gradients_are_numerically_right(conv):
    """Of features and of every parameter, also where dropout is on."""
    generator = torch.Generator().manual_seed(4)
    edge_index = torch.randint(0, 9, (2, 40), generator=generator)
    x = torch.randn(9, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    layer = build(conv).double()
    if hasattr(layer, "dropout"):
        layer.dropout = 0.3
    parameters = dict(layer.named_parameters())

    def once(value, *values):
        torch.manual_seed(5)
        arguments = arguments_of(conv, value, edge_index)
        return torch.func.functional_call(layer, dict(zip(parameters, values)), arguments)

    assert torch.autograd.gradcheck(once, (x, *parameters.values()), fast_mode=True)
    assert not fallbacks(layer)


@pytest.mark.parametrize("conv", ALL)
def test_a_hub(conv):
    """A node that everybody points to, and that points to everybody."""
    size = 20_000
    node = torch.arange(1, size)
    edge_index = torch.stack([node, torch.zeros_like(node)])
    edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(1))
    theirs, ours = pair(conv, build, torch.float32)
    out, grads = run(theirs.double(), arguments_of(conv, x.double(), edge_index), {})
    out_ours, grads_ours = run(ours, arguments_of(conv, x, edge_index), {})
    assert distance(out_ours, out) < 1e-5
    floor = max(float(grad.norm()) for grad in grads) / 10
    for a, b in zip(grads_ours, grads, strict=True):
        assert distance(a, b, floor) < 2e-5


@pytest.mark.parametrize(
    "conv", [SAGEConv, GATv2Conv, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)]
)
def test_two_layers_are_exported(conv, x, edge_index):
    """One program for every number of nodes and edges, saved and loaded."""
    torch.manual_seed(0)
    model = Two(conv).eval()
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    shapes = {"x": {0: nodes}, "edge_index": {1: edges}}
    forget_fallbacks()
    program = torch.export.export(model, (x, edge_index), dynamic_shapes=shapes)
    assert fallbacks() == {}
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    other = torch.randint(0, 50, (2, 333), generator=torch.Generator().manual_seed(5))
    for value, index in ((x, edge_index), (x[:50], other)):
        assert distance(loaded(value, index), model(value, index)) < 1e-5


@pytest.mark.parametrize("conv", [GCNConv, SAGEConv, GATConv, RGCNConv, GINConv])
def test_without_compiled_kernels(conv, x, edge_index, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "never")

    def build(cls):
        if conv is GINConv:
            torch.manual_seed(0)
            return cls(nn.Linear(6, 3))
        return cls(6, 3, 2) if conv is RGCNConv else cls(6, 3)

    arguments = (x.double(), edge_index)
    if conv is RGCNConv:
        arguments += (torch.arange(edge_index.size(1)) % 2,)
    assert_equal(conv, build, arguments)


@pytest.mark.parametrize("conv", [GATConv, GATv2Conv, TransformerConv])
def test_large_logits(conv, x, edge_index):
    """Softmax neither overflows nor loses what is left."""
    arguments = (x.double() * 1e4, edge_index)
    assert_equal(conv, lambda cls: cls(6, 4, heads=2), arguments, tolerance=1e-9)


@pytest.mark.parametrize(
    ("conv", "form"), [*((conv, "edges") for conv in ALL), (SAGEConv, "coo"), (GraphConv, "coo")]
)
def test_training_after_a_look_under_inference_mode(conv, form, x, edge_index):
    """What is kept of a graph is good for a backward pass, whoever needed it first."""
    if form == "coo":
        size = (x.size(0), x.size(0))
        edge_index = torch.sparse_coo_tensor(
            edge_index.flip(0), torch.ones(edge_index.size(1)), size
        ).coalesce()
    layer = build(conv)
    arguments = arguments_of(conv, x.clone().requires_grad_(), edge_index)
    with torch.inference_mode():
        layer(*arguments)
    layer(*arguments).sum().backward()
    assert arguments[0].grad is not None


def test_edge_weights_after_a_look_under_inference_mode(x, edge_index):
    weight = torch.rand(edge_index.size(1))
    for conv in (GCNConv, GraphConv):
        layer = conv(6, 4)
        with torch.inference_mode():
            layer(x, edge_index, weight)
        plain = conv.replaces(6, 4)
        plain.load_state_dict(layer.state_dict())
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        layer(mine, edge_index, weight).sum().backward()
        plain(theirs, edge_index, weight).sum().backward()
        assert distance(mine.grad, theirs.grad) < 1e-5


def test_empty_graphs_and_no_nodes():
    for conv in ALL:
        for size in (0, 3):
            layer, plain = build(conv), build(conv.replaces)
            plain.load_state_dict(layer.state_dict())
            nothing = torch.empty(2, 0, dtype=torch.int64)
            arguments = arguments_of(conv, torch.randn(size, 6), nothing)
            out, expected = layer(*arguments), plain(*arguments)
            assert distance(out, expected) < 1e-5
            out.sum().backward()
            expected.sum().backward()
            for mine, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
