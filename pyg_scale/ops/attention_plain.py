"""The meaning of the attention ops in plain torch, one function for each.

The softmax over the edges of a destination is computed with the largest logit subtracted, in
``float32``, or in ``float64`` for ``float64`` features. These functions also run where there are no
compiled kernels; torch differentiates them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops.adjacency import Adjacency, rows_of
from pyg_scale.ops.aggregate import accumulator
from pyg_scale.ops.keys import ATTENTION_DROPOUT, draw, fold, fold_tensor

__all__ = ["dot_product", "gat", "gatv2", "keep_mask"]

_Out = Tensor | tuple[Tensor, Tensor]


def gat(
    adjacency: Adjacency,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    a_edge: Tensor | None,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
    return_weights: bool,
) -> _Out:
    """The meaning of :func:`pyg_scale.ops.attention.gat_attention`."""
    row, col = _ends(adjacency)
    logits = a_src[col] + a_dst[row]
    if a_edge is not None:
        logits = logits + _by_position(adjacency, a_edge)
    logits = torch.nn.functional.leaky_relu(logits, negative_slope)
    weights = _weights(adjacency, row, logits, dropout, seed)
    values = x.to(weights.dtype)[col]
    return _sum(adjacency, row, weights, values, x.dtype, return_weights)


def gatv2(
    adjacency: Adjacency,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    x_edge: Tensor | None,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
    return_weights: bool,
) -> _Out:
    """The meaning of :func:`pyg_scale.ops.attention.gatv2_attention`."""
    row, col = _ends(adjacency)
    dtype = accumulator(x_src.dtype)
    values = x_src.to(dtype)[col]
    both = values + x_dst.to(dtype)[row]
    if x_edge is not None:
        both = both + _by_position(adjacency, x_edge).to(dtype)
    logits = (torch.nn.functional.leaky_relu(both, negative_slope) * att).sum(-1)
    weights = _weights(adjacency, row, logits, dropout, seed)
    return _sum(adjacency, row, weights, values, x_src.dtype, return_weights)


def dot_product(
    adjacency: Adjacency,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge: Tensor | None,
    scale: float,
    dropout: float,
    seed: Tensor | None,
    return_weights: bool,
) -> _Out:
    """The meaning of :func:`pyg_scale.ops.attention.dot_product_attention`."""
    row, col = _ends(adjacency)
    dtype = accumulator(query.dtype)
    keys, values = key.to(dtype)[col], value.to(dtype)[col]
    if edge is not None:
        term = _by_position(adjacency, edge).to(dtype)
        keys, values = keys + term, values + term
    logits = (query.to(dtype)[row] * keys).sum(-1) * scale
    weights = _weights(adjacency, row, logits, dropout, seed)
    return _sum(adjacency, row, weights, values, query.dtype, return_weights)


def keep_mask(seed: Tensor, edge_id: Tensor, heads: int, dropout: float) -> Tensor:
    """A mask of the weights that stay, ``bool`` ``[num_edges, heads]``.

    With ``key = fold(fold(0, ATTENTION_DROPOUT), seed)`` the weight of head ``h`` of edge ``e``
    stays if the upper 32 bits of ``draw(key, e * heads + h)`` are not below
    ``floor(dropout * 2**32)``; the words are those of :mod:`pyg_scale.ops.keys`.

    Args:
        seed: ``int64``, without dimensions.
        edge_id: ``[num_edges]``.
        heads: Number of heads.
        dropout: Probability of dropping a weight.
    """
    key = fold_tensor(fold(0, ATTENTION_DROPOUT), seed)
    head = torch.arange(heads, device=edge_id.device)
    word = draw(key, edge_id.to(torch.int64).unsqueeze(-1) * heads + head)
    return ((word >> 32) & 0xFFFFFFFF) >= int(dropout * 2**32)


def _ends(adjacency: Adjacency) -> tuple[Tensor, Tensor]:
    return rows_of(adjacency.indptr, adjacency.num_edges), adjacency.indices.to(torch.int64)


def _by_position(adjacency: Adjacency, of_edges: Tensor) -> Tensor:
    return of_edges if adjacency.edge_id is None else of_edges.index_select(0, adjacency.edge_id)


def _by_edge(adjacency: Adjacency, by_position: Tensor) -> Tensor:
    if adjacency.edge_id is None:
        return by_position
    return torch.empty_like(by_position).index_copy(0, adjacency.edge_id.long(), by_position)


def _weights(
    adjacency: Adjacency, row: Tensor, logits: Tensor, dropout: float, seed: Tensor | None
) -> Tensor:
    """Softmax over the edges of each destination, then dropout; by position."""
    size = adjacency.num_dst, logits.size(1)
    index = row.unsqueeze(-1).expand_as(logits)
    largest = logits.new_full(size, float("-inf"))
    largest = largest.scatter_reduce(0, index, logits.detach(), "amax")
    weights = (logits - largest[row]).exp()
    weights = weights / weights.new_zeros(size).index_add(0, row, weights)[row]
    if seed is None:
        return weights
    edge_id = adjacency.edge_id
    if edge_id is None:
        edge_id = torch.arange(adjacency.num_edges, device=row.device)
    keep = keep_mask(seed, edge_id, logits.size(1), dropout)
    scale = 1 / (1 - dropout) if dropout < 1 else 0.0
    return torch.where(keep, weights * scale, 0.0)


def _sum(
    adjacency: Adjacency,
    row: Tensor,
    weights: Tensor,
    values: Tensor,
    dtype: torch.dtype,
    return_weights: bool,
) -> _Out:
    out = values.new_zeros(adjacency.num_dst, *values.shape[1:])
    out = out.index_add(0, row, weights.unsqueeze(-1) * values).to(dtype)
    return (out, _by_edge(adjacency, weights)) if return_weights else out
