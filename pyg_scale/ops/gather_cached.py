"""Rows that are partly on a device and partly elsewhere, in one pass.

On a CUDA device the compiled op (``csrc/cuda/gather_cached.cuh``) looks the rows up and copies them
in one kernel, which reads the rest from the device, or over the bus from pages of the host that are
mapped for it (:mod:`pyg_scale.ops.mapped_rows`; DGL and GLT call this UVA). This module has its
plain-torch meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.errors import KernelsError
from pyg_scale.ops import fused, library
from pyg_scale.ops.mapped_rows import MappedRows

_INDEX_TYPES = (torch.int64, torch.int32)


def gather_cached(
    cached: Tensor,
    rest: Tensor | MappedRows,
    index: Tensor,
    slot_of: Tensor | None = None,
) -> Tensor:
    """Read rows from a cache, and those that it lacks from elsewhere.

    The call does not wait for the device. A wrong number raises on the CPU; on a device the kernel
    traps, which torch reports at the next synchronisation.

    Args:
        cached: ``[num_slots, ...]``, any dtype.
        rest: ``[m, ...]``, like ``cached``: on the same device, or mapped for it.
        index: ``int64`` or ``int32`` ``[n]``. With ``slot_of``, the ids of rows. Without it,
            places: ``p`` from 0 on is row ``p`` of ``cached``, ``-1 - p`` is row ``p`` of ``rest``.
        slot_of: ``int32`` ``[m]``, the place of each row in ``cached``; if negative, the row is at
            its own id in ``rest``.

    Returns:
        ``[n, ...]`` on the device of ``cached``.

    Raises:
        TypeError: If ``index`` or ``slot_of`` is of another type.
        ValueError: If the rows differ in type or shape, or are not on one device.
        IndexError: On the CPU, if a number is not a row.
        KernelsError: If ``rest`` is mapped and there are no kernels to read it.
    """
    held = rest.tensor if isinstance(rest, MappedRows) else rest
    _check(cached, held, index, slot_of)
    if library.compiled() if cached.device.type == "cpu" else fused.usable(cached):
        found: Tensor = torch.ops.pyg_scale.gather_cached(cached, held, index, slot_of)
        return found
    if isinstance(rest, MappedRows):
        reason = fused.why_not(cached.device) or "PYG_SCALE_KERNELS=never forbids them"
        raise KernelsError(f"only compiled kernels can read rows of the host: {reason}")
    return plain(cached, held, index, slot_of)


def plain(cached: Tensor, rest: Tensor, index: Tensor, slot_of: Tensor | None = None) -> Tensor:
    """The meaning of :func:`gather_cached` in plain torch."""
    index = index.to(torch.int64)
    place = index if slot_of is None else _rows(slot_of, index, "slot_of").to(torch.int64)
    inside = place >= 0
    other = index if slot_of is not None else -1 - place
    shape = (-1, *[1] * (cached.dim() - 1))
    found = _rows(_bits(cached), torch.where(inside, place, 0), "cached", inside)
    left = _rows(_bits(rest), torch.where(inside, 0, other), "rest", ~inside)
    return torch.where(inside.view(shape), found, left).view(cached.dtype)


def _rows(x: Tensor, index: Tensor, name: str, wanted: Tensor | None = None) -> Tensor:
    """``x[index]``; rows that are not ``wanted`` are arbitrary."""
    if x.device.type == "cpu":
        bad = (index < 0) | (index >= x.size(0))
        bad = bad if wanted is None else bad & wanted
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise IndexError(
                f"index[{at}] leads to row {int(index[at])} of {name}, which has {x.size(0)} rows"
            )
    if x.size(0) == 0:
        return x.new_zeros([index.numel(), *x.shape[1:]])
    return torch.index_select(x, 0, index.clamp(0, x.size(0) - 1))


def _bits(x: Tensor) -> Tensor:
    """The same bits in a type that every operation of torch takes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _check(cached: Tensor, rest: Tensor, index: Tensor, slot_of: Tensor | None) -> None:
    if index.dim() != 1 or index.dtype not in _INDEX_TYPES:
        raise TypeError(
            f"index must be a one-dimensional int64 or int32 tensor "
            f"(got {index.dtype} of shape {list(index.shape)})"
        )
    if cached.dim() == 0 or cached.shape[1:] != rest.shape[1:] or cached.dtype != rest.dtype:
        raise ValueError(
            f"cached and rest must have rows alike in type and shape (got {cached.dtype} of shape "
            f"{list(cached.shape)} and {rest.dtype} of shape {list(rest.shape)})"
        )
    if index.device != cached.device:
        raise ValueError(f"index is on {index.device}, expected {cached.device}, as cached")
    if slot_of is None:
        return
    if slot_of.dtype != torch.int32 or slot_of.dim() != 1 or slot_of.device != cached.device:
        raise TypeError(
            f"slot_of must be a one-dimensional int32 tensor on {cached.device} "
            f"(got {slot_of.dtype} of shape {list(slot_of.shape)} on {slot_of.device})"
        )
    if slot_of.numel() != rest.size(0):
        raise ValueError(
            f"slot_of must have an entry for each of {rest.size(0)} rows (got {slot_of.numel()})"
        )
