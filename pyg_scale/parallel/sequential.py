"""A layer in pieces: rank by rank, and of each rank some edges at a time.

The rows of one rank come, the messages of its edges are made and aggregated piece by piece, and all
of them are forgotten. In the backward pass the rows come again. While those of one rank are used,
the next ones are on their way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_geometric
from torch import Tensor
from torch_geometric import nn as pyg

from pyg_scale.parallel.exchange import Wire
from pyg_scale.parallel.reduction import Reduction, Window, replaced
from pyg_scale.parallel.shard import Halo
from pyg_scale.parallel.split import LEFT_BEHIND

EDGES_AT_ONCE = 8192
"""The number of edges of a piece, at most: what bounds the memory of messages."""

Coming = Callable[[], list[Tensor]]


# Pieces ########################################################################################


@dataclass
class Piece:
    """Some edges from nodes of one rank.

    Attributes:
        position: Their positions ``[n]`` among all edges.
        begin: The local number of the first node of the rank.
        window: The destinations.
    """

    position: Tensor
    begin: int
    window: Window


def pieces_of(edge_index: Tensor, halo: Halo, num_ends: int) -> list[list[Piece]]:
    """The edges from own nodes, then those from nodes of each rank, by destination.

    Args:
        edge_index: Edges ``[2, num_edges]`` by local numbers.
        halo: The nodes of the type of sources.
        num_ends: Number of own nodes of the type of destinations.
    """
    starts = [0, halo.num_own]
    for number in halo.num_received:
        starts.append(starts[-1] + number)
    ends = torch.tensor(starts[1:], device=edge_index.device)
    block = torch.bucketize(edge_index[0], ends, right=True)
    order = (block * max(1, num_ends) + edge_index[1]).argsort(stable=True)
    sizes = torch.bincount(block, minlength=len(starts) - 1).tolist()
    found: list[list[Piece]] = []
    for begin, positions in zip(starts, order.split(sizes), strict=False):
        parts = [each for each in positions.split(EDGES_AT_ONCE) if each.numel()]
        outer = [edge_index[1, part[[0, -1]]] for part in parts]
        windows = torch.stack(outer).tolist() if outer else []
        pairs = zip(parts, windows, strict=True)
        found.append([Piece(p, begin, (first, last - first + 1)) for p, (first, last) in pairs])
    if not found[0]:  # the first piece says of which shape the result is
        found[0] = [Piece(order[:0], 0, (0, 0))]
    return found


# Calls #########################################################################################


@dataclass
class Arguments:
    """The arguments of ``propagate`` or ``edge_updater``.

    Attributes:
        sources: By name the number of a tensor with a row for each source.
        ends: Of one with a row for each destination.
        edges: Of one with a row for each edge.
        others: All other arguments.
    """

    sources: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    edges: dict[str, int] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def of(self, rows: Rows, dim: int) -> dict[str, Any]:
        """The arguments of a piece, whose nodes are numbered along ``dim``."""
        ends = {name: rows.ends[k].movedim(0, dim) for name, k in self.ends.items()}
        pairs = {
            name: (rows.sources[k].movedim(0, dim), ends.get(name))
            for name, k in self.sources.items()
        }
        edges = {name: rows.edges[k] for name, k in self.edges.items()}
        return {**self.others, **ends, **pairs, **edges}


@dataclass
class Rows:
    """Tensors of sources, of destinations and of edges."""

    sources: list[Tensor]
    ends: list[Tensor]
    edges: list[Tensor]

    def __iter__(self) -> Iterator[Tensor]:
        yield from (*self.sources, *self.ends, *self.edges)

    def like(self, values: Sequence[Any]) -> Rows:
        """Other values, one for each of these."""
        first, second = len(self.sources), len(self.sources) + len(self.ends)
        return Rows(list(values[:first]), list(values[first:second]), list(values[second:]))

    def of_edges(self, edge_index: Tensor, piece: Piece, gathers: bool) -> tuple[Tensor, Rows]:
        """The edges of a piece and the rows that they need.

        Args:
            edge_index: All edges.
            piece: The piece; these are rows of the nodes of its rank.
            gathers: Whether there shall be a source for each edge, so that a gradient of sources is
                no larger than the piece.
        """
        first, _ = piece.window
        edges = edge_index[:, piece.position]
        src, dst = edges[0] - piece.begin, edges[1] - first
        sources = self.sources
        if gathers:
            sources = [each.index_select(0, src) for each in sources]
            src = torch.arange(src.numel(), device=src.device)
        return torch.stack([src, dst]), Rows(
            sources,
            [each.narrow(0, *piece.window) for each in self.ends],
            [each.index_select(0, piece.position) for each in self.edges],
        )


@dataclass
class Call(ABC):
    """One call of a layer.

    Attributes:
        layer: The layer.
        wire: Sends rows.
        halo: The nodes of the type of sources.
        num_ends: Number of own nodes of the type of destinations.
        edge_index: The edges.
        pieces: See :func:`pieces_of`.
        reduction: Aggregates.
        like: Says which of the tensors are of sources, destinations and edges.
        depends: Whether gradients depend on rows of sources: those of a sum of rows do not.
        parameters: Parameters that messages use.
    """

    layer: Any
    wire: Wire
    halo: Halo
    num_ends: int
    edge_index: Tensor
    pieces: list[list[Piece]]
    reduction: type[Reduction]
    like: Rows
    depends: bool
    parameters: list[Tensor]
    random: list[Tensor] = field(default_factory=list)

    @abstractmethod
    def compute(self, edge_index: Tensor, rows: Rows, window: Window) -> Tensor:
        """The result of the layer for some edges."""

    def result(self) -> Tensor:
        """The result of the layer for all edges, with its gradient."""
        out: Tensor = _Sequential.apply(self, *self.like, *self.parameters)
        return out

    def degrees(self, like: Tensor) -> Tensor | None:
        """Divisors of a sum that make it a mean; ``None`` if the result is none."""
        if self.layer.aggr != "mean":
            return None
        found = torch.bincount(self.edge_index[1], minlength=self.num_ends).clamp_(min=1)
        shape = [1] * like.dim()
        shape[self.layer.node_dim] = -1
        return found.view(shape).to(like.dtype)

    # What is sent ##########################################################################

    def arriving(self, sources: list[Tensor], again: bool) -> Iterator[tuple[int, int, Any]]:
        """The rank to send gradients to, the one whose rows there are, and these; own rows first.

        Args:
            sources: Own rows.
            again: Whether rows are needed; else they are 0.
        """
        rank = self.wire.peers.rank
        rounds = rounds_of(rank, self.wire.peers.size)
        coming = self.ask(sources, *rounds[0]) if again and rounds else None
        yield rank, rank, sources
        for number, (to, of) in enumerate(rounds):
            if coming is None:
                size = self.halo.num_received[of]
                rows = [each.new_zeros(1).expand(size, *each.shape[1:]) for each in sources]
            else:
                rows = coming()
                coming = self.ask(sources, *rounds[number + 1]) if rounds[number + 1 :] else None
            yield to, of, rows

    def rows_for(self, rank: int) -> Tensor:
        """The local numbers of own nodes that a rank needs."""
        begin = sum(self.halo.num_sent[:rank])
        return self.halo.send[begin : begin + self.halo.num_sent[rank]]

    def ask(self, sources: Sequence[Tensor], to: int, of: int) -> Coming:
        """Begin to send rows to a rank and to get those of another one."""
        sent = [each.index_select(0, self.rows_for(to)) for each in sources]
        num_received = _only(of, self.halo.num_received)
        return self.wire.start(sent, num_received, _only(to, self.halo.num_sent), later=True)

    def give_back(self, grads: Sequence[Tensor], to: int, of: int) -> Coming:
        """Begin to send the gradients of the rows of a rank, and to get those of own rows."""
        num_sent = _only(of, self.halo.num_received)
        return self.wire.start(grads, _only(to, self.halo.num_sent), num_sent, later=True)


def rounds_of(rank: int, size: int) -> list[tuple[int, int]]:
    """The rank that one sends to and the one that it gets from, round by round.

    In a round every rank is sent to by one other, so that no link is shared.
    """
    return [((rank + step) % size, (rank - step) % size) for step in range(1, size)]


def _only(rank: int, sizes: list[int]) -> list[int]:
    return [size if other == rank else 0 for other, size in enumerate(sizes)]


@dataclass
class Propagate(Call):
    """A ``propagate``, with the weights of edges that an ``edge_updater`` makes for it.

    Attributes:
        of_messages: The arguments of ``propagate``.
        of_weights: Those of ``edge_updater``, if it was called.
        weights: The name of its result among the arguments of ``propagate``.
    """

    of_messages: Arguments = field(default_factory=Arguments)
    of_weights: Arguments | None = None
    weights: str = ""

    def compute(self, edge_index: Tensor, rows: Rows, window: Window) -> Tensor:
        layer, of, more = self.layer, type(self.layer), {}
        size = (rows.sources[0].size(0), window[1])
        if self.of_weights is not None:
            given = self.of_weights.of(rows, layer.node_dim)
            more[self.weights] = of.edge_updater(layer, edge_index, size=size, **given)
        given = {**self.of_messages.of(rows, layer.node_dim), **more}
        left: dict[str, Any] = {LEFT_BEHIND: None} if LEFT_BEHIND in vars(layer) else {}
        with replaced(layer, **left):
            out: Tensor = of.propagate(layer, edge_index, size=size, **given)
        return out


@dataclass
class Relations(Call):
    """The forward of a layer with relations: it propagates once for each.

    Attributes:
        forward: The forward of its class, and ``propagate``.
    """

    forward: Callable[..., Tensor] = pyg.RGCNConv.forward

    def compute(self, edge_index: Tensor, rows: Rows, window: Window) -> Tensor:
        (x,), (ends,), edges = rows.sources, rows.ends, rows.edges
        layer = self.layer
        bare = {"root": None, "bias": None, "propagate": _bound(layer, "propagate")}
        if len(edges) > 1:
            bare["aggr_module"] = _Means(edges[1], edges[0], layer.num_relations)
        with replaced(layer, **bare), _without_segments():
            return self.forward(layer, (x, ends), edge_index, edges[0])

    def degrees(self, like: Tensor) -> Tensor | None:
        return None  # those of a relation, see `compute`


def degrees_by_type(edge_index: Tensor, edge_type: Tensor, num_ends: int, number: int) -> Tensor:
    """The number ``int32`` ``[num_edges]`` of edges of the same type that end where each does."""
    key = edge_index[1] * number + edge_type
    return torch.bincount(key, minlength=num_ends * number).to(torch.int32)[key]


class _Means(pyg.Aggregation):
    """Sums of messages by degrees, of one relation after the other."""

    def __init__(self, degrees: Tensor, edge_type: Tensor, number: int) -> None:
        super().__init__()
        self._of = iter([degrees[edge_type == relation] for relation in range(number)])

    def forward(
        self, x: Tensor, index: Tensor, ptr: Any = None, dim_size: int = 0, dim: int = -2
    ) -> Tensor:
        shares = x / next(self._of).view(-1, 1).to(x.dtype)
        return x.new_zeros(dim_size, *x.shape[1:]).index_add(0, index, shares)


def _bound(layer: Any, name: str) -> Callable[..., Any]:
    bound: Callable[..., Any] = getattr(type(layer), name).__get__(layer)
    return bound


@contextmanager
def _without_segments() -> Iterator[None]:
    before = torch_geometric.backend.use_segment_matmul
    torch_geometric.backend.use_segment_matmul = False
    try:
        yield
    finally:
        torch_geometric.backend.use_segment_matmul = before


# Autograd ######################################################################################


class _Sequential(torch.autograd.Function):
    """The aggregation of all messages. Saves rows of own nodes and of edges, and no messages."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Tensor:
        ctx.call = call
        own = call.like.like(tensors[: len(list(call.like))])
        reduction = call.reduction(call.layer, call.num_ends)
        call.random = _random_state(own.sources[0])
        for to, of, sources in call.arriving(own.sources, again=True):
            there = Rows(sources, own.ends, own.edges)
            is_own = (to, of) == (call.wire.peers.rank,) * 2
            for piece in call.pieces[0 if is_own else 1 + of]:
                edges, rows = there.of_edges(call.edge_index, piece, gathers=False)
                with reduction.forward(piece.window):
                    out = call.compute(edges, rows, piece.window)
                reduction.add(out, piece.window)
        ctx.number = len(tensors)
        kept = reduction.finish()
        total = reduction.result()
        degrees = call.degrees(total)
        ctx.save_for_backward(*tensors, *kept)
        return total if degrees is None else total / degrees

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        call: Call = ctx.call
        degrees = call.degrees(grad)
        grad = grad if degrees is None else grad / degrees
        tensors, saved = ctx.saved_tensors[: ctx.number], ctx.saved_tensors[ctx.number :]
        kept = [each.detach() for each in saved]  # the result among them is that of this function
        reduction = call.reduction(call.layer, call.num_ends, kept, grad)
        gradients = _Gradients(call, tensors, ctx.needs_input_grad[1:], reduction)
        with _random_state_of(call.random, grad):
            gradients.add_all()
        return None, *gradients.found


class _Gradients:
    """The gradients of the tensors of a call, as they come piece by piece.

    Args:
        call: The call.
        tensors: Its tensors, and parameters.
        needed: Whether there is a gradient of each.
        reduction: Aggregates.
    """

    def __init__(
        self, call: Call, tensors: Sequence[Tensor], needed: Sequence[bool], reduction: Reduction
    ) -> None:
        self._call, self._reduction = call, reduction
        number = len(list(call.like))
        self._own, self._needs = (call.like.like(each[:number]) for each in (tensors, needed))
        self._parameters = list(tensors[number:])
        self.found: list[Tensor | None] = [
            torch.zeros_like(each) if yes else None
            for each, yes in zip(tensors, needed, strict=True)
        ]
        self._found = call.like.like(self.found[:number])
        self._of_parameters = self.found[number:]

    def add_all(self) -> None:
        """Add those of all pieces of all ranks."""
        call, own = self._call, self._own
        again = call.depends or any(self._needs.edges)
        sends = any(self._needs.sources)
        back: list[tuple[int, Coming]] = []
        for to, of, sources in call.arriving(own.sources, again):
            is_own = (to, of) == (call.wire.peers.rank,) * 2
            into = self._found.sources
            if not is_own:
                shapes = [each.shape for each in sources]
                into = [each.new_zeros(s) for each, s in zip(own.sources, shapes, strict=True)]
            for piece in call.pieces[0 if is_own else 1 + of]:
                self._add(piece, Rows(sources, own.ends, own.edges), into)
            if sends and not is_own:
                back.append((to, call.give_back(into, to, of)))
                if len(back) > 1:
                    self._add_returned(*back.pop(0))
        for each in back:
            self._add_returned(*each)

    def _add(self, piece: Piece, there: Rows, into: Sequence[Tensor | None]) -> None:
        """Add those of a piece.

        Args:
            piece: The piece.
            there: The rows of its rank.
            into: The gradients of these rows, which are added to.
        """
        call = self._call
        edges, rows = there.of_edges(call.edge_index, piece, gathers=True)
        with torch.enable_grad():
            pairs = zip(rows, self._needs, strict=True)
            rows = rows.like([each.detach().requires_grad_(bool(yes)) for each, yes in pairs])
            with self._reduction.backward(piece.window):
                out = call.compute(edges, rows, piece.window)
        wanted = [each for each in rows if each.requires_grad]
        number = len(wanted)
        if not out.requires_grad:
            return
        said = torch.autograd.grad(
            out,
            [*wanted, *self._parameters],
            self._reduction.grad_of(piece.window),
            allow_unused=True,
        )
        parts = iter(said[:number])
        of = rows.like([next(parts) if each.requires_grad else None for each in rows])
        source = call.edge_index[0, piece.position] - piece.begin
        for whole, part in _both(into, of.sources):
            whole.index_add_(0, source, part)
        for whole, part in _both(self._found.ends, of.ends):
            whole.narrow(0, *piece.window).add_(part)
        for whole, part in _both(self._found.edges, of.edges):
            whole.index_copy_(0, piece.position, part)
        for whole, part in _both(self._of_parameters, said[number:]):
            whole.add_(part)

    def _add_returned(self, rank: int, finish: Coming) -> None:
        """Add what a rank sent back for own rows."""
        for each, part in zip(self._found.sources, finish(), strict=True):
            if each is not None:
                each.index_add_(0, self._call.rows_for(rank), part)


def _both(
    found: Sequence[Tensor | None], parts: Sequence[Tensor | None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Those pairs of which there are both."""
    for whole, part in zip(found, parts, strict=True):
        if whole is not None and part is not None:
            yield whole, part


def _random_state(like: Tensor) -> list[Tensor]:
    """The state of random numbers."""
    gpus = [like.device] if like.device.type == "cuda" else []
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]


@contextmanager
def _random_state_of(states: list[Tensor], like: Tensor) -> Iterator[None]:
    """Within it, random numbers are those after a state."""
    gpus = [like.device] if like.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.set_rng_state(states[0])
        for state, gpu in zip(states[1:], gpus, strict=True):
            torch.cuda.set_rng_state(state, gpu)
        yield
