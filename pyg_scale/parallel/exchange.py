"""The exchange of halo rows: one all-to-all forward, one backward, for any number of tensors.

Between its begin and its end a rank computes what needs own rows alone, in both directions.

The gradient of a row is the sum of those of its copies on other ranks and of its own uses, so that
every derivative is that of the whole graph. Tensors of several dtypes go as bytes in one message.
Exchanges that trade exactness for fewer bytes or for time are in
:mod:`~pyg_scale.parallel.inexact`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType
from pyg_scale.parallel.base import RankState
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.shard import Halo


@dataclass(frozen=True)
class Rows:
    """The rows of one exchange.

    Attributes:
        num_own: Number of own nodes.
        num_halo: Number of nodes of the halo.
        send: Local numbers ``int64`` ``[num_sent]`` of own nodes, by the rank that gets them.
        num_sent: How many each rank gets.
        num_received: How many come from each rank.
        place: Their places ``int64`` in the halo; ``None`` if they are the whole halo. All other
            rows of the halo are 0.
        scale: A factor ``float64`` ``[sum(num_received)]`` of each, or ``None``.
    """

    num_own: int
    num_halo: int
    send: Tensor
    num_sent: list[int]
    num_received: list[int]
    place: Tensor | None = None
    scale: Tensor | None = None

    @classmethod
    def all_of(cls, halo: Halo) -> Rows:
        """The whole halo."""
        return cls(halo.num_own, halo.num_halo, halo.send, halo.num_sent, halo.num_received)

    def joined(self, own: Tensor, received: Tensor) -> Tensor:
        """Own rows and the halo, ``[num_own + num_halo, ...]``."""
        if self.place is None:
            return torch.cat([own, received])
        halo = own.new_zeros(self.num_halo, *own.shape[1:])
        halo[self.place] = self._scaled(received)
        return torch.cat([own, halo])

    def returned(self, grad: Tensor) -> Tensor:
        """The rows that go back for those that were received, of a gradient of :meth:`joined`."""
        halo = grad[self.num_own :]
        return halo.contiguous() if self.place is None else self._scaled(halo[self.place])

    def added(self, grad: Tensor, received: Tensor) -> Tensor:
        """The gradient of own rows, with what came back for those that were sent."""
        return grad[: self.num_own].index_add(0, self.send, received)

    def _scaled(self, rows: Tensor) -> Tensor:
        if self.scale is None or not rows.is_floating_point():
            return rows
        return rows * self.scale.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))


class Wire:
    """Sends rows of tensors to ranks, as they are.

    Args:
        peers: The ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def begin(self, step: int) -> None:
        """Called before every forward in training, with the number of the step."""

    def start(
        self, tensors: Sequence[Tensor], num_received: list[int], num_sent: list[int], later: bool
    ) -> Callable[[], list[Tensor]]:
        """Send rows of several tensors in one message to each rank.

        Args:
            tensors: ``[sum(num_sent), ...]`` each.
            num_received: Number of rows from each rank.
            num_sent: Number of rows to each rank.
            later: Whether to return while it is under way.

        Returns:
            A function that waits for the received rows ``[sum(num_received), ...]`` of each.

        Raises:
            CommError: If a rank is gone or late; names it. Also raised by the function.
        """
        size = sum(num_received)
        coded = [self.encoded(tensor) for tensor in tensors]
        widths = [each.size(1) for each in coded]
        sent = coded[0] if len(coded) == 1 else torch.cat([_bytes(each) for each in coded], dim=1)
        received = sent.new_empty(size, sent.size(1))
        wait = self.peers.all_to_all(received, sent, num_received, num_sent, later=later)

        def finish() -> list[Tensor]:
            wait(sent)  # which must live until then
            if len(coded) == 1:
                return [self.decoded(received, tensors[0])]
            sizes = [width * each.element_size() for width, each in zip(widths, coded)]
            return [
                self.decoded(columns.contiguous().view(each.dtype), tensor)
                for columns, each, tensor in zip(received.split(sizes, dim=1), coded, tensors)
            ]

        return finish

    def encoded(self, tensor: Tensor) -> Tensor:
        """The form in which a tensor is sent, ``[rows, width]``, contiguous."""
        return tensor.reshape(tensor.size(0), math.prod(tensor.shape[1:])).contiguous()

    def decoded(self, rows: Tensor, like: Tensor) -> Tensor:
        """The rows that were sent, with the shape and dtype of a tensor of this rank."""
        return rows.view(rows.size(0), *like.shape[1:])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


class Extension:
    """Tensors of own nodes that get the halo's rows, which may still be under way.

    Args:
        own: The tensors ``[num_own, ...]``.
        wait: Waits for those of the halo, and returns ``[num_own + num_halo, ...]`` each.

    Attributes:
        own: The tensors, to compute with in the meantime.
    """

    def __init__(self, own: list[Tensor], wait: Callable[[], list[Tensor]] | None = None) -> None:
        self.own, self._wait = own, wait
        self._whole = own

    @property
    def is_under_way(self) -> bool:
        """True if :meth:`whole` has to wait."""
        return self._wait is not None

    def whole(self) -> list[Tensor]:
        """Own rows and those of the halo ``[num_own + num_halo, ...]`` of each tensor.

        Raises:
            CommError: If a rank is gone or late; names it.
        """
        if self._wait is not None:
            self._whole, self._wait = self._wait(), None
        return self._whole


class HaloExchange:
    """Appends the halo's rows to tensors of own nodes.

    Args:
        halos: The halo of each node type.
        peers: The ranks.
    """

    def __init__(self, halos: dict[NodeType, Halo], peers: Peers) -> None:
        self.halos, self.peers = halos, peers
        self._all = {node_type: Rows.all_of(halo) for node_type, halo in halos.items()}
        self._wire = Wire(peers)

    @property
    def rank_state(self) -> RankState | None:
        """See :class:`~pyg_scale.parallel.base.HasRankState`: what a later step depends on."""
        return None

    def begin(self, training: bool) -> None:
        """Called before every forward of the model, on all ranks."""

    def extend(self, node_type: NodeType, tensors: Sequence[Tensor]) -> Extension:
        """Begin to append the halo's rows. Every rank calls it.

        Args:
            node_type: The type of the nodes.
            tensors: ``[num_own, ...]`` each.

        Raises:
            CommError: If a rank is gone or late; names it.
        """
        return self.exactly(node_type, tensors)

    def exactly(self, node_type: NodeType, tensors: Sequence[Tensor]) -> Extension:
        """As :meth:`extend`, for what must be exact: the graph's own features, and degrees."""
        return self.swapped(self._all[node_type], self._wire, tensors)

    def swapped(self, rows: Rows, wire: Wire, tensors: Sequence[Tensor]) -> Extension:
        """Own rows, and those of the halo that are exchanged."""
        if self.peers.size == 1:
            return Extension(list(tensors))
        call = _Exchange(rows, wire, [(each.shape[1:], each.dtype) for each in tensors])
        own = list(_Send.apply(call, *tensors))
        return Extension(own, lambda: list(_Receive.apply(call, *own)))


@dataclass
class _Exchange:
    """Rows on their way, and in the backward pass their gradients on the way back.

    Attributes:
        rows: The rows.
        wire: Sends them.
        like: The shape of a row and the dtype of each tensor.
        coming: Waits for rows.
        returning: Waits for gradients.
    """

    rows: Rows
    wire: Wire
    like: list[Any]
    coming: Callable[[], list[Tensor]] | None = None
    returning: Callable[[], list[Tensor]] | None = None


# Autograd runs what was computed last first. So of nodes in this order (`_Send`, what is computed
# of own rows alone, `_Receive`, what is computed of the halo) the second is differentiated while
# the gradients of the halo are on their way.


class _Send(torch.autograd.Function):
    """Own rows as they are. Forward they are sent, backward gradients of those are waited for."""

    @staticmethod
    def forward(ctx: Any, call: _Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        rows = call.rows
        sent = [tensor.index_select(0, rows.send) for tensor in tensors]
        call.coming = call.wire.start(sent, rows.num_received, rows.num_sent, later=True)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: _Exchange = ctx.call
        if call.returning is None:  # no row of the halo was used
            return None, *grads
        found, call.returning = call.returning(), None
        return None, *(
            None if grad is None else call.rows.added(grad, returned)
            for grad, returned in zip(grads, found, strict=True)
        )


class _Receive(torch.autograd.Function):
    """Own rows and the halo. Forward it is waited for, backward its gradients are sent."""

    @staticmethod
    def forward(ctx: Any, call: _Exchange, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        assert call.coming is not None
        found, call.coming = call.coming(), None
        return tuple(call.rows.joined(*both) for both in zip(own, found, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: _Exchange = ctx.call
        rows = call.rows
        whole = whole_gradients(grads, call.like, rows)
        sent = [rows.returned(grad) for grad in whole]
        call.returning = call.wire.start(sent, rows.num_sent, rows.num_received, later=True)
        return None, *(grad[: rows.num_own] for grad in whole)


def whole_gradients(
    grads: Sequence[Tensor | None], like: Sequence[Any], rows: Rows
) -> list[Tensor]:
    """Gradients of own rows and the halo; zeros where a tensor was not used.

    Args:
        grads: Those that there are.
        like: The shape of a row and the dtype of each tensor.
        rows: The rows of the exchange.
    """
    return [
        rows.send.new_zeros(rows.num_own + rows.num_halo, *shape, dtype=dtype)
        if grad is None
        else grad
        for grad, (shape, dtype) in zip(grads, like, strict=True)
    ]
