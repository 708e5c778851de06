"""Advice on the wrapper for a model, a graph and a number of ranks, from measured sizes."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import subgraph

from pyg_scale import plugins
from pyg_scale.files.byte_size import byte_size
from pyg_scale.graph.base import directory_of
from pyg_scale.parallel.feature import check_channels
from pyg_scale.parallel.layers import check_module, ends_of
from pyg_scale.parallel.remat import is_sequential
from pyg_scale.parallel.sequential import EDGES_AT_ONCE
from pyg_scale.partitioner import Partitioner, Quality, assign, quality
from pyg_scale.partitioner.range import RangePartitioner

_UNEVEN = 1.2  # times the average of edges
_PROBE = 64  # nodes on which the model is run once, to see what it sends
# Seconds of one thread of a CPU, forward and backward: see docs/parallel.md. The C library gives
# large tensors back to the system when they are freed, and each of their pages is fetched again.
_EDGE, _EDGE_OF_PIECE, _MESSAGE = 20e-9, 45e-9, 2e-3
_BYTE, _BYTE_OF_LARGE, _BYTE_OF_PIECE = 0.25e-9, 0.8e-9, 0.2e-9
_SMALL, _LARGE = 16 << 20, 48 << 20  # bytes of a tensor


@dataclass
class Cost:
    """The estimated cost of a wrapper for a rank and a step.

    Attributes:
        sent: Bytes that a rank sends, forward and backward, on average.
        memory: Bytes of the features, activations and edges of the rank that has the most.
        seconds: The time that sending takes.
        computing: The time that following edges takes a thread of a CPU on the rank that has the
            most; 0 on another device.
    """

    sent: float
    memory: float
    seconds: float
    computing: float = 0.0


@dataclass
class Advice:
    """A recommendation.

    Attributes:
        method: The name of a wrapper, for :func:`pyg_scale.parallel.wrap`.
        replication: Halo nodes of all ranks, divided by the nodes of the graph.
        costs: Those of the wrappers that can be used: ``"halo"``, ``"halo+remat"`` (with
            ``remat=True``) and ``"feature"``.
        reasons: The reasons, in words.
        options: Options of the wrapper.
    """

    method: str
    replication: float
    costs: dict[str, Cost] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def wrapper(self) -> str:
        """The wrapper with its options, in words."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.method!r} with {given}" if given else repr(self.method)

    def __str__(self) -> str:
        return "\n".join([f"use {self.wrapper}", *(f"  {reason}" for reason in self.reasons)])


def advise(
    graph: Data,
    model: nn.Module,
    world: int,
    *,
    memory: int | str | None = None,
    bandwidth: int | str = "1GB",
    method: str | Partitioner = "multilevel",
    balance: str | Sequence[str] | None = None,
) -> Advice:
    """The wrapper that suits a full graph, a model and a number of ranks. One process asks.

    The graph is cut, to count its halo nodes, and the model is run on 64 nodes, to see what its
    layers would send. Of the exact wrappers that fit into memory, ``halo``, ``halo`` with
    ``remat=True`` and ``feature``, the one is advised that takes least time for sending and for
    following edges, ``halo`` if two take the same; if none fits, ``ddp`` with sampled batches,
    which needs the memory of a batch alone. On a device that is no CPU only sending counts.

    Args:
        graph: A graph without types, with ``x`` ``[num_nodes, channels]``: in memory, or opened.
        model: Takes ``x`` and ``edge_index``. It is not changed.
        world: Number of ranks.
        memory: Bytes that a rank may use, or text such as ``"8GB"``; by default the free memory of
            this machine, divided by ``world``.
        bandwidth: Bytes that a rank sends in a second.
        method: The partitioner that is used where the graph is not cut into ``world`` parts yet.
        balance: What it balances, see :func:`pyg_scale.partition`; by default nodes and edges,
            which are what costs time, edges alone if ``method`` is ``"range"``, which balances one
            of them, or nodes alone if it cannot balance edges.

    Raises:
        TypeError: If ``graph`` is something else, or has no ``x``.
        ValueError: If ``world`` is below 1, or more than there are nodes, or ``method`` does not
            balance that.
    """
    if not isinstance(graph, Data) or "x" not in graph:
        raise TypeError(f"graph must be a Data with x (got {type(graph).__name__})")
    world = operator.index(world)
    if world < 1:
        raise ValueError(f"world must be at least 1 (got {world})")
    budget = _free_memory() // world if memory is None else byte_size(memory, "memory")
    speed = byte_size(bandwidth, "bandwidth")
    if world == 1:
        return Advice("ddp", 0.0, {}, ["there is one rank: nothing is sent, train as you are"])
    found = _cut(graph, world, method, balance)
    nodes, halo = sum(found.nodes[None]), sum(found.halo[None])
    advice = Advice("ddp", halo / max(1, nodes))
    sizes = _Sizes(found, _probe(graph, model), world, speed, _is_on_cpu(model))
    for name, (suits, cost) in _WAYS.items():
        reason = suits(model, world)
        if reason:
            advice.reasons.append(f"{name!r} cannot be used: {reason}")
        else:
            advice.costs[name] = cost(sizes)
    _choose(advice, world, budget, found.edge_balance)
    return advice


def _choose(advice: Advice, world: int, budget: int, most: float) -> None:
    """Fill in the method, its options and the reasons."""
    limit = 2 * (world - 1) / world
    advice.reasons.append(
        f"{world} ranks have {advice.replication:.2f} halo nodes for each node of the graph; below "
        f"{limit:.2f} 'halo' sends less than 'feature'"
    )
    if most > _UNEVEN:
        advice.reasons.append(
            f"one rank has {most:.2f} times the average of edges, for which the others wait: cut "
            "the graph with balance=('nodes', 'edges')"
        )
    for name, cost in advice.costs.items():
        fits = "fits" if cost.memory <= budget else "does not fit"
        advice.reasons.append(
            f"{name!r}: a rank sends {_size(cost.sent)} a step, {cost.seconds:.2g} s, follows "
            f"edges for {cost.computing:.2g} s, and needs {_size(cost.memory)}, which {fits} into "
            f"{_size(budget)}"
        )
    fitting = {n: c.seconds + c.computing for n, c in advice.costs.items() if c.memory <= budget}
    if fitting:
        best = min(fitting, key=lambda name: fitting[name])  # the first of equal ones
        advice.method, _, option = best.partition("+")
        advice.options = {option: True} if option else {}
        advice.reasons.append(f"{best!r} takes least time of those that fit")
    else:
        advice.reasons.append(
            "'ddp' with NeighborLoader needs the memory of a batch alone; its gradients are those "
            "of sampled batches"
        )


def _suits_halo(model: nn.Module, world: int) -> str:
    try:
        check_module(model)
    except ValueError as error:
        return str(error)
    return ""


def _suits_remat(model: nn.Module, world: int) -> str:
    for layer in model.modules():
        if isinstance(layer, MessagePassing) and not is_sequential(layer):
            return f"{type(layer).__name__} cannot be computed in pieces"
    return _suits_halo(model, world)


def _suits_feature(model: nn.Module, world: int) -> str:
    try:
        check_module(model)
        check_channels(model, world)
    except ValueError as error:
        return str(error)
    return ""


# Sizes #########################################################################################


def _is_on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


@dataclass
class _Seen:
    """Bytes of a row, as the model ran on a few nodes.

    Attributes:
        inputs: Of the features.
        sent: Of what each ``propagate`` and ``edge_updater`` looks at by the source of an edge.
        results: Of the results of all layers that have a row for each node.
    """

    inputs: int
    sent: list[int] = field(default_factory=list)
    results: int = 0


def _probe(graph: Data, model: nn.Module) -> _Seen:
    number = min(_PROBE, int(graph.num_nodes or 0))
    x = graph.x[:number]
    edge_index, _ = subgraph(torch.arange(number), graph.edge_index.long())
    seen = _Seen(_row(x))

    def propagate(layer: Any, inputs: Any) -> None:
        values = [inputs[-1].get(name) for name in ends_of(layer._user_args, "_j")]
        pairs = [value[0] if isinstance(value, tuple) else value for value in values]
        rows = (_row(each, layer.node_dim) for each in pairs if isinstance(each, Tensor))
        seen.sent.append(sum(rows))

    def result(layer: Any, inputs: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.dim() > 1 and out.size(0) == number:
            seen.results += _row(out)

    with _hooks(model, propagate, result), torch.no_grad():
        model(x.to(next((p.dtype for p in model.parameters()), x.dtype)), edge_index)
    return seen


@contextmanager
def _hooks(model: nn.Module, propagate: Any, result: Any) -> Iterator[None]:
    training = model.training
    handles: list[Any] = []
    for layer in model.modules():
        handles.append(layer.register_forward_hook(result))
        if isinstance(layer, MessagePassing):
            handles.append(layer.register_propagate_forward_pre_hook(propagate))
    try:
        yield model.eval()  # type: ignore[misc]
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)


def _row(tensor: Tensor, dim: int = 0) -> int:
    return tensor.nbytes // max(1, tensor.size(dim))


def _cut(
    graph: Data, world: int, method: str | Partitioner, balance: str | Sequence[str] | None
) -> Quality:
    directory = directory_of(graph)
    if directory is not None and directory.meta.num_parts == world:
        return quality(directory)
    if balance is None:
        balance = _balanced_by(method)
    partition, _ = assign(graph, world, method, balance=balance)
    return quality(graph, partition)


def _balanced_by(method: str | Partitioner) -> tuple[str, ...]:
    """Nodes and edges, as far as a partitioner can balance them."""
    kind = plugins.get("partitioner", method) if isinstance(method, str) else type(method)
    if not isinstance(kind, type) or not issubclass(kind, Partitioner):
        return ("nodes",)
    if issubclass(kind, RangePartitioner):  # one quantity at a time: what time follows from
        return ("edges",)
    return ("nodes", "edges") if "edges" in kind.balances else ("nodes",)


@dataclass
class _Sizes:
    """Everything that costs follow from.

    Attributes:
        found: Counts of the partition.
        seen: Bytes of rows.
        world: Number of ranks.
        speed: Bytes that a rank sends in a second.
        on_cpu: True if the model is on a CPU.
    """

    found: Quality
    seen: _Seen
    world: int
    speed: int
    on_cpu: bool

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """Nodes, halo nodes and edges of each rank."""
        found = self.found
        return list(zip(found.nodes[None], found.halo[None], found.edges[None], strict=True))

    @property
    def edges(self) -> int:
        """Edges of all ranks."""
        return sum(edges for _, _, edges in self.parts)

    def cost(self, sent: float, memory: float, computing: float) -> Cost:
        return Cost(sent, memory, sent / self.speed, computing if self.on_cpu else 0.0)

    def following(self, edges: float, share: float) -> float:
        """Seconds for messages of some edges, each of which is a share of a row."""
        seconds = 0.0
        for row in self.seen.sent:
            size = edges * row * share
            large = min(1.0, max(0.0, (size - _SMALL) / (_LARGE - _SMALL)))
            seconds += edges * _EDGE + size * (_BYTE + large * (_BYTE_OF_LARGE - _BYTE))
        return seconds


def _halo_cost(sizes: _Sizes) -> Cost:
    seen = sizes.seen
    sent = 2 * sum(halo for _, halo, _ in sizes.parts) / sizes.world * sum(seen.sent)
    memory = max(
        # Rows of own nodes and what their gradients take, rows of the halo, and messages.
        n * (seen.inputs + 2 * seen.results)
        + (n + h) * 2 * sum(seen.sent)
        + e * (16 + 2 * max(seen.sent, default=0))
        for n, h, e in sizes.parts
    )
    average = sizes.following(sizes.edges / sizes.world, 1.0)
    return sizes.cost(sent, memory, average * sizes.found.edge_balance)


def _remat_cost(sizes: _Sizes) -> Cost:
    seen, others = sizes.seen, sizes.world - 1
    row = max(seen.sent, default=0)
    memory = max(
        # Blocks of the halo are taken to be of one size.
        n * (seen.inputs + 2 * seen.results + 4 * row)
        + min(3, others) * h / others * row
        + 4 * min(e, EDGES_AT_ONCE) * row
        + e * 24
        for n, h, e in sizes.parts
    )
    most = max(edges for _, _, edges in sizes.parts)
    computing = len(seen.sent) * (most * _EDGE_OF_PIECE + 2 * (others - 1) * _MESSAGE)
    computing += most * sum(seen.sent) * _BYTE_OF_PIECE
    # At most: what goes forward may go again in the backward pass, or in every step.
    return sizes.cost(1.5 * _halo_cost(sizes).sent, memory, computing)


def _feature_cost(sizes: _Sizes) -> Cost:
    seen, world = sizes.seen, sizes.world
    total = sum(nodes for nodes, _, _ in sizes.parts)
    sent = 4 * (world - 1) / world**2 * total * sum(seen.sent)
    memory = (
        max(n for n, _, _ in sizes.parts) * (seen.inputs + 2 * seen.results)
        + total / world * 4 * sum(seen.sent)
        + sizes.edges * (16 + 2 * max(seen.sent, default=0) / world)
    )
    return sizes.cost(sent, memory, sizes.following(sizes.edges, 1 / world))


_WAYS: dict[str, tuple[Callable[[nn.Module, int], str], Callable[[_Sizes], Cost]]] = {
    "halo": (_suits_halo, _halo_cost),
    "halo+remat": (_suits_remat, _remat_cost),
    "feature": (_suits_feature, _feature_cost),
}


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
