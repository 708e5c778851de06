"""Shapes and gradients, for torch, of the compiled attention ops.

Each op returns the result, the logarithm of the softmax's denominator (for the gradient, which is
not differentiable itself), and the weights, which are empty unless asked for. The six tensors of
the graph are those of :mod:`pyg_scale.ops.aggregate_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_scale.ops import attention_plain, fused
from pyg_scale.ops.adjacency import Adjacency
from pyg_scale.ops.aggregate import accumulator
from pyg_scale.ops.aggregate_rules import (
    by_source,
    differentiable,
    no_context,
    not_differentiable,
)

_Results = tuple[Tensor, Tensor, Tensor]


def register() -> None:
    """Register the rules with torch; once, after the compiled library was loaded."""
    fake = torch.library.register_fake
    for name, shapes_grad, backward in (
        ("gat_attention", _fake_gat_grad, _gat_backward),
        ("gatv2_attention", _fake_gatv2_grad, _gatv2_backward),
        ("dot_product_attention", _fake_dot_grad, _dot_backward),
    ):
        fake(f"pyg_scale::{name}", _fake)
        fake(f"pyg_scale::{name}_grad", shapes_grad)
        fused.differentiate(name, backward, _context)
        fused.differentiate(f"{name}_grad", not_differentiable, no_context)


# Shapes ###################################################################################


def _results(indptr: Tensor, indices: Tensor, x: Tensor, need_weights: bool) -> _Results:
    num_dst, (_, heads, channels) = indptr.numel() - 1, x.shape
    dtype = accumulator(x.dtype)
    return (
        x.new_empty(num_dst, heads, channels),
        x.new_empty(num_dst, heads, dtype=dtype),
        x.new_empty(indices.numel() if need_weights else 0, heads, dtype=dtype),
    )


def _dense_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


# Arguments are in the order of the schemas: 6 of the graph, then features.


def _fake(*given: Any) -> _Results:
    return _results(given[0], given[1], given[6], given[-1])


def _fake_gat_grad(*given: Any) -> tuple[Tensor, ...]:
    indices, (x, a_src, a_dst) = given[1], given[6:9]
    of_edges = a_src.new_empty(indices.numel(), x.size(1))
    return _dense_like(x), _dense_like(a_src), _dense_like(a_dst), of_edges


def _fake_gatv2_grad(*given: Any) -> tuple[Tensor, ...]:
    x_src, x_dst, att, x_edge = given[6:10]
    of_edges = x_src.new_empty((0, *x_src.shape[1:]) if x_edge is None else x_edge.shape)
    return _dense_like(x_src), _dense_like(x_dst), _dense_like(att), of_edges


def _fake_dot_grad(*given: Any) -> tuple[Tensor, ...]:
    indices, query, edge, lse = given[1], given[3], given[6], given[11]
    of_edges = query.new_empty((0, *query.shape[1:]) if edge is None else edge.shape)
    by_position = lse.new_empty(indices.numel(), query.size(1))
    return _dense_like(query), of_edges, by_position, torch.empty_like(by_position)


# Gradients ################################################################################


def _context(ctx: Any, inputs: tuple[Any, ...], output: _Results) -> None:
    *tensors, number, dropout, seed, need_weights = inputs
    out, lse, weights = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*tensors, seed, out, lse, weights if need_weights else None)
    ctx.number, ctx.dropout = number, dropout


def _saved(ctx: Any, grads: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """The graph by destination and by source, the features, and a gradient's other arguments."""
    *edges, first, second, third, of_edges, seed, out, lse, weights = ctx.saved_tensors
    out_grad, _, weights_grad = grads
    of_weights = None if weights is None else weights_grad
    rest = (ctx.number, ctx.dropout, seed, out, lse, weights, out_grad, of_weights)
    return edges[:3], edges[3:], (first, second, third, of_edges), rest


def _again(
    ctx: Any, meaning: Callable[..., Any], num_src: int, grads: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Compute gradients that can be differentiated again, see :mod:`pyg_scale.ops.aggregate_rules`.

    Args:
        ctx: Context of the forward pass.
        meaning: A function of :mod:`pyg_scale.ops.attention_plain`.
        num_src: Number of source nodes.
        grads: Gradients of the three results.
    """
    (indptr, indices, edge_id), _, features, (number, dropout, seed, *rest) = _saved(ctx, grads)
    graph = Adjacency.of_checked(indptr, indices, num_src, edge_id)
    out_grad, of_weights = rest[3:]
    results = (out_grad,) if of_weights is None else (out_grad, of_weights)

    def outs(*features: Tensor | None) -> tuple[Tensor, ...]:
        found = meaning(graph, *features, number, dropout, seed, of_weights is not None)
        return found if of_weights is not None else (found,)

    return _needed(ctx, tuple(differentiable(outs, features, ctx.needs_input_grad[6:10], results)))


def _gat_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    edges, transposed, features, rest = _saved(ctx, grads)
    num_src = features[0].size(0)
    if torch.is_grad_enabled():
        return _again(ctx, attention_plain.gat, num_src, grads)
    by_src = by_source(*edges[:2], *transposed, num_src=num_src)
    found = fused.call("gat_attention_grad", *edges, *by_src, *features, *rest)
    return _needed(ctx, found)


def _gatv2_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    edges, transposed, features, rest = _saved(ctx, grads)
    num_src = features[0].size(0)
    if torch.is_grad_enabled():
        return _again(ctx, attention_plain.gatv2, num_src, grads)
    by_src = by_source(*edges[:2], *transposed, num_src=num_src)
    found = fused.call("gatv2_attention_grad", *edges, *by_src, *features, *rest)
    return _needed(ctx, found)


def _dot_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    edges, transposed, features, rest = _saved(ctx, grads)
    query, key, value, _ = features
    if torch.is_grad_enabled():
        return _again(ctx, attention_plain.dot_product, key.size(0), grads)
    found = fused.call("dot_product_attention_grad", *edges, *features, *rest)
    of_query, of_edges, of_logits, weights = found
    pointers, rows, position = by_source(*edges[:2], *transposed, num_src=key.size(0))
    by_src = (pointers, rows, position, None, None, None)
    out_grad = rest[6]
    size = query.size(1) * query.size(2)
    of_key = of_value = None
    if ctx.needs_input_grad[7]:
        of_key = fused.call(
            "csr_sum", *by_src, query.reshape(query.size(0), size), of_logits, False
        )
        of_key = of_key.view(key.shape)
    if ctx.needs_input_grad[8]:
        of_value = fused.call(
            "csr_sum", *by_src, out_grad.reshape(query.size(0), size), weights, False
        )
        of_value = of_value.view(value.shape)
    return _needed(ctx, (of_query, of_key, of_value, of_edges))


def _needed(ctx: Any, found: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of all inputs: six of the graph, four of features, four of numbers."""
    kept = [g if n else None for g, n in zip(found, ctx.needs_input_grad[6:10])]
    return (*(None,) * 6, *kept, *(None,) * 4)
