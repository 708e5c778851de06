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
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops

from pyg_scale.parallel.base import GraphParallel
from pyg_scale.parallel.graph_module import GraphModule, tensors_of
from pyg_scale.parallel.layers import GraphLayers, check_module, ends_of
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.shard import Shard, share, whole_edges

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

_AGGREGATIONS = ("add", "sum", "mean", "max", "min", "mul")


class FeatureParallel(GraphParallel):
    """Trains on the full graph: ranks aggregate a slice of channels of all nodes each.

    It is exact. Layers must aggregate each channel for itself, or attend with a number of heads
    that the ranks divide. All ranks must be able to read all parts of the graph directory.
    """

    def wrap(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        graph: Any = None,
        inputs: Sequence[str] | None = None,
        mesh: Any = None,
    ) -> FeatureModule:
        """Wrap a module; see :meth:`GraphParallel.wrap`.

        Raises:
            RuntimeError: If ``torch.distributed`` was not initialised.
            TypeError: If ``graph`` is not an opened graph, or a mesh is given.
            ValueError: If the module has a layer that needs all channels of an edge, or the graph
                does not suit it or the ranks. The same on all ranks.
            CommError: If a rank is gone or late; names it.
        """
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        peers = Peers(group, device)
        with peers.together():
            if mesh is not None:
                raise TypeError("'feature' divides one dimension: give it group= and not mesh=")
            check_module(module)
            check_channels(module, peers.size)
        own = share(graph, peers)
        whole, sizes = whole_edges(own, peers)
        return FeatureModule(module, _Both(own, whole), peers, inputs, sizes)


class _Both(Shard):
    """Own nodes, and the edges of all."""

    def __init__(self, own: Shard, whole: Shard) -> None:
        super().__init__(own.directory, own.parts, own.halos, whole.edges, whole.edge_ids)
        self._whole = whole

    def of_edges(self, edge_type: Any, name: str) -> Tensor:
        return self._whole.of_edges(edge_type, name)


class FeatureModule(GraphModule):
    """A module whose layers aggregate a slice of channels on each rank."""

    def __init__(
        self, module: nn.Module, shard: Shard, peers: Peers, inputs: Any, sizes: list[int]
    ) -> None:
        super().__init__(module, shard, peers, inputs)
        constant = [tensor for value in self.inputs.values() for tensor in tensors_of(value)]
        self._layers = FeatureLayers(module, peers, constant, sizes)

    def attached(self) -> AbstractContextManager[Any]:
        """The context in which the layers of the module are those of the whole graph."""
        return self._layers.attached()


def check_channels(module: nn.Module, size: int) -> None:
    """Refuse layers that need more than a slice of channels.

    Raises:
        ValueError: If there is one; names it.
    """
    for name, layer in module.named_modules():
        reason = _reason(layer, size) if isinstance(layer, MessagePassing) else ""
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


class FeatureLayers(GraphLayers):
    """Layers that follow edges for a slice of channels of all nodes.

    Args:
        module: See :class:`GraphLayers`.
        peers: The ranks.
        constant: See :class:`GraphLayers`.
        sizes: Number of own nodes of each rank.
    """

    def __init__(
        self, module: nn.Module, peers: Peers, constant: Sequence[Tensor], sizes: list[int]
    ) -> None:
        super().__init__(module, peers, constant)
        self._sizes, self._total = sizes, sum(sizes)
        self._norms: dict[Any, tuple[Tensor, Tensor]] = {}
        self._channels = 0
        self._kept: dict[int, Tensor] = {}

    def before_propagate(
        self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, tuple[int, int], dict[str, Any]]:
        kwargs = self._columns(layer, kwargs, layer._user_args)
        if isinstance(layer, pyg.TransformerConv):  # its messages have the heads of this rank
            layer.heads //= self.peers.size
        return edge_index, (self._total, self._total), kwargs

    def before_edge_updater(self, layer: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return self._columns(layer, kwargs, layer._edge_user_args)

    def after_propagate(self, layer: Any, out: Any) -> Any:
        if isinstance(layer, pyg.TransformerConv):
            layer.heads *= self.peers.size
        if self.peers.size == 1:
            return out
        dim, axis = layer.node_dim % out.dim(), self._axis(layer, out)
        rows = out.movedim((dim, axis), (0, -1))
        plan = _Plan(self._sizes, _widths(self._channels, self.peers.size), self.peers)
        (found,) = _Transpose.apply(plan, False, rows)
        return found.movedim((0, -1), (dim, axis)).contiguous()

    def replacements(self) -> dict[str, Callable[..., Any]]:
        return {"gcn_norm": self._gcn_norm, "add_self_loops": self._add_self_loops}

    def attributes(self, layer: Any) -> dict[str, Any]:
        if isinstance(layer, pyg.TransformerConv):
            return {"heads": layer.heads}  # and again after an error in its messages
        if isinstance(layer, pyg.GATv2Conv):  # the only weights that are used on edges
            return {"att": layer.att.tensor_split(self.peers.size, dim=1)[self.peers.rank]}
        return {}

    def _axis(self, layer: Any, tensor: Tensor) -> int:
        """The axis of a tensor that is divided: heads, or channels."""
        return 1 if isinstance(layer, BY_HEAD) else tensor.dim() - 1

    def _columns(self, layer: Any, kwargs: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """The arguments as slices of channels of all nodes."""
        if self.peers.size == 1:
            return kwargs
        needed: list[tuple[str, int, Tensor]] = []
        for end, place in (("_j", 0), ("_i", 1)):
            for name in ends_of(names, end):
                value = kwargs.get(name)
                value = value[place] if isinstance(value, tuple | list) else value
                if isinstance(value, Tensor):
                    needed.append((name, place, value))
        given = {id(value): value for _, _, value in needed}
        found = {key: self._kept[key] for key in given if key in self._kept}
        missing = [value for key, value in given.items() if key not in found]
        if missing:
            for value, whole in zip(missing, self._transposed(layer, missing), strict=True):
                found[id(value)] = whole
                if self.is_constant(value):
                    self._kept[id(value)] = whole
        pairs: dict[str, list[Any]] = {}
        for name, place, value in needed:
            pairs.setdefault(name, [None, None])[place] = found[id(value)]
            self._channels = value.size(self._axis(layer, value))
        return {**kwargs, **{name: tuple(pair) for name, pair in pairs.items()}}

    def _transposed(self, layer: Any, values: list[Tensor]) -> list[Tensor]:
        rows, back = [], []
        for value in values:
            dim, axis = layer.node_dim % value.dim(), self._axis(layer, value)
            rows.append(value.movedim((dim, axis), (0, -1)))
            back.append((dim, axis))
        widths = _widths(rows[0].size(-1), self.peers.size)
        plan = _Plan(self._sizes, widths, self.peers)
        found = _Transpose.apply(plan, True, *rows)
        return [
            each.movedim((0, -1), to).contiguous() for each, to in zip(found, back, strict=True)
        ]

    def _gcn_norm(
        self,
        edge_index: Tensor,
        weight: Any = None,
        num_nodes: Any = None,
        *args: Any,
        **kw: Any,
    ) -> Any:
        key = (id(edge_index), args, tuple(kw.items()))
        keeps = self.is_constant(edge_index) and weight is None
        if keeps and key in self._norms:
            return self._norms[key]
        found = gcn_norm(edge_index, weight, self._total, *args, **kw)
        if keeps:
            self._norms[key] = found
        return found

    def _add_self_loops(self, edge_index: Tensor, edge_attr: Any = None, **kwargs: Any) -> Any:
        return add_self_loops(edge_index, edge_attr, **{**kwargs, "num_nodes": self._total})


def _widths(channels: int, size: int) -> list[int]:
    """The number of channels of each rank."""
    return [channels // size + (rank < channels % size) for rank in range(size)]


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
