"""All edges among some nodes, and batches of them: what loaders of subgraphs have in common."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_scale.loader.batch.build import put, select_rows
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import memory
from pyg_scale.ops.induced_edges import Induced, induced_edges, walked_edges


class Grouped(NamedTuple):
    """The edges of a graph by (source, destination, id).

    Attributes:
        indptr: ``int64`` ``[num_nodes + 1]``.
        row: The source of each edge, ``int32`` if all numbers fit, else ``int64`` ``[num_edges]``.
        col: Its destination, of the same dtype, ``[num_edges]``.
        edge: Its id, of the same dtype, ``[num_edges]``.
    """

    indptr: Tensor
    row: Tensor
    col: Tensor
    edge: Tensor

    @classmethod
    def of(cls, edge_index: Tensor, num_nodes: int) -> Grouped:
        """Group the edges of ``edge_index`` ``[2, num_edges]``.

        Raises:
            TypeError: If they are not whole numbers.
            ValueError: If they are of another shape.
            IndexError: If an edge has a node that does not exist.
        """
        if edge_index.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"edge_index must be int64 or int32 (got {edge_index.dtype})")
        if edge_index.dim() != 2 or edge_index.size(0) != 2:
            raise ValueError(f"edge_index must be [2, num_edges] (got {list(edge_index.shape)})")
        row, col = edge_index.to(torch.int64)
        if row.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < num_nodes:
            raise IndexError(f"edge_index has nodes that are not below num_nodes={num_nodes}")
        edge = (row * num_nodes + col).argsort(stable=True)
        count = torch.bincount(row, minlength=num_nodes)
        indptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
        most = 2**31 - 1
        dtype = torch.int32 if max(num_nodes, row.numel()) <= most else torch.int64
        found = (indptr, row[edge].to(dtype), col[edge].to(dtype), edge.to(dtype))
        return cls(*map(memory.in_huge_pages, found))

    def among(self, drawn: Tensor, *, ids: bool = True) -> Induced:
        """Some nodes, repeats allowed, and all edges among them, in the order of this graph.

        Without ``ids``, ids of edges are left out.
        """
        return induced_edges(self.indptr, self.col, self.edge if ids else None, drawn)

    def among_walks(self, count: int, length: int, key: int, *, ids: bool = True) -> Induced:
        """The nodes of walks from any nodes, and all edges among them, in the order of this graph.

        ``count`` walks have ``length`` steps each. Without ``ids``, ids of edges are left out.
        """
        edge = self.edge if ids else None
        return walked_edges(self.indptr, self.col, edge, count, length, key)


def refuse_overrides(loader: object, *names: str) -> None:
    """Refuse a subclass that overrides steps of PyG's loader which ours does not take.

    Raises:
        NotImplementedError: If there is one; names it.
    """
    for name in names:
        owner = next((kind for kind in type(loader).__mro__ if name in vars(kind)), None)
        if owner and owner.__module__.partition(".")[0] not in ("pyg_scale", "torch_geometric"):
            raise NotImplementedError(
                f"{owner.__name__}.{name} overrides a step that the loaders of pyg_scale do not "
                "take: derive from PyG's own loader, or change the batches that this one yields"
            )


def has_edge_attrs(data: Data) -> bool:
    """True if batches have rows of attributes of edges, for which they need ids of edges."""
    return any(name != "edge_index" and data.is_edge_attr(name) for name in data._store)


def batch_of(data: Data, out: Induced, stats: Stats) -> Data:
    """A batch with the rows of all attributes of nodes and edges."""
    batch, store = copy.copy(data), data._store
    values: dict[str, Any] = {"num_nodes": out.node.numel(), "edge_index": out.edge_index}
    for key, value in store.items():
        if key == "edge_index" or not isinstance(value, Tensor):
            continue
        if data.is_node_attr(key):
            values[key] = select_rows(store, key, value, out.node, stats)
        elif data.is_edge_attr(key):
            assert out.edge is not None
            values[key] = select_rows(store, key, value, out.edge, stats)
    put(batch._store, values)
    return batch
