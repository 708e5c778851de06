"""Edges in mapped files: the topology of a graph once per machine, not once per process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import tempfile
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import EdgeAttr, FeatureStore
from torch_geometric.data.graph_store import EdgeLayout

from pyg_scale.files.npy import torch_dtype
from pyg_scale.files.segment import Segment
from pyg_scale.files.tensor_directory import TensorDirectory
from pyg_scale.graph.base import AtSnapshot, TopologyOptions
from pyg_scale.graph.source import GraphSource, of
from pyg_scale.graph.topology import CSC, EdgeType, Topology
from pyg_scale.ops.raw_bytes import raw_bytes
from pyg_scale.store.directory.assemble import FilledPlaces, fill_edge_list
from pyg_scale.store.directory.meta import META
from pyg_scale.store.directory.reader import GraphDirectory
from pyg_scale.store.directory.verify import check_ends
from pyg_scale.store.mapped_topology import (
    MappedTopology,
    of_graph_directory,
    once,
    read_topology,
    why_not,
    write_topology,
)
from pyg_scale.store.memory import MemoryGraphStore
from pyg_scale.store.mmap import refuse_snapshot

_KIND, _TOPOLOGY = "edges", "topology"
_KEPT = 8


class MmapGraph(MemoryGraphStore):
    """Edges of a graph directory, or of a directory that this store writes itself.

    Loaders and samplers use mapped in-edges: nothing is copied, and all processes that open the
    directory share the pages. A graph directory already has them (``convert`` and ``save`` write
    them); in any other directory, the first process that needs the in-edges builds them once and
    writes them next to the edges.

    Edge ids are positions in the user's input. A graph directory shows its edges in the layout
    ``coo``, in the order of their ids, or in ``csc`` if that is the same order. The list is made on
    first access; loaders do not need it.

    Args:
        path: The directory. ``None`` for a new temporary one, which is removed when the last
            process that has the store ends.
        snapshot: Of a graph directory: the id of a snapshot; ``None`` for the newest.

    Raises:
        GraphDirectoryError: If the directory is damaged or of another kind.
        NotImplementedError: If it is a graph directory of several parts.

    Example::

        loader = NeighborLoader((Mmap("graph/"), MmapGraph("graph/")), [15, 10])
    """

    def __init__(self, path: str | Path | None = None, *, snapshot: int | None = None) -> None:
        super().__init__()
        segment = Segment(None, Path(tempfile.gettempdir())) if path is None else None
        path = Path(segment.path if segment else path).absolute()  # type: ignore[arg-type]
        graph = GraphDirectory(path, snapshot) if (path / META).is_file() else None
        if graph is None:
            refuse_snapshot(path, snapshot)
        if graph is not None and graph.meta.num_parts != 1:
            raise NotImplementedError(
                f"{path} has {graph.meta.num_parts} parts, MmapGraph reads graphs of one part: "
                "give the directory that was partitioned, or pyg_scale.open(path, part=i)"
            )
        directory = None if graph else TensorDirectory(path, durable=segment is None)
        self._use(path, segment, graph, directory)

    def _use(
        self,
        path: Path,
        segment: Segment | None,
        graph: GraphDirectory | None,
        directory: TensorDirectory | None,
    ) -> None:
        edges: Any = GraphEdges(graph) if graph else DirectoryEdges(directory)  # type: ignore[arg-type]
        self.__dict__.update(
            path=path,
            read_only=graph is not None,
            snapshot=None if graph is None else graph.snapshot,
            _segment=segment,
            _graph=graph,
            _directory=directory,
            _edges=edges,
        )

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        self._check_writable()
        return super()._put_edge_index(edge_index, edge_attr)

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        self._check_writable()
        return super()._remove_edge_index(edge_attr)

    def _check_writable(self) -> None:
        if self.read_only:
            raise PermissionError(
                f"{self.path} is a graph directory, whose edges can only be read: put edges into a "
                "directory of their own, or save the graph again"
            )

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """The stored edges, in the order in which they were first put."""
        return self._edges.attrs()

    # The topology ##########################################################################

    def keep_topology(
        self,
        features: FeatureStore,
        options: TopologyOptions,
        read: Callable[[], GraphSource],
        build: Callable[[GraphSource], Topology],
    ) -> Topology:
        """See :class:`~pyg_scale.store.mapped_topology.KeepsTopology`.

        Warns: UserWarning: If a graph directory was written for another direction, time or weight:
            each process then builds the topology in its own memory.
        """
        if self._graph is not None:
            mine = self.path, self.snapshot
            same = isinstance(features, AtSnapshot) and (features.path, features.snapshot) == mine
            if reason := why_not(self._graph, options, None if same else features):
                warnings.warn(
                    f"the topology is built in the memory of each process instead of mapped from "
                    f"{self.path}: {reason}. Write the directory with these options",
                    stacklevel=4,
                )
                return build(read())
            return self.kept_topology(["graph", *options[:3]])
        source = read()
        if (direct := self._as_it_lies(source, options)) is not None:
            return direct
        assert self._directory is not None
        key = [_TOPOLOGY, _digest(self._edges.tokens(), source, options)]
        if self._directory.find(key) is None:
            graph = build(source)
            with self._directory.locked():
                if self._directory.find(key) is None:
                    self._edges.forget_topologies(keep=_KEPT - 1)
                    write_topology(self._directory, key, graph)
        return self.kept_topology(key)

    def kept_topology(self, key: Any) -> Topology:
        """A topology that :meth:`keep_topology` kept, by its key.

        Raises:
            KeyError: If the edges were replaced since.
        """
        if key[0] == "graph":
            assert self._graph is not None
            found = os.stat(self.path / META)
            known = (str(self.path), self.snapshot, found.st_ino, found.st_mtime_ns, *key)
            graph, options = self._graph, TopologyOptions(*key[1:])
            return once(known, lambda: of_graph_directory(graph, options, self, key))
        if key[0] == _KIND:
            return self._mapped_csc(key)
        directory = self._directory
        assert directory is not None
        entry = directory.find(key)
        if entry is None:
            raise KeyError(f"{self.path} no longer has this topology: its edges were replaced")
        return once((str(self.path), key[1]), lambda: read_topology(directory, entry, self))

    def _as_it_lies(self, source: GraphSource, options: TopologyOptions) -> Topology | None:
        """The topology of edges that were put as ``csc``, without building; ``None`` for others."""
        if options.direction != "forward" or source.node_time or source.edge_time or source.weight:
            return None
        for edge_type, edges in source.edges.items():
            src, dst = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
            size = (source.num_nodes[src], source.num_nodes[dst])
            # If sizes are known, put_edge_index has checked everything.
            if edges.layout != "csc" or None in size or edges.size != size:
                return None
            if edges.col.dtype != torch.int64 or not edges.row.is_contiguous():
                return None
        if not self._edges.tokens():
            return None
        types = [[t, source.num_nodes[t]] for t in source.node_types]
        return self._mapped_csc([_KIND, types, self._edges.tokens()])

    def _mapped_csc(self, key: Any) -> Topology:
        _, types, tokens = key

        def make() -> Topology:
            if self._edges.tokens() != tokens:
                raise KeyError(f"{self.path} no longer has this topology: its edges were replaced")
            csc: dict[EdgeType, CSC] = {}
            for attr in self.get_all_edge_attrs():
                if attr.edge_type not in csc:
                    row, col = self.get_edge_index(attr)
                    csc[attr.edge_type] = CSC(col, row)
            filled = [c.indices.dtype for c in csc.values() if c.num_edges]
            filled = filled or [c.indices.dtype for c in csc.values()]
            return MappedTopology(
                node_types=tuple(t for t, _ in types),
                edge_types=tuple(csc),
                num_nodes=dict(types),
                csc=csc,
                index_dtype=torch.int32 if set(filled) == {torch.int32} else torch.int64,
                store=self,
                key=key,
            )

        return once((str(self.path), repr(key)), make)

    # Life ##################################################################################

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), str(self.path), self._segment, self.snapshot)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def close(self) -> None:
        """Release a temporary directory; the last process to do so removes it."""
        if self._segment is not None:
            self._segment.close()


def _reopen(
    cls: type[MmapGraph], path: str, segment: Segment | None, snapshot: int | None
) -> MmapGraph:
    store = cls(path, snapshot=snapshot)
    store.__dict__["_segment"] = segment
    return store


class DirectoryEdges(MutableMapping[Any, Any]):
    """The edges of a :class:`TensorDirectory` by type and layout, as in ``MemoryGraphStore``."""

    def __init__(self, directory: TensorDirectory) -> None:
        self._directory = directory

    def __getitem__(self, key: Any) -> Any:
        entry = self._directory.find(_to_json(key))
        found = self._directory.tensors(_to_json(key)) if entry else None
        if entry is None or found is None:
            raise KeyError(key)
        return (found["row"], found["col"]), _attr(entry.key, entry.info)

    def __setitem__(self, key: Any, value: Any) -> None:
        (row, col), attr = value
        info = {
            "is_sorted": bool(attr.is_sorted),
            "size": attr.size,
            "token": secrets.token_hex(8),  # tells these edges from those before
        }
        with self._directory.locked():
            self._directory.write(_to_json(key), {"row": row, "col": col}, info)
            self.forget_topologies(keep=0)

    def __delitem__(self, key: Any) -> None:
        if not self.pop(key):
            raise KeyError(key)

    def pop(self, key: Any, default: Any = None) -> Any:
        """Remove edges; return a true value if they were stored."""
        with self._directory.locked():
            if not self._directory.remove(_to_json(key)):
                return default
            self.forget_topologies(keep=0)
            return True

    def attrs(self) -> list[EdgeAttr]:
        return [_attr(e.key, e.info) for e in self._entries()]

    def tokens(self) -> list[str]:
        """Tokens that change when edges are put or removed."""
        return [entry.info["token"] for entry in self._entries()]

    def forget_topologies(self, keep: int) -> None:
        """Remove all topologies except the last ones."""
        kept = [e.key for e in self._directory.entries().values() if e.key[0] == _TOPOLOGY]
        for key in kept[: max(0, len(kept) - keep)]:
            self._directory.remove(key)

    def _entries(self) -> list[Any]:
        return [e for e in list(self._directory.entries().values()) if e.key[0] == _KIND]

    def __iter__(self) -> Iterator[Any]:
        return iter([(a.edge_type, a.layout) for a in self.attrs()])

    def __len__(self) -> int:
        return len(self._entries())


class GraphEdges(MutableMapping[Any, Any]):
    """The edges of a graph directory of one part; edge lists are made on first access."""

    def __init__(self, directory: GraphDirectory) -> None:
        self._directory = directory
        self._part = directory.part(0)

    def attrs(self) -> list[EdgeAttr]:
        meta, found = self._directory.meta, []
        for edge_type, edge in meta.edges.items():
            ends = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
            size = (meta.nodes[ends[0]].num_nodes, meta.nodes[ends[1]].num_nodes)
            layout = "coo" if edge.edge_id_dtype is not None or self._by_src else "csc"
            found.append(EdgeAttr(edge_type, layout, False, size))
        return found

    @property
    def _by_src(self) -> bool:
        partition = self._directory.meta.partition
        return partition is not None and partition.edge_assign_strategy == "by_src"

    def __getitem__(self, key: Any) -> Any:
        edge_type, layout = key
        for attr in self.attrs():
            if (attr.edge_type, attr.layout) == (edge_type, layout):
                return self._edges(attr), attr
        raise KeyError(key)

    def _edges(self, attr: EdgeAttr) -> tuple[Tensor, Tensor]:
        csc = self._part.csc(attr.edge_type)
        dtype = torch_dtype(self._directory.meta.edges[attr.edge_type].index_dtype)
        if attr.layout == EdgeLayout.CSC:
            return csc.indices.to(dtype), csc.indptr
        check_ends(self._directory, attr.edge_type, self._part.number, csc)
        edges = torch.empty(2, csc.num_edges, dtype=dtype)
        row, col = edges.flip(0) if self._by_src else edges
        what = f"the edge list{of(attr.edge_type)} of {self._directory.path}"
        places = FilledPlaces(csc.num_edges, what)
        fill_edge_list(csc, col, row, places)
        places.check()
        return row, col

    def __setitem__(self, key: Any, value: Any) -> None:
        raise PermissionError("a graph directory can only be read")

    __delitem__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter([(a.edge_type, a.layout) for a in self.attrs()])

    def __len__(self) -> int:
        return len(self._directory.meta.edges)


def _to_json(key: Any) -> list[Any]:
    edge_type, layout = key
    return [_KIND, None if edge_type is None else list(edge_type), EdgeLayout(layout).value]


def _attr(key: Any, info: dict[str, Any]) -> EdgeAttr:
    _, edge_type, layout = key
    size = info["size"]
    return EdgeAttr(
        None if edge_type is None else tuple(edge_type),
        layout,
        info["is_sorted"],
        None if size is None else tuple(size),
    )


def _digest(tokens: list[str], source: GraphSource, options: TopologyOptions) -> str:
    """Equal only for the same edges with the same times, weights and options."""
    digest = hashlib.blake2b(digest_size=16)
    counts = [[t, n] for t, n in source.num_nodes.items()]
    digest.update(repr((tokens, counts, tuple(options))).encode())
    for values in (source.node_time, source.edge_time, source.weight):
        for kind, tensor in values.items():
            digest.update(repr((kind, tensor.dtype, tensor.shape)).encode())
            with contextlib.suppress(BufferError):
                digest.update(raw_bytes(tensor.contiguous()).numpy().data)
    return digest.hexdigest()
