"""OGB's data sets for `pyg-scale convert`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.convert.base import Description, EdgeList, Nodes, Reader, Workspace
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory.meta import Attribute
from pyg_scale_ogb.arrays import Array, Items
from pyg_scale_ogb.catalog import facts_of, folder_of
from pyg_scale_ogb.files import GraphFiles, Value, open_files, raw_files
from pyg_scale_ogb.splits import read_split, split_files

SETS = {"train": "train", "val": "valid", "test": "test"}
"""The index sets, with OGB's names."""


class OGBReader(Reader):
    """Reads one of OGB's data sets from its raw files, in bounded memory.

    Attributes have OGB's names (``x``, ``y``, ``edge_attr``, ``node_year``, ...), dtypes and
    shapes; node and edge types are sorted. If OGB adds inverse edges, the inverse of an edge
    follows it. The standard split of nodes becomes the index sets ``train``, ``val`` and ``test``
    and the masks ``train_mask``, ``val_mask`` and ``test_mask``. Splits of links stay in OGB's
    files: :func:`pyg_scale_ogb.split` reads them.

    Args:
        source: Name of the data set, such as ``"ogbn-arxiv"``.
        root: The folder of data sets, with ``ogbn_arxiv`` or, from the archive, ``arxiv``.

    Raises:
        ValueError: If the data set is unknown, or has another version.
        FileNotFoundError: If it is not in ``root``; names the download.
    """

    def __init__(self, source: str, root: str | PathLike[str] = "dataset") -> None:
        self._facts = facts_of(source)
        self.folder = folder_of(self._facts, root)
        self._graph: GraphFiles | None = None
        self._sets: dict[NodeType, dict[str, Tensor]] = {}

    def files(self) -> list[Path]:
        files = raw_files(self._facts, self.folder / "raw")
        return files if self._facts.of_links else files + split_files(self._facts, self.folder)

    def options(self) -> Mapping[str, Any]:
        return {"data set": self._facts.name, "version": self._facts.version}

    def prepare(self, work: Workspace) -> None:
        """Convert tables to arrays (on disk, twice their unpacked numbers of 8 or 4 bytes each)."""
        self._graph = open_files(self._facts, self.folder / "raw", work)
        if not self._facts.of_links:
            self._read_sets()

    def describe(self) -> Description:
        graph = self._opened
        nodes: dict[NodeType, Nodes] = {}
        for node_type, files in graph.nodes.items():
            sets = self._sets.get(node_type, {})
            attributes = {name: _attribute(value) for name, value in files.attributes.items()}
            attributes |= {f"{name}_mask": Attribute("bool") for name in sets}
            sizes = {name: ids.numel() for name, ids in sets.items()}
            nodes[node_type] = Nodes(files.num_nodes, attributes, sizes)
        edges: dict[EdgeType, EdgeList] = {}
        for edge_type, edge_files in graph.edges.items():
            attributes = {name: _attribute(value) for name, value in edge_files.attributes.items()}
            count = edge_files.pairs.shape[0] * self._times
            edges[edge_type] = EdgeList(count, "int64", attributes)
        return Description(nodes, edges)

    def edges(self, edge_type: EdgeType, begin: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        pairs = self._opened.edges[edge_type].pairs
        parts = pairs.rows(begin, rows)
        if self._facts.add_inverse_edge:
            parts = _twice(pairs, begin, rows, inverse=True)
        for part in parts:
            yield _column(part, 0), _column(part, 1)

    def node_attribute(
        self, node_type: NodeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        files = self._opened.nodes[node_type]
        ids = self._sets.get(node_type, {}).get(name.removesuffix("_mask"))
        if name.endswith("_mask") and ids is not None:
            yield from _mask(ids, files.num_nodes, begin, rows)
            return
        value = files.attributes[name]
        for part in value.array.rows(begin, rows):
            yield torch.from_numpy(part.astype(value.dtype, copy=False))

    def edge_attribute(
        self, edge_type: EdgeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        value = self._opened.edges[edge_type].attributes[name]
        parts = value.array.rows(begin, rows)
        if self._facts.add_inverse_edge:
            parts = _twice(value.array, begin, rows)
        for part in parts:
            yield torch.from_numpy(part.astype(value.dtype, copy=False))

    def index_set(self, node_type: NodeType, name: str, begin: int, rows: int) -> Iterator[Tensor]:
        ids = self._sets[node_type][name]
        for first in range(begin, ids.numel(), rows):
            yield ids[first : first + rows].clone()

    def node_attribute_file(self, node_type: NodeType, name: str) -> Path | None:
        value = self._opened.nodes[node_type].attributes.get(name)
        if value is None or value.array.file.suffix != ".npy" or value.dtype != value.array.stored:
            return None
        return value.array.file

    @property
    def _opened(self) -> GraphFiles:
        if self._graph is None:
            raise RuntimeError("prepare() comes first")
        return self._graph

    @property
    def _times(self) -> int:
        return 2 if self._facts.add_inverse_edge else 1

    def _read_sets(self) -> None:
        found = read_split(self._facts, self.folder)
        for name, part in SETS.items():
            by_type = found[part] if self._facts.is_hetero else {None: found[part]}
            for node_type, ids in by_type.items():
                files = self._opened.nodes.get(node_type)
                size = 0 if files is None else files.num_nodes
                if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
                    wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
                    raise ValueError(
                        f"the split {part!r} of {self.folder} has node {wrong}, but there are "
                        f"{size} nodes"
                    )
                self._sets.setdefault(node_type, {})[name] = ids.to(torch.int64)


def _attribute(value: Value) -> Attribute:
    return Attribute(str(value.dtype), tuple(value.array.shape[1:]))


def _twice(array: Array, begin: int, rows: int, inverse: bool = False) -> Iterator[Items]:
    """Each row twice, from row ``begin`` of the result on; the second reversed if ``inverse``."""
    skip = begin % 2
    for part in array.rows(begin // 2, max(1, rows // 2)):
        twice = part.repeat(2, axis=0)
        if inverse:
            twice[1::2] = part[:, ::-1]
        for first in range(skip, len(twice), rows):
            yield twice[first : first + rows]
        skip = 0


def _column(part: Items, column: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(part[:, column]))


def _mask(ids: Tensor, size: int, begin: int, rows: int) -> Iterator[Tensor]:
    ids = ids.sort().values
    for first in range(begin, size, rows):
        end = min(size, first + rows)
        mask = torch.zeros(end - first, dtype=torch.bool)
        low, high = torch.searchsorted(ids, torch.tensor([first, end])).tolist()
        mask[ids[low:high] - first] = True
        yield mask
