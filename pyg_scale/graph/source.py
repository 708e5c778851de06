"""The user's graph, in one form for every kind of input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, NodeType

INDEX_TYPES = (torch.int64, torch.int32)


@dataclass
class Edges:
    """The edges of one type. The id of an edge is its position in them.

    Attributes:
        layout: ``"coo"``, ``"csr"`` or ``"csc"``.
        row: Source of each edge ``[num_edges]``; pointers ``[num_src + 1]`` if ``"csr"``.
        col: Destination of each edge ``[num_edges]``; pointers ``[num_dst + 1]`` if ``"csc"``.
        is_sorted: True if ``col`` is declared to be sorted, if ``"coo"``.
        size: Numbers of source and destination nodes, if known.
    """

    layout: str
    row: Tensor
    col: Tensor
    is_sorted: bool = False
    size: tuple[int | None, int | None] = (None, None)

    @property
    def num_edges(self) -> int:
        return (self.col if self.layout == "csr" else self.row).numel()

    @property
    def index_dtype(self) -> torch.dtype:
        """The dtype of the node ids."""
        return (self.col if self.layout == "csr" else self.row).dtype

    def least_size(self) -> tuple[int, int]:
        """Smallest numbers of source and destination nodes for the edges."""
        return (_least(self.row, self.layout == "csr"), _least(self.col, self.layout == "csc"))


@dataclass
class GraphSource:
    """The graph that the user passed.

    Attributes:
        node_types: ``(None,)`` if homogeneous.
        edge_types: ``(None,)`` if homogeneous.
        num_nodes: Number of nodes of each type, ``None`` if only the edges tell.
        edges: The edges of each type.
        node_time: Times ``[num_nodes]`` of the node types that have them.
        edge_time: Times ``[num_edges]`` of the edge types that have them, by edge id.
        weight: Weights ``[num_edges]`` of the edge types that have them, by edge id.
        owners: All objects from which this was read, in a fixed order: the same objects, unchanged,
            mean the same graph.
        recorded: By ``("time" or "weight", type)``, the names of attributes that were not changed
            since the edges were grouped with them.
    """

    node_types: tuple[NodeType, ...]
    edge_types: tuple[EdgeType, ...]
    num_nodes: dict[NodeType, int | None]
    edges: dict[EdgeType, Edges]
    node_time: dict[NodeType, Tensor] = field(default_factory=dict)
    edge_time: dict[EdgeType, Tensor] = field(default_factory=dict)
    weight: dict[EdgeType, Tensor] = field(default_factory=dict)
    owners: list[Any] = field(default_factory=list)
    recorded: dict[tuple[str, Any], str] = field(default_factory=dict)

    def add_time(self, kind: NodeType | EdgeType, value: Any, name: str, of_edges: bool) -> None:
        """Add the times of a node or edge type."""
        where: dict[Any, Tensor] = self.edge_time if of_edges else self.node_time
        where[kind] = column(value, f"time_attr={name!r}{of(kind)}")
        self.owners.append(value)

    def add_weight(self, edge_type: EdgeType, value: Any, name: str) -> None:
        """Add the weights of an edge type."""
        self.weight[edge_type] = column(value, f"weight_attr={name!r}{of(edge_type)}")
        self.owners.append(value)


def of(kind: NodeType | EdgeType) -> str:
    """The name of a type in errors, with a leading " of "."""
    return "" if kind is None else f" of {kind!r}"


def column(value: Any, name: str) -> Tensor:
    """A column of numbers ``[n]`` or ``[n, 1]`` as a contiguous tensor ``[n]`` on the CPU."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor or an array (got {type(value).__name__})")
    if value.dim() == 2 and value.size(1) == 1:
        value = value.squeeze(1)
    if value.dim() != 1 or value.is_complex():
        raise ValueError(
            f"{name} must hold one number each, shape [n] or [n, 1] "
            f"(got {value.dtype} of shape {list(value.shape)})"
        )
    flat: Tensor = value.detach().cpu().contiguous()
    return flat


def index_column(value: Any, name: str) -> Tensor:
    """Node ids or pointers ``[n]`` on the CPU, not copied if they are already on it."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype not in INDEX_TYPES:
        got = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else value
        raise TypeError(f"{name} must be a one-dimensional int64 or int32 tensor (got {got})")
    return value.detach().cpu()


def coo(row: Any, col: Any, name: str, is_sorted: bool = False) -> Edges:
    """Edges from sources and destinations.

    Raises:
        TypeError: If they are not integer tensors.
        ValueError: If they are not of the same length.
    """
    edges = Edges("coo", index_column(row, name), index_column(col, name), is_sorted)
    if edges.row.numel() != edges.col.numel():
        raise ValueError(
            f"{name} has {edges.row.numel()} sources and {edges.col.numel()} destinations"
        )
    return edges


def no_edges() -> Edges:
    """The edges of a graph that has none."""
    return Edges("coo", torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def _least(index: Tensor, pointers: bool) -> int:
    if pointers:
        return max(0, index.numel() - 1)
    return int(index.max()) + 1 if index.numel() else 0
