"""The device code of ``csrc/cuda/`` in the emulator, against the meaning of every op."""

from __future__ import annotations

import pytest
import torch

from pyg_scale.ops.adjacency import Adjacency
from pyg_scale.ops.aggregate import REDUCTIONS, csr_aggregate
from tests.ops import emulated, graphs
from tests.ops.test_aggregate import LAYOUTS, TOLERANCE, by_loops, near
from tests.ops.test_attention import attend, inputs_of

pytestmark = pytest.mark.matrix(4)


@pytest.fixture(autouse=True)
def nan_everywhere():
    """Fresh memory is NaN: who does not write all of a result is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", graphs.NAMES)
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", ["none", "edges", "heads"])
def test_aggregation_means_what_loops_mean(name, reduce, weighted):
    num_src, indptr, indices, edge_id = graphs.named(name)
    torch.manual_seed(1)
    x = torch.randn(num_src, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = None
    if weighted != "none":
        shape = (indices.numel(), 3) if weighted == "heads" else (indices.numel(),)
        weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ids = None if weighted == "edges" else edge_id
    expected = by_loops(indptr, indices, ids, x, weight, reduce)
    inputs = [t for t in (x, weight) if t is not None]
    gradient = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, inputs, gradient, allow_unused=True)
    with emulated.instead_of():
        found = csr_aggregate(indptr, indices, x, weight, reduce, edge_id=ids)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        ours = torch.autograd.grad(found, inputs, gradient, allow_unused=True)
    for a, b in zip(ours, theirs):
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


SHAPES = [(dtype, width) for dtype in TOLERANCE for width in (1, 3, 8, 17, 100, 132, 301, 602)]


@pytest.mark.parametrize(("dtype", "width"), [*SHAPES, (torch.float32, 1024)])
def test_aggregation_of_every_width_and_type(dtype, width):
    num_src, indptr, indices, edge_id = graphs.named("small")
    torch.manual_seed(width)
    x = torch.randn(num_src, width).to(dtype).requires_grad_()
    weight = torch.randn(indices.numel()).requires_grad_()
    for reduce in REDUCTIONS:
        for w in (None, weight):
            expected = by_loops(indptr, indices, edge_id, x, w, reduce)
            gradient = torch.randn(expected.shape).to(dtype)
            inputs = [t for t in (x, w) if t is not None]
            theirs = torch.autograd.grad(expected, inputs, gradient.double())
            with emulated.instead_of():
                found = csr_aggregate(indptr, indices.int(), x, w, reduce, edge_id=edge_id.int())
                ours = torch.autograd.grad(found, inputs, gradient)
            assert found.dtype == dtype
            assert near(found, expected, TOLERANCE[dtype]), (reduce, w is None)
            for a, b in zip(ours, theirs):
                assert near(a, b, TOLERANCE[dtype]), (reduce, w is None)


WIDTHS = (47, 100, 128, 500, 602)
BYTES = {  # of the widest load that divides a row
    torch.float32: dict(zip(WIDTHS, (4, 16, 16, 16, 8))),
    torch.bfloat16: dict(zip(WIDTHS, (2, 8, 16, 8, 4))),
}
PASSES = {  # of groups of 32 lanes that read the same indices
    torch.float32: dict(zip(WIDTHS, (1, 1, 1, 1, 2))),
    torch.bfloat16: dict(zip(WIDTHS, (1, 1, 1, 1, 2))),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_rows_are_read_once_in_wide_loads_and_indices_in_few_passes(dtype, width):
    indptr, indices = torch.tensor([0, 0, 4, 8, 40]), torch.arange(40) % 9  # read by fours
    x = torch.randn(9, width).to(dtype)
    emulated.counts()
    with emulated.instead_of():
        csr_aggregate(indptr, indices, x)
    loads, read, numbers = emulated.counts()
    assert read == indices.numel() * width * x.element_size()
    assert loads == read // BYTES[dtype][width]
    assert numbers <= indices.numel() * 32 * PASSES[dtype][width]
    assert numbers > indices.numel() * 32 * (PASSES[dtype][width] - 1)


@pytest.mark.parametrize("kind", ["gat", "gatv2", "dot"])
def test_attention_reads_a_row_once_if_lanes_have_one_load_of_a_head(kind):
    indptr, indices = torch.tensor([0, 4, 8, 40]), torch.arange(40) % 9
    adjacency = Adjacency(indptr, indices, 9)
    inputs = inputs_of(kind, adjacency, 2, 64, edges=False, dtype=torch.float32)
    emulated.counts()
    with emulated.instead_of(), torch.no_grad():
        attend(kind, adjacency, inputs)
    rows = {"gat": 40, "gatv2": 40 + 3, "dot": 2 * 40 + 3}[kind]  # destinations are read once each
    assert emulated.counts()[1] == rows * 2 * 64 * 4


def test_numbers_are_rounded_and_widened_as_torch_does():
    """A sum over one edge is the number itself: bits of every kind of number."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    indptr = torch.arange(2)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype).unsqueeze(0)
        with emulated.instead_of():
            found = csr_aggregate(indptr, torch.tensor([0]), x)
        same = (found == x) | (found.isnan() & x.isnan())
        assert bool(same.all())
    x = torch.randn(1, 1 << 16) * torch.logspace(-12, 12, 1 << 16)
    for dtype in (torch.bfloat16, torch.float16):
        one = torch.ones(1, x.numel()).to(dtype)
        with emulated.instead_of():  # 1 * weight, rounded
            found = csr_aggregate(indptr, torch.tensor([0]), one.view(1, -1, 1), x)
        assert torch.equal(found.flatten(), x.to(dtype).flatten())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_aggregation_of_layouts(layout):
    num_src, indptr, indices, edge_id = graphs.named("small")
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(num_src, 36))
    weight = torch.randn(indices.numel(), 2)[:, 0]
    for reduce in REDUCTIONS:
        with emulated.instead_of():
            found = csr_aggregate(indptr.int(), indices, x, weight, reduce, edge_id=edge_id)
        assert near(found, by_loops(indptr, indices, edge_id, x, weight, reduce), 1e-6)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_the_same_bits_in_any_order_of_threads(reduce, monkeypatch):
    num_src, indptr, indices, edge_id = graphs.named("pieces")
    torch.manual_seed(0)
    x = torch.randn(num_src, 2, 6, requires_grad=True)
    weight = torch.randn(indices.numel(), 2, requires_grad=True)
    gradient = torch.randn(indptr.numel() - 1, 2, 6)
    seen = []
    for order in ("forward", "backward", "forward"):
        monkeypatch.setenv("PYG_SCALE_EMULATOR_ORDER", order)
        with emulated.instead_of():
            out = csr_aggregate(indptr, indices, x, weight, reduce, edge_id=edge_id)
            seen.append((out.detach(), *torch.autograd.grad(out, (x, weight), gradient)))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_a_hub(reduce):
    num_src, indptr, indices = graphs.star()
    torch.manual_seed(0)
    x = torch.randn(num_src, 4).requires_grad_()
    with emulated.instead_of():
        found = csr_aggregate(indptr, indices, x, reduce=reduce)
        (gradient,) = torch.autograd.grad(found, x, torch.ones_like(found))
    rows = x[1:].double()
    assert near(found[0], rows.sum(0) if reduce == "sum" else rows.amax(0), 1e-5)
    assert torch.equal(found[1:], x[:1].expand(num_src - 1, -1))
    assert near(gradient[0], torch.full((4,), float(num_src - 1)), 1e-5)


def test_an_index_beyond_the_features_ends_the_kernel():
    emulated.load()
    op = torch.ops.pyg_scale_emulated.csr_sum
    none = (None, None, None, None)
    with pytest.raises(RuntimeError, match="csr_sum failed: the kernel trapped"):
        op(torch.tensor([0, 2]), torch.tensor([0, 3]), *none, torch.ones(3, 4), None, False)
    with pytest.raises(RuntimeError, match="csr_sum failed: the kernel trapped"):
        op(torch.tensor([0, 5, 2]), torch.tensor([0, 1]), *none, torch.ones(3, 4), None, False)
    found = op(torch.tensor([0, 2]), torch.tensor([0, 2]), *none, torch.ones(3, 4), None, False)
    assert found.tolist() == [[2.0] * 4]


def test_edges_of_no_row_are_refused():
    """Who looks for the row of such an edge would read beyond the pointers."""
    emulated.load()
    ops, none = torch.ops.pyg_scale_emulated, (None, None, None, None)
    pointers, indices, x = (
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(300).long(),
        torch.ones(3, 4),
    )
    with pytest.raises(Exception, match="there are edges, but indptr has no rows"):
        ops.csr_weight_grad(pointers, indices, None, x, x[:0], None, 1, False)
    with pytest.raises(Exception, match="there are edges, but indptr has no rows"):
        ops.csr_sum(pointers, indices, *none, x, None, False)
    assert ops.csr_sum(pointers, indices[:0], *none, x, None, False).shape == (0, 4)


def test_the_ops_are_the_emulated_ones_only_within():
    emulated.load()
    wrong = (
        torch.tensor([0, 1]),
        torch.tensor([0], dtype=torch.int16),
        *(None,) * 4,
        torch.ones(1, 1),
    )
    for _ in range(2):
        with pytest.raises(Exception, match="indices must be int32 or int64"):
            torch.ops.pyg_scale.csr_sum(*wrong, None, False)
        with (
            emulated.instead_of(),
            pytest.raises(Exception, match="indices must be a one-dimensional int64"),
        ):
            torch.ops.pyg_scale.csr_sum(*wrong, None, False)


# A program of its own, for sanitizers and planted faults #######################################

CHECKED = ("sum", "extreme", "weight_grad", "attention")
FAULTS = {
    "PYG_SCALE_FAULT_NO_GUARD": ("sum", "sum", True),
    "PYG_SCALE_FAULT_NO_CHECKS": ("sum", "bounds", True),
    "PYG_SCALE_FAULT_SHORT_SEGMENT": ("sum", "sum", False),
    "PYG_SCALE_FAULT_OWN_BOUNDS": ("weight_grad", "products", False),
    "PYG_SCALE_FAULT_NO_RESCALE": ("attention", "attention", False),
}


@pytest.mark.parametrize("sanitized", [False, True])
def test_alone_and_under_sanitizers(sanitized):
    done = emulated.run(emulated.program("check.cpp", CHECKED, sanitized=sanitized))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "0 failures\n"


@pytest.mark.slow  # each is compiled
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault):
    file, name, sanitized = FAULTS[fault]
    program = emulated.program("check.cpp", CHECKED, sanitized=sanitized, fault=fault, of=file)
    done = emulated.run(program, name)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    expected = {
        "PYG_SCALE_FAULT_NO_GUARD": "heap-buffer-overflow",
        "PYG_SCALE_FAULT_NO_CHECKS": "heap-buffer-overflow",
        "PYG_SCALE_FAULT_SHORT_SEGMENT": "sum: number",
        "PYG_SCALE_FAULT_NO_RESCALE": "attention: number",
        "PYG_SCALE_FAULT_OWN_BOUNDS": "waits at __shfl_xor_sync for lane",
    }[fault]
    assert expected in said
