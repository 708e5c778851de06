"""Edges that are already grouped by destination, such as those of a graph directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_scale.graph.source import Edges, GraphSource, coo, of
from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology


class GroupedEdges(Edges):
    """Edges of one type in the form that samplers need.

    Args:
        csc: The in-edges; never changed in place.
        owner: The same object for the same edges, for as long as they are in use.
        num_src: Number of source nodes.
        index_dtype: The dtype of the user's edge list.
        time_attr: The attribute by which in-edges are ordered; ``None`` if by edge id.
        weight_attr: The attribute from which ``csc.weight_prefix`` was computed.
        float_time: True if the graph has floating point times.
        edge_list: Makes the edge list ``[2, num_edges]``, for uses other than sampling.
    """

    def __init__(
        self,
        csc: CSC,
        owner: object,
        num_src: int,
        *,
        index_dtype: torch.dtype,
        time_attr: str | None,
        weight_attr: str | None,
        float_time: bool,
        edge_list: Callable[[], Tensor],
    ) -> None:
        super().__init__("grouped", csc.indices, csc.indptr)
        self.size = (num_src, csc.indptr.numel() - 1)
        self.csc = csc
        self.owner = owner
        self.time_attr = time_attr
        self.weight_attr = weight_attr
        self.float_time = float_time
        self._index_dtype = index_dtype
        self._edge_list = edge_list

    @property
    def index_dtype(self) -> torch.dtype:
        return self._index_dtype

    def least_size(self) -> tuple[int, int]:
        """The recorded numbers of nodes, without reading edges."""
        num_src, num_dst = self.size
        assert num_src is not None and num_dst is not None
        return num_src, num_dst

    def as_coo(self, edge_type: EdgeType) -> Edges:
        """The same edges as a list, in the order of their ids."""
        edge_index = self._edge_list()
        return coo(edge_index[0], edge_index[1], f"edge_index{of(edge_type)}")

    def why_not(
        self, source: GraphSource, edge_type: EdgeType, topology: Topology, is_sorted: bool
    ) -> str | None:
        """The reason why ``csc`` does not suit a topology; ``None`` if it does.

        Weights are not compared.

        Args:
            source: The source of the topology.
            edge_type: The type of these edges.
            topology: Its numbers of nodes, times of nodes and direction.
            is_sorted: True if the user claims that the edge list is sorted; building a topology
                checks that.
        """
        neighbor = topology.neighbor_type(edge_type)
        sizes = topology.num_nodes[neighbor], topology.num_nodes[topology.expanded_type(edge_type)]
        if topology.direction != "forward":
            return "in-edges are stored, but out-edges are requested"
        if self.size != sizes:
            return "the number of nodes was changed"
        if is_sorted and self.csc.edge_id is not None:
            return "the edge list is not sorted"
        if neighbor in source.node_time:
            wanted, recorded = True, source.recorded.get(("time", neighbor))
        else:
            wanted, recorded = (
                edge_type in source.edge_time,
                source.recorded.get(("time", edge_type)),
            )
        if wanted == (self.time_attr is not None):
            same_form = not wanted or self.float_time == topology.float_time
            return None if self.time_attr == recorded and same_form else "times differ"
        stored = "edge id" if self.time_attr is None else f"time_attr={self.time_attr!r}"
        asked = "time is" if wanted else "edge id is"
        return f"in-edges are stored in the order of {stored}, but that of {asked} requested"


class KnowsEdges:
    """Mixin of a PyG storage that may already have its edges grouped."""

    def grouped_edges(self) -> GroupedEdges | None:
        """The edges, unless they or the number of nodes were changed."""
        raise NotImplementedError

    def recorded(self, name: str) -> Tensor | None:
        """An attribute as it is recorded, unless it was changed."""
        raise NotImplementedError


def read_attribute(
    source: GraphSource, role: str, store: Any, kind: NodeType | EdgeType, name: str
) -> Any:
    """The time or weight of a PyG storage: the recorded one if it was not changed.

    Args:
        source: Notes if it is the recorded one.
        role: ``"time"`` or ``"weight"``.
        store: The storage.
        kind: Its type.
        name: The attribute.
    """
    recorded = store.recorded(name) if isinstance(store, KnowsEdges) else None
    if recorded is None:
        return store[name]
    source.recorded[role, kind] = name
    return recorded
