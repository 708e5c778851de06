"""Linear maps whose gradients end in rows of zeros: torch's own, row by row."""

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn

from pyg_scale.nn.linear import apply_linear, apply_weight
from pyg_scale.ops import library

pytestmark = pytest.mark.usefixtures("products")
needs_kernels = pytest.mark.skipif(not library.compiled(), reason="the kernels are not compiled")


@pytest.fixture(autouse=True)
def small_products_too(monkeypatch):
    """Torch has small products otherwise."""
    monkeypatch.setattr("pyg_scale.nn.linear._MIN_MACS", 0)


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


def test_other_layers_are_called():
    layer = torch.nn.Sequential(torch.nn.Linear(12, 7), torch.nn.ReLU())
    x = torch.randn(3, 12)
    assert torch.equal(apply_linear(layer, x), layer(x))


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
