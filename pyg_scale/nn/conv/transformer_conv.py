"""TransformerConv: attention in one pass over the in-edges of a node."""

import math

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.typing import Adj, OptTensor, PairTensor

from pyg_scale.nn.attention import attend, attended, heads_joined, is_plain
from pyg_scale.nn.conv.base import FusedConv
from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.linear import apply_linear
from pyg_scale.ops.attention import dot_product_attention


class TransformerConv(FusedConv, torch_geometric.nn.TransformerConv):
    """PyG's :class:`torch_geometric.nn.TransformerConv` (Shi et al., IJCAI 2021), fused.

    Dropout is as in :class:`pyg_scale.nn.GATConv`. Edge features, if any, are mapped to a tensor of
    ``[num_edges, heads, channels]``.
    """

    replaces = torch_geometric.nn.TransformerConv
    propagate_type = {  # noqa: RUF012
        "query": Tensor,
        "key": Tensor,
        "value": Tensor,
        "edge_attr": OptTensor,
    }

    def forward(  # type: ignore[no-untyped-def]
        self,
        x: Tensor | PairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ):
        """See PyG. ``[num_dst, heads * out_channels]``, or ``[num_dst, out_channels]``."""
        return self.run(x, edge_index, edge_attr, return_attention_weights)

    def fused(  # type: ignore[no-untyped-def]
        self, x, edge_index, edge_attr=None, return_attention_weights=None
    ):
        """See :meth:`FusedConv.fused`."""
        src, dst = (x, x) if isinstance(x, Tensor) else x
        if dst is None:
            raise NotFused("no features of destinations")
        if (edge_attr is None) != (self.lin_edge is None):
            raise NotFused("edge_attr without edge_dim, or the other way round")
        wanted = isinstance(return_attention_weights, bool)
        plain = not wanted and edge_attr is None and is_plain(self, src, dst, edge_index)
        if not plain:
            edges = attended(self, edge_index, edge_attr, (src, dst))
        shape = (-1, self.heads, self.out_channels)
        query = apply_linear(self.lin_query, dst).view(shape)
        key = apply_linear(self.lin_key, src).view(shape)
        value = apply_linear(self.lin_value, src).view(shape)
        dropout, weights = self.dropout if self.training else 0.0, None
        if plain:
            numbers = 1 / math.sqrt(max(self.out_channels, 1)), dropout
            features = query, key, value, None
            out = attend("dot_product", edge_index, src, dst, False, numbers, features)
        else:
            edge = None if edges.edge_attr is None else self.lin_edge(edges.edge_attr).view(shape)
            terms = edges.graph, query, key, value, edge
            if wanted:  # PyG returns weights before dropout
                out, weights = dot_product_attention(*terms, return_weights=True)
            if dropout or not wanted:
                out = dot_product_attention(*terms, dropout=dropout)
        out = heads_joined(self, out)
        if self.root_weight:
            skip = apply_linear(self.lin_skip, dst)
            if self.lin_beta is not None:
                beta = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
                out = beta * skip + (1 - beta) * out
            else:
                out = out + skip
        return out if weights is None else (out, (edges.edge_index, weights.to(query.dtype)))
