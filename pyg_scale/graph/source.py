"""The user's graph, in one form for every kind of input, and how it is read from PyG's data.

:mod:`pyg_scale.graph.read_stores` reads it from PyG's stores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import SparseTensor

from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology
from pyg_scale.ops.csc import Compressed, ids_ascend

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


# Grouped edges ############################################################################


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
        # In-edges of tables that grow in the order of time are in both orders.
        csc = Compressed(self.csc.indptr, self.csc.indices, self.csc.edge_id)
        if not wanted and ids_ascend(csc):
            return None
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


# Reading ##################################################################################


def read_data(data: Data, time_attr: str | None, weight_attr: str | None) -> GraphSource:
    """Read a homogeneous graph.

    Raises:
        ValueError: If ``time_attr`` or ``weight_attr`` is missing or of another length.
        TypeError: If the edges are not integers.
    """
    edges, owner = _edges(data, None)
    source = GraphSource(
        node_types=(None,),
        edge_types=(None,),
        num_nodes={None: data.num_nodes},
        edges={None: edges},
        owners=owner,
    )
    if time_attr is not None:
        _require(data, time_attr, "time_attr")
        value = read_attribute(source, "time", data._store, None, time_attr)
        of_edges = is_edge_level(
            len(value),
            source.num_nodes[None],
            edges.num_edges,
            f"time_attr={time_attr!r}",
            tie="edge" in time_attr,
        )
        source.add_time(None, value, time_attr, of_edges)
    if weight_attr is not None:
        _require(data, weight_attr, "weight_attr")
        value = read_attribute(source, "weight", data._store, None, weight_attr)
        source.add_weight(None, value, weight_attr)
    return source


def read_hetero_data(
    data: HeteroData, time_attr: str | None, weight_attr: str | None
) -> GraphSource:
    """Read a heterogeneous graph; types are in the order of ``data.metadata()``.

    Raises:
        ValueError: If ``time_attr`` or ``weight_attr`` is missing, or both nodes and edges have it.
        TypeError: If the edges are not integers.
    """
    node_types, edge_types = data.metadata()
    for src, _, dst in edge_types:  # node types that occur only in edge types
        node_types += [t for t in dict.fromkeys((src, dst)) if t not in node_types]
    known = set(data.node_types)
    source = GraphSource(
        node_types=tuple(node_types),
        edge_types=tuple(edge_types),
        num_nodes={t: data[t].num_nodes if t in known else None for t in node_types},
        edges={},
    )
    for edge_type in edge_types:
        source.edges[edge_type], owner = _edges(data[edge_type], edge_type)
        source.owners += owner
    if time_attr is not None:
        nodes = [t for t in node_types if t in known and time_attr in data[t]]
        edges = [t for t in edge_types if time_attr in data[t]]
        one_level(time_attr, nodes, edges)
        for kind in nodes or edges:
            value = read_attribute(source, "time", data[kind], kind, time_attr)
            source.add_time(kind, value, time_attr, not nodes)
    if weight_attr is not None:
        weighted = [t for t in edge_types if weight_attr in data[t]]
        if not weighted:
            raise ValueError(f"weight_attr={weight_attr!r}: no edge type has this attribute")
        for edge_type in weighted:
            value = read_attribute(source, "weight", data[edge_type], edge_type, weight_attr)
            source.add_weight(edge_type, value, weight_attr)
    return source


def one_level(time_attr: str, nodes: list[Any], edges: list[Any]) -> None:
    """Refuse a time that neither nodes nor edges have, or both."""
    if nodes and edges:
        raise ValueError(
            f"time_attr={time_attr!r} is an attribute of nodes ({nodes[0]!r}) and of edges "
            f"({edges[0]!r}): rename one of them"
        )
    if not nodes and not edges:
        raise ValueError(f"time_attr={time_attr!r} is neither an attribute of nodes nor of edges")


def is_edge_level(
    length: int, num_nodes: int | None, num_edges: int, name: str, *, tie: bool
) -> bool:
    """Return True if an attribute of a homogeneous graph is one of edges, judged by its length.

    Args:
        length: Number of its entries.
        num_nodes: Number of nodes.
        num_edges: Number of edges.
        name: Its name in errors.
        tie: The answer for a graph with as many edges as nodes.

    Raises:
        ValueError: If its length is neither the number of nodes nor that of edges.
    """
    if length == num_edges == num_nodes:
        return tie
    if length in (num_nodes, num_edges):
        return length == num_edges
    raise ValueError(
        f"{name} has {length} entries; expected one for each of the {num_nodes} nodes, or for "
        f"each of the {num_edges} edges"
    )


def _require(data: Data, name: str, argument: str) -> None:
    if name not in data or data[name] is None:
        raise ValueError(f"{argument}={name!r}: the graph has no such attribute")


def _edges(store: Any, edge_type: EdgeType) -> tuple[Edges, list[Any]]:
    """The edges of a ``Data`` or of an edge store, and the object that holds them."""
    if isinstance(store, Data):
        store = store._store
    if isinstance(store, KnowsEdges):
        grouped = store.grouped_edges()
        if grouped is not None:
            return grouped, [grouped.owner]
    if "edge_index" in store and store["edge_index"] is not None:
        value = store["edge_index"]
        return _from_edge_index(value, f"edge_index{of(edge_type)}"), [value]
    for name in ("adj_t", "adj"):
        value = store.get(name)
        edges = _from_matrix(value, f"{name}{of(edge_type)}", name == "adj_t")
        if edges is not None:
            return edges, [value]
    return no_edges(), []


def _from_edge_index(value: Any, name: str) -> Edges:
    if isinstance(value, EdgeIndex):
        value = value.as_tensor()
    if not isinstance(value, Tensor) or value.dim() != 2 or value.size(0) != 2:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a tensor of shape [2, num_edges] (got {got})")
    return coo(value[0], value[1], name)


def _from_matrix(value: Any, name: str, transposed: bool) -> Edges | None:
    """The edges of a sparse matrix; ``None`` if ``value`` is not one."""
    if isinstance(value, SparseTensor):  # a matrix of torch-sparse, kept by rows
        pointers, index, _ = value.csr()
        by_rows, size = True, _ends(value.sparse_sizes(), transposed)
    elif not isinstance(value, Tensor) or value.layout == torch.strided:
        return None
    elif value.layout == torch.sparse_coo:
        rows, cols = value._indices()  # the edges unchanged, coalesced or not
        edges = coo(cols, rows, name) if transposed else coo(rows, cols, name)
        edges.size = _ends(value.shape, transposed)
        return edges
    elif value.layout == torch.sparse_csr:
        pointers, index = value.crow_indices(), value.col_indices()
        by_rows, size = True, _ends(value.shape, transposed)
    elif value.layout == torch.sparse_csc:
        pointers, index = value.ccol_indices(), value.row_indices()
        by_rows, size = False, _ends(value.shape, transposed)
    else:
        raise TypeError(f"{name} must have the layout COO, CSR or CSC (got {value.layout})")
    pointers, index = index_column(pointers, name), index_column(index, name)
    if by_rows == transposed:
        return Edges("csc", index, pointers, size=size)
    return Edges("csr", pointers, index, size=size)


def _ends(shape: Any, transposed: bool) -> tuple[int, int]:
    """The numbers of source and destination nodes of a matrix."""
    rows, cols = shape
    return (cols, rows) if transposed else (rows, cols)


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
