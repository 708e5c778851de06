"""What torch must know of the compiled ops behind ``aggregate``: shapes and gradients.

The ops take the graph as six tensors: by destination (``indptr``, ``indices``, ``edge_id``), and by
source (``t_indptr``, ``t_indices``, ``t_position``) for gradients. In a trace, where nothing is
kept between calls, the edges are grouped by source in the backward pass if they were not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

_INT32_MAX = 2**31 - 1


def register() -> None:
    """Tell torch; once, after the compiled library was loaded."""
    fakes: dict[str, Callable[..., Any]] = {
        "csr_transpose": _fake_transpose,
        "csr_sum": _fake_sum,
        "csr_extreme": _fake_extreme,
        "csr_extreme_grad": _fake_extreme_grad,
        "csr_weight_grad": _fake_weight_grad,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"pyg_scale::{name}", fake)
    rule = torch.library.register_autograd
    rule("pyg_scale::csr_sum", _sum_backward, setup_context=_sum_context)
    rule("pyg_scale::csr_extreme", _extreme_backward, setup_context=_extreme_context)
    for name in ("csr_extreme_grad", "csr_weight_grad"):
        rule(f"pyg_scale::{name}", no_double_backward, setup_context=no_context)


def register_on_cuda() -> None:
    """Tell torch what is not compiled for CUDA; once, where the rest of the ops is."""
    # Once per graph: torch's own sort is what a kernel would be.
    torch.library.impl("pyg_scale::csr_transpose", "CUDA", _transpose_plain)


def _transpose_plain(
    indptr: Tensor, indices: Tensor, num_src: int
) -> tuple[Tensor, Tensor, Tensor]:
    from pyg_scale.ops.adjacency import transpose_plain

    pointers, rows, position = transpose_plain(indptr, indices, num_src)
    return pointers, rows, position


def no_context(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep nothing."""


def no_double_backward(ctx: Any, *grads: Tensor) -> NoReturn:
    """The gradient of a gradient that has none.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "this gradient of a fused op cannot be differentiated again (create_graph=True); of "
        "csr_aggregate with sum and mean those with respect to x can. PYG_SCALE_KERNELS=never "
        "takes the plain-torch path, which can"
    )


# Shapes ###################################################################################


def _fake_transpose(indptr: Tensor, indices: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    num_edges = indices.numel()
    narrow = torch.int32 if num_edges <= _INT32_MAX else torch.int64
    return (
        indptr.new_empty(num_src + 1),
        indices.new_empty(num_edges),
        indices.new_empty(num_edges, dtype=narrow),
    )


def _fake_sum(
    indptr: Tensor,
    indices: Tensor,
    edge_id: Tensor | None,
    t_indptr: Tensor | None,
    t_indices: Tensor | None,
    t_position: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: bool,
) -> Tensor:
    return x.new_empty(indptr.numel() - 1, x.size(1))


def _fake_extreme(
    indptr: Tensor,
    indices: Tensor,
    edge_id: Tensor | None,
    t_indptr: Tensor | None,
    t_indices: Tensor | None,
    t_position: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    minimum: bool,
) -> tuple[Tensor, Tensor]:
    shape = indptr.numel() - 1, x.size(1)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


def _fake_extreme_grad(
    t_indptr: Tensor,
    t_indices: Tensor,
    t_position: Tensor,
    indptr: Tensor,
    edge_id: Tensor | None,
    arg: Tensor,
    grad: Tensor,
    weight: Tensor | None,
) -> Tensor:
    return grad.new_empty(t_indptr.numel() - 1, grad.size(1))


def _fake_weight_grad(
    indptr: Tensor,
    indices: Tensor,
    edge_id: Tensor | None,
    x: Tensor,
    grad: Tensor,
    arg: Tensor | None,
    heads: int,
    mean: bool,
) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(indices.numel(), heads, dtype=dtype)


# Gradients ################################################################################


def by_source(
    indptr: Tensor,
    indices: Tensor,
    t_indptr: Tensor | None,
    t_indices: Tensor | None,
    t_position: Tensor | None,
    *,
    num_src: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The edges by source, grouped now if they were not before."""
    if t_indptr is None or t_indices is None or t_position is None:
        return torch.ops.pyg_scale.csr_transpose(indptr, indices, num_src)
    return t_indptr, t_indices, t_position


def _sum_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *edges, x, weight, mean = inputs
    # x is needed for the gradient of the weight only.
    kept = x if ctx.needs_input_grad[7] else None
    ctx.save_for_backward(*edges, kept, weight)
    ctx.num_src, ctx.mean = x.size(0), mean


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, edge_id, *transposed, x, weight = ctx.saved_tensors
    ops, of_x, of_weight = torch.ops.pyg_scale, None, None
    if ctx.needs_input_grad[6]:
        scaled = grad
        if ctx.mean:
            degree = indptr.diff().clamp(min=1).unsqueeze(-1)
            scaled = grad / degree.to(grad.dtype if grad.dtype == torch.float64 else torch.float32)
            scaled = scaled.to(grad.dtype)
        pointers, rows, position = by_source(indptr, indices, *transposed, num_src=ctx.num_src)
        ids = None
        if weight is not None:
            ids = position if edge_id is None else edge_id.index_select(0, position)
        of_x = ops.csr_sum(pointers, rows, ids, None, None, None, scaled, weight, False)
    if ctx.needs_input_grad[7]:
        heads = weight.size(1)
        of_weight = ops.csr_weight_grad(indptr, indices, edge_id, x, grad, None, heads, ctx.mean)
    return (None,) * 6 + (of_x, of_weight, None)


def _extreme_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *edges, x, weight, _ = inputs
    kept = x if ctx.needs_input_grad[7] else None
    ctx.save_for_backward(*edges, kept, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.num_src = x.size(0)


def _extreme_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, edge_id, *transposed, x, weight, arg = ctx.saved_tensors
    ops, of_x, of_weight = torch.ops.pyg_scale, None, None
    if ctx.needs_input_grad[6]:
        by_src = by_source(indptr, indices, *transposed, num_src=ctx.num_src)
        of_x = ops.csr_extreme_grad(*by_src, indptr, edge_id, arg, grad, weight)
    if ctx.needs_input_grad[7]:
        heads = weight.size(1)
        of_weight = ops.csr_weight_grad(indptr, indices, edge_id, x, grad, arg, heads, False)
    return (None,) * 6 + (of_x, of_weight, None)
