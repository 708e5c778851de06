"""The device code of attention in the emulator, against PyG's and torch's in float64."""

from __future__ import annotations

import pytest
import torch

from pyg_scale.ops.adjacency import Adjacency
from pyg_scale.ops.attention_plain import keep_mask
from tests.ops import emulated, graphs
from tests.ops.test_aggregate import LAYOUTS, TOLERANCE, near
from tests.ops.test_attention import KINDS, attend, expected, inputs_of, make
from tests.ops.test_cuda_emulated import nan_everywhere  # noqa: F401

pytestmark = [pytest.mark.matrix(4), pytest.mark.usefixtures("nan_everywhere")]


def gradients(out, inputs, given):
    return torch.autograd.grad(out, list(inputs.values()), given, allow_unused=True)


@pytest.mark.parametrize("name", graphs.NAMES)
@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_means_what_pyg_means(name, edges, kind):
    adjacency = make(name, permuted=edges)
    f = inputs_of(kind, adjacency, 2, 6, edges=edges)
    exact, exact_weights = expected(kind, adjacency, f)
    given, of_weights = torch.randn_like(exact), torch.randn_like(exact_weights)
    with emulated.instead_of():
        out, weights = attend(kind, adjacency, f, return_weights=True)
        alone = attend(kind, adjacency, f)
        ours = gradients(alone, f, given), gradients((out, weights), f, (given, of_weights))
    torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(weights, exact_weights, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(alone, out, rtol=0, atol=0)
    theirs = (
        torch.autograd.grad(exact, list(f.values()), given, retain_graph=True, allow_unused=True),
        gradients((exact, exact_weights), f, (given, of_weights)),
    )
    for found, wanted in zip(ours, theirs):
        for a, b in zip(found, wanted):
            b = torch.zeros_like(a) if b is None else b
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (4, 16), (1, 33), (1, 264), (2, 150)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_and_type(shape, dtype, kind):
    adjacency = make("small", permuted=True, index=torch.int32)
    f = inputs_of(kind, adjacency, *shape, edges=True, dtype=dtype, seed=shape[1])
    exact, _ = expected(kind, adjacency, f)
    given = torch.randn(exact.shape).to(dtype)
    with emulated.instead_of():
        out = attend(kind, adjacency, f)
        ours = gradients(out, f, given)
    theirs = gradients(exact, f, given.double())
    assert out.dtype == dtype
    assert near(out, exact, TOLERANCE[dtype])
    for name, a, b in zip(f, ours, theirs):
        # Gradients of logits are small differences of what is rounded to the short type.
        assert near(a, b, TOLERANCE[dtype] * (1 if dtype == torch.float32 else 3)), name


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_that_of_the_cpu(kind):
    adjacency = make("pieces", permuted=True)
    f = inputs_of(kind, adjacency, 2, 4, edges=True)
    seed = torch.tensor(7)
    kept = keep_mask(seed, torch.arange(adjacency.num_edges), 2, 0.6)
    options = {"dropout": 0.6, "seed": seed, "return_weights": True}
    exact, exact_weights = expected(kind, adjacency, f, kept / 0.4)
    given = torch.randn_like(exact), torch.randn_like(exact_weights)
    with emulated.instead_of():
        out, weights = attend(kind, adjacency, f, **options)
        ours = gradients((out, weights), f, given)
        none = attend(kind, adjacency, f, dropout=1.0)
    assert torch.equal(weights == 0, ~kept)
    assert none.count_nonzero() == 0
    torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(weights, exact_weights, rtol=1e-11, atol=1e-12)
    for a, b in zip(ours, gradients((exact, exact_weights), f, given)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_logits_may_be_huge(size):
    adjacency = make("pieces", permuted=False)
    f = inputs_of("gat", adjacency, 2, 4, edges=False, dtype=torch.float32)
    f["a_src"] = (f["a_src"].detach() + size).requires_grad_()
    with emulated.instead_of():
        out, weights = attend("gat", adjacency, f, return_weights=True)
        found = gradients(out.sum(), f, None)
    assert bool(out.isfinite().all()) and bool(weights.isfinite().all())
    assert near(out, expected("gat", adjacency, f)[0], 1e-3)
    assert all(bool(gradient.isfinite().all()) for gradient in found)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_comes_through(kind):
    adjacency = make("small", permuted=False)
    f = inputs_of(kind, adjacency, 2, 8, edges=False)
    with torch.no_grad():
        next(iter(f.values()))[1] = float("nan")
    with emulated.instead_of():
        found = attend(kind, adjacency, f)
    wanted = expected(kind, adjacency, f)[0]
    assert torch.equal(found.isnan(), wanted.isnan()) and bool(found.isnan().any())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind, layout):
    adjacency = make("small", permuted=True)
    f = inputs_of(kind, adjacency, 2, 8, edges=True, dtype=torch.float32)
    name = {"gat": "x", "gatv2": "x_src", "dot": "key"}[kind]
    shape = f[name].shape
    with torch.no_grad():
        f[name] = LAYOUTS[layout](f[name].reshape(shape[0], 16)).view(shape)
        with emulated.instead_of():
            assert near(attend(kind, adjacency, f), expected(kind, adjacency, f)[0], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_in_any_order_of_threads(kind, monkeypatch):
    adjacency = make("pieces", permuted=True)
    f = inputs_of(kind, adjacency, 2, 8, edges=True, dtype=torch.float32)
    given, seen = None, []
    for order in ("forward", "backward", "forward"):
        monkeypatch.setenv("PYG_SCALE_EMULATOR_ORDER", order)
        with emulated.instead_of():
            out = attend(kind, adjacency, f, dropout=0.3, seed=5)
            given = torch.randn_like(out) if given is None else given
            seen.append((out.detach(), *gradients(out, f, given)))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))


def test_weights_of_a_long_row_without_channels():
    """Nobody asks for a result of no channels, but for its weights and the gradients of logits."""
    adjacency = make("pieces", permuted=True)
    f = inputs_of("gat", adjacency, 2, 0, edges=True)
    exact, exact_weights = expected("gat", adjacency, f)
    given = torch.randn_like(exact_weights)
    logits = [name for name in f if name != "x"]
    with emulated.instead_of():
        out, weights = attend("gat", adjacency, f, return_weights=True)
        ours = torch.autograd.grad(weights, [f[name] for name in logits], given)
    theirs = torch.autograd.grad(exact_weights, [f[name] for name in logits], given)
    assert out.shape == exact.shape
    torch.testing.assert_close(weights, exact_weights, rtol=1e-11, atol=1e-12)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_more_rows_than_groups_that_add_up_the_attention_vector():
    generator = torch.Generator().manual_seed(0)
    degree = torch.randint(0, 3, (5000,), generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    indices = torch.randint(40, (int(indptr[-1]),), generator=generator)
    adjacency = Adjacency(indptr, indices, 40)
    f = inputs_of("gatv2", adjacency, 1, 4, edges=False)
    exact, _ = expected("gatv2", adjacency, f)
    given = torch.randn_like(exact)
    with emulated.instead_of():
        ours = gradients(attend("gatv2", adjacency, f), f, given)
    for a, b in zip(ours, gradients(exact, f, given)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
