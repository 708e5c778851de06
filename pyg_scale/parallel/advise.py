"""Advice on the wrapper for a model, a graph and a number of ranks, from measured sizes."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing

from pyg_scale import plugins
from pyg_scale.files.byte_size import byte_size
from pyg_scale.parallel.feature import check_channels
from pyg_scale.parallel.layers import check_module
from pyg_scale.parallel.live import Operation
from pyg_scale.parallel.remat import is_sequential
from pyg_scale.parallel.shares import shares_of
from pyg_scale.parallel.stand_in import Division, step_of
from pyg_scale.partitioner import Partitioner, assign
from pyg_scale.partitioner.range import RangePartitioner
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory.data import unchanged_directory

_UNEVEN = 1.2  # times the average of edges
_NEAR = 1.2  # times the least time: what is said of a step is not more exact, see docs/parallel.md
# Seconds of one thread of a CPU: see docs/parallel.md. The C library gives large tensors back to
# the system when they are freed, and each of their pages is fetched again.
_OPERATION, _BYTE, _FRESH, _PRODUCT = 15e-6, 0.015e-9, 0.5e-9, 0.3e-9
_GATHERED, _ADDED, _SCATTERED = (2e-9, 0.04e-9), (10e-9, 0.15e-9), (10e-9, 0.03e-9)  # row, byte
_SMALL, _LARGE = 16 << 20, 32 << 20  # bytes of a tensor
_MESSAGE = 0.3e-3  # of an exchange, besides its bytes
_ROWWISE = {
    "aten::index_select": _GATHERED,
    "aten::gather": _GATHERED,
    "aten::index": _GATHERED,
    "aten::index_add": _ADDED,
    "aten::index_add_": _ADDED,
    "aten::scatter_add": _SCATTERED,
    "aten::scatter_add_": _SCATTERED,
}


@dataclass
class Cost:
    """The estimated cost of a wrapper for the rank that has the most, and a step.

    Attributes:
        sent: Bytes that it sends, forward and backward, once ranks know the graph's features.
        messages: The number of exchanges in which it does.
        memory: Bytes of features, edges, and what lives of a step.
        seconds: The time that sending takes.
        computing: The time that it takes a thread of a CPU; 0 on another device.
    """

    sent: float
    messages: float
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
            ``remat=True``), ``"feature"``, and ``"mesh 2x4"`` of 2 × 4 ranks.
        reasons: The reasons, in words.
        options: Options of the wrapper.
        mesh: For ``"mesh"`` the numbers of ranks in the dimensions ``partition`` and ``feature``.
    """

    method: str
    replication: float
    costs: dict[str, Cost] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, int] | None = None

    @property
    def wrapper(self) -> str:
        """The wrapper with its options, in words."""
        if self.mesh is not None:
            return f"{self.method!r} of {self.mesh[0]} x {self.mesh[1]} ranks"
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

    The graph is cut, to count its halo nodes, and for each wrapper the model makes steps on a small
    stand-in of a rank's share, in which tensors and messages are counted. Of the exact wrappers
    that fit into memory, ``halo``, ``halo`` with ``remat=True``, ``feature`` and ``mesh``, the one
    is advised that takes least time for sending and computing, ``halo`` if two take the same; if
    none fits, ``ddp`` with sampled batches, which needs the memory of a batch alone. On a device
    that is no CPU only sending counts.

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
    source, part = _cut(graph, world, method, balance)
    shares = shares_of(source, part, world)
    advice = Advice("ddp", sum(each.halo for each in shares) / max(1, part.numel()))
    for name, division in _ways(world).items():
        if reason := _reason(model, division):
            advice.reasons.append(f"{name!r} cannot be used: {reason}")
            continue
        ranks = shares if division.feature == 1 else shares_of(source, part, division.partition)
        fullest = max(ranks, key=lambda each: each.rows)
        step = step_of(model, graph.x[:1], fullest, division, _seconds)
        sending = step.sent / speed + step.messages * _MESSAGE
        computing = step.computing if _is_on_cpu(model) else 0.0
        cost = Cost(step.sent, step.messages, step.memory, sending, computing)
        advice.costs[name] = cost
    edges = [each.edges for each in shares]
    _choose(advice, world, budget, max(edges) * world / max(1, sum(edges)))
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
            f"{name!r}: a rank sends {_size(cost.sent)} a step, {cost.seconds:.2g} s, computes "
            f"for {cost.computing:.2g} s, and needs {_size(cost.memory)}, which {fits} into "
            f"{_size(budget)}"
        )
    fitting = {n: c.seconds + c.computing for n, c in advice.costs.items() if c.memory <= budget}
    if fitting:
        best = min(fitting, key=lambda name: fitting[name])  # the first of equal ones
        division = _ways(world)[best]
        advice.method = best.split("+")[0].split()[0]
        advice.options = {"remat": True} if division.remat else {}
        if advice.method == "mesh":
            advice.mesh = division.partition, division.feature
        advice.reasons.append(f"{best!r} takes least time of those that fit")
        near = [n for n, t in fitting.items() if n != best and t <= _NEAR * fitting[best]]
        if near:
            names = ", ".join(map(repr, near))
            advice.reasons.append(f"{names}: within {_NEAR - 1:.0%} of that, which is as good")
    else:
        advice.reasons.append(
            "'ddp' with NeighborLoader needs the memory of a batch alone; its gradients are those "
            "of sampled batches"
        )


def _ways(world: int) -> dict[str, Division]:
    """Wrappers with options, and how they divide a graph."""
    found = {"halo": Division(world), "halo+remat": Division(world, remat=True)}
    found["feature"] = Division(1, world)
    for feature in range(2, world // 2 + 1):
        if world % feature == 0:
            partition = world // feature
            found[f"mesh {partition}x{feature}"] = Division(partition, feature)
    return found


def _reason(model: nn.Module, division: Division) -> str:
    """The reason why a model cannot be divided so; empty if it can."""
    try:
        check_module(model)
        if division.feature > 1:
            check_channels(model, division.feature)
    except ValueError as error:
        return str(error)
    for layer in model.modules():
        if division.remat and isinstance(layer, MessagePassing) and not is_sequential(layer):
            return f"{type(layer).__name__} cannot be computed in pieces"
    return ""


# Costs #########################################################################################


def _is_on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def _seconds(operation: Operation) -> float:
    """The time that an operation takes a thread of a CPU."""
    name, given, made, rows = operation
    if name in _ROWWISE:
        of_row, of_byte = _ROWWISE[name]
        moved = made if of_row == _GATHERED[0] else given - made
        seconds = rows * of_row + moved * of_byte
    else:
        seconds = (given + made) * (_PRODUCT if name.endswith("mm") else _BYTE)
    fresh = 0.0 if made < _SMALL or name.endswith("_") else _FRESH
    if made < _LARGE:
        fresh *= 0.5 * (made - _SMALL) / (_LARGE - _SMALL)
    return _OPERATION + seconds + fresh * made


def _cut(
    graph: Data, world: int, method: str | Partitioner, balance: str | Sequence[str] | None
) -> tuple[Data | GraphDirectory, Tensor]:
    """The graph to read edges from, and the part of every node."""
    directory = unchanged_directory(graph)
    if directory is not None and directory.meta.num_parts == world:
        return directory, directory.books[None].assignment()
    if balance is None:
        balance = _balanced_by(method)
    partition, _ = assign(graph, world, method, balance=balance)
    return graph, partition.assignment[None]


def _balanced_by(method: str | Partitioner) -> tuple[str, ...]:
    """Nodes and edges, as far as a partitioner can balance them."""
    kind = plugins.get("partitioner", method) if isinstance(method, str) else type(method)
    if not isinstance(kind, type) or not issubclass(kind, Partitioner):
        return ("nodes",)
    if issubclass(kind, RangePartitioner):  # one quantity at a time: what time follows from
        return ("edges",)
    return ("nodes", "edges") if "edges" in kind.balances else ("nodes",)


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
