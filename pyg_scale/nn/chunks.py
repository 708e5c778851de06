"""Messages in chunks of edges, computed again for gradients: never a row for every edge at once.

A chunk has all edges into some destinations, so it is a call of the layer's ``message`` and
``aggregate`` on a smaller graph. Its rows stay in the processor's cache. Nothing but the sums is
kept for gradients; the backward pass computes each chunk again, as gradient checkpoints do (Chen et
al., 2016). Only layers of which :mod:`pyg_scale.nn.by_row` has a proof are cut, and each call has a
proof of its own: a message may depend on anything that its layer keeps. Chunks are computed by a
copy of the layer, as it was in the call.
"""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pyg_scale.nn.by_relation import EdgeTypes
from pyg_scale.nn.by_row import NotByRow, Watch
from pyg_scale.nn.conv.base import untouched
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

_ALIKE = 2e-3
"""The difference of messages, relative to the largest, that is due to rounding."""

Arguments = dict[str, Any]
Aggregate = Callable[[Any, Edges, Tensor, Arguments], Tensor]
"""Aggregation: from the layer, the edges, the messages and the arguments."""


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
    width: int = 1
    """The largest number of elements of a row that it makes, features not counted."""


_proofs: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Proof]]
_proofs = weakref.WeakKeyDictionary()
"""The last proofs. They only say which calls need none, as these are not cut anyway."""

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
        given: Those of ``aggregate`` without the messages.
        aggregate: The aggregation.
    """

    def __init__(
        self,
        layer: nn.Module,
        edges: Edges,
        message: Arguments,
        given: Arguments,
        aggregate: Aggregate,
    ) -> None:
        self.layer, self.edges, self.aggregate = layer, edges, aggregate
        self.arguments = message, given
        self.tensors: list[Tensor] = []
        """The tensors that chunks read: features of nodes and values of edges, each once."""
        self._place: dict[int, int] = {}
        for value in (*message.values(), *given.values()):
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
        proof = known.get(key)
        if proof is None or (proof.reason != "" and not self._are_few(proof)):
            proof = known[key] = self._prove(modules)
        if self._are_few(proof):
            return ""
        self._doubted = known, key
        self.width = max(self.width, proof.width)
        return proof.reason

    def _are_few(self, proof: Proof) -> bool:
        return self.edges.graph.num_edges * max(self.width, proof.width) < LEAST * ELEMENTS

    _doubted: tuple[dict[Hashable, Proof], Hashable] | None = None

    def forget(self) -> None:
        """Have the layer watched in its next call, as it needed rows in this one."""
        if self._doubted is not None:
            known, key = self._doubted
            known.pop(key, None)

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
        if not all(untouched(each, type(each)) for each in modules if each is not self.layer):
            return Proof("a hook on a module")
        self.parameters = [each for each in self.layer.parameters() if each.requires_grad]
        self.own = {id(each): nn.Parameter(each.detach()) for each in self.parameters}
        copies: dict[int, Any] = dict(self.own)
        try:
            self.then = _copied(self.layer, copies)
            before = [_held(each) for each in copies.values()]
            edges, given = self._watched(self._first())
            rows_given = [v for each in given for v in each.values() if self._has_rows(v, edges)]
            with _nothing_drawn(), torch.random.fork_rng(devices=[]), torch.no_grad():
                edges.grad_mode = False
                watch = Watch(rows_given, self.own.values())
                with watch:
                    out = self.then.message(**given[0])
                if isinstance(out, Lifted):
                    self.aggregate(self.then, edges, out, given[1])
                watch.check_draws()
                if watch.kind(out) != "row":
                    return Proof("its messages are not rows of edges")
                needed = 2 * edges.asked.gathered > edges.num_edges * self.width
                if needed and watch.counts and not watch.draws:
                    self._check_counts(edges.graph.indptr, rows(out))
            after = [_held(each) for each in copies.values()]
            if not all(map(_are_same, before, after)):
                return Proof("its message keeps something in the layer")
        except NotByRow as error:
            return Proof(f"rows of all edges, for {error}")
        if not needed:
            return Proof("")
        self.read, self.draws = watch.read, watch.draws
        return Proof(None, watch.width)

    @staticmethod
    def _has_rows(value: Any, edges: Edges) -> bool:
        if not isinstance(value, Tensor) or isinstance(value, EdgeIndices):
            return False
        return value.dim() > 0 and value.size(0) == edges.num_edges

    def _check_counts(self, indptr: Tensor, seen: Tensor) -> None:
        """Refuse messages that change with the number of edges.

        Args:
            indptr: The pointers of the edges that were watched.
            seen: Their messages.

        Raises:
            NotByRow: If fewer of them are others.
        """
        whole = indptr[(indptr > 0) & (indptr < len(seen))]  # edges of a destination stay together
        if not whole.numel():  # of the only destination, which cannot be cut
            return
        fewer = int(whole[(whole - len(seen) // 2).abs().argmin()])
        edges, given = self._watched(indptr[indptr <= fewer])
        edges.grad_mode = False
        found, seen = rows(self.then.message(**given[0])), seen[:fewer]
        if found.shape == seen.shape:
            exact = torch.promote_types(seen.dtype, torch.float64)
            apart = (found.to(exact) - seen.to(exact)).abs().nan_to_num(0, 0, 0)
            largest = seen.to(exact).abs().nan_to_num(0, 0, 0)
            if not seen.numel() or bool(apart.max() <= _ALIKE * largest.max()):
                return
        raise NotByRow("the number of edges")

    def _first(self) -> Tensor:
        """The pointers of the first edges; some are another destination's if all have one."""
        graph = self.edges.graph
        end = min(_SEEN, graph.num_edges)
        last = int(torch.searchsorted(graph.indptr, end))
        if last == 1 and graph.num_dst > 1:
            return graph.indptr.new_tensor([0, end // 2, end])
        return graph.indptr[: last + 1].clamp(max=end)

    def _watched(self, indptr: Tensor) -> tuple[Edges, list[Arguments]]:
        """Some first edges, with features lifted, as they are in a call of all edges.

        Their sources are the only ones, so that it does not matter how many nodes there are.
        """
        graph, end = self.edges.graph, int(indptr[-1])
        sources, indices = graph.indices[:end].unique(return_inverse=True)
        few = Adjacency.of_checked(indptr, indices.to(graph.indices.dtype), sources.numel())
        edges, given = self._part(few, 0, 0, sources=sources)
        edges.of_call = edges.num_edges
        if max(graph.num_src, graph.num_dst) > self.edges.num_edges:
            edges.of_call = 0  # then edges have maps of their own, as they are fewer than nodes
        return edges, given

    def _part(
        self,
        graph: Adjacency,
        first: int,
        begin: int,
        leaves: dict[Any, Tensor] | None = None,
        sources: Tensor | None = None,
    ) -> tuple[Edges, list[Arguments]]:
        """Some of the edges with their arguments; features are leaves, or those of ``sources``."""
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
                    if end == SOURCE and sources is not None:
                        ends[end] = features.index_select(0, sources)
                    else:
                        ends[end] = features[first:last]
                    made = Lifted(edges, 0, ends, None)
                    edges.asked.widest = max(edges.asked.widest, made.numel())
                    return made
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
                    return EdgeTypes.of(rows, edges) if isinstance(value, EdgeTypes) else rows
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

    def run(self, layer: nn.Module, chunk: Chunk, leaves: dict[Any, Tensor]) -> Tensor:
        """The sums of a chunk, computed by a copy of the layer from leaves, which are made."""
        graph = self.edges.graph
        part = Adjacency.of_checked(
            graph.indptr[chunk.first : chunk.last + 1] - chunk.begin,
            graph.indices[chunk.begin : chunk.end],
            graph.num_src,
        )
        edges, given = self._part(part, chunk.first, chunk.begin, leaves)
        out = layer.message(**given[0])  # type: ignore[operator]
        return self.aggregate(layer, edges, out, given[1])

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
        ctx.read = [(each, each._version) for each in messages.read if not each.is_inference()]
        ctx.state = torch.get_rng_state() if messages.draws else None
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return torch.cat([messages.run(messages.then, each, {}) for each in messages.chunks()])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        messages: Messages = ctx.messages
        tensors = ctx.saved_tensors
        for each, version in ctx.read:
            if each._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a tensor {[*each.shape]} that the message of "
                    f"{type(messages.layer).__name__} reads is at version {each._version}; "
                    f"expected version {version} instead"
                )
        enabled, dtype = ctx.autocast
        torch.clear_autocast_cache()  # of what the forward pass cast without gradients
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
            out = messages.run(messages.then, chunk, leaves)
        asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        given = [*asked.values(), *messages.own.values()]
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
    mine = zip(messages.own.values(), messages.parameters, strict=True)
    layer = _copied(messages.then, {id(own): parameter for own, parameter in mine})
    out = torch.cat([messages.run(layer, chunk, {}) for chunk in messages.chunks()])
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


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Refuse code that draws random numbers of Python or NumPy, and take them back.

    Raises:
        NotByRow: If it did.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
        now = np.random.get_state()
        if random.getstate() != python or not all(map(np.array_equal, now, numpy)):
            raise NotByRow("random numbers that edges share")
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """A module, or what one keeps, as it is now.

    Modules and containers are copied, and methods of modules are bound to the copies. Tensors and
    all other objects are the same.

    Args:
        value: The module.
        copies: What stands for an object in the copy, by its id. It gets those that are made.

    Raises:
        NotByRow: If a module keeps random numbers that go on.
    """
    if id(value) in copies:
        return copies[id(value)]
    kind, made = type(value), value
    if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
        made = copies[id(value)] = object.__new__(kind)
        for name, each in vars(value).items():
            made.__dict__[name] = _copied(each, copies)
    elif kind in (dict, OrderedDict, defaultdict, list, deque, set):
        made = copies[id(value)] = value.copy()
        items = () if kind is set else enumerate(value) if kind in (list, deque) else value.items()
        for key, each in items:
            made[key] = _copied(each, copies)
    elif kind is tuple:
        made = tuple(_copied(each, copies) for each in value)
    elif kind is MethodType and isinstance(value.__self__, nn.Module):
        made = MethodType(value.__func__, _copied(value.__self__, copies))
    elif isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
        raise NotByRow("random numbers of a generator that a module keeps")
    return made


def _held(value: Any) -> list[Any]:
    """The objects that a module or a container holds."""
    held = vars(value) if isinstance(value, nn.Module) else value
    if isinstance(held, dict):
        return [each for item in held.items() for each in item]
    return [*held] if isinstance(held, (list, deque, set)) else []


def _are_same(before: list[Any], after: list[Any]) -> bool:
    """Return True if objects are the same, or equal numbers or strings."""
    return len(before) == len(after) and all(
        a is b or (type(a) is type(b) and type(a) in (int, float, str) and a == b)
        for a, b in zip(before, after, strict=True)
    )


def _features(value: Lifted) -> Tensor:
    features = value.ends[SOURCE] if value.ends[SOURCE] is not None else value.ends[DESTINATION]
    assert features is not None
    return features
