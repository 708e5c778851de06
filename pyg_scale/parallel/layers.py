"""Stock layers on a share of a graph: what surrounds the exchange before every ``propagate``.

Layers of PyG compute on own nodes alone. Only where they look at the other end of an edge do they
get the halo's rows: in ``propagate`` and ``edge_updater``. Two more things look beyond: degrees
(``gcn_norm``) and statistics over nodes (``BatchNorm``), which are those of the whole graph here.
All other layers that look beyond are refused by name.
"""

from __future__ import annotations

import functools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import add_remaining_self_loops, scatter

from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.parallel.exchange import HaloExchange
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.shard import Shard
from pyg_scale.parallel.statistics import global_batch_norm

_OF_ALL_NODES = {
    "global_add_pool",
    "global_max_pool",
    "global_mean_pool",
    "knn",
    "knn_graph",
    "negative_sampling",
    "radius",
    "radius_graph",
    "to_dense_adj",
    "to_dense_batch",
    "to_undirected",
}
"""Names of functions that look at all nodes."""

_OF_EDGES = _OF_ALL_NODES | {
    "degree",
    "get_laplacian",
    "group",
    "scatter",
    "scatter_add",
    "softmax",
}
"""Names of functions that, outside of messages, also look at sources of edges."""

_OVER_NODES: tuple[type, ...] = (
    pyg.GraphNorm,
    pyg.GraphSizeNorm,
    pyg.InstanceNorm,
    pyg.MeanSubtractionNorm,
    pyg.PairNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.SyncBatchNorm,
)
"""Normalisations over all nodes that have no form for ranks."""

_OF_LAYERS = ("message", "aggregate", "message_and_aggregate", "update", "edge_update")


@runtime_checkable
class Fused(Protocol):
    """A layer with a fused path, see :class:`pyg_scale.nn.FusedConv`."""

    replaces: Any

    def fused(self, *args: Any, **kwargs: Any) -> Any:
        """The result of ``forward``, without a row for every edge."""


def check_module(module: nn.Module) -> None:
    """Refuse a module whose layers look at more than own nodes and their in-edges.

    Raises:
        ValueError: If a layer is one of those; names it and says what to use instead.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet (in_channels=-1): call the model once before "
                "it is wrapped"
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("the model has no parameter that needs a gradient")
    within = {
        inner
        for layer in module.modules()
        if isinstance(layer, MessagePassing)
        for inner in layer.modules()
        if inner is not layer
    }
    for name, layer in module.named_modules():
        what = f"{type(layer).__name__} ({name or 'the model itself'})"
        reason = _reason(layer, layer in within)
        if reason:
            raise ValueError(f"{what} {reason}")


def _reason(layer: nn.Module, is_within: bool) -> str:
    """The reason why a layer cannot be wrapped; empty if it can."""
    if isinstance(layer, _OVER_NODES) or (
        isinstance(layer, pyg.LayerNorm) and layer.mode == "graph"
    ):
        return (
            "takes statistics over all nodes, and a rank has some: use BatchNorm, whose statistics "
            "are made global, or a norm of single nodes (LayerNorm, mode='node')"
        )
    if isinstance(layer, MessagePassing):
        return _reason_of_conv(layer)
    if isinstance(layer, pyg.Aggregation) and is_within:
        return ""
    pools = type(layer).__module__.startswith("torch_geometric.nn.pool")
    if pools or isinstance(layer, pyg.Aggregation):
        return "pools nodes of all ranks: pool the outputs of own nodes after the model"
    beyond = _named(type(layer), MessagePassing) & _OF_ALL_NODES
    if beyond and not type(layer).__module__.startswith("torch."):
        return f"calls {', '.join(sorted(beyond))}, which needs nodes of all ranks"
    return ""


def _reason_of_conv(layer: MessagePassing) -> str:
    if layer.flow != "source_to_target":
        return "has flow='target_to_source', but a rank has the in-edges of its nodes"
    if layer.decomposed_layers > 1:
        return "has decomposed_layers > 1, which is not supported"
    if getattr(layer, "cached", False):
        return "has cached=True, which would keep a rank's share: leave it out, degrees are kept"
    if layer.explain:
        return "is being explained: explain the module itself, model.module"
    bare = {name for name in layer._user_args if not name.endswith(("_i", "_j"))}
    both = bare & {name[:-2] for name in layer._user_args if name.endswith("_j")}
    if both:
        return f"uses {', '.join(sorted(both))} for nodes and for edges in one method"
    beyond = _named(type(layer), MessagePassing) & _OF_EDGES
    if isinstance(layer, pyg.RGCNConv):
        beyond -= {"scatter"}  # of the edges of each relation
    if beyond:
        return (
            f"calls {', '.join(sorted(beyond))} outside of its messages: no halo knows the result"
        )
    if "propagate" in vars(layer) or not _is_pygs(type(layer).propagate):
        return "has a propagate of its own, in which there is no place for the exchange"
    return ""


def _is_pygs(propagate: Any) -> bool:
    return propagate.__module__ == MessagePassing.__module__ or propagate.__module__.endswith(
        "_propagate"
    )


def _methods(layer: type, base: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The methods of a class and its bases below ``base``, without those of messages."""
    seen = set(_OF_LAYERS)
    for each in layer.__mro__:
        if each is base or each is nn.Module:
            break
        for name, function in vars(each).items():
            if isinstance(function, types.FunctionType) and name not in seen:
                seen.add(name)
                yield name, function


def _named(layer: type, base: type) -> set[str]:
    """Global names that the methods of a class use."""
    return {name for _, function in _methods(layer, base) for name in function.__code__.co_names}


class GraphLayers(ABC):
    """The layers of a module while it computes on a share of a graph.

    Args:
        module: The module; :func:`check_module` has accepted it.
        peers: The ranks.
        constant: Tensors that never change, so that what is made of them is kept.
    """

    def __init__(self, module: nn.Module, peers: Peers, constant: Sequence[Tensor]) -> None:
        self.peers = peers
        self._convs = [layer for layer in module.modules() if isinstance(layer, MessagePassing)]
        self._batch_norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self._constant = {id(tensor): (tensor, tensor._version) for tensor in constant}
        self._active = False

    @abstractmethod
    def before_propagate(
        self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, tuple[int, int], dict[str, Any]]:
        """The edges, the number of sources and destinations, and arguments with their rows."""

    def after_propagate(self, layer: Any, out: Any) -> Any:
        """The result of ``propagate`` for own nodes."""
        return out

    @abstractmethod
    def before_edge_updater(self, layer: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of ``edge_updater`` with the rows of sources and destinations."""

    @abstractmethod
    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Functions that layers get instead of PyG's, by their global names."""

    def attributes(self, layer: Any) -> dict[str, Any]:
        """Attributes that a layer has while it is attached."""
        return {}

    def hooked(self, conv: MessagePassing) -> list[Any]:
        """Handles of the hooks of a layer."""
        return [
            conv.register_propagate_forward_pre_hook(self._before),
            conv.register_propagate_forward_hook(self._after),
        ]

    def is_constant(self, tensor: Tensor) -> bool:
        """True if the tensor is an unchanged input of the graph."""
        known = self._constant.get(id(tensor))
        return known is not None and known[1] == tensor._version and not tensor.requires_grad

    def add_constant(self, tensor: Tensor) -> None:
        """Declare that a tensor never changes; it is kept."""
        self._constant[id(tensor)] = (tensor, tensor._version)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within it, the layers compute what they would on the whole graph."""
        if self._active:
            yield
            return
        with ExitStack() as stack:
            self._active = True
            stack.callback(setattr, self, "_active", False)
            replaced = self.replacements()
            for conv in self._convs:
                for handle in self.hooked(conv):
                    stack.callback(handle.remove)
                self._replace(stack, conv, "edge_updater", self._edge_updater(conv))
                of = type(conv)
                if isinstance(conv, Fused):  # there is no place for an exchange in a fused path
                    of = conv.replaces
                    self._replace(stack, conv, "forward", types.MethodType(of.forward, conv))
                for name, function in _methods(of, MessagePassing):
                    if replaced.keys() & set(function.__code__.co_names):
                        self._replace(stack, conv, name, _with_globals(conv, function, replaced))
                for name, value in self.attributes(conv).items():
                    self._replace(stack, conv, name, value)
            for norm in self._batch_norms:
                forward = functools.partial(global_batch_norm, norm, self.peers)
                self._replace(stack, norm, "forward", forward)
            yield

    def _replace(self, stack: ExitStack, layer: Any, name: str, value: Any) -> None:
        own = vars(layer)
        if name in own:
            stack.callback(own.__setitem__, name, own[name])
        else:
            stack.callback(own.pop, name)
        own[name] = value

    def _before(self, layer: Any, inputs: Any) -> Any:
        edge_index, _, kwargs = inputs
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            raise TypeError(f"{type(layer).__name__}: edge_index must be a dense tensor")
        return self.before_propagate(layer, edge_index, dict(kwargs))

    def _after(self, layer: Any, inputs: Any, out: Any) -> Any:
        return self.after_propagate(layer, out)

    def _edge_updater(self, layer: Any) -> Callable[..., Any]:
        def edge_updater(edge_index: Tensor, size: Any = None, **kwargs: Any) -> Any:
            # A hook would come too late: PyG's generated code has gathered the rows by then.
            kwargs = self.before_edge_updater(layer, kwargs)
            return type(layer).edge_updater(layer, edge_index, size=None, **kwargs)

        return edge_updater


def ends_of(names: Sequence[str], end: str) -> list[str]:
    """Arguments that a method looks at by one end of an edge, ``"_i"`` or ``"_j"``."""
    return sorted({name.removesuffix(end) for name in names if name.endswith(end)})


def _with_globals(
    layer: Any, function: types.FunctionType, replaced: dict[str, Callable[..., Any]]
) -> Any:
    """A method of a layer with other functions in the place of some."""
    copied = types.FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(copied, layer)


class HaloLayers(GraphLayers):
    """Layers that get the halo's rows wherever they look at sources of edges.

    Args:
        module: See :class:`GraphLayers`.
        shard: The share of this rank.
        exchange: The exchange of halo rows.
        peers: The ranks.
        constant: See :class:`GraphLayers`.
    """

    def __init__(
        self,
        module: nn.Module,
        shard: Shard,
        exchange: HaloExchange,
        peers: Peers,
        constant: Sequence[Tensor],
    ) -> None:
        super().__init__(module, peers, constant)
        self._shard, self._exchange = shard, exchange
        self._kept: dict[int, Tensor] = {}
        self._edge_types = {id(edges): edge_type for edge_type, edges in shard.edges.items()}
        self._within: list[EdgeType] = []
        self._last: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._norms: dict[Any, tuple[Tensor, Tensor]] = {}

    # The layer #############################################################################

    def hooked(self, conv: MessagePassing) -> list[Any]:
        return [*self.hooks_of_layer(conv), *super().hooked(conv)]

    def hooks_of_layer(self, conv: MessagePassing) -> list[Any]:
        """Handles of the hooks around the forward of a layer."""
        return [
            conv.register_forward_pre_hook(self._enter, with_kwargs=True),
            conv.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, layer: Any, args: Any, kwargs: Any) -> None:
        given = [id(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        known = [self._edge_types[each] for each in given if each in self._edge_types]
        if self._shard.is_hetero and not known:
            raise ValueError(
                f"{type(layer).__name__} is given other edges than those of the graph, so that the "
                "types of its nodes are not known"
            )
        self._within.append(known[0] if known else None)

    def _leave(self, layer: Any, args: Any, out: Any) -> None:
        if self._within:
            self._within.pop()
        if not self._within:
            self._last = {}

    @property
    def _types(self) -> tuple[NodeType, NodeType]:
        edge_type = self._within[-1] if self._within else None
        return (None, None) if edge_type is None else (edge_type[0], edge_type[2])

    # Where edges are followed ##############################################################

    def before_propagate(
        self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, tuple[int, int], dict[str, Any]]:
        src, dst = self._types
        halos = self._exchange.halos
        size = (halos[src].num_own + halos[src].num_halo, halos[dst].num_own)
        return edge_index, size, self._extended(layer, kwargs, layer._user_args)

    def before_edge_updater(self, layer: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return self._extended(layer, kwargs, layer._edge_user_args)

    def _extended(self, layer: Any, kwargs: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """The arguments with the halo's rows where a source is looked at."""
        kwargs, src = dict(kwargs), self._types[0]
        pairs = self._sources(layer, kwargs, names)
        whole = self._halo_of(src, [value for value, _ in pairs.values()], layer.node_dim)
        for (name, (_, other)), found in zip(pairs.items(), whole, strict=True):
            kwargs[name] = (found, other)
        return kwargs

    def _sources(
        self, layer: Any, kwargs: dict[str, Any], names: list[str]
    ) -> dict[str, tuple[Tensor, Any]]:
        """The arguments that a layer looks at by the source of an edge: own rows of both ends."""
        src, dst = self._types
        pairs: dict[str, tuple[Tensor, Any]] = {}
        for name in ends_of(names, "_j"):
            value = kwargs.get(name)
            if isinstance(value, tuple | list) and isinstance(value[0], Tensor):
                pairs[name] = (value[0], value[1])
            elif isinstance(value, Tensor):
                pairs[name] = (value, value if src == dst else None)
        own = self._exchange.halos[src].num_own
        for name, (value, _) in pairs.items():
            if value.size(layer.node_dim) != own:
                raise ValueError(
                    f"{type(layer).__name__}: {name} has {value.size(layer.node_dim)} rows for "
                    f"{own} own nodes"
                )
        return pairs

    def _halo_of(self, node_type: NodeType, tensors: list[Tensor], dim: int) -> list[Tensor]:
        """Tensors with the halo's rows, of which those that are known are not sent again."""
        found = {id(tensor): self._known(tensor) for tensor in tensors}
        missing = {id(each): each for each in tensors if found[id(each)] is None}
        if missing:
            rows = [each.movedim(dim, 0) for each in missing.values()]
            constant = all(self.is_constant(each) for each in missing.values())
            send = self._exchange.exactly if constant else self._exchange.extend
            self._last = {}
            for tensor, whole in zip(missing.values(), send(node_type, rows), strict=True):
                found[id(tensor)] = whole = whole.movedim(0, dim)
                if self.is_constant(tensor):
                    self._kept[id(tensor)] = whole
                else:
                    self._last[id(tensor), tensor._version] = (tensor, whole)
        return [found[id(tensor)] for tensor in tensors]  # type: ignore[misc]

    def _known(self, tensor: Tensor) -> Tensor | None:
        """The rows sent before: in this layer (of other relations), or of the graph itself."""
        if self.is_constant(tensor) and id(tensor) in self._kept:
            return self._kept[id(tensor)]
        entry = self._last.get((id(tensor), tensor._version))
        return None if entry is None else entry[1]

    # Degrees ###############################################################################

    def replacements(self) -> dict[str, Callable[..., Any]]:
        return {"gcn_norm": self._gcn_norm}

    def _gcn_norm(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``gcn_norm`` of PyG for own nodes: their degrees are here, those of the halo are sent."""
        key = (id(edge_index), id(edge_weight), improved, add_self_loops, dtype)
        keeps = id(edge_index) in self._edge_types and edge_weight is None
        if keeps and key in self._norms:
            return self._norms[key]
        halo = self._exchange.halos[self._types[1]]
        if add_self_loops:
            fill = 2.0 if improved else 1.0
            edge_index, edge_weight = add_remaining_self_loops(
                edge_index, edge_weight, fill, halo.num_own
            )
        if edge_weight is None:
            edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
        src, dst = edge_index
        degree = scatter(edge_weight, dst, 0, dim_size=halo.num_own, reduce="sum")
        scale = degree.pow(-0.5)
        scale = scale.masked_fill(scale == float("inf"), 0.0)
        (whole,) = self._exchange.exactly(self._types[1], [scale])
        found = (edge_index, whole[src] * edge_weight * scale[dst])
        if keeps:
            self._norms[key] = found
        return found
