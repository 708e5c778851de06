"""Features and edges in named shared memory: one copy on a machine for all of its processes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore, TensorAttr

from pyg_scale.files.segment import Segment, memory_root
from pyg_scale.files.tensor_directory import TensorDirectory, file_lock
from pyg_scale.graph.topology import Topology
from pyg_scale.store.mmap import DirectoryTensors, Mmap
from pyg_scale.store.mmap_graph import MmapGraph


class _InSegment:
    """A store in a segment of memory that processes share."""

    _segment: Segment

    @property
    def name(self) -> str:
        """The name of the store on this machine."""
        return self._segment.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (type(self), self._segment)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _attached(cls: Any, segment: Segment) -> Any:
    return cls(segment.name, root=segment.root)


def _opened(name: str | None, root: str | Path | None, makes: bool) -> tuple[Segment, Any]:
    if name is None and makes:
        raise ValueError("make= needs a name: without one no other process finds the store")
    segment = Segment(name, memory_root() if root is None else Path(root))
    return segment, TensorDirectory(segment.path, durable=False)


class Shared(_InSegment, Mmap):
    """Tensors in shared memory, common to all processes that pass the same name.

    The first process calls ``make`` and stores its result; the others wait for it and map the
    result. All processes see tensors that any of them puts or replaces later.

    The memory is a directory in ``/dev/shm`` that exists as long as a process uses it, by locks
    that the kernel drops however a process ends. The last process to end removes it. If that one is
    killed (``SIGKILL``), it is removed when the next store of the same user is opened.

    Args:
        name: The name of the store on this machine; ``None`` for one that is shared only with
            processes that get it pickled or by a fork.
        make: Called without arguments in one of the processes. Returns a ``FeatureStore``, or a
            mapping of ``(group, name)`` to tensors ``[n, ...]``.
        root: The directory of the memory, in a ``tmpfs``; ``None`` for ``/dev/shm``.
        timeout: Seconds to wait for another process to fill it.

    Raises:
        TimeoutError: If another process takes longer than ``timeout`` to fill it; names the
            process.
        PermissionError: If it belongs to another user.
        OSError: If there is not enough shared memory (``--shm-size`` of a container).

    Example::

        store = Shared("products", lambda: {(None, "x"): torch.load("x.pt")})
        loader = NeighborLoader(data, [15, 10], feature_store=store)
    """

    read_only = False

    def __init__(
        self,
        name: str | None = None,
        make: Callable[[], Any] | None = None,
        *,
        root: str | Path | None = None,
        timeout: float = 600.0,
    ) -> None:
        FeatureStore.__init__(self)
        segment, directory = _opened(name, root, make is not None)
        self.__dict__.update(
            path=segment.path,
            readahead=True,
            _tensors=DirectoryTensors(directory),
            _segment=segment,
        )
        if make is not None:
            _make_once(directory, "features", lambda: self._fill(make()), timeout)

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        """See :meth:`MemoryFeatureStore._put_tensor`.

        Raises:
            OSError: If there is not enough shared memory; the old tensor is kept.
        """
        with _room(self.path):
            return super()._put_tensor(tensor, attr)

    def _fill(self, made: Any) -> None:
        if isinstance(made, FeatureStore):
            for attr in made.get_all_tensor_attrs():
                attr.index = None
                if not attr.is_set("group_name"):
                    attr.group_name = None
                self.put_tensor(made.get_tensor(attr), attr.group_name, attr.attr_name, None)
            return
        if not hasattr(made, "items"):
            raise TypeError(
                "make must return a FeatureStore or {(group, name): tensor} "
                f"(got {type(made).__name__})"
            )
        for (group, attr_name), value in made.items():
            self.put_tensor(value, group, attr_name, None)


class SharedGraph(_InSegment, MmapGraph):
    """Edges in shared memory, and the in-edges that samplers read, common to all processes.

    See :class:`Shared` for its name, creation and lifetime. A ``Shared``
    and a ``SharedGraph`` may have the same name and then share a directory.

    Args:
        name: The name of the store on this machine; ``None`` for one that is shared only with
            processes that get it pickled or by a fork.
        make: Called without arguments in one of the processes. Returns a ``GraphStore`` (such as
            PyG's ``Data`` and ``HeteroData``).
        root: The directory of the memory, in a ``tmpfs``; ``None`` for ``/dev/shm``.
        timeout: Seconds to wait for another process to fill it.

    Raises:
        TimeoutError: If another process takes longer than ``timeout`` to fill it; names the
            process.
        PermissionError: If it belongs to another user.
        OSError: If there is not enough shared memory (``--shm-size`` of a container).

    Example::

        graph = SharedGraph("products", lambda: Planetoid(root, "Cora")[0])
        loader = NeighborLoader((Shared("products", load_features), graph), [15, 10])
    """

    def __init__(
        self,
        name: str | None = None,
        make: Callable[[], Any] | None = None,
        *,
        root: str | Path | None = None,
        timeout: float = 600.0,
    ) -> None:
        GraphStore.__init__(self)
        segment, directory = _opened(name, root, make is not None)
        self._use(segment.path, segment, None, directory)
        if make is not None:
            _make_once(directory, "edges", lambda: self._fill(make()), timeout)

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        """See :meth:`MemoryGraphStore._put_edge_index`.

        Raises:
            OSError: If there is not enough shared memory; the old edges are kept.
        """
        with _room(self.path):
            return super()._put_edge_index(edge_index, edge_attr)

    def keep_topology(self, *args: Any, **kwargs: Any) -> Topology:
        """See :meth:`MmapGraph.keep_topology`.

        Raises:
            OSError: If there is not enough shared memory.
        """
        with _room(self.path):
            return super().keep_topology(*args, **kwargs)

    def _fill(self, made: Any) -> None:
        if not isinstance(made, GraphStore):
            raise TypeError(f"make must return a GraphStore or Data (got {type(made).__name__})")
        for attr in made.get_all_edge_attrs():
            pair = made.get_edge_index(attr)
            self.put_edge_index(
                pair,
                edge_type=attr.edge_type,
                layout=attr.layout,
                is_sorted=attr.is_sorted,
                size=attr.size,
            )


@contextlib.contextmanager
def _room(path: Path) -> Iterator[None]:
    """Turn an error for lack of shared memory into one that says how to get more."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(path).free
        raise OSError(
            errno.ENOSPC,
            f"there is not enough shared memory, {free >> 20} MiB are free: make {path.parent} "
            "larger (docker run --shm-size), or pass root= in another tmpfs",
        ) from None


def _make_once(
    directory: TensorDirectory, what: str, make: Callable[[], Any], timeout: float
) -> None:
    """Let one process fill a directory; the others wait until it is done.

    Raises:
        TimeoutError: If it takes longer than ``timeout`` seconds; names the process.
    """
    key = ["made", what]
    if directory.find(key) is not None:
        return
    lock = directory.path / f".make-{what}"
    with file_lock(lock, f"another process makes the {what} of {directory.path}", timeout):
        if directory.find(key) is None:
            make()
            directory.write(key, {}, {"process": os.getpid()})
