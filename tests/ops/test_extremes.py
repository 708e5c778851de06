"""Memory that holds NaN, strides, infinities, many heads: every fused op against float64."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_scale.ops import fused
from pyg_scale.ops.adjacency import Adjacency
from pyg_scale.ops.aggregate import REDUCTIONS, aggregate
from tests.ops import graphs
from tests.ops.test_aggregate import LAYOUTS, by_loops, compiled, near, path  # noqa: F401
from tests.ops.test_attention import KINDS, attend, expected, inputs_of, make

OPS = (*REDUCTIONS, *KINDS)


def inputs(
    op: str, adjacency: Adjacency, heads: int = 2, channels: int = 5, dtype: Any = torch.float32
) -> dict[str, Tensor]:
    """What an op takes besides the edges, by name: with weights, or features of edges."""
    if op in KINDS:
        return inputs_of(op, adjacency, heads, channels, edges=True, dtype=dtype)
    torch.manual_seed(0)
    x = torch.randn(adjacency.num_src, heads, channels).to(dtype)
    weight = torch.randn(adjacency.num_edges, heads).to(dtype)
    return {"x": x.requires_grad_(), "weight": weight.requires_grad_()}


def call(op: str, adjacency: Adjacency, f: dict[str, Tensor]) -> Tensor:
    if op in KINDS:
        return attend(op, adjacency, f)
    return aggregate(adjacency, f["x"], f["weight"], op)


def exact(op: str, adjacency: Adjacency, f: dict[str, Tensor]) -> Tensor:
    if op in KINDS:
        return expected(op, adjacency, f)[0]
    edges = adjacency.indptr, adjacency.indices, adjacency.edge_id
    return by_loops(*edges, f["x"], f["weight"], op)


def everything(
    op: str, adjacency: Adjacency, f: dict[str, Tensor], run: Callable[..., Tensor] = call
) -> list[Tensor]:
    """The result and all gradients."""
    out = run(op, adjacency, f)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    found = torch.autograd.grad(out, list(f.values()), gradient, allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(v) if g is None else g for v, g in zip(f.values(), found)),
    ]


POOLED = 256 << 10
"""Bytes of a tensor from which on the pool has it."""


_PERTURB = -6
"""What glibc's ``mallopt`` calls M_PERTURB: the bytes that new memory is filled with, inverted."""


@contextlib.contextmanager
def poisoned(found: list[Tensor]) -> Iterator[None]:
    """NaN is in the memory that results of these sizes get: that of malloc, and of the pool."""
    held = []
    for tensor in found:
        if tensor.nbytes >= POOLED and fused.usable(tensor):
            for _ in range(2):
                empty = torch.ops.pyg_scale.pool_empty([tensor.numel()], tensor.dtype)
                held.append(empty.fill_(float("nan")))
    held.clear()
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_PERTURB, 0x100)  # bytes of 0xff; 0 would turn it off
    try:
        yield
    finally:
        libc.mallopt(_PERTURB, 0)


@pytest.mark.parametrize("name", graphs.NAMES)
@pytest.mark.parametrize("op", OPS)
def test_every_number_is_written(compiled, op, name):  # noqa: F811
    adjacency = make(name, permuted=True)
    f = inputs(op, adjacency)
    first = everything(op, adjacency, f)
    for _ in range(2):
        with poisoned(first):
            again = everything(op, adjacency, f)
        assert not any(bool(t.isnan().any()) for t in again)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("size", [300, 1000, POOLED])
def test_poisoned_memory_is_what_results_get(compiled, size):  # noqa: F811
    """Or else the test above would see nothing."""
    for make_empty in (torch.empty, torch.ops.pyg_scale.pool_empty):
        with poisoned([torch.empty(size)]):
            found = make_empty([size], dtype=torch.float32)
        assert bool(found.isnan().any())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_layouts_of_every_input_and_of_the_gradient(compiled, op, layout):  # noqa: F811
    adjacency = make("small", permuted=True)
    f = {k: v.detach() for k, v in inputs(op, adjacency, 2, 7).items()}
    arranged = {}
    for name, tensor in f.items():
        flat = tensor.view(tensor.size(0), -1)
        laid = LAYOUTS[layout](flat)
        f[name] = laid.contiguous().view(tensor.shape)
        arranged[name] = laid.unflatten(1, tensor.shape[1:]) if tensor.dim() > 2 else laid
    wanted = everything(op, adjacency, {k: v.requires_grad_() for k, v in f.items()})
    given = {k: v.detach().requires_grad_() for k, v in arranged.items()}
    assert any(not v.is_contiguous() or v.storage_offset() for v in given.values())
    for a, b in zip(everything(op, adjacency, given), wanted):
        assert torch.equal(a, b)
    out = call(op, adjacency, given)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    strided = LAYOUTS[layout](gradient.view(out.size(0), -1)).unflatten(1, out.shape[1:])
    found = torch.autograd.grad(out, list(given.values()), strided, retain_graph=True)
    plain = torch.autograd.grad(out, list(given.values()), strided.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found, plain))


SHAPES = [(16, 3), (3, 7), (5, 32), (2, 127), (4, 256), (1, 1024), (8, 1), (7, 33)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_heads_and_channels(compiled, op, shape):  # noqa: F811
    adjacency = make("small", permuted=True)
    f = inputs(op, adjacency, *shape)
    if "att" in f:  # logits of the size that trained layers have
        f["att"] = (f["att"].detach() / shape[1] ** 0.5).requires_grad_()
    for a, b in zip(everything(op, adjacency, f), everything(op, adjacency, f, exact)):
        assert near(a, b, 1e-5)


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_huge_logits_of_some_edges(path, kind, size):  # noqa: F811
    """A few edges of each row have logits that are 10^4 away from the others."""
    adjacency = make("pieces", permuted=True)
    both = inputs_of(kind, adjacency, 2, 4, edges=kind == "gatv2")
    f = {k: v.detach() for k, v in both.items()}
    # Not in what is summed, too: gradients would be differences of numbers of that size.
    name = {"gat": "a_src", "gatv2": "x_edge", "dot": "key"}[kind]
    f[name][::7] = size
    f = {k: v.requires_grad_() for k, v in f.items()}
    ours, theirs = everything(kind, adjacency, f), everything(kind, adjacency, f, exact)
    largest = max(float(b.norm()) for b in theirs)  # some are 0 in exact arithmetic
    for a, b in zip(ours, theirs):
        assert bool(a.isfinite().all())
        assert float((a - b).norm()) < 1e-8 * largest


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("op", OPS)
def test_what_is_not_finite(path, op, value):  # noqa: F811
    """One node is not finite: rows that see it become what they do in plain torch, others not."""
    adjacency = make("small", permuted=True)
    f = {k: v.detach() for k, v in inputs(op, adjacency, dtype=torch.float64).items()}
    name = {"gat": "a_src", "gatv2": "x_src", "dot": "value"}.get(op, "x")
    f[name][3, 0] = value
    found, wanted = call(op, adjacency, f), exact(op, adjacency, f)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
def test_more_threads_than_cores(compiled, op):  # noqa: F811
    adjacency = make("pieces", permuted=True)
    f = inputs(op, adjacency)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 8, 3):
            torch.set_num_threads(number)
            found.append(everything(op, adjacency, f))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))
