"""Features in mapped files: any number of processes share one copy in the page cache."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch_geometric.data import TensorAttr

from pyg_scale.files.segment import Segment
from pyg_scale.files.tensor_directory import TensorDirectory
from pyg_scale.store.directory.meta import META
from pyg_scale.store.directory.page_faults import no_readahead
from pyg_scale.store.directory.reader import GraphDirectory
from pyg_scale.store.memory import MemoryFeatureStore

_KIND = "tensor"


class Mmap(MemoryFeatureStore):
    """Features of a graph directory, or of a directory that this store writes itself.

    Nothing is read before rows are requested, and the system keeps as many pages in memory as fit.
    Rows are gathered into recycled memory. All processes that open the same directory share the
    pages; a pickled store is the path, which is opened again in the other process.

    A graph directory (``META.json``) can only be read. Any other directory is created by the first
    ``put_tensor``: each tensor becomes a ``.npy`` file, which replaces an earlier one in one step,
    so that readers, also in other processes, see either the old or the new tensor.

    Args:
        path: The directory. ``None`` for a new temporary one, which is removed when the last
            process that has the store ends.
        readahead: Let the system read ahead of the requested rows. Use ``False`` for files much
            larger than memory, of which it would read rows in vain.
        snapshot: Of a graph directory: the id of a snapshot; ``None`` for the newest.

    Raises:
        GraphDirectoryError: If the directory is damaged or of another kind.
        NotImplementedError: If it is a graph directory of several parts.

    Example::

        loader = NeighborLoader(data, [15, 10], feature_store=Mmap("features/"))
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        readahead: bool = True,
        snapshot: int | None = None,
    ) -> None:
        super().__init__()
        segment = Segment(None, Path(tempfile.gettempdir())) if path is None else None
        path = Path(segment.path if segment else path).absolute()  # type: ignore[arg-type]
        graph = (path / META).is_file()
        tensors: Any
        if graph:
            opened = GraphDirectory(path, snapshot)
            tensors, snapshot = GraphTensors(opened, readahead), opened.snapshot
        else:
            refuse_snapshot(path, snapshot)
            directory = TensorDirectory(path, durable=segment is None)
            tensors = DirectoryTensors(directory, readahead)
        self.__dict__.update(
            path=path,
            read_only=graph,
            readahead=readahead,
            snapshot=snapshot,
            _tensors=tensors,
            _segment=segment,
        )

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        """See :meth:`MemoryFeatureStore._put_tensor`; putting rows writes the whole tensor again.

        Raises:
            PermissionError: If it is a graph directory.
            OSError: If the disk is full; the old tensor is kept.
        """
        self._check_writable()
        with self._tensors.locked():
            return super()._put_tensor(tensor, attr)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        self._check_writable()
        return super()._remove_tensor(attr)

    def _check_writable(self) -> None:
        if self.read_only:
            raise PermissionError(
                f"{self.path} is a graph directory, whose features can only be read: put features "
                "into a directory of their own, or save the graph again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (
            type(self),
            str(self.path),
            self._segment,
            self.readahead,
            self.snapshot,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def close(self) -> None:
        """Release a temporary directory; the last process to do so removes it."""
        if self._segment is not None:
            self._segment.close()


def refuse_snapshot(path: Path, snapshot: int | None) -> None:
    """Refuse ``snapshot=`` for what is no graph directory.

    Raises:
        ValueError: If it is given.
    """
    if snapshot is not None:
        raise ValueError(f"snapshot={snapshot}: {path} is no graph directory, and has none")


def _reopen(
    cls: type[Mmap], path: str, segment: Segment | None, readahead: bool, snapshot: int | None
) -> Mmap:
    store = cls(path, readahead=readahead, snapshot=snapshot)
    store.__dict__["_segment"] = segment
    return store


class DirectoryTensors(MutableMapping[Any, Tensor]):
    """The tensors of a :class:`TensorDirectory` by group and name."""

    def __init__(self, directory: TensorDirectory, readahead: bool = True) -> None:
        self._directory = directory
        self._readahead = readahead

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return self._directory.locked()

    def __getitem__(self, key: Any) -> Tensor:
        found = self._directory.tensors(_to_json(key))
        if found is None:
            raise KeyError(key)
        if not self._readahead:
            no_readahead(found["rows"])
        return found["rows"]

    def __setitem__(self, key: Any, value: Tensor) -> None:
        self._directory.write(_to_json(key), {"rows": value}, {})

    def __delitem__(self, key: Any) -> None:
        if not self._directory.remove(_to_json(key)):
            raise KeyError(key)

    def pop(self, key: Any, default: Any = None) -> Any:
        """Remove a tensor; return a true value if it was stored."""
        return self._directory.remove(_to_json(key)) or default

    def __iter__(self) -> Iterator[Any]:
        for entry in list(self._directory.entries().values()):
            if entry.key[0] == _KIND:
                _, group, name = entry.key
                yield (tuple(group) if isinstance(group, list) else group), name

    def __len__(self) -> int:
        return sum(1 for _ in self)


class GraphTensors(MutableMapping[Any, Tensor]):
    """The attributes of a graph directory by group and name, mapped on first access."""

    def __init__(self, directory: GraphDirectory, readahead: bool = True) -> None:
        meta = directory.meta
        if meta.num_parts != 1:
            raise NotImplementedError(
                f"{directory.path} has {meta.num_parts} parts, Mmap reads graphs of one part: give "
                "the directory that was partitioned, or pyg_scale.open(path, part=i)"
            )
        self._part = directory.part(0)
        self._readahead = readahead
        self._mapped: dict[Any, Tensor] = {}
        self._lock = threading.Lock()
        self._keys: list[Any] = [(n.name, a) for n in meta.nodes.values() for a in n.attributes]
        for edge in meta.edges.values():
            group = edge.name or (None, None)  # as in torch_geometric.distributed
            self._keys += [(group, name) for name in edge.attributes]

    def __getitem__(self, key: Any) -> Tensor:
        if key not in self._keys:
            raise KeyError(key)
        with self._lock:
            if key not in self._mapped:
                group, name = key
                if isinstance(group, tuple):
                    edge_type: Any = None if group == (None, None) else group
                    tensor = self._part.edge_attribute(edge_type, name)
                else:
                    tensor = self._part.node_attribute(group, name)
                if not self._readahead:
                    no_readahead(tensor)
                self._mapped[key] = tensor
            return self._mapped[key]

    def __setitem__(self, key: Any, value: Tensor) -> None:
        raise PermissionError("a graph directory can only be read")

    __delitem__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _to_json(key: Any) -> list[Any]:
    group, name = key
    return [_KIND, list(group) if isinstance(group, tuple) else group, name]
