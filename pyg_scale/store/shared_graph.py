"""Edges in named shared memory: one topology on a machine for all of its processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_geometric.data import EdgeAttr, GraphStore

from pyg_scale.files.segment import Segment, memory_root
from pyg_scale.files.tensor_directory import TensorDirectory
from pyg_scale.graph.topology import Topology
from pyg_scale.store.mmap_graph import MmapGraph
from pyg_scale.store.shared import make_once, room


class SharedGraph(MmapGraph):
    """Edges in shared memory, and the in-edges that samplers read, common to all processes.

    See :class:`~pyg_scale.store.shared.Shared` for its name, creation and lifetime. A ``Shared``
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
        if name is None and make is not None:
            raise ValueError("make= needs a name: without one no other process finds the store")
        GraphStore.__init__(self)
        segment = Segment(name, memory_root() if root is None else Path(root))
        directory = TensorDirectory(segment.path, durable=False)
        self._use(segment.path, segment, None, directory)
        if make is not None:
            make_once(directory, "edges", lambda: self._fill(make()), timeout)

    @property
    def name(self) -> str:
        """The name of the store on this machine."""
        return self._segment.name

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        """See :meth:`MemoryGraphStore._put_edge_index`.

        Raises:
            OSError: If there is not enough shared memory; the old edges are kept.
        """
        with room(self.path):
            return super()._put_edge_index(edge_index, edge_attr)

    def keep_topology(self, *args: Any, **kwargs: Any) -> Topology:
        """See :meth:`MmapGraph.keep_topology`.

        Raises:
            OSError: If there is not enough shared memory.
        """
        with room(self.path):
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

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (type(self), self._segment)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _attached(cls: type[SharedGraph], segment: Segment) -> SharedGraph:
    return cls(segment.name, root=segment.root)
