"""A data set of OGB in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from tqdm import tqdm

from pyg_scale.convert.base import Description, EdgeList, Nodes
from pyg_scale.files.npy import torch_dtype
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory.meta import Attribute
from pyg_scale_ogb.reader import OGBReader

T = TypeVar("T")
_ROWS = 1 << 20


class _Scratch:
    """A :class:`~pyg_scale.convert.base.Workspace` that keeps nothing."""

    memory = 1 << 28

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def once(self, name: str, work: Callable[[], T]) -> T:
        return work()

    def progress(self, what: str, total: int | None, unit: str) -> Any:
        return tqdm(
            total=total, desc=what, unit=unit, unit_scale=True, leave=False, delay=1, disable=None
        )


def load(name: str, root: str | PathLike[str] = "dataset") -> Data | HeteroData:
    """Load a data set of OGB from its raw files, without pickles and with any version of torch.

    Attributes are those of OGB's own ``PygNodePropPredDataset`` (``x``, ``y``, ``node_year``, ...),
    in a heterogeneous graph as those of ``HeteroData``, and ``train_mask``, ``val_mask`` and
    ``test_mask`` of the standard split. Reading tables takes time; ``pyg-scale convert ogb:NAME``
    does it only once.

    Args:
        name: Name of the data set, such as ``"ogbn-arxiv"``.
        root: The folder of data sets, with ``ogbn_arxiv`` or, from the archive, ``arxiv``.

    Raises:
        ValueError: If the data set is unknown, or its files are damaged; names the file.
        FileNotFoundError: If it is not in ``root``; names the download.
    """
    reader = OGBReader(name, root)
    with tempfile.TemporaryDirectory(prefix="pyg-scale-ogb-") as folder:
        try:
            reader.prepare(_Scratch(Path(folder)))
            return _in_memory(reader, reader.describe())
        finally:
            reader.close()


def _in_memory(reader: OGBReader, graph: Description) -> Data | HeteroData:
    data: Any = HeteroData() if graph.is_hetero else Data()
    for node_type, nodes in graph.nodes.items():
        store = data[node_type] if graph.is_hetero else data
        store.num_nodes = _size(nodes)
        for name, attribute in nodes.attributes.items():
            parts = reader.node_attribute(node_type, name, 0, _ROWS)
            store[name] = _whole(parts, attribute, _size(nodes))
    for edge_type, edges in graph.edges.items():
        store = data[edge_type] if graph.is_hetero else data
        store.edge_index = _edge_index(reader, edge_type, edges, graph)
        for name, attribute in edges.attributes.items():
            parts = reader.edge_attribute(edge_type, name, 0, _ROWS)
            store[name] = _whole(parts, attribute, store.edge_index.size(1))
    return data


def _edge_index(
    reader: OGBReader, edge_type: EdgeType, edges: EdgeList, graph: Description
) -> Tensor:
    out = torch.empty((2, edges.num_edges or 0), dtype=torch.int64)
    ends: tuple[NodeType, NodeType] = (None, None)
    if edge_type is not None:
        ends = (edge_type[0], edge_type[2])
    position = 0
    for parts in reader.edges(edge_type, 0, _ROWS):
        rows = parts[0].numel()
        for row, (part, end) in enumerate(zip(parts, ends, strict=True)):
            low, high = (int(v) for v in torch.aminmax(part))
            if low < 0 or high >= _size(graph.nodes[end]):
                raise ValueError(
                    f"{reader.folder} has an edge with node {low if low < 0 else high}, but there "
                    f"are {graph.nodes[end].num_nodes} nodes"
                )
            out[row, position : position + rows] = part
        position += rows
    _require_all(position, out.size(1), f"{reader.folder} has edges of which")
    return out


def _whole(parts: Iterator[Tensor], attribute: Attribute, rows: int) -> Tensor:
    out = torch.empty((rows, *attribute.row), dtype=torch_dtype(attribute.dtype))
    position = 0
    for part in parts:
        out[position : position + part.size(0)] = part
        position += part.size(0)
    _require_all(position, rows, "the raw files have an attribute of which")
    return out


def _require_all(read: int, rows: int, what: str) -> None:
    """Check that all rows were read, as missing ones would be uninitialised memory."""
    if read != rows:
        raise ValueError(f"{what} {read} rows are there, expected {rows}: a file is truncated")


def _size(nodes: Nodes) -> int:
    return nodes.num_nodes or 0
