"""The recycled memory that compiled ops return their tensors on.

Pages that a process touches for the first time cost more than filling them, so the memory of a
batch is used again as soon as its last tensor is gone. What is kept for that is bounded by what
was recently in use at a time.
"""

from __future__ import annotations

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
    """Bytes that wait for the next tensor."""
    blocks: int
    """Mappings, in use or free."""
    reuses: int
    """Tensors that were made on recycled memory."""
    maps: int
    """Tensors that needed new memory."""


def stats() -> PoolStats:
    """Statistics of the pool; all zero without compiled kernels, which alone use it."""
    if not library.compiled():
        return PoolStats(0, 0, 0, 0, 0)
    return PoolStats(*torch.ops.pyg_scale.pool_stats())


def empty(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor on recycled memory; on fresh memory without compiled kernels."""
    if library.compiled():
        return torch.ops.pyg_scale.pool_empty(list(sizes), dtype)
    return torch.empty(sizes, dtype=dtype)


def trim() -> None:
    """Give all free memory of the pool back to the system; the next batch faults it in again.

    Sensible where a loop ends for good. Within one the pool bounds itself.
    """
    if library.compiled():
        torch.ops.pyg_scale.pool_trim()
