"""Linear maps whose gradients end in rows of zeros: torch's own, row by row."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch.autograd import forward_ad
from torch.nn.utils import prune

from pyg_scale.nn import accelerate, linear, restore
from pyg_scale.nn.linear import LinearMap, apply_linear, apply_weight
from pyg_scale.ops import dense_product, library
from pyg_scale.ops.dense_product import mm

pytestmark = pytest.mark.usefixtures("products")
needs_kernels = pytest.mark.skipif(not library.compiled(), reason="the kernels are not compiled")


@pytest.fixture(autouse=True)
def small_products_too(monkeypatch):
    """Torch has small products otherwise."""
    monkeypatch.setattr("pyg_scale.nn.linear._MIN_MACS", 0)
    monkeypatch.setattr("pyg_scale.nn.linear._MIN_MACS_ALONE", 0)


def operands(rows, bias, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, 12), (7, 12), (7,)]
    x, weight, b = (
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    )
    return (x, weight, b) if bias else (x, weight)


def assert_same(found, expected, rounded):
    """To the bit, or up to rounding."""
    if rounded:
        few = 30 * torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, expected, rtol=few, atol=few)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "used"), [(500, 20), (500, 500), (500, 0), (1, 1), (0, 0)])
def test_gradients_are_those_of_torch(rows, used, bias, products):
    given = operands(rows, bias)
    out, expected = apply_weight(*given), F.linear(*given)
    assert_same(out, expected, products)
    weights = torch.rand(used, 7, dtype=torch.float64)
    found, right = (torch.autograd.grad((y[:used] * weights).sum(), given) for y in (out, expected))
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_one_number_everywhere():
    """Expanded, so not contiguous."""
    given = operands(30, True)
    found = torch.autograd.grad(apply_weight(*given).sum(), given)
    right = torch.autograd.grad(F.linear(*given).sum(), given)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_gradients_are_differentiated_again():
    given = operands(6, True)
    assert torch.autograd.gradcheck(apply_weight, given)
    assert torch.autograd.gradgradcheck(apply_weight, given)


@needs_kernels
def test_rows_that_have_no_gradient_are_not_multiplied():
    x, weight = operands(100, False)
    with torch.no_grad():
        x[60:] = float("inf")
    out = apply_weight(x, weight)
    found = torch.autograd.grad(out[:60].sum(), (x, weight))
    assert all(bool(each.isfinite().all()) for each in found)
    assert bool((found[0][60:] == 0).all()) and bool((found[0][:60] != 0).any())


def test_nobody_who_listens_is_passed_by():
    heard = []
    for make in (torch_geometric.nn.Linear, torch.nn.Linear):
        layer = make(12, 7)
        layer.register_forward_hook(lambda *_: heard.append(1))
        apply_linear(layer, torch.randn(3, 12))
    assert len(heard) == 2


def test_a_forward_of_the_instance_is_called():
    layer, x = torch.nn.Linear(12, 7), torch.randn(3, 12)
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)
    assert torch.equal(apply_linear(layer, x), 2 * F.linear(x, layer.weight, layer.bias))


def test_layers_of_a_sequence_are_mapped_and_others_called(monkeypatch, products):
    inner = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(7, 5))
    layer, heard = torch.nn.Sequential(torch.nn.Linear(12, 7), inner), []
    x, called = torch.randn(3, 12), []
    monkeypatch.setattr(linear, "mm", lambda *args, **more: called.append(1) or mm(*args, **more))
    assert_same(apply_linear(layer, x), layer(x), products)
    assert len(called) == 2 * library.compiled()
    inner.register_forward_hook(lambda *_: heard.append(1))
    assert_same(apply_linear(layer, x), layer(x), products)
    assert len(heard) == 2 and len(called) == 3 * library.compiled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_and_short_types(dtype, products):
    x, weight, bias = operands(40, True, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = apply_weight(x, weight, bias), F.linear(x, weight, bias)
    assert out.dtype == expected.dtype and torch.equal(out, expected)
    out, expected = apply_weight(x, weight, bias), F.linear(x, weight, bias)
    assert_same(out, expected, products and dtype is torch.float32)
    found = torch.autograd.grad(out[:9].float().square().sum(), (x, weight, bias))
    right = torch.autograd.grad(expected[:9].float().square().sum(), (x, weight, bias))
    torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients(without, products):
    given = operands(40, True)
    expected = F.linear(*given).detach()
    with without():
        out = apply_weight(*given)
        assert_same(out, expected, products)
        assert not out.requires_grad and out.is_inference() == (without is torch.inference_mode)


def test_it_compiles_whole():
    given = operands(20, True, torch.float32)
    compiled = torch.compile(apply_weight, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), F.linear(*given))


@needs_kernels
def test_many_gradients_at_once():
    given = operands(30, True)
    out, expected = apply_weight(*given), F.linear(*given)
    many = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(1)).double()
    found, right = (
        torch.autograd.grad(y, given, many, is_grads_batched=True) for y in (out, expected)
    )
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def mlp_and_conv():
    """A model with linear layers of torch and of PyG, also within a layer, and a batch's input."""
    torch.manual_seed(4)
    inner = torch_geometric.nn.MLP([12, 16, 7], norm=None)
    model = torch.nn.Sequential(torch.nn.Linear(5, 12), torch_geometric.nn.GINConv(inner))
    model.append(torch.nn.Linear(7, 3, bias=False))

    def forward(x, edge_index, head=model[2]):
        return head(model[1](model[0](x).relu(), edge_index))

    return model.double(), forward


def of_all(model, forward, x, edge_index):
    out = forward(x, edge_index)
    return out, torch.autograd.grad(out[:9].square().sum(), list(model.parameters()))


@pytest.fixture
def pays(products, monkeypatch):
    """As on a processor on which our product is faster."""
    monkeypatch.setattr(dense_product, "pays", lambda: True)


def test_other_processors_keep_torchs_linear_layers(monkeypatch):
    monkeypatch.setattr(dense_product, "pays", lambda: False)
    model, _ = mlp_and_conv()
    report = accelerate(model)
    assert report.linear_maps == 0 and report.num_switched == 1
    assert not any(isinstance(each, LinearMap) for each in model.modules())


@needs_kernels
@pytest.mark.usefixtures("pays")
def test_accelerate_maps_all_linear_layers_of_a_model():
    model, forward = mlp_and_conv()
    x, edge_index = torch.randn(40, 5, dtype=torch.float64), torch.randint(40, (2, 300))
    expected = of_all(model, forward, x, edge_index)
    before, shown = {name: type(each) for name, each in model.named_modules()}, repr(model[0])
    names = list(model.state_dict())
    report = accelerate(model)
    assert report.linear_maps == report.to_dict()["linear_maps"] == 4
    assert str(report).endswith("linear maps: 4")
    assert sum(isinstance(each, LinearMap) for each in model.modules()) == 4
    assert list(model.state_dict()) == names and repr(model[0]) == shown
    assert accelerate(model).linear_maps == 0  # they are already
    found = of_all(model, forward, x, edge_index)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert isinstance(other[0], LinearMap)
        assert torch.equal(other[0](x), model[0](x))
    restore(model)
    assert {name: type(each) for name, each in model.named_modules()} == before
    report = accelerate(model)
    report.restore()
    assert {name: type(each) for name, each in model.named_modules()} == before


@needs_kernels
@pytest.mark.usefixtures("pays")
def test_linear_layers_of_an_accelerated_model_take_the_product(monkeypatch):
    model, forward = mlp_and_conv()
    accelerate(model)
    called = []
    monkeypatch.setattr(linear, "mm", lambda *args, **more: called.append(1) or mm(*args, **more))
    of_all(model, forward, torch.randn(40, 5).double(), torch.randint(40, (2, 300)))
    assert len(called) == 4 + 4 + 3  # results, gradients of weights, and of what they map


@pytest.mark.usefixtures("pays")
def test_a_layer_by_itself_leaves_more_products_to_torch(monkeypatch):
    """Of a layer of ours they are among compiled ops, which use the same code."""
    monkeypatch.setattr(linear, "_MIN_MACS", 1000)
    monkeypatch.setattr(linear, "_MIN_MACS_ALONE", 4000)
    layer = linear.LINEAR_MAPS[torch.nn.Linear](10, 10)
    rows = []
    monkeypatch.setattr(linear, "mm", lambda a, *b, **c: rows.append(len(a)) or mm(a, *b, **c))
    for size in (20, 39, 40):
        layer(torch.randn(size, 10))
        apply_weight(torch.randn(size, 10), layer.weight)
    assert rows == [20, 39, 40, 40]


def _pruned(layer):
    prune.random_unstructured(layer, "weight", 0.5)
    prune.random_unstructured(layer, "bias", 0.5)


@pytest.mark.parametrize(
    "change", [torch.nn.utils.parametrizations.weight_norm, _pruned, lambda layer: None]
)
@pytest.mark.parametrize("bias", [True, False])
def test_weights_that_are_made_of_others(change, bias):
    if change is _pruned and not bias:
        pytest.skip("there is no bias")
    layer = linear.LINEAR_MAPS[torch.nn.Linear](5, 4, bias=bias)
    change(layer)
    x = torch.randn(3, 5)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    layer(x).sum().backward()
    assert all(each.grad is not None for each in layer.parameters())


class Mapping(torch_geometric.nn.MessagePassing):
    """A message with a map of the features of edges by a layer, and one by torch's function."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(6, 4)
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x, edge_index, values):
        return self.propagate(edge_index, x=x, values=values)

    def message(self, x_j, values):
        return F.linear(self.lin(values), self.weight) + x_j


@needs_kernels
@pytest.mark.usefixtures("pays")
def test_maps_within_a_message_take_the_product(monkeypatch):
    """Functions of torch are watched there: by the layer itself, and not by anybody else."""
    rows, x, edge_index = [], torch.randn(50, 4), torch.randint(50, (2, 300))
    mapped = linear.mm
    monkeypatch.setattr(linear, "mm", lambda a, *b, **c: rows.append(len(a)) or mapped(a, *b, **c))
    layer = Mapping()
    values = torch.randn(300, 6)
    expected = layer(x, edge_index, values)
    accelerate(layer, min_work=0)
    torch.testing.assert_close(layer(x, edge_index, values), expected, rtol=1e-4, atol=1e-4)
    assert rows == [300, 300]


@needs_kernels
@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("bias", [True, False])
def test_linear_maps_are_transformed_and_traced_as_torchs(bias):
    layer = torch.nn.Linear(12, 7, bias=bias).double()
    model = torch.nn.ModuleList([layer, torch_geometric.nn.SimpleConv()])
    x, expected = torch.randn(30, 12, dtype=torch.float64), layer(torch.ones(30, 12).double())
    theirs = layer(x)
    accelerate(model)
    assert isinstance(layer, LinearMap)
    torch.testing.assert_close(torch.vmap(layer)(x), theirs)
    parameters = dict(layer.named_parameters())
    mapped = lambda given: torch.func.functional_call(layer, given, x).sum()  # noqa: E731
    torch.testing.assert_close(torch.func.grad(mapped)(parameters)["weight"][0], x.sum(0))
    tangent = torch.ones_like(x)
    value, change = torch.func.jvp(layer, (x,), (tangent,))
    torch.testing.assert_close(value, theirs)
    torch.testing.assert_close(change, tangent @ layer.weight.t())
    with forward_ad.dual_level():
        out = layer(forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, change)
    for made in (torch.jit.script(layer), torch.jit.trace(layer, x)):
        torch.testing.assert_close(made(torch.ones(30, 12).double()), expected)
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.testing.assert_close(exported.module()(torch.ones(50, 12).double())[:30], expected)
    many = torch.autograd.functional.jacobian(lambda y: layer(y).sum(1), x, vectorize=True)
    torch.testing.assert_close(many[3, 3], layer.weight.sum(0))
    assert layer(x.view(5, 6, 12)).shape == (5, 6, 7)
    sparse = x.relu().to_sparse()
    torch.testing.assert_close(layer(sparse), layer(sparse.to_dense()))


@needs_kernels
@pytest.mark.usefixtures("pays")
def test_channels_that_are_not_known_yet():
    model = torch_geometric.nn.GraphSAGE(-1, 16, num_layers=2, out_channels=3)
    accelerate(model)
    x, edge_index = torch.randn(30, 5), torch.randint(30, (2, 200))
    model(x, edge_index).sum().backward()
    assert model.convs[0].lin_l.weight.shape == (16, 5)
    assert all(each.grad is not None for each in model.parameters())
