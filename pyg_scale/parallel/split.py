"""Edges of a share of a graph in two parts: those of inner nodes, and others.

The in-edges of an inner node all start at own nodes, so that what a layer makes of them does not
wait for the halo. As a layer makes of each node what its own in-edges say, it can make the two
parts one after the other.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric import nn as pyg

LEFT_BEHIND = "_alpha"
"""The attribute in which layers of PyG leave weights of edges to themselves."""

BY_NODE = (
    pyg.MaxAggregation
    | pyg.MeanAggregation
    | pyg.MinAggregation
    | pyg.MulAggregation
    | pyg.MultiAggregation
    | pyg.PowerMeanAggregation
    | pyg.SoftmaxAggregation
    | pyg.StdAggregation
    | pyg.SumAggregation
    | pyg.VarAggregation
    | pyg.DegreeScalerAggregation
)
"""Aggregations of a node's own edges alone. (PyG's median fails if the last nodes have none.)"""

_MESSAGES = ("message", "aggregate", "update", "edge_update")


@dataclass
class Split:
    """Edges in two parts.

    Attributes:
        inner: The edges ``[2, n]`` of inner nodes.
        inner_position: Their positions ``[n]`` among all edges.
        outer: All other edges.
        outer_position: Theirs.
        is_inner: Whether a destination is an inner node ``[num_destinations]``.
    """

    inner: Tensor
    inner_position: Tensor
    outer: Tensor
    outer_position: Tensor
    is_inner: Tensor

    @property
    def parts(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Edges, their positions, and whether they need the halo."""
        yield self.inner, self.inner_position, False
        yield self.outer, self.outer_position, True

    def of_nodes(self, inner: Tensor, outer: Tensor, dim: int) -> Tensor:
        """Rows of inner nodes from one result, and of others from another one."""
        shape = [1] * inner.dim()
        shape[dim] = -1
        return torch.where(self.is_inner.view(shape), inner, outer)

    def of_edges(self, inner: Tensor, outer: Tensor) -> Tensor:
        """Rows of all edges from those of both parts."""
        position = torch.cat([self.inner_position, self.outer_position])
        order = torch.empty_like(position)
        order[position] = torch.arange(position.numel(), device=position.device)
        return torch.cat([inner, outer])[order]


def split_edges(edge_index: Tensor, num_sources: int, num_destinations: int) -> Split | None:
    """The two parts of edges; ``None`` if there are no inner ones.

    Args:
        edge_index: Edges ``[2, num_edges]`` by local numbers.
        num_sources: Number of own sources, which have the first numbers.
        num_destinations: Number of own destinations.
    """
    sources, destinations = edge_index
    is_inner = torch.ones(num_destinations, dtype=torch.bool, device=edge_index.device)
    is_inner[destinations[sources >= num_sources]] = False
    of_inner = is_inner[destinations]
    inner, outer = (mask.nonzero().view(-1) for mask in (of_inner, ~of_inner))
    if not inner.numel():
        return None
    return Split(edge_index[:, inner], inner, edge_index[:, outer], outer, is_inner)


def edge_rows(
    layer: Any, edge_index: Tensor, kwargs: dict[str, Any], sources: Any, in_messages: bool
) -> dict[str, Tensor] | None:
    """The arguments of a layer that have a row for each edge.

    Args:
        layer: A layer of PyG.
        edge_index: The edges ``[2, num_edges]``.
        kwargs: The arguments.
        sources: Names of those that it looks at by the source of an edge.
        in_messages: Whether they are those of ``propagate``, or of ``edge_updater``.

    Returns:
        ``None`` if the layer must have all edges at once: its messages take statistics over all,
        its aggregation is not one of :data:`BY_NODE`, it has hooks, or an argument is neither of
        nodes nor of edges.
    """
    aggregations = [each for each in layer.modules() if isinstance(each, pyg.Aggregation)]
    by_node = all(isinstance(each, BY_NODE) for each in aggregations)
    if not by_node or _takes_statistics(layer) or _has_hooks(layer):
        return None
    names = layer._user_args if in_messages else layer._edge_user_args
    found: dict[str, Tensor] = {}
    for name, value in kwargs.items():
        if name in sources or f"{name}_i" in names or not isinstance(value, Tensor):
            continue
        in_update = name in layer.inspector.get_param_names("update")
        if in_update or not value.dim() or value.size(0) != edge_index.size(1):
            return None
        found[name] = value
    return found


def _has_hooks(layer: Any) -> bool:
    of = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    return any(
        getattr(layer, f"_{name}_forward_{end}") for name in of for end in ("pre_hooks", "hooks")
    )


def _takes_statistics(layer: nn.Module) -> bool:
    """True if batch norms are computed in the messages of a layer, over all of its edges."""
    seen, left = set(_MESSAGES), list(_MESSAGES)
    while left:
        found = getattr(type(layer), left.pop(), None)
        names = found.__code__.co_names if isinstance(found, types.FunctionType) else ()
        left += [name for name in names if name not in seen]
        seen |= set(names)
    return any(
        isinstance(inner, _BatchNorm)
        for name, child in layer.named_children()
        if name in seen
        for inner in child.modules()
    )
