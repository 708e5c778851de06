"""Time and memory of a step of ops and layers on a device, compared with other libraries."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv

from pyg_scale.ops.adjacency import Adjacency, from_edge_index, rows_of
from pyg_scale.ops.aggregate import aggregate
from pyg_scale.ops.attention import dot_product_attention, gat_attention, gatv2_attention
from pyg_scale.ops.colptr import remember
from pyg_scale.ops.memory import trim
from pyg_scale_bench import memory, rounds
from pyg_scale_bench.rounds import OURS, PYG

SPARSE = "torch.sparse.mm"
RELATIONS = 8

Run = Callable[..., Any]
"""A function from features to a result."""


# Measuring ################################################################################


@dataclass(kw_only=True)
class Case(rounds.Case):
    """One side of one comparison.

    Attributes:
        step: The function that runs it once.
        about: The computation and its graph, by name.
        bytes: Bytes to read and write if nothing is in a cache; 0 if not counted.
        seconds: Duration in every round.
        peak_bytes: Additional memory that one step needed.
    """

    step: Callable[[], Any] = field(repr=False)
    about: dict[str, Any] = field(default_factory=dict)
    bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the median, and the rate of bytes read and written."""
        names = ("side", "error", "bytes", "seconds", "peak_bytes")
        out = self.about | {name: getattr(self, name) for name in names}
        if self.seconds:
            middle = median(self.seconds)
            out |= {"median_seconds": middle}
            out |= {"bytes_per_s": self.bytes / middle if self.bytes else None}
        return out


class Gauge:
    """Measures the seconds and memory of steps on a device.

    Args:
        device: The CPU, or a CUDA device, whose own clock and memory are used.
        clock: The clock of the CPU, in seconds.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self._cuda, self._clock = device, device.type == "cuda", clock

    def seconds(self, step: Callable[[], Any]) -> float:
        """Seconds of one step: between events on a CUDA device, by the clock on the CPU."""
        if not self._cuda:
            start = self._clock()
            step()
            return self._clock() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def peak(self, step: Callable[[], Any]) -> int | None:
        """Additional bytes that a step needs; ``None`` if the system does not count them."""
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            step()
            return torch.cuda.max_memory_allocated(self.device) - before
        trim()
        memory.give_back()
        start = memory.resident()
        memory.reset_peak()
        step()
        top = memory.peak()
        return None if top is None or start is None else max(0, top - start)

    def copy_bandwidth(self, num_bytes: int, times: int = 10) -> float:
        """Bytes per second that torch reads and writes to copy a large tensor."""
        source = torch.ones(num_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        seconds = [self.seconds(lambda: target.copy_(source)) for _ in range(times + 2)]
        return 2 * num_bytes / median(seconds[2:])

    def measure(self, cases: Sequence[Case], times: int, seconds: float = 0.0) -> None:
        """Measure the memory of a first step of every case, then the time of others, in turns.

        Args:
            cases: The cases, which get the results.
            times: Number of rounds.
            seconds: See :func:`pyg_scale_bench.rounds.take_turns`.
        """

        def look_at(case: Case) -> None:
            case.peak_bytes = self.peak(case.step)

        def run(case: Case) -> None:
            case.seconds.append(self.seconds(case.step))

        for case in cases:
            rounds.attempt(case, look_at)
        rounds.take_turns(cases, run, times, seconds)


# Graphs ###################################################################################


class Graph:
    """The edges of a whole graph or of a sampled block.

    Args:
        name: Name in the report.
        adjacency: The edges.
        is_block: True if every step has a new block, so that making the adjacency and, for
            gradients, grouping its edges by source are part of a step.
    """

    def __init__(self, name: str, adjacency: Adjacency, *, is_block: bool = False) -> None:
        adjacency.transpose()
        self.name, self.is_block, self._kept = name, is_block, adjacency
        self.num_src, self.num_dst = adjacency.num_src, adjacency.num_dst
        self.num_edges, self.device = adjacency.num_edges, adjacency.device

    @classmethod
    def of(cls, name: str, edge_index: Tensor, num_src: int, num_dst: int, **more: bool) -> Graph:
        """The graph of ``edge_index`` ``[2, num_edges]``, its edges sorted by destination."""
        order = torch.argsort(edge_index[1], stable=True)
        ordered = edge_index[:, order].contiguous()
        graph = cls(name, from_edge_index(ordered, num_src, num_dst), **more)
        graph.edge_index = ordered  # layers look up its adjacency
        return graph

    @property
    def adjacency(self) -> Adjacency:
        """The edges for an op; for a block, new ones each time, from the pointers of its batch."""
        if not self.is_block:
            return self._kept
        return Adjacency(self._kept.indptr, self._kept.indices, self.num_src)

    @cached_property
    def edge_index(self) -> Tensor:
        """The edges for PyG, ``int64`` ``[2, num_edges]``."""
        rows = rows_of(self._kept.indptr, self.num_edges)
        return torch.stack([self._kept.indices.long(), rows.long()])

    def fresh_edge_index(self) -> Tensor:
        """The edges for a layer; for a block, a new tensor each time, with known pointers."""
        if not self.is_block:
            return self.edge_index
        edge_index = self.edge_index.detach()
        remember(edge_index, self._kept.indptr)
        return edge_index


# Sides ####################################################################################


@dataclass(frozen=True)
class Comparison:
    """An op on a graph, computed by several sides.

    Attributes:
        sides: The function of each side.
        inputs: The features that all sides take.
        reads: Number of rows of features that the fused op reads per edge, forward and with
            gradients.
    """

    sides: dict[str, Run]
    inputs: list[Tensor]
    reads: tuple[int, int]


def compare(
    op: str, graph: Graph, channels: int, heads: int, dtype: torch.dtype = torch.float32
) -> Comparison:
    """Compare an op of :data:`OPS` on random features.

    Args:
        op: Name of the op.
        graph: The edges.
        channels: Number of columns of the features, over all heads.
        heads: Number of heads of attention.
        dtype: Dtype of the features.
    """
    row = heads, channels // heads
    sizes = graph.num_src, graph.num_dst
    options: dict[str, Any] = {"device": graph.device, "dtype": dtype}
    attend = {"gat": _gat, "gatv2": _gatv2, "transformer": _transformer}
    if op in attend:
        shapes, ours, theirs, reads = attend[op](graph, *row)
        inputs = [torch.randn(shape, **options) for shape in shapes]
        return Comparison({OURS: lambda *f: ours(graph.adjacency, *f), PYG: theirs}, inputs, reads)
    message = _Message(aggr=op)
    sides: dict[str, Run] = {
        OURS: lambda x: aggregate(graph.adjacency, x, None, op),
        PYG: lambda x: message(x, graph.edge_index, sizes),
    }
    if op == "sum":
        edges = graph.adjacency
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sparse CSR is in beta state
            ones = torch.ones(graph.num_edges, **options)
            indices = edges.indices.long()
            matrix = torch.sparse_csr_tensor(edges.indptr, indices, ones, sizes[::-1])
        sides[SPARSE] = partial(torch.sparse.mm, matrix)
    reads = (1, 3 if op in ("max", "min") else 2)
    return Comparison(sides, [torch.randn(graph.num_src, channels, **options)], reads)


OPS = ("sum", "mean", "max", "gat", "gatv2", "transformer")


_Build = Callable[[type, int, int], nn.Module]


def _square(cls: type, channels: int, heads: int) -> nn.Module:
    return cls(channels, channels)


def _attention(cls: type, channels: int, heads: int) -> nn.Module:
    return cls(channels, channels // heads, heads)


def _gin(cls: type, channels: int, heads: int) -> nn.Module:
    first, second = (nn.Linear(channels, channels) for _ in range(2))
    return cls(nn.Sequential(first, nn.ReLU(), second))


def _relational(cls: type, channels: int, heads: int) -> nn.Module:
    return cls(channels, channels, RELATIONS)


LAYERS: dict[str, _Build] = {
    **dict.fromkeys(("GCNConv", "SAGEConv"), _square),
    "GINConv": _gin,
    "GraphConv": _square,
    **dict.fromkeys(("GATConv", "GATv2Conv", "TransformerConv"), _attention),
    "RGCNConv": _relational,
    "Linear": _square,
}
"""Every layer by name, with a function that makes it of its class, the channels and the heads;
``Linear`` without edges, as :func:`pyg_scale.nn.accelerate` makes it."""


class _Message(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor, size: tuple[int, int]) -> Tensor:
        return self.propagate(edge_index, x=(x, None), size=size)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


_Attention = tuple[list[tuple[int, ...]], Run, Run, tuple[int, int]]
"""The shapes of the features, our function, PyG's function, and the rows that are read."""


def _gat(graph: Graph, heads: int, channels: int) -> _Attention:
    conv = GATConv(8, channels, heads, add_self_loops=False, bias=False).to(graph.device)
    src, dst = size = graph.num_src, graph.num_dst

    def theirs(x: Tensor, a_src: Tensor, a_dst: Tensor) -> Tensor:
        edges = graph.edge_index
        alpha = conv.edge_updater(edges, alpha=(a_src, a_dst), edge_attr=None, size=size)
        return conv.propagate(edges, x=(x, None), alpha=alpha, size=size)

    return [(src, heads, channels), (src, heads), (dst, heads)], gat_attention, theirs, (1, 2)


def _gatv2(graph: Graph, heads: int, channels: int) -> _Attention:
    conv = GATv2Conv(8, channels, heads, add_self_loops=False, bias=False).to(graph.device)
    del conv._parameters["att"]  # an input of this benchmark
    src, dst = graph.num_src, graph.num_dst

    def theirs(x_src: Tensor, x_dst: Tensor, att: Tensor) -> Tensor:
        conv.att = att.unsqueeze(0)
        alpha = conv.edge_updater(graph.edge_index, x=(x_src, x_dst), edge_attr=None)
        return conv.propagate(graph.edge_index, x=(x_src, x_dst), alpha=alpha)

    shapes = [(src, heads, channels), (dst, heads, channels), (heads, channels)]
    return shapes, gatv2_attention, theirs, (1, 4)


def _transformer(graph: Graph, heads: int, channels: int) -> _Attention:
    conv = TransformerConv(8, channels, heads, bias=False).to(graph.device)
    src, dst = size = graph.num_src, graph.num_dst

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        features = {"query": query, "key": key, "value": value}
        return conv.propagate(graph.edge_index, **features, edge_attr=None, size=size)

    shapes: list[tuple[int, ...]] = [(rows, heads, channels) for rows in (dst, src, src)]
    return shapes, dot_product_attention, theirs, (2, 6)


def once(
    run: Run, inputs: Sequence[Tensor], gradient: list[Tensor] | None = None
) -> Callable[[], Any]:
    """A step that computes a result, and the gradients of ``inputs`` if requested.

    Args:
        run: A function of the inputs.
        inputs: Tensors, which become leaves if gradients are requested.
        gradient: The gradient of the result; filled in the first step, so that sides can share it.
    """
    if gradient is None:

        def forward() -> Any:
            with torch.no_grad():
                return run(*inputs)

        return forward
    leaves = [tensor.requires_grad_() for tensor in inputs]

    def both() -> Any:
        out = run(*leaves)
        if not gradient:
            gradient.append(torch.randn_like(out))
        return torch.autograd.grad(out, leaves, gradient[0])

    return both
