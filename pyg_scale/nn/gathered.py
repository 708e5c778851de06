"""PyG's steps of message passing with little Python around them, for small inputs of any layer.

A step of a small model takes as long as its Python code. PyG's ``propagate`` checks its input, asks
for hooks before and after every step, packs arguments, calls a module that calls ``scatter``, which
checks again. Here the arguments of a layer's functions are looked up once for each class, one check
answers for all hooks, and sums, means and extremes are the one or two calls of torch that they are.
A softmax divides the sums of a node, not the weight of each edge.
``message``, ``update`` and every other aggregation are the layer's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import nn as pyg
from torch_geometric.nn import aggr
from torch_geometric.nn.conv import MessagePassing

from pyg_scale.nn.aggregation import REDUCTIONS
from pyg_scale.nn.conv.base import observed, untouched
from pyg_scale.nn.fallback import SMALL, NotFused


class Steps(NamedTuple):
    """The functions of a class of layers, and the arguments that each gets."""

    gathered: tuple[tuple[str, str, bool], ...]
    """Of every argument with rows of nodes: its name, that of the nodes' features, and True if
    they are those of sources."""
    message: tuple[str, ...]
    aggregate: tuple[str, ...]
    update: tuple[str, ...]
    given: Callable[[dict[str, Any]], tuple[Any, ...]]
    """The values of all these, one after the other, out of those of every name."""
    reduces: bool
    """True if ``aggregate`` is PyG's."""
    updates: bool
    """True if ``update`` is not PyG's, which does nothing."""
    defaults: dict[str, Any]
    """The values of arguments that need not be passed to ``propagate``."""


_OF_EDGES = {"edge_index", "edge_index_i", "edge_index_j", "index", "ptr", "adj_t"}
_OF_SIZES = {"size", "size_i", "size_j", "dim_size"}


def steps_of(layer: Any) -> Steps:
    """The steps of a layer's class, as PyG's inspector knows them."""
    cls, inspector = type(layer), layer.inspector
    names: dict[str, tuple[str, ...]] = {}
    defaults = {}
    for function in ("message", "aggregate", "update"):
        parameters = inspector.get_params(function)
        names[function] = tuple(each.name for each in parameters)
        for each in parameters:
            if each.default is not inspect.Parameter.empty:
                defaults[each.name] = each.default
    gathered = []
    for name in dict.fromkeys((*names["message"], *names["aggregate"], *names["update"])):
        if name[-2:] in ("_i", "_j") and name not in _OF_EDGES | _OF_SIZES:
            gathered.append((name, name[:-2], name[-1] == "j"))
    reduces = cls.aggregate is MessagePassing.aggregate
    updates = cls.update is not MessagePassing.update
    message = names["message"]
    aggregate = () if reduces else names["aggregate"]
    update = names["update"] if updates else ()
    wanted = (*message, *aggregate, *update, "index", "dim_size")
    given: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(*wanted)  # of two names or more
    return Steps(tuple(gathered), message, aggregate, update, given, reduces, updates, defaults)


def propagate_gathered(
    layer: Any, steps: Steps, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
) -> Any:
    """``propagate`` by PyG's steps.

    Args:
        layer: Any layer of PyG.
        steps: Those of its class.
        edge_index: A plain ``int64`` tensor.
        size: See PyG's ``propagate``.
        kwargs: The arguments of ``propagate``.

    Raises:
        NotFused: If the call is not covered, before the layer's own code ran.
    """
    reason = observed(layer)
    if reason is not None:
        raise NotFused(reason)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise NotFused(SMALL)
    ends = edge_index[0], edge_index[1]  # views that are cheaper to read than those of unbind
    i, j = (1, 0) if layer.flow == "source_to_target" else (0, 1)
    sizes: list[int | None] = [None, None] if size is None else [*size]
    node_dim, found = layer.node_dim, {**steps.defaults, **kwargs}
    try:
        for name, nodes, of_sources in steps.gathered:
            row, features = j if of_sources else i, kwargs[nodes]
            if isinstance(features, Tensor):
                if sizes[row] is None:
                    sizes[row] = features.size(node_dim)
                elif sizes[row] != features.size(node_dim):
                    raise NotFused(SMALL)
                found[name] = features.index_select(node_dim, ends[row])
            else:
                found[name] = _rows(node_dim, features, row, ends, sizes)
    except (IndexError, KeyError, RuntimeError) as error:
        raise NotFused(SMALL) from error  # PyG says what is wrong
    index = ends[i]
    num_dst = sizes[i] if sizes[i] is not None else sizes[j]
    found["index"] = found["edge_index_i"] = index
    found["dim_size"] = found["size_i"] = num_dst
    found["edge_index"], found["edge_index_j"] = edge_index, ends[j]
    found["ptr"] = found["adj_t"] = None
    found["size"], found["size_j"] = sizes, sizes[j] if sizes[j] is not None else sizes[i]
    try:
        given = steps.given(found)
    except KeyError as error:
        raise NotFused(SMALL) from error
    found.clear()  # rows that no gradient needs are free before they are reduced
    own, end = layer.__dict__, len(steps.message)
    message, others = dict(zip(steps.message, given)), given[end:]
    del given
    out = layer.message(**message)
    message.clear()
    end = len(steps.aggregate)
    if not steps.reduces:
        out = _aggregate_as_layer(layer, out, others[:end])
    elif "aggregate" in own:
        out = layer.aggregate(out, index, None, num_dst)
    else:
        out = _aggregate(layer, out, index, num_dst)
    if steps.updates:
        return layer.update(out, *others[end:-2])
    return layer.update(out) if "update" in own else out


def _rows(
    node_dim: int, features: Any, row: int, ends: Sequence[Tensor], sizes: list[int | None]
) -> Tensor | None:
    """Gather one of a pair of features, and fill in the numbers of nodes, as PyG does."""
    if not isinstance(features, (tuple, list)):
        return None
    if len(features) != 2:
        raise NotFused(SMALL)
    for k, each in enumerate(features):
        if isinstance(each, Tensor):
            _fit(sizes, k, each.size(node_dim))
    chosen = features[row]
    return chosen.index_select(node_dim, ends[row]) if isinstance(chosen, Tensor) else None


def _fit(sizes: list[int | None], row: int, size: int) -> None:
    if sizes[row] is None:
        sizes[row] = size
    elif sizes[row] != size:
        raise NotFused(SMALL)


def _aggregate(layer: Any, values: Any, index: Tensor, num_dst: int | None) -> Tensor:
    """PyG's ``MessagePassing.aggregate``."""
    module, node_dim = layer._modules["aggr_module"], layer.node_dim
    out: Tensor | None
    if type(values) is Tensor and num_dst is not None and untouched(module, type(module)):
        at = values.dim() + node_dim if node_dim < 0 else node_dim
        if 0 <= at < values.dim():
            try:
                out = _reduced(module, values, index, num_dst, at)
                if out is None:
                    out = module.forward(values, index, None, num_dst, node_dim)
                return out
            except (IndexError, RuntimeError):
                pass  # the module says what is wrong
    out = module(values, index, ptr=None, dim_size=num_dst, dim=node_dim)
    return out


def _reduced(module: Any, values: Tensor, index: Tensor, num_dst: int, dim: int) -> Tensor | None:
    """The aggregation of a module by fewer steps; ``None`` if it is not covered."""
    how = REDUCTIONS.get(type(module))
    if how is not None:
        return _BY_NAME[how](values, index, num_dst, dim)
    if type(module) is aggr.SoftmaxAggregation:
        return _softmax(module, values, index, num_dst, dim)
    if type(module) is not aggr.MultiAggregation:
        return None
    modules = module.aggrs
    names = [REDUCTIONS.get(type(each)) for each in modules]
    if None in names or not all(untouched(each, type(each)) for each in modules):
        return None
    made = {name: _BY_NAME[name](values, index, num_dst, dim) for name in names if name != "mean"}  # type: ignore[index]
    if "mean" in names:
        total = made.get("sum")
        made["mean"] = _mean(values, index, num_dst, dim, total)
    outs = [made[name] for name in names]
    out: Tensor = module.combine(outs)
    return out


def _shape(values: Tensor, num_dst: int, dim: int) -> list[int]:
    shape = [*values.shape]
    shape[dim] = num_dst
    return shape


def _sum(values: Tensor, index: Tensor, num_dst: int, dim: int) -> Tensor:
    shape = [1] * values.dim()
    shape[dim] = -1
    at = index.view(shape).expand_as(values)  # torch is faster than with an index of every row
    return values.new_zeros(_shape(values, num_dst, dim)).scatter_add_(dim, at, values)


def _mean(
    values: Tensor, index: Tensor, num_dst: int, dim: int, total: Tensor | None = None
) -> Tensor:
    total = _sum(values, index, num_dst, dim) if total is None else total
    return total / _count(values, index, num_dst, dim)


def _count(values: Tensor, index: Tensor, num_dst: int, dim: int) -> Tensor:
    """The numbers that means are divided by, of a shape to divide by."""
    shape = [1] * values.dim()
    shape[dim] = num_dst
    count = torch.bincount(index, minlength=num_dst).clamp_(min=1)
    return count.to(values.dtype).view(shape)


def _extreme(name: str) -> Callable[[Tensor, Tensor, int, int], Tensor]:
    def reduce(values: Tensor, index: Tensor, num_dst: int, dim: int) -> Tensor:
        shape = [1] * values.dim()
        shape[dim] = -1
        at = index.view(shape).expand_as(values)
        out = values.new_zeros(_shape(values, num_dst, dim))
        return out.scatter_reduce_(dim, at, values, name, include_self=False)

    return reduce


def _softmax(module: Any, values: Tensor, index: Tensor, num_dst: int, dim: int) -> Tensor | None:
    """``SoftmaxAggregation.forward``, which here divides sums, not the weight of every edge.

    ``None`` if it is not covered, such as short types, of which such sums would be too large.
    """
    scale = module.t
    if module.semi_grad or module.channels != 1 or values.dtype not in _WIDE:
        return None
    plain = isinstance(scale, (int, float)) and scale == 1
    logits = values if plain else values * scale
    most = _BY_NAME["max"](logits.detach(), index, num_dst, dim)
    weights = (logits - most.index_select(dim, index)).exp_()
    total = _sum(weights, index, num_dst, dim).add_(_TINY)
    return _sum(values * weights, index, num_dst, dim) / total


_WIDE = (torch.float32, torch.float64)
_TINY = 1e-16
"""The number that PyG adds to the sum of weights."""

_BY_NAME: dict[str, Callable[[Tensor, Tensor, int, int], Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "max": _extreme("amax"),
    "min": _extreme("amin"),
}


# The aggregations of some layers of PyG ######################################################


def _aggregate_as_layer(layer: Any, values: Any, given: tuple[Any, ...]) -> Any:
    """The layer's own ``aggregate``, or the same with fewer steps."""
    reduce = None if "aggregate" in layer.__dict__ else _OWN.get(type(layer).aggregate)
    if reduce is not None and type(values) is Tensor:
        try:
            out = reduce(layer, values, *given)
            if out is not None:
                return out
        except (IndexError, RuntimeError):
            pass  # the layer says what is wrong
    return layer.aggregate(values, *given)


def _of_eg_conv(
    layer: Any, values: Tensor, index: Tensor, num_dst: int, symmetric: Tensor | None
) -> Tensor | None:
    """``EGConv.aggregate``, which here counts edges once; ``None`` if it is not covered."""
    count: Any = None
    if not {"mean", "var", "std"}.isdisjoint(layer.aggregators):
        count = _count(values, index, num_dst, 0)
    outs = []
    for how in layer.aggregators:
        if how == "symnorm" and symmetric is not None:
            out = _sum(values * symmetric.view(-1, 1), index, num_dst, 0)
        elif how in ("var", "std"):
            mean = _sum(values, index, num_dst, 0) / count
            out = _sum(values * values, index, num_dst, 0) / count - mean * mean
            if how == "std":
                out = out.clamp(min=1e-5).sqrt()
        elif how == "mean":
            out = _sum(values, index, num_dst, 0) / count
        elif how in _BY_NAME:
            out = _BY_NAME[how](values, index, num_dst, 0)
        else:
            return None
        outs.append(out)
    return torch.stack(outs, dim=1) if len(outs) > 1 else outs[0]


def _of_fast_rgcn_conv(
    layer: Any, values: Tensor, relation: Tensor, index: Tensor, num_dst: int
) -> Tensor | None:
    """``FastRGCNConv.aggregate``, without a row of relations for every edge."""
    dim = values.dim() + layer.node_dim if layer.node_dim < 0 else layer.node_dim
    if values.dim() != 2 or dim != 0:
        return None
    if layer.aggr == "mean":
        if relation.numel() == 0 or int(relation.min()) < 0:
            return None  # and PyG says what is wrong
        cell = index * layer.num_relations + relation
        count = torch.bincount(cell, minlength=num_dst * layer.num_relations)
        values = values / count.index_select(0, cell).to(values.dtype).view(-1, 1)
    return _sum(values, index, num_dst, 0)


_OWN: dict[Any, Callable[..., Tensor | None]] = {
    pyg.EGConv.aggregate: _of_eg_conv,
    pyg.FastRGCNConv.aggregate: _of_fast_rgcn_conv,
}
