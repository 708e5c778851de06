"""The recycled memory in which compiled ops return their tensors.

The first access to a page costs more than filling it, so the memory of a batch is reused as soon as
its last tensor is gone. The memory kept for reuse is bounded by the amount recently in use at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import library


class PoolStats(NamedTuple):
    """The bytes in the pool, and its counts since the process began."""

    live_bytes: int
    """Bytes of tensors in use. Tensors below 256 KiB are not in the pool."""
    free_bytes: int
    """Bytes of free memory kept for the next tensors."""
    blocks: int
    """Number of mappings, in use or free."""
    reuses: int
    """Number of tensors made in recycled memory."""
    maps: int
    """Number of tensors that needed new memory."""


def stats() -> PoolStats:
    """Statistics of the pool; all zero without compiled kernels, as only they use it."""
    if not library.compiled():
        return PoolStats(0, 0, 0, 0, 0)
    return PoolStats(*torch.ops.pyg_scale.pool_stats())


def empty(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor in recycled memory; in new memory without compiled kernels."""
    if library.compiled():
        return torch.ops.pyg_scale.pool_empty(list(sizes), dtype)
    return torch.empty(sizes, dtype=dtype)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """The tensor itself, whose memory moves to huge pages where the system has any for it.

    Entries that are read here and there then come faster. Memory that another process has too, or
    that is of a file, stays as it is, as does that of a device. A gigabyte takes about a second;
    after ten seconds the rest stays as it is.
    """
    if tensor.is_cpu and library.compiled():
        torch.ops.pyg_scale.prefer_huge_pages(tensor)
    return tensor


MANY_PAGES = 16 << 20
"""Bytes of a tensor with more pages of the usual size than a processor keeps the places of. Batches
of rows of 50 MB came 3 % faster from huge pages, 10 % if other work had passed through the caches
meanwhile; rows of 240 MB and of 1 GB 20 to 30 %."""


def trim() -> None:
    """Return all free memory of the pool to the system; the next batch requests it again.

    Useful after the last batch of a loop. During the loop the pool bounds itself.
    """
    if library.compiled():
        torch.ops.pyg_scale.pool_trim()


def give_back() -> None:
    """Return all free memory of the pool and of ``malloc`` to the system.

    Useful between two phases of which each needs much memory.
    """
    trim()
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if found is not None:
        found(0)
