"""Any message passing layer, with its own ``message`` run on nodes' features that are not gathered.

A class of the user, or one of PyG's without a replacement of its own, gets a subclass with another
``propagate``. It collects the arguments of the layer's ``message`` as PyG does, but what PyG
gathers stays :class:`~pyg_scale.nn.lifted.Lifted`. If the message is still a weighted row of
features, one fused op reduces it. Otherwise it is computed chunk by chunk of edges
(:mod:`pyg_scale.nn.chunks`) if each edge is computed by itself, and else at once, on grouped edges.
``forward``, ``update`` and everything else are the layer's own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric import nn as pyg
from torch_geometric.nn import aggr
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Size

from pyg_scale.errors import KernelsError
from pyg_scale.nn.aggregation import LINEAR, REDUCTIONS, reductions
from pyg_scale.nn.by_ends import by_ends
from pyg_scale.nn.by_number import by_number, stepwise
from pyg_scale.nn.by_relation import EdgeTypes, by_relation
from pyg_scale.nn.chunks import ELEMENTS, LEAST, Messages
from pyg_scale.nn.conv.base import FusedConv, Made, generated, observed, untouched
from pyg_scale.nn.conv.supergat import SuperGATForward, has_its_loss
from pyg_scale.nn.edges import DESTINATION, Asked, Edges, sum_edges
from pyg_scale.nn.fallback import RECORDED, SMALL, NotFused, record
from pyg_scale.nn.gathered import Steps, propagate_gathered, steps_of
from pyg_scale.nn.graph import is_sparse
from pyg_scale.nn.lifted import EdgeIndices, Lifted, lift, rows
from pyg_scale.nn.small import reduce_small, small, small_weight
from pyg_scale.nn.writes import NotUndone, Writes
from pyg_scale.ops.aggregate import FLOATS

_OWN = ("_lift", "_collect", "_check_input", "_set_size", "_index_select")
"""Methods behind ``propagate`` that this module relies on."""


_WIDE = 256
"""Channels that an edge is taken to have before features are looked at."""

_BY_DESTINATION = {
    aggr.SumAggregation,
    aggr.MeanAggregation,
    aggr.MaxAggregation,
    aggr.MinAggregation,
    aggr.MulAggregation,
    aggr.VarAggregation,
    aggr.StdAggregation,
    aggr.SoftmaxAggregation,
    aggr.PowerMeanAggregation,
    aggr.DegreeScalerAggregation,
    aggr.MultiAggregation,
}


class TracedConv(Made, FusedConv):
    """A layer whose ``propagate`` is fused; ``forward`` is that of the class it replaces.

    Made by :func:`traced`.
    """

    crossover = 2_500_000, 1_660_000
    adds_rows = ""
    """A key of ``_MESSAGES`` if that is the code of ``message``, and nothing follows the sum."""
    weight_name = ""
    """The argument of that ``message`` that weighs edges, if it has one."""
    steps: Steps | None = None
    """The functions of the class, looked up in its first small call."""

    def propagate(self, edge_index: Any, size: Size = None, **kwargs: Any) -> Any:
        """See PyG. ``[num_dst, ...]``."""
        few = self._is_few(edge_index)
        x = None if few else self._widest(kwargs)
        small = few or self._is_small(self.crossover, x, edge_index)
        reason: str | None = SMALL
        if self.adds_rows and (small or self._is_small(self.by_edge, x, edge_index)):
            try:
                out = self._sum(edge_index, size, kwargs)
                if out is not None:
                    return out
            except NotFused:
                pass
        if small:
            steps = self.steps
            if steps is None:
                steps = type(self).steps = steps_of(self)
            try:
                return propagate_gathered(self, steps, edge_index, size, kwargs)
            except NotFused as found:
                reason = str(found)
        else:
            reason = RECORDED if torch.compiler.is_compiling() else observed(self)
        if reason is None:
            try:
                return _propagate(self, edge_index, size, kwargs)
            except NotFused as found:
                reason = str(found)
            except (KernelsError, NotUndone):
                raise
            except Exception as error:
                # PyG's path raises it again if it is the caller's. What the message changed is
                # undone, as code may need rows that no function of torch asks for: a script does.
                reason = f"message raised {type(error).__name__} on features not gathered"
        record(self, reason)  # type: ignore[arg-type]
        if self.explain or self.decomposed_layers > 1:  # type: ignore[attr-defined]
            return MessagePassing.propagate(self, edge_index, size, **kwargs)
        return self.replaces.propagate(self, edge_index, size=size, **kwargs)  # type: ignore[attr-defined]

    _orig_propagate = _jinja_propagate = propagate  # set on instances that are explained, or not

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Keep ``propagate`` as it is."""

    def _lift(self, src: Tensor, edge_index: Any, dim: int) -> Tensor:
        if isinstance(edge_index, EdgeIndices):
            return lift(edge_index.edges, src, dim)
        return super()._lift(src, edge_index, dim)  # type: ignore[misc]

    def _is_few(self, edge_index: Any) -> bool:
        """Return True if there are so few edges that it does not matter what messages are."""
        return (
            self.min_work is None
            and type(edge_index) is Tensor
            and not torch.compiler.is_compiling()  # in a trace sizes are not known
            and (edge_index.numel() >> 1) * _WIDE < self.crossover[0]
            and edge_index.dtype is torch.int64
            and edge_index.is_cpu
        )

    def _sum(self, edge_index: Tensor, size: Size, kwargs: dict[str, Any]) -> Tensor | None:
        """``propagate`` of a layer that :attr:`adds_rows`; ``None`` if it does more in this call.

        Raises:
            NotFused: If the call is not covered.
        """
        kept = self.__dict__
        how = REDUCTIONS.get(type(kept["_modules"]["aggr_module"]))
        weight = kwargs.get(self.weight_name)
        if how is None or "x" not in kwargs:
            return None
        if self.adds_rows == _WEIGHTED if weight is None else how not in LINEAR:
            return None
        if "message" in kept or "aggregate" in kept or "update" in kept:
            return None
        if observed(self) is not None:
            return None
        call = small(self, kwargs["x"], edge_index, size)
        return reduce_small(call, small_weight(weight, call))

    def message_channels(self, x: Tensor) -> int:
        """See :meth:`FusedConv.message_channels`."""
        node_dim: int = self.node_dim  # type: ignore[attr-defined]
        return x.numel() // max(x.size(node_dim), 1)

    def _widest(self, kwargs: dict[str, Any]) -> Tensor | None:
        """The features of sources with the most channels among the arguments of ``propagate``."""
        found: Tensor | None = None
        for name in self._user_args:  # type: ignore[attr-defined]
            x = kwargs.get(name[:-2]) if name.endswith("_j") else None
            x = x[0] if isinstance(x, (tuple, list)) and x else x
            if not isinstance(x, Tensor) or x.dim() < max(1, -self.node_dim):  # type: ignore[attr-defined]
                continue
            if found is None or self.message_channels(x) > self.message_channels(found):
                found = x
        return found


@functools.cache
def traced(cls: type[MessagePassing]) -> type[TracedConv]:
    """The subclass of a message passing layer with a fused ``propagate``.

    Args:
        cls: Any class of layers, PyG's or yours.

    Returns:
        A class of the same name, parameters and ``state_dict``; made once.
    """
    kept = cls.aggregate is MessagePassing.aggregate and cls.update is MessagePassing.update
    form, weight_name = _form(cls.message) if kept else ("", "")
    body: dict[str, Any] = {
        "replaces": cls,
        "made_by": staticmethod(traced),
        "adds_rows": form,
        "weight_name": weight_name,
        "crossover": _CROSSOVERS.get(cls, _OF_SUMS if form else TracedConv.crossover),
        "by_edge": _BY_EDGE if form else TracedConv.by_edge,
        "steps": None,
        "edge_updater": cls.edge_updater,
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    bases = (SuperGATForward, TracedConv, cls) if has_its_loss(cls) else (TracedConv, cls)
    return type(cls.__name__, bases, body)


def _rows(self: Any, x_j: Tensor) -> Tensor:
    return x_j


def _weighted_rows(self: Any, x_j: Tensor, edge_weight: Tensor) -> Tensor:
    return edge_weight.view(-1, 1) * x_j


def _rows_with_or_without_weights(self: Any, x_j: Tensor, edge_weight: Any) -> Tensor:
    return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j


_OF_SUMS, _BY_EDGE = (400_000, 250_000), (2_000_000, 2_000_000)
_PLAIN, _WEIGHTED, _EITHER = "rows", "weighted rows", "rows with or without weights"
_MESSAGES = {_PLAIN: _rows, _WEIGHTED: _weighted_rows, _EITHER: _rows_with_or_without_weights}


def _form(message: Any) -> tuple[str, str]:
    """The key of ``_MESSAGES`` whose code a message has, and the name of its weights of edges.

    Both are empty if it does anything else. The weights may have any name that PyG does not give a
    meaning to.
    """
    code = getattr(message, "__code__", None)
    if code is None or any(each is not None for each in message.__defaults__ or ()):
        return "", ""
    for form, other in _MESSAGES.items():
        if any(getattr(code, name) != getattr(other.__code__, name) for name in _OF_CODE):
            continue
        _, x, *weights = code.co_varnames
        name = weights[0] if weights else ""
        if x == "x_j" and name[-2:] not in ("_i", "_j") and name not in _GIVEN:
            return form, name
    return "", ""


_OF_CODE = ("co_code", "co_consts", "co_names", "co_argcount", "co_nlocals", "co_freevars")
_GIVEN = {"edge_index", "index", "ptr", "adj_t", "size", "dim_size"}

_FIRST, _EARLY = (90_000, 60_000), (115_000, 77_000)
_SOON, _LATER = (600_000, 400_000), (1_200_000, 800_000)
_CUT = (LEAST * ELEMENTS, LEAST * ELEMENTS)  # where edges are cut into chunks, which saves memory
_CROSSOVERS: dict[type, tuple[int, int]] = {
    **dict.fromkeys((pyg.EdgeConv, pyg.PointNetConv, pyg.PointGNNConv), _FIRST),
    **dict.fromkeys((pyg.FeaStConv, pyg.PPFConv), _EARLY),
    pyg.FastRGCNConv: (30_000, 20_000),
    pyg.RGATConv: (52_000, 35_000),
    **dict.fromkeys((pyg.ARMAConv, pyg.EGConv), (200_000, 130_000)),
    pyg.GMMConv: (450_000, 300_000),
    **dict.fromkeys((pyg.AGNNConv, pyg.GENConv, pyg.HEATConv, pyg.HGTConv), _SOON),
    **dict.fromkeys((pyg.HypergraphConv, pyg.LEConv, pyg.NNConv), _SOON),
    **dict.fromkeys((pyg.PNAConv, pyg.SuperGATConv), _SOON),
    **dict.fromkeys((pyg.FAConv, pyg.FiLMConv, pyg.HANConv, pyg.ResGatedGraphConv), _LATER),
    pyg.GINEConv: (2_000_000, 1_330_000),
    pyg.GeneralConv: (3_000_000, 2_000_000),
    pyg.CGConv: (5_000_000, 3_330_000),
    **dict.fromkeys((pyg.DNAConv, pyg.PointTransformerConv), _CUT),
}
"""The work from which on grouping edges pays in some layers of PyG: as measured for edges in any
order, and two thirds of that, not measured, for those of a batch."""


def why_not_traced(layer: MessagePassing) -> str:
    """The reason why a layer cannot have a fused ``propagate``; empty if it can."""
    cls = type(layer)
    own = layer.__dict__.get("propagate", cls.propagate)  # PyG sets it on layers that are explained
    if not generated(cls.propagate) or not generated(getattr(own, "__func__", own)):
        return "propagate is overridden"
    for name in _OWN:
        if getattr(cls, name) is not getattr(MessagePassing, name):
            return f"{name} is overridden"
    return ""


def _propagate(layer: Any, edge_index: Any, size: Size, kwargs: dict[str, Any]) -> Any:
    """PyG's ``MessagePassing.propagate``, but messages are not gathered before they must be."""
    if is_sparse(edge_index):
        raise NotFused("a sparse matrix")
    sizes = layer._check_input(edge_index, size)
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise NotFused("edge_index is not an int64 or int32 tensor")
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index._data  # the inner tensor, one object while edge_index lives
    edges = Edges(edge_index, sizes, layer.flow, layer.node_dim)
    edges.other_rules = by_ends, by_relation, by_number
    _check_given(layer, kwargs)
    found = layer._collect(layer._user_args, EdgeIndices.of(edge_index, edges), sizes, kwargs)
    for name in layer._user_args:
        if name[-2:] in ("_i", "_j") and not isinstance(found[name], Tensor):
            found[name] = None  # as in the code that PyG generates
    collect = layer.inspector.collect_param_data
    edges.group()  # refuses what is invalid before the layer's own code runs
    message, given = collect("message", found), collect("aggregate", found)
    message = {name: EdgeTypes.of(value, edges) for name, value in message.items()}

    messages = Messages(layer, edges, message, given, _aggregate)
    reason = messages.reason() if _is_by_destination(layer) else ""
    others = collect("update", found)
    found.clear()
    lazy = [] if reason is None else [*message.values(), *given.values(), *others.values()]
    with Writes(layer, kwargs, lazy) as writes:
        if reason is None:
            out = messages.sums()
        else:
            out = _aggregate(layer, edges, layer.message(**message), given)
            asked = edges.asked
            if asked.needed_by and 2 * asked.gathered > asked.widest:  # not for a number per head
                record(layer, reason or _gathered(asked))
                messages.forget()
        out = layer.update(out, **others)
        if reason is not None:  # chunks are computed again for gradients
            for each in (lazy, message, given, others):
                each.clear()
            writes.finish()
            out = rows(out)  # of the layer's own aggregation
    return out


def _check_given(layer: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a call without the features of an argument of the layer's functions."""
    for name in layer._user_args:
        if name[-2:] in ("_i", "_j") and name[:-2] not in kwargs:
            raise NotFused(f"{name[:-2]} is not passed to propagate")  # and PyG says so


def _gathered(asked: Asked) -> str:
    why = f": {asked.not_fused}" if asked.not_fused else ""
    return f"rows of features gathered for {asked.needed_by}{why}"


def _is_by_destination(layer: Any) -> bool:
    """Return True if a layer is known to aggregate the messages of each destination by itself."""
    if type(layer).aggregate is not MessagePassing.aggregate or "aggregate" in layer.__dict__:
        return False
    modules = [layer.aggr_module]
    if isinstance(layer.aggr_module, aggr.MultiAggregation):
        modules += layer.aggr_module.aggrs
    return all(type(each) in _BY_DESTINATION for each in modules)


def _aggregate(layer: Any, edges: Edges, out: Tensor, given: dict[str, Any]) -> Any:
    """The layer's ``aggregate``; PyG's without the rows of messages, where it needs none."""
    if type(layer).aggregate is not MessagePassing.aggregate or "aggregate" in layer.__dict__:
        return layer.aggregate(out, **given)
    module = layer.aggr_module
    if isinstance(out, Lifted):
        found = _softmax(module, out) if _is_softmax(module) else None
        if found is not None:
            return found
    try:
        how = reductions(layer)
    except NotFused:
        values = out if _needs_no_rows(module) else rows(out)
        return MessagePassing.aggregate(layer, values, **given)
    outs = [_reduced(edges, out, layer.node_dim, each) for each in how]
    return module.combine(outs) if len(outs) > 1 else outs[0]


def _needs_no_rows(module: Any) -> bool:
    """Return True for an aggregation of PyG's that runs on messages which are not gathered."""
    kind = type(module)
    if not untouched(module, kind):
        return False
    if kind is aggr.DegreeScalerAggregation:
        return _needs_no_rows(module.aggr)
    if kind is aggr.MultiAggregation:
        return all(map(_needs_no_rows, module.aggrs))
    if kind is aggr.StdAggregation:
        return _needs_no_rows(module.var_aggr)
    return kind in REDUCTIONS or (kind is aggr.VarAggregation and not module.semi_grad)


def _is_softmax(module: Any) -> bool:
    return untouched(module, aggr.SoftmaxAggregation) and not module.semi_grad


def _softmax(module: Any, out: Lifted) -> Tensor | None:
    """PyG's ``SoftmaxAggregation``; ``None`` if it does not fit the messages."""
    rows_of_steps = stepwise(out)
    if rows_of_steps is None:
        return None
    out, scale = rows_of_steps, module.t
    if isinstance(scale, Tensor):
        fits = scale.dtype is out.dtype and scale.numel() in (1, *out.shape[-1:])
        return out.reduced("softmax", scale.view(-1)) if fits else None
    return out.reduced("softmax", float(scale))


def _reduced(edges: Edges, out: Tensor, node_dim: int, reduce: str) -> Tensor:
    if isinstance(out, Lifted) and not out.is_changed:
        found = out.reduced(reduce)
        if found is not None:
            return found
    values = rows(out)
    if values.dtype not in FLOATS or values.layout != torch.strided:
        raise NotFused(f"messages are {values.dtype}")
    dim = values.dim() + node_dim if node_dim < 0 else node_dim
    if not 0 <= dim < values.dim() or values.size(dim) != edges.num_edges:
        raise NotFused("messages are not of shape [num_edges, ...]")
    return sum_edges(edges.graph, values, dim, DESTINATION, reduce)
