"""Whether the fused ops of the layers are compiled for a device."""

from __future__ import annotations

from torch import Tensor


def usable(tensor: Tensor) -> bool:
    """Whether compiled ops take tensors of that device."""
    return False
