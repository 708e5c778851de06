"""Whether the fused ops of the layers are compiled for a device, and their rules for torch.

The compiled library defines the ops and what they do on a device. Shapes for tracing, gradients
and the rest are told to torch here, once, as soon as the library is there.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from pyg_scale.errors import KernelsError
from pyg_scale.ops import library

_lock = threading.Lock()
_registered = False


def usable(tensor: Tensor) -> bool:
    """Whether compiled ops take tensors of that device; loads them on first use.

    Raises:
        KernelsError: If they cannot be used and ``PYG_SCALE_KERNELS=require``.
        ValueError: If ``PYG_SCALE_KERNELS`` is none of ``auto``, ``never`` and ``require``, or on
            a CUDA device ``PYG_SCALE_CUDA`` means nothing.
    """
    device = tensor.device
    if device.type == "cuda":
        return _ready() and _on_cuda(device.index or 0)
    return device.type == "cpu" and _ready()


def why_not(device: torch.device) -> str:
    """Why :func:`usable` says no, and what to do about it; empty if it is not to be told."""
    if device.type == "cuda" and library.compiled():
        return _missing(device.index or 0)
    return ""


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
                aggregate_rules.register_on_cuda()
                _registered = True
    return True


@torch.compiler.assume_constant_result
def _on_cuda(device: int) -> bool:
    reason = _missing(device)
    if reason and library.required():
        raise KernelsError(f"PYG_SCALE_KERNELS=require, but {reason}")
    return not reason


@functools.cache
def _missing(device: int) -> str:
    """Why there are no kernels for a device, and what to do; empty if there are."""
    major, minor = torch.cuda.get_device_capability(device)
    return library.why_not_on_cuda(10 * major + minor)
