"""Appends nodes and edges to a graph directory, as a new snapshot of it."""

from __future__ import annotations

import math
import os
import secrets
import time as clock
import zlib
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import check_regular, torch_dtype
from pyg_scale.files.place import Lock, replace_file, sync
from pyg_scale.graph.source import of
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory.appended_rows import (
    AppendedRows,
    EdgeRows,
    NodeRows,
    check_names,
    rows_of,
)
from pyg_scale.store.directory.meta import Attribute, FileMeta, Meta
from pyg_scale.store.directory.paths import attribute_file, edge_dir, node_dir
from pyg_scale.store.directory.reader import GraphDirectory
from pyg_scale.store.directory.snapshots import (
    HEAD,
    Column,
    Counts,
    Head,
    columns_of,
    end_file,
    log_column,
)
from pyg_scale.store.directory.writer import refused, write_rows

_AT_ONCE = 8  # files that are flushed at a time
TIMEOUT = 60.0
"""Seconds that a writer waits for another one."""


def append(
    path: str | PathLike[str], nodes: Any = None, edges: Any = None, *, timeout: float = TIMEOUT
) -> int:
    """Append nodes and edges to a graph directory, as one new snapshot of it.

    New nodes have the ids that follow those of their type, new edges likewise. All of it is on the
    disk when the call returns; if the process dies, all or nothing of it is there. Graphs that are
    open do not change, and readers never wait: :func:`pyg_scale.open` gives the new snapshot.

    Args:
        path: A graph directory of one part.
        nodes: New nodes, with every attribute that their type has: ``{name: tensor [n, ...]}`` or a
            ``Data``, in a graph with types ``{node type: {name: tensor}}`` or a ``HeteroData``.
            Nodes without attributes: ``{"num_nodes": n}``.
        edges: New edges, between nodes of the graph and new ones: ``edge_index`` ``[2, n]``, a
            mapping that has it and the attributes of edges, or a ``Data``; in a graph with types
            ``{edge type: edge_index or mapping}`` or a ``HeteroData``. What a ``Data`` has without
            a row per node or edge stays as it is in the graph.
        timeout: Seconds to wait while another process appends.

    Returns:
        The id of the snapshot; the newest one if there is no row to append.

    Raises:
        ValueError: If an attribute is missing or unknown, has another shape, a time is NaN or a
            weight negative; names it. Nothing is appended then; likewise for the other errors.
        TypeError: If a value is of another type or dtype.
        IndexError: If an edge has a node that does not exist.
        NotImplementedError: If the directory is partitioned.
        GraphDirectoryError: If it is damaged, the disk is full, or another process (which it names)
            appends for longer than ``timeout``.

    Example::

        append("products", nodes={"x": x, "y": y}, edges=torch.tensor([[7, 12], [100, 100]]))
    """
    with Appender(path, timeout=timeout) as appender:
        return appender.append(nodes, edges)


class Appender:
    """Appends rows one by one, many of them in one snapshot (group commit).

    Rows are checked when they come, and written together: by :meth:`commit`, when there are
    ``max_rows``, when one comes ``max_seconds`` after the first that waits, and at the end of the
    ``with`` block. Until then they are in the memory of this process, and lost with it; what was
    committed is on the disk. While an appender is open, no other process appends. It is for one
    thread at a time.

    Args:
        path: A graph directory of one part.
        timeout: Seconds to wait while another process appends or finishes compaction.
        max_rows: Rows that wait at most.
        max_seconds: Age of the oldest row that waits at which the next one lets all be written.

    Raises:
        NotImplementedError: If the directory is partitioned.
        GraphDirectoryError: If it is damaged, or another process (which it names) appends for
            longer than ``timeout``.
        ValueError: If a number is out of range.

    Example::

        with Appender("shop") as appender:
            order = appender.add_node("order", x=x, time=now)
            appender.add_edge(order, product, ("order", "has", "product"))
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        timeout: float = TIMEOUT,
        max_rows: int = 20_000,
        max_seconds: float = 1.0,
    ) -> None:
        if not timeout >= 0 or not max_seconds >= 0 or max_rows < 1:
            raise ValueError("timeout and max_seconds must be 0 or more, max_rows 1 or more")
        self.path = Path(path).resolve()
        self._timeout, self._max_rows, self._max_seconds = timeout, max_rows, max_seconds
        _appendable(self.path)  # before a lock beside it
        with refused(self.path):
            self._writing = Lock(lock_of_appenders(self.path), timeout)
        try:
            directory = _appendable(self.path)
        except BaseException:
            self._writing.release()
            raise
        self._meta: Meta = directory.base_meta
        self._head = directory.head
        self._counts = self._head.counts
        self._rows = _SingleRows(directory.meta)
        self._since = 0.0
        self._open = True

    @property
    def snapshot(self) -> int:
        """The id of the newest snapshot, without rows that wait."""
        return self._head.newest

    def add_node(self, node_type: NodeType = None, /, **attributes: Any) -> int:
        """Add a node, with every attribute that its type has: a number, or a row as a tensor.

        Returns:
            Its id.

        Raises:
            ValueError: See :func:`append`, as for the other errors.
        """
        self._check_open()
        added = self._rows.add_node(node_type, attributes)
        self._added()
        return added

    def add_edge(
        self, src: int, dst: int, edge_type: EdgeType = None, /, **attributes: Any
    ) -> None:
        """Add an edge between nodes of the graph, those that wait included.

        Raises:
            IndexError: If a node does not exist.
            ValueError: See :func:`append`, as for the other errors.
        """
        self._check_open()
        self._rows.add_edge(src, dst, edge_type, attributes)
        self._added()

    def append(self, nodes: Any = None, edges: Any = None) -> int:
        """Append many rows, after those that wait; see :func:`append`."""
        self._check_open()
        self.commit()
        rows = rows_of(self._meta, nodes, edges)
        return self._commit(rows)

    def commit(self) -> int:
        """Write the rows that wait, as one snapshot.

        Returns:
            The id of the newest snapshot.

        Raises:
            GraphDirectoryError: If the disk is full, or the graph was replaced meanwhile. The rows
                still wait then.
        """
        self._check_open()
        if not self._rows.count:
            return self._head.newest
        newest = self._commit(self._rows.tensors())
        self._rows = _SingleRows(self._counts.meta(self._meta))
        return newest

    def close(self) -> None:
        """Let others append; rows that wait are dropped."""
        if self._open:
            self._open = False
            self._writing.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None and self._open:
                self.commit()
        finally:
            self.close()

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError("the appender is closed")

    def _added(self) -> None:
        now = clock.monotonic()
        if self._rows.count == 1:
            self._since = now
        if self._rows.count >= self._max_rows or now - self._since >= self._max_seconds > 0:
            self.commit()

    # Files #################################################################################

    def _commit(self, rows: AppendedRows) -> int:
        """Write rows as one snapshot."""
        counts = _grown(self._counts, self._meta, rows)
        _check_ends(counts, self._meta, rows)
        if rows.is_empty:
            return self._head.newest
        with refused(self.path):
            lock = Lock(self.path, self._timeout)
        try:
            self._catch_up()
            self._head = _write(self.path, self._meta, self._head, rows, counts)
        finally:
            lock.release()
        self._counts = counts
        return self._head.newest

    def _catch_up(self) -> None:
        """Look at the base again, which compaction may have replaced meanwhile."""
        head, mine = (directory := _appendable(self.path)).head, self._head
        if (head.lineage, head.newest, head.counts) != (mine.lineage, mine.newest, mine.counts):
            raise GraphDirectoryError(
                f"{self.path} was replaced by another graph while rows waited to be appended"
            )
        self._meta, self._head = directory.base_meta, head


def lock_of_appenders(path: Path) -> Path:
    """The path that an appender locks; the directory itself is locked for moments only."""
    return path.with_name(f"{path.name}.append")


def _appendable(path: Path) -> GraphDirectory:
    """The newest snapshot of a directory to which rows may be appended.

    Raises:
        NotImplementedError: If it is partitioned.
        GraphDirectoryError: If it is none, or damaged.
    """
    directory = GraphDirectory(path)
    if directory.meta.num_parts != 1 or directory.meta.partition is not None:
        raise NotImplementedError(
            f"{path} is partitioned, and rows are appended to graphs of one part: append to the "
            "directory that was partitioned, compact it, and partition it again"
        )
    return directory


def _grown(before: Counts, meta: Meta, rows: AppendedRows) -> Counts:
    nodes = tuple(
        count + (rows.nodes[t].num_nodes if t in rows.nodes else 0)
        for t, count in zip(meta.nodes, before.nodes, strict=True)
    )
    edges = tuple(
        count + (rows.edges[t].edge_index.size(1) if t in rows.edges else 0)
        for t, count in zip(meta.edges, before.edges, strict=True)
    )
    return Counts(nodes, edges)


def _check_ends(counts: Counts, meta: Meta, rows: AppendedRows) -> None:
    """Refuse edges of nodes that do not exist.

    Raises:
        IndexError: If there is one; names it.
    """
    sizes = dict(zip(meta.nodes, counts.nodes, strict=True))
    for edge_type, (edge_index, _) in rows.edges.items():
        for end, row in (("source", edge_index[0]), ("destination", edge_index[1])):
            node_type = None if edge_type is None else edge_type[0 if end == "source" else 2]
            size = sizes[node_type]
            wrong = (row < 0) | (row >= size)
            if bool(wrong.any()):
                first = int(wrong.nonzero()[0])
                node = int(row[first])
                raise IndexError(
                    f"edge {first} of the new edges{of(edge_type)} has the {end} {node}, but there "
                    f"are {size} nodes{of(node_type)}, new ones included"
                )


def _write(path: Path, meta: Meta, before: Head, rows: AppendedRows, counts: Counts) -> Head:
    """Write rows behind those of the newest snapshot, then the head that counts them.

    Raises:
        GraphDirectoryError: If the disk is full or fails, or files are damaged.
    """
    head = Head(
        before.base,
        before.newest + 1,
        before.lineage or secrets.token_hex(16),
        before.base_graph,
        counts,
        dict(before.files),
    )
    content: dict[str, Tensor] = {}
    for node_type, (_, attributes) in rows.nodes.items():
        for name, value in attributes.items():
            content[attribute_file(node_dir(node_type, 0), name)] = value
    for edge_type, (edge_index, attributes) in rows.edges.items():
        content[end_file(edge_type, "src")], content[end_file(edge_type, "dst")] = edge_index
        for name, value in attributes.items():
            content[attribute_file(edge_dir(edge_type, 0), name)] = value
    files = RowFiles(path, head.files)
    for column in columns_of(meta, counts):
        new = content.get(column.continues or column.name)
        if new is not None and len(new):
            files.extend(column, new)
    files.extend(log_column(meta, head.newest - head.base), counts.row(head.newest))
    files.flush()
    with refused(path / HEAD):
        replace_file(path / HEAD, head.to_json())
    return head


class RowFiles:
    """Files of appended rows that are being extended, and put on the disk together.

    Args:
        path: The directory.
        known: Sizes and checksums of what was committed, which :meth:`extend` brings up to date.
    """

    def __init__(self, path: Path, known: dict[str, FileMeta]) -> None:
        self._path, self.files = path, known
        self._written: set[Path] = set()
        self._folders: set[Path] = set()

    def extend(self, column: Column, value: Tensor) -> None:
        """Write rows behind those of a file that were committed; cut off what was not.

        Raises:
            GraphDirectoryError: If the disk is full, or the file is not what it should be.
        """
        file = self._path / column.name
        known = self.files.get(column.name, FileMeta(0, 0))
        pad = bytes(0 if known.bytes else column.pad)
        with refused(file):
            self.make_folder(file.parent)
            if os.path.lexists(file):
                check_regular(column.name, self._path)
            else:
                self._folders.add(file.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(file, flags, 0o666), "rb+") as out:
                size = os.fstat(out.fileno()).st_size
                if size < known.bytes:
                    raise GraphDirectoryError(
                        f"{file} is truncated: it has {size} bytes, and had {known.bytes}"
                    )
                if file not in self._written:
                    out.truncate(known.bytes)  # what a writer left that died before it was done
                out.seek(known.bytes)
                out.write(pad)
                crc = zlib.crc32(pad, known.crc32)
                crc, written = write_rows(out, value, value.dtype, crc)
        self._written.add(file)
        self.files[column.name] = FileMeta(known.bytes + len(pad) + written, crc)

    def make_folder(self, folder: Path) -> None:
        """Create a folder in the directory.

        Raises:
            GraphDirectoryError: If a link leads out of the directory.
        """
        if not folder.resolve().is_relative_to(self._path.resolve()):
            raise GraphDirectoryError(f"{folder} leads out of {self._path}: move the folder there")
        if not folder.is_dir():
            self.make_folder(folder.parent)
            folder.mkdir()
            self._folders.add(folder.parent)

    def flush(self) -> None:
        """Put all of it on the disk, several files at a time.

        Raises:
            GraphDirectoryError: If the disk fails.
        """
        with refused(self._path), ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(sync, [*self._written, *self._folders]))
        self._written.clear()
        self._folders.clear()


# Single rows ##############################################################################


class _Value:
    """The check of single values of an attribute.

    Args:
        name: The attribute, in errors.
        spec: Its dtype and the shape of a row.
        is_time: True if it must not be NaN.
        float_time: True if times must be numbers of ``float64``.
        is_weight: True if it must be finite and not negative.
    """

    def __init__(
        self, name: str, spec: Attribute, is_time: bool, float_time: bool, is_weight: bool
    ) -> None:
        self.name, self.dtype, self.row = name, torch_dtype(spec.dtype), tuple(spec.row)
        self._is_time, self._float_time, self._is_weight = is_time, float_time, is_weight
        self._kinds: tuple[type, ...] = (bool,)
        self._range: tuple[float, float] | None = None
        if self.dtype.is_complex:
            self._kinds = (int, float, complex)
        elif self.dtype.is_floating_point:
            self._kinds = (int, float)
        elif self.dtype != torch.bool:
            limits = torch.iinfo(self.dtype)
            self._kinds, self._range = (int,), (limits.min, limits.max)

    def check(self, value: Any) -> Any:
        """The value, if it is one; else raise ``TypeError`` or ``ValueError``."""
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            if value.dtype != self.dtype or tuple(value.shape) != self.row:
                raise self._wrong(f"{value.dtype} {list(value.shape)}")
            number = value.item() if self._is_time or self._is_weight else 0
        elif self.row or type(value) not in self._kinds:
            raise self._wrong(repr(value))
        else:
            number = value
            if self._range is not None and not self._range[0] <= value <= self._range[1]:
                raise ValueError(f"{self.name} must fit {self.dtype} (got {value})")
        if self._is_time and number != number:
            raise ValueError(f"{self.name} must not be NaN")
        if self._is_time and self._float_time and float(number) != number:
            raise ValueError(
                f"{self.name}: {number} would be rounded, because other times of the graph are "
                "floating point numbers"
            )
        if self._is_weight and not 0 <= number < math.inf:
            raise ValueError(f"{self.name} must be finite, 0 or more (got {number})")
        return value

    def _wrong(self, got: str) -> TypeError:
        number = "" if self.row else "a number or "
        return TypeError(
            f"{self.name} must be {number}a tensor, {self.dtype} {list(self.row)} (got {got})"
        )

    def tensor(self, values: list[Any]) -> Tensor:
        """Checked values as rows."""
        if not any(isinstance(value, Tensor) for value in values):
            return torch.tensor(values, dtype=self.dtype).view(-1, *self.row)
        return torch.stack([torch.as_tensor(value, dtype=self.dtype) for value in values])


class _Waiting:
    """Rows of one type that wait: the values of each attribute."""

    def __init__(self, meta: Meta, known: dict[str, Attribute], what: str, of_edges: bool) -> None:
        self.what = what
        self._checks = {
            name: _Value(
                f"{name!r} of {what}",
                spec,
                name == meta.time_attr and of_edges == meta.time_of_edges,
                meta.float_time,
                name == meta.weight_attr and of_edges,
            )
            for name, spec in known.items()
        }
        self._values: dict[str, list[Any]] = {name: [] for name in known}
        self.ends: tuple[list[int], list[int]] = [], []
        self.count = 0

    def add(self, attributes: dict[str, Any]) -> None:
        if attributes.keys() != self._checks.keys():
            check_names(attributes, self._checks, self.what)
        checked = [(name, self._checks[name].check(v)) for name, v in attributes.items()]
        for name, value in checked:
            self._values[name].append(value)
        self.count += 1

    def tensors(self) -> dict[str, Tensor]:
        return {name: self._checks[name].tensor(values) for name, values in self._values.items()}


class _SingleRows:
    """Rows that wait to be written, which were added one at a time.

    Args:
        meta: The graph, with the counts of its newest snapshot.
    """

    def __init__(self, meta: Meta) -> None:
        self._nodes = {
            t: _Waiting(meta, node.attributes, f"the new node{of(t)}", False)
            for t, node in meta.nodes.items()
        }
        self._edges = {
            t: _Waiting(meta, edge.attributes, f"the new edge{of(t)}", True)
            for t, edge in meta.edges.items()
        }
        self._before = {t: node.num_nodes for t, node in meta.nodes.items()}
        self.count = 0

    def add_node(self, node_type: NodeType, attributes: dict[str, Any]) -> int:
        """Add a node; returns its id."""
        rows = _of_type(self._nodes, node_type, "node")
        rows.add(attributes)
        self.count += 1
        return self._before[node_type] + rows.count - 1

    def add_edge(self, src: int, dst: int, edge_type: EdgeType, attributes: dict[str, Any]) -> None:
        """Add an edge."""
        rows = _of_type(self._edges, edge_type, "edge")
        types = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
        for end, node_type, name in ((src, types[0], "source"), (dst, types[1], "destination")):
            size = self._before[node_type] + self._nodes[node_type].count
            if type(end) is not int:
                raise TypeError(f"the {name} of {rows.what} must be a node's number (got {end!r})")
            if not 0 <= end < size:
                raise IndexError(
                    f"the {name} of {rows.what} is {end}, but there are {size} "
                    f"nodes{of(node_type)}, new ones included"
                )
        rows.add(attributes)
        rows.ends[0].append(src)
        rows.ends[1].append(dst)
        self.count += 1

    def tensors(self) -> AppendedRows:
        """All of them."""
        return AppendedRows(
            {t: NodeRows(r.count, r.tensors()) for t, r in self._nodes.items() if r.count},
            {
                t: EdgeRows(torch.tensor(r.ends), r.tensors())
                for t, r in self._edges.items()
                if r.count
            },
        )


def _of_type(known: dict[Any, _Waiting], kind: Any, what: str) -> _Waiting:
    if kind not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"the graph has no {what} type {kind!r}, only {names}")
    return known[kind]
