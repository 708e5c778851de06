"""PyG's ``Data`` and ``HeteroData`` whose tensors are in a graph directory."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage
from torch_geometric.typing import TensorFrame

from pyg_scale.errors import is_failure
from pyg_scale.files.npy import torch_dtype
from pyg_scale.graph.source import GroupedEdges, KnowsEdges
from pyg_scale.graph.topology import CSC, EdgeType, NodeType
from pyg_scale.store.directory import assemble
from pyg_scale.store.directory.frame import COLUMNS, FRAME, FrameColumns
from pyg_scale.store.directory.lazy import EDGE_INDEX, LazyAttribute, LazyMapping
from pyg_scale.store.directory.page_faults import no_readahead_beyond_memory
from pyg_scale.store.directory.reader import GraphDirectory
from pyg_scale.store.directory.tasks import Tasks
from pyg_scale.store.directory.values import decode

_NODE_KEYS = ("x", "feat", "pos", "batch", "node_type", "n_id", FRAME)  # PyG counts nodes by these


class RecordedAttributes(KnowsEdges):
    """Mixin: a storage whose attributes are entries of a directory, until they are replaced."""

    _mapping: LazyMapping
    _directory: GraphDirectory

    def _sketch(self) -> Any:
        """The same storage in PyG's own class; attributes that were not read have no content."""
        plain: Any = next(c for c in type(self).__mro__ if c.__module__ == BaseStorage.__module__)
        out = plain.__new__(plain)
        out.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_cached_attr"})
        out._mapping = self._mapping.sketch()
        return out

    def _attribute_sketch(self, name: str) -> Any:
        """A stand-in with the shape and dtype of an attribute, to avoid reading it."""
        entry = self._mapping.entry(name)
        if entry is None or entry.made:
            return None
        known = self.__dict__.get("_cached_attr", {})  # as in PyG, until it is replaced
        return None if any(name in names for names in known.values()) else self._sketch()

    def _remember(self, name: str, sketch: Any) -> None:
        """Keep the classification of an attribute by a sketch."""
        known = self.__dict__.setdefault("_cached_attr", defaultdict(set))
        for kind, names in sketch.__dict__.get("_cached_attr", {}).items():
            if name in names:
                known[kind].add(name)

    def attach(
        self,
        directory: GraphDirectory,
        values: dict[str, Any],
        node_type: NodeType = None,
        edge_type: EdgeType = None,
    ) -> None:
        """Become the view of a directory.

        Args:
            directory: The graph directory.
            values: The attributes, in order; those of type
                :class:`~pyg_scale.store.directory.lazy.LazyAttribute` are read when they are used.
            node_type: The type of the nodes.
            edge_type: The type of the edges.
        """
        self._mapping = LazyMapping(values)
        self._directory = directory
        if isinstance(self, _OfNodes):
            self._node_type = node_type
        if isinstance(self, _OfEdges):
            self._edge_type = edge_type

    def is_as_stored(self) -> bool:
        """True if all tensors with a row per node or edge are present and as in the files."""
        meta = self._directory.meta
        names: set[str] = set()
        if isinstance(self, _OfNodes):
            names |= meta.nodes[self._node_type].attributes.keys()
        if isinstance(self, _OfEdges) and self._edge_type in meta.edges:
            keys = meta.keys if self._edge_type is None else meta.edges[self._edge_type].keys
            names |= meta.edges[self._edge_type].attributes.keys()
            names |= {EDGE_INDEX} if keys is None or EDGE_INDEX in keys else set()
        entries = {name: self._mapping.entry(name) for name in names}
        return all(entry is not None and entry.intact for entry in entries.values())

    def __contains__(self, name: object) -> bool:
        return name in self._mapping  # that of Mapping would read the value

    def to_dict(self) -> dict[str, Any]:
        out = dict(self._mapping.items())
        if "_num_nodes" in self.__dict__:
            out["_num_nodes"] = self.__dict__["_num_nodes"]
        return out

    def __repr__(self) -> str:
        return repr(self._mapping)

    def is_waiting(self, name: str) -> bool:
        """Return True if an attribute is still in files, as it was not read yet."""
        if self.frame_columns(name) is not None:
            return True  # its arrays are read, each by itself
        entry = self._mapping.entry(name)
        return entry is not None and not entry.made

    def frame_columns(self, name: str) -> FrameColumns | None:
        """The columns of a ``TensorFrame`` in files, whose arrays can be read by their names."""
        frame = self._mapping.frame(name)
        return None if frame is None else frame.columns

    def waiting_rows(self, name: str, index: Tensor) -> Tensor | None:
        """Rows of a remote attribute that was not read as a whole; ``None`` for other ones."""
        entry = self._mapping.entry(name)
        return None if entry is None or entry.made else entry.rows(index)

    def without_waiting(self) -> dict[str, Any]:
        """The attributes; ``None`` for those that are still in files."""
        return {n: None if self.is_waiting(n) else self._mapping[n] for n in self._mapping}

    def recorded(self, name: str) -> Tensor | None:
        entry = self._mapping.entry(name)
        if entry is None or not entry.intact:
            return None
        return shared_attribute(self._directory, entry)


class _OfNodes(RecordedAttributes):
    """Mixin: knows the number of nodes, which PyG would guess from the edges."""

    _node_type: NodeType

    @property
    def num_nodes(self) -> int | None:
        if "num_nodes" in self._mapping:
            return self._mapping["num_nodes"]
        sketch = self._sketch()
        replaced = self._mapping.entry(EDGE_INDEX) is None and EDGE_INDEX in self._mapping
        if replaced or any(_counts_nodes(name, value) for name, value in sketch.items()):
            return sketch.num_nodes
        return self._directory.meta.nodes[self._node_type].num_nodes

    @num_nodes.setter
    def num_nodes(self, value: int | None) -> None:
        self["num_nodes"] = value  # type: ignore[index]

    @property
    def num_node_features(self) -> int:
        return self._sketch().num_node_features

    def is_node_attr(self, key: str) -> bool:
        if self.frame_columns(key) is not None:
            return True
        sketch = self._attribute_sketch(key)
        if sketch is None:
            return super().is_node_attr(key)  # type: ignore[misc]
        sketch._mapping["num_nodes"] = self.num_nodes
        found = sketch.is_node_attr(key)
        self._remember(key, sketch)
        return found


def _counts_nodes(name: str, value: Any) -> bool:
    """Return True if PyG takes the number of nodes from an attribute."""
    if name in ("adj", "adj_t"):
        return True
    has_rows = isinstance(value, Tensor | np.ndarray | TensorFrame)
    return has_rows and (name in _NODE_KEYS or "node" in name)


class _OfEdges(RecordedAttributes):
    """Mixin: has the edges grouped by destination as long as the edge list is the recorded one."""

    _edge_type: EdgeType

    @property
    def num_edges(self) -> int:
        entry = self._mapping.entry(EDGE_INDEX)
        if "num_edges" not in self._mapping and entry is not None:
            return entry.shape[1]
        return self._sketch().num_edges

    @property
    def num_edge_features(self) -> int:
        return self._sketch().num_edge_features

    def is_edge_attr(self, key: str) -> bool:
        sketch = self._attribute_sketch(key)
        if sketch is None:
            return super().is_edge_attr(key)  # type: ignore[misc]
        if isinstance(self, _OfNodes):
            sketch._mapping["num_nodes"] = self.num_nodes
        found = sketch.is_edge_attr(key)
        self._remember(key, sketch)
        return found

    def grouped_edges(self) -> GroupedEdges | None:
        entry = self._mapping.entry(EDGE_INDEX)
        if entry is None or not entry.intact or "adj" in self._mapping or "adj_t" in self._mapping:
            return None
        directory, edge_type = self._directory, self._edge_type
        csc = stored_in_edges(directory, edge_type)
        if csc is None:
            return None
        meta = directory.meta
        edge, source = (
            meta.edges[edge_type],
            meta.nodes[None if edge_type is None else edge_type[0]],
        )
        ordered = edge.has_time if meta.time_of_edges else meta.time_attr in source.attributes
        return GroupedEdges(
            with_origin(csc, directory, edge_type),
            csc,
            source.num_nodes,
            index_dtype=torch_dtype(edge.index_dtype),
            time_attr=meta.time_attr if ordered else None,
            weight_attr=meta.weight_attr if edge.has_weight else None,
            float_time=meta.float_time,
            edge_list=entry.get,
        )


class DirectoryGlobalStorage(_OfNodes, _OfEdges, GlobalStorage):
    """The whole of a homogeneous graph."""


class DirectoryNodeStorage(_OfNodes, NodeStorage):
    """A node type."""

    def grouped_edges(self) -> GroupedEdges | None:
        return None


class DirectoryEdgeStorage(_OfEdges, EdgeStorage):
    """An edge type."""


class OpenedGraph:
    """Mixin: members of an opened graph in addition to PyG's."""

    @property
    def graph_directory(self) -> GraphDirectory:
        """The directory that the graph was opened from."""
        return self.__dict__["_directory"]

    def close(self, timeout: float | None = None) -> None:
        """End the use of the graph; does nothing in a single process, whose files are mapped.

        Args:
            timeout: Used only if several ranks have the graph open.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: object) -> None:
        self.close(0.0 if is_failure(error) else None)

    def to(self, device: Any, *args: str, non_blocking: bool = False) -> Self:
        """As in PyG; for the CPU, attributes that were not read stay in their files."""
        if torch.device(device).type != "cpu":
            return super().to(device, *args, non_blocking=non_blocking)  # type: ignore[misc]
        for store in self.stores:  # type: ignore[attr-defined]
            names = store.keys(*args)
            if isinstance(store, RecordedAttributes):
                names = [name for name in names if not store.is_waiting(name)]
            if names:
                store.apply(lambda x: x.to(device=device, non_blocking=non_blocking), *names)
        return self

    def cpu(self, *args: str) -> Self:
        """As in PyG; attributes that were not read stay in their files."""
        return self.to("cpu", *args)

    def plain_copy(self) -> Data | HeteroData:
        """``copy.copy`` for a batch, of PyG's own class.

        Attributes that were not read are ``None`` in the copy, to be replaced.
        """
        if isinstance(self, Data):
            out = Data()
            out._store._mapping = self._store.without_waiting()
            return out
        hetero = HeteroData()
        assert isinstance(self, HeteroData)
        hetero._global_store._mapping = dict(self._global_store._mapping)
        for kind, store in [*self.node_items(), *self.edge_items()]:
            hetero[kind]._mapping = store.without_waiting()
        return hetero

    @property
    def is_cuda(self) -> bool:
        """True if any attribute is on a GPU; none in a file is."""
        values = [v for store in self.stores for v in _sketched(store).values()]  # type: ignore[attr-defined]
        return any(isinstance(value, Tensor) and value.is_cuda for value in values)

    def __repr__(self) -> str:
        twin = copy.copy(self)
        for name in ("_store", "_global_store"):
            if name in twin.__dict__:
                twin.__dict__[name] = _sketched(twin.__dict__[name])
        for name in ("_node_store_dict", "_edge_store_dict"):
            stores = twin.__dict__.get(name, {})
            for kind, store in stores.items():
                stores[kind] = _sketched(store)
        return super(OpenedGraph, twin).__repr__()


def _sketched(store: BaseStorage) -> BaseStorage:
    return store._sketch() if isinstance(store, RecordedAttributes) else store


class DirectoryData(OpenedGraph, Data):
    """A ``Data`` of :func:`pyg_scale.open`: memory-mapped, with an edge list made on demand."""

    def index_set(self, name: str) -> Tensor:
        """The ids ``int64`` ``[n]`` of a named set such as ``"train"``, for ``input_nodes``.

        Raises:
            KeyError: If the set does not exist; lists the existing ones.
        """
        return self.graph_directory.index_set(name)


class DirectoryHeteroData(OpenedGraph, HeteroData):
    """A ``HeteroData`` of :func:`pyg_scale.open`."""

    def index_set(self, name: str, node_type: NodeType = None) -> tuple[NodeType, Tensor]:
        """``(node type, ids)`` of a named set such as ``"train"``, for ``input_nodes``.

        Args:
            name: Its name.
            node_type: Its node type; may be omitted if only one type has such a set.

        Raises:
            KeyError: If the set does not exist, or several types have one.
        """
        directory = self.graph_directory
        if node_type is None:
            types = [t for t, sets in directory.meta.index_sets.items() if name in sets]
            if len(types) > 1:
                raise KeyError(f"index set {name!r} exists for {', '.join(types)}: pass node_type=")
            if not types:
                known = {n for sets in directory.meta.index_sets.values() for n in sets}
                raise KeyError(
                    f"{directory.path} has no index set {name!r}, only: "
                    f"{', '.join(sorted(known)) or '-'}"
                )
            node_type = types[0]
        return node_type, directory.index_set(name, node_type)

    @property
    def tasks(self) -> Tasks:
        """The seed tables of a graph made of tables, by task: ``graph.tasks["churn"].train``."""
        return Tasks(self.graph_directory)

    @property
    def col_stats(self) -> dict[NodeType, dict[str, dict[Any, Any]]]:
        """Statistics of the columns of each ``tf``, as encoders of torch_frame take them.

        Raises:
            ModuleNotFoundError: If torch_frame is not installed.
        """
        found, directory = {}, self.graph_directory
        for node_type, node in directory.meta.nodes.items():
            rows = {name: each.row for name, each in node.attributes.items()}
            columns = FrameColumns.of(decode(node.other.get(COLUMNS), directory), rows)
            if columns is not None:
                found[node_type] = columns.col_stats()
        return found


def unchanged_directory(data: Any) -> GraphDirectory | None:
    """The directory of an opened graph that was not changed; ``None`` for any other graph."""
    if not isinstance(data, OpenedGraph) or "_directory" not in data.__dict__:
        return None
    if not isinstance(data.graph_directory, GraphDirectory):  # the directory is on another machine
        return None
    meta = data.graph_directory.meta
    if isinstance(data, HeteroData):
        listed = [node_type for node_type, node in meta.nodes.items() if node.listed]
        if data.metadata() != (listed, list(meta.edges)):
            return None
    for store in [*data.node_stores, *data.edge_stores]:
        if not isinstance(store, RecordedAttributes) or not store.is_as_stored():
            return None
    return data.graph_directory


_FIELDS = ("indptr", "indices", "edge_id", "time", "weight_prefix")
_making = threading.Lock()


@dataclass(frozen=True)
class StoredCSC(CSC):
    """In-edges of a graph directory, which other processes read from the directory.

    Attributes:
        origin: The directory and the edge type. Fields may differ from the stored ones.
    """

    origin: tuple[GraphDirectory, EdgeType] | None = None

    def share_memory_(self) -> None:
        """Move tensors to shared memory, except mapped files, which processes share anyway."""
        for tensor in self._differing().values():
            if tensor is not None:
                tensor.share_memory_()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.origin, self._differing())

    def _differing(self) -> dict[str, Tensor | None]:
        assert self.origin is not None
        stored = stored_in_edges(*self.origin)
        values = {name: getattr(self, name) for name in _FIELDS}
        return {k: v for k, v in values.items() if v is not getattr(stored, k)}


def stored_in_edges(directory: GraphDirectory, edge_type: EdgeType) -> CSC | None:
    """The in-edges of a type, always the same object; ``None`` if out-edges are stored.

    Raises:
        GraphDirectoryError: If a file has wrong content.
    """
    with _making:
        if edge_type not in directory.grouped:
            with torch.inference_mode(False):  # tensors of inference mode have no version counter
                found = assemble.in_edges(directory, edge_type)
            if found is not None and directory.meta.num_parts == 1:
                found = dataclasses.replace(found, waits=no_readahead_beyond_memory(found))
            directory.grouped[edge_type] = found
        return directory.grouped[edge_type]


def shared_attribute(directory: GraphDirectory, entry: LazyAttribute) -> Tensor:
    """An attribute as it is stored; the same object for graphs that were opened separately.

    That of several parts is the entry's own, which takes memory.
    """
    if directory.meta.num_parts > 1:
        return entry.get()
    with _making:
        if entry.address not in directory.attributes:
            directory.attributes[entry.address] = entry.read()
        return directory.attributes[entry.address]


def with_origin(csc: CSC, directory: GraphDirectory, edge_type: EdgeType) -> StoredCSC:
    """The result of :func:`stored_in_edges`, with its origin."""
    fields = {name: getattr(csc, name) for name in _FIELDS}
    return StoredCSC(**fields, waits=csc.waits, origin=(directory, edge_type))


def _restore(origin: tuple[GraphDirectory, EdgeType], differing: dict[str, Any]) -> StoredCSC:
    stored = stored_in_edges(*origin)
    assert stored is not None, "only what is stored is an origin"
    return dataclasses.replace(with_origin(stored, *origin), **differing)
