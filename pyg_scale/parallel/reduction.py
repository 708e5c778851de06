"""Aggregations of messages that come in pieces, and their gradients piece by piece.

A piece is some edges, whose destinations are in a window of nodes. Sums and means are added up;
extremes are those of the extremes of pieces; of attention, unnormalised sums are brought to one
scale, as in an online softmax (Milakov and Gimelshein, 2018). In the backward pass each piece is
computed again, with the results of all of them known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from pyg_scale.parallel.layers import with_globals

Window = tuple[int, int]
"""The number of the first destination of a piece, and how many there are from it on."""


class Reduction:
    """A sum of messages, for one call of a layer; forward or backward.

    Args:
        layer: The layer.
        num_ends: Number of destinations.
        saved: For the backward pass, what :meth:`finish` returned in the forward pass.
        grad: For the backward pass, the gradient of :meth:`result`.
    """

    def __init__(
        self, layer: Any, num_ends: int, saved: Sequence[Tensor] = (), grad: Tensor | None = None
    ) -> None:
        self.layer, self.num_ends, self.grad = layer, num_ends, grad
        self._saved = saved
        self._total: Tensor | None = None

    @contextmanager
    def forward(self, window: Window) -> Iterator[None]:
        """Within it, the layer's ``propagate`` returns what :meth:`add` takes."""
        with replaced(self.layer, aggr_module=pyg.SumAggregation()):
            yield

    @contextmanager
    def backward(self, window: Window) -> Iterator[None]:
        """Within it, ``propagate`` returns a sum of messages as their gradients weigh them."""
        with replaced(self.layer, aggr_module=pyg.SumAggregation()):
            yield

    def add(self, out: Tensor, window: Window) -> None:
        """Take the result of a piece."""
        self._of(out, 0.0).narrow(self.layer.node_dim, *window).add_(out)

    def result(self) -> Tensor:
        """The result of all pieces, after :meth:`finish`."""
        assert self._total is not None
        return self._total

    def finish(self) -> list[Tensor]:
        """End the forward pass; returns what the backward pass needs."""
        return []

    def grad_of(self, window: Window) -> Tensor:
        """The gradient of what ``propagate`` returns within :meth:`backward`."""
        assert self.grad is not None
        return self.grad.narrow(self.layer.node_dim, *window)

    def _of(self, out: Tensor, fill: float) -> Tensor:
        if self._total is None:
            shape = list(out.shape)
            shape[self.layer.node_dim] = self.num_ends
            self._total = out.new_full(shape, fill)
        return self._total


class Extreme(Reduction):
    """The largest or smallest message. Equal ones share the gradient, as in torch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        most = self.layer.aggr == "max"
        self._reduce, self._fill = ("amax", -torch.inf) if most else ("amin", torch.inf)
        self._pick = torch.maximum if most else torch.minimum
        self._counts: Tensor | None = None
        self._of_piece: Tensor | None = None

    @contextmanager
    def forward(self, window: Window) -> Iterator[None]:
        with replaced(self.layer, aggr_module=_Aggregated(self._extremes)):
            yield

    @contextmanager
    def backward(self, window: Window) -> Iterator[None]:
        found, counts = (each.narrow(self.layer.node_dim, *window) for each in self._saved)

        def shared(messages: Tensor, index: Tensor, size: int, dim: int) -> Tensor:
            chosen = messages.detach() == found.index_select(dim, index)
            share = chosen.to(messages.dtype) / counts.index_select(dim, index)
            shape = list(messages.shape)
            shape[dim] = size
            return messages.new_zeros(shape).index_add(dim, index, messages * share)

        with replaced(self.layer, aggr_module=_Aggregated(shared)):
            yield

    def add(self, out: Tensor, window: Window) -> None:
        dim = self.layer.node_dim
        total = self._of(out, self._fill).narrow(dim, *window)
        if self._counts is None:
            self._counts = torch.zeros_like(self.result())
        counts = self._counts.narrow(dim, *window)
        assert self._of_piece is not None
        both = self._pick(total, out)
        counts.mul_(total == both).add_(self._of_piece * (out == both))
        total.copy_(both)

    def finish(self) -> list[Tensor]:
        total, counts = self.result(), self._counts
        assert counts is not None
        total.masked_fill_((counts == 0) & (total == self._fill), 0.0)  # of nodes without edges
        # PyG begins with zeros, which torch counts, too, where they are equal to the extreme.
        return [total, counts.add_(total == 0).clamp_(min=1.0)]

    def _extremes(self, messages: Tensor, index: Tensor, size: int, dim: int) -> Tensor:
        shape = list(messages.shape)
        shape[dim] = size
        view = [1] * messages.dim()
        view[dim] = -1
        every = index.view(view).expand_as(messages)
        out = messages.new_full(shape, self._fill)
        out.scatter_reduce_(dim, every, messages, self._reduce)
        is_extreme = (messages == out.index_select(dim, index)).to(messages.dtype)
        self._of_piece = messages.new_zeros(shape).index_add_(dim, index, is_extreme)
        return out


class Attention(Reduction):
    """A sum of messages with weights, which are a softmax over the edges of a node."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._most: Tensor | None = None
        self._sum: Tensor | None = None
        self._piece: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def forward(self, window: Window) -> Iterator[None]:
        self._piece = None
        with super().forward(window), _with_softmax(self.layer, self._unnormalised):
            yield

    @contextmanager
    def backward(self, window: Window) -> Iterator[None]:
        out, scale = self._saved
        assert self.grad is not None
        own = (self.grad.narrow(0, *window) * out.narrow(0, *window)).sum(-1)
        scale = scale.narrow(0, *window)

        def normalised(scores: Tensor, index: Tensor, *_: Any) -> Tensor:
            shares: Tensor = _Shares.apply(scores, scale[index], own[index])
            return shares

        with super().backward(window), _with_softmax(self.layer, normalised):
            yield

    def add(self, out: Tensor, window: Window) -> None:
        total = self._of(out, 0.0).narrow(0, *window)
        if self._most is None:
            heads = self.result().shape[:-1]
            self._most = out.new_full(heads, torch.finfo(out.dtype).min)
            self._sum = out.new_zeros(heads)
        if self._piece is None:  # no edges
            return
        assert self._sum is not None
        most, added = self._most.narrow(0, *window), self._sum.narrow(0, *window)
        most_of_piece, sum_of_piece = self._piece
        both = torch.maximum(most, most_of_piece)
        before, now = (most - both).exp(), (most_of_piece - both).exp()
        total.mul_(before.unsqueeze(-1)).addcmul_(out, now.unsqueeze(-1))
        added.mul_(before).addcmul_(sum_of_piece, now)
        most.copy_(both)

    def finish(self) -> list[Tensor]:
        total, most, added = self.result(), self._most, self._sum
        assert most is not None and added is not None
        added.clamp_(min=1e-16)  # 0 of nodes without edges; else at least 1
        total.div_(added.unsqueeze(-1))
        return [total, most + added.log_()]

    def _unnormalised(self, scores: Tensor, index: Tensor, ptr: Any, size: int) -> Tensor:
        most = scores.new_full((size, *scores.shape[1:]), torch.finfo(scores.dtype).min)
        every = index.view(-1, *[1] * (scores.dim() - 1)).expand_as(scores)
        most.scatter_reduce_(0, every, scores, "amax")
        found = (scores - most[index]).exp_()
        self._piece = most, torch.zeros_like(most).index_add_(0, index, found)
        return found


class _Shares(torch.autograd.Function):
    """``exp(scores - scale)``: a softmax over more scores than there are here.

    ``scale`` is the logarithm of the sum of all exponentials, and ``own`` is the gradient of the
    result times the result, summed over all edges of a node: what the derivative of a softmax needs
    of edges that are not here.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: Tensor, own: Tensor) -> Tensor:
        shares = (scores - scale).exp_()
        ctx.save_for_backward(shares, own)
        return shares

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shares, own = ctx.saved_tensors
        return shares * (grad - own), None, None


class _Aggregated(pyg.Aggregation):
    """An aggregation by a function of messages, their destinations, the size and the axis."""

    def __init__(self, function: Callable[[Tensor, Tensor, int, int], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(
        self, x: Tensor, index: Tensor, ptr: Any = None, dim_size: int = 0, dim: int = -2
    ) -> Tensor:
        return self._function(x, index, dim_size, dim % x.dim())


@contextmanager
def _with_softmax(layer: Any, softmax: Callable[..., Tensor]) -> Iterator[None]:
    """Within it, the messages of a layer call another softmax."""
    with ExitStack() as stack:
        for name in ("message", "edge_update"):
            function = getattr(type(layer), name)
            if "softmax" in function.__code__.co_names:
                other = with_globals(layer, function, {"softmax": softmax})
                stack.enter_context(replaced(layer, **{name: other}))
        yield


@contextmanager
def replaced(layer: nn.Module, **values: Any) -> Iterator[None]:
    """Within it, attributes of a layer are others; methods, modules and parameters, too."""
    before = {name: getattr(layer, name) for name in values}
    # Other attributes, as methods, are those of the class.
    own = [name for name, each in before.items() if name in vars(layer) or isinstance(each, _HELD)]
    for name, value in values.items():
        setattr(layer, name, value)
    try:
        yield
    finally:
        for name, each in before.items():
            if name in own:
                setattr(layer, name, each)
            else:
                delattr(layer, name)


_HELD = nn.Module | nn.Parameter | None
