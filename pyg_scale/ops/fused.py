"""The devices for which the fused ops of layers are compiled, and the ops' rules for torch.

The compiled library defines the ops and what they do on a device. Shapes for tracing, gradients
and the rest are told to torch here, once, as soon as the library is there. :func:`call` runs one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_scale.errors import KernelsError
from pyg_scale.ops import library

_lock = threading.Lock()
_registered = False
_functions: dict[str, type[torch.autograd.Function]] = {}


def usable(tensor: Tensor) -> bool:
    """Return True if compiled ops take tensors of that device; loads them on first use.

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
    """The reason why :func:`usable` says no, and the remedy; empty if there is none to tell."""
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


def differentiate(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Tell torch the gradient of an op, as :func:`torch.library.register_autograd` takes it."""
    rule = torch.library.register_autograd
    rule(f"pyg_scale::{name}", backward, setup_context=setup_context)
    overload = getattr(torch.ops.pyg_scale, name).default

    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = overload(*args)
        setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    _functions[name] = type(name, (torch.autograd.Function,), methods)


def call(name: str, *args: Any) -> Any:
    """Run an op whose gradient was told by :func:`differentiate`.

    The same as calling it, without what ``torch.library`` does around the gradient of an op in
    Python, which takes longer than the op itself on a small graph.

    Args:
        name: The op.
        args: All that its schema names, none by keyword.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return getattr(torch.ops.pyg_scale, name)(*args)
    if torch.is_grad_enabled():
        for arg in args:
            if isinstance(arg, Tensor) and arg.requires_grad:
                return _functions[name].apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.pyg_scale, name).default(*args)


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
    """The reason why there are no kernels for a device, and the remedy; empty if there are."""
    major, minor = torch.cuda.get_device_capability(device)
    return library.why_not_on_cuda(10 * major + minor)
