"""Opens a graph directory: checks it, and maps its files on first access."""

from __future__ import annotations

import fcntl
import operator
import os
import threading
import weakref
import zlib
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import check_regular, map_array, open_regular
from pyg_scale.files.place import try_lock
from pyg_scale.graph.topology import CSC, EdgeType, NodeType
from pyg_scale.store.directory.book import PartitionBook
from pyg_scale.store.directory.layout import book_dtype
from pyg_scale.store.directory.meta import LONGEST_META, META, FileMeta, Meta
from pyg_scale.store.directory.paths import attribute_file, edge_dir, node_dir, set_file
from pyg_scale.store.directory.snapshots import HEAD, Delta, counts_at, read_head

OPENINGS = 4
"""Attempts to open a directory that others replace meanwhile."""
_opened: weakref.WeakValueDictionary[tuple[Any, ...], GraphDirectory] = (
    weakref.WeakValueDictionary()
)
_opening = threading.Lock()
_merging = threading.RLock()


class GraphDirectory:
    """An opened graph directory, at one snapshot. Only ``META.json`` and file lengths are read.

    Tensors are mapped copy-on-write: a write to one stays in this process. Files are found through
    the opened directory, which is never mixed with one that another writer puts in its place. A
    copy in another process opens the path again. What is appended later does not change it.

    Args:
        path: The directory.
        snapshot: The id of a snapshot; ``None`` for the newest.

    Raises:
        GraphDirectoryError: If it is not a graph directory, has a newer version, or a file is
            missing, has another length, is not a regular file, or is reached by a link that leads
            out of the directory; names the file. Parts that are wholly absent are not an error: a
            machine may have only its own. If the snapshot does not exist; says which do.
    """

    snapshot = 0
    """The id of the snapshot."""
    delta: Delta | None = None
    """Rows that were appended to the files of the base until the snapshot."""

    def __init__(self, path: str | PathLike[str], snapshot: int | None = None) -> None:
        self.path = Path(path).absolute()
        for left in reversed(range(OPENINGS)):
            self._handle = _held_directory(self.path)
            closing = weakref.finalize(self, os.close, self._handle)
            closing.atexit = False
            try:
                self._look(snapshot)
            except GraphDirectoryError:
                if not left or not self.was_replaced():
                    raise
            else:
                if not left or not self.was_replaced():
                    return
            closing()  # its files may be gone soon, or were while they were looked at

    def _look(self, snapshot: int | None) -> None:
        """Read what is known of the opened directory before any tensor."""
        text = self._read_meta()
        self._checksum = zlib.crc32(text.encode("utf-8", "surrogatepass"))
        self.base_meta = self.meta = Meta.from_json(text, self.path / META)
        """``meta`` is the content of ``META.json``, with the counts of the snapshot."""
        self.delta = None
        self.head = read_head(self.file, self.path, self.base_meta)
        self._look_at(self.head.newest if snapshot is None else operator.index(snapshot))
        names = set(os.listdir(self._handle))
        needed = {name.partition("/")[0] for name in self.meta.files}
        self.parts = [
            part
            for part in range(self.meta.num_parts)
            if f"part-{part}" in names or f"part-{part}" not in needed
        ]
        """The parts that this machine has."""
        self.grouped: dict[EdgeType, CSC | None] = {}
        """In-edges in use, see :mod:`pyg_scale.store.directory.data`."""
        self.attributes: dict[Any, Tensor] = {}
        """Attributes in use."""
        self.merged: dict[EdgeType, CSC] = {}
        """In-edges of the base with those that were appended."""
        self.check_lengths()

    def _look_at(self, snapshot: int) -> None:
        head, base = self.head, self.base_meta
        counts = counts_at(head, snapshot, self.file, self.path, base)
        self.snapshot = snapshot
        if snapshot != head.base:
            self.delta = Delta(self, base, counts)
            self.meta = self.delta.meta
        if head.lineage:
            self._checksum = zlib.crc32(f"{head.lineage} {snapshot}".encode(), self._checksum)

    @classmethod
    def shared(cls, path: str | PathLike[str], snapshot: int | None = None) -> GraphDirectory:
        """The same object for the same snapshot of a directory, for as long as it is in use.

        Raises:
            GraphDirectoryError: See the class.
        """
        path = Path(path).absolute()
        with _opening:
            try:
                folder, meta = path.stat(), (path / META).stat()
            except (OSError, ValueError):
                return cls(path)  # raises the reason
            newest, number = None, snapshot
            if number is None:  # which may only be known from the head
                newest = cls(path) if os.path.lexists(path / HEAD) else None
                number = 0 if newest is None else newest.snapshot
            key = (str(path), number, *_identity(folder), *_identity(meta))
            known = _opened.get(key)
            if known is None:
                known = _opened[key] = newest or cls(path, snapshot)
                return known
            try:
                known.check_lengths()
            except GraphDirectoryError:
                if not known.was_replaced():
                    raise
                return cls(path, snapshot)
            return known

    @property
    def checksum(self) -> int:
        """CRC-32 of ``META.json`` and the snapshot, which identifies the graph."""
        return self._checksum

    def meta_to_send(self) -> Meta:
        """The content of ``META.json`` for those who cannot read the files."""
        return self.meta if self.delta is None else self.delta.as_base(self._checksum)

    def let_go(self) -> None:
        """Let compaction remove the files of this snapshot; those that are mapped stay mapped."""
        fcntl.flock(self._handle, fcntl.LOCK_UN)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.path), self._checksum, self.snapshot)

    def __copy__(self) -> GraphDirectory:
        return self

    def __deepcopy__(self, memo: Any) -> GraphDirectory:
        return self

    def __repr__(self) -> str:
        return f"GraphDirectory({str(self.path)!r})"

    def _read_meta(self) -> str:
        file = self.path / META
        try:
            with self.file(META) as read:
                found = read.read(LONGEST_META + 1)
        except FileNotFoundError:
            raise GraphDirectoryError(
                f"{self.path} is not a graph directory, it has no {META}: "
                "pyg_scale.save(data, path) or `pyg-scale convert` make one"
            ) from None
        except OSError as error:
            raise GraphDirectoryError(f"{file} cannot be read: {error}") from None
        if len(found) > LONGEST_META:
            raise GraphDirectoryError(f"{file} is longer than any {META}")
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GraphDirectoryError(f"{file} is not text: {error}") from None

    def check_lengths(self) -> None:
        """Compare the lengths of the files of local parts with ``META.json``.

        Raises:
            GraphDirectoryError: If a file is missing or has another length; names the first.
        """
        for name, file in self.files_here().items():
            try:
                size = check_regular(name, self.path, self._handle).st_size
            except OSError:
                raise GraphDirectoryError(f"{self.path / name} is missing") from None
            if size != file.bytes:
                raise GraphDirectoryError(
                    f"{self.path / name} has {size} bytes, {META} says {file.bytes}: it is "
                    "truncated or was changed"
                )
        for name, rows in {} if self.delta is None else self.delta.files.items():
            try:
                size = check_regular(name, self.path, self._handle).st_size
            except OSError:
                raise GraphDirectoryError(f"{self.path / name} is missing") from None
            if size < rows.bytes:
                raise GraphDirectoryError(
                    f"{self.path / name} has {size} bytes, {HEAD} says {rows.bytes}: truncated"
                )

    def files_here(self) -> dict[str, FileMeta]:
        """The files of local parts, and those that belong to no part."""
        absent = set(range(self.meta.num_parts)).difference(self.parts)
        roots = {f"part-{part}" for part in absent}
        return {k: v for k, v in self.meta.files.items() if k.partition("/")[0] not in roots}

    def file(self, name: str) -> BinaryIO:
        """Open a file of the directory for reading.

        Args:
            name: Its path in the directory, with ``/``.

        Raises:
            OSError: If it does not exist.
            GraphDirectoryError: If it is not a regular file, or a link leads out of the directory.
        """
        return os.fdopen(self.open_file(name), "rb")

    def open_file(self, name: str, flags: int = 0) -> int:
        """Open a file with flags of ``os.open`` such as ``O_DIRECT``; the caller closes it.

        Raises:
            OSError: If it does not exist, or cannot be opened with the flags.
            GraphDirectoryError: If it is not a regular file, or a link leads out of the directory.
        """
        return open_regular(name, self.path, self._handle, flags)

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Map a file of the directory; see :func:`~pyg_scale.files.npy.map_array`.

        Raises:
            GraphDirectoryError: If ``META.json`` does not list it, or its content does not fit.
        """
        if name not in self.meta.files:
            raise GraphDirectoryError(f"{self.path / META} does not list {name}")
        try:
            if self.delta is not None and name in self.delta.columns:
                return self.delta.array(name)
            return map_array(self.path / name, dtype, shape, open_file=partial(self.file, name))
        except GraphDirectoryError:
            if self.was_replaced():
                raise GraphDirectoryError(
                    f"the graph at {self.path} was replaced or removed since it was opened, and "
                    f"{name} was not read before: open it again"
                ) from None
            raise

    def was_replaced(self) -> bool:
        """Return True if another directory, or none, has taken its place since it was opened."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except OSError:
            return True

    def part(self, number: int) -> Part:
        """A local part.

        Raises:
            IndexError: If the part does not exist.
            GraphDirectoryError: If it is not on this machine.
        """
        if not 0 <= number < self.meta.num_parts:
            raise IndexError(
                f"{self.path} has the parts 0 to {self.meta.num_parts - 1} (got {number})"
            )
        if number not in self.parts:
            raise GraphDirectoryError(
                f"part {number} is not local: {self.path} has {self.parts or 'no part'}; copy "
                f"part-{number} from where the graph was partitioned"
            )
        return Part(self, number)

    @cached_property
    def books(self) -> dict[NodeType, PartitionBook]:
        """The partition book of each node type."""
        return {node_type: self._book(node_type) for node_type in self.meta.nodes}

    def _book(self, node_type: NodeType) -> PartitionBook:
        node, parts = self.meta.nodes[node_type], self.meta.num_parts
        sizes = torch.tensor(node.part_nodes, dtype=torch.int64)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        if not node.book:
            return PartitionBook(parts, node.num_nodes, offsets)
        shape, folder = (node.num_nodes,), node_dir(node_type)
        wide = "int32" if node.num_nodes < 2**31 else "int64"
        part = self.array(f"{folder}/part.npy", book_dtype(parts), shape)
        return PartitionBook(
            parts, node.num_nodes, offsets, part, self.array(f"{folder}/local.npy", wide, shape)
        )

    def edge_book(self, edge_type: EdgeType) -> Tensor | None:
        """The part of every edge of a type, ``uint8`` or ``int32`` ``[num_edges]``.

        ``None`` if all edges are in one part, or the directory does not have it.
        """
        name = f"{edge_dir(edge_type)}/part.npy"
        if name not in self.meta.files:
            return None
        dtype = book_dtype(self.meta.num_parts)
        return self.array(name, dtype, (self.meta.edges[edge_type].num_edges,))

    def index_set(self, name: str, node_type: NodeType = None) -> Tensor:
        """The original ids ``int64`` ``[n]`` of a named set, such as ``"train"``.

        Raises:
            KeyError: If the set does not exist; lists the existing ones.
        """
        sets = self.meta.index_sets.get(node_type or "", {})
        if name not in sets:
            raise KeyError(f"{self.path} has no index set {name!r}, only: {', '.join(sets) or '-'}")
        return self.array(set_file(node_type, name), "int64", (sets[name],))


class Part:
    """One part: its nodes, their in-edges (``by_dst``), attributes, halo.

    Neighbours and edges always have their original ids.
    """

    def __init__(self, directory: GraphDirectory, number: int) -> None:
        self.directory = directory
        self.number = number

    def __repr__(self) -> str:
        return f"Part({str(self.directory.path)!r}, {self.number})"

    def num_nodes(self, node_type: NodeType) -> int:
        """Number of nodes of a type in the part."""
        return self.directory.meta.nodes[node_type].part_nodes[self.number]

    def num_edges(self, edge_type: EdgeType) -> int:
        """Number of edges of a type in the part."""
        return self.directory.meta.edges[edge_type].part_edges[self.number]

    def csc(self, edge_type: EdgeType) -> CSC:
        """The in-edges of the part's nodes by local id (out-edges if ``by_src``).

        ``indices`` are original node ids, ``edge_id`` original edge ids.
        """
        delta = self.directory.delta
        if delta is None or not delta.changes(edge_type):
            return self._mapped_csc(edge_type)
        with _merging:
            if edge_type not in self.directory.merged:
                found = delta.in_edges(edge_type, self._mapped_csc(edge_type))
                self.directory.merged[edge_type] = found
            return self.directory.merged[edge_type]

    def _mapped_csc(self, edge_type: EdgeType) -> CSC:
        """Those in the files of the base."""
        meta = self.directory.base_meta
        edge, folder = meta.edges[edge_type], edge_dir(edge_type, self.number)
        end = meta.grouped_by(edge_type)
        shape = (edge.part_edges[self.number],)
        array = self.directory.array
        return CSC(
            indptr=array(
                f"{folder}/indptr.npy", "int64", (meta.nodes[end].part_nodes[self.number] + 1,)
            ),
            indices=array(f"{folder}/indices.npy", edge.indices_dtype, shape),
            edge_id=None
            if edge.edge_id_dtype is None
            else array(f"{folder}/edge_id.npy", edge.edge_id_dtype, shape),
            time=array(f"{folder}/time.npy", "int64", shape) if edge.has_time else None,
            weight_prefix=array(f"{folder}/weight_prefix.npy", "int64", shape)
            if edge.has_weight
            else None,
        )

    def node_attribute(self, node_type: NodeType, name: str) -> Tensor:
        """``[nodes of the part, ...]`` by local id.

        Raises:
            KeyError: If the attribute does not exist.
        """
        node = self.directory.meta.nodes[node_type]
        spec = node.attributes[name]
        shape = (node.part_nodes[self.number], *spec.row)
        file = attribute_file(node_dir(node_type, self.number), name)
        return self.directory.array(file, spec.dtype, shape)

    def edge_attribute(self, edge_type: EdgeType, name: str) -> Tensor:
        """``[edges of the part, ...]`` in the order of the original edge ids of the part's edges.

        In a graph of one part: by original edge id.

        Raises:
            KeyError: If the attribute does not exist.
        """
        edge = self.directory.meta.edges[edge_type]
        spec = edge.attributes[name]
        shape = (edge.part_edges[self.number], *spec.row)
        file = attribute_file(edge_dir(edge_type, self.number), name)
        return self.directory.array(file, spec.dtype, shape)

    def edge_ids(self, edge_type: EdgeType) -> Tensor | None:
        """The original ids of the part's edges, ascending; ``None`` if they are 0, 1, ..."""
        edge = self.directory.meta.edges[edge_type]
        name = f"{edge_dir(edge_type, self.number)}/ids.npy"
        if edge.edge_id_dtype is None:
            return None
        if name not in self.directory.meta.files:  # only written if there are edge attributes
            if self.directory.meta.num_parts == 1:
                return None
            edge_id = self.csc(edge_type).edge_id
            assert edge_id is not None
            return edge_id.sort().values
        return self.directory.array(name, edge.edge_id_dtype, (edge.part_edges[self.number],))

    def halo(self, node_type: NodeType) -> Tensor:
        """The original ids ``int64``, ascending, of neighbours that other parts own."""
        node = self.directory.meta.nodes[node_type]
        size = node.part_halo[self.number]
        if not size:
            return torch.empty(0, dtype=torch.int64)
        name = f"{node_dir(node_type, self.number)}/halo.npy"
        return self.directory.array(name, "int64", (size,))

    def cache(self, node_type: NodeType) -> Tensor:
        """The original ids ``int64`` of nodes whose features the part should keep, hottest first.

        Empty if the partitioner gave no such list.
        """
        sizes = self.directory.meta.nodes[node_type].part_cache
        if not sizes or not sizes[self.number]:
            return torch.empty(0, dtype=torch.int64)
        name = f"{node_dir(node_type, self.number)}/cache.npy"
        return self.directory.array(name, "int64", (sizes[self.number],))

    def orig_id(self, node_type: NodeType) -> Tensor:
        """The original ids ``int64`` of the part's nodes, by local id (ascending)."""
        node = self.directory.meta.nodes[node_type]
        if not node.book:
            return self.directory.books[node_type].nodes_of(self.number)
        name = f"{node_dir(node_type, self.number)}/orig_id.npy"
        return self.directory.array(name, "int64", (node.part_nodes[self.number],))


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise GraphDirectoryError(
            f"{path} is not a graph directory, not even a directory: pyg_scale.save(data, path) or "
            "`pyg-scale convert` make one"
        ) from None
    except (OSError, ValueError) as error:
        raise GraphDirectoryError(f"{path} cannot be opened: {error}") from None


def _held_directory(path: Path) -> int:
    """Open a directory, and let compaction know that it is in use, where the system has locks."""
    while True:
        handle = _open_directory(path)
        try:
            try_lock(handle, path, shared=True)
            if os.path.samestat(os.stat(path), os.fstat(handle)):
                return handle
        except FileNotFoundError:  # the next attempt says so
            pass
        except OSError:
            return handle
        os.close(handle)  # another one took its place meanwhile, and it may be gone soon


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _reopen(path: str, checksum: int, snapshot: int) -> GraphDirectory:
    """Open the directory that another process has open.

    Raises:
        GraphDirectoryError: If it has been replaced.
    """
    directory = GraphDirectory.shared(path, snapshot)
    if directory._checksum != checksum:
        raise GraphDirectoryError(f"{path} was replaced since it was opened: open it again")
    return directory
