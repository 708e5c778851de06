"""The exchange of halo rows: one all-to-all forward, one backward, for any number of tensors.

The gradient of a row is the sum of those of its copies on other ranks and of its own uses, so that
every derivative is that of the whole graph. Tensors of several dtypes go as bytes in one message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.shard import Halo


class HaloExchange:
    """Appends the halo's rows to tensors of own nodes.

    Args:
        halos: The halo of each node type.
        peers: The ranks.
    """

    def __init__(self, halos: dict[NodeType, Halo], peers: Peers) -> None:
        self.halos, self._peers = halos, peers

    def extend(self, node_type: NodeType, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Own rows and those of the halo. Every rank calls it.

        Args:
            node_type: The type of the nodes.
            tensors: ``[num_own, ...]`` each.

        Returns:
            ``[num_own + num_halo, ...]`` each.

        Raises:
            CommError: If a rank is gone or late; names it.
        """
        if self._peers.size == 1:
            return list(tensors)
        return list(_Extend.apply(self.halos[node_type], self._peers, *tensors))


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halo: Halo, peers: Peers, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.halo, ctx.peers = halo, peers
        ctx.set_materialize_grads(False)
        ctx.like = [(tensor.shape[1:], tensor.dtype) for tensor in tensors]
        sent = [tensor.index_select(0, halo.send) for tensor in tensors]
        found = _swap(peers, sent, halo.num_received, halo.num_sent)
        return tuple(torch.cat(both) for both in zip(tensors, found, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        halo, own = ctx.halo, ctx.halo.num_own
        whole = [
            halo.send.new_zeros(own + halo.num_halo, *shape, dtype=dtype) if grad is None else grad
            for grad, (shape, dtype) in zip(grads, ctx.like, strict=True)
        ]
        sent = [grad[own:].contiguous() for grad in whole]
        found = _swap(ctx.peers, sent, halo.num_sent, halo.num_received)
        out = [
            grad[:own].index_add(0, halo.send, rows)
            for grad, rows in zip(whole, found, strict=True)
        ]
        return None, None, *out


def _swap(
    peers: Peers, tensors: Sequence[Tensor], num_received: list[int], num_sent: list[int]
) -> list[Tensor]:
    """Rows of several tensors in one all-to-all."""
    size = sum(num_received)
    if len(tensors) == 1:
        received = tensors[0].new_empty(size, *tensors[0].shape[1:])
        peers.all_to_all(received, tensors[0].contiguous(), num_received, num_sent)
        return [received]
    packed = [
        tensor.reshape(tensor.size(0), math.prod(tensor.shape[1:])).contiguous().view(torch.uint8)
        for tensor in tensors
    ]
    widths = [each.size(1) for each in packed]
    received = packed[0].new_empty(size, sum(widths))
    peers.all_to_all(received, torch.cat(packed, dim=1), num_received, num_sent)
    return [
        columns.contiguous().view(tensor.dtype).view(size, *tensor.shape[1:])
        for columns, tensor in zip(received.split(widths, dim=1), tensors, strict=True)
    ]
