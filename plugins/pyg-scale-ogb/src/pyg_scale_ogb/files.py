"""The arrays of a data set, in each of the three forms in which OGB stores one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pyg_scale.convert.base import Workspace
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale_ogb.arrays import Array, Items, npy_array, npz_arrays, transposed
from pyg_scale_ogb.catalog import Facts
from pyg_scale_ogb.table import read_small, to_npy

_CHECK_ROWS = 1 << 20


@dataclass
class Value:
    """An attribute: its array, and its form in batches."""

    array: Array
    dtype: np.dtype[Any]


@dataclass
class NodeFiles:
    """Number of nodes of a type, and their attributes."""

    num_nodes: int
    attributes: dict[str, Value] = field(default_factory=dict)


@dataclass
class EdgeFiles:
    """The edges of a type as rows ``[num_edges, 2]``, and their attributes."""

    pairs: Array
    attributes: dict[str, Value] = field(default_factory=dict)


@dataclass
class GraphFiles:
    """A whole graph, with types sorted by name as in OGB."""

    nodes: dict[NodeType, NodeFiles]
    edges: dict[EdgeType, EdgeFiles]


def raw_files(facts: Facts, raw: Path) -> list[Path]:
    """The files of the graph itself."""
    pattern = "*.npz" if facts.binary else "*.csv.gz"
    return sorted(file for file in raw.rglob(pattern) if file.is_file())


def open_files(facts: Facts, raw: Path, work: Workspace) -> GraphFiles:
    """Find the arrays of a data set; tables are first converted to arrays in ``work.folder``.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If one is damaged, or they do not fit each other; names it.
    """
    opener = _Opener(facts, raw, work)
    if facts.binary:
        graph = opener.archive()
    elif facts.is_hetero:
        graph = opener.hetero_tables()
    else:
        graph = opener.tables()
    _check(graph)
    return graph


class _Opener:
    def __init__(self, facts: Facts, raw: Path, work: Workspace) -> None:
        self.facts, self.raw, self.work = facts, raw, work

    # Tables, one type #########################################################################

    def tables(self) -> GraphFiles:
        nodes = NodeFiles(_one_number(self.raw / "num-node-list.csv.gz"))
        edges = EdgeFiles(self._pairs(self.raw / "edge.csv.gz"))
        _expect_edges(edges, self.raw / "num-edge-list.csv.gz")
        for name, file in (("x", "node-feat"), *((each, each) for each in self.facts.node_files)):
            path = self.raw / f"{file}.csv.gz"
            if file == "node_species" and not path.is_file():
                path = self.raw / "species.csv.gz"  # its name until OGB reads it
            if name != "x" or path.is_file():
                nodes.attributes[name] = self._value(path)
        for name, file in (
            ("edge_attr", "edge-feat"),
            *((each, each) for each in self.facts.edge_files),
        ):
            path = self.raw / f"{file}.csv.gz"
            if name != "edge_attr" or path.is_file():
                edges.attributes[name] = self._value(path)
        if not self.facts.of_links:
            nodes.attributes["y"] = self._label(self.raw / "node-label.csv.gz")
        return GraphFiles({None: nodes}, {None: edges})

    # Tables, many types #######################################################################

    def hetero_tables(self) -> GraphFiles:
        names, *rows = read_small(self.raw / "num-node-dict.csv.gz")
        if len(rows) != 1:
            raise ValueError(f"{self.raw / 'num-node-dict.csv.gz'} has {len(rows)} graphs, not one")
        sizes = dict(zip(names, rows[0], strict=True))
        nodes: dict[NodeType, NodeFiles] = {}
        for name in sorted(sizes):
            nodes[name] = NodeFiles(int(sizes[name]))
            folder = self.raw / "node-feat" / name
            for attribute, file in (
                ("x", "node-feat"),
                *((each, each) for each in self.facts.node_files),
            ):
                if (path := folder / f"{file}.csv.gz").is_file():
                    nodes[name].attributes[attribute] = self._value(path)
        if not self.facts.of_links:
            for name in _chosen(self.raw / "nodetype-has-label.csv.gz"):
                file = self.raw / "node-label" / name / "node-label.csv.gz"
                nodes[name].attributes["y"] = self._label(file)
        edges: dict[EdgeType, EdgeFiles] = {}
        for source, relation, target in sorted(read_small(self.raw / "triplet-type-list.csv.gz")):
            folder = self.raw / "relations" / "___".join((source, relation, target))
            files = EdgeFiles(self._pairs(folder / "edge.csv.gz"))
            _expect_edges(files, folder / "num-edge-list.csv.gz")
            for attribute, file in (
                ("edge_attr", "edge-feat"),
                *((each, each) for each in self.facts.edge_files),
            ):
                if (path := folder / f"{file}.csv.gz").is_file():
                    files.attributes[attribute] = self._value(path)
            edges[source, relation, target] = files
        return GraphFiles(nodes, edges)

    # One archive ##############################################################################

    def archive(self) -> GraphFiles:
        file = self.raw / "data.npz"
        arrays = npz_arrays(file)
        for name in ("edge_index", "num_nodes_list", "num_edges_list"):
            if name not in arrays:
                raise ValueError(f"{file} has no {name}, only: {', '.join(arrays)}")
        pairs = transposed(arrays.pop("edge_index"))
        nodes = NodeFiles(_only(arrays.pop("num_nodes_list"), file))
        edges = EdgeFiles(pairs)
        if (listed := _only(arrays.pop("num_edges_list"), file)) != pairs.shape[0]:
            raise ValueError(f"{file} has {pairs.shape[0]} edges, num_edges_list says {listed}")
        wanted = {"node_feat": "x", "edge_feat": "edge_attr"}
        wanted |= {name: name for name in (*self.facts.node_files, *self.facts.edge_files)}
        for stored, name in wanted.items():
            if stored in arrays:
                where = nodes if stored.startswith("node_") else edges
                where.attributes[name] = Value(arrays[stored], arrays[stored].dtype)
            elif stored not in ("node_feat", "edge_feat"):
                raise ValueError(f"{file} has no {stored}, only: {', '.join(arrays)}")
        if not self.facts.of_links:
            label = self.raw / "node-label.npz"
            found = npz_arrays(label)
            if "node_label" not in found:
                raise ValueError(f"{label} has no node_label, only: {', '.join(found)}")
            array = found["node_label"]
            nan = self.work.once("labels", lambda: _has_nan(array))
            nodes.attributes["y"] = Value(array, np.dtype(np.float32 if nan else np.int64))
        return GraphFiles({None: nodes}, {None: edges})

    # Tables to arrays #########################################################################

    def _pairs(self, file: Path) -> Array:
        array, _ = self._array(file)
        if array.shape[0] == 0:
            return Array(array.file, (0, 2), array.dtype, array.stored, array.offset)
        if array.shape[1] != 2 or array.dtype.kind != "i":
            raise ValueError(
                f"{file} must have two columns of whole numbers (got {array.shape[1]} columns of "
                f"{array.dtype})"
            )
        return array

    def _value(self, file: Path) -> Value:
        array, _ = self._array(file)
        return Value(array, array.dtype)

    def _label(self, file: Path) -> Value:
        array, nan = self._array(file)  # all tasks of these data sets are classifications
        return Value(array, np.dtype(np.float32 if nan else np.int64))

    def _array(self, file: Path) -> tuple[Array, bool]:
        name = file.relative_to(self.raw).as_posix().removesuffix(".csv.gz")
        out = self.work.folder / "tables" / f"{name}.npy"

        def convert() -> dict[str, Any]:
            with self.work.progress(f"Reading {name}", None, "row") as bar:
                return to_npy(file, out, self.work.memory, bar)

        found = self.work.once(f"table {name}", convert)
        return npy_array(out), found["nan"]


def _check(graph: GraphFiles) -> None:
    """Refuse attributes of more or fewer rows than there are nodes or edges."""
    for of_nodes in graph.nodes.values():
        _check_rows(of_nodes.attributes, of_nodes.num_nodes, "nodes")
    for edge_type, of_edges in graph.edges.items():
        _check_rows(of_edges.attributes, of_edges.pairs.shape[0], "edges")
        if edge_type is not None and not {edge_type[0], edge_type[2]} <= set(graph.nodes):
            raise ValueError(f"edge type {edge_type} has a node type that is not in the data set")


def _check_rows(attributes: dict[str, Value], expected: int, what: str) -> None:
    for name, value in attributes.items():
        rows = value.array.shape[0] if value.array.shape else 0
        if rows != expected:
            raise ValueError(
                f"{value.array.file} has {rows} rows of {name!r}, but there are {expected} {what}"
            )


def _expect_edges(files: EdgeFiles, listed: Path) -> None:
    expected = _one_number(listed)
    if files.pairs.shape[0] != expected:
        raise ValueError(
            f"{listed} says {expected} edges, but {files.pairs.shape[0]} are in the table beside it"
        )


def _one_number(file: Path) -> int:
    cells = read_small(file)
    if len(cells) != 1 or not cells[0][0].isdigit():
        raise ValueError(f"{file} must hold one number, the size of the one graph")
    return int(cells[0][0])


def _chosen(file: Path) -> list[str]:
    """The types of a table of types that are marked ``True``."""
    names, marks = read_small(file)
    return [name for name, mark in zip(names, marks, strict=True) if mark == "True"]


def _only(array: Array, file: Path) -> int:
    if int(np.prod(array.shape)) != 1:
        raise ValueError(f"{file} holds {array.shape[0]} graphs, expected one")
    return int(next(iter(array.rows(0, 1))).reshape(-1)[0])


def _has_nan(array: Array) -> bool:
    if array.dtype.kind != "f":
        return False
    return any(bool(np.isnan(part).any()) for part in _parts(array))


def _parts(array: Array) -> Iterator[Items]:
    return array.rows(0, max(1, _CHECK_ROWS // max(1, array.row_items)))
