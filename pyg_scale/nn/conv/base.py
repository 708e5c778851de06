"""The contract of the kind ``conv``: a layer of PyG that also has a fused path.

A subclass of :class:`FusedConv` and of the class it replaces has the same constructor, parameters
and ``state_dict``, and its instances have no other attributes: :func:`pyg_scale.nn.accelerate`
converts an existing layer by replacing its class. Calls that the fused path does not cover (hooks
between message and aggregation, explanations, methods that a subclass overrides, unusual input)
take PyG's path and are counted: :func:`pyg_scale.nn.fallbacks`.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch_geometric.nn.conv import MessagePassing

from pyg_scale.nn.fallback import SMALL, NotFused, record
from pyg_scale.ops import fused
from pyg_scale.ops.colptr import recall
from pyg_scale.ops.lazy_rows import LazyRows

_HOOKS = [
    (family, f"_{family}_forward_pre_hooks", f"_{family}_forward_hooks")
    for family in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
]
_METHODS = ("message", "aggregate", "message_and_aggregate", "update", "edge_update")
# A small layer takes hardly longer than a look-up of every name in Python: these are one call, and
# Dynamo cannot follow it.
_methods_of = attrgetter(*_METHODS)
_watched_in = itemgetter(*(name for _, *names in _HOOKS for name in names), "_explain")
_hooks_in = itemgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_PROPAGATE = MessagePassing.propagate
_EDGE_UPDATER = MessagePassing.edge_updater


_GROUPING = 3
"""Number of message channels that take as long on PyG's path as grouping edges by one end."""


class FusedConv:
    """A layer with a fused path, and PyG's path for calls that it does not cover.

    Subclasses inherit from this class and then from the class that they replace, which they name as
    ``replaces``. They have two methods: ``forward``, with PyG's signature, which calls :meth:`run`
    with its arguments, and :meth:`fused`.

    Example::

        class MyConv(FusedConv, torch_geometric.nn.MyConv):
            replaces = torch_geometric.nn.MyConv
            propagate_type = {"x": Tensor}

            def forward(self, x, edge_index):
                return self.run(x, edge_index)

            def fused(self, x, edge_index):
                check_features(x)
                graph = edges_of(edge_index, x.size(0), x.size(0), self.flow)
                return aggregate(graph, self.lin(x))

    Attributes:
        replaces: The class of PyG.
        propagate_type: The arguments of ``propagate`` besides the edges, by name: otherwise PyG
            reads them from the source, and mistakes a subclass for a class of the same name.
        edge_updater_type: The same for ``edge_updater``, if there is one.
        crossover: The work from which on grouping the edges pays on the CPU: for edges in any
            order, and for those of a loader's batch. Calls with less take :attr:`fused_small`, or
            PyG's path. Work is the number of edges times that of channels
            (:meth:`message_channels`), less the channels that take as long as grouping the edges,
            by both ends or, in a batch, by one. It was measured for the layers that have one; for
            others it is 0, so all calls are fused.
        by_edge: The work up to which :attr:`fused_small` computes what it covers, in the same two
            cases, if it is faster than grouped edges beyond :attr:`crossover`.
        min_work: A value that replaces all of these, of a class or an instance; 0 fuses every call.
            ``None``: the measured values.
        reads_lazy: True if :meth:`fused` takes sources of a pair that are
            :class:`~pyg_scale.ops.lazy_rows.LazyRows`; destinations, and a single set of nodes, are
            always plain tensors.
        fused_small: A method as :meth:`fused`, for inputs too small to group their edges. It raises
            :class:`NotFused` with :data:`~pyg_scale.nn.fallback.SMALL` for what it does not cover.
            ``None``: PyG's path is as fast.
    """

    # Not annotated: annotations would hide those of PyG's class from torch.jit.script.
    replaces = type(None)
    min_work = None
    crossover = 0, 0
    by_edge = 0, 0
    reads_lazy = False
    fused_small = None

    # PyG's own method: an instance of the replaced class may have set a generated one on that
    # class, which does not support explanations.
    propagate = _PROPAGATE
    edge_updater = _EDGE_UPDATER

    def fused(self, *args: Any, **kwargs: Any) -> Any:
        """The result of ``forward``, without a tensor with a row of channels for every edge.

        Raises:
            NotFused: If the input is not covered; raised before any other work.
        """
        raise NotImplementedError(f"{type(self).__name__} has no fused path")

    def prepared(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """``forward((src, dst), edge_index)`` for small inputs, with the layer looked at once.

        The function computes the same bits without gradients. It must not be used any more once an
        attribute, a parameter, a submodule or a hook of the layer was replaced.

        Returns:
            ``None`` if nothing is gained.
        """
        return None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """``forward``, by a fused path if it covers this call, else by PyG's."""
        small = self._is_small(self.crossover, *args[:2])
        ways: list[Any] = [] if small else [self.fused]
        lazily = self.reads_lazy and not small
        if self.fused_small is not None and (small or self._is_small(self.by_edge, *args[:2])):
            ways.insert(0, self.fused_small)
            lazily = False
        if args and type(args[0]) in _MAYBE_LAZY:
            args = (_read(args[0], lazily), *args[1:])
        reason = unfusable(self) if ways else SMALL
        for compute in ways if reason is None else ():
            try:
                return compute(*args, **kwargs)
            except NotFused as found:
                reason = str(found)
        record(self, reason)  # type: ignore[arg-type]
        return self.replaces.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    def message_channels(self, x: Tensor) -> int:
        """Number of channels of PyG's message of an edge that the fused path saves.

        Args:
            x: Features of sources, ``[num_src, channels]``.
        """
        return x.shape[-1]

    def _is_small(self, crossover: tuple[int, int], x: Any, edge_index: Any) -> bool:
        """Return True if an input on the CPU has less work; False in a trace, whose sizes vary.

        It depends on sizes and on the origin of the edges, never on earlier calls: a resumed run
        takes the same paths as one that was not interrupted.
        """
        least = self.min_work
        of_edges, of_batches = crossover if least is None else (least, least)
        if of_edges == 0 or torch.compiler.is_compiling():
            return False
        if isinstance(x, tuple):
            x = x[0]
        if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor):
            return False
        # With int32 edges PyG's path raises, or has wrong gradients (torch 2.13).
        if edge_index.dtype is not torch.int64 or edge_index.layout is not torch.strided:
            return False
        if x.dim() == 0 or edge_index.dim() != 2 or not edge_index.is_cpu:
            return False
        num_edges, channels = edge_index.numel() >> 1, self.message_channels(x)
        if num_edges * (channels - 2 * _GROUPING) >= of_edges:
            return False
        return num_edges * (channels - _GROUPING) < of_batches or recall(edge_index) is None

    def __prepare_scriptable__(self) -> Any:
        """The object that ``torch.jit.script`` compiles: the layer itself, if it can."""
        if not hasattr(self, "_forward_of_pyg"):
            raise NotImplementedError(
                f"torch.jit.script cannot compile pyg_scale's {type(self).__name__}: first give "
                "its "
                "model PyG's layers back, pyg_scale.nn.restore(model)"
            )
        return self


class Made:
    """An instance of a class that is made when it is needed, from one of PyG's or the user's.

    Copies and pickles name the replaced class. Subclasses inherit from this class and then from
    ``replaces``, and name the function that makes them of it as ``made_by``.
    """

    replaces = type(None)
    made_by: Callable[[Any], Any]

    def __prepare_scriptable__(self) -> Any:
        """The plain object, which ``torch.jit.script`` compiles."""
        cls: Any = self.replaces
        plain = cls.__new__(cls)
        plain.__dict__.update(self.__dict__)
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        made, _, *rest = reduced
        if made is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        return new_of, (type(self).made_by, self.replaces), *rest


def new_of(made_by: Callable[[Any], Any], cls: type) -> Any:
    """An empty instance of the class that ``made_by`` makes of another."""
    made = made_by(cls)
    return made.__new__(made)


def unfusable(layer: Any) -> str | None:
    """The reason why a layer or its caller needs PyG's path; ``None`` if nothing does."""
    reason = observed(layer)
    if reason is not None:
        return reason
    cls, kept = type(layer), layer.__dict__
    if (
        torch.compiler.is_compiling()
        or not kept.keys().isdisjoint(_METHODS)
        or _methods_of(cls) != _methods_of(layer.replaces)
    ):
        for method in _METHODS:
            if method in kept or getattr(cls, method) is not getattr(layer.replaces, method):
                return f"{method} is overridden"
    if cls.propagate is not _PROPAGATE and not generated(cls.propagate):
        return "propagate is overridden"
    if cls.edge_updater is not _EDGE_UPDATER and not generated(cls.edge_updater):
        return "propagate is overridden"
    return None


def observed(layer: Any) -> str | None:
    """The reason why message passing must take PyG's own steps; ``None`` if nothing needs them.

    Args:
        layer: A layer of PyG, whatever methods it overrides.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return "torch.jit.trace"
    kept = layer.__dict__
    if torch.compiler.is_compiling() or any(_watched_in(kept)):
        if layer.explain:
            return "explain"
        for family, before, after in _HOOKS:
            if kept[before] or kept[after]:
                return f"{family} hook"
    if kept["_decomposed_layers"] > 1:
        return "decomposed_layers"
    if torch._C._functorch.maybe_current_level() is not None:
        return "torch.func"
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return "forward-mode differentiation"
    return None


def generated(method: Any) -> bool:
    """Return True if ``propagate`` or ``edge_updater`` is PyG's, or generated by PyG from it."""
    return method in (_PROPAGATE, _EDGE_UPDATER) or method.__module__.endswith(
        ("_propagate", "_edge_updater")
    )


def scriptable(replaced: type) -> Callable[..., Any]:
    """PyG's ``forward`` under another name, for ``torch.jit.script``.

    TorchScript cannot run our Python, so it compiles PyG's path of a layer.
    """
    forward = replaced.forward  # type: ignore[attr-defined]
    renamed = types.FunctionType(
        forward.__code__, forward.__globals__, "_forward_of_pyg", forward.__defaults__
    )
    renamed.__annotations__ = forward.__annotations__
    renamed.__module__ = forward.__module__
    return renamed


_MAYBE_LAZY = (LazyRows, tuple)


def _read(x: Any, keep_sources: bool) -> Any:
    """The features passed to a layer, with lazy ones gathered, but for sources of a pair."""
    if isinstance(x, LazyRows):
        return x.rows()
    if not any(isinstance(each, LazyRows) for each in x):
        return x
    kept = x[0] if keep_sources and x[0] is not x[-1] else None
    return tuple(
        each.rows() if isinstance(each, LazyRows) and each is not kept else each for each in x
    )


# First checks of fused paths ###############################################################

_FEATURES = (Tensor, torch.nn.Parameter, LazyRows)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def pair_of(x: Any) -> Any:
    """Features of sources and destinations: a pair as it is, the same tensor for both otherwise.

    Raises:
        NotFused: If they are neither.
    """
    if isinstance(x, Tensor):
        return x, x
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise NotFused(f"features are a {type(x).__name__}")
    return x


def check_features(*features: Tensor | None) -> None:
    """Accept only floating point matrices that fused ops support.

    Raises:
        NotFused: If not.
    """
    for x in features:
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise NotFused(f"features are a {type(x).__name__}")
        if type(x) not in _FEATURES and not torch.compiler.is_compiling():
            raise NotFused(f"features are a {type(x).__name__}")
        if x.layout != torch.strided:
            raise NotFused("features are sparse")
        if x.dim() != 2:
            raise NotFused("features are not of shape [num_nodes, channels]")
        if x.dtype not in _FLOATS:
            raise NotFused(f"features are {x.dtype}")
        if x.device.type == "cuda":
            if not fused.usable(x):
                raise NotFused("there are no kernels for this CUDA device")
        elif x.device.type != "cpu":
            raise NotFused(f"device {x.device.type}")


def check_weight(weight: Tensor | None, num_edges: int, dtype: torch.dtype) -> None:
    """Accept only edge weights that keep the type of the features.

    Raises:
        NotFused: If not.
    """
    if weight is None:
        return
    if weight.dim() != 1 or weight.size(0) != num_edges:
        raise NotFused("edge_weight is not of shape [num_edges]")
    if not weight.is_floating_point() or torch.promote_types(weight.dtype, dtype) != dtype:
        raise NotFused(f"edge_weight is {weight.dtype}, the features are {dtype}")


def _has_hooks(module: torch.nn.Module) -> bool:
    if not torch.compiler.is_compiling():
        return any(_hooks_in(module.__dict__))
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def untouched(module: torch.nn.Module, kind: type) -> bool:
    """Return True if a submodule is exactly of a class, and has no hooks or wrappers."""
    return type(module) is kind and not (
        "forward" in module.__dict__  # set on the instance, as libraries that wrap layers do
        or _has_hooks(module)
        or torch.nn.modules.module._has_any_global_hook()
    )
