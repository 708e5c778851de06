"""The part of SuperGATConv beside its messages: attention that is trained to tell edges apart.

In training the layer also computes logits of some edges and of pairs that are no edges, for its
loss. PyG gathers both ends of all of these.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import SuperGATConv
from torch_geometric.utils import add_self_loops, remove_self_loops

from pyg_scale.nn.edges import dot_at_ends
from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.graph import edges_of
from pyg_scale.ops.aggregate import FLOATS


def has_its_loss(cls: Any) -> bool:
    """Return True if layers of a class compute the loss of PyG's SuperGATConv in ``forward``."""
    return (
        issubclass(cls, SuperGATConv)
        and cls.forward is SuperGATConv.forward
        and cls.get_attention is SuperGATConv.get_attention
    )


class SuperGATForward:
    """``forward`` of :class:`torch_geometric.nn.SuperGATConv` (Kim and Oh, ICLR 2021).

    A base of the traced class; see :func:`pyg_scale.nn.conv.traced.traced`.
    """

    def forward(
        self: Any,
        x: Tensor,
        edge_index: Any,
        neg_edge_index: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        """See PyG. ``[num_nodes, heads * out_channels]``, or ``[num_nodes, out_channels]``."""
        if not self.training or type(edge_index) is not Tensor or torch.compiler.is_compiling():
            out: Tensor = SuperGATConv.forward(self, x, edge_index, neg_edge_index, batch)
            return out
        num_nodes = x.size(0)
        if self.add_self_loops:
            edge_index, _ = remove_self_loops(edge_index)
            edge_index, _ = add_self_loops(edge_index, num_nodes=num_nodes)
        x = self.lin(x).view(-1, self.heads, self.out_channels)
        out = self.propagate(edge_index, x=x)
        positive = self.positive_sampling(edge_index)
        logits = [self._logits(x, positive)]
        if neg_edge_index is None:
            neg_edge_index = self.negative_sampling(edge_index, num_nodes, batch)
        logits.append(self._logits(x, neg_edge_index))
        self.att_x = torch.cat(logits)
        self.att_y = self.att_x.new_zeros(self.att_x.size(0))
        self.att_y[: positive.size(1)] = 1.0
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        return out if self.bias is None else out + self.bias

    def _logits(self: Any, x: Tensor, pairs: Tensor) -> Tensor:
        """The logits of pairs of nodes, ``[num_pairs, heads]``."""
        try:
            logits = _products(x, pairs, self._is_small(self.crossover, x, pairs))
        except NotFused:
            logits = _products(x, pairs, True)
        return logits if self.attention_type == "MX" else logits / math.sqrt(self.out_channels)


def _products(x: Tensor, pairs: Tensor, gathered: bool) -> Tensor:
    """The products of the features of both nodes of each pair."""
    if gathered or x.dtype not in FLOATS or torch.is_autocast_enabled(x.device.type):
        return (x[pairs[1]] * x[pairs[0]]).sum(dim=-1)
    return dot_at_ends(edges_of(pairs, x.size(0), x.size(0)), x, x)
