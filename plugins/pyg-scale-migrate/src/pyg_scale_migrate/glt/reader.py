"""Reader of graphs that GraphLearn-for-PyTorch (GLT) partitioned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.convert.array_file import ArrayReader, ArrayWriter
from pyg_scale.convert.base import Description, EdgeList, Nodes, Reader, Workspace
from pyg_scale.convert.npy import column_of
from pyg_scale.files.npy import as_tensor, dtype_name
from pyg_scale.files.plain_pickle import load_plain
from pyg_scale.graph.source import of
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory.meta import Attribute
from pyg_scale_migrate.glt.files import Edges, Layout, books, feature_chunks, read_layout

ENDS = ("rows", "cols")
Kind = NodeType | EdgeType
Key = tuple[str, Kind]
"""``"x"`` or ``"edge_attr"``, and its node or edge type."""


def assignment(path: str | PathLike[str]) -> Tensor | dict[str, Tensor]:
    """The parts of a partition directory of GLT, for ``pyg_scale.partition(assignment=...)``.

    Args:
        path: The directory.

    Returns:
        ``int32`` ``[num_nodes]``, the part of every node; by node type if there are types.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If one is damaged or has other content; names it.

    Example::

        convert("glt:partitions", "papers.graph")
        pyg_scale.partition("papers.graph", 4, path="parts", assignment=assignment("partitions"))
    """
    layout = read_layout(path)
    found = {kind: parts.to(torch.int32) for kind, parts in books(layout).items()}
    if not layout.is_hetero:
        return found[None]
    return {str(kind): parts for kind, parts in found.items()}


class GLTReader(Reader):
    """Reads ``glt:DIR``, a partition directory of GLT, as the graph before it was partitioned.

    Nodes and edges keep their ids. Features are ``x`` and ``edge_attr``, weights ``edge_weight``.
    Files are mapped or read in chunks; the ids of edges are in memory (9 bytes per edge, or 17 if
    the ids of a part do not ascend). No code in files is run: only pickles of tensors and plain
    containers are read.

    Args:
        source: The directory, with ``META``, ``node_pb`` and ``part0`` to ``part{k-1}``.
        labels: Files of labels, which GLT stores separately: ``labels.pt`` or ``labels.npy``
            ``[num_nodes, ...]``; with node types ``paper=labels.pt``, several separated by commas.
            They become ``y``.

    Raises:
        FileNotFoundError: If a file or a part is missing.
        ValueError: If files are damaged or do not fit each other; names the file.
        TypeError: If ``labels`` is no text, or a file of labels holds none that torch has.
    """

    def __init__(self, source: str | PathLike[str], labels: str | None = None) -> None:
        self._layout = read_layout(source)
        self._label_files = _label_files(labels, self._layout)
        self._num_nodes: dict[NodeType, int] = {}
        self._edges: dict[EdgeType, Edges] = {}
        self._features: dict[Key, ArrayReader] = {}
        self._dtypes: dict[Key, str] = {}
        self._labels: dict[NodeType, Tensor] = {}

    def files(self) -> list[Path]:
        found = (each for each in self._layout.path.rglob("*") if each.is_file())
        return sorted([*found, *self._label_files.values()])

    def options(self) -> Mapping[str, Any]:
        return {"labels": {str(t): str(file) for t, file in self._label_files.items()}}

    def prepare(self, work: Workspace) -> None:
        """Write features in the order of ids to new files."""
        layout = self._layout
        self._num_nodes = {t: parts.numel() for t, parts in books(layout).items()}
        self._edges = {edge_type: Edges(layout, edge_type) for edge_type in layout.edge_types}
        for number, (node_type, size) in enumerate(self._num_nodes.items()):
            self._prepare(work, "node_feat", ("x", node_type), number, size)
        for number, (edge_type, edges) in enumerate(self._edges.items()):
            self._prepare(work, "edge_feat", ("edge_attr", edge_type), number, edges.num_edges)
        for node_type, file in self._label_files.items():
            self._labels[node_type] = _read_labels(file, self._num_nodes[node_type])

    def _prepare(self, work: Workspace, group: str, key: Key, number: int, rows: int) -> None:
        folders = self._layout.feature_folders(group, key[1])
        if not folders:
            return
        file = work.folder / "glt" / f"{group}-{number}.npy"
        name = f"{group}{of(key[1])}"
        self._dtypes[key] = work.once(
            f"{group} {number}", lambda: _in_order(folders, file, rows, name, work)
        )
        self._features[key] = ArrayReader(file)

    def describe(self) -> Description:
        nodes = {}
        for node_type, size in self._num_nodes.items():
            attributes = self._attribute(("x", node_type))
            if node_type in self._labels:
                labels = self._labels[node_type]
                attributes["y"] = Attribute(dtype_name(labels.dtype), tuple(labels.shape[1:]))
            nodes[node_type] = Nodes(size, attributes)
        edges = {}
        for edge_type, part in self._edges.items():
            attributes = self._attribute(("edge_attr", edge_type))
            if part.has_weight:
                attributes["edge_weight"] = Attribute(dtype_name(part.weight_dtype))
            edges[edge_type] = EdgeList(part.num_edges, "int64", attributes)
        return Description(nodes, edges)

    def edges(self, edge_type: EdgeType, begin: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        return ((src, dst) for src, dst in self._edges[edge_type].read(ENDS, begin, rows))

    def node_attribute(
        self, node_type: NodeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        if name == "x":
            return self._rows(("x", node_type), begin, rows)
        labels = self._labels[node_type]
        return (labels[i : i + rows].clone() for i in range(begin, len(labels), rows))

    def edge_attribute(
        self, edge_type: EdgeType, name: str, begin: int, rows: int
    ) -> Iterator[Tensor]:
        if name == "edge_attr":
            return self._rows(("edge_attr", edge_type), begin, rows)
        return (weight for (weight,) in self._edges[edge_type].read(("weights",), begin, rows))

    def node_attribute_file(self, node_type: NodeType, name: str) -> Path | None:
        return self._features["x", node_type].file if name == "x" else None

    def close(self) -> None:
        for opened in self._features.values():
            opened.close()

    def _attribute(self, key: Key) -> dict[str, Attribute]:
        if key not in self._features:
            return {}
        return {key[0]: Attribute(self._dtypes[key], tuple(self._features[key].shape[1:]))}

    def _rows(self, key: Key, begin: int, rows: int) -> Iterator[Tensor]:
        opened = self._features[key]
        for first in range(begin, opened.shape[0], rows):
            end = min(opened.shape[0], first + rows)
            yield as_tensor(opened.rows(first, end), self._dtypes[key])


def _in_order(folders: list[Path], file: Path, rows: int, name: str, work: Workspace) -> str:
    """Write the features of all parts by id; returns their dtype.

    Raises:
        ValueError: If the parts do not fit each other, or a row is repeated or missing.
    """
    seen = torch.zeros(rows, dtype=torch.bool)
    writer: ArrayWriter | None = None
    like: Tensor | None = None
    empty: Tensor | None = None
    try:
        with work.progress(f"Reading {name}", rows, "row") as bar:
            for folder in folders:
                for ids, values in feature_chunks(folder):
                    if not len(ids):  # of a part without rows, whose shape counts for nothing
                        empty = values if empty is None else empty
                        continue
                    if like is None or writer is None:
                        like = values[:0].clone()
                        writer = _writer_of(file, rows, like)
                    if values.dtype != like.dtype or values.shape[1:] != like.shape[1:]:
                        raise ValueError(
                            f"{folder} has {values.dtype} rows of shape {list(values.shape[1:])}, "
                            f"{folders[0]} {like.dtype} of shape {list(like.shape[1:])}"
                        )
                    _check_ids(ids, seen, folder)
                    _write_runs(writer, ids, values)
                    bar.update(len(ids))
        if not bool(seen.all()):
            missing = int((~seen).nonzero()[0])
            raise ValueError(f"{folders[0].parent.parent}: no part has the {name} of {missing}")
        if like is None or writer is None:
            if empty is None:
                raise ValueError(f"{folders[0]} is empty")
            like, writer = empty, _writer_of(file, rows, empty)
        writer.sync()
        return dtype_name(like.dtype)
    finally:
        if writer is not None:
            writer.close()


def _writer_of(file: Path, rows: int, like: Tensor) -> ArrayWriter:
    return ArrayWriter(file, dtype_name(like.dtype), (rows, *like.shape[1:]), fresh=True)


def _check_ids(ids: Tensor, seen: Tensor, folder: Path) -> None:
    wrong = ids[(ids < 0) | (ids >= seen.numel())]
    if wrong.numel():
        raise ValueError(f"{folder} has a row of id {int(wrong[0])}, there are {seen.numel()}")
    if bool(seen[ids].any()) or ids.unique().numel() != ids.numel():
        raise ValueError(
            f"{folder} has a row that is there already: GLT appends, when it partitions into the "
            "same directory again; partition into an empty one"
        )
    seen[ids] = True


def _write_runs(writer: ArrayWriter, ids: Tensor, values: Tensor) -> None:
    """Write rows to their places, consecutive ones at once."""
    if not ids.numel():
        return
    order = ids.argsort()
    ids, values = ids[order], values[order]
    bounds = [0, *((ids.diff() != 1).nonzero().view(-1) + 1).tolist(), ids.numel()]
    for begin, end in pairwise(bounds):
        writer.write(int(ids[begin]), values[begin:end])


def _label_files(labels: str | None, layout: Layout) -> dict[NodeType, Path]:
    if labels is not None and not isinstance(labels, str):
        raise TypeError(f"labels must be text like 'labels.pt' (got {type(labels).__name__})")
    out: dict[NodeType, Path] = {}
    for item in labels.split(",") if labels else []:
        node_type, equals, file = item.partition("=") if layout.is_hetero else (None, "=", item)
        if not equals or node_type not in layout.node_types:
            raise ValueError(
                f"labels must be like {layout.node_types[0]}=labels.pt (got {item!r}): the types "
                f"are {', '.join(map(str, layout.node_types))}"
            )
        if node_type in out:
            raise ValueError(f"labels names two files{of(node_type)}: {out[node_type]} and {file}")
        if not os.path.isfile(file):  # unlike Path.is_file, also of a name that is too long
            raise FileNotFoundError(f"there is no file {file!r}")
        out[node_type] = Path(file)
    return out


def _read_labels(file: Path, num_nodes: int) -> Tensor:
    if file.suffix == ".npy":
        opened = ArrayReader(file)
        opened.check_rows()
        column_of(opened.dtype, (), file)  # torch has the dtype
        found: Any = torch.from_numpy(opened.rows(0, opened.shape[0]))
        opened.close()
    else:
        found = load_plain(file, mmap=True)
        found = torch.from_numpy(found) if isinstance(found, np.ndarray) else found
    if not isinstance(found, Tensor) or found.dim() < 1 or len(found) != num_nodes:
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{file} must hold a label for each of {num_nodes} nodes (got {got})")
    return found
