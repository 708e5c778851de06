"""Conversion of the layers of an existing model to fused ones, in place, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import MessagePassing

from pyg_scale import plugins
from pyg_scale.errors import PluginError
from pyg_scale.nn.conv.base import FusedConv, observed, unfusable
from pyg_scale.nn.conv.traced import TracedConv, traced, why_not_traced
from pyg_scale.nn.fallback import fallbacks
from pyg_scale.nn.linear import LINEAR_MAPS, LinearMap
from pyg_scale.nn.trim import TrimAhead, TrimmedGNN, is_trimmable, trimmed
from pyg_scale.ops import dense_product


@dataclass(frozen=True)
class Layer:
    """The result of accelerating one layer.

    Attributes:
        name: Its name in the model, ``""`` for the model itself.
        type: Name of its class in PyG.
        switched: True if it now has a fused path.
        reason: The reason why it has none, or why, in its present state, it takes PyG's path
            anyway. Else empty.
        traced: True if the layer's own code runs, and only its ``propagate`` is fused
            (:mod:`pyg_scale.nn.conv.traced`).
    """

    name: str
    type: str
    switched: bool
    reason: str = ""
    traced: bool = False


@dataclass
class Acceleration:
    """The result of :func:`accelerate`; printing it shows a table.

    Attributes:
        layers: One entry for each message passing layer, in the order of the model.
        failures: Replacements that could not be loaded, and why.
        trimmed: Names of the models of PyG, ``""`` for the model itself, of which layers compute
            no rows that ``trim_to_layer`` would cut off (:mod:`pyg_scale.nn.trim`).
        linear_maps: Number of linear layers of the model, those within other layers included, that
            have faster products now; 0 on processors whose products torch computes as fast
            (:mod:`pyg_scale.ops.dense_product`).
    """

    layers: list[Layer]
    failures: list[str]
    trimmed: list[str]
    linear_maps: int
    _model: nn.Module = field(repr=False)
    _was: dict[nn.Module, type[nn.Module]] = field(repr=False)

    @property
    def num_switched(self) -> int:
        """Number of layers that have a fused path now."""
        return sum(layer.switched for layer in self.layers)

    def restore(self) -> None:
        """Give the switched layers their own classes back; a second call does nothing."""
        for module, cls in self._was.items():
            _give_back(module, cls)
        self._was.clear()

    def fallbacks(self) -> dict[str, dict[str, int]]:
        """The calls in which layers of the model took PyG's path so far, by reason."""
        return fallbacks(self._model)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "layers": [vars(layer) for layer in self.layers],
            "num_switched": self.num_switched,
            "failures": list(self.failures),
            "trimmed": list(self.trimmed),
            "linear_maps": self.linear_maps,
            "fallbacks": self.fallbacks(),
        }

    def __str__(self) -> str:
        if not self.layers:
            return "no message passing layers"
        calls = self.fallbacks()
        rows = [("layer", "type", "fused", "why not")]
        for layer in self.layers:
            counted = [f"{why} ({n} calls)" for why, n in calls.get(layer.name, {}).items()]
            reasons = "; ".join(filter(None, [layer.reason, *counted]))
            name = layer.name or "(model)"
            how = "messages" if layer.traced else "yes" if layer.switched else "no"
            rows.append((name, layer.type, how, reasons))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines += [f"trimmed ahead: {name or '(model)'}" for name in self.trimmed]
        if self.linear_maps:
            lines.append(f"linear maps: {self.linear_maps}")
        lines += [f"could not be loaded: {failure}" for failure in self.failures]
        return "\n".join(lines)


def accelerate(
    model: nn.Module, convs: Iterable[str | type] = (), *, min_work: int | None = None
) -> Acceleration:
    """Give every message passing layer of a model a fused path, in place.

    The class of a layer becomes the replacement, a subclass of it; parameters, buffers, hooks,
    ``state_dict`` and existing optimizers stay as they are. Layers in containers are found too
    (``Sequential``, ``HeteroConv``, ``to_hetero``, models of PyG). Results are PyG's up to
    rounding. A layer without a replacement, yours or PyG's, or of a subclass, keeps its ``forward``
    and ``message``, and its ``propagate`` is fused (:mod:`pyg_scale.nn.conv.traced`). On the CPU,
    calls with so few edges and channels that PyG's path is faster take it;
    :func:`~pyg_scale.nn.fallbacks` counts them as ``"small input"``. PyG's models (``GraphSAGE``,
    ``GIN``, ``GAT``, ...) that are called with ``num_sampled_nodes_per_hop`` and
    ``num_sampled_edges_per_hop`` compute no rows that are cut off after a layer
    (:mod:`pyg_scale.nn.trim`). On processors of AMD with AVX-512, linear layers of a model that has
    message passing layers become :class:`~pyg_scale.nn.linear.LinearMap`, with faster products.

    Args:
        model: Any module.
        convs: Replacements to prefer, by name of the kind ``conv``, as ``provider:name``, or as
            classes; all installed ones follow.
        min_work: Number of edges times channels from which on calls are fused; 0: always. ``None``:
            the value measured for the kind of layer (:class:`~pyg_scale.nn.conv.base.FusedConv`).
            Also the number of rows times channels from which on rows that would be cut off are
            left out.

    Returns:
        A report for each layer, with ``restore()``.

    Raises:
        TypeError: If ``model`` is not a module, is compiled or scripted, or one of ``convs`` is not
            a :class:`~pyg_scale.nn.conv.base.FusedConv`.
        UnknownPluginError: If no plugin provides one of the names.
        ValueError: If ``min_work`` is negative.
    """
    if min_work is not None and min_work < 0:
        raise ValueError(f"min_work must be a number of edges times channels (got {min_work})")
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise TypeError("the model is already compiled: accelerate it before compiling")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module (got {type(model).__name__})")
    failures: list[str] = []
    found = replacements(convs, failures)
    layers: list[Layer] = []
    trims: list[str] = []
    was: dict[nn.Module, type[nn.Module]] = {}
    module: Any
    for name, module in model.named_modules():
        if is_trimmable(module):
            trims.append(name)
            if not isinstance(module, TrimmedGNN):
                was[module], was[module._trim] = type(module), type(module._trim)
                cls: Any = type(module)
                module.__class__, module._trim.__class__ = trimmed(cls), TrimAhead
            _set_min_work(module._trim, min_work)
        if not isinstance(module, MessagePassing):
            continue
        cls = type(module)
        now: str | None
        if isinstance(module, FusedConv):
            now = "" if module in was else "has a fused path already"
            _set_min_work(module, min_work)
            is_traced = isinstance(module, TracedConv)
            layers.append(Layer(name, cls.__name__, True, now, is_traced))
            continue
        replacement = found.get(cls)
        if replacement is None:
            reason = why_not_traced(module)
            if reason:
                layers.append(Layer(name, cls.__name__, False, reason))
                continue
            replacement = traced(cls)
        module.__class__ = replacement
        was[module] = cls
        _set_min_work(module, min_work)
        _use_templates(module)
        now = observed(module) if isinstance(module, TracedConv) else unfusable(module)
        layers.append(Layer(name, cls.__name__, True, now or "", isinstance(module, TracedConv)))
    mapped = layers and dense_product.pays()
    linear = [module for module in model.modules() if mapped and type(module) in LINEAR_MAPS]
    for module in linear:
        was[module] = type(module)
        module.__class__ = LINEAR_MAPS[type(module)]
    return Acceleration(layers, failures, trims, len(linear), model, was)


def restore(model: nn.Module) -> int:
    """Give every fused layer of a model the class of PyG that it replaces.

    It works on any model, including one that was built from layers of :mod:`pyg_scale.nn`.

    Returns:
        Number of layers that were changed.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, FusedConv) and type(module).replaces in type(module).__bases__:
            _give_back(module, type(module).replaces)
            count += 1
        elif isinstance(module, (TrimmedGNN, LinearMap)):
            _give_back(module, module.replaces)
        elif isinstance(module, TrimAhead):
            _give_back(module, TrimAhead.__base__)
    return count


def _give_back(module: nn.Module, cls: Any) -> None:
    """Give a module its own class back."""
    module.__class__ = cls
    _set_min_work(module, None)
    if isinstance(module, MessagePassing):
        _use_templates(module)


def replacements(convs: Iterable[str | type], failures: list[str]) -> dict[type, type]:
    """The fused class for each class of PyG that has one.

    Args:
        convs: Replacements to prefer, see :func:`accelerate`.
        failures: Gets a line for every installed one that cannot be loaded or is not a fused layer.
    """
    if isinstance(convs, (str, type)):
        convs = [convs]
    found: dict[type, type] = {}
    for each in convs:
        cls: Any = plugins.get("conv", each) if isinstance(each, str) else each
        problem = _problem(cls)
        if problem:
            raise TypeError(f"convs has {each!r}, but {problem}")
        found.setdefault(cls.replaces, cls)
    for entry in plugins.entries("conv"):
        try:
            cls = entry.load()
        except PluginError as error:
            failures.append(str(error))
            continue
        problem = _problem(cls)
        if problem:
            failures.append(f"conv {entry.name!r} of {entry.provider}: {problem}")
        else:
            found.setdefault(cls.replaces, cls)
    return found


def _problem(cls: Any) -> str:
    """The reason why a class cannot replace that of an instance; empty if it can."""
    if not isinstance(cls, type) or not issubclass(cls, FusedConv):
        return f"{cls!r} is not a subclass of pyg_scale.nn.FusedConv"
    replaces = getattr(cls, "replaces", None)
    if not isinstance(replaces, type) or not issubclass(cls, replaces):
        return f"{cls.__name__}.replaces is not a class that {cls.__name__} inherits from"
    return ""


def _set_min_work(module: Any, min_work: int | None) -> None:
    """Keep the ``min_work`` of :func:`accelerate` in the layer, so that copies have it too."""
    if min_work is None:
        module.__dict__.pop("min_work", None)
    else:
        module.__dict__["min_work"] = min_work


def _use_templates(module: Any) -> None:
    """Have PyG generate ``propagate`` for a class that has no instance yet.

    Once only: for an instance that is explained, PyG would take the generated one for its own.
    """
    cls = type(module)
    if "_jinja_propagate" not in cls.__dict__:
        module._set_jittable_templates()
    if "propagate" in module.__dict__:  # set by PyG, of the class before
        is_whole = module.explain or module.decomposed_layers > 1
        own = cls._orig_propagate if is_whole else cls._jinja_propagate
        module.propagate = own.__get__(module, MessagePassing)
