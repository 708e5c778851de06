"""Stock layers on a share of a graph: what surrounds the exchange before every ``propagate``.

Layers of PyG compute on own nodes alone. Only where they look at the other end of an edge do they
get the halo's rows: in ``propagate`` and ``edge_updater``. Two more things look beyond: degrees
(``gcn_norm``) and statistics over nodes (``BatchNorm``), which are those of the whole graph here.
All other layers that look beyond are refused by name.
"""

from __future__ import annotations

import dis
import functools
import sys
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

from pyg_scale.parallel.peers import Peers
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

_OF_OUT_EDGES: dict[type, str] = {
    pyg.DirGNNConv: (
        "also follows edges the other way, and a rank has the in-edges of its nodes: use "
        "'feature', or add the edges the other way to the graph before it is partitioned"
    ),
    pyg.HypergraphConv: (
        "follows hyperedges, which are no nodes of a graph: let them be nodes of another type, "
        "with a layer each way"
    ),
}
"""Layers that need the out-edges of nodes, too, and the reason."""

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
    within = inside_convs(module)
    for name, layer in module.named_modules():
        what = f"{type(layer).__name__} ({name or 'the model itself'})"
        reason = _reason(layer, layer in within)
        if reason:
            raise ValueError(f"{what} {reason}")


def inside_convs(module: nn.Module) -> set[nn.Module]:
    """The modules within layers that follow edges, which are not given edges."""
    return {
        inner
        for layer in module.modules()
        if isinstance(layer, MessagePassing)
        for inner in layer.modules()
        if inner is not layer
    }


def check_directions(module: nn.Module) -> None:
    """Refuse layers that need out-edges of nodes, where a rank has the in-edges of its own.

    Raises:
        ValueError: If there is one; names it.
    """
    for name, layer in module.named_modules():
        for kind, reason in _OF_OUT_EDGES.items():
            if isinstance(layer, kind):
                raise ValueError(f"{type(layer).__name__} ({name or 'the model itself'}) {reason}")


def check_convs(module: nn.Module, suits: Callable[[Any], bool], reason: str) -> None:
    """Refuse layers that follow edges and do not suit.

    Raises:
        ValueError: If there is one; names it and the reason.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, MessagePassing) and not suits(layer):
            raise ValueError(f"{type(layer).__name__} ({name or 'the model itself'}) {reason}")


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
    beyond = _named(type(layer), MessagePassing) & {*_OF_ALL_NODES, "gcn_norm", "get_laplacian"}
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


def called_of_pyg(layer: nn.Module) -> set[str]:
    """Names of functions of PyG that the methods of a module use, if these are not PyG's."""
    functions = [function for _, function in _methods(type(layer), MessagePassing)]
    functions += [each for each in vars(layer).values() if isinstance(each, types.FunctionType)]
    found: set[str] = set()
    for function in functions:
        if not _is_of_pyg(function):
            found |= _called_of_pyg(function)
        elif function in vars(layer).values():  # a step of `Sequential`
            found.add(function.__name__)
    return found


def _called_of_pyg(function: types.FunctionType) -> set[str]:
    """Names of functions of PyG that a function loads: globals, of modules, or imported in it."""
    found: set[str] = set()
    held: Any = None  # by the last instruction
    for step in dis.get_instructions(function):
        value: Any = None
        if step.opname == "LOAD_GLOBAL":
            held = value = function.__globals__.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):  # a method of a tensor is none of PyG's
            held = value = getattr(held, step.argval, None) if _is_module(held) else None
        elif step.opname == "IMPORT_NAME":
            held = sys.modules.get(step.argval)
        elif step.opname == "IMPORT_FROM":
            value = getattr(held, step.argval, None)
        elif not step.opname.startswith("STORE"):  # of an imported name others may follow
            held = None
        if isinstance(value, types.FunctionType) and _is_of_pyg(value):
            found.add(value.__name__)
    return found


def _is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType)


def _is_of_pyg(function: types.FunctionType) -> bool:
    return (function.__module__ or "").startswith("torch_geometric.")


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
    def propagate(self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]) -> Any:
        """The result of ``propagate`` for own nodes.

        Args:
            layer: The layer.
            edge_index: Edges ``[2, num_edges]`` by local numbers.
            kwargs: The arguments, with rows of own nodes.
        """

    @abstractmethod
    def update_edges(self, layer: Any, edge_index: Tensor, kwargs: dict[str, Any]) -> Any:
        """The result of ``edge_updater``, likewise."""

    @abstractmethod
    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Functions that layers get instead of PyG's, by their global names."""

    def attributes(self, layer: Any) -> dict[str, Any]:
        """Attributes that a layer has while it is attached."""
        return {}

    def hooked(self, conv: MessagePassing) -> list[Any]:
        """Handles of the hooks of a layer."""
        return []

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
                # In the place of hooks: PyG's own come before both, or too late.
                for name, follow in (
                    ("propagate", self.propagate),
                    ("edge_updater", self.update_edges),
                ):
                    self._replace(stack, conv, name, functools.partial(_follow, follow, conv))
                of = type(conv)
                if isinstance(conv, Fused):  # there is no place for an exchange in a fused path
                    of = conv.replaces
                    self._replace(stack, conv, "forward", types.MethodType(of.forward, conv))
                for name, function in _methods(of, MessagePassing):
                    if replaced.keys() & set(function.__code__.co_names):
                        self._replace(stack, conv, name, with_globals(conv, function, replaced))
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


def _follow(
    follow: Callable[..., Any], layer: Any, edge_index: Tensor, size: Any = None, **kwargs: Any
) -> Any:
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        raise TypeError(f"{type(layer).__name__}: edge_index must be a dense tensor")
    return follow(layer, edge_index, kwargs)


def ends_of(names: Sequence[str], end: str) -> list[str]:
    """Arguments that a method looks at by one end of an edge, ``"_i"`` or ``"_j"``."""
    return sorted({name.removesuffix(end) for name in names if name.endswith(end)})


def with_globals(
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
