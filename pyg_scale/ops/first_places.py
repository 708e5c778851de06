"""The first places of numbers: equal ones find each other, on any device.

A sampler on a device learns by it which nodes of a batch it has met before
(``csrc/cuda/first_places.cuh``: a hash table that is as large as the batch, and not as the graph).
This module has the plain-torch meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import fused, library


def first_places(key: Tensor, distinct: int | None = None) -> Tensor:
    """The least place at which each number stands. Does not wait for the device.

    A negative number raises on the CPU; on a device the kernel traps, which torch reports at the
    next synchronisation.

    Args:
        key: ``int64`` ``[n]``, not negative, less than ``2**31`` numbers.
        distinct: How many of them differ at most; ``None``: all may. On a device the table has at
            most four times as many slots of 12 bytes, or 64; if more differ, the kernel may trap.

    Returns:
        ``int64`` ``[n]``: for each ``i`` the least ``j`` with ``key[j] == key[i]``.

    Raises:
        ValueError: If a number is negative, or there are too many.
        KernelsError: If there are no kernels and ``PYG_SCALE_KERNELS=require``.
    """
    if library.compiled() if key.device.type == "cpu" else fused.usable(key):
        found: Tensor = torch.ops.pyg_scale.first_places(
            key, key.numel() if distinct is None else distinct
        )
        return found
    return plain(key)


def plain(key: Tensor) -> Tensor:
    """The meaning of :func:`first_places` in plain torch."""
    if key.device.type == "cpu" and key.numel() and int(key.min()) < 0:
        raise ValueError("key must not be negative")
    ascending, order = torch.sort(key, stable=True)
    place = torch.arange(key.numel(), device=key.device)
    begins = torch.ones_like(ascending, dtype=torch.bool)
    begins[1:] = ascending[1:] != ascending[:-1]
    begin = torch.where(begins, place, 0).cummax(0).values  # of the equal ones, in their order
    return torch.empty_like(key).scatter_(0, order, order[begin])
