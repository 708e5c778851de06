"""The memory of a tensor as bytes, to hash, to send or to write."""

from __future__ import annotations

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, ``uint8`` ``[nbytes]``; no copy.

    A tensor of at most one element counts as contiguous whatever its strides, and ``contiguous()``
    keeps them. For ``arange(1)[1::2]``, which has a stride of 2, ``view(torch.uint8)`` would raise.

    Raises:
        RuntimeError: If the tensor is not contiguous.
    """
    flat = tensor.view(-1) if tensor.numel() > 1 else tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)
