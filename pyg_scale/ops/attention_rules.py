"""Shapes and gradients, for torch, of the compiled attention ops.

Each op returns the result, the logarithm of the softmax's denominator (for the gradient, which is
not differentiable itself), and the weights, which are empty unless asked for. The six tensors of
the graph are those of :mod:`pyg_scale.ops.aggregate_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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

OPS: dict[str, Callable[..., _Results]] = {}
"""The compiled ops by their kind, once they are registered."""


def register() -> None:
    """Register the rules with torch; once, after the compiled library was loaded."""
    fake = torch.library.register_fake
    for kind, shapes_grad in (
        ("gat", _fake_gat_grad),
        ("gatv2", _fake_gatv2_grad),
        ("dot_product", _fake_dot_grad),
    ):
        name = f"{kind}_attention"
        fake(f"pyg_scale::{name}", _fake)
        fake(f"pyg_scale::{name}_grad", shapes_grad)
        fused.differentiate(name, _backward_of(kind), _context)
        fused.differentiate(f"{name}_grad", not_differentiable, no_context)
        OPS[kind] = getattr(torch.ops.pyg_scale, name).default
    name = "dot_product_attention_grad_by_source"
    fake(f"pyg_scale::{name}", _fake_dot_by_source)
    fused.differentiate(name, not_differentiable, no_context)


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


def _fake_dot_by_source(t_indptr: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    query = given[2]
    of_key = query.new_empty(t_indptr.numel() - 1, *query.shape[1:])
    return of_key, torch.empty_like(of_key)


# Gradients ################################################################################

_Edges = tuple[Tensor | None, ...]
"""The six tensors of a graph: by destination, then by source if they were grouped so before."""


class _Rest(NamedTuple):
    """The arguments of a gradient after the edges and the features."""

    number: float
    dropout: float
    seed: Tensor | None
    out: Tensor
    lse: Tensor
    weights: Tensor | None
    out_grad: Tensor
    weights_grad: Tensor | None


def _context(ctx: Any, inputs: tuple[Any, ...], output: _Results) -> None:
    *tensors, number, dropout, seed, need_weights = inputs
    out, lse, weights = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*tensors, seed, out, lse, weights if need_weights else None)
    ctx.number, ctx.dropout = number, dropout


def _backward_of(kind: str) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *edges, first, second, third, of_edges, seed, out, lse, weights = ctx.saved_tensors
        out_grad, _, weights_grad = grads
        of_weights = None if weights is None else weights_grad
        rest = _Rest(ctx.number, ctx.dropout, seed, out, lse, weights, out_grad, of_weights)
        features, needed = (first, second, third, of_edges), ctx.needs_input_grad[6:10]
        found = _gradients(kind, tuple(edges), features, rest, needed)
        return (*(None,) * 6, *found, *(None,) * 4)

    return backward


class Attention(torch.autograd.Function):
    """The compiled op of a kind of attention with its gradient, in eager mode.

    The same as the registered ones, with less to be done for each call: the edges are no arguments
    of autograd, and results that nobody uses have no gradients.

    Args:
        kind: The name of the meaning.
        edges: The six tensors of the graph.
        rest: The last four arguments of the op.
        features: The arguments of the op between them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        edges: _Edges,
        rest: tuple[float, float, Tensor | None, bool],
        *features: Tensor | None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, weights = OPS[kind](*edges, *features, *rest)
        ctx.set_materialize_grads(False)
        ctx.given = kind, edges, rest
        if not rest[3]:
            ctx.save_for_backward(*features, out, lse, None)
            return out
        ctx.save_for_backward(*features, out, lse, weights)
        return out, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *features, out, lse, weights = ctx.saved_tensors
        kind, edges, (number, dropout, seed, need_weights) = ctx.given
        out_grad = torch.zeros_like(out) if grads[0] is None else grads[0]
        weights_grad = grads[1] if need_weights else None
        rest = _Rest(number, dropout, seed, out, lse, weights, out_grad, weights_grad)
        needed = ctx.needs_input_grad[3:]
        return (None, None, None, *_gradients(kind, edges, tuple(features), rest, needed))


attend = fused.applied(Attention)


def _gradients(
    kind: str,
    edges: _Edges,
    features: tuple[Tensor | None, ...],
    rest: _Rest,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the four features, ``None`` where they are not needed."""
    num_src = _num_src(kind, features)
    if torch.is_grad_enabled():
        return _again(kind, edges, num_src, features, rest, needed)
    by_src = by_source(*edges[:2], *edges[3:], num_src=num_src)  # type: ignore[arg-type]
    if kind == "dot_product":
        found = _dot_gradients(edges[:3], by_src, features, rest, needed)
    else:
        given = *edges[:3], *by_src, *features, *rest
        found = fused.call(f"{kind}_attention_grad", *given)
    return [g if n else None for g, n in zip(found, needed)]


def _num_src(kind: str, features: tuple[Tensor | None, ...]) -> int:
    of_sources = features[1 if kind == "dot_product" else 0]
    assert of_sources is not None
    return of_sources.size(0)


def _again(
    kind: str,
    edges: _Edges,
    num_src: int,
    features: tuple[Tensor | None, ...],
    rest: _Rest,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, see :mod:`pyg_scale.ops.aggregate_rules`."""
    indptr, indices, edge_id = edges[:3]
    assert indptr is not None and indices is not None
    graph = Adjacency.of_checked(indptr, indices, num_src, edge_id)
    of_weights = rest.weights_grad
    results = (rest.out_grad,) if of_weights is None else (rest.out_grad, of_weights)
    meaning = getattr(attention_plain, kind)
    numbers = rest.number, rest.dropout, rest.seed

    def outs(*features: Tensor | None) -> tuple[Tensor, ...]:
        found = meaning(graph, *features, *numbers, of_weights is not None)
        return found if of_weights is not None else (found,)

    return differentiable(outs, features, needed, results)


def _dot_gradients(
    edges: _Edges,
    by_src: tuple[Tensor, Tensor, Tensor],
    features: tuple[Any, ...],
    rest: _Rest,
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    query, key, value, _ = features
    found = fused.call("dot_product_attention_grad", *edges, *features, *rest)
    of_query, of_edges, of_logits, weights = found
    of_key = of_value = None
    if query.device.type == "cpu":
        if needed[1] or needed[2]:
            given = *by_src, query, rest.out_grad, of_logits, weights
            of_key, of_value = fused.call("dot_product_attention_grad_by_source", *given)
        return of_query, of_key, of_value, of_edges
    shape = query.size(0), query.size(1) * query.size(2)
    to_rows = (*by_src, None, None, None)
    if needed[1]:
        of_key = fused.call("csr_sum", *to_rows, query.reshape(shape), of_logits, False)
        of_key = of_key.view(key.shape)
    if needed[2]:
        of_value = fused.call("csr_sum", *to_rows, rest.out_grad.reshape(shape), weights, False)
        of_value = of_value.view(value.shape)
    return of_query, of_key, of_value, of_edges
