"""Aggregation against loops in float64, PyG's own aggregation, and itself on other paths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_scale.ops import adjacency as graph
from pyg_scale.ops import library
from pyg_scale.ops.aggregate import REDUCTIONS, aggregate, csr_aggregate
from tests.ops import graphs

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}


@pytest.fixture(params=["plain", "compiled"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    elif not library.compiled():
        pytest.skip("the kernels are not compiled")
    return request.param


@pytest.fixture
def compiled():
    if not library.compiled():
        pytest.skip("the kernels are not compiled")


def by_loops(indptr, indices, edge_id, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """Row by row, in float64; differentiable, ties and NaN as documented."""
    x = x.double()
    rows = []
    for begin, end in zip(indptr[:-1].tolist(), indptr[1:].tolist()):
        values = x[indices[begin:end].long()]
        if weight is not None:
            here = weight.double()[
                torch.arange(begin, end) if edge_id is None else edge_id[begin:end]
            ]
            values = values * here.view(*here.shape, *[1] * (values.dim() - here.dim()))
        if begin == end:
            rows.append(x.new_zeros(x.shape[1:]))
        elif reduce == "sum":
            rows.append(values.sum(0))
        elif reduce == "mean":
            rows.append(values.mean(0))
        else:
            order = values.detach() if reduce == "max" else -values.detach()
            best = order.max(0).values  # a NaN wins in torch, too
            found = (order == best) | (order.isnan() & best.isnan())
            first = found.int().argmax(0, keepdim=True)
            rows.append(values.gather(0, first)[0])
    out = torch.stack(rows) if rows else x.new_zeros(0, *x.shape[1:])
    return out + 0 * x.nan_to_num().sum()  # part of the graph of gradients in any case


def near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    scale = expected.double().norm().clamp(min=1e-30)
    return bool((found.double() - expected.double()).norm() / scale <= tolerance)


@pytest.mark.parametrize("name", graphs.NAMES)
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", ["none", "edges", "heads"])
def test_means_what_loops_mean(path, name, reduce, weighted):
    num_src, indptr, indices, edge_id = graphs.named(name)
    torch.manual_seed(1)
    x = torch.randn(num_src, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = None
    if weighted != "none":
        shape = (indices.numel(), 3) if weighted == "heads" else (indices.numel(),)
        weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for ids in (edge_id, None) if weighted == "heads" else (edge_id,):
        found = csr_aggregate(indptr, indices, x, weight, reduce, edge_id=ids)
        expected = by_loops(indptr, indices, ids, x, weight, reduce)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        inputs = [t for t in (x, weight) if t is not None]
        gradient = torch.randn_like(expected)
        ours = torch.autograd.grad(found, inputs, gradient, allow_unused=True)
        theirs = torch.autograd.grad(expected, inputs, gradient, allow_unused=True)
        for a, b in zip(ours, theirs):
            b = torch.zeros_like(a) if b is None else b
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


WIDTHS = (1, 3, 4, 7, 8, 16, 17, 31, 64, 100, 127, 128, 132, 256, 1024)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_and_type(path, dtype, width):
    num_src, indptr, indices, edge_id = graphs.named("small")
    torch.manual_seed(width)
    x = torch.randn(num_src, width).to(dtype).requires_grad_()
    weight = torch.randn(indices.numel()).requires_grad_()
    for reduce in REDUCTIONS:
        for w in (None, weight):
            found = csr_aggregate(indptr, indices.int(), x, w, reduce, edge_id=edge_id.int())
            expected = by_loops(indptr, indices, edge_id, x, w, reduce)
            assert found.dtype == dtype
            assert near(found, expected, TOLERANCE[dtype]), (reduce, w is None)
            inputs = [t for t in (x, w) if t is not None]
            gradient = torch.randn(expected.shape).to(dtype)
            ours = torch.autograd.grad(found, inputs, gradient)
            theirs = torch.autograd.grad(expected, inputs, gradient.double())
            for a, b in zip(ours, theirs):
                assert near(a, b, TOLERANCE[dtype]), (reduce, w is None)


class _PyG(MessagePassing):
    def message(self, x_j, weight):
        return x_j if weight is None else weight.view(-1, 1) * x_j

    def forward(self, x, edge_index, weight, size):
        return self.propagate(edge_index, x=x, weight=weight, size=size)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_is_what_pyg_aggregates(path, reduce, weighted):
    num_src, indptr, indices, edge_id = graphs.named("small")
    num_dst = indptr.numel() - 1
    edges = torch.empty(2, indices.numel(), dtype=torch.int64)
    edges[:, edge_id] = graphs.edge_index(indptr, indices)
    torch.manual_seed(0)
    x = torch.randn(num_src, 12, dtype=torch.float64)
    weight = torch.randn(indices.numel(), dtype=torch.float64) if weighted else None
    expected = _PyG(aggr=reduce)((x, None), edges, weight, (num_src, num_dst))
    found = aggregate(graph.from_edge_index(edges, num_src, num_dst), x, weight, reduce)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_numerically_right(path, reduce, weighted):
    num_src, indptr, indices, edge_id = graphs.named("small")
    torch.manual_seed(0)
    x = torch.randn(num_src, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(indices.numel(), 2, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return csr_aggregate(indptr, indices, x, weight, reduce, edge_id=edge_id)

    assert torch.autograd.gradcheck(run, (x, weight) if weighted else (x,))
    if reduce in ("sum", "mean") and not weighted:
        assert torch.autograd.gradgradcheck(run, (x,))
