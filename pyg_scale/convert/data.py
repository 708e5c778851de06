"""Graphs that are in memory: PyG's ``Data`` and ``HeteroData``."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_scale.convert.base import Description, EdgeList, Nodes, Reader
from pyg_scale.files.npy import as_array, dtype_name
from pyg_scale.graph.source import Edges, GroupedEdges, of, read_data, read_hetero_data
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.ops.csc import expand_pointers
from pyg_scale.store.directory.meta import Attribute

_SKIPPED = ("edge_index", "adj_t", "adj", "num_nodes")


class DataReader(Reader):
    """A ``Data`` or ``HeteroData``.

    Edges may be an edge list or a sparse matrix. ``pyg_scale.save`` is quicker; this one sorts
    outside of memory.

    Args:
        data: The graph.

    Raises:
        TypeError: If it has an attribute that is neither a tensor nor plain JSON.
        ValueError: If a tensor has neither a row for each node nor for each edge.
    """

    def __init__(self, data: Data | HeteroData) -> None:
        if not isinstance(data, Data | HeteroData):
            raise TypeError(
                f"source must be Data or HeteroData (got {type(data).__name__}): in Python, "
                "pyg_scale.convert(data, path) or pyg_scale.save(data, path)"
            )
        hetero = isinstance(data, HeteroData)
        source = read_hetero_data(data, None, None) if hetero else read_data(data, None, None)
        self._ends = {each: _coo(edges, each) for each, edges in source.edges.items()}
        self._nodes: dict[NodeType, dict[str, Tensor]] = {each: {} for each in source.node_types}
        self._edges: dict[EdgeType, dict[str, Tensor]] = {each: {} for each in source.edge_types}
        self._num_nodes = dict(source.num_nodes)
        self._graph: dict[str, Any] = {}
        if isinstance(data, HeteroData):
            for store in data.stores:
                self._read_store(store)
        else:
            self._read_data(data)

    def _read_data(self, data: Data) -> None:
        for name, value in data.to_dict().items():
            if name in _SKIPPED or value is None:
                continue
            if not isinstance(value, Tensor):
                self._graph[name] = _plain(value, name)
            elif data.is_node_attr(name):
                self._nodes[None][name] = value
            elif data.is_edge_attr(name):
                self._edges[None][name] = value
            else:
                raise ValueError(_neither(name, value))

    def _read_store(self, store: Any) -> None:
        key = store._key
        for name, value in store.items():
            if name in _SKIPPED or value is None:
                continue
            if not isinstance(value, Tensor):
                if key is not None:
                    raise TypeError(f"{name!r}{of(key)} must be a tensor, or deleted")
                self._graph[name] = _plain(value, name)
            elif isinstance(key, tuple) and value.size(0) == self._ends[key][0].numel():
                self._edges[key][name] = value
            elif isinstance(key, str) and value.size(0) == self._num_nodes[key]:
                self._nodes[key][name] = value
            else:
                raise ValueError(_neither(name, value))

    def options(self) -> Mapping[str, Any]:
        parts = [("edges", str(t), i, v) for t, e in self._ends.items() for i, v in enumerate(e)]
        for kinds in (self._nodes, self._edges):
            parts += [(str(t), n, 0, v) for t, a in kinds.items() for n, v in a.items()]
        return {
            "tensors": [
                [*key, str(value.dtype), list(value.shape), zlib.crc32(_bytes(value))]
                for *key, value in parts
            ],
            "num_nodes": [[t, n] for t, n in self._num_nodes.items()],
        }

    def describe(self) -> Description:
        nodes = {
            each: Nodes(self._num_nodes[each], _attributes(values))
            for each, values in self._nodes.items()
        }
        edges = {}
        for each, values in self._edges.items():
            src, _ = self._ends[each]
            edges[each] = EdgeList(src.numel(), dtype_name(src.dtype), _attributes(values))
        return Description(nodes, edges, self._graph)

    def edges(self, edge_type: EdgeType, begin: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        src, dst = self._ends[edge_type]
        for first in range(begin, src.numel(), rows):
            yield src[first : first + rows], dst[first : first + rows]

    def node_attribute(
        self, node_type: NodeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        return _rows(self._nodes[node_type][name], begin, rows)

    def edge_attribute(
        self, edge_type: EdgeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        return _rows(self._edges[edge_type][name], begin, rows)


def _coo(edges: Edges, edge_type: EdgeType) -> tuple[Tensor, Tensor]:
    """Sources and destinations in the order of edge ids."""
    if isinstance(edges, GroupedEdges):  # of an opened graph
        edges = edges.as_coo(edge_type)
    src, dst = edges.row, edges.col
    if edges.layout == "csr":
        src = expand_pointers(edges.row.to(torch.int64), edges.num_edges)
    elif edges.layout == "csc":
        dst = expand_pointers(edges.col.to(torch.int64), edges.num_edges)
    return src.to(dst.dtype), dst


def _rows(values: Tensor, begin: int, rows: int) -> Iterator[Tensor]:
    values = values.detach()
    for first in range(begin, values.size(0), rows):
        yield values[first : first + rows].cpu()


def _attributes(values: Mapping[str, Tensor]) -> dict[str, Attribute]:
    return {
        name: Attribute(dtype_name(value.dtype), tuple(value.shape[1:]))
        for name, value in values.items()
    }


def _bytes(value: Tensor) -> Any:
    array = as_array(value.cpu().contiguous())
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{name!r} is a {type(value).__name__}; a graph is converted from tensors, numbers and "
        "strings: delete it, or use pyg_scale.save"
    )


def _neither(name: str, value: Tensor) -> str:
    return (
        f"{name!r} of shape {list(value.shape)} has neither a row for each node nor for each edge: "
        "delete it, or use pyg_scale.save"
    )
