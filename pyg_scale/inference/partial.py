"""A layer computed from some of its edges at a time, and what was computed so far."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr
from torch_geometric.nn.conv import GATConv, GATv2Conv, GCNConv, MessagePassing
from torch_geometric.utils import scatter
from torch_geometric.utils import softmax as softmax_of_pyg

from pyg_scale.nn.conv.base import FusedConv
from pyg_scale.nn.conv.traced import traced, why_not_traced

_REDUCTIONS = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "max",
    aggr.MinAggregation: "min",
}
_MESSAGES = ("edge_update", "message")


class NotStreamed(Exception):
    """Raised for a layer that needs all in-edges of a node at once. The message says why."""


class _Reached(Exception):
    """Raised where a layer has aggregated its messages."""


class Accumulator:
    """The aggregates of destinations over the edges seen so far.

    Sums are added and extremes compared. Weights of a softmax over in-edges are those among the
    edges of a piece, so what was summed with them is scaled by the share that these have of all
    (the online softmax of Milakov and Gimelshein, 2018, with sums as in FlashAttention).

    Args:
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        size: Number of destinations.
    """

    def __init__(self, reduce: str, size: int) -> None:
        self._reduce, self._size = reduce, size
        self._counts = torch.zeros(size, dtype=torch.int64)
        self._values: Tensor | None = None
        self._logs: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """True until something was added."""
        return self._values is None

    def add(self, begin: int, out: Tensor, counts: Tensor, log: Tensor | None) -> None:
        """Take the aggregates of some of the edges of destinations ``begin`` and following.

        Args:
            begin: The first of them.
            out: ``[n, ...]``.
            counts: Number of these edges of each, ``int64`` ``[n]``.
            log: The logarithms of the sums of a softmax, ``[n, ...]``, if there is one.
        """
        rows = slice(begin, begin + out.size(0))
        if self._values is None:
            fill = {"max": -torch.inf, "min": torch.inf}.get(self._reduce, 0.0)
            self._values = out.new_full((self._size, *out.shape[1:]), fill)
            if log is not None:
                self._logs = log.new_full((self._size, *log.shape[1:]), -torch.inf)
        values = self._values[rows]
        if log is not None:
            assert self._logs is not None
            before, total = self._logs[rows], torch.logaddexp(self._logs[rows], log)
            some = total > -torch.inf
            for part, into in ((before, values), (log, out)):
                share = (part - total).exp().where(some, torch.zeros(()).to(part))
                into *= share.reshape(*share.shape, *[1] * (into.dim() - share.dim()))
            self._logs[rows] = total
        if self._reduce in ("sum", "mean"):
            values += out
        else:
            has = counts.view(-1, *[1] * (out.dim() - 1)) > 0
            better = torch.maximum if self._reduce == "max" else torch.minimum
            values.copy_(torch.where(has, better(values, out), values))
        self._counts[rows] += counts

    def rows(self, begin: int, end: int) -> Tensor:
        """The aggregates of destinations ``begin`` to ``end - 1`` over all edges."""
        assert self._values is not None
        values, counts = self._values[begin:end], self._counts[begin:end]
        counts = counts.view(-1, *[1] * (values.dim() - 1))
        if self._reduce == "mean":
            return values / counts.clamp(min=1)
        if self._reduce in ("max", "min"):
            return values.where(counts > 0, torch.zeros(()).to(values))
        return values


class StreamedConv:
    """A convolution whose ``propagate`` is given some of the edges at a time.

    Each call of the layer ends where its messages are aggregated; one more call, which is given the
    aggregates over all edges, goes on from there.

    Args:
        conv: The layer, one of PyG's or a fused one. Edges of nodes to themselves are not added by
            it; they are edges as others.

    Attributes:
        adds_loops: True if the layer adds an edge from every node to itself.
        is_narrow: True if no tensor has a row of channels for each edge.

    Raises:
        NotStreamed: If the aggregates of pieces do not make that of the whole.
    """

    def __init__(self, conv: MessagePassing) -> None:
        cls: Any = conv.replaces if isinstance(conv, FusedConv) else type(conv)
        reduce = _REDUCTIONS.get(type(conv.aggr_module))
        if reduce is None:
            raise NotStreamed(f"aggr={conv.aggr!r} is not a sum, mean or extreme")
        if conv.flow != "source_to_target" or conv.node_dim not in (-2, 0):
            raise NotStreamed(f"it has flow={conv.flow!r} and node_dim={conv.node_dim}")
        self._reduce: str = reduce
        self._takes_pair = not issubclass(cls, GCNConv)
        self.adds_loops = isinstance(conv, (GATConv, GATv2Conv)) and conv.add_self_loops
        functions = _with_softmax(cls)
        self.is_narrow = not functions or issubclass(cls, GATConv)
        if functions and reduce != "sum":
            raise NotStreamed(f"it has a softmax and aggr={conv.aggr!r}")
        plain = copy.copy(conv)
        if "message" not in functions and not why_not_traced(plain):
            plain.__class__ = traced(cls)
        else:
            plain.__class__ = cls
        plain.__dict__["_modules"] = dict(plain._modules)
        if self.adds_loops:
            plain.add_self_loops = False
        if reduce == "mean":
            plain.aggr_module = aggr.SumAggregation()
        for name, function in functions.items():
            plain.__dict__[name] = types.MethodType(self._recording(function), plain)
        self._propagate_of_layer = type(plain).propagate
        plain.__dict__["propagate"] = self._propagate
        self._layer: Any = plain
        self._all: Tensor | None = None
        self._sizes, self._out = (0, 0), torch.empty(0)
        self._logs: list[Tensor] = []

    def accumulator(self, size: int) -> Accumulator:
        """An accumulator to add the pieces of a number of destinations to."""
        return Accumulator(self._reduce, size)

    def piece(
        self, src: Tensor, dst: Tensor, edge_index: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The aggregates over some edges.

        Args:
            src: Features of sources, ``[num_src, channels]``.
            dst: Features of destinations, ``[n, channels]``.
            edge_index: ``int64`` ``[2, num_edges]``.
            options: Further arguments of the layer's ``forward``.

        Returns:
            What :meth:`Accumulator.add` takes.
        """
        self._all, self._sizes, self._logs = None, (src.size(0), dst.size(0)), []
        try:
            self._layer(self._given(src, dst), edge_index, **options)
        except _Reached:
            pass
        else:
            raise NotStreamed("it does not aggregate messages by propagate()")
        if len(self._logs) > 1:
            raise NotStreamed("it has more than one softmax")
        log = self._logs[0] if self._logs else None
        if log is not None and self._out.shape[: log.dim()] != log.shape:
            raise NotStreamed("its softmax is not over the in-edges of a head")
        return self._out, torch.bincount(edge_index[1], minlength=dst.size(0)), log

    def finish(self, whole: Tensor, dst: Tensor) -> Tensor:
        """The output of the layer, from the aggregates over all edges.

        Args:
            whole: ``[n, ...]``.
            dst: Features of the destinations, ``[n, channels]``.
        """
        self._all = whole
        none = torch.empty(2, 0, dtype=torch.int64, device=dst.device)
        try:
            out: Tensor = self._layer(self._given(dst[:0], dst), none)
        finally:
            self._all = None
        return out

    def _given(self, src: Tensor, dst: Tensor) -> Any:
        return (src, dst) if self._takes_pair else src

    def _propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        if self._all is not None:
            return self._all
        self._out = self._propagate_of_layer(self._layer, edge_index, size=self._sizes, **kwargs)
        raise _Reached

    def _recording(self, function: Any) -> Any:
        """The same function, with a softmax that keeps the logarithms of its sums."""

        def softmax(
            src: Tensor,
            index: Tensor | None = None,
            ptr: Tensor | None = None,
            num_nodes: int | None = None,
            dim: int = 0,
        ) -> Tensor:
            if index is None or dim != 0:
                raise NotStreamed("its softmax is not over the in-edges of a node")
            num_nodes = self._sizes[1]
            most = scatter(src, index, 0, num_nodes, reduce="max")
            out = (src - most.index_select(0, index)).exp()
            sums = scatter(out, index, 0, num_nodes, reduce="sum")
            self._logs.append(most + sums.log())
            return out / sums.index_select(0, index)

        made = types.FunctionType(
            function.__code__,
            {**function.__globals__, "softmax": softmax},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made


def _with_softmax(cls: type) -> dict[str, Any]:
    """The functions of messages of a class that call PyG's ``softmax``."""
    found = {}
    for name in _MESSAGES:
        function = getattr(cls, name, None)
        if not isinstance(function, types.FunctionType):
            continue
        uses = "softmax" in function.__code__.co_names
        if uses and function.__globals__.get("softmax") is softmax_of_pyg:
            found[name] = function
    return found
