"""The budget of a batch, and the cost of what was sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_scale.files.byte_size import byte_size
from pyg_scale.graph.topology import EdgeType, NodeType, Topology
from pyg_scale.loader.batch.features import Features
from pyg_scale.loader.stats import Stats

UNITS = ("edges", "nodes", "bytes")
_ID_BYTES = 8  # of n_id and e_id


@dataclass(frozen=True)
class Budget:
    """The most that a batch may cost: ``NeighborLoader(..., batch_cost=Budget("edges", 50_000))``.

    Attributes:
        unit: ``"edges"`` or ``"nodes"``: those of the sampled subgraph, of all types together.
            ``"bytes"``: those of its features, ids and edges. A function: the cost of a sampled
            subgraph, PyG's ``SamplerOutput`` or ``HeteroSamplerOutput``, as a number that grows
            with the subgraph and depends on nothing else.
        limit: The most, at least 1. Bytes may be text, such as ``"64MB"``.

    Raises:
        TypeError: If one of them is of another type.
        ValueError: If there is no such unit, or the limit is less than 1.
    """

    unit: str | Callable[[Any], float]
    limit: int | str

    def __post_init__(self) -> None:
        if not callable(self.unit) and self.unit not in UNITS:
            raise ValueError(
                f"the unit of a Budget must be {', '.join(map(repr, UNITS))} or a function of what "
                f"was sampled (got {self.unit!r})"
            )
        if self.unit == "bytes":
            byte_size(self.limit, "the limit of a Budget")
        elif isinstance(self.limit, bool) or not isinstance(self.limit, int):
            raise TypeError(f"the limit of a Budget must be an integer (got {self.limit!r})")
        elif self.limit < 1:
            raise ValueError(f"the limit of a Budget must be at least 1 (got {self.limit})")

    @property
    def most(self) -> int:
        """The limit as a number."""
        return byte_size(self.limit) if self.unit == "bytes" else int(self.limit)

    def __str__(self) -> str:
        name = self.unit if isinstance(self.unit, str) else getattr(self.unit, "__qualname__", "?")
        return f"{self.most} {name}"


@dataclass(frozen=True)
class Costs:
    """The cost of a sampled subgraph.

    Attributes:
        node: The cost of a node, by type.
        edge: The cost of an edge, by type.
        measure: A function of the whole subgraph instead; the others are then its shape alone.
    """

    node: Mapping[NodeType, int]
    edge: Mapping[EdgeType, int]
    measure: Callable[[Any], float] | None = None

    def of(self, out: Any) -> int:
        """The cost of a ``SamplerOutput`` or ``HeteroSamplerOutput``.

        Raises:
            TypeError: If the user's function returns no number.
            ValueError: If it returns a negative one, or one that is not finite.
        """
        if self.measure is not None:
            return _checked(self.measure(out))
        nodes, edges = _by_type(out.node), _by_type(out.row)
        found = sum(self.node.get(kind, 0) * each.numel() for kind, each in nodes.items())
        return found + sum(self.edge.get(kind, 0) * each.numel() for kind, each in edges.items())


def costs_of(
    budget: Budget, data: Any, features: Features | None, graph: Topology, *, collect: bool = True
) -> Costs:
    """The costs that a budget counts.

    Args:
        budget: The budget.
        data: The loader's graph.
        features: Features that come from a store, of which this reads one row each.
        graph: The topology.
        collect: Whether batches have features.
    """
    nodes, edges = dict.fromkeys(graph.node_types, 0), dict.fromkeys(graph.edge_types, 0)
    if budget.unit == "edges":
        return Costs(nodes, dict.fromkeys(edges, 1))
    if budget.unit == "nodes":
        return Costs(dict.fromkeys(nodes, 1), edges)
    if callable(budget.unit):
        return Costs(dict.fromkeys(nodes, 1), dict.fromkeys(edges, 1), budget.unit)
    ends = 2 * torch.empty(0, dtype=graph.index_dtype).element_size()
    return Costs(
        {t: _ID_BYTES + _row_bytes(data, features, t, False, collect) for t in nodes},
        {t: _ID_BYTES + ends + _row_bytes(data, features, t, True, collect) for t in edges},
    )


def _row_bytes(
    data: Any, features: Features | None, kind: Any, of_edges: bool, collect: bool
) -> int:
    """Bytes of the features of one node or edge."""
    if not collect:
        return 0
    found, names = 0, set[str]() if features is None else features.names(of_edges, kind)
    if names:
        assert features is not None
        row = {kind: torch.zeros(1, dtype=torch.int64)}
        read = features.read({} if of_edges else row, row if of_edges else {}, Stats())
        found += sum(each.value.numel() * each.value.element_size() for each in read)
    if not isinstance(data, Data | HeteroData):
        return found
    store = data._store if kind is None else data[kind]
    of_kind = store.is_edge_attr if of_edges else store.is_node_attr
    for name in list(store.keys()):
        if name in names or name in ("edge_index", "adj_t", "num_nodes") or not of_kind(name):
            continue
        value = store[name]
        if isinstance(value, Tensor | np.ndarray):
            dim = data.__cat_dim__(name, value, store)
            found += value.nbytes // max(1, value.shape[dim])
    return found


def _by_type(value: Any) -> Mapping[Any, Tensor]:
    return value if isinstance(value, dict) else {None: value}


def _checked(value: Any) -> int:
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"the function of a Budget must return a number (got {type(value).__name__})"
        ) from None
    if not math.isfinite(found) or found < 0:
        raise ValueError(f"the function of a Budget must return 0 or more (got {value!r})")
    return math.ceil(found)
