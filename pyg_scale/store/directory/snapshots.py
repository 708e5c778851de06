"""Snapshots: the states of a graph directory after each append.

Appended rows lie in the folder ``delta``, a file per attribute and two for the ends of edges. These
files only grow, so a snapshot is nothing but numbers of rows. ``HEAD.json`` says those of the
newest snapshot and is replaced as a whole; a file has those of the snapshots before. Readers use
rows that a snapshot counts, and no others: writers add behind them.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.file_view import JoinedView, Piece
from pyg_scale.files.npy import as_tensor, check_header, num_bytes, numpy_dtype
from pyg_scale.graph.topology import CSC, EdgeType, NodeType
from pyg_scale.ops.csc import (
    Compressed,
    build_csc,
    check_rising,
    merge_csc,
    order_by_time,
    weight_prefix,
)
from pyg_scale.store.directory.layout import expected_files
from pyg_scale.store.directory.meta import EdgeMeta, FileMeta, Meta, NodeMeta, checksum
from pyg_scale.store.directory.paths import attribute_file, edge_dir, node_dir

if TYPE_CHECKING:
    from pyg_scale.store.directory.reader import GraphDirectory

FOLDER = "delta"
HEAD = f"{FOLDER}/HEAD.json"
LOG = f"{FOLDER}/snapshots.rows"
FORMAT = "pyg_scale snapshots"
VERSION = 1
_PAGE = 4096
_HEADER = 128  # bytes of a .npy file in addition to its content
_LONGEST_HEAD = 1 << 26
_INT32 = 2**31
_LARGEST = 2**62


class Counts(NamedTuple):
    """Numbers of nodes and edges of each type, in the order of ``META.json``."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]

    @classmethod
    def of(cls, meta: Meta) -> Counts:
        """Those that a ``META.json`` says."""
        nodes = tuple(node.num_nodes for node in meta.nodes.values())
        return cls(nodes, tuple(edge.num_edges for edge in meta.edges.values()))

    def row(self, snapshot: int) -> Tensor:
        """The row of a snapshot in the list of snapshots."""
        return torch.tensor([[snapshot, *self.nodes, *self.edges]])

    def meta(self, base: Meta) -> Meta:
        """A ``META.json`` with these numbers."""
        nodes: dict[NodeType, NodeMeta] = {}
        for node, size in zip(base.nodes.values(), self.nodes, strict=True):
            nodes[node.name] = replace(node, num_nodes=size, part_nodes=[size])
        edges: dict[EdgeType, EdgeMeta] = {}
        for edge, size in zip(base.edges.values(), self.edges, strict=True):
            grown = replace(edge, num_edges=size, part_edges=[size])
            source = None if edge.name is None else edge.name[0]
            if size > edge.num_edges:
                grown.edge_id_dtype = "int32" if size < _INT32 else "int64"
            if nodes[source].num_nodes >= _INT32:
                grown.indices_dtype = "int64"
            edges[edge.name] = grown
        return replace(base, nodes=nodes, edges=edges)


class Column(NamedTuple):
    """A file of appended rows: raw, without a header.

    Attributes:
        name: Its path in the directory.
        continues: The file of the base that has the rows before; ``None`` for the ends of edges.
        dtype: Its dtype.
        row: The shape of a row.
        base_rows: Number of rows of the base.
        rows: Number of appended rows.
    """

    name: str
    continues: str | None
    dtype: str
    row: tuple[int, ...]
    base_rows: int
    rows: int

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return numpy_dtype(self.dtype).itemsize * math.prod(self.row)

    @property
    def pad(self) -> int:
        """Bytes before the first row: pages of the file are then pages of the joined array."""
        return 0 if self.continues is None else self.base_rows * self.row_bytes % _PAGE

    @property
    def bytes(self) -> int:
        """Size of the file at the snapshot."""
        return self.pad + self.rows * self.row_bytes


def columns_of(meta: Meta, counts: Counts, *, empty: bool = False) -> Iterator[Column]:
    """The files of appended rows at some counts.

    Args:
        meta: That of the base.
        counts: Numbers of nodes and edges.
        empty: Also those without a row, which have no file.
    """
    for node, size in zip(meta.nodes.values(), counts.nodes, strict=True):
        if size > node.num_nodes or empty:
            yield from _attributes(node, node_dir(node.name, 0), node.num_nodes, size)
    for edge, size in zip(meta.edges.values(), counts.edges, strict=True):
        if size > edge.num_edges or empty:
            new = size - edge.num_edges
            for end in ("src", "dst"):
                yield Column(end_file(edge.name, end), None, "int64", (), 0, new)
            yield from _attributes(edge, edge_dir(edge.name, 0), edge.num_edges, size)


def _attributes(kind: NodeMeta | EdgeMeta, folder: str, before: int, size: int) -> Iterator[Column]:
    for name, attribute in kind.attributes.items():
        base = attribute_file(folder, name)
        file = _in_delta(base).removesuffix(".npy") + ".rows"
        yield Column(file, base, attribute.dtype, attribute.row, before, size - before)


def end_file(edge_type: EdgeType, end: str) -> str:
    """The file of the sources (``"src"``) or destinations (``"dst"``) of appended edges."""
    return f"{_in_delta(edge_dir(edge_type, 0))}/{end}.rows"


def _in_delta(name: str) -> str:
    return f"{FOLDER}/{name.removeprefix('part-0/')}"


def log_column(meta: Meta, rows: int) -> Column:
    """The list of snapshots after the base, one row of ``int64`` each: id, nodes, edges."""
    return Column(LOG, None, "int64", (1 + len(meta.nodes) + len(meta.edges),), 0, rows)


@dataclass
class Head:
    """The content of ``HEAD.json``.

    Attributes:
        base: The id of the snapshot that the files of the base are.
        newest: The id of the newest one; ids in between are consecutive.
        lineage: A random number, from the first append on: tells two graphs that went on from
            copies of one.
        base_graph: A number that tells whose base this is, see :func:`base_number`.
        counts: Numbers of nodes and edges of the newest snapshot.
        files: Sizes and checksums of the files of appended rows.
    """

    base: int
    newest: int
    lineage: str
    base_graph: int
    counts: Counts
    files: dict[str, FileMeta] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of ``HEAD.json``."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "base": self.base,
            "newest": self.newest,
            "lineage": self.lineage,
            "base_graph": self.base_graph,
            "nodes": list(self.counts.nodes),
            "edges": list(self.counts.edges),
            "files": {name: vars(file) for name, file in self.files.items()},
        }
        return json.dumps({**content, "checksum": checksum(content)}, indent=1)

    @classmethod
    def from_json(cls, text: bytes, where: Path, meta: Meta) -> Head:
        """Read ``HEAD.json``.

        Args:
            text: Its content.
            where: Its path in errors.
            meta: That of the base.

        Raises:
            GraphDirectoryError: If it is none, of a newer version or another base, was altered, or
                contradicts itself or the base.
        """
        try:
            found = json.loads(text.decode())
            check = found.pop("checksum", None) if isinstance(found, dict) else None
            intact = check == checksum(found)
        except (ValueError, RecursionError) as error:
            raise GraphDirectoryError(f"{where} is not JSON: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise GraphDirectoryError(f"{where} does not say that it has {FORMAT}")
        version = found.get("version")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise GraphDirectoryError(
                f"{where} has version {version!r}, this release reads up to {VERSION}: "
                "pip install --upgrade pyg-scale"
            )
        if not intact:
            raise GraphDirectoryError(f"{where} does not match its checksum: it was altered")
        try:
            head = cls(
                _number(found["base"], "base"),
                _number(found["newest"], "newest"),
                str(found["lineage"]),
                _number(found["base_graph"], "base_graph"),
                Counts(_numbers(found["nodes"], "nodes"), _numbers(found["edges"], "edges")),
                {
                    name: FileMeta(_number(f["bytes"], name), _number(f["crc32"], name))
                    for name, f in found["files"].items()
                },
            )
            head.check(meta)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise GraphDirectoryError(f"{where} is incomplete or wrong: {reason}") from None
        return head

    def check(self, meta: Meta) -> None:
        """Refuse contradictions.

        Raises:
            ValueError: If there is one.
        """
        if self.base_graph != base_number(meta):
            raise ValueError("it belongs to another META.json")
        _check_grown(Counts.of(meta), self.counts)
        expected = {c.name: c.bytes for c in columns_of(meta, self.counts)}
        if self.newest < self.base:
            raise ValueError(f"the newest snapshot is {self.newest}, the base {self.base}")
        if self.newest > self.base:
            expected[LOG] = log_column(meta, self.newest - self.base).bytes
        elif expected:
            raise ValueError("the base has appended rows")
        if {name: file.bytes for name, file in self.files.items()} != expected:
            wrong = min(set(expected.items()) ^ {(n, f.bytes) for n, f in self.files.items()})
            raise ValueError(f"the files are not those of the counts: {wrong[0]}")


def _check_grown(base: Counts, counts: Counts) -> None:
    for kind, before, after in zip(("nodes", "edges"), base, counts, strict=True):
        if len(before) != len(after) or any(b > a for b, a in zip(before, after, strict=True)):
            raise ValueError(f"{kind} are {list(after)}, and {list(before)} in the base")


def _number(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{name} is {value!r}")
    return value


def _numbers(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is no list")
    return tuple(_number(each, name) for each in value)


def base_number(meta: Meta) -> int:
    """A number that differs for other nodes and edges, but not for added attributes and sets."""
    names = [n for n in meta.files if n.startswith("part-0/edges") and "/attributes/" not in n]
    files = [[name, vars(meta.files[name])] for name in sorted(names)]
    return checksum([list(Counts.of(meta)), files])


def read_head(open_file: Callable[[str], BinaryIO], path: Path, meta: Meta) -> Head:
    """The head of a directory; that of the base alone if nothing was appended.

    Args:
        open_file: Opens a file of the directory by its name.
        path: The directory, in errors.
        meta: The content of its ``META.json``.

    Raises:
        GraphDirectoryError: If it is damaged.
    """
    try:
        with open_file(HEAD) as file:
            text = file.read(_LONGEST_HEAD + 1)
    except FileNotFoundError:
        return Head(0, 0, "", base_number(meta), Counts.of(meta))
    except OSError as error:
        raise GraphDirectoryError(f"{path / HEAD} cannot be read: {error}") from None
    if len(text) > _LONGEST_HEAD:
        raise GraphDirectoryError(f"{path / HEAD} is longer than any {HEAD}")
    head = Head.from_json(text, path / HEAD, meta)
    if meta.num_parts != 1:
        raise GraphDirectoryError(f"{path / HEAD} belongs to a graph of one part")
    return head


def counts_at(
    head: Head, snapshot: int, open_file: Callable[[str], BinaryIO], path: Path, meta: Meta
) -> Counts:
    """The counts of a snapshot.

    Raises:
        GraphDirectoryError: If it does not exist (any more); says which do. If the list is damaged.
    """
    if not head.base <= snapshot <= head.newest:
        if snapshot < head.base:
            why = f"compaction has folded it into snapshot {head.base}"
        else:
            why = f"the newest is {head.newest}"
        raise GraphDirectoryError(
            f"{path} has no snapshot {snapshot}: {why}; open {head.base} to {head.newest}"
        )
    if snapshot == head.newest:
        return head.counts
    if snapshot == head.base:
        return Counts.of(meta)
    log = log_column(meta, head.newest - head.base)
    row = read_rows(open_file, path, log, snapshot - head.base - 1, 1)[0].tolist()
    middle = 1 + len(meta.nodes)
    counts = Counts(tuple(row[1:middle]), tuple(row[middle:]))
    try:
        _check_grown(Counts.of(meta), counts)
        _check_grown(counts, head.counts)
        if row[0] != snapshot:
            raise ValueError(f"it has the id {row[0]}")
    except ValueError as error:
        raise GraphDirectoryError(f"{path / LOG}: snapshot {snapshot}: {error}") from None
    return counts


def read_rows(
    open_file: Callable[[str], BinaryIO], path: Path, column: Column, first: int, count: int
) -> Tensor:
    """Appended rows ``[count, ...]``, read into memory.

    Raises:
        GraphDirectoryError: If the file is missing or too short.
    """
    out = np.empty((count, *column.row), numpy_dtype(column.dtype))
    try:
        with open_file(column.name) as file:
            file.seek(column.pad + first * column.row_bytes)
            view = out.reshape(-1).view(np.uint8).data if out.size else memoryview(b"")
            while view.nbytes:
                read = file.readinto(view)  # type: ignore[attr-defined]
                if not read:
                    raise GraphDirectoryError(f"{path / column.name} is truncated")
                view = view[read:]
    except OSError as error:
        raise GraphDirectoryError(f"{path / column.name} cannot be read: {error}") from None
    return as_tensor(out, column.dtype)


class Delta:
    """The rows that were appended to a base, as a snapshot sees them.

    Args:
        directory: The directory.
        base: Its ``META.json``.
        counts: The counts of the snapshot.
    """

    def __init__(self, directory: GraphDirectory, base: Meta, counts: Counts) -> None:
        self._directory, self._base = weakref.proxy(directory), base
        self.meta = counts.meta(base)
        columns = list(columns_of(base, counts))
        self.columns = {c.continues: c for c in columns if c.continues is not None}
        self.files = {c.name: c for c in columns}

    def as_base(self, number: int) -> Meta:
        """``META.json`` as if the snapshot were a base, for those who cannot read its files.

        Args:
            number: Stands for the checksum of each file.
        """
        files = dict(self._base.files)
        for file in expected_files(self.meta, [0]):
            size = _HEADER + num_bytes(file.dtype, file.shape)
            files[file.name] = FileMeta(size, number)
        return replace(self.meta, files=files)

    def array(self, name: str) -> Tensor:
        """A file of the base with the rows after it, mapped as one tensor; see :attr:`columns`.

        Raises:
            GraphDirectoryError: If a file is missing, too short, or has other content.
        """
        column, directory = self.columns[name], self._directory
        path = directory.path / name
        shape = (column.base_rows, *column.row)
        offset = check_header(path, column.dtype, shape, open_file=lambda: directory.file(name))
        dtype, shape = numpy_dtype(column.dtype), (column.base_rows + column.rows, *column.row)
        try:
            with directory.file(name) as base, directory.file(column.name) as new:
                pieces = [
                    Piece(base.fileno(), offset, column.base_rows * column.row_bytes),
                    Piece(new.fileno(), column.pad, column.rows * column.row_bytes),
                ]
                view = JoinedView(pieces, dtype, shape) if column.row_bytes else np.empty(shape)
        except OSError as error:
            raise GraphDirectoryError(f"{path / column.name} cannot be mapped: {error}") from None
        with torch.inference_mode(False):  # tensors of inference mode have no version counter
            return as_tensor(np.asarray(view, dtype), column.dtype)

    def appended_edges(self, edge_type: EdgeType) -> tuple[Tensor, Tensor]:
        """The sources and destinations ``int64`` ``[n]`` of the appended edges of a type."""
        found = []
        for end in ("src", "dst"):
            column = self.files.get(end_file(edge_type, end))
            if column is None:
                return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
            directory = self._directory
            found.append(read_rows(directory.file, directory.path, column, 0, column.rows))
        return found[0], found[1]

    def changes(self, edge_type: EdgeType) -> bool:
        """Return True if the in-edges of a type are not those of the base."""
        end = self.meta.grouped_by(edge_type)
        grown = self.meta.nodes[end].num_nodes > self._base.nodes[end].num_nodes
        return grown or self.meta.edges[edge_type] != self._base.edges[edge_type]

    def in_edges(self, edge_type: EdgeType, base: CSC) -> CSC:
        """The in-edges of a type, in memory: 8 to 16 bytes per edge.

        They are in the order of a graph that was saved with the appended edges at its end.

        Args:
            edge_type: The type.
            base: Those of the base.

        Raises:
            GraphDirectoryError: If an appended edge has a node that does not exist, or the pointers
                of the base are damaged.
        """
        meta, directory = self.meta, self._directory
        edge, part = meta.edges[edge_type], directory.part(0)
        source, target = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
        num_src, num_dst = meta.nodes[source].num_nodes, meta.nodes[target].num_nodes
        src, dst = self.appended_edges(edge_type)
        try:
            new = build_csc(dst, src, num_dst, num_src, what="appended edge {}")
        except IndexError as error:
            file = directory.path / end_file(edge_type, "src")
            raise GraphDirectoryError(f"{file}: {error}") from None
        try:
            check_rising(base.indptr, base.num_edges)  # they are followed without a look
        except ValueError as error:
            file = directory.path / edge_dir(edge_type, 0) / "indptr.npy"
            raise GraphDirectoryError(f"{file}: {error}: write the directory again") from None
        missing = num_dst + 1 - base.indptr.numel()
        indptr = torch.cat([base.indptr, base.indptr[-1:].expand(missing)])
        found = merge_csc(Compressed(indptr, base.indices, base.edge_id), new)
        time = None
        if meta.times_neighbors(edge_type):
            of_nodes = meta.sortable(part.node_attribute(source, meta.time_attr or ""), source)
            found = order_by_time(found, of_nodes, of_edges=False)
        elif edge.has_time:
            of_edges = meta.sortable(
                part.edge_attribute(edge_type, meta.time_attr or ""), edge_type
            )
            found = order_by_time(found, of_edges, of_edges=True)
            time = of_edges if found.edge_id is None else of_edges.index_select(0, found.edge_id)
        prefix = None
        if edge.has_weight:
            weight = part.edge_attribute(edge_type, meta.weight_attr or "")
            prefix = weight_prefix(found, weight.view(-1))
        return CSC(found.indptr, found.indices, found.edge_id, time, prefix)
