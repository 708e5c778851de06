"""Grouping by destination: any order, both index types, with and without kernels."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from pyg_scale.ops import csc as module
from pyg_scale.ops import library
from pyg_scale.ops.adjacency import Adjacency
from pyg_scale.ops.csc import (
    Compressed,
    build_csc,
    expand_pointers,
    from_pointers,
    ids_ascend,
    merge_csc,
    order_by_time,
    weight_prefix,
)


@pytest.fixture(params=["never", "require"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)
    return request.param


def edges(num_dst: int, num_src: int, num_edges: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A skewed multigraph: low ids are hubs, some nodes have no edges."""
    rng = np.random.default_rng(seed)
    dst = (num_dst * rng.random(num_edges) ** 3).astype(np.int64)
    return torch.from_numpy(dst), torch.from_numpy(rng.integers(0, num_src, num_edges))


def ids(csc: Compressed) -> Tensor:
    return torch.arange(csc.indices.numel()) if csc.edge_id is None else csc.edge_id.long()


def check(csc: Compressed, dst: Tensor, src: Tensor, num_dst: int) -> None:
    """By NumPy's stable sort."""
    order = np.argsort(dst.numpy(), kind="stable")
    assert csc.indptr.dtype == torch.int64 and csc.indptr.is_contiguous()
    count = np.bincount(dst.numpy(), minlength=num_dst)
    assert csc.indptr.tolist() == [0, *np.cumsum(count).tolist()]
    assert np.array_equal(ids(csc).numpy(), order)
    assert np.array_equal(csc.indices.numpy(), src.numpy()[order])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [(1, 1, 1), (5, 3, 0), (0, 0, 0), (7, 9, 40), (300, 200, 4000)])
def test_any_order(kernels: str, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    dst, src = (part.to(dtype) for part in edges(*size))
    csc = build_csc(dst, src, size[0], size[1])
    check(csc, dst, src, size[0])
    assert csc.indices.dtype == torch.int32


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_edges_for_any_number_of_threads(
    kernels: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "num_threads", lambda: threads)
    monkeypatch.setattr(module, "_CHUNK", 150_000)
    dst, src = edges(5000, 7000, 700_001)
    check(build_csc(dst, src, 5000, 7000), dst, src, 5000)
    ordered = dst.sort()[0]
    csc = build_csc(ordered, src, 5000, 7000)
    assert csc.edge_id is None
    check(csc, ordered, src, 5000)


def test_neighbour_and_id_lie_side_by_side(kernels: str) -> None:
    dst, src = edges(50, 50, 500)
    csc = build_csc(dst, src, 50, 50)
    assert csc.edge_id is not None
    assert csc.indices.stride() == csc.edge_id.stride() == (2,)
    assert csc.edge_id.data_ptr() - csc.indices.data_ptr() == csc.indices.element_size()


def test_strided_input(kernels: str) -> None:
    dst, src = edges(50, 60, 500)
    pairs = torch.stack([src, dst], dim=1)
    check(build_csc(pairs[:, 1], pairs[:, 0], 50, 60), dst, src, 50)
    ordered = pairs[dst.argsort(stable=True)]
    check(build_csc(ordered[:, 1], ordered[:, 0], 50, 60), *ordered.t().flip(0), 50)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_is_sorted_stays_where_it_is(kernels: str, dtype: torch.dtype, declared: bool) -> None:
    dst, src = edges(50, 60, 500)
    dst, src = dst.sort()[0].to(dtype), src.to(dtype)
    csc = build_csc(dst, src, 50, 60, is_sorted=declared)
    assert csc.edge_id is None and csc.indices.dtype == torch.int32
    check(csc, dst, src, 50)
    shared = csc.indices.data_ptr() == src.data_ptr()
    assert shared == (declared and dtype == torch.int32), "only what is promised may be shared"


def test_wide_ids_stay_wide(kernels: str) -> None:
    big = 2**31 + 5
    dst, src = torch.tensor([1, 0, 1]), torch.tensor([big - 1, 3, 2**31 - 1])
    csc = build_csc(dst, src, 2, big)
    assert csc.indices.dtype == torch.int64
    assert csc.indices.tolist() == [3, big - 1, 2**31 - 1] and ids(csc).tolist() == [1, 0, 2]
    shared = build_csc(dst.sort()[0], src, 2, big, is_sorted=True)
    assert shared.indices.data_ptr() == src.data_ptr()


@pytest.mark.parametrize("size", [20, 300_000])
@pytest.mark.parametrize("bad", [-1, 10, 2**40])
@pytest.mark.parametrize("end", ["destination", "source"])
def test_a_node_out_of_range_is_named(kernels: str, end: str, bad: int, size: int) -> None:
    dst, src = edges(10, 10, size)
    at = size - 7
    (dst if end == "destination" else src)[[at, size - 1]] = bad
    with pytest.raises(IndexError, match=rf"edge {at} has {end} {bad}, but there are 10 {end}"):
        build_csc(dst, src, 10, 10)


@pytest.mark.parametrize("size", [20, 300_000])
def test_unsorted_edges_declared_sorted_are_named(kernels: str, size: int) -> None:
    dst = torch.arange(size) // 2
    dst[size - 5] = 1
    with pytest.raises(ValueError, match=rf"(?s)is_sorted=True.*edge {size - 5} has 1, the one"):
        build_csc(dst, dst, size, size, is_sorted=True)
    dst[size // 2] = 0
    with pytest.raises(ValueError, match=f"edge {size // 2} has 0"):
        build_csc(dst, dst, size, size, is_sorted=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [(0, 5), (5, 0), (60, 40), (0, 0)], ids=str)
def test_merged_lists_are_one_list(kernels: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(size))
    dst, src = torch.randint(0, 7, (2, sum(size)), generator=generator).to(dtype)
    for ordered in (False, True):
        if ordered:
            dst = dst.sort().values
        lists = [build_csc(d, s, 7, 7) for d, s in zip(dst.split(size), src.split(size))]
        found, expected = merge_csc(*lists), build_csc(dst, src, 7, 7)
        assert torch.equal(found.indptr, expected.indptr)
        assert torch.equal(found.indices, expected.indices)
        assert (found.edge_id is None) == (expected.edge_id is None)
        if found.edge_id is not None and expected.edge_id is not None:
            assert torch.equal(found.edge_id, expected.edge_id)


def test_pointers(kernels: str) -> None:
    indptr, indices = torch.tensor([0, 2, 2, 3]), torch.tensor([4, 1, 0])
    csc = from_pointers(indptr.int(), indices, 3, 5)
    assert csc.indptr.dtype == torch.int64 and csc.indptr.tolist() == [0, 2, 2, 3]
    assert csc.indices.dtype == torch.int32 and csc.edge_id is None
    assert expand_pointers(indptr, 3).tolist() == [0, 0, 2]
    assert expand_pointers(torch.tensor([0]), 0).tolist() == []


@pytest.mark.parametrize(
    "wrong", [[0, 2, 3], [1, 2, 2, 3], [0, 2, 2, 2], [0, 3, 2, 3], [0, 1, 2, 4]]
)
def test_wrong_pointers(kernels: str, wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="pointers"):
        from_pointers(torch.tensor(wrong), torch.tensor([4, 1, 0]), 3, 5)


def test_a_neighbour_out_of_range_is_named(kernels: str) -> None:
    with pytest.raises(IndexError, match=r"edge 1 has neighbour 9, but there are 5"):
        from_pointers(torch.tensor([0, 2, 2, 3]), torch.tensor([4, 9, -1]), 3, 5)


@pytest.mark.parametrize("of_edges", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sorted_input", [False, True])
def test_order_by_time(
    kernels: str, sorted_input: bool, dtype: torch.dtype, of_edges: bool
) -> None:
    dst, src = edges(200, 300, 200_000)
    if sorted_input:
        dst = dst.sort()[0]
    rng = np.random.default_rng(5)
    time = torch.from_numpy(rng.integers(-5, 5, 200_000 if of_edges else 300))
    csc = build_csc(dst.to(dtype), src.to(dtype), 200, 300)
    out = order_by_time(csc, time, of_edges=of_edges)
    when = time.numpy() if of_edges else time.numpy()[src.numpy()]
    order = np.lexsort((np.arange(200_000), when, dst.numpy()))
    assert np.array_equal(ids(out).numpy(), order)
    assert np.array_equal(out.indices.numpy(), src.numpy()[order])
    assert out.edge_id is not None


@pytest.mark.parametrize("of_edges", [True, False])
def test_what_is_in_order_of_time_keeps_its_ids(kernels: str, of_edges: bool) -> None:
    dst, src = torch.tensor([0, 0, 0, 2, 2]), torch.tensor([0, 1, 1, 0, 3])
    time = torch.tensor([5, 5, 9, 1, 2]) if of_edges else torch.tensor([1, 3, 0, 3])
    out = order_by_time(build_csc(dst, src, 3, 4), time, of_edges=of_edges)
    assert out.edge_id is None and out.indices.tolist() == src.tolist()
    none = build_csc(dst[:0], src[:0], 3, 4)
    assert order_by_time(none, time[:0] if of_edges else time, of_edges=of_edges).edge_id is None


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 22])
def test_ids_in_order(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    dst, src = edges(7, 9, 40, seed=3)
    built = build_csc(dst, src, 7, 9)
    assert built.edge_id is not None and ids_ascend(built)
    for at in range(39):  # two neighbours exchanged, of one destination or of two
        pair = torch.stack([built.indices, built.edge_id], dim=1)
        pair[[at, at + 1]] = pair[[at + 1, at]]
        lists = zip(built.indptr[:-1].tolist(), built.indptr[1:].tolist())
        ascend = all(pair[a:b, 1].tolist() == sorted(pair[a:b, 1].tolist()) for a, b in lists)
        assert ids_ascend(Compressed(built.indptr, pair[:, 0], pair[:, 1])) == ascend
    assert ids_ascend(built._replace(edge_id=None))
    assert ids_ascend(build_csc(dst[:0], src[:0], 7, 9))


def expected_prefix(csc: Compressed, weight: list[float]) -> list[int]:
    """In exact arithmetic, but for the one division that is specified in floating point."""
    out, at = [], ids(csc).tolist()
    for v in range(csc.indptr.numel() - 1):
        mine = [weight[e] for e in at[csc.indptr[v] : csc.indptr[v + 1]]]
        total = 0
        for w in mine:
            fixed = math.floor(Fraction(w / max(mine)) * 2**32) if w else 0
            total += max(fixed, 1 if w else 0)
            out.append(total)
    return out


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("sorted_input", [False, True])
def test_weight_prefix(kernels: str, sorted_input: bool, dtype: torch.dtype) -> None:
    dst, src = edges(30, 30, 600)
    if sorted_input:
        dst = dst.sort()[0]
    csc = build_csc(dst, src, 30, 30)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(600, generator=generator) * 4).to(dtype)
    weight[::7] = 0
    weight[dst == 1] = 0  # nothing but zeros
    out = weight_prefix(csc, weight)
    assert out.dtype == torch.int64
    assert out.tolist() == expected_prefix(csc, weight.double().tolist())


def test_weights_far_apart(kernels: str) -> None:
    csc = build_csc(torch.zeros(4, dtype=torch.int64), torch.arange(4), 1, 4)
    weight = torch.tensor([5e-324, 1e308, 1e-30, 0.0], dtype=torch.float64)
    assert weight_prefix(csc, weight).tolist() == [1, 2**32 + 1, 2**32 + 2, 2**32 + 2]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf])
def test_bad_weights_are_named(kernels: str, bad: float) -> None:
    csc = build_csc(torch.tensor([1, 0, 0, 1]), torch.arange(4), 2, 4)
    with pytest.raises(ValueError, match=r"the weight of edge 2 is .*(finite|negative)"):
        weight_prefix(csc, torch.tensor([1.0, 0.0, bad, bad]))


@pytest.mark.skipif(not library.status()["loaded"], reason="the kernels are not compiled")
def test_with_kernels_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in fixed point, to the bit, at a size where threads share the work."""
    rng = np.random.default_rng(0)
    dst, src = edges(3000, 3000, 400_000)
    weight = torch.from_numpy(rng.lognormal(0, 8, 400_000))
    found = []
    for mode in ("never", "require"):
        monkeypatch.setenv("PYG_SCALE_KERNELS", mode)
        csc = order_by_time(build_csc(dst, src, 3000, 3000), src % 7, of_edges=True)
        found.append((csc.indices, csc.edge_id, weight_prefix(csc, weight)))
    for plain, compiled in zip(*found):
        assert torch.equal(plain, compiled)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_pointers_whose_differences_overflow(dtype):
    indptr = torch.tensor([0, torch.iinfo(dtype).max, -2, 4], dtype=dtype)
    assert bool((indptr.diff() >= 0).all())
    with pytest.raises(ValueError, match="must rise from 0"):
        from_pointers(indptr, torch.zeros(4, dtype=torch.int64), 3, 3)
    with pytest.raises(ValueError, match="must rise from 0"):
        Adjacency(indptr, torch.zeros(4, dtype=torch.int64), 3)


@pytest.mark.parametrize("pointers", [[0, 2, 9, 4], [0, -3, 2, 4], [0, 3, 2, 4], [0, 1, 2, 3]])
def test_pointers_that_cannot_be_written_out(pointers):
    with pytest.raises(ValueError, match="must rise from 0 to the number of edges, 4"):
        expand_pointers(torch.tensor(pointers), 4)
