"""Quantisation: the bounds hold, and the compiled op decodes to the bit as plain torch does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pyg_scale.ops import library, quantize
from pyg_scale.ops.quantize import FLOATS

HALVES = [torch.float16, torch.bfloat16]


def rows(dtype: torch.dtype, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    x = torch.randn(97, 33, generator=generator, dtype=torch.float64)
    x *= {
        "normal": 1.0,
        "tiny": 1e-30,
        "offset": 1e-3,
        "wide": torch.logspace(-6, 4, 97, dtype=torch.float64)[:, None],
        "constant": 0.0,
    }[kind]
    x += {"offset": 1000.0, "constant": 3.14159}.get(kind, 0.0)
    return x.to(dtype)


KINDS = ["normal", "tiny", "offset", "wide", "constant"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", ["row", "column"])
def test_the_bound_of_int8_holds(dtype: torch.dtype, kind: str, axis: str) -> None:
    x = rows(dtype, kind)
    every = torch.arange(x.size(0))
    if axis == "row":
        packed = quantize.quantize_rows(x)
        scale, zero = (v[:, None] for v in quantize.rows_of(packed, dtype))
        back = quantize.dequantize(packed, every, dtype)
        levels = packed[:, quantize.head_of(dtype) :]
    else:
        packed, head = quantize.quantize_columns(x), quantize.head_of(dtype)
        scale, zero = quantize.columns_of(packed[-head:], dtype)
        levels = packed[:-head]
        back = quantize.dequantize(levels, every, dtype, scale, zero)
    exact = x.double()
    # The number that is meant, q * s + z without rounding: half a step away at most.
    meant = levels.view(torch.int8).double() * scale.double() + zero.double()
    slack = 2e-15 * exact.abs().max()
    assert ((meant - exact).abs() <= scale.double() / 2 * (1 + 1e-9) + slack).all()
    # The number that comes back.
    assert back.dtype == dtype and back.shape == x.shape
    far = (back.double() - exact).abs()
    assert (far <= quantize.bound_of(scale, zero, dtype)).all()
    # The scale is as small as 127 steps to either side allow, by NumPy.
    low, high = exact.numpy().min(int(axis == "row")), exact.numpy().max(int(axis == "row"))
    np.testing.assert_allclose(
        scale.double().view(-1), (high - low) / 254, rtol=1e-2, atol=1e-4 * exact.abs().max()
    )
    if kind == "constant":
        assert torch.equal(back, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_the_bound_of_half_precision_holds(
    dtype: torch.dtype, half: torch.dtype, kind: str
) -> None:
    x = rows(dtype, kind)
    narrow = quantize.narrow(x, half)
    assert torch.equal(narrow, x.float().to(half))
    back = quantize.dequantize(narrow, torch.arange(97), dtype)
    far = (back.double() - x.double()).abs()
    assert (far <= quantize.narrow_bound_of(narrow, dtype)).all()
    if dtype == half:
        assert torch.equal(back, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [0, 1, 3, 16, 129])
@pytest.mark.parametrize("size", [0, 1, 40])
def test_compiled_and_plain_are_equal(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, columns: int, size: int
) -> None:
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    x = torch.randn(size, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    by_columns, head = quantize.quantize_columns(x), quantize.head_of(dtype)
    stored = [
        (quantize.quantize_rows(x), None, None),
        (by_columns[:-head], *quantize.columns_of(by_columns[-head:], dtype)),
        (quantize.narrow(x, torch.float16), None, None),
        (quantize.narrow(x, torch.bfloat16), None, None),
    ]
    many = torch.arange(3000) * 7 % max(size, 1) if size else torch.empty(0, dtype=torch.int64)
    for index in (many, many.int(), many[::3], many[:1], many[:0]):
        for q, scale, zero in stored:
            both = []
            for mode in ("require", "never"):
                monkeypatch.setenv("PYG_SCALE_KERNELS", mode)
                both.append(quantize.dequantize(q, index, dtype, scale, zero))
            assert both[0].dtype == dtype and both[0].shape == (index.numel(), columns)
            assert torch.equal(*both)


@pytest.mark.parametrize("mode", ["require", "never"])
@pytest.mark.parametrize("wrong", [[0, 5], [-1], [2, 2**40]])
def test_rows_that_do_not_exist(
    monkeypatch: pytest.MonkeyPatch, wrong: list[int], mode: str
) -> None:
    if not library.compiled():
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", mode)
    packed = quantize.quantize_rows(torch.randn(5, 3))
    bad = next(i for i in wrong if not 0 <= i < 5)
    with pytest.raises(IndexError, match=rf"is {bad}, but there are only 5 rows"):
        quantize.dequantize(packed, torch.tensor(wrong), torch.float32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_what_cannot_be_held_names_the_row(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "_CHUNK", 6)  # the row is counted over all pieces
    x = torch.zeros(20, 3)
    x[17, 1] = bad
    for encode in (
        quantize.quantize_rows,
        quantize.quantize_columns,
        lambda t: quantize.narrow(t, torch.float16),
    ):
        with pytest.raises(ValueError, match="row 17 has"):
            encode(x)
    x[17, 1] = 70000.0
    with pytest.raises(ValueError, match="row 17 has 70000.0, which float16"):
        quantize.narrow(x, torch.float16)
    assert torch.isfinite(quantize.narrow(x, torch.bfloat16)).all()
    x[17, 1] = 65504.0
    with pytest.raises(ValueError, match="row 17 has 65504.0, which bfloat16"):
        quantize.narrow(x.half(), torch.bfloat16)  # 65536 is no float16


def test_extremes_stay_finite() -> None:
    x = torch.tensor([[-3.3e38, 3.3e38, 0.0], [1e-45, 0.0, -1e-45], [0.0, 0.0, 0.0]])
    packed = quantize.quantize_rows(x)
    back = quantize.dequantize(packed, torch.arange(3), torch.float32)
    scale, zero = quantize.rows_of(packed, torch.float32)
    bound = quantize.bound_of(scale, zero, torch.float32)[:, None]
    assert torch.isfinite(back).all()
    assert ((back.double() - x.double()).abs() <= bound + 1e-43).all()


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(torch.float32, "wide")
    whole = quantize.quantize_rows(x), quantize.quantize_columns(x)
    monkeypatch.setattr(quantize, "_CHUNK", 100)
    assert torch.equal(quantize.quantize_rows(x), whole[0])
    assert torch.equal(quantize.quantize_columns(x), whole[1])
