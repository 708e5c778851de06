"""Attention over the in-edges of each destination in one pass, forward and backward.

Logits, the softmax over the edges of a destination and the weighted sum of rows are one op, with
the online softmax (Milakov, Gimelshein, 2018) where a destination has many edges. Only one number
per destination and head is kept for the gradient, the logarithm of the softmax's denominator. The
rest is recomputed, and the softmax's own gradient needs only the product of the result with its
gradient (Dao et al.: FlashAttention, NeurIPS 2022). No tensor of ``[num_edges, heads, channels]``
is made, forward or backward; the plain-torch meaning makes them. It runs without compiled kernels,
and where a gradient is to be differentiated again (``create_graph=True``).

Three kinds of logits: :func:`gat_attention` (Veličković et al., ICLR 2018), :func:`gatv2_attention`
(Brody et al., ICLR 2022) and :func:`dot_product_attention` (as in Shi et al., IJCAI 2021).
Attention dropout keeps no mask: each weight stays or is dropped as a function of the seed, the
edge's id and the head, also in the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyg_scale.ops import attention_plain, fused, library
from pyg_scale.ops.adjacency import Adjacency
from pyg_scale.ops.aggregate import accumulator, autocast, check_floats, fused_edges


def gat_attention(
    adjacency: Adjacency,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    a_edge: Tensor | None = None,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The weighted sum of GAT: logits ``leaky_relu(a_src[j] + a_dst[i] + a_edge[e])``.

    Args:
        adjacency: The edges; ``j`` is the source and ``i`` the destination of edge ``e``.
        x: ``[num_src, heads, channels]``, the rows to sum.
        a_src: ``[num_src, heads]``.
        a_dst: ``[num_dst, heads]``.
        a_edge: ``[num_edges, heads]``, by edge id.
        negative_slope: Slope of the leaky ReLU below 0.
        dropout: Probability of dropping a weight; 0 outside of training.
        seed: Seed of the dropout, one ``int64`` number. ``None``: drawn from torch's default
            generator.
        return_weights: If True, also return the weights.

    Returns:
        ``[num_dst, heads, channels]`` of the type of ``x`` (under autocast, of its type for
        ``float32``), 0 where a destination has no edges; with ``return_weights`` also the
        weights ``[num_edges, heads]`` by edge id after dropout, in the type that logits are
        computed in (``float32``; ``float64`` if ``x`` is). Both can be differentiated.

    Raises:
        TypeError: If a tensor is not of a floating type.
        ValueError: If shapes or devices do not fit, or ``dropout`` is not a probability.
    """
    _check_rows(adjacency, x=(x, "src"))
    heads = x.size(1)
    for name, tensor, size in (
        ("a_src", a_src, adjacency.num_src),
        ("a_dst", a_dst, adjacency.num_dst),
        ("a_edge", a_edge, adjacency.num_edges),
    ):
        _check_shape(adjacency, name, tensor, (size, heads))
    x = autocast(x)
    dtype = accumulator(x.dtype)
    a_src, a_dst = a_src.to(dtype), a_dst.to(dtype)
    a_edge = None if a_edge is None else a_edge.to(dtype)
    key = _dropout_key(dropout, seed, x.device)
    logits = a_src, a_dst, a_edge
    return _attend("gat", adjacency, (x, *logits), negative_slope, dropout, key, return_weights)


def gatv2_attention(
    adjacency: Adjacency,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    x_edge: Tensor | None = None,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The weighted sum of GATv2: logits ``att · leaky_relu(x_src[j] + x_dst[i] + x_edge[e])``.

    Args:
        adjacency: The edges; ``j`` is the source and ``i`` the destination of edge ``e``.
        x_src: ``[num_src, heads, channels]``, also the rows to sum.
        x_dst: ``[num_dst, heads, channels]``.
        att: ``[heads, channels]``.
        x_edge: ``[num_edges, heads, channels]``, by edge id.
        negative_slope: See :func:`gat_attention`, also for the following.
        dropout: See there.
        seed: See there.
        return_weights: See there.

    Returns:
        As :func:`gat_attention`.

    Raises:
        TypeError: If a tensor is not of a floating type.
        ValueError: If shapes or devices do not fit, or ``dropout`` is not a probability.
    """
    _check_rows(adjacency, x_src=(x_src, "src"), x_dst=(x_dst, "dst"))
    row = tuple(x_src.shape[1:])
    _check_shape(adjacency, "x_dst", x_dst, (adjacency.num_dst, *row))
    _check_shape(adjacency, "att", att, row)
    _check_shape(adjacency, "x_edge", x_edge, (adjacency.num_edges, *row))
    x_src = autocast(x_src)
    x_dst = x_dst.to(x_src.dtype)
    x_edge = None if x_edge is None else x_edge.to(x_src.dtype)
    att = att.to(accumulator(x_src.dtype))
    key = _dropout_key(dropout, seed, x_src.device)
    features = x_src, x_dst, att, x_edge
    return _attend("gatv2", adjacency, features, negative_slope, dropout, key, return_weights)


def dot_product_attention(
    adjacency: Adjacency,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The weighted sum of a graph transformer: logits ``scale * query[i] · (key[j] + edge[e])``.

    Args:
        adjacency: The edges; ``j`` is the source and ``i`` the destination of edge ``e``.
        query: ``[num_dst, heads, channels]``.
        key: ``[num_src, heads, channels]``.
        value: ``[num_src, heads, channels]``; ``value[j] + edge[e]`` is summed.
        edge: ``[num_edges, heads, channels]``, by edge id; added to keys and values.
        scale: ``1 / sqrt(channels)`` if ``None``.
        dropout: See :func:`gat_attention`, also for the following.
        seed: See there.
        return_weights: See there.

    Returns:
        As :func:`gat_attention`.

    Raises:
        TypeError: If a tensor is not of a floating type.
        ValueError: If shapes or devices do not fit, or ``dropout`` is not a probability.
    """
    _check_rows(adjacency, query=(query, "dst"), key=(key, "src"), value=(value, "src"))
    row = tuple(query.shape[1:])
    _check_shape(adjacency, "key", key, (adjacency.num_src, *row))
    _check_shape(adjacency, "value", value, (adjacency.num_src, *row))
    _check_shape(adjacency, "edge", edge, (adjacency.num_edges, *row))
    query = autocast(query)
    key, value = key.to(query.dtype), value.to(query.dtype)
    edge = None if edge is None else edge.to(query.dtype)
    scale = 1 / math.sqrt(max(row[1], 1)) if scale is None else float(scale)
    mask = _dropout_key(dropout, seed, query.device)
    features = query, key, value, edge
    return _attend("dot_product", adjacency, features, scale, dropout, mask, return_weights)


def run_attention(
    kind: str,
    edges: tuple[Tensor | None, ...],
    features: tuple[Tensor | None, ...],
    number: float,
    dropout: float,
    wanted: bool,
    key: Tensor | None = None,
    return_weights: bool = False,
) -> Any:
    """Run the compiled op of a kind of attention in eager mode; checks nothing.

    Args:
        kind: ``"gat"``, ``"gatv2"`` or ``"dot_product"``.
        edges: The six tensors of the graph, see :func:`pyg_scale.ops.aggregate.fused_edges`.
        features: The four features of the op.
        number: The slope of the leaky ReLU, or the scale.
        dropout: The probability of dropping a weight.
        wanted: True if a gradient is needed.
        key: The key of the dropout; drawn if ``None``.
        return_weights: If True, also return the weights.
    """
    from pyg_scale.ops.attention_rules import OPS, attend

    if dropout and key is None:
        key = _dropout_key(dropout, None, edges[1].device)  # type: ignore[union-attr]
    rest = number, dropout, key, return_weights
    if wanted:
        return attend(kind, edges, rest, *features)
    with torch._C._AutoDispatchBelowAutograd():
        out, _, weights = OPS[kind](*edges, *features, *rest)
    return (out, weights) if return_weights else out


# Parts ####################################################################################


def _attend(
    kind: str,
    adjacency: Adjacency,
    features: tuple[Tensor, *tuple[Tensor | None, ...]],
    number: float,
    dropout: float,
    key: Tensor | None,
    return_weights: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The compiled op of a kind of attention, or its plain-torch meaning.

    Args:
        kind: The name of the meaning.
        adjacency: The edges.
        features: The arguments of the op after the edges.
        number: The slope of the leaky ReLU, or the scale.
        dropout: The probability of dropping a weight.
        key: The key of the dropout.
        return_weights: If True, also return the weights.
    """
    rest = number, dropout, key, return_weights
    first = features[0]
    if not fused.usable(first):
        if first.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling():
            library.warn_plain_path("attention", fused.why_not(first.device))
        return getattr(attention_plain, kind)(adjacency, *features, *rest)
    wanted = any(t is not None and t.requires_grad for t in features)
    wanted = wanted and torch.is_grad_enabled()
    edges = fused_edges(adjacency, wanted)
    if fused.is_eager():
        return run_attention(kind, edges, features, number, dropout, wanted, key, return_weights)
    out, _, weights = fused.call(f"{kind}_attention", *edges, *features, *rest)
    return (out, weights) if return_weights else out


def _dropout_key(dropout: float, seed: Tensor | int | None, device: torch.device) -> Tensor | None:
    """The key of dropout, ``int64`` without dimensions; ``None`` if nothing is dropped."""
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be a probability, from 0 to 1 (got {dropout})")
    if dropout == 0:
        return None
    if seed is None:
        return torch.randint(2**62, (), device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"seed must be one int64 number (got {seed.dtype} of shape {list(seed.shape)})"
            )
        return seed.reshape(()).to(device)
    return torch.tensor(seed, device=device)


def _check_rows(adjacency: Adjacency, **rows: tuple[Tensor, str]) -> None:
    check_floats(adjacency.device, **{name: tensor for name, (tensor, _) in rows.items()})
    for name, (tensor, side) in rows.items():
        size = adjacency.num_src if side == "src" else adjacency.num_dst
        if tensor.dim() != 3 or tensor.size(0) != size:
            raise ValueError(
                f"{name} must be of shape [{size}, heads, channels] (got {list(tensor.shape)})"
            )


def _check_shape(
    adjacency: Adjacency, name: str, tensor: Tensor | None, shape: tuple[int, ...]
) -> None:
    if tensor is None:
        return
    check_floats(adjacency.device, **{name: tensor})
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be of shape {list(shape)} (got {list(tensor.shape)})")
