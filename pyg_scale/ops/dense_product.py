"""Products of matrices of features with small ones (``csrc/dense_product.cpp``).

Most of the time of a fused layer is that of its linear maps. torch takes them from MKL, which uses
AVX2 on processors of AMD, also where they have AVX-512: at most half of what they can do. oneDNN,
which torch has too, is as fast as the kernel here, but compiles one for every number of rows, and
each batch has another: that took 0.3 to 1.2 ms a product.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyg_scale.ops import fused, library, memory

_TYPES = (torch.float32, torch.float64)
_PLAIN = (Tensor, torch.nn.Parameter)
_MIN_MACS = 1 << 19
"""Number of multiply-adds of a product from which on the compiled op makes up for its call."""


def pays() -> bool:
    """Return True where the compiled op is there and faster than torch's products."""
    return library.compiled() and _is_faster()


@functools.cache
def _is_faster() -> bool:
    return torch.ops.pyg_scale.dense_product_pays()


def mm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """``a @ b + bias``, by the compiled op where it is faster than :func:`torch.mm`.

    That is on processors of AMD with AVX-512, for ``float32`` and ``float64`` on the CPU. Numbers
    differ from those of torch by rounding. While gradients are enabled, torch computes the product:
    call it in a function for autograd.

    Args:
        a: ``[num_rows, depth]``, possibly transposed.
        b: ``[depth, num_columns]``, possibly transposed.
        bias: ``[num_columns]``, or ``None``.
        out: ``[num_rows, num_columns]``, where the result is written. Without it the result is in
            recycled memory where the compiled op computes it.
        add: Add the product to ``out``, which must be given, without a bias.

    Returns:
        ``out``, or a new tensor.

    Raises:
        ValueError: If there is a bias, or no ``out``, with ``add``.
    """
    if add and (bias is not None or out is None):
        raise ValueError("mm: add=True takes out and no bias")
    writable = out is None or out.stride(1) == 1
    if writable and not torch.is_grad_enabled() and covers(a, b):
        made = memory.empty([a.size(0), b.size(1)], a.dtype) if out is None else out
        torch.ops.pyg_scale.dense_product(a, b, bias, made, add)
        return made
    if add:
        assert out is not None
        return out.addmm_(a, b)
    if bias is not None:
        return torch.addmm(bias, a, b, out=out)
    return torch.mm(a, b, out=out)


def covers(a: Tensor, b: Tensor) -> bool:
    """Return True for matrices whose product, without gradients, :func:`mm` has the op compute."""
    return (
        not torch.compiler.is_compiling()
        and a.size(0) * b.numel() >= _MIN_MACS
        and a.dtype in _TYPES
        and a.dtype is b.dtype
        and a.is_cpu
        and b.is_cpu
        and a.layout is b.layout is torch.strided
        and type(a) in _PLAIN
        and type(b) in _PLAIN
        and not is_transformed(a, b)
        and pays()
    )


def is_transformed(*tensors: Tensor) -> bool:
    """Return True for a call that torch transforms or watches, as for many gradients at once."""
    return (
        not fused.is_eager()
        or torch._C._len_torch_function_stack() > 0
        or getattr(forward_ad, "_current_level", -1) >= 0
        or any(fused.in_batches(each) for each in tensors)
    )
