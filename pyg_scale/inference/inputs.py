"""The graph of an inference without its features, and a layer's input as its features."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, TensorAttr

from pyg_scale.graph.base import SuppliesFeatures
from pyg_scale.graph.topology import CSC
from pyg_scale.inference.ranks import RankRows
from pyg_scale.loader.batch.features import HOMOGENEOUS_EDGES
from pyg_scale.loader.seeds.nodes import num_nodes_of
from pyg_scale.ops import keys
from pyg_scale.ops.gather import gather
from pyg_scale.sampler.choose import Ask
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.store.directory.opening import open_graph
from pyg_scale.store.directory.page_faults import random_reads, read_soon

_NODES = 1 << 16
"""Nodes whose in-edges are asked for at a time, if they are in other processes."""


class Graph:
    """A graph without types, and its features ``x``.

    Args:
        given: ``Data``, a path, or ``(FeatureStore, GraphStore)``.
        edge_attrs: The attributes of edges that layers get.

    Raises:
        TypeError: If it is something else.
        NotImplementedError: If it has types.
        ValueError: If it has no ``x``, or lacks an attribute.
    """

    def __init__(self, given: Any, edge_attrs: list[str]) -> None:
        if isinstance(given, str | Path):
            given = open_graph(given)
        self.edge_attrs = edge_attrs
        self._features: FeatureStore | None = None
        self._sampler: Any = None
        self._is_pair = False
        if isinstance(given, HeteroData):
            _refuse_types()
        if isinstance(given, Data):
            self._take_data(given)
        elif isinstance(given, tuple | list) and len(given) == 2:
            self._take_stores(*given)
        else:
            raise TypeError(
                "graph must be Data, the path of a graph directory or (FeatureStore, GraphStore) "
                f"(got {type(given).__name__})"
            )

    def _take_data(self, data: Data) -> None:
        supplied = "x" in data and isinstance(data, SuppliesFeatures)
        features = data.supply_features() if supplied else None
        if features is not None:
            self._take_supplied(features, data)
            return
        x = data.x if "x" in data else None
        if not isinstance(x, Tensor) or x.dim() < 2:
            raise ValueError("the graph has no features x [num_nodes, channels]")
        if "edge_index" not in data:
            raise NotImplementedError(
                "the graph has no edge_index: give the edges as edge_index instead of adj_t"
            )
        for name in self.edge_attrs:
            if name not in data:
                raise ValueError(f"the graph has no attribute {name!r} of edges")
        self.x: Tensor | None = x
        self.num_nodes = num_nodes_of(data, None)
        if x.size(0) != self.num_nodes:
            raise ValueError(f"x has {x.size(0)} rows for {self.num_nodes} nodes")
        bare = copy.copy(data)
        for name in list(bare.keys()):
            if name not in ("edge_index", *self.edge_attrs):
                del bare[name]
        bare.num_nodes = self.num_nodes
        self._data: Any = bare

    def _take_supplied(self, features: FeatureStore, data: Data) -> None:
        """Of a graph on several ranks, whose features are not in memory."""
        size = features.get_tensor_size(group_name=None, attr_name="x")
        if size is None or len(size) < 2:
            raise ValueError("the graph has no features x [num_nodes, channels]")
        for name in self.edge_attrs:
            if name not in data:
                raise ValueError(f"the graph has no attribute {name!r} of edges")
        self.x, self._features, self.num_nodes = None, features, num_nodes_of(data, None)
        bare = copy.copy(data)
        for name in list(bare.keys()):
            if name != "edge_index":
                del bare[name]
        self._data, self._is_pair = bare, False

    def _take_stores(self, features: Any, graph: Any) -> None:
        if not isinstance(features, FeatureStore) or not isinstance(graph, GraphStore):
            raise TypeError(
                "graph must be (FeatureStore, GraphStore) "
                f"(got {type(features).__name__}, {type(graph).__name__})"
            )
        if any(attr.edge_type is not None for attr in graph.get_all_edge_attrs()):
            _refuse_types()
        size = features.get_tensor_size(group_name=None, attr_name="x")
        if size is None or len(size) < 2:
            raise ValueError("the feature store has no x [num_nodes, channels] of the group None")
        self.x, self._features, self._data = None, features, graph
        self._is_pair = True
        self.num_nodes = num_nodes_of((features, graph), None)
        if size[0] != self.num_nodes:
            raise ValueError(f"x has {size[0]} rows for {self.num_nodes} nodes")

    def sampler(self) -> Any:
        """Gives all in-edges of nodes; made once."""
        if self._sampler is None:
            self._sampler = NativeSampler().bind(
                self.for_loader(self._features), num_neighbors=[-1]
            )
        return self._sampler

    def degree(self, nodes: Tensor) -> Tensor:
        """Number of in-edges of each node, ``int64`` ``[n]``."""
        csc = self.sampler().topology.csc.get(None)
        if csc is not None:
            return csc.indptr[nodes + 1] - csc.indptr[nodes]
        (picked,) = self.sampler().expand([Ask(None, 0, -1, 0, nodes, None, None)])
        return picked.counts

    @property
    def num_src(self) -> int:
        """Number of nodes that may be sources: all."""
        return self.num_nodes

    def in_edges(
        self, begin: int, end: int, limit: int, with_ids: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """See :class:`~pyg_scale.inference.grid.EdgeSource`."""
        edges = edges_of(self.sampler(), None, self.num_nodes, self.edge_values)
        yield from edges.in_edges(begin, end, limit, with_ids)

    def content(self) -> Iterator[Tensor]:
        """Some of the features and of what the edges are, to tell graphs apart."""
        nodes = some(self.num_nodes)
        with random_reads([] if self.x is None else [self.x]):
            yield self.rows(nodes)
        yield from self._sketch(nodes)

    def _sketch(self, nodes: Tensor) -> Iterator[Tensor]:
        """Some of what the edges are, to tell graphs apart."""
        csc = self.sampler().topology.csc.get(None)
        if csc is None:
            directory = self._data.graph_directory
            yield torch.tensor([directory.checksum])
        else:
            yield csc.indptr[nodes]
            yield csc.indices[some(csc.num_edges)].to(torch.int64)

    @property
    def num_edges(self) -> int:
        """Edges of the graph."""
        csc = self.sampler().topology.csc.get(None)
        return self._data.num_edges if csc is None else csc.num_edges

    def wider_sampler(self) -> Any:
        """Gives all in-edges of nodes, and a few of their neighbours'."""
        return NativeSampler().bind(self.for_loader(self._features), num_neighbors=[-1, 10])

    def for_loader(self, inputs: FeatureStore | None) -> Any:
        """The argument ``data`` of a loader."""
        return (inputs, self._data) if self._is_pair else self._data

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the features."""
        if self.x is not None:
            return gather(self.x, index)
        assert self._features is not None
        return self._features.get_tensor(TensorAttr(None, "x", index))

    def width(self) -> tuple[int, ...]:
        """The shape of a row of the features."""
        if self.x is not None:
            return tuple(self.x.shape[1:])
        assert self._features is not None
        return tuple(self._features.get_tensor_size(group_name=None, attr_name="x")[1:])

    def edge_values(self, name: str, ids: Tensor) -> Tensor:
        """An attribute of edges by their ids, wherever it is."""
        return (
            gather(self._data[name], ids) if self._features is None else self.edge_rows(name, ids)
        )

    def edge_rows(self, name: str, index: Tensor) -> Tensor:
        """An attribute of edges by their ids."""
        assert self._features is not None
        return self._features.get_tensor(TensorAttr(HOMOGENEOUS_EDGES, name, index))

    def num_edge_rows(self, name: str) -> int | None:
        """Number of rows of an attribute of edges."""
        assert self._features is not None
        size = self._features.get_tensor_size(group_name=HOMOGENEOUS_EDGES, attr_name=name)
        return None if size is None else size[0]


EdgeValues = Callable[[str, Tensor], Tensor]


class CSCEdges:
    """The edges of a type in this process.

    Args:
        csc: The edges.
        num_src: Number of nodes that may be sources.
        values: The function that reads their attributes.
    """

    def __init__(self, csc: CSC, num_src: int, values: EdgeValues) -> None:
        self._csc, self.num_src, self._values = csc, num_src, values

    def in_edges(
        self, begin: int, end: int, limit: int, with_ids: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """See :class:`~pyg_scale.inference.grid.EdgeSource`."""
        csc, indptr = self._csc, self._csc.indptr[begin : end + 1]
        first, last = (int(indptr[0]), int(indptr[-1])) if indptr.numel() else (0, 0)
        for at in range(first, last, limit):
            to = min(at + limit, last)
            low = int(torch.searchsorted(indptr, at, right=True)) - 1
            high = int(torch.searchsorted(indptr, to))
            counts = indptr[low : high + 1].clamp(at, to).diff()
            dst = torch.arange(begin + low, begin + high).repeat_interleave(counts)
            read_soon(csc.indices[at:to])
            ids = csc.original_id(torch.arange(at, to)) if with_ids else None
            yield csc.indices[at:to].to(torch.int64), dst, ids

    def edge_values(self, name: str, ids: Tensor) -> Tensor:
        """See :class:`~pyg_scale.inference.grid.EdgeSource`."""
        return self._values(name, ids)


class RoutedEdges:
    """The edges of a type that are in several parts or processes.

    Args:
        sampler: A sampler of the graph.
        edge_type: The type.
        num_src: Number of nodes that may be sources.
        values: The function that reads their attributes.
    """

    def __init__(self, sampler: Any, edge_type: Any, num_src: int, values: EdgeValues) -> None:
        self._sampler, self._edge_type, self.num_src = sampler, edge_type, num_src
        self._values = values

    def in_edges(
        self, begin: int, end: int, limit: int, with_ids: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """See :class:`~pyg_scale.inference.grid.EdgeSource`."""
        for nodes in torch.arange(begin, end).split(_NODES):
            ask = Ask(self._edge_type, 0, -1, 0, nodes, None, None)
            (picked,) = self._sampler.expand([ask])
            dst = nodes.repeat_interleave(picked.counts)
            yield picked.neighbor, dst, picked.edge if with_ids else None

    def edge_values(self, name: str, ids: Tensor) -> Tensor:
        """See :class:`~pyg_scale.inference.grid.EdgeSource`."""
        return self._values(name, ids)


def edges_of(
    sampler: Any, edge_type: Any, num_src: int, values: EdgeValues
) -> CSCEdges | RoutedEdges:
    """The edges of a type, wherever they are.

    Args:
        sampler: A sampler of the graph.
        edge_type: The type.
        num_src: Number of nodes that may be sources.
        values: The function that reads attributes by name and by ids of edges.
    """
    csc = sampler.topology.csc.get(edge_type)
    if csc is None:
        return RoutedEdges(sampler, edge_type, num_src, values)
    return CSCEdges(csc, num_src, values)


class Table:
    """A row for each node, read in the dtype of the model.

    Args:
        rows: ``[num_nodes, ...]``: a tensor, mapped perhaps, or what several ranks wrote.
        real: The dtype of the model.
    """

    def __init__(self, rows: Tensor | RankRows, real: torch.dtype) -> None:
        self.rows, self.real = rows, real

    def width(self) -> tuple[int, ...]:
        """The shape of a row."""
        return tuple(self.rows.shape[1:])

    def read(self, begin: int, end: int) -> Tensor:
        """Rows ``begin`` to ``end - 1`` in memory, read one after the other."""
        if isinstance(self.rows, RankRows):
            return self.rows.read(begin, end, self.real)
        rows = self.rows[begin:end]
        read_soon(rows)
        return torch.empty(rows.shape, dtype=self.real).copy_(rows)


class StoredRows:
    """The features of a type in a feature store, read in the dtype of the model.

    Args:
        features: The store.
        node_type: The type.
        real: The dtype of the model.
    """

    def __init__(self, features: FeatureStore, node_type: Any, real: torch.dtype) -> None:
        self._features, self._node_type, self.real = features, node_type, real

    def width(self) -> tuple[int, ...]:
        """The shape of a row."""
        size: Any = self._features.get_tensor_size(group_name=self._node_type, attr_name="x")
        return tuple(size[1:])

    def read(self, begin: int, end: int) -> Tensor:
        """Rows ``begin`` to ``end - 1`` in memory."""
        index = torch.arange(begin, end)
        return self._features.get_tensor(TensorAttr(self._node_type, "x", index)).to(self.real)


def some(size: int) -> Tensor:
    """Up to 4096 of ``size`` positions, always the same."""
    count = min(size, 4096)
    if count == size:
        return torch.arange(size)
    return keys.bounded(torch.tensor(0xF1A6), torch.arange(count), torch.tensor(size))


def _refuse_types() -> None:
    raise NotImplementedError(
        "layerwise_inference takes graphs with node and edge types as HeteroData or as the path of "
        "a graph directory, not as stores"
    )


class LayerInputs(FeatureStore):
    """A layer's input as the feature ``x`` of all nodes, in the dtype of the model.

    Args:
        graph: The graph; its features are the input if ``hidden`` is ``None``.
        hidden: The output of the layer before, mapped: a tensor, or what several ranks wrote.
        real: The dtype of the model.
    """

    def __init__(self, graph: Graph, hidden: Any, real: torch.dtype) -> None:
        super().__init__()
        self.__dict__.update(graph=graph, hidden=hidden, real=real)

    def width(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.graph.width() if self.hidden is None else tuple(self.hidden.shape[1:])

    def read(self, begin: int, end: int) -> Tensor:
        """Rows ``begin`` to ``end - 1`` in memory, read one after the other."""
        whole = self.graph.x if self.hidden is None else self.hidden
        if whole is None:
            return self._get_tensor(TensorAttr(None, "x", torch.arange(begin, end)))
        return Table(whole, self.real).read(begin, end)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that rows are read from, if they are in this process."""
        whole = self.graph.x if self.hidden is None else self.hidden
        if isinstance(whole, Tensor):
            return [whole]
        return whole.pieces if isinstance(whole, RankRows) else []

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        if attr.attr_name != "x":
            return self.graph.edge_rows(attr.attr_name, attr.index)
        if self.hidden is None:
            rows = self.graph.rows(attr.index)
        elif isinstance(self.hidden, Tensor):
            rows = gather(self.hidden, attr.index)
        else:
            rows = self.hidden[attr.index]
        return rows.to(self.real)

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        if attr.attr_name != "x":
            size = self.graph.num_edge_rows(attr.attr_name)
            return None if size is None else (size,)
        return (self.graph.num_nodes, *self.width())

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """``x``, and the attributes of edges that are not in the graph itself."""
        attrs = [TensorAttr(None, "x")]
        if self.graph._features is not None:
            attrs += [TensorAttr(HOMOGENEOUS_EDGES, name) for name in self.graph.edge_attrs]
        return attrs

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        raise NotImplementedError("the input of a layer is read only")

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise NotImplementedError("the input of a layer is read only")
