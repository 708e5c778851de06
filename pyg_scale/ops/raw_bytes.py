"""The memory of a tensor as bytes, to hash, to send or to write."""

from __future__ import annotations

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, ``uint8`` ``[nbytes]``; no copy.

    A tensor of no or of one element counts as contiguous whatever its strides are, and
    ``contiguous()`` leaves them: so ``arange(1)[1::2]`` has a stride of 2, for which
    ``view(torch.uint8)`` would raise.

    Raises:
        RuntimeError: If the tensor is not contiguous.
    """
    flat = tensor.view(-1) if tensor.numel() > 1 else tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)
