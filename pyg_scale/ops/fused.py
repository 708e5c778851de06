"""The devices for which the fused ops of layers are compiled, and their registration with torch.

The compiled library defines the ops and their kernels. This module registers shapes for tracing and
gradients with torch, once, as soon as the library is loaded. :func:`call` runs an op.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_scale.errors import KernelsError
from pyg_scale.ops import library, memory

_lock = threading.Lock()
_registered = False
_functions: dict[str, Callable[..., Any]] = {}


def usable(tensor: Tensor) -> bool:
    """Return True if compiled ops take tensors of the device; loads them on first use.

    Raises:
        KernelsError: If they cannot be used and ``PYG_SCALE_KERNELS=require``.
        ValueError: If ``PYG_SCALE_KERNELS`` is none of ``auto``, ``never`` and ``require``, or, on
            a CUDA device, ``PYG_SCALE_CUDA`` is invalid.
    """
    device = tensor.device
    if device.type == "cuda":
        return _ready() and _on_cuda(device.index or 0)
    return device.type == "cpu" and _ready()


def why_not(device: torch.device) -> str:
    """The reason why :func:`usable` returns False, and the remedy; empty if there is none."""
    if device.type == "cuda" and library.compiled():
        return _missing(device.index or 0)
    return ""


def why_not_generated(device: torch.device) -> str:
    """The reason why a device runs no kernels of generated sources, and the remedy; else empty."""
    if device.type != "cuda":
        return f"there are none for device {device.type}"
    if not library.compiled():
        return str(library.status()["reason"])
    return _missing_generated(device.index or 0)


def load() -> None:
    """Load and register the compiled ops, for example before loading an exported program.

    Raises:
        KernelsError: If they cannot be used, or must not be (``PYG_SCALE_KERNELS=never``).
        ValueError: If ``PYG_SCALE_KERNELS`` is none of ``auto``, ``never`` and ``require``.
    """
    library.load()
    _ready()


def differentiate(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Register the gradient of an op, as :func:`torch.library.register_autograd` does."""
    rule = torch.library.register_autograd
    rule(f"pyg_scale::{name}", backward, setup_context=setup_context)
    overload = getattr(torch.ops.pyg_scale, name).default

    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = overload(*args)
        setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    _functions[name] = applied(type(name, (torch.autograd.Function,), methods))


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The ``apply`` of a function of autograd without torch's Python code around it.

    That code looks for ``torch.func`` and for defaults of arguments, which takes as long as a small
    sum. Use it in eager calls only (:func:`is_eager`), with all arguments by position.
    """
    bound: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return bound


def call(name: str, *args: Any) -> Any:
    """Run an op whose gradient was registered by :func:`differentiate`.

    The same as calling the op, but without the Python code of ``torch.library`` around its
    gradient, which takes longer than the op itself on a small graph.

    Args:
        name: The op.
        args: All arguments of its schema, by position.
    """
    if not is_eager():
        return getattr(torch.ops.pyg_scale, name)(*args)
    if torch.is_grad_enabled():
        for arg in args:
            if isinstance(arg, Tensor) and arg.requires_grad:
                return _functions[name](*args)
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.pyg_scale, name).default(*args)


def is_eager() -> bool:
    """Return True unless a call is traced or transformed: then torch must see the op itself."""
    return not torch.compiler.is_compiling() and (torch._C._functorch.maybe_current_level() is None)


def in_batches(grad: Tensor) -> bool:
    """Return True for a gradient that stands for many, as with ``is_grads_batched=True``.

    Torch runs a backward pass once for all of them, if it has a rule for each op.
    """
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)


def divided(rows: Tensor, by: Tensor) -> Tensor:
    """``rows / by``, in recycled memory where nobody differentiates or traces it.

    Args:
        rows: ``[num_rows, channels]``.
        by: ``[num_rows, 1]``.
    """
    plain = type(rows) is Tensor and rows.is_cpu and rows.dtype in (torch.float32, torch.float64)
    if plain and is_eager() and not torch.is_grad_enabled() and not in_batches(rows):
        return torch.div(rows, by, out=memory.empty(rows.shape, rows.dtype))
    return rows / by


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


@functools.cache
def _missing_generated(device: int) -> str:
    """The same as :func:`_missing` for kernels of generated sources."""
    major, minor = torch.cuda.get_device_capability(device)
    return library.why_not_generated_on_cuda(10 * major + minor)
