"""The halo in blocks, one rank after the other, and again in the backward pass.

A layer that adds up or averages messages can do so rank by rank: the rows of one rank come, their
messages are added, and they are forgotten. In the backward pass they come again. So no rank ever
has its whole halo, and nothing of it is kept for the backward pass. The idea is that of SAR
(Mostafa, "Sequential Aggregation and Rematerialization", MLSys 2022). While one block is added up,
the next one is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import MessagePassing

from pyg_scale.parallel.exchange import Wire
from pyg_scale.parallel.halo_layers import HaloLayers
from pyg_scale.parallel.inexact import LINEAR
from pyg_scale.parallel.shard import Halo

SEQUENTIAL: tuple[type, ...] = (
    *(layer for layer in LINEAR if layer is not pyg.RGCNConv),
    pyg.GATConv,
)
"""Layers whose messages can be added up in blocks, if their aggregation is a sum or a mean.

Messages of attention can, too, where scores are computed before: they are numbers of edges then.
"""


def check_sequential(module: nn.Module) -> None:
    """Refuse layers whose aggregation cannot be made in blocks.

    Raises:
        ValueError: If there is one; names it.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, MessagePassing):
            continue
        sums = layer.aggr in ("add", "sum", "mean")
        if not sums or not isinstance(layer, SEQUENTIAL):
            raise ValueError(
                f"{type(layer).__name__} ({name or 'the model itself'}) needs all neighbours at "
                "once, not rank by rank: leave remat out"
            )


class RematLayers(HaloLayers):
    """Layers that get the halo's rows in blocks; see :class:`HaloLayers`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._blocks: dict[int, tuple[Tensor, list[_Block]]] = {}

    def _blocks_of(self, edge_index: Tensor, halo: Halo) -> list[_Block]:
        """The edges by the rank of their source; known for those that never change."""
        kept = [edges for edges, _ in self._norms.values()]
        if id(edge_index) not in {*self._edge_types, *map(id, kept)}:
            return _blocks(edge_index, halo)
        if id(edge_index) not in self._blocks:
            self._blocks[id(edge_index)] = edge_index, _blocks(edge_index, halo)
        return self._blocks[id(edge_index)][1]

    def propagate(self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]) -> Tensor:
        src, dst = self._types
        halos = self._exchange.halos
        pairs = self._sources(layer, kwargs, layer._user_args)
        edges = {
            name: value
            for name, value in kwargs.items()
            if name not in pairs and isinstance(value, Tensor) and f"{name}_i" not in _named(layer)
        }
        others = {k: v for k, v in kwargs.items() if k not in pairs and k not in edges}
        blocks = self._blocks_of(edge_index, halos[src])
        call = _Call(
            layer,
            Wire(self._exchange.peers),
            halos[src],
            halos[dst].num_own,
            blocks,
            list(pairs),
            [name for name, (_, other) in pairs.items() if isinstance(other, Tensor)],
            list(edges),
            others,
        )
        sources = [value.movedim(layer.node_dim, 0) for value, _ in pairs.values()]
        ends = [pairs[name][1] for name in call.of_ends]
        out: Tensor = _Sequential.apply(call, *sources, *ends, *edges.values())
        if layer.aggr != "mean":
            return out
        degrees = torch.bincount(edge_index[1], minlength=call.num_ends).clamp_(min=1)
        shape = [1] * out.dim()
        shape[layer.node_dim] = -1
        return out / degrees.view(shape).to(out.dtype)


def _named(layer: Any) -> set[str]:
    return set(layer._user_args)


@dataclass
class _Block:
    """The edges from nodes of one rank.

    Attributes:
        edge_index: ``[2, n]``, with sources numbered among the rows of the rank.
        position: The positions ``[n]`` of these edges among all.
    """

    edge_index: Tensor
    position: Tensor


def _blocks(edge_index: Tensor, halo: Halo) -> list[_Block]:
    """The edges from own nodes, then those from nodes of each rank."""
    starts = torch.tensor([0, halo.num_own, *halo.num_received], device=edge_index.device).cumsum(0)
    block = torch.bucketize(edge_index[0], starts[1:], right=True)
    order = block.argsort(stable=True)
    sizes = torch.bincount(block, minlength=starts.numel() - 1).tolist()
    found = []
    for begin, position in zip(starts.tolist(), order.split(sizes), strict=False):
        edges = edge_index[:, position]
        found.append(_Block(torch.stack([edges[0] - begin, edges[1]]), position))
    return found


@dataclass
class _Call:
    """A ``propagate`` in blocks.

    Attributes:
        layer: The layer.
        wire: Sends rows.
        halo: The nodes of the type of sources.
        num_ends: Number of own nodes of the type of destinations.
        blocks: See :func:`_blocks`.
        of_sources: Names of arguments with a row for each source.
        of_ends: Those among them that have a row for each destination, too.
        of_edges: Names of arguments with a row for each edge.
        others: All other arguments.
    """

    layer: Any
    wire: Wire
    halo: Halo
    num_ends: int
    blocks: list[_Block]
    of_sources: list[str]
    of_ends: list[str]
    of_edges: list[str]
    others: dict[str, Any]

    def split(self, tensors: Sequence[Tensor]) -> tuple[Any, Any, Any]:
        """Rows of sources, of destinations and of edges."""
        first = len(self.of_sources)
        second = first + len(self.of_ends)
        return tensors[:first], tensors[first:second], tensors[second:]

    def sum_of(
        self, block: _Block, sources: Sequence[Tensor], ends: Sequence[Tensor], edges: Any
    ) -> Tensor:
        """The sum of the messages of a block.

        Args:
            block: The block.
            sources: Rows of the rank of the block.
            ends: Rows of own destinations.
            edges: Rows of the edges of the block.
        """
        layer, of_end = self.layer, dict(zip(self.of_ends, ends, strict=True))
        rows = [each.movedim(0, layer.node_dim) for each in sources]
        kwargs = {
            **self.others,
            **{n: (each, of_end.get(n)) for n, each in zip(self.of_sources, rows, strict=True)},
            **dict(zip(self.of_edges, edges, strict=True)),
        }
        size = (sources[0].size(0), self.num_ends)
        with _summing(layer):
            out: Tensor = type(layer).propagate(layer, block.edge_index, size=size, **kwargs)
        return out

    @property
    def rounds(self) -> Iterator[tuple[int, int]]:
        """The rank that this one sends to and the one that it gets from, round by round.

        In a round no rank is sent to by two others.
        """
        rank, size = self.wire.peers.rank, self.wire.peers.size
        for step in range(1, size):
            yield (rank + step) % size, (rank - step) % size

    def rows_for(self, rank: int) -> Tensor:
        """The local numbers of own nodes that a rank needs."""
        begin = sum(self.halo.num_sent[:rank])
        return self.halo.send[begin : begin + self.halo.num_sent[rank]]

    def ask(self, sources: Sequence[Tensor], to: int, of: int) -> Callable[[], list[Tensor]]:
        """Begin to send rows to a rank and to get those of another one."""
        sent = [each.index_select(0, self.rows_for(to)) for each in sources]
        num_received = self._only(of, self.halo.num_received)
        return self.wire.start(sent, num_received, self._only(to, self.halo.num_sent), later=True)

    def give_back(self, grads: Sequence[Tensor], to: int, of: int) -> Callable[[], list[Tensor]]:
        """Begin to send the gradients of the rows of a rank, and to get those of own rows."""
        num_sent = self._only(of, self.halo.num_received)
        return self.wire.start(grads, self._only(to, self.halo.num_sent), num_sent, later=True)

    def _only(self, rank: int, sizes: list[int]) -> list[int]:
        return [size if other == rank else 0 for other, size in enumerate(sizes)]


@contextmanager
def _summing(layer: Any) -> Iterator[None]:
    """Within it, a layer adds up messages, also one that averages."""
    if layer.aggr != "mean":
        yield
        return
    before = layer.aggr_module
    layer.aggr_module = pyg.SumAggregation()
    try:
        yield
    finally:
        layer.aggr_module = before


class _Sequential(torch.autograd.Function):
    """The sum of all messages. Saves rows of own nodes and of edges, and no messages."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        sources, ends, edges = call.split(tensors)
        rounds = list(call.rounds)
        under_way = call.ask(sources, *rounds[0]) if rounds else None
        own = call.blocks[0]
        out = call.sum_of(own, sources, ends, [each[own.position] for each in edges])
        for number, (_, of) in enumerate(rounds):
            assert under_way is not None
            rows = under_way()
            under_way = call.ask(sources, *rounds[number + 1]) if rounds[number + 1 :] else None
            block = call.blocks[1 + of]
            if block.position.numel():
                out = out + call.sum_of(block, rows, ends, [each[block.position] for each in edges])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        call: _Call = ctx.call
        gradients = _Gradients(call, ctx.saved_tensors, ctx.needs_input_grad[1:], grad)
        sources = call.split(ctx.saved_tensors)[0]
        sends = gradients.of_sources
        # Of a sum of rows, at most scaled by constants, gradients do not depend on the rows.
        again = gradients.of_edges or not isinstance(call.layer, LINEAR)
        rounds = list(call.rounds)
        under_way = call.ask(sources, *rounds[0]) if again and rounds else None
        gradients.add(call.blocks[0], sources, own=True)
        back: list[Any] = []
        for number, (to, of) in enumerate(rounds):
            if under_way is not None:
                rows = under_way()
                under_way = call.ask(sources, *rounds[number + 1]) if rounds[number + 1 :] else None
            else:
                size = call.halo.num_received[of]
                rows = [each.new_zeros(size, *each.shape[1:]) for each in sources]
            found = gradients.add(call.blocks[1 + of], rows, own=False)
            if sends:
                back.append((to, call.give_back(found, to, of)))
                if len(back) > 1:
                    gradients.add_returned(*back.pop(0))
        for each in back:
            gradients.add_returned(*each)
        return None, *gradients.found


class _Gradients:
    """The gradients of the arguments of a ``propagate``, as they come block by block.

    Args:
        call: The call.
        tensors: Its arguments.
        needed: Whether there is a gradient of each.
        grad: The gradient of the result.
    """

    def __init__(
        self, call: _Call, tensors: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
    ) -> None:
        self._call, self._tensors, self._grad = call, tensors, grad
        self._needed = needed
        self.found: list[Tensor | None] = [
            torch.zeros_like(each) if yes else None
            for each, yes in zip(tensors, needed, strict=True)
        ]
        of_sources, _, of_edges = call.split(needed)  # type: ignore[arg-type]
        self.of_sources, self.of_edges = any(of_sources), any(of_edges)

    def add(self, block: _Block, rows: Sequence[Tensor], own: bool) -> list[Tensor]:
        """Add those of a block; return those of its rows, zeros where there are none."""
        call = self._call
        if not block.position.numel():
            return [torch.zeros_like(each) for each in rows]
        _, ends, edges = call.split(self._tensors)
        inputs = [*rows, *ends, *(each[block.position] for each in edges)]
        with torch.enable_grad():
            inputs = [
                each.detach().requires_grad_(yes)
                for each, yes in zip(inputs, self._needed, strict=True)
            ]
            out = call.sum_of(block, *call.split(inputs))
        wanted = [each for each in inputs if each.requires_grad]
        said = iter(torch.autograd.grad(out, wanted, self._grad, allow_unused=True))
        parts = [next(said) if each.requires_grad else None for each in inputs]
        of_rows, of_ends, of_edges = call.split(parts)  # type: ignore[arg-type]
        into_rows, into_ends, into_edges = call.split(self.found)  # type: ignore[arg-type]
        pairs = [*zip(into_ends, of_ends, strict=True)]
        if own:
            pairs += zip(into_rows, of_rows, strict=True)
        for into, part in pairs:
            if into is not None and part is not None:
                into += part
        for into, part in zip(into_edges, of_edges, strict=True):
            if into is not None and part is not None:
                into[block.position] = part
        return [
            torch.zeros_like(row) if part is None else part.contiguous()
            for row, part in zip(rows, of_rows, strict=True)
        ]

    def add_returned(self, rank: int, finish: Callable[[], list[Tensor]]) -> None:
        """Add what a rank sent back for own rows."""
        into = self._call.split(self.found)[0]  # type: ignore[arg-type]
        for each, part in zip(into, finish(), strict=True):
            if each is not None:
                each.index_add_(0, self._call.rows_for(rank), part)
