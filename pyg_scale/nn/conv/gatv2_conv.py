"""GATv2Conv: attention in one pass over the in-edges of a node."""

import torch_geometric.nn
from torch import Tensor
from torch_geometric.typing import Adj, OptTensor, PairTensor

from pyg_scale.nn.attention import attend, attended, heads_joined, is_plain
from pyg_scale.nn.conv.base import FusedConv
from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.linear import apply_linear
from pyg_scale.ops.attention import gatv2_attention


class GATv2Conv(FusedConv, torch_geometric.nn.GATv2Conv):
    """PyG's :class:`torch_geometric.nn.GATv2Conv` (Brody et al., ICLR 2022), fused.

    Dropout is as in :class:`pyg_scale.nn.GATConv`. Edge features, if any, are mapped to a tensor of
    ``[num_edges, heads, channels]``.
    """

    replaces = torch_geometric.nn.GATv2Conv
    propagate_type = {"x": PairTensor, "alpha": Tensor}  # noqa: RUF012
    edge_updater_type = {"x": PairTensor, "edge_attr": OptTensor}  # noqa: RUF012

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
        if edge_attr is not None and self.lin_edge is None:
            raise NotFused("edge_attr without edge_dim")
        plain = not return_attention_weights and edge_attr is None
        plain = plain and is_plain(self, src, dst, edge_index)
        if not plain:
            edges = attended(
                self,
                edge_index,
                edge_attr,
                (src, dst),
                add_loops=self.add_self_loops,
                keep_edge_index=bool(return_attention_weights),
            )
        skip = None if self.res is None else apply_linear(self.res, dst)
        shape = (-1, self.heads, self.out_channels)
        x_src = apply_linear(self.lin_l, src).view(shape)
        same = isinstance(x, Tensor) and self.share_weights
        x_dst = x_src if same else apply_linear(self.lin_r, dst).view(shape)
        dropout, weights = self.dropout if self.training else 0.0, None
        if plain:
            features, numbers = (x_src, x_dst, self.att[0], None), (self.negative_slope, dropout)
            out = attend("gatv2", edge_index, src, dst, self.add_self_loops, numbers, features)
        else:
            x_edge = None if edges.edge_attr is None else self.lin_edge(edges.edge_attr).view(shape)
            out = gatv2_attention(
                edges.graph,
                x_src,
                edges.padded(x_dst),
                self.att[0],
                x_edge,
                negative_slope=self.negative_slope,
                dropout=dropout,
                return_weights=bool(return_attention_weights),
            )
            out, weights = out if return_attention_weights else (out, None)
            out = edges.unpadded(out)
        out = heads_joined(self, out)
        out = out if skip is None else out + skip
        out = out if self.bias is None else out + self.bias
        return out if weights is None else (out, (edges.edge_index, weights.to(x_src.dtype)))
