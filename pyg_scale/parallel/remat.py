"""The halo in blocks, one rank after the other, and again in the backward pass.

A layer that adds up messages, takes their extremes or attends to them can do so rank by rank, see
:mod:`~pyg_scale.parallel.sequential`. So no rank ever has its whole halo or a message for every
edge, and nothing of them is kept for the backward pass. The idea is that of SAR (Mostafa,
"Sequential Aggregation and Rematerialization", MLSys 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import MessagePassing

from pyg_scale.parallel.exchange import Wire
from pyg_scale.parallel.halo_layers import HaloLayers
from pyg_scale.parallel.inexact import LINEAR
from pyg_scale.parallel.layers import Fused
from pyg_scale.parallel.reduction import Attention, Extreme, Reduction
from pyg_scale.parallel.sequential import (
    Arguments,
    Piece,
    Propagate,
    Relations,
    Rows,
    degrees_by_type,
    pieces_of,
)

ATTENTION = (pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv)
"""Layers whose messages have weights that are a softmax over the edges of a node."""

_SUMS, _EXTREMES = ("add", "sum", "mean"), ("max", "min")


def is_sequential(layer: Any) -> bool:
    """True if a layer can be computed piece by piece."""
    of = _class_of(layer)
    inherits = all(
        getattr(of, name) is getattr(MessagePassing, name) for name in ("aggregate", "update")
    )
    if of is pyg.RGCNConv or of in ATTENTION:
        return layer.aggr in _SUMS
    known = issubclass(of, LINEAR) and not issubclass(of, pyg.RGCNConv)
    return known and inherits and layer.aggr in (*_SUMS, *_EXTREMES)


def _class_of(layer: Any) -> type:
    return layer.replaces if isinstance(layer, Fused) else type(layer)


def _trained(layer: Any) -> list[Tensor]:
    return [each for each in layer.parameters() if each.requires_grad]


class _Later(NamedTuple):
    """The weights of edges, which are made when they are needed.

    Attributes:
        kwargs: The arguments of ``edge_updater``.
    """

    kwargs: dict[str, Any]


class RematLayers(HaloLayers):
    """Layers that get the halo's rows in blocks; see :class:`HaloLayers`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pieces: dict[int, tuple[Tensor, list[list[Piece]]]] = {}

    def attributes(self, layer: Any) -> dict[str, Any]:
        found = super().attributes(layer)
        if _class_of(layer) is pyg.RGCNConv:
            found["forward"] = partial(self._relations, layer)
        return found

    def _enter(self, layer: Any, args: Any, kwargs: Any) -> None:
        asks = [*(each for each in args if isinstance(each, bool)), *kwargs]
        if isinstance(layer, ATTENTION) and (
            kwargs.get("return_attention_weights") is not None or True in asks or False in asks
        ):
            raise ValueError(
                f"{type(layer).__name__} is asked for weights of edges, of which remat=True keeps "
                "none: leave one of them out"
            )
        super()._enter(layer, args, kwargs)

    def update_edges(self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]) -> Any:
        return _Later(kwargs)

    def propagate(self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]) -> Tensor:
        tensors = _Tensors()
        weights = [name for name, value in kwargs.items() if isinstance(value, _Later)]
        of_weights = None
        if weights:
            later = kwargs[weights[0]].kwargs
            of_weights = self._arguments(layer, later, layer._edge_user_args, tensors)
        given = {name: value for name, value in kwargs.items() if name not in weights}
        of_messages = self._arguments(layer, given, layer._user_args, tensors)
        attends = _class_of(layer) in ATTENTION
        sums = Attention if attends else Reduction
        return Propagate(
            **self._shared(layer, edge_index, tensors.rows()),
            reduction=Extreme if layer.aggr in _EXTREMES else sums,
            depends=attends or layer.aggr in _EXTREMES,
            parameters=_trained(layer) if attends else [],
            of_messages=of_messages,
            of_weights=of_weights,
            weights=weights[0] if weights else "",
        ).result()

    def _relations(
        self, layer: Any, x: Any, edge_index: Tensor, edge_type: Tensor | None = None
    ) -> Tensor:
        """The forward of ``RGCNConv``: its messages in pieces, the rest as there."""
        sources, ends = x if isinstance(x, tuple) else (x, x)
        if not isinstance(sources, Tensor) or edge_type is None:
            raise ValueError(
                "RGCNConv: remat=True needs x, with a row for each own node, and edge_type"
            )
        self._sources(layer, {"x": sources}, ["x_j"])
        edges = [edge_type]
        if layer.aggr == "mean":
            number = layer.num_relations
            edges.append(degrees_by_type(edge_index, edge_type, len(ends), number))
        out = Relations(
            **self._shared(layer, edge_index, Rows([sources], [ends], edges)),
            reduction=Reduction,
            depends=True,
            parameters=_trained(layer),
        ).result()
        if layer.root is not None:
            own = ends.is_floating_point()
            out = out + (ends @ layer.root if own else layer.root[ends])
        return out if layer.bias is None else out + layer.bias

    def _shared(self, layer: Any, edge_index: Tensor, rows: Rows) -> dict[str, Any]:
        """The arguments that all calls have."""
        self._check_ends(edge_index)
        src, dst = (self._exchange.halos[each] for each in self._types)
        return {
            "layer": layer,
            "wire": Wire(self._exchange.peers),
            "halo": src,
            "num_ends": dst.num_own,
            "edge_index": edge_index,
            "pieces": self._pieces_of(edge_index),
            "like": rows,
        }

    def _pieces_of(self, edge_index: Tensor) -> list[list[Piece]]:
        """The edges in pieces; known for those that never change."""
        src, dst = (self._exchange.halos[each] for each in self._types)
        kept = [edges for edges, _ in self._norms.values()]
        if id(edge_index) not in {*self._edge_types, *map(id, kept)}:
            return pieces_of(edge_index, src, dst.num_own)
        if id(edge_index) not in self._pieces:
            self._pieces[id(edge_index)] = edge_index, pieces_of(edge_index, src, dst.num_own)
        return self._pieces[id(edge_index)][1]

    def _arguments(
        self, layer: Any, kwargs: dict[str, Any], names: list[str], tensors: _Tensors
    ) -> Arguments:
        """The arguments of a method, by what they have rows for."""
        found = Arguments()
        dim = layer.node_dim
        for name, (value, other) in self._sources(layer, kwargs, names).items():
            found.sources[name] = tensors.of_sources(value, dim)
            if f"{name}_i" in names and isinstance(other, Tensor):
                found.ends[name] = tensors.of_ends(other, dim)
        for name, value in kwargs.items():
            if name in found.sources:
                continue
            if f"{name}_i" in names and isinstance(value, Tensor):
                found.ends[name] = tensors.of_ends(value, dim)
            elif isinstance(value, Tensor) and name in names:
                found.edges[name] = tensors.of_edges(value)
            else:
                found.others[name] = value
        return found


class _Tensors:
    """The tensors of a call, each once."""

    def __init__(self) -> None:
        self._rows: tuple[list[Tensor], ...] = ([], [], [])
        self._known: dict[tuple[int, int], int] = {}

    def of_sources(self, tensor: Tensor, dim: int) -> int:
        """The number of a tensor with a row for each source."""
        return self._number(0, tensor, lambda: tensor.movedim(dim, 0))

    def of_ends(self, tensor: Tensor, dim: int) -> int:
        """The number of a tensor with a row for each destination."""
        return self._number(1, tensor, lambda: tensor.movedim(dim, 0))

    def of_edges(self, tensor: Tensor) -> int:
        """The number of a tensor with a row for each edge."""
        return self._number(2, tensor, lambda: tensor)

    def rows(self) -> Rows:
        """All of them."""
        return Rows(*self._rows)

    def _number(self, kind: int, tensor: Tensor, rows: Callable[[], Tensor]) -> int:
        key = kind, id(tensor)
        if key not in self._known:
            self._known[key] = len(self._rows[kind])
            self._rows[kind].append(rows())
        return self._known[key]
