"""Whether the fused ops of the layers are compiled for a device, and their rules for torch.

The compiled library defines the ops and what they do on a device. Shapes for tracing, gradients
and the rest are told to torch here, once, as soon as the library is there.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from pyg_scale.ops import library

_lock = threading.Lock()
_registered = False


def usable(tensor: Tensor) -> bool:
    """Whether compiled ops take tensors of that device; loads them on first use.

    Raises:
        KernelsError: If they cannot be used and ``PYG_SCALE_KERNELS=require``.
        ValueError: If ``PYG_SCALE_KERNELS`` is none of ``auto``, ``never`` and ``require``.
    """
    return tensor.device.type == "cpu" and _ready()


def load() -> None:
    """Load the compiled ops with their rules: before an exported program is loaded, for one.

    Raises:
        KernelsError: If they cannot be used, or must not be (``PYG_SCALE_KERNELS=never``).
        ValueError: If ``PYG_SCALE_KERNELS`` is none of ``auto``, ``never`` and ``require``.
    """
    library.load()
    _ready()


@torch.compiler.assume_constant_result
def _ready() -> bool:
    global _registered
    if not library.compiled():
        return False
    if not _registered:
        from pyg_scale.ops import aggregate_rules, attention_rules

        with _lock:
            if not _registered:
                aggregate_rules.register()
                attention_rules.register()
                _registered = True
    return True
