"""Number of rows of a matrix without the zero rows at its end (``csrc/nonzero_rows.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import library


def nonzero_rows(x: Tensor) -> int:
    """Number of rows up to the last one that is not all zeros.

    Reads rows from the end, so it costs next to nothing if the last row is not zero.

    Args:
        x: ``[num_rows, num_columns]``, on the CPU, ``float32``, ``float64``, ``float16`` or
            ``bfloat16``.

    Raises:
        ValueError: In the compiled op, if it has another type, or is not contiguous.
    """
    if library.compiled():
        return torch.ops.pyg_scale.nonzero_rows(x)
    rows = (x != 0).any(dim=1).nonzero()
    return int(rows[-1]) + 1 if rows.numel() else 0
