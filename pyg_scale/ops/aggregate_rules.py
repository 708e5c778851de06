"""Shapes and gradients, for torch, of the compiled ops behind ``aggregate``.

The ops take the graph as six tensors: by destination (``indptr``, ``indices``, ``edge_id``), and by
source (``t_indptr``, ``t_indices``, ``t_position``) for gradients. In a trace, which keeps nothing
between calls, the backward pass groups the edges by source if they were not grouped before.

Compiled gradients cannot be differentiated. If a backward pass is to be differentiated again
(``create_graph=True``), it differentiates the plain-torch meaning instead, for which torch has all
derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyg_scale.ops import fused

_INT32_MAX = 2**31 - 1


def register() -> None:
    """Register the rules with torch; once, after the compiled library was loaded."""
    fakes: dict[str, Callable[..., Any]] = {
        "csr_transpose": _fake_transpose,
        "csr_sum": _fake_sum,
        "csr_extreme": _fake_extreme,
        "csr_extreme_grad": _fake_extreme_grad,
        "csr_weight_grad": _fake_weight_grad,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"pyg_scale::{name}", fake)
    fused.differentiate("csr_sum", _sum_backward, _sum_context)
    fused.differentiate("csr_extreme", _extreme_backward, _extreme_context)
    for name in ("csr_extreme_grad", "csr_weight_grad"):
        fused.differentiate(name, not_differentiable, no_context)


def register_on_cuda() -> None:
    """Register the op that chooses between a kernel and torch's sort; once, after the others."""
    torch.library.impl("pyg_scale::csr_transpose", "CUDA", _transpose_on_cuda)


def _transpose_on_cuda(
    indptr: Tensor, indices: Tensor, num_src: int
) -> tuple[Tensor, Tensor, Tensor]:
    from pyg_scale.ops.adjacency import transpose_on_cuda

    pointers, rows, position = transpose_on_cuda(indptr, indices, num_src)
    return pointers, rows, position


def no_context(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep nothing."""


def not_differentiable(ctx: Any, *grads: Tensor) -> NoReturn:
    """The gradient of an op that itself computes a gradient and was called directly.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "an op that computes a gradient cannot be differentiated; differentiate the op whose "
        "gradient it is, with create_graph=True"
    )


def differentiable(
    meaning: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """Compute gradients by functions of torch; they can be differentiated again in grad mode.

    Args:
        meaning: The plain-torch meaning of an op, a function of ``inputs``.
        inputs: Its features.
        needed: For each input, True if its gradient is needed.
        grads: The gradients of its results.
    """
    # A separate tensor each: the same one may be passed as several inputs.
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [t.view_as(t) if n and t is not None else t for t, n in zip(inputs, needed)]
        outs = meaning(*inputs)
    wanted = [t for t, n in zip(inputs, needed) if n and t is not None]
    found = torch.autograd.grad(
        outs, wanted, grads, create_graph=again, allow_unused=True, materialize_grads=True
    )
    made = iter(found)
    return [next(made) if n and t is not None else None for t, n in zip(inputs, needed)]


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
    """The edges by source, grouped now if they were not grouped before."""
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
    of_x, of_weight = None, None
    if ctx.needs_input_grad[6]:
        scaled = grad
        if ctx.mean:
            degree = indptr.diff().unsqueeze(-1)
            if torch.is_grad_enabled():  # else nobody reads rows of nodes without edges
                degree = degree.clamp(min=1)
            if grad.dtype in (torch.bfloat16, torch.float16):
                degree = degree.to(torch.float32)
            scaled = fused.divided(grad, degree).to(grad.dtype)
        pointers, rows, position = by_source(indptr, indices, *transposed, num_src=ctx.num_src)
        ids = None
        if weight is not None:
            ids = position if edge_id is None else edge_id.index_select(0, position)
        edges = pointers, rows, ids, None, None, None
        of_x = fused.call("csr_sum", *edges, scaled, weight, False)
    if ctx.needs_input_grad[7]:
        if torch.is_grad_enabled():
            from pyg_scale.ops.aggregate import aggregate_plain

            reduce = "mean" if ctx.mean else "sum"

            def meaning(x: Tensor, weight: Tensor) -> tuple[Tensor]:
                return (aggregate_plain(indptr, indices, edge_id, x, weight, reduce),)

            _, of_weight = differentiable(meaning, (x, weight), (False, True), (grad,))
        else:
            rest = x, grad, None, weight.size(1), ctx.mean
            of_weight = fused.call("csr_weight_grad", indptr, indices, edge_id, *rest)
    return (None,) * 6 + (of_x, of_weight, None)


def _extreme_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *edges, x, weight, _ = inputs
    kept = x if ctx.needs_input_grad[7] else None
    ctx.save_for_backward(*edges, kept, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.num_src = x.size(0)


def _extreme_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, edge_id, *transposed, x, weight, arg = ctx.saved_tensors
    of_x, of_weight = None, None
    if torch.is_grad_enabled():
        if x is None:  # the result is linear in it, so any value will do
            x = grad.new_zeros(ctx.num_src, grad.size(1), requires_grad=True)

        def meaning(x: Tensor, weight: Tensor | None) -> tuple[Tensor]:
            return (_chosen(indptr, indices, edge_id, x, weight, arg),)

        both = differentiable(meaning, (x, weight), ctx.needs_input_grad[6:8], (grad,))
        return (None,) * 6 + (*both, None)
    if ctx.needs_input_grad[6]:
        by_src = by_source(indptr, indices, *transposed, num_src=ctx.num_src)
        given = *by_src, indptr, edge_id, arg, grad, weight
        of_x = fused.call("csr_extreme_grad", *given)
    if ctx.needs_input_grad[7]:
        rest = x, grad, arg, weight.size(1), False
        of_weight = fused.call("csr_weight_grad", indptr, indices, edge_id, *rest)
    return (None,) * 6 + (of_x, of_weight, None)


def _chosen(
    indptr: Tensor,
    indices: Tensor,
    edge_id: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    arg: Tensor,
) -> Tensor:
    """The result of ``csr_extreme``, given the edges chosen for each row (-1: none)."""
    # One edge from the first source follows the last one, for rows without edges.
    place = torch.where(arg < 0, indices.numel(), indptr[:-1].unsqueeze(-1) + arg)
    src = torch.cat([indices, indices.new_zeros(1)]).to(torch.int64)
    source = x if x.size(0) else torch.cat([x, x.new_zeros(1, x.size(1))])  # still a function of x
    values = source.gather(0, src[place])
    if weight is not None:
        by_position = weight if edge_id is None else weight.index_select(0, edge_id)
        by_position = torch.cat([by_position, by_position.new_zeros(1, by_position.size(1))])
        head = torch.arange(weight.size(1), device=x.device)
        head = head.repeat_interleave(x.size(1) // weight.size(1), output_size=x.size(1))
        values = values.to(weight.dtype) * by_position[place, head]
    return torch.where(arg < 0, 0.0, values).to(x.dtype)
