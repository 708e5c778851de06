"""Advice on the wrapper for a model, a graph and a number of ranks, from measured sizes."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import subgraph

from pyg_scale.files.byte_size import byte_size
from pyg_scale.graph.base import directory_of
from pyg_scale.parallel.feature import check_channels
from pyg_scale.parallel.layers import check_module, ends_of
from pyg_scale.parallel.remat import is_computed_once
from pyg_scale.parallel.sequential import EDGES_AT_ONCE
from pyg_scale.partitioner import Partitioner, Quality, assign, quality

_PROBE = 64  # nodes on which the model is run once, to see what it sends
_GAIN = 0.2e-9  # seconds for each byte of messages that is made in pieces, see docs/parallel.md


@dataclass
class Cost:
    """The estimated cost of a wrapper for a rank and a step.

    Attributes:
        sent: Bytes that a rank sends, forward and backward, on average.
        memory: Bytes of the features, activations and edges of the rank that has the most.
        seconds: The time that sending takes.
    """

    sent: float
    memory: float
    seconds: float


@dataclass
class Advice:
    """A recommendation.

    Attributes:
        method: The name of a wrapper, for :func:`pyg_scale.parallel.wrap`.
        replication: Halo nodes of all ranks, divided by the nodes of the graph.
        costs: Those of the wrappers that can be used, by name.
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
) -> Advice:
    """The wrapper that suits a full graph, a model and a number of ranks. One process asks.

    The graph is cut, to count its halo nodes, and the model is run on 64 nodes, to see what its
    layers would send. Of the exact wrappers that fit into memory, the one that sends least is
    advised, ``halo`` if two send the same; if none fits, ``ddp`` with sampled batches, which needs
    the memory of a batch alone. ``halo`` is advised with ``remat=True`` for a model on the CPU
    whose layers compute nothing twice for it, if messages in pieces gain more time than is lost by
    what it sends again.

    Args:
        graph: A graph without types, with ``x`` ``[num_nodes, channels]``: in memory, or opened.
        model: Takes ``x`` and ``edge_index``. It is not changed.
        world: Number of ranks.
        memory: Bytes that a rank may use, or text such as ``"8GB"``; by default the free memory of
            this machine, divided by ``world``.
        bandwidth: Bytes that a rank sends in a second.
        method: The partitioner that is used where the graph is not cut into ``world`` parts yet.

    Raises:
        TypeError: If ``graph`` is something else, or has no ``x``.
        ValueError: If ``world`` is below 1, or more than there are nodes.
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
    found = _cut(graph, world, method)
    nodes, halo = sum(found.nodes[None]), sum(found.halo[None])
    advice = Advice("ddp", halo / max(1, nodes))
    seen = _probe(graph, model)
    for name, suits, cost in (
        ("halo", _suits_halo, _halo_cost),
        ("feature", _suits_feature, _feature_cost),
    ):
        reason = suits(model, world)
        if reason:
            advice.reasons.append(f"{name!r} cannot be used: {reason}")
        else:
            advice.costs[name] = cost(found, seen, world, speed)
    _choose(advice, world, budget)
    if advice.method == "halo" and _gains_by_pieces(model, found, seen, advice, speed):
        advice.options["remat"] = True
        advice.reasons.append(
            "with remat=True messages are made in pieces, which stay in the caches of a CPU, and "
            "no layer computes anything twice"
        )
    return advice


def _choose(advice: Advice, world: int, budget: int) -> None:
    """Fill in the method and the reasons."""
    limit = 2 * (world - 1) / world
    advice.reasons.append(
        f"{world} ranks have {advice.replication:.2f} halo nodes for each node of the graph; below "
        f"{limit:.2f} 'halo' sends less than 'feature'"
    )
    for name, cost in advice.costs.items():
        fits = "fits" if cost.memory <= budget else "does not fit"
        advice.reasons.append(
            f"{name!r}: a rank sends {_size(cost.sent)} a step, {cost.seconds:.2g} s, and needs "
            f"{_size(cost.memory)}, which {fits} into {_size(budget)}"
        )
    fitting = {name: cost for name, cost in advice.costs.items() if cost.memory <= budget}
    if fitting:
        advice.method = min(fitting, key=lambda name: (fitting[name].sent, name != "halo"))
        advice.reasons.append(f"{advice.method!r} sends least of those that fit")
    else:
        advice.reasons.append(
            "'ddp' with NeighborLoader needs the memory of a batch alone; its gradients are those "
            "of sampled batches"
        )


def _gains_by_pieces(
    model: nn.Module, found: Quality, seen: _Seen, advice: Advice, speed: int
) -> bool:
    """True if less time is lost by inputs that are sent in every step than pieces gain."""
    most = max(found.edges[None])  # of a rank, for which the others wait
    convs = [layer for layer in model.modules() if isinstance(layer, MessagePassing)]
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if most <= EDGES_AT_ONCE or not on_cpu or not all(map(is_computed_once, convs)):
        return False
    again = advice.costs["halo"].sent / 2  # at most: what goes forward
    return again / speed < 2 * most * sum(seen.sent) * _GAIN


def _suits_halo(model: nn.Module, world: int) -> str:
    try:
        check_module(model)
    except ValueError as error:
        return str(error)
    return ""


def _suits_feature(model: nn.Module, world: int) -> str:
    try:
        check_module(model)
        check_channels(model, world)
    except ValueError as error:
        return str(error)
    return ""


# Sizes #########################################################################################


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


def _cut(graph: Data, world: int, method: str | Partitioner) -> Quality:
    directory = directory_of(graph)
    if directory is not None and directory.meta.num_parts == world:
        return quality(directory)
    partition, _ = assign(graph, world, method)
    return quality(graph, partition)


def _halo_cost(found: Quality, seen: _Seen, world: int, speed: int) -> Cost:
    nodes, halo, edges = found.nodes[None], found.halo[None], found.edges[None]
    sent = 2 * sum(halo) / world * sum(seen.sent)
    memory = max(
        # Rows of own nodes and what their gradients take, rows of the halo, and messages.
        n * (seen.inputs + 2 * seen.results)
        + (n + h) * 2 * sum(seen.sent)
        + e * (16 + 2 * max(seen.sent, default=0))
        for n, h, e in zip(nodes, halo, edges, strict=True)
    )
    return Cost(sent, memory, sent / speed)


def _feature_cost(found: Quality, seen: _Seen, world: int, speed: int) -> Cost:
    total, edges = sum(found.nodes[None]), sum(found.edges[None])
    sent = 4 * (world - 1) / world**2 * total * sum(seen.sent)
    memory = (
        max(found.nodes[None]) * (seen.inputs + 2 * seen.results)
        + total / world * 4 * sum(seen.sent)
        + edges * (16 + 2 * max(seen.sent, default=0) / world)
    )
    return Cost(sent, memory, sent / speed)


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
