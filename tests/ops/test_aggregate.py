"""Aggregation against loops in float64, PyG's own aggregation, and itself on other paths."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_scale.ops import adjacency as graph
from pyg_scale.ops import fused, library
from pyg_scale.ops.aggregate import REDUCTIONS, aggregate, csr_aggregate
from tests.ops import graphs

pytestmark = pytest.mark.matrix(4)

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
    return out + 0 * x.nan_to_num(0.0, 0.0, 0.0).sum()  # part of the graph of gradients in any case


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
PATHS = [("compiled", width) for width in WIDTHS] + [("plain", 1), ("plain", 17)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("path", "width"), PATHS, indirect=["path"])
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
def test_gradients_are_numerically_right(compiled, reduce, weighted):
    num_src, indptr, indices, edge_id = graphs.named("tiny")
    torch.manual_seed(0)
    x = torch.randn(num_src, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(indices.numel(), 2, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return csr_aggregate(indptr, indices, x, weight, reduce, edge_id=edge_id)

    assert torch.autograd.gradcheck(run, (x, weight) if weighted else (x,))
    if reduce in ("sum", "mean") and not weighted:
        assert torch.autograd.gradgradcheck(run, (x,))


def test_ties_and_nan(path):
    indptr, indices = torch.tensor([0, 3, 5]), torch.tensor([0, 1, 2, 3, 4])
    nan = float("nan")
    x = torch.tensor([[1.0, nan], [5.0, 2.0], [5.0, nan], [-1.0, 7.0], [-1.0, nan]])
    x = torch.cat([x, x, x, x, x], dim=1).requires_grad_()
    largest = csr_aggregate(indptr, indices, x, reduce="max")
    torch.testing.assert_close(largest[0, :2], torch.tensor([5.0, nan]), equal_nan=True)
    (gradient,) = torch.autograd.grad(largest.nan_to_num().sum(), x)
    assert gradient[:, 0].tolist() == [0, 1, 0, 1, 0]  # the first of equal ones
    smallest = csr_aggregate(indptr, indices, x, reduce="min")
    torch.testing.assert_close(smallest[1, :2], torch.tensor([-1.0, nan]), equal_nan=True)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_hub(compiled, reduce):
    num_src, indptr, indices = graphs.star()
    torch.manual_seed(0)
    x = torch.randn(num_src, 9, dtype=torch.float32).requires_grad_()
    found = csr_aggregate(indptr, indices, x, reduce=reduce)
    rows = {"sum": x[1:].double().sum(0), "mean": x[1:].double().mean(0)}
    rows |= {"max": x[1:].double().amax(0), "min": x[1:].double().amin(0)}
    assert near(found[0], rows[reduce], 1e-5)
    assert torch.equal(found[1:], x[:1].expand(num_src - 1, -1))
    (gradient,) = torch.autograd.grad(found, x, torch.ones_like(found))
    assert near(gradient[0], torch.full((9,), float(num_src - 1)), 1e-5)
    wanted = {"sum": num_src - 1.0, "mean": 1.0, "max": 1.0, "min": 1.0}[reduce]
    assert near(gradient[1:].sum(0), torch.full((9,), wanted), 1e-3)


LAYOUTS = {
    "strided rows": lambda x: torch.cat([x, x], 1)[:, : x.size(1)],
    "strided columns": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(compiled, layout):
    num_src, indptr, indices, edge_id = graphs.named("small")
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(num_src, 37))
    weight = torch.randn(indices.numel(), 2)[:, 0]
    both = torch.stack([indices, indices], 1)[:, 0], torch.stack([edge_id, edge_id], 1)[:, 0]
    for reduce in REDUCTIONS:
        wanted = csr_aggregate(
            indptr, indices, x.contiguous(), weight.clone(), reduce, edge_id=edge_id
        )
        found = csr_aggregate(indptr.int(), both[0], x, weight, reduce, edge_id=both[1])
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_the_same_bits_for_any_number_of_threads_and_every_time(compiled, reduce):
    generator = torch.Generator().manual_seed(0)
    degree = torch.randint(0, 30, (4000,), generator=generator)
    degree[17] = 9000  # in pieces
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    size = int(indptr[-1])
    indices = (torch.rand(size, generator=generator).pow(3) * 3000).long()
    edge_id = torch.randperm(size, generator=generator)
    x = torch.randn(3000, 4, 6, generator=generator, requires_grad=True)
    weight = torch.randn(size, 4, generator=generator, requires_grad=True)
    gradient = torch.randn(4000, 4, 6, generator=generator)
    threads, seen = torch.get_num_threads(), []
    try:
        for number in (1, 2, 2, 1):
            torch.set_num_threads(number)
            poison()
            out = csr_aggregate(indptr, indices, x, weight, reduce, edge_id=edge_id)
            seen.append((out.detach(), *torch.autograd.grad(out, (x, weight), gradient)))
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))
    assert all(bool(t.isfinite().all()) for t in seen[0])


def poison() -> None:
    """Leave NaN where the next results will be: whoever does not write all of them is seen."""
    for size in (24_000, 72_000, 96_000, 240_000, 270_000):
        torch.full((size,), float("nan"))
        torch.ops.pyg_scale.pool_empty([size], torch.float32).fill_(float("nan"))


def test_operators_are_what_torch_expects(compiled):
    num_src, indptr, indices, edge_id = graphs.named("small")
    edges = graph.Adjacency(indptr, indices, num_src, edge_id)
    x = torch.randn(num_src, 6, requires_grad=True)
    weight = torch.randn(indices.numel(), 2, requires_grad=True)
    csr = (edges.indptr, edges.indices, edges.edge_id)
    ops = torch.ops.pyg_scale
    six = (*csr, *edges.transpose())
    assert fused_is_ready()
    torch.library.opcheck(ops.csr_transpose.default, (indptr, indices, num_src))
    for flag in (False, True):
        torch.library.opcheck(ops.csr_sum.default, (*six, x, weight, flag))
        torch.library.opcheck(ops.csr_sum.default, (*csr, None, None, None, x, None, flag))
        torch.library.opcheck(ops.csr_extreme.default, (*six, x, weight, flag))
    out, arg = ops.csr_extreme(*six, x.detach(), None, False)
    grad_args = (*edges.transpose(), indptr, edge_id, arg, torch.randn_like(out), weight.detach())
    torch.library.opcheck(ops.csr_extreme_grad.default, grad_args)
    args = (*csr, x.detach(), torch.randn_like(out), arg, 2, False)
    torch.library.opcheck(ops.csr_weight_grad.default, args)


def fused_is_ready() -> bool:
    return fused.usable(torch.empty(0))


def test_compiles_and_exports_as_a_whole(compiled):
    class Layer(torch.nn.Module):
        def forward(self, indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            out = csr_aggregate(indptr, indices, x * 2, weight)
            return out + csr_aggregate(indptr, indices, x, None, "max")

    layer, torch_compiled = Layer(), torch.compile(Layer(), fullgraph=True, dynamic=True,
                                                   backend="aot_eager")  # fmt: skip
    for name in ("small", "more rows than sources"):
        num_src, indptr, indices, _ = graphs.named(name)
        x = torch.randn(num_src, 8, requires_grad=True)
        weight = torch.randn(indices.numel(), requires_grad=True)
        eager, traced = (f(indptr, indices, x, weight) for f in (layer, torch_compiled))
        torch.testing.assert_close(traced, eager)
        for a, b in zip(*(torch.autograd.grad(y.sum(), (x, weight)) for y in (eager, traced))):
            torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    # Of their own: torch 2.11 cannot load what was exported with sizes that it took for symbols.
    args = tuple(each.detach().clone() for each in (indptr, indices, x, weight))
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, args), file)
    file.seek(0)
    fused.load()
    loaded = torch.export.load(file).module()
    torch.testing.assert_close(loaded(*args), layer(*args))


def test_autocast(path):
    num_src, indptr, indices, edge_id = graphs.named("small")
    x, weight = torch.randn(num_src, 6, requires_grad=True), torch.rand(indices.numel())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = csr_aggregate(indptr, indices, x, weight, edge_id=edge_id)
        assert csr_aggregate(indptr, indices, x.double(), weight).dtype == torch.float64
    assert found.dtype == torch.bfloat16
    assert near(found, by_loops(indptr, indices, edge_id, x, weight, "sum"), 1e-2)
    found.sum().backward()
    assert x.grad.dtype == torch.float32


def test_a_graph_is_known_by_its_tensors_and_forgotten_with_them():
    num_src, indptr, indices, edge_id = graphs.named("small")
    known = len(graph._known)
    first = graph.from_csr(indptr, indices, num_src, edge_id)
    assert graph.from_csr(indptr, indices, num_src, edge_id) is first
    assert first.transpose() is first.transpose()
    assert graph.from_csr(indptr, indices, num_src) is not first
    assert graph.from_csr(indptr, indices.clone(), num_src, edge_id) is not first
    indices[0] = (indices[0] + 1) % num_src
    changed = graph.from_csr(indptr, indices, num_src, edge_id)
    assert changed is not first and int(changed.indices[0]) == int(indices[0])
    del indptr, indices, edge_id
    gc.collect()
    assert len(graph._known) == known


def test_a_transpose_is_its_meaning(path):
    for name in graphs.NAMES:
        num_src, indptr, indices, _ = graphs.named(name)
        for index in (indices, indices.int()):
            found = graph.transpose(indptr, index, num_src)
            assert found.indices.dtype == index.dtype
            for a, b in zip(found, graph.transpose_plain(indptr, index, num_src)):
                assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("size", [1, 3, 64, 1000])
def test_more_edges_than_torch_sorts_at_once_on_cuda(size, monkeypatch):
    """They are sorted in pieces, of ``2**31 - 1`` edges there, to the order of one stable sort."""
    monkeypatch.setattr(graph, "_SORTABLE", size)
    for name in graphs.NAMES:
        num_src, indptr, indices, _ = graphs.named(name)
        if indices.numel() > 200 * size:
            continue  # a piece takes a fraction of a millisecond
        order = torch.argsort(indices, stable=True)
        count = torch.bincount(indices, minlength=num_src)
        row = torch.arange(indptr.numel() - 1).repeat_interleave(indptr.diff())
        for index in (indices, indices.int()):
            found = graph.transpose_plain(indptr, index, num_src)
            assert torch.equal(found.position.long(), order)
            assert torch.equal(found.indptr.diff(), count)
            assert torch.equal(found.indices.long(), row[order])
            edges = graph._sorted_in_a_trace(
                torch.stack([row.to(index), index]), row.numel(), num_src
            )
            assert torch.equal(edges.indptr, found.indptr) and torch.equal(edges.edge_id, order)
            assert torch.equal(edges.indices, row[order].to(index))


def test_bad_input(path):
    num_src, indptr, indices, edge_id = graphs.named("small")
    x = torch.randn(num_src, 4)
    with pytest.raises(ValueError, match="reduce must be one of sum, mean, max, min"):
        csr_aggregate(indptr, indices, x, reduce="median")
    with pytest.raises(ValueError, match=r"indices\[\d+\] is \d+, but there are only 3 source"):
        csr_aggregate(indptr, indices, x[:3])
    with pytest.raises(ValueError, match="indptr must rise from 0"):
        csr_aggregate(indptr + 1, indices, x)
    with pytest.raises(TypeError, match="x must be float32"):
        csr_aggregate(indptr, indices, x.long())
    with pytest.raises(TypeError, match="indices must be a one-dimensional int64 or int32"):
        csr_aggregate(indptr, indices.float(), x)
    with pytest.raises(ValueError, match=r"weight must be of shape \[\d+\] or"):
        csr_aggregate(indptr, indices, x, torch.ones(2))
    with pytest.raises(ValueError, match=r"needs x of shape \[num_src, 2, channels\]"):
        csr_aggregate(indptr, indices, x, torch.ones(indices.numel(), 2))
    with pytest.raises(ValueError, match=r"edge_id\[0\] is -1"):
        csr_aggregate(indptr, indices, x, edge_id=torch.full_like(edge_id, -1))


def test_the_op_itself_refuses_what_would_read_out_of_bounds(compiled):
    num_src, indptr, indices, edge_id = graphs.named("small")
    assert fused_is_ready()
    x, none = torch.randn(num_src, 4), (None, None, None)
    op = torch.ops.pyg_scale.csr_sum
    with pytest.raises(ValueError, match=r"indices\[\d+\] is \d+, but there are only 3"):
        op(indptr, indices, None, *none, x[:3], None, False)
    with pytest.raises(ValueError, match=r"indices\[\d+\] is -2"):
        op(indptr, torch.full_like(indices, -2), None, *none, x, None, False)
    wrong = indptr.clone()
    wrong[1] = indices.numel()
    with pytest.raises(ValueError, match="indptr goes down after row 1"):
        op(wrong, indices, None, *none, x, None, False)
    weight = torch.randn(indices.numel(), 1)
    with pytest.raises(ValueError, match="edge_id"):
        op(indptr, indices, edge_id + 1, *none, x, weight, False)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_differentiated_again(compiled, reduce, weighted):
    num_src, indptr, indices, edge_id = graphs.named("small")
    torch.manual_seed(2)
    x = torch.randn(num_src, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(indices.numel(), 2, dtype=torch.float64, requires_grad=True)

    def reduced(x, weight=None):
        return csr_aggregate(indptr, indices, x, weight, reduce, edge_id=edge_id)

    inputs = (x, weight) if weighted else (x,)
    assert torch.autograd.gradgradcheck(reduced, inputs, fast_mode=True)
