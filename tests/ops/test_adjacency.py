"""Edges grouped in one op: compiled, plain, and step by step."""

import contextlib

import pytest
import torch

from pyg_scale.nn.loops import with_self_loops
from pyg_scale.ops import adjacency, library
from pyg_scale.ops.adjacency import (
    Adjacency,
    from_edge_index,
    grouped,
    grouped_plain,
    transpose_on_cuda,
    transpose_plain,
)
from tests.ops import emulated

pytestmark = pytest.mark.skipif(not library.compiled(), reason="the kernels are not compiled")

SRC, DST = 40, 25
REPEATED = torch.tensor([[3], [5]]).expand(2, 4)


def edges(num_edges, seed=0):
    """With self-loops and edges twice."""
    ends = torch.randint(SRC, (2, num_edges), generator=torch.Generator().manual_seed(seed))
    return ends % torch.tensor([[SRC], [DST]])


@pytest.mark.parametrize("num_loops", [-1, 0, 7, DST])
@pytest.mark.parametrize("by_source", [False, True])
def test_compiled_and_plain_are_equal(num_loops, by_source):
    for given in (
        edges(300),
        edges(300).int(),
        edges(300).t().contiguous().t(),
        edges(600)[:, ::2],
        edges(0),
        edges(1),
        REPEATED,
    ):
        found = torch.ops.pyg_scale.csr_group(given, SRC, DST, num_loops, by_source)
        expected = grouped_plain(given, SRC, DST, num_loops, by_source)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.fixture(params=["compiled", "emulated", "emulated backward"])
def way(request, monkeypatch):
    """Where the ops run: on the CPU, or in the emulator, which runs threads in either order."""
    order = "backward" if "backward" in request.param else "forward"
    monkeypatch.setenv("PYG_SCALE_EMULATOR_ORDER", order)
    with emulated.instead_of() if "emulated" in request.param else contextlib.nullcontext():
        yield request.param


def many(num_edges, num_nodes):
    """More than a block of threads, and in rows more than a tile, of which one is long."""
    ends = torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(2))
    ends[0, ::3] = num_nodes - 1
    ends[1, ::7] = 0
    return ends


@pytest.mark.parametrize("num_loops", [-1, 0, 7, DST])
@pytest.mark.parametrize("by_source", [False, True])
def test_padded_groups_are_those_of_a_stable_sort(way, num_loops, by_source):
    cases = [(given, SRC, DST, num_loops) for given in (edges(300), edges(300).int(), edges(0))]
    cases += [(edges(300).t().contiguous().t(), SRC, DST, num_loops)]
    cases += [(edges(600)[:, ::2], SRC, DST, num_loops), (REPEATED, SRC, DST, num_loops)]
    cases += [(edges(600)[:, 100:], SRC, DST, num_loops)]
    cases += [(edges(0), 0, 0, min(num_loops, 0)), (many(700, 5000), 5000, 5000, num_loops)]
    for given in cases:
        found = torch.ops.pyg_scale.csr_group_padded(*given, by_source)
        expected = grouped_plain(*given, by_source, padded=True)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def hubs(num_edges):
    """Most edges are those of a few nodes at either end, which a block sorts."""
    generator = torch.Generator().manual_seed(3)
    ends = torch.randint(40, (2, num_edges), generator=generator)
    ends[0, torch.rand(num_edges, generator=generator) < 0.5] = 3
    ends[1, torch.rand(num_edges, generator=generator) < 0.5] = 5
    ends[:, :400] = 7  # side by side
    return ends


@pytest.mark.parametrize("num_loops", [-1, 40])
def test_hubs_are_sorted_as_other_rows(way, num_loops):
    """The last graph has more edges than a window has bits."""
    for num_edges in (2_000, *([300_000] if way == "emulated" and num_loops < 0 else [])):
        given = hubs(num_edges), 40, 40, num_loops, True
        found = torch.ops.pyg_scale.csr_group_padded(*given)
        for a, b in zip(found, grouped_plain(*given, padded=True), strict=True):
            assert torch.equal(a, b)


def test_transposed_edges_are_those_of_a_stable_sort(way):
    for given in (edges(300), edges(0), many(700, 5000), hubs(2_000)):
        num_nodes = int(given.max()) + 1 if given.numel() else 5
        by_row = grouped(given, num_nodes, num_nodes)
        for kind in (torch.int32, torch.int64):
            indices = by_row.indices.to(kind)
            found = transpose_on_cuda(by_row.indptr, indices, num_nodes)
            expected = transpose_plain(by_row.indptr, indices, num_nodes)
            for a, b in zip(found, expected, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)


def test_many_edges_are_sorted_by_torch_on_cuda(monkeypatch):
    by_row = grouped(edges(300), SRC, DST)
    monkeypatch.setattr(adjacency, "_AT_ONCE_ON_CUDA", 299)
    monkeypatch.setattr(torch.ops.pyg_scale, "csr_transpose_few", None)
    found = transpose_on_cuda(by_row.indptr, by_row.indices, SRC)
    for a, b in zip(found, by_row.transpose(), strict=True):
        assert torch.equal(a, b)


def test_nodes_that_do_not_exist_end_the_kernel():
    with emulated.instead_of():
        for wrong in ([[SRC], [0]], [[-1], [0]], [[0], [DST]], [[0], [-1]], [[0], [2**62]]):
            for num_loops in (-1, 0):
                given = torch.cat([edges(9), torch.tensor(wrong)], dim=1)
                with pytest.raises(RuntimeError, match="csr_group_padded failed: the kernel trapp"):
                    torch.ops.pyg_scale.csr_group_padded(given, SRC, DST, num_loops, True)
        indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([0, 4, 1])
        for pointers, sources, num_src in (
            (indptr, indices, 4),
            (indptr, -indices, 5),
            (indptr - 1, indices, 5),
            (indptr.clamp(max=2), indices, 5),
        ):
            with pytest.raises(RuntimeError, match="csr_transpose_few failed: the kernel trapped"):
                torch.ops.pyg_scale.csr_transpose_few(pointers, sources, num_src)


@pytest.mark.parametrize("num_loops", [None, 0, 7, DST])
def test_the_same_as_step_by_step(num_loops, monkeypatch):
    given = edges(300)
    found = grouped(given, SRC, DST, num_loops)
    monkeypatch.setattr(adjacency, "_AT_ONCE", -1)
    expected = from_edge_index(given, SRC, DST)
    if num_loops is not None:
        expected = with_self_loops(expected, num_loops).by_edge
    for name in ("indptr", "indices", "edge_id"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.known_transpose is not None and expected.known_transpose is None
    for a, b in zip(found.transpose(), expected.transpose(), strict=True):
        assert torch.equal(a, b)


def test_only_gradients_need_the_edges_by_source():
    with torch.no_grad():
        made = grouped(edges(300), SRC, DST)
    assert made.known_transpose is None
    assert torch.equal(made.transpose().position, grouped(edges(300), SRC, DST).transpose()[2])


def test_few_edges_are_grouped_once(monkeypatch):
    made, one = [], edges(300)
    plain = Adjacency.of_checked.__func__
    monkeypatch.setattr(
        Adjacency, "of_checked", classmethod(lambda *a: made.append(1) or plain(*a))
    )
    for _ in range(2):
        from_edge_index(one, SRC, DST)
        from_edge_index(one, SRC, DST, 7)
    assert len(made) == 2
    one[0, 0] += 1
    from_edge_index(one, SRC, DST, 7)
    assert len(made) == 3


def test_wrong_nodes(monkeypatch):
    for kernels in ("require", "never"):
        monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
        for wrong in ([[SRC], [0]], [[-1], [0]], [[0], [DST]], [[0], [2**62]]):
            with pytest.raises(ValueError, match="edge_index"):
                grouped(torch.tensor(wrong), SRC, DST)
            with pytest.raises(ValueError, match="edge_index|but there are only"):
                from_edge_index(torch.tensor(wrong), SRC, DST)
