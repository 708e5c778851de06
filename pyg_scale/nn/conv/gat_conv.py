"""GATConv: attention in one pass over the in-edges of a node."""

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size

from pyg_scale.nn.attention import attend, attended, heads_joined, is_plain
from pyg_scale.nn.conv.base import FusedConv
from pyg_scale.nn.linear import apply_linear, apply_weight, is_linear, is_start_of
from pyg_scale.ops.adjacency import recording
from pyg_scale.ops.attention import gat_attention
from pyg_scale.ops.fused import is_eager

_PLAIN = (Tensor, torch.nn.Parameter)
_WIDE = (torch.float32, torch.float64)
_LEAST_FOLDED = 1 << 19
"""Number of numbers that features are mapped to from which on a product with a folded weight is
cheaper than one more look at them."""


class GATConv(FusedConv, torch_geometric.nn.GATConv):
    """PyG's :class:`torch_geometric.nn.GATConv` (Veličković et al., ICLR 2018), fused.

    Dropout of attention weights is drawn from a counter, which starts at a number from torch's
    default generator. It is as reproducible as PyG's, but drops other weights.
    """

    replaces = torch_geometric.nn.GATConv
    propagate_type = {"x": OptPairTensor, "alpha": Tensor}  # noqa: RUF012
    edge_updater_type = {"alpha": OptPairTensor, "edge_attr": OptTensor}  # noqa: RUF012

    def forward(  # type: ignore[no-untyped-def]
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: bool | None = None,
    ):
        """See PyG. ``[num_dst, heads * out_channels]``, or ``[num_dst, out_channels]``."""
        return self.run(x, edge_index, edge_attr, size, return_attention_weights)

    def fused(  # type: ignore[no-untyped-def]
        self, x, edge_index, edge_attr=None, size=None, return_attention_weights=None
    ):
        """See :meth:`FusedConv.fused`."""
        src, dst = (x, x) if isinstance(x, Tensor) else x
        plain = not return_attention_weights and edge_attr is None and size is None
        plain = plain and is_plain(self, src, dst, edge_index)
        if not plain:
            edges = attended(
                self,
                edge_index,
                edge_attr,
                (src, dst),
                size,
                add_loops=self.add_self_loops,
                keep_edge_index=bool(return_attention_weights),
            )
        skip = None if self.res is None or dst is None else apply_linear(self.res, dst)
        shape = (-1, self.heads, self.out_channels)
        lin = self.lin if self.lin is not None else self.lin_src
        x_src = apply_linear(lin, src).view(shape)
        of_src = self.lin is not None and dst is not None
        of_src = of_src and (dst is src or (not recording() and is_start_of(dst, src)))
        if of_src and self._folds(lin, src):
            folded = torch.cat([self._folded(lin, self.att_src), self._folded(lin, self.att_dst)])
            a_src, a_dst = apply_weight(src, folded).split(self.heads, dim=1)
            a_dst = a_dst[: dst.size(0)]
        else:
            a_src = self._logits(lin, src, self.att_src, x_src)
            if dst is None:
                a_dst = x_src.new_zeros(edges.num_dst, self.heads)
            else:
                lin = self.lin if self.lin is not None else self.lin_dst
                x_dst = x_src[: dst.size(0)] if of_src else None
                a_dst = self._logits(lin, dst, self.att_dst, x_dst)
        dropout, weights = self.dropout if self.training else 0.0, None
        if plain:
            loops = self.add_self_loops
            numbers = self.negative_slope, dropout
            out = attend("gat", edge_index, src, dst, loops, numbers, (x_src, a_src, a_dst, None))
        else:
            out = gat_attention(
                edges.graph,
                x_src,
                a_src,
                edges.padded(a_dst),
                self._edge_logits(edges.edge_attr),
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

    def _logits(self, lin, x, att, mapped):  # type: ignore[no-untyped-def]
        """The logits of nodes: ``[num_nodes, heads]``.

        ``mapped`` is ``lin(x)``, ``[num_nodes, heads, out_channels]``, if it is known.
        """
        if self._folds(lin, x):
            return apply_weight(x, self._folded(lin, att))
        if mapped is None:
            mapped = apply_linear(lin, x).view(-1, self.heads, self.out_channels)
        return (mapped * att).sum(dim=-1)

    def _folds(self, lin, x):  # type: ignore[no-untyped-def]
        """Return True if logits are cheaper from features than from what they are mapped to."""
        wide = self.heads * self.out_channels
        return (
            is_eager()
            and x.size(0) * wide >= _LEAST_FOLDED
            and 4 * x.size(1) <= x.size(0)
            and x.size(1) <= 2 * wide
            and is_linear(lin)
            and lin.bias is None
            and type(x) in _PLAIN
            and type(lin.weight) in _PLAIN
            and x.is_cpu
            and x.dtype is lin.weight.dtype
            and x.dtype in _WIDE
            and not torch.is_autocast_enabled("cpu")
        )

    def _folded(self, lin, att):  # type: ignore[no-untyped-def]
        """``[heads, in_channels]``: as ``(W x) · a = x · (W^T a)``, logits need no ``W x``."""
        weight = lin.weight.view(self.heads, self.out_channels, -1)
        return (weight * att.view(self.heads, self.out_channels, 1)).sum(1)

    def _edge_logits(self, edge_attr):  # type: ignore[no-untyped-def]
        """The logits of edge features: ``[num_edges, heads]``, or ``None``."""
        if edge_attr is None or self.lin_edge is None:
            return None
        heads, channels = self.heads, self.out_channels
        if is_linear(self.lin_edge):
            return F.linear(edge_attr, self._folded(self.lin_edge, self.att_edge))
        return (self.lin_edge(edge_attr).view(-1, heads, channels) * self.att_edge).sum(dim=-1)
