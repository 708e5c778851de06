"""Messages in chunks of edges, computed again for gradients: never a row for every edge at once.

A chunk has all edges into some destinations, so it is a call of the layer's ``message`` and
``aggregate`` on a smaller graph. Its rows stay in the processor's cache. Nothing but the sums is
kept for gradients; the backward pass computes each chunk again, as gradient checkpoints do (Chen et
al., 2016). Only layers of which :mod:`pyg_scale.nn.by_row` has a proof are cut.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyg_scale.nn.by_row import NotByRow, Watch
from pyg_scale.nn.edges import DESTINATION, SOURCE, Edges, gather
from pyg_scale.nn.graph import derived
from pyg_scale.nn.lifted import EdgeIndices, Lifted, rows
from pyg_scale.ops.adjacency import Adjacency, recording

ELEMENTS = 1 << 20
"""Number of elements of the rows of a chunk: few enough for the processor's cache, and enough that
Python's time for a chunk does not count."""

LEAST = 16
"""Number of chunks from which on edges are cut: below, gathering all rows is as fast or faster."""
_WIDE = 1 << 10
"""Number of elements that a row is taken to have at most before a layer was watched."""
_SEEN = 61
"""Number of edges on which a layer's code is watched."""

Arguments = dict[str, Any]
Compute = Callable[[Edges, Arguments, Arguments], Tensor]
"""Message and aggregation: from the edges and the arguments of both."""


class Chunk(NamedTuple):
    """The edges into the destinations ``first`` to ``last - 1``."""

    first: int
    last: int
    begin: int
    end: int


class Proof(NamedTuple):
    """The result of watching a layer."""

    reason: str | None
    """The reason why it is not cut, or ``None``."""
    draws: bool = False
    """True if it draws random numbers."""
    width: int = 1
    """The largest number of elements of a row that it makes, features not counted."""


_proofs: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Proof]]
_proofs = weakref.WeakKeyDictionary()


_cut: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_cut(layer: nn.Module) -> bool:
    """Return True if calls of a layer were computed in chunks."""
    return layer in _cut


class Messages:
    """One call of a layer's message and aggregation, that can be made for some of its edges.

    Args:
        layer: The layer.
        edges: Its edges.
        message: The arguments of ``message``, as PyG collects them; features are lifted.
        aggregate: Those of ``aggregate`` without the messages.
        compute: Message and aggregation.
        reduces: A function that says if messages are reduced without a row for each.
    """

    def __init__(
        self,
        layer: nn.Module,
        edges: Edges,
        message: Arguments,
        aggregate: Arguments,
        compute: Compute,
        reduces: Callable[[Tensor], bool],
    ) -> None:
        self.layer, self.edges, self.compute, self.reduces = layer, edges, compute, reduces
        self.arguments = message, aggregate
        self.tensors: list[Tensor] = []
        """The tensors that chunks read: features of nodes and values of edges, each once."""
        self._place: dict[int, int] = {}
        for value in (*message.values(), *aggregate.values()):
            tensor = _features(value) if isinstance(value, Lifted) else value
            if not isinstance(tensor, Tensor) or isinstance(tensor, EdgeIndices):
                continue
            if id(tensor) not in self._place:
                self._place[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)

    def reason(self) -> str | None:
        """The reason why the edges are not cut, or an empty string if there are too few."""
        sizes = [t.numel() // max(t.size(0), 1) for t in self.tensors if t.dim()]
        self.width = max(sizes, default=1)
        graph, least = self.edges.graph, LEAST * ELEMENTS
        if graph.num_edges * max(self.width, _WIDE) < least:
            return ""
        if graph.device.type != "cpu" or recording():
            return ""
        modules = [*self.layer.modules()]
        known = _proofs.setdefault(self.layer, {})
        key = (
            tuple(map(id, modules)),
            self.layer.training,
            tuple(self._form(value) for given in self.arguments for value in given.items()),
        )
        if key not in known:
            known[key] = self._prove(modules)
        proof = known[key]
        self.draws, self.width = proof.draws, max(self.width, proof.width)
        return "" if graph.num_edges * self.width < least else proof.reason

    def _form(self, item: tuple[str, Any]) -> Hashable:
        name, value = item
        if isinstance(value, Lifted):
            return name, tuple(value.ends[i] is None for i in (0, 1)), value.shape[1:], value.dtype
        if isinstance(value, EdgeIndices):
            return name, value.row
        if isinstance(value, Tensor):
            return name, value.shape[1:], value.size(0) == self.edges.num_edges, value.dtype
        return name, value if isinstance(value, (int, float, str, bool)) else type(value)

    def _prove(self, modules: list[nn.Module]) -> Proof:
        for name, value in (*self.arguments[0].items(), *self.arguments[1].items()):
            if name in ("edge_index", "size", "adj_t", "ptr") and value is not None:
                return Proof(f"its message uses {name}")
            if isinstance(value, Lifted) and value.dim_of_edges != 0:
                return Proof("edges are not in the first dimension")
            if isinstance(value, (list, tuple, dict)):
                return Proof(f"{name} is a {type(value).__name__}")
        for module in modules:
            if module is not self.layer and (module._forward_hooks or module._forward_pre_hooks):
                return Proof("a hook on a module")
        edges, given = self._watched()
        attributes = dict(vars(self.layer))
        seen = [v for each in given for v in each.values() if isinstance(v, Tensor)]
        seen = [v for v in seen if v.dim() and v.size(0) == edges.num_edges]
        seen = [v for v in seen if not isinstance(v, EdgeIndices)]
        constants = [*self.layer.parameters(), *self.layer.buffers()]
        watch = Watch(seen, constants)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                edges.grad_mode = False
                with watch:
                    out = self.layer.message(**given[0])  # type: ignore[operator]
                if not self.reduces(out):
                    rows(out)
            if watch.kind(out) != "row":
                return Proof("its messages are not rows of edges")
            if dict(vars(self.layer)) != attributes:
                return Proof("its message keeps something in the layer")
        except NotByRow as error:
            return Proof(f"rows of all edges, for {error}")
        finally:
            self.layer.__dict__.clear()
            self.layer.__dict__.update(attributes)
        if 2 * edges.gathered <= edges.num_edges * self.width:
            return Proof("")  # it needs no rows
        return Proof(None, watch.draws, watch.width)

    def _watched(self) -> tuple[Edges, list[Arguments]]:
        """The first edges, with features lifted, as they are in a call of all edges."""
        graph = self.edges.graph
        end = min(_SEEN, graph.num_edges)
        last = int(torch.searchsorted(graph.indptr, end))
        indptr = graph.indptr[: last + 1].clamp(max=end)
        return self._part(Adjacency.of_checked(indptr, graph.indices[:end], graph.num_src), 0, 0)

    def _part(
        self, graph: Adjacency, first: int, begin: int, leaves: dict[Any, Tensor] | None = None
    ) -> tuple[Edges, list[Arguments]]:
        """Some of the edges with their arguments; features are leaves, or lifted without them."""
        size, last = graph.num_edges, first + graph.num_dst
        edges = Edges.of(graph, self.edges)
        ids = self.edges.graph.edge_id
        here = None if ids is None else ids[begin : begin + size]

        def of(name: str, value: Any) -> Any:
            if isinstance(value, EdgeIndices):
                end = self.edges.end(value.row or 0)
                row = edges.edge_index[value.row]
                return EdgeIndices.of(row, edges, value.row) if end == DESTINATION else row
            if isinstance(value, Lifted):
                end = SOURCE if value.ends[SOURCE] is not None else DESTINATION
                features = _features(value)
                if leaves is None:
                    ends: list[Tensor | None] = [None, None]
                    ends[end] = features if end == SOURCE else features[first:last]
                    return Lifted(edges, 0, ends, None)
                leaf = leaves.get((end, id(features)))
                if leaf is None:
                    if end == SOURCE:
                        leaf = features.index_select(0, graph.indices)
                    else:
                        leaf = features[first:last]
                    leaf = leaves[end, id(features)] = self._leaf(leaf, features)
                return leaf if end == SOURCE else gather(edges, leaf, 0, DESTINATION)
            if isinstance(value, Tensor) and value.dim() and value.size(0) == self.edges.num_edges:
                rows = value[begin : begin + size] if here is None else value.index_select(0, here)
                if leaves is None:
                    return rows
                if (None, id(value)) not in leaves:
                    leaves[None, id(value)] = self._leaf(rows, value)
                return leaves[None, id(value)]
            return graph.num_dst if name in ("size_i", "dim_size") else value

        return edges, [{n: of(n, v) for n, v in given.items()} for given in self.arguments]

    def _leaf(self, part: Tensor, whole: Tensor) -> Tensor:
        if self.whole_graph or not whole.requires_grad:
            return part
        return part.detach().requires_grad_()

    whole_graph = False
    """True while derivatives of gradients are computed: parts stay connected to the whole."""

    def chunks(self) -> list[Chunk]:
        """The chunks, which cover all destinations."""
        graph, step = self.edges.graph, max(ELEMENTS // max(self.width, 1), 1)

        def cut() -> list[Chunk]:
            size = graph.num_edges
            targets = torch.arange(0, size, step, device=graph.device)[1:]
            bounds = torch.searchsorted(graph.indptr, targets).unique()
            bounds = [0, *(b for b in bounds.tolist() if 0 < b < graph.num_dst), graph.num_dst]
            at = graph.indptr[torch.tensor(bounds)].tolist()
            kept = [0] + [k for k in range(1, len(at)) if at[k] > at[k - 1] or k == len(at) - 1]
            if len(kept) > 2 and at[kept[-1]] == at[kept[-2]]:
                del kept[-2]  # destinations without edges belong to the chunk before
            return [Chunk(bounds[a], bounds[b], at[a], at[b]) for a, b in pairwise(kept)]

        return derived(graph, ("chunks", step), cut)

    def run(self, chunk: Chunk, leaves: dict[Any, Tensor]) -> Tensor:
        """The sums of a chunk, computed from leaves, which are made."""
        graph = self.edges.graph
        part = Adjacency.of_checked(
            graph.indptr[chunk.first : chunk.last + 1] - chunk.begin,
            graph.indices[chunk.begin : chunk.end],
            graph.num_src,
        )
        edges, given = self._part(part, chunk.first, chunk.begin, leaves)
        return self.compute(edges, *given)

    @functools.cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that get gradients."""
        return [each for each in self.layer.parameters() if each.requires_grad]

    def sums(self) -> Tensor:
        """All sums, chunk by chunk."""
        _cut.add(self.layer)
        out: Tensor = _Chunked.apply(self, *self.tensors, *self.parameters)
        return out

    def place(self, name: Any) -> int:
        """The index of the tensor whose part a leaf is."""
        return self._place[name[1]]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, messages: Messages, *tensors: Tensor) -> Tensor:
        ctx.messages = messages
        ctx.save_for_backward(*tensors)
        ctx.state = torch.get_rng_state() if messages.draws else None
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return torch.cat([messages.run(chunk, {}) for chunk in messages.chunks()])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        messages: Messages = ctx.messages
        tensors = ctx.saved_tensors
        enabled, dtype = ctx.autocast
        with _replayed(ctx.state), torch.autocast("cpu", dtype, enabled=enabled):
            if torch.is_grad_enabled():
                return None, *_differentiable(messages, tensors, ctx.needs_input_grad[1:], grad)
            return None, *_gradients(messages, tensors, ctx.needs_input_grad[1:], grad)


def _gradients(
    messages: Messages, tensors: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    count = len(messages.tensors)
    found: list[Tensor | None] = [
        torch.zeros_like(t) if n and k < count else None
        for k, (t, n) in enumerate(zip(tensors, needed, strict=True))
    ]
    graph = messages.edges.graph
    for chunk in messages.chunks():
        leaves: dict[Any, Tensor] = {}
        with torch.enable_grad():
            out = messages.run(chunk, leaves)
        asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        given = [*asked.values(), *messages.parameters]
        if not out.requires_grad:
            continue
        grads = torch.autograd.grad(out, given, grad[chunk.first : chunk.last], allow_unused=True)
        for name, of_leaf in zip(asked, grads, strict=False):
            total = found[messages.place(name)]
            if of_leaf is None or total is None:
                continue
            if name[0] == SOURCE:
                _add_rows(total, graph.indices[chunk.begin : chunk.end], of_leaf)
            elif name[0] == DESTINATION:
                total[chunk.first : chunk.last] += of_leaf
            elif graph.edge_id is None:
                total[chunk.begin : chunk.end] += of_leaf
            else:
                _add_rows(total, graph.edge_id[chunk.begin : chunk.end], of_leaf)
        for k, of_parameter in enumerate(grads[len(asked) :], count):
            known = found[k]
            if of_parameter is not None:
                found[k] = of_parameter if known is None else known.add_(of_parameter)
    return found


def _add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    total.index_add_(0, index.to(torch.int64), rows)  # torch is several times slower with int32


def _differentiable(
    messages: Messages, tensors: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """The same, to be differentiated again: with a row for every edge."""
    messages.whole_graph = True
    out = torch.cat([messages.run(chunk, {}) for chunk in messages.chunks()])
    wanted = [t for t, n in zip(tensors, needed, strict=True) if n]
    made = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return [next(made) if n else None for n in needed]


@contextmanager
def _replayed(state: Tensor | None) -> Iterator[None]:
    """Draw the random numbers of the forward pass again."""
    if state is None:
        yield
        return
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(now)


def _features(value: Lifted) -> Tensor:
    features = value.ends[SOURCE] if value.ends[SOURCE] is not None else value.ends[DESTINATION]
    assert features is not None
    return features
