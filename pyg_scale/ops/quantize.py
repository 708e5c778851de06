"""Floating point rows in fewer bytes, and back: int8 with a scale and a zero, or half precision.

A row (or a column) ``x`` has the zero ``z = (min + max) / 2`` and the scale
``s = max|x - z| / 127``, rounded up. ``x`` is stored as ``q = round((x - z) / s)``, an integer from
-127 to 127, and restored as ``q * s + z``, with an error of at most ``s / 2`` plus the rounding of
the two operations. (Uniform affine quantisation as in Jacob et al., "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyg_scale.ops import library

LEVELS = 127
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""The dtypes that can be quantised."""

_CHUNK = 1 << 22  # numbers at a time
_LARGEST = 0.99  # share of the dtype's range: a larger number may be rounded to infinity


def real_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scale and zero, in which numbers of ``dtype`` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def head_of(dtype: torch.dtype) -> int:
    """Size of a scale and a zero in bytes."""
    return 2 * real_of(dtype).itemsize


def quantize_rows(x: Tensor) -> Tensor:
    """Quantise each row with its own scale and zero.

    Args:
        x: ``[n, channels]``, floating point.

    Returns:
        ``uint8`` ``[n, head + channels]``: the bytes of scale and zero, then those of ``q``.

    Raises:
        ValueError: If a number is NaN, infinite, or too large; names the row.
    """
    head, real = head_of(x.dtype), real_of(x.dtype)
    out = torch.empty(x.size(0), head + x.size(1), dtype=torch.uint8)
    for begin, chunk in _chunks(x, real):
        low, high = _range(chunk, 1)
        scale, zero = _affine(low, high, real)
        rows = out[begin : begin + chunk.size(0)]
        rows[:, :head] = torch.stack([scale, zero], 1).view(-1).view(torch.uint8).view(-1, head)
        rows[:, head:] = _levels(chunk, scale[:, None], zero[:, None]).view(torch.uint8)
    return out


def quantize_columns(x: Tensor) -> Tensor:
    """Quantise each column with its own scale and zero.

    Args:
        x: ``[n, channels]``, floating point.

    Returns:
        ``uint8`` ``[n + head, channels]``: ``q``, then byte by byte the scales and the zeros.

    Raises:
        ValueError: If a number is NaN, infinite, or too large; names the row.
    """
    real, (size, columns) = real_of(x.dtype), x.shape
    low = torch.full((columns,), torch.inf, dtype=torch.float64)
    high = -low
    for _, chunk in _chunks(x, real):
        part = _range(chunk, 0)
        low, high = torch.minimum(low, part[0]), torch.maximum(high, part[1])
    if not size:
        low, high = torch.zeros_like(low), torch.zeros_like(high)
    scale, zero = _affine(low, high, real)
    out = torch.empty(size + head_of(x.dtype), columns, dtype=torch.uint8)
    both = torch.cat([scale, zero]).view(torch.uint8).view(2, columns, real.itemsize)
    out[size:] = both.permute(0, 2, 1).reshape(head_of(x.dtype), columns)
    for begin, chunk in _chunks(x, real):
        out[begin : begin + chunk.size(0)] = _levels(chunk, scale, zero).view(torch.uint8)
    return out


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round numbers to half precision.

    Raises:
        ValueError: If a number is NaN, infinite, or larger than ``dtype`` holds; names the row.
    """
    out = torch.empty(x.shape, dtype=dtype)
    for begin, chunk in _chunks(x, dtype):
        # via float32, so that float64 is rounded alike on every machine
        out[begin : begin + chunk.size(0)] = chunk.to(torch.float32).to(dtype)
    return out


def columns_of(tail: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero ``[channels]`` from the last ``head`` rows of :func:`quantize_columns`."""
    real, columns = real_of(dtype), tail.size(1)
    both = tail.reshape(2, real.itemsize, columns).permute(0, 2, 1)
    scale, zero = _as_numbers(both, real).view(2, columns)
    return scale, zero


def rows_of(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero ``[n]`` of :func:`quantize_rows`."""
    heads = _as_numbers(packed[:, : head_of(dtype)], real_of(dtype)).view(-1, 2)
    return heads[:, 0], heads[:, 1]


def dequantize(
    q: Tensor,
    index: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
) -> Tensor:
    """Read rows by index as floating point numbers, in recycled memory.

    Args:
        q: ``uint8`` of :func:`quantize_rows`, or with ``scale`` and ``zero`` the first ``n`` rows
            of :func:`quantize_columns`, or ``float16`` or ``bfloat16`` ``[n, channels]``.
        index: ``int64`` or ``int32`` ``[m]``.
        dtype: Dtype of the result.
        scale: Scales of columns, ``[channels]``.
        zero: Zeros of columns, ``[channels]``.

    Returns:
        ``[m, channels]``.

    Raises:
        IndexError: If a row does not exist.
    """
    none = torch.empty(0, 0)
    if library.compiled() and (q.size(1) <= 1 or q.stride(1) == 1):
        return torch.ops.pyg_scale.dequantize(
            q,
            index,
            none if scale is None else scale,
            none if zero is None else zero,
            dtype,
            library.num_threads(),
        )
    if index.numel():
        low, high = torch.aminmax(index)
        if low < 0 or high >= q.size(0):
            at = int(((index < 0) | (index >= q.size(0))).nonzero()[0])
            raise IndexError(
                f"index[{at}] is {int(index[at])}, but there are only {q.size(0)} rows"
            )
    rows, real = torch.index_select(q, 0, index), real_of(dtype)
    if q.dtype != torch.uint8:
        return rows.to(torch.float32).to(dtype)
    if scale is None or zero is None:
        scale, zero = (each[:, None] for each in rows_of(rows, dtype))
        rows = rows[:, head_of(dtype) :]
    return (rows.view(torch.int8).to(real) * scale + zero).to(dtype)


def bound_of(scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of a number of ``dtype`` after quantisation, ``float64``.

    It is half a step, two roundings in the dtype of the scale, and one to ``dtype``.
    """
    scale, zero = scale.to(torch.float64), zero.to(torch.float64)
    size, real = LEVELS * scale + zero.abs(), real_of(dtype)
    bound = scale / 2 + 2 * _rounding(size, real)
    return bound if dtype == real else bound + _rounding(size, dtype)


def narrow_bound_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of numbers of ``dtype`` stored as half precision ``x``, ``float64``.

    It is the rounding to half precision, and one to ``dtype`` if that is the other half precision.
    """
    size = x.to(torch.float64).abs()
    bound = _rounding(size, x.dtype)
    other = dtype != x.dtype and dtype in (torch.float16, torch.bfloat16)
    return bound + _rounding(size, dtype) if other else bound


# Parts ####################################################################################


def _chunks(x: Tensor, stored: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Checked chunks of rows in ``float64``, each with the number of its first row."""
    rows = max(1, _CHUNK // max(1, x[:1].numel()))
    largest = _largest(x.dtype, stored)
    for begin in range(0, x.size(0), rows):
        chunk = x[begin : begin + rows].detach().to(torch.float64)
        good = chunk.abs() <= largest
        if not bool(good.all()):
            at = (~good).nonzero()[0]
            value = float(chunk[tuple(at)])
            raise ValueError(
                f"row {begin + int(at[0])} has {value}, which {_called(stored)} cannot hold: "
                "features must be finite"
                + ("" if value != value or abs(value) == float("inf") else " and smaller")
            )
        yield begin, chunk


def _as_numbers(read: Tensor, real: torch.dtype) -> Tensor:
    """Bytes of any strides as a contiguous tensor of numbers."""
    return torch.empty(read.numel(), dtype=torch.uint8).copy_(read.reshape(-1)).view(real)


def _rounding(size: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of rounding a number of about this size to ``dtype``."""
    info = torch.finfo(dtype)
    return (size * (1 + 2 * info.eps) + info.smallest_normal) * (info.eps / 2) * (1 + 1e-6)


def _largest(x: torch.dtype, stored: torch.dtype) -> float:
    """The largest number of dtype ``x`` that is finite when restored."""
    if (x, stored) == (torch.float16, torch.bfloat16):
        return 65280.0  # the next bfloat16 is larger than any float16
    return torch.finfo(stored).max * (_LARGEST if stored == real_of(x) else 1)


def _called(stored: torch.dtype) -> str:
    half = stored in (torch.float16, torch.bfloat16)
    return str(stored).removeprefix("torch.") if half else "int8 with a scale"


def _range(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    if not x.numel():
        size = x.size(1 - dim)
        zeros = torch.zeros(size, dtype=torch.float64)
        return zeros, zeros
    return x.amin(dim), x.amax(dim)


def _affine(low: Tensor, high: Tensor, real: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale (rounded up, so that the ends are within 127 steps) and zero."""
    zero = (low / 2 + high / 2).to(real)
    middle = zero.to(torch.float64)
    spread = torch.maximum(high - middle, middle - low)
    scale = (spread / LEVELS).to(real)
    short = scale.to(torch.float64) * LEVELS < spread
    return torch.where(short, torch.nextafter(scale, scale.new_tensor(torch.inf)), scale), zero


def _levels(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    step = scale.to(torch.float64)
    steps = (x - zero.to(torch.float64)) / torch.where(step > 0, step, 1.0)
    return steps.round().clamp(-LEVELS, LEVELS).to(torch.int8)
