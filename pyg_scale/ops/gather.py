"""Rows of a tensor by index, ``x[index]``, such as a batch's features from all features."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import library

_INDEX_TYPES = (torch.int64, torch.int32)


def gather(x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Select entries of ``x`` along ``dim``: ``torch.index_select`` into recycled memory.

    The result never shares memory with ``x``. Where ``x`` requires grad and grad mode is on, the
    result is part of the graph, as with ``torch.index_select``. Inputs that the compiled op does
    not take (another device, ``dim != 0``, rows that are not contiguous) go through torch.

    Args:
        x: ``[num_rows, ...]``, any dtype.
        index: ``int64`` or ``int32`` ``[n]``; copied to the device of ``x`` if it is on another
            one.
        dim: The dimension to select from.

    Returns:
        ``[n, ...]``, with the dtype and on the device of ``x``.

    Raises:
        IndexError: If an index is negative or too large.
        TypeError: If ``index`` is not one-dimensional or neither ``int64`` nor ``int32``.
    """
    if index.dim() != 1 or index.dtype not in _INDEX_TYPES:
        raise TypeError(
            f"index must be a one-dimensional int64 or int32 tensor "
            f"(got {index.dtype} of shape {list(index.shape)})"
        )
    if _takes(x, index, dim) and library.compiled():
        x = x.detach() if x.requires_grad else x
        return torch.ops.pyg_scale.gather(x, index, library.num_threads())
    return _plain(x, index, dim)


def _takes(x: Tensor, index: Tensor, dim: int) -> bool:
    """Return True if the compiled op applies."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.is_cpu
        and index.is_cpu
        and x.layout is torch.strided
        and x.dim() > 0
        and (dim == 0 or dim == -x.dim())
        and not (x.requires_grad and torch.is_grad_enabled())
        and not (x.is_quantized or x.is_conj() or x.is_neg())
        and _rows_contiguous(x)
    )


def _rows_contiguous(x: Tensor) -> bool:
    if x.numel() and x.is_contiguous():  # which accepts any strides if there are no rows
        return True
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:])):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _plain(x: Tensor, index: Tensor, dim: int) -> Tensor:
    _check_range(index, x.size(dim))
    index = index.to(x.device)
    if x.dtype.itemsize == 1 and not x.is_quantized and x.layout == torch.strided:
        # index_select does not support every 8-bit type
        return torch.index_select(x.view(torch.uint8), dim, index).view(x.dtype)
    return torch.index_select(x, dim, index)


def _check_range(index: Tensor, size: int) -> None:
    """Refuse an ``index`` outside of ``[0, size)``, as the compiled op does."""
    if index.numel() == 0 or index.device.type != "cpu":  # must not wait for a GPU
        return
    low, high = torch.aminmax(index)
    if low < 0 or high >= size:
        at = int(((index < 0) | (index >= size)).nonzero()[0])
        raise IndexError(f"index[{at}] is {int(index[at])}, but there are only {size} rows")
