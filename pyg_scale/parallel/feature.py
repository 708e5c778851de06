"""Feature parallelism: nodes are divided among ranks, and where edges are followed, channels.

Every rank has all edges and updates its own nodes. For a ``propagate``, rows of own nodes become
columns of all nodes by one all-to-all, are aggregated, and become rows again by another. So there
is no halo, whatever the graph, and an exchange moves ``2 (P - 1) / P`` times the features, however
the graph is cut. The idea is that of MixGCN (Wan et al., 2025), RDM (Kurt et al., IPDPS 2023) and
NeutronTP (Ai et al., VLDB 2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import add_self_loops

from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.parallel.compression import Compressor
from pyg_scale.parallel.exchange import HaloExchange
from pyg_scale.parallel.graph_module import GraphModule, SharedGraph
from pyg_scale.parallel.halo_layers import HaloLayers
from pyg_scale.parallel.layers import called_of_pyg, ends_of, inside_convs
from pyg_scale.parallel.peers import Alone, Peers
from pyg_scale.parallel.shard import Shard, share, sizes_of, slice_of

BY_CHANNEL: tuple[Any, ...] = (
    pyg.APPNP,
    pyg.ARMAConv,
    pyg.GCN2Conv,
    pyg.GCNConv,
    pyg.GINConv,
    pyg.GatedGraphConv,
    pyg.GraphConv,
    pyg.LGConv,
    pyg.MixHopConv,
    pyg.RGCNConv,
    pyg.SAGEConv,
    pyg.SGConv,
    pyg.SSGConv,
    pyg.TAGConv,
)
"""Layers that aggregate each channel for itself."""

BY_HEAD: tuple[Any, ...] = (pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv)
"""Layers whose heads attend each for itself."""

_LOOPS = "let the graph have them, T.AddSelfLoops() before it is partitioned"
_SUMS = "let the graph have its result, as an attribute of edges before it is partitioned (inputs=)"
_DRAWS = "each rank would draw other edges for its channels"

_BEYOND_OWN: dict[str, str] = {
    "add_remaining_self_loops": _LOOPS,
    "add_self_loops": _LOOPS,
    "contains_isolated_nodes": _SUMS,
    "degree": _SUMS,
    "dropout_adj": _DRAWS,
    "dropout_edge": _DRAWS,
    "dropout_node": _DRAWS,
    "dropout_path": _DRAWS,
    "remove_isolated_nodes": _SUMS,
    "scatter": _SUMS,
}
"""Functions whose results are not those of all nodes if there are rows of own ones, and why."""

_AGGREGATIONS = ("add", "sum", "mean", "max", "min", "mul")


class FeatureParallel(SharedGraph):
    """Trains on the full graph: ranks aggregate a slice of channels of all nodes each.

    It is exact. Layers must aggregate each channel for itself, or attend with a number of heads
    that the ranks divide. All ranks must be able to read all parts of the graph directory, and own
    equal numbers of nodes, whatever the parts.
    """

    def check(self, module: nn.Module, peers: Peers, mesh: Any) -> None:
        super().check(module, peers, mesh)
        check_channels(module, peers.size)

    def divided(
        self,
        module: nn.Module,
        peers: Peers,
        graph: Any,
        inputs: Sequence[str] | None,
        mesh: Any,
    ) -> FeatureModule:
        alone = Alone(peers.device)
        with peers.together():
            shard = share(graph, alone)
        exchange = HaloExchange(shard.halos, alone)
        return FeatureModule(module, shard, peers, inputs, exchange, peers)


class FeatureModule(GraphModule):
    """A module whose layers aggregate a slice of channels on each rank of a group.

    Args:
        module: See :class:`GraphModule`.
        shard: The share of the ranks of ``columns`` together.
        peers: All ranks.
        inputs: See :class:`GraphModule`.
        exchange: The exchange of halo rows with ranks that have the same channels.
        columns: The ranks that divide channels.
        compressor: See :class:`GraphModule`.
    """

    def __init__(
        self,
        module: nn.Module,
        shard: Shard,
        peers: Peers,
        inputs: Sequence[str] | None,
        exchange: HaloExchange,
        columns: Peers,
        compressor: Compressor | None = None,
    ) -> None:
        with peers.together():
            shard, sizes = slice_of(shard, columns)
        super().__init__(module, shard, peers, inputs, exchange, compressor)
        constant = self.constant()
        edges = shard.edges
        self.layers = FeatureLayers(module, edges, exchange, columns, peers, sizes, constant)


def check_channels(module: nn.Module, size: int) -> None:
    """Refuse layers that need more than a slice of channels.

    Raises:
        ValueError: If there is one; names it.
    """
    within = inside_convs(module)
    for name, layer in module.named_modules():
        reason = _reason(layer, size) if isinstance(layer, MessagePassing) else ""
        if not reason and size > 1 and layer not in within:
            reason = _reason_of_calls(layer)
        if reason:
            raise ValueError(f"{type(layer).__name__} ({name or 'the model itself'}) {reason}")


def _reason(layer: Any, size: int) -> str:
    """The reason why a layer needs more than a slice of channels; empty if it does not."""
    if isinstance(layer, BY_HEAD):
        if layer.heads % size:
            heads = f"has {layer.heads} heads, which {size} ranks do not divide"
            return f"{heads}: 'halo' takes any number"
        return "" if layer.lin_edge is None else "has features of edges, which 'halo' takes"
    if not isinstance(layer, BY_CHANNEL):
        return "is not known to aggregate each channel for itself: use 'halo'"
    known = layer.aggr in _AGGREGATIONS
    return "" if known else f"has aggr={layer.aggr!r}, which 'halo' takes"


def _reason_of_calls(layer: nn.Module) -> str:
    """The reason why a module does not suit edges of all nodes with rows of own ones."""
    beyond = called_of_pyg(layer) & _BEYOND_OWN.keys()
    if isinstance(layer, MessagePassing):
        beyond -= {"add_self_loops"}  # replaced by one that knows the number of nodes
    if not beyond:
        return ""
    called = min(beyond)
    return (
        f"calls {called} on edges of all nodes, of which a rank has some rows: "
        f"{_BEYOND_OWN[called]}, or use 'halo'"
    )


class FeatureLayers(HaloLayers):
    """Layers that follow edges for a slice of channels of the nodes of several ranks.

    Args:
        module: See :class:`GraphLayers`.
        edges: The edges of the ranks of ``columns`` together, by type.
        exchange: The exchange of halo rows with ranks that have the same channels.
        columns: The ranks that divide channels.
        peers: All ranks.
        sizes: By node type the number of own nodes of each rank of ``columns``.
        constant: See :class:`GraphLayers`.
    """

    def __init__(
        self,
        module: nn.Module,
        edges: dict[EdgeType, Tensor],
        exchange: HaloExchange,
        columns: Peers,
        peers: Peers,
        sizes: dict[NodeType, list[int]],
        constant: Sequence[Tensor],
    ) -> None:
        super().__init__(module, edges, exchange, peers, constant)
        self._columns, self._sizes = columns, sizes
        self._channels = 0
        self._as_columns: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def propagate(self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]) -> Any:
        kwargs = self._sliced(layer, kwargs, layer._user_args)
        if isinstance(layer, pyg.TransformerConv):  # its messages have the heads of this rank
            layer.heads //= self._columns.size
        out = super().propagate(layer, edge_index, kwargs)
        if isinstance(layer, pyg.TransformerConv):
            layer.heads *= self._columns.size
        if self._columns.size == 1:
            return out
        dim, axis = layer.node_dim % out.dim(), self._axis(layer, out)
        rows = out.movedim((dim, axis), (0, -1))
        (found,) = _Transpose.apply(self._plan(self._types[1], self._channels), False, rows)
        return found.movedim((0, -1), (dim, axis)).contiguous()

    def update_edges(self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]) -> Any:
        kwargs = self._sliced(layer, kwargs, layer._edge_user_args)
        return super().update_edges(layer, edge_index, kwargs)

    def replacements(self) -> dict[str, Callable[..., Any]]:
        return {**super().replacements(), "add_self_loops": self._add_self_loops}

    def attributes(self, layer: Any) -> dict[str, Any]:
        if isinstance(layer, pyg.TransformerConv):
            return {"heads": layer.heads}  # and again after an error in its messages
        if isinstance(layer, pyg.GATv2Conv):  # the only weights that are used on edges
            return {"att": layer.att.tensor_split(self._columns.size, dim=1)[self._columns.rank]}
        return {}

    def _leave(self, layer: Any, args: Any, out: Any) -> None:
        super()._leave(layer, args, out)
        self._forget()

    def _forget(self) -> None:
        """Keep the columns of constant tensors only."""
        kept = {k: each for k, each in self._as_columns.items() if self.is_constant(each[0])}
        self._as_columns = kept

    def _axis(self, layer: Any, tensor: Tensor) -> int:
        """The axis of a tensor that is divided: heads, or channels."""
        return 1 if isinstance(layer, BY_HEAD) else tensor.dim() - 1

    def _plan(self, node_type: NodeType, channels: int) -> _Plan:
        rows, columns = self._sizes[node_type], sizes_of(channels, self._columns.size)
        return _Plan(rows, columns, self._columns)

    def _sliced(self, layer: Any, kwargs: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """The arguments as slices of channels of all nodes of the ranks of ``columns``."""
        if self._columns.size == 1:
            return kwargs
        needed: list[tuple[str, int, Tensor]] = []
        for end, place in (("_j", 0), ("_i", 1)):
            for name in ends_of(names, end):
                value = kwargs.get(name)
                value = value[place] if isinstance(value, tuple | list) else value
                if isinstance(value, Tensor):
                    needed.append((name, place, value))
        given = {id(value): (value, place) for _, place, value in needed}
        found = {
            key: self._as_columns[key, value._version][1]
            for key, (value, _) in given.items()
            if (key, value._version) in self._as_columns
        }
        missing = {k: place for k, (_, place) in given.items() if k not in found}
        if missing:
            self._forget()
        for node_type in dict.fromkeys(self._types):
            places = [place for place in (0, 1) if self._types[place] == node_type]
            values = [given[k][0] for k, place in missing.items() if place in places]
            for value, whole in zip(values, self._transposed(layer, node_type, values)):
                found[id(value)] = whole
                self._as_columns[id(value), value._version] = (value, whole)
                if self.is_constant(value):
                    self.add_constant(whole)
        pairs: dict[str, list[Any]] = {}
        for name, place, value in needed:
            pairs.setdefault(name, [None, None])[place] = found[id(value)]
            self._channels = value.size(self._axis(layer, value))
        return {**kwargs, **{name: tuple(pair) for name, pair in pairs.items()}}

    def _transposed(self, layer: Any, node_type: NodeType, values: list[Tensor]) -> list[Tensor]:
        """Slices of channels of all nodes of a type, in one message."""
        if not values:
            return []
        rows, back = [], []
        for value in values:
            dim, axis = layer.node_dim % value.dim(), self._axis(layer, value)
            rows.append(value.movedim((dim, axis), (0, -1)))
            back.append((dim, axis))
        found = _Transpose.apply(self._plan(node_type, rows[0].size(-1)), True, *rows)
        return [
            each.movedim((0, -1), to).contiguous() for each, to in zip(found, back, strict=True)
        ]

    def _add_self_loops(self, edge_index: Tensor, edge_attr: Any = None, **kwargs: Any) -> Any:
        total = sum(self._sizes[self._types[1]])
        return add_self_loops(edge_index, edge_attr, **{**kwargs, "num_nodes": total})


class _Plan:
    """Sizes of a transposition.

    Args:
        rows: Number of own nodes of each rank.
        columns: Number of channels of each rank.
        peers: The ranks.
    """

    def __init__(self, rows: list[int], columns: list[int], peers: Peers) -> None:
        self.rows, self.columns, self.peers = rows, columns, peers

    def to_columns(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``[num_own, ..., channels]`` to ``[num_nodes, ..., slice]``."""
        sent = [list(each.split(self.columns, dim=-1)) for each in tensors]
        width = self.columns[self.peers.rank]
        shapes = [[(n, *each.shape[1:-1], width) for n in self.rows] for each in tensors]
        return [torch.cat(parts) for parts in self._swap(sent, shapes, tensors[0])]

    def to_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``[num_nodes, ..., slice]`` to ``[num_own, ..., channels]``."""
        sent = [list(each.split(self.rows)) for each in tensors]
        own = self.rows[self.peers.rank]
        shapes = [[(own, *each.shape[1:-1], n) for n in self.columns] for each in tensors]
        return [torch.cat(parts, dim=-1) for parts in self._swap(sent, shapes, tensors[0])]

    def _swap(
        self, sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor
    ) -> list[list[Tensor]]:
        """Give each rank its part of every tensor, in one message."""
        ranks = range(self.peers.size)
        to = [torch.cat([parts[rank].reshape(-1) for parts in sent]) for rank in ranks]
        numbers = [[math.prod(each[rank]) for each in shapes] for rank in ranks]
        num_received = [sum(each) for each in numbers]
        received = like.new_empty(sum(num_received))
        self.peers.all_to_all(received, torch.cat(to), num_received, [each.numel() for each in to])
        found: list[list[Tensor]] = [[] for _ in shapes]
        for rank, block in enumerate(received.split(num_received)):
            for number, part in enumerate(block.split(numbers[rank])):
                found[number].append(part.view(shapes[number][rank]))
        return found


class _Transpose(torch.autograd.Function):
    """Rows of own nodes to columns of all nodes, or back; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, to_columns: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.to_columns = plan, to_columns
        return tuple(plan.to_columns(tensors) if to_columns else plan.to_rows(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        plan = ctx.plan
        return None, None, *(plan.to_rows(grads) if ctx.to_columns else plan.to_columns(grads))
