"""What ``pyg-scale bench conv`` measures: each op of the layers beside what else does the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv

from pyg_scale.ops.adjacency import Adjacency, from_edge_index
from pyg_scale.ops.aggregate import aggregate
from pyg_scale.ops.attention import dot_product_attention, gat_attention, gatv2_attention
from pyg_scale.ops.colptr import remember

OURS, PYG, SPARSE = "pyg_scale", "PyG", "torch.sparse.mm"


class Graph:
    """The edges of a whole graph, or of a sampled block, sorted by destination.

    Args:
        name: What the report calls it.
        edge_index: ``int64`` ``[2, num_edges]``.
        num_src: Number of source nodes.
        num_dst: Number of destination nodes.
        is_block: Whether every step has another one, so that making the adjacency and, for
            gradients, grouping its edges by source is part of a step.
    """

    def __init__(
        self, name: str, edge_index: Tensor, num_src: int, num_dst: int, *, is_block: bool = False
    ) -> None:
        order = torch.argsort(edge_index[1], stable=True)
        self.name, self.num_src, self.num_dst, self.is_block = name, num_src, num_dst, is_block
        self.edge_index = edge_index[:, order].contiguous()
        self._kept = from_edge_index(self.edge_index, num_src, num_dst)
        self._kept.transpose()

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.edge_index.size(1)

    @property
    def adjacency(self) -> Adjacency:
        """The edges for an op; of a block new ones each time, from the pointers of its batch."""
        if not self.is_block:
            return self._kept
        return Adjacency(self._kept.indptr, self._kept.indices, self.num_src)

    def fresh_edge_index(self) -> Tensor:
        """The edges for a layer; of a block another tensor each time, with known pointers."""
        if not self.is_block:
            return self.edge_index
        edge_index = self.edge_index.detach()
        remember(edge_index, self._kept.indptr)
        return edge_index


@dataclass
class Case:
    """One side of one comparison.

    Attributes:
        op: What is computed.
        graph: Name of the graph.
        backward: Whether gradients are, too.
        side: :data:`OURS`, :data:`PYG` or :data:`SPARSE`.
        gathers: How many rows of features the fused op reads for an edge; 0 if more is computed.
        row_bytes: Bytes of such a row.
        edges: Number of edges.
        step: Computes it once.
        seconds: Of every round.
        peak_bytes: Memory that one step needed beyond what there was.
        error: Why there are no numbers.
    """

    op: str
    graph: str
    backward: bool
    side: str
    gathers: int
    row_bytes: int
    edges: int
    step: Callable[[], Any] = field(repr=False)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the median and the rate at which rows are read."""
        out = {k: v for k, v in vars(self).items() if k != "step"}
        if self.seconds:
            out["median_seconds"] = median(self.seconds)
            read = self.gathers * self.row_bytes * self.edges
            out["bytes_per_s"] = read / out["median_seconds"] if read else None
        return out


class _Message(MessagePassing):
    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        size = (graph.num_src, graph.num_dst)
        return self.propagate(graph.edge_index, x=(x, None), size=size)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def cases(graph: Graph, channels: int, heads: int, ops: Sequence[str]) -> list[Case]:
    """Every comparison on a graph, forward alone and with gradients."""
    found = []
    for op in ops:
        sides, inputs, gathers = _SIDES[op](graph, channels, heads)
        row = channels * inputs[0].element_size()
        gradient: list[Tensor] = []  # the same for all sides
        for backward in (False, True):
            for side, run in sides.items():
                once = step(run, inputs, gradient, backward)
                count = gathers[1] if backward else gathers[0]
                found.append(
                    Case(op, graph.name, backward, side, count, row, graph.num_edges, once)
                )
    return found


def step(
    run: Callable[..., Any], inputs: list[Tensor], gradient: list[Tensor], backward: bool
) -> Callable[[], Any]:
    """What computes a result once, and the gradients of ``inputs`` if they are wanted.

    Args:
        run: Takes the inputs.
        inputs: Tensors, which become leaves.
        gradient: Of the result; filled at the first call, so that sides can share it.
        backward: Whether gradients are wanted.
    """
    if not backward:

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


_Sides = tuple[dict[str, Callable[..., Any]], list[Tensor], tuple[int, int]]


def _aggregation(reduce: str) -> Callable[[Graph, int, int], _Sides]:
    def sides(graph: Graph, channels: int, heads: int) -> _Sides:
        message, size = _Message(aggr=reduce), (graph.num_dst, graph.num_src)
        ones = torch.ones(graph.num_edges)
        found: dict[str, Callable[..., Any]] = {
            OURS: lambda x: aggregate(graph.adjacency, x, None, reduce),
            PYG: lambda x: message(x, graph),
        }
        if reduce == "sum":
            edges = graph.adjacency
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # sparse CSR is in beta state
                matrix = torch.sparse_csr_tensor(edges.indptr, edges.indices.long(), ones, size)
            found[SPARSE] = lambda x: torch.sparse.mm(matrix, x)
        extreme = reduce in ("max", "min")
        return found, [torch.randn(graph.num_src, channels)], (1, 3 if extreme else 2)

    return sides


def _gat(graph: Graph, channels: int, heads: int) -> _Sides:
    row = heads, channels // heads
    conv = GATConv(8, row[1], heads, add_self_loops=False, bias=False)
    size = (graph.num_src, graph.num_dst)

    def theirs(x: Tensor, a_src: Tensor, a_dst: Tensor) -> Tensor:
        alpha = conv.edge_updater(graph.edge_index, alpha=(a_src, a_dst), edge_attr=None, size=size)
        return conv.propagate(graph.edge_index, x=(x, None), alpha=alpha, size=size)

    inputs = [torch.randn(graph.num_src, *row), torch.randn(graph.num_src, heads)]
    inputs.append(torch.randn(graph.num_dst, heads))
    sides: dict[str, Callable[..., Any]] = {
        OURS: lambda *f: gat_attention(graph.adjacency, *f),
        PYG: theirs,
    }
    return sides, inputs, (1, 2)


def _gatv2(graph: Graph, channels: int, heads: int) -> _Sides:
    row = heads, channels // heads
    conv = GATv2Conv(8, row[1], heads, add_self_loops=False, bias=False)
    del conv._parameters["att"]  # an input here
    inputs = [torch.randn(graph.num_src, *row), torch.randn(graph.num_dst, *row)]
    inputs.append(torch.randn(row))

    def theirs(x_src: Tensor, x_dst: Tensor, att: Tensor) -> Tensor:
        conv.att = att.unsqueeze(0)
        both = (x_src, x_dst)
        alpha = conv.edge_updater(graph.edge_index, x=both, edge_attr=None)
        return conv.propagate(graph.edge_index, x=both, alpha=alpha)

    sides: dict[str, Callable[..., Any]] = {
        OURS: lambda *f: gatv2_attention(graph.adjacency, *f),
        PYG: theirs,
    }
    return sides, inputs, (1, 4)


def _transformer(graph: Graph, channels: int, heads: int) -> _Sides:
    row = heads, channels // heads
    conv = TransformerConv(8, row[1], heads, bias=False)

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return conv.propagate(
            graph.edge_index, query=query, key=key, value=value, edge_attr=None,
            size=(graph.num_src, graph.num_dst),
        )  # fmt: skip

    rows = (graph.num_dst, graph.num_src, graph.num_src)
    inputs = [torch.randn(count, *row) for count in rows]
    sides: dict[str, Callable[..., Any]] = {
        OURS: lambda *f: dot_product_attention(graph.adjacency, *f),
        PYG: theirs,
    }
    return sides, inputs, (2, 6)


_SIDES: dict[str, Callable[[Graph, int, int], _Sides]] = {
    "sum": _aggregation("sum"),
    "mean": _aggregation("mean"),
    "max": _aggregation("max"),
    "gat": _gat,
    "gatv2": _gatv2,
    "transformer": _transformer,
}

OPS = tuple(_SIDES)
"""Every op, by name."""
