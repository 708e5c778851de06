"""A layer computed from some of its edges at a time, and what was computed so far."""

from __future__ import annotations

import copy
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import aggr
from torch_geometric.nn.conv import EGConv, GATConv, GATv2Conv, GCNConv, MessagePassing
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
_ENDS = ("src", "dst")
_ROWS = ("", "")
"""The key of features themselves, where all of ``forward`` is needed for a piece."""


class NotStreamed(Exception):
    """Raised for a layer that needs all in-edges of a node at once. The message says why."""


class _Reached(Exception):
    """Raised where a layer has aggregated its messages."""


class Aggregates(NamedTuple):
    """The messages of a layer over some edges, aggregated.

    Attributes:
        out: ``[n, ...]``.
        counts: Number of these edges of each destination, ``int32`` ``[n]``.
        log: The logarithms of the sums of a softmax, ``[n, ...]``, if there is one.
    """

    out: Tensor
    counts: Tensor
    log: Tensor | None


class Accumulator:
    """The aggregates of destinations over the edges seen so far.

    Sums are added and extremes compared. Weights of a softmax over in-edges are those among the
    edges of a piece, so what was summed with them is scaled by the share that these have of all
    (the online softmax of Milakov and Gimelshein, 2018, with sums as in FlashAttention).

    Args:
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        size: Number of destinations.
        like: Aggregates of the same layer, for their shapes and dtypes.
    """

    def __init__(self, reduce: str, size: int, like: Aggregates) -> None:
        self._reduce = reduce
        fill = {"max": -torch.inf, "min": torch.inf}.get(reduce, 0.0)
        self._values = torch.full((size, *like.out.shape[1:]), fill, dtype=like.out.dtype)
        self._counts = None if reduce == "sum" else torch.zeros(size, dtype=torch.int32)
        self._logs: Tensor | None = None
        if like.log is not None:
            self._logs = like.log.new_full((size, *like.log.shape[1:]), -torch.inf, device="cpu")

    def add(self, index: Tensor, found: Aggregates) -> None:
        """Take the aggregates of some of the edges of destinations.

        Args:
            index: These destinations, ascending, each once, ``int64`` ``[n]``.
            found: Of these.
        """
        if not index.numel():
            return
        begin, end = int(index[0]), int(index[-1]) + 1
        rows = slice(begin, end) if end - begin == index.numel() else None
        out, counts, log = found
        if self._counts is not None:
            self._counts.index_add_(0, index, counts)
        if log is not None:
            self._add_shares(index, rows, out, log)
        elif self._reduce in ("sum", "mean"):
            if rows is None:
                self._values.index_add_(0, index, out)
            else:
                self._values[rows] += out
        else:
            better = torch.maximum if self._reduce == "max" else torch.minimum
            self._values[index] = better(self._values[index], out)

    def _add_shares(self, index: Tensor, rows: slice | None, out: Tensor, log: Tensor) -> None:
        assert self._logs is not None
        at: Any = index if rows is None else rows
        before, values = self._logs[at], self._values[at]
        total = torch.logaddexp(before, log)
        ratio = [*total.shape, *[1] * (out.dim() - log.dim())]
        old, new = (
            (part - total).exp_().nan_to_num_(0.0).view(ratio)  # nan: nothing was added at all
            for part in (before, log)
        )
        values.mul_(old).addcmul_(out, new)
        self._logs[at] = total
        if rows is None:
            self._values[index] = values

    def rows(self, begin: int, end: int) -> Tensor:
        """The aggregates of destinations ``begin`` to ``end - 1`` over all edges."""
        values = self._values[begin:end]
        if self._counts is None:
            return values
        counts = self._counts[begin:end].view(-1, *[1] * (values.dim() - 1))
        if self._reduce == "mean":
            return values / counts.clamp(min=1)
        return values.where(counts > 0, torch.zeros(()).to(values))


class _Argument(NamedTuple):
    """The origin of an argument of ``propagate`` or ``edge_updater``.

    Attributes:
        kind: ``"pair"``, ``"src"`` or ``"dst"``: rows; ``"edges"``: the result of
            ``edge_updater``; ``"option"``: an argument of ``forward``; ``"same"``: a constant.
        value: The name of the option, the constant, or for a pair the two ends that are read.
    """

    kind: str
    value: Any = None


class _Mixed(Exception):
    """Raised for a layer whose ``forward`` is needed for each piece of its edges."""


Side = dict[tuple[str, str], Tensor]
"""The rows of one end of edges that messages read, by function and argument: ``[n, ...]``."""


class StreamedConv:
    """A convolution that is computed in four parts.

    What messages read of sources, and of destinations, is computed once for each node
    (:meth:`sources`, :meth:`destinations`). A piece of the edges gives aggregates of messages
    (:meth:`piece`), and the aggregates over all edges give the output (:meth:`finish`). All of it
    is the layer's own ``forward``, which is stopped where it calls ``propagate``.

    Args:
        conv: The layer, one of PyG's or a fused one. Edges of nodes to themselves are not added by
            it; they are edges as others.

    Attributes:
        adds_loops: True if the layer adds an edge from every node to itself.
        is_narrow: True if no tensor has a row of channels for each edge.
        count_bytes: Memory of the number of edges of a destination, if these are counted.
        reads_dst: True if messages read rows of destinations. Known after :meth:`fit`.
        finishes_dst: True if :meth:`finish` reads rows of destinations. Known after :meth:`fit`.

    Raises:
        NotStreamed: If the aggregates of pieces do not make that of the whole.
    """

    reads_dst = finishes_dst = True

    def __init__(self, conv: MessagePassing) -> None:
        cls: Any = conv.replaces if isinstance(conv, FusedConv) else type(conv)
        reduce = _REDUCTIONS.get(type(conv.aggr_module))
        if reduce is None:
            raise NotStreamed(f"aggr={conv.aggr!r} is not a sum, mean or extreme")
        if conv.flow != "source_to_target" or conv.node_dim not in (-2, 0):
            raise NotStreamed(f"it has flow={conv.flow!r} and node_dim={conv.node_dim}")
        if isinstance(conv, EGConv) and (conv.add_self_loops or conv.aggregators != ["sum"]):
            raise NotStreamed(
                f"it has add_self_loops={conv.add_self_loops} and aggregators={conv.aggregators}, "
                "expected False and ['sum']"
            )
        self._reduce: str = reduce
        self.count_bytes = 0 if reduce == "sum" else torch.int32.itemsize
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
        self._updater_of_layer = type(plain).edge_updater
        plain.__dict__["propagate"] = self._propagate
        plain.__dict__["edge_updater"] = self._edge_updater
        self._layer: Any = plain
        self._all: Tensor | None = None
        self._calls: dict[str, dict[str, Any]] | None = None
        self._token = torch.empty(0)
        self._arguments: dict[str, dict[str, _Argument]] | None = None
        self._sizes, self._out = (0, 0), torch.empty(0)
        self._logs: list[Tensor] = []

    def fit(
        self, src: Tensor, dst: Tensor, edge_index: Tensor, options: dict[str, Any]
    ) -> Aggregates:
        """Find out from a few rows and edges what is read of which end.

        Args:
            src: Features of sources, ``[num_src, channels]``.
            dst: Features of more than one destination, ``[n, channels]``.
            edge_index: ``int64`` ``[2, num_edges]``.
            options: Further arguments of the layer's ``forward``.

        Returns:
            Aggregates, for their shapes.
        """
        self._arguments, self._empty = None, {k: value[:0] for k, value in options.items()}
        self._no_src, self._no_dst = src[:0], dst[:0]
        for takes_pair in (True, False) if self._takes_pair else (False,):
            self._takes_pair = takes_pair
            try:
                self._arguments = self._examined(src, dst)
                break
            except NotStreamed:
                raise
            except _Mixed:  # such a layer needs rows and edges that belong together
                break
            except Exception as error:  # it takes no pair, or raises this on whole rows too
                if not takes_pair:
                    raise NotStreamed(f"it raised {error!r} on a few rows") from error
        self.reads_dst = True
        made, into = self.sources(src), self.destinations(dst)
        self.reads_dst = bool(into)
        sizes = src.size(0), dst.size(0)
        found = self.piece(made, into, sizes, edge_index, options)
        self.finishes_dst = True
        whole = found.out.clone()
        try:
            self.finishes_dst = self.finish(whole, dst[:0]).size(0) != dst.size(0)
        except Exception:  # rows of destinations are missing
            self.finishes_dst = True
        return found

    def _examined(self, src: Tensor, dst: Tensor) -> dict[str, dict[str, _Argument]]:
        layer, found = self._layer, {}
        for function, kwargs in self._called(0, src, dst).items():
            names = layer._user_args if function == "propagate" else layer._edge_user_args
            found[function] = {
                name: self._origin(name, value, set(names)) for name, value in kwargs.items()
            }
        return found

    def _origin(self, name: str, value: Any, names: set[str]) -> _Argument:
        """The origin of an argument.

        Raises:
            _Mixed: If it is none of those that are known.
        """
        if value is self._token:
            return _Argument("edges")
        for option, given in self._empty.items():
            if value is given:
                return _Argument("option", option)
        ends = f"{name}_j" in names, f"{name}_i" in names
        if isinstance(value, Tensor) and not self._takes_pair and any(ends):
            return _Argument("pair", ends)  # one tensor, whose rows are those of both ends
        if isinstance(value, (tuple, list)) and len(value) == 2 and name not in names:
            return _Argument("pair", ends)
        if not isinstance(value, Tensor):
            return _Argument("same", value)
        if name in names or all(ends):
            raise _Mixed
        return _Argument("src" if ends[0] else "dst" if ends[1] else "same")

    def _called(self, end: int, src: Tensor, dst: Tensor) -> dict[str, dict[str, Any]]:
        """The arguments with which the layer calls ``propagate`` and ``edge_updater``.

        Args:
            end: Where a layer takes one tensor, 0 for that of sources, 1 for destinations.
            src: Features of sources.
            dst: Features of destinations.
        """
        self._calls = {}
        none = torch.empty(2, 0, dtype=torch.int64, device=src.device)
        try:
            self._layer(self._given(src, dst, end), none, **self._empty)
        except _Reached:
            return self._calls
        finally:
            self._calls = None
        raise NotStreamed("it does not aggregate messages by propagate()")

    def sources(self, rows: Tensor) -> Side:
        """The rows that messages read of sources with features ``[n, channels]``."""
        if self._arguments is None:
            return {_ROWS: rows}
        return self._side(0, self._called(0, rows, self._no_dst))

    def destinations(self, rows: Tensor) -> Side:
        """The rows that messages read of destinations with features ``[n, channels]``, if any."""
        if not self.reads_dst:
            return {}
        if self._arguments is None:
            return {_ROWS: rows} if self._takes_pair else {}
        return self._side(1, self._called(1, self._no_src, rows))

    def _side(self, end: int, calls: dict[str, dict[str, Any]]) -> Side:
        assert self._arguments is not None
        found: Side = {}
        for function, kwargs in calls.items():
            for name, value in kwargs.items():
                kind, ends = self._arguments[function][name]
                if kind == _ENDS[end]:
                    found[function, name] = value
                elif kind == "pair" and ends[end]:
                    rows = value if isinstance(value, Tensor) else value[end]
                    if rows is not None:
                        found[function, name] = rows
        return found

    def accumulator(self, size: int, like: Aggregates) -> Accumulator:
        """An accumulator to add the pieces of a number of destinations to."""
        return Accumulator(self._reduce, size, like)

    def piece(
        self,
        src: Side,
        dst: Side,
        sizes: tuple[int, int],
        edge_index: Tensor,
        options: dict[str, Any],
    ) -> Aggregates:
        """The aggregates over some edges.

        Args:
            src: Of sources, see :meth:`sources`.
            dst: Of destinations, see :meth:`destinations`.
            sizes: Number of these sources and destinations.
            edge_index: ``int64`` ``[2, num_edges]``.
            options: Further arguments of the layer's ``forward``.
        """
        self._all, self._sizes, self._logs = None, sizes, []
        if self._arguments is None:
            rows = src[_ROWS], dst[_ROWS] if dst else src[_ROWS][:0]
            try:
                self._layer(self._given(*rows, 0), edge_index, **options)
            except _Reached:
                pass
            else:
                raise NotStreamed("it does not aggregate messages by propagate()")
        else:
            self._aggregate(self._arguments, src, dst, edge_index, options)
        if len(self._logs) > 1:
            raise NotStreamed("it has more than one softmax")
        log = self._logs[0] if self._logs else None
        if log is not None and self._out.shape[: log.dim()] != log.shape:
            raise NotStreamed("its softmax is not over the in-edges of a head")
        counts = torch.bincount(edge_index[1], minlength=sizes[1]).to(torch.int32)
        return Aggregates(self._out, counts, log)

    def _aggregate(
        self,
        arguments: dict[str, dict[str, _Argument]],
        src: Side,
        dst: Side,
        edge_index: Tensor,
        options: dict[str, Any],
    ) -> None:
        """Call what ``forward`` calls, with rows of these ends."""
        of_edges: Any = None
        for function, kwargs in arguments.items():
            given: dict[str, Any] = {}
            for name, (kind, value) in kwargs.items():
                ends = src.get((function, name)), dst.get((function, name))
                if kind == "pair":
                    given[name] = ends
                elif kind in _ENDS:
                    given[name] = ends[_ENDS.index(kind)]
                elif kind == "option":
                    given[name] = options[value]
                else:
                    given[name] = of_edges if kind == "edges" else value
            if function == "edge_updater":
                of_edges = self._updater_of_layer(self._layer, edge_index, **given)
            else:
                self._out = self._propagate_of_layer(
                    self._layer, edge_index, size=self._sizes, **given
                )

    def finish(self, whole: Tensor, dst: Tensor) -> Tensor:
        """The output of the layer, from the aggregates over all edges.

        Args:
            whole: ``[n, ...]``.
            dst: Features of the destinations, ``[n, channels]``, or none if they are not read.
        """
        self._all = whole
        none = torch.empty(2, 0, dtype=torch.int64, device=dst.device)
        try:
            out: Tensor = self._layer(self._given(dst[:0], dst, 1), none, **self._empty)
        finally:
            self._all = None
        return out

    def _given(self, src: Tensor, dst: Tensor, end: int) -> Any:
        return (src, dst) if self._takes_pair else (src, dst)[end]

    def _propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        if self._all is not None:
            return self._all
        if self._calls is not None:
            self._calls["propagate"] = kwargs
        else:
            self._out = self._propagate_of_layer(
                self._layer, edge_index, size=self._sizes, **kwargs
            )
        raise _Reached

    def _edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        if self._all is not None and self._arguments is not None:
            return self._token
        if self._calls is None:
            return self._updater_of_layer(self._layer, edge_index, size=size, **kwargs)
        if "edge_updater" in self._calls:
            raise _Mixed
        self._calls["edge_updater"] = kwargs
        return self._token

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
