"""``gather`` is ``index_select``: every dtype, layout and error, with and without kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pyg_scale.ops import library
from pyg_scale.ops.gather import gather

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.fixture(params=["never", "require"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)
    return request.param


def raw(x: torch.Tensor) -> np.ndarray:
    """The bytes of each row, whatever the dtype."""
    return x.contiguous().view(torch.uint8).numpy().reshape(x.size(0), -1)


def bytes_like(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16, 33, 100])
def test_rows_are_copied_bit_by_bit(kernels: str, dtype: torch.dtype, width: int) -> None:
    x = bytes_like((40, width), dtype)
    index = torch.randint(0, 40, (75,), generator=torch.Generator().manual_seed(width))
    out = gather(x, index)
    assert out.dtype == dtype and out.shape == (75, width) and out.is_contiguous()
    assert np.array_equal(raw(out), raw(x)[index.numpy()])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(9,), (9, 1), (9, 3, 5), (9, 0), (9, 2, 1, 4)])
def test_shapes_and_index_types(
    kernels: str, shape: tuple[int, ...], index_dtype: torch.dtype
) -> None:
    x = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    index = torch.tensor([8, 0, 0, 3], dtype=index_dtype)
    out = gather(x, index)
    assert torch.equal(out, x[index.long()])
    assert gather(x, index[:0]).shape == (0, *shape[1:])


def test_strides(kernels: str) -> None:
    base = torch.randn(30, 12)
    index = torch.tensor([3, 1, 4, 1, 5, 9])
    for x in (base[:, 2:7], base[::3], base.t(), base[:, ::2], base[:1].expand(30, 12), base[4]):
        wanted = index[index < x.size(0)]
        assert torch.equal(gather(x, wanted), x[wanted])
    assert torch.equal(gather(base, torch.arange(20)[::3]), base[::3][:7])
    assert torch.equal(gather(base, index, dim=1), base[:, index])
    assert torch.equal(gather(base, index, dim=-2), base[index])


@pytest.mark.parametrize("width", [4, 7])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_that_follow_each_other(kernels: str, width: int, index_dtype: torch.dtype) -> None:
    # Runs of 16 rows and more are copied at once: those that end with the rows, with the index,
    # with a gap, and what only looks like one from its ends.
    base, ends = torch.randn(100, 12), torch.arange(30, 46)
    ends[7] = 3
    runs = [torch.arange(84, 100), torch.arange(15), torch.arange(40), ends, torch.arange(5, 25)]
    index = torch.cat(runs).to(index_dtype)
    for x in (base[:, :width].contiguous(), base[:, :width], base.repeat(2, 1)[::2, :width]):
        assert torch.equal(gather(x, index), x[index.long()])
    wide = torch.stack([index, index.flip(0)], dim=1)
    assert torch.equal(gather(base, wide[:, 0]), base[index.long()])


def test_a_run_that_leaves_the_rows(kernels: str) -> None:
    index = torch.arange(90, 110)
    with pytest.raises(IndexError, match=r"index\[10\] is 100, but there are only 100 rows"):
        gather(torch.zeros(100, 8), index)


def test_no_rows_in_any_order_of_dimensions(kernels: str) -> None:
    x = torch.empty(2, 10).t()[:0]  # torch calls it contiguous
    index = torch.empty(0, dtype=torch.int64)
    assert gather(x, index).shape == (0, 2)
    with pytest.raises(IndexError, match="only 0 rows"):
        gather(x, index.new_zeros(1))


@pytest.mark.parametrize("bad", [-1, 5, 2**40, -(2**62)])
@pytest.mark.parametrize("width", [0, 1, 7])
def test_an_index_out_of_range_is_named(kernels: str, bad: int, width: int) -> None:
    index = torch.tensor([0, 4, bad, 1, bad])
    with pytest.raises(IndexError, match=rf"index\[2\] is {bad}, but there are only 5 rows"):
        gather(torch.zeros(5, width), index)


@pytest.mark.parametrize(
    "index", [torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2), torch.tensor([True, False])]
)
def test_what_is_no_index_is_refused(kernels: str, index: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="one-dimensional int64 or int32"):
        gather(torch.zeros(5, 2), index)


def test_large_output_for_any_number_of_threads(kernels: str) -> None:
    before = torch.get_num_threads()
    x = torch.randn(20_000, 25)
    index = torch.randint(0, 20_000, (60_000,))
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(gather(x, index), x[index])
            bad = index.clone()
            bad[[59_999, 100, 40_000]] = 20_000
            with pytest.raises(IndexError, match=r"index\[100\] is 20000, .* only 20000 rows"):
                gather(x, bad)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("row_bytes", [65, 96, 128, 400, 832, 1088, 1601, 9000])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_outputs_larger_than_the_caches(
    kernels: str, row_bytes: int, index_dtype: torch.dtype
) -> None:
    """They are written by lines, of which several rows and threads may have a part."""
    num_rows = 3000
    x = bytes_like((num_rows, row_bytes + 7), torch.uint8)[:, :row_bytes]  # rows lie apart
    generator = torch.Generator().manual_seed(row_bytes)
    index = torch.randint(0, num_rows, ((9 << 20) // row_bytes,), generator=generator)
    index = index.to(index_dtype)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert np.array_equal(raw(gather(x, index)), raw(x)[index.numpy()])
            wrong = index.clone()
            wrong[-2] = num_rows
            where = rf"index\[{index.numel() - 2}\] is {num_rows}, .* only {num_rows} rows"
            with pytest.raises(IndexError, match=where):
                gather(x, wrong)
    finally:
        torch.set_num_threads(threads)


def test_never_aliases_and_carries_a_graph_only_where_asked(kernels: str) -> None:
    x = torch.randn(300, 300)
    whole = gather(x, torch.arange(300))
    assert whole.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    x.requires_grad_()
    index = torch.tensor([1, 1, 2])
    out = gather(x, index)
    out.sum().backward()
    assert x.grad[1].eq(2).all() and x.grad[2].eq(1).all() and x.grad[0].eq(0).all()
    with torch.no_grad():
        assert not gather(x, index).requires_grad


def test_the_result_is_a_tensor_like_any_other() -> None:
    x = torch.randn(2000, 64)
    out = gather(x, torch.arange(2000))
    out.mul_(2)
    assert torch.equal(out, x * 2)
    assert torch.equal(torch.from_numpy(out.numpy()), x * 2)
    out.share_memory_()
    assert out.is_shared() and torch.equal(out, x * 2)


def test_an_index_of_another_device_is_copied_to_that_of_the_rows() -> None:
    with FakeTensorMode():  # knows devices, needs none
        x = torch.empty(5, 2, device="cuda")
        found = gather(x, torch.empty(0, dtype=torch.int64))
    assert found.device == x.device
    assert found.shape == (0, 2)
