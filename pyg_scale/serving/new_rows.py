"""Nodes that a request brings along: their rows, and their edges from nodes of the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyg_scale.graph.topology import CSC, EdgeType, NodeType, PartsHere, Topology
from pyg_scale.ops.csc import build_csc, order_by_time, weight_prefix
from pyg_scale.ops.stitch import PartEdges, stitch_edges
from pyg_scale.sampler.choose import Ask, Picked
from pyg_scale.sampler.hop import HopSampler
from pyg_scale.store.directory import PartitionBook


@dataclass(frozen=True)
class NewRows:
    """Nodes that are not in the graph, with what a model needs to know of them.

    Their edges lead to them, from nodes of the graph. Nothing of the graph changes: no other node
    gets them as neighbours.

    Example::

        NewRows({"x": x}, edge_index=torch.tensor([[12, 7], [0, 0]]))  # 12 and 7 lead to row 0

    Attributes:
        attributes: Their attributes by name, each ``[num_new, ...]``, as those of the nodes of the
            graph; at least one.
        edge_index: ``int64`` ``[2, num_edges]``: nodes of the graph, and the new row (from 0) to
            which each of them leads. In a graph with types: by edge type.
        edge_attributes: Attributes of these edges by name, each ``[num_edges, ...]``; in a graph
            with types: by edge type, then by name. The times of edges are among them, if the graph
            has such.
    """

    attributes: Mapping[str, Tensor]
    edge_index: Tensor | Mapping[tuple[str, str, str], Tensor] | None = None
    edge_attributes: Mapping[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.attributes, Mapping) or not self.attributes:
            raise TypeError(
                "attributes of new rows must be a mapping from names to tensors, such as "
                f'{{"x": x}} (got {type(self.attributes).__name__})'
            )
        sizes = {}
        for name, value in self.attributes.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                raise TypeError(f"attribute {name!r} of new rows must be a tensor [num_new, ...]")
            sizes[name] = value.size(0)
        if len(set(sizes.values())) > 1:
            raise ValueError(f"attributes of new rows differ in their number of rows: {sizes}")

    @property
    def num_rows(self) -> int:
        """Number of new nodes."""
        return next(iter(self.attributes.values())).size(0)

    def edges(self, edge_types: Sequence[EdgeType]) -> dict[EdgeType, Tensor]:
        """The edges ``[2, num_edges]`` of each type that has some.

        Args:
            edge_types: Those of the graph.

        Raises:
            TypeError: If they are not given as the graph has them.
            ValueError: If a type is unknown.
        """
        if self.edge_index is None:
            return {}
        typed = edge_types != (None,)
        if isinstance(self.edge_index, Mapping) != typed:
            wanted = "a mapping from edge types to tensors" if typed else "one tensor"
            raise TypeError(
                f"edge_index of new rows must be {wanted}, as the graph has "
                f"{'' if typed else 'no '}types (got {type(self.edge_index).__name__})"
            )
        given: Any = self.edge_index if typed else {None: self.edge_index}
        for edge_type, edge_index in given.items():
            if edge_type not in edge_types:
                raise ValueError(f"new rows have edges of the unknown type {edge_type!r}")
            if (
                not isinstance(edge_index, Tensor)
                or edge_index.dim() != 2
                or edge_index.size(0) != 2
                or edge_index.dtype not in (torch.int64, torch.int32)
            ):
                raise TypeError(
                    "edge_index of new rows must be int64 [2, num_edges]"
                    + ("" if edge_type is None else f" for {edge_type}")
                )
        return {t: edge_index.to(torch.int64) for t, edge_index in given.items()}

    def attributes_of(self, edge_type: EdgeType, num_edges: int) -> Mapping[str, Tensor]:
        """The attributes of the edges of a type.

        Raises:
            ValueError: If one has another number of rows.
        """
        given: Any = self.edge_attributes
        found = given if edge_type is None else given.get(edge_type, {})
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or value.size(0) != num_edges:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"attribute {name!r} of the edges of new rows must have {num_edges} rows, one "
                    f"for each edge (got {got})"
                )
        return found


class GraphWithNewRows:
    """A router over two parts: the graph, and the nodes that a request brings along.

    It is what a sampler sees, see :class:`~pyg_scale.graph.topology.Router`. New nodes have the
    ids that follow those of the graph, and so do their edges: what is drawn is what would be drawn
    from a graph that has them at its end.

    Args:
        graph: The graph, all of whose in-edges are in this process.
        in_edges: Its in-edges by type, with the times of neighbours where there are such.
        node_type: The type of the new nodes.
        rows: The new nodes.
        time_attr: The attribute that holds times.
        weight_attr: The attribute that holds weights.

    Raises:
        ValueError: If the edges do not fit the graph, or lack a time or a weight.
        IndexError: If an edge has a node that does not exist.
    """

    def __init__(
        self,
        graph: Topology,
        in_edges: Mapping[EdgeType, CSC],
        node_type: NodeType,
        rows: NewRows,
        time_attr: str | None,
        weight_attr: str | None,
    ) -> None:
        self._graph = graph
        self.num_nodes = {**graph.num_nodes, node_type: graph.num_nodes[node_type] + rows.num_rows}
        self.timed = frozenset(t for t in graph.edge_types if graph.is_timed(t))
        self.timed_nodes = frozenset(graph.node_time)
        given = rows.edges(graph.edge_types)
        none = torch.empty(2, 0, dtype=torch.int64)
        csc = {}
        for edge_type in graph.edge_types:
            edge_index = given.get(edge_type, none)
            if edge_type in given and graph.expanded_type(edge_type) != node_type:
                raise ValueError(
                    f"edges of {edge_type} do not lead to the new nodes, which are of type "
                    f"{node_type!r}"
                )
            new = rows.num_rows if graph.expanded_type(edge_type) == node_type else 0
            attributes = rows.attributes_of(edge_type, edge_index.size(1))
            made = self._in_edges(edge_type, edge_index, new, attributes, time_attr, weight_attr)
            csc[edge_type] = [in_edges[edge_type], made]
        books = {}
        for each, size in graph.num_nodes.items():
            offsets = torch.tensor([0, size, self.num_nodes[each]])
            books[each] = PartitionBook(2, self.num_nodes[each], offsets)
        self._here = PartsHere(csc, books)

    def _in_edges(
        self,
        edge_type: EdgeType,
        edge_index: Tensor,
        num_rows: int,
        attributes: Mapping[str, Tensor],
        time_attr: str | None,
        weight_attr: str | None,
    ) -> CSC:
        """The in-edges of the new nodes, with ids that follow those of the graph."""
        graph = self._graph
        neighbor = graph.neighbor_type(edge_type)
        what = "edge {} of the new rows"
        found = build_csc(
            edge_index[1], edge_index[0], num_rows, graph.num_nodes[neighbor], what=what
        )
        time = None
        if neighbor in graph.node_time:
            found = order_by_time(found, graph.node_time[neighbor], of_edges=False)
            time = graph.node_time[neighbor][found.indices.to(torch.int64)]
        elif graph.is_timed(edge_type):
            given = _required(attributes, time_attr, edge_index.size(1))
            by_edge = graph.to_time(given, f"{time_attr!r} of the new edges")
            found = order_by_time(found, by_edge, of_edges=True)
            time = by_edge if found.edge_id is None else by_edge[found.edge_id.to(torch.int64)]
        prefix = None
        if graph.csc[edge_type].weight_prefix is not None:
            prefix = weight_prefix(found, _required(attributes, weight_attr, edge_index.size(1)))
        position = torch.arange(edge_index.size(1))
        local = position if found.edge_id is None else found.edge_id.to(torch.int64)
        edge_id = local + graph.csc[edge_type].num_edges
        return CSC(found.indptr, found.indices, edge_id, time, prefix)

    def topology(self) -> Topology:
        """The graph with the new nodes, as a sampler sees it."""
        return replace(self._graph, num_nodes=self.num_nodes, csc={}, node_time={}, router=self)

    def parts_here(self) -> PartsHere:
        """Both parts."""
        return self._here

    def expand(self, sampler: HopSampler, asks: Sequence[Ask]) -> list[Picked]:
        """The in-edges of the nodes of a hop, in their order."""
        return [self._expand(sampler, ask) for ask in asks]

    def _expand(self, sampler: HopSampler, ask: Ask) -> Picked:
        expanded = self._graph.expanded_type(ask.edge_type)
        neighbors = self.num_nodes[self._graph.neighbor_type(ask.edge_type)]
        first_new = self._graph.num_nodes[expanded]
        answers = []
        for part, csc in enumerate(self._here.csc[ask.edge_type]):
            rows = ((ask.node >= first_new) == bool(part)).nonzero().view(-1)
            place = ask.node[rows] - part * first_new
            picked = sampler.choose(csc, ask.at(rows), place, None, neighbors)
            answers.append(PartEdges(rows, None, *picked))
        return Picked(*stitch_edges(ask.node.numel(), answers))

    def node_time(self, node_type: NodeType, node: Tensor) -> Tensor:
        """The times of nodes of the graph; new ones have the time of their request."""
        return self._graph.node_time[node_type][node.to(torch.int64)]

    def all_node_times(self, node_type: NodeType) -> Tensor:
        """The times of all nodes of the graph."""
        return self._graph.node_time[node_type]


def _required(attributes: Mapping[str, Tensor], name: str | None, num_edges: int) -> Tensor:
    """A time or weight of the edges of new nodes."""
    assert name is not None
    if name not in attributes:
        if num_edges:
            raise ValueError(f"the edges of new rows lack {name!r}, which sampling needs")
        return torch.empty(0, dtype=torch.int64)
    return attributes[name]
