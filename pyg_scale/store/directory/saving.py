"""Writes a graph that is in memory, or opened, as a graph directory of one part."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import TensorFrame
from tqdm.auto import tqdm

from pyg_scale.files.npy import dtype_name
from pyg_scale.graph.source import of
from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology
from pyg_scale.store.directory.assemble import FilledPlaces, fill_edge_list
from pyg_scale.store.directory.data import DirectoryHeteroData, RecordedAttributes
from pyg_scale.store.directory.frame import COLUMNS, FRAME, taken_apart
from pyg_scale.store.directory.index_sets import checked_sets
from pyg_scale.store.directory.lazy import EDGE_INDEX, LazyMapping
from pyg_scale.store.directory.meta import Attribute, EdgeMeta, Meta, NodeMeta
from pyg_scale.store.directory.opening import graph_of
from pyg_scale.store.directory.paths import attribute_file, edge_dir, node_dir, quoted, set_file
from pyg_scale.store.directory.reader import GraphDirectory
from pyg_scale.store.directory.tasks import SEED_TABLES, seed_tables
from pyg_scale.store.directory.values import as_plain_tensor, decode, encode
from pyg_scale.store.directory.writer import DirectoryWriter
from pyg_scale.store.topology import topology_of

_INT32 = 2**31
_STRUCTURE = (EDGE_INDEX, "num_nodes")


def save(
    data: Data | HeteroData | tuple[FeatureStore, GraphStore],
    path: str | PathLike[str],
    *,
    overwrite: bool = False,
    time_attr: str | None = None,
    weight_attr: str | None = None,
    index_sets: Mapping[str, Any] | None = None,
) -> Path:
    """Write a graph as a graph directory, which :func:`pyg_scale.open` opens anywhere.

    All tensors, of every dtype that torch has on the CPU, are written to files that NumPy can map.
    Numbers, strings, and lists, tuples and dictionaries of these are written to ``META.json``.
    Arrays of NumPy become tensors.

    Args:
        data: ``Data`` or ``HeteroData`` with edge lists, or two stores with any edges; the content
            of stores is read into memory.
        path: The new directory. It appears once it is complete.
        overwrite: Replace an existing graph directory.
        time_attr: The attribute, of nodes or of edges, that has times: in-edges are then stored in
            their order, for loaders with the same ``time_attr``.
        weight_attr: The attribute of edges that has weights, for loaders with the same
            ``weight_attr``.
        index_sets: Named sets of nodes, ``{"train": ids or mask}``, or in a heterogeneous graph
            ``{"paper": {"train": ids or mask}}``.

    Returns:
        The path of the directory.

    Raises:
        TypeError: If the graph has a value that a graph directory cannot hold; names it.
        ValueError: If times, weights, edges or index sets do not fit the graph.
        IndexError: If an edge or an index set has a node that does not exist.
        FileExistsError: If ``path`` exists and ``overwrite`` is not set, or it is not a graph
            directory.
        GraphDirectoryError: If the disk is full or fails; names the file. An existing directory is
            then unchanged.
    """
    if isinstance(data, tuple | list) and len(data) == 2:
        features, edges = data
        if isinstance(features, FeatureStore) and isinstance(edges, GraphStore):
            data = data_of_stores(features, edges)
    if not isinstance(data, Data | HeteroData):
        raise TypeError(
            "data must be Data, HeteroData or (FeatureStore, GraphStore) "
            f"(got {type(data).__name__})"
        )
    for _, name, value in _everything(data):
        _check_edges(name, value)
    topology = topology_of(data, time_attr=time_attr, weight_attr=weight_attr)
    sets = checked_sets(index_sets or {}, topology.num_nodes)
    with DirectoryWriter(path, overwrite=overwrite) as writer:
        with tqdm(desc="Saving", unit="B", unit_scale=True, disable=None, delay=2) as bar:
            saving = _Saving(data, topology, writer, bar, {time_attr, weight_attr})
            meta = saving.graph(time_attr, weight_attr)
            for node_type, named in sets.items():
                for name, ids in named.items():
                    writer.write(set_file(node_type, name), ids)
                meta.index_sets[node_type or ""] = {n: ids.numel() for n, ids in named.items()}
        writer.commit(meta)
    return writer.path


def saved_as(directory: GraphDirectory) -> tuple[Data | HeteroData, dict[str, Any]]:
    """The graph of a directory, and the options with which :func:`save` writes the same again."""
    meta = directory.meta
    options: dict[str, Any] = {"time_attr": meta.time_attr, "weight_attr": meta.weight_attr}
    sets = {
        name: {each: directory.index_set(each, name or None) for each in found}
        for name, found in meta.index_sets.items()
    }
    options["index_sets"] = sets if meta.is_hetero else sets.get("", {})
    return graph_of(directory), options


def _everything(data: Data | HeteroData) -> Iterator[tuple[BaseStorage, str, Any]]:
    for store in data.stores:
        for name in list(store.keys()):
            yield store, f"{name!r}{of(store._key)}", _look(store, name)


def _look(store: BaseStorage, name: str) -> Any:
    """An attribute; if it is in files and was not read, without its content."""
    mapping = store._mapping
    if name == EDGE_INDEX and isinstance(mapping, LazyMapping):
        return mapping.sketch()[name]
    return store[name]


def _check_edges(name: str, value: Any) -> None:
    sparse = isinstance(value, Tensor) and value.layout != torch.strided
    if sparse or type(value).__name__ == "SparseTensor":
        raise TypeError(
            f"{name} is a sparse matrix, which a graph directory cannot hold: if it holds the "
            "edges, set edge_index (torch_geometric.utils.to_edge_index), and delete it"
        )


class _Saving:
    """Writes one graph to files."""

    def __init__(
        self,
        data: Data | HeteroData,
        topology: Topology,
        writer: DirectoryWriter,
        bar: tqdm,
        of_edges: set[str | None],
    ) -> None:
        self.data = data
        self.topology = topology
        self.writer = writer
        self.progress = bar.update
        self._named = of_edges

    def graph(self, time_attr: str | None, weight_attr: str | None) -> Meta:
        """Write the whole graph; return the content of ``META.json``."""
        topology = self.topology
        meta = Meta(
            nodes={t: NodeMeta(t, n, part_nodes=[n], part_halo=[0]) for t, n in self._sizes()},
            edges={t: self._edges(t, csc) for t, csc in topology.csc.items()},
            is_hetero=topology.is_hetero,
            time_attr=time_attr,
            time_of_edges=topology.has_edge_time,
            float_time=topology.float_time,
            weight_attr=weight_attr,
        )
        if isinstance(self.data, HeteroData):
            known = set(self.data.node_types)
            for node_type, node in meta.nodes.items():
                node.listed = node_type in known
                if node.listed:
                    store = self.data[node_type]
                    node.keys = self._attributes(store, node, None, node.other, node_type)
            for edge_type, edge in meta.edges.items():
                store = self.data[edge_type]
                edge.keys = self._attributes(store, None, edge, edge.other, edge_type)
            store = self.data._global_store
            meta.keys = self._attributes(store, None, None, meta.graph_attributes, None)
            if isinstance(self.data, DirectoryHeteroData):
                self._seed_tables(self.data, meta)
        else:
            edge, store = meta.edges[None], self.data._store
            meta.keys = self._attributes(store, meta.nodes[None], edge, meta.graph_attributes, None)
        return meta

    def _sizes(self) -> list[tuple[NodeType, int]]:
        return [(t, self.topology.num_nodes[t]) for t in self.topology.node_types]

    def _edges(self, edge_type: EdgeType, csc: CSC) -> EdgeMeta:
        """Write the in-edges of a type."""
        folder = edge_dir(edge_type, 0)
        store = self.data._store if isinstance(self.data, Data) else self.data[edge_type]
        edge_index = _look(store, EDGE_INDEX) if EDGE_INDEX in store else None
        neighbors = self.topology.num_nodes[self.topology.neighbor_type(edge_type)]
        indices = torch.int32 if neighbors < _INT32 else torch.int64
        edge_id = torch.int32 if csc.num_edges < _INT32 else torch.int64
        self._write(f"{folder}/indptr.npy", csc.indptr)
        self._write(f"{folder}/indices.npy", csc.indices, indices)
        if csc.edge_id is not None:
            self._write(f"{folder}/edge_id.npy", csc.edge_id, edge_id)
        if csc.time is not None:
            self._write(f"{folder}/time.npy", csc.time)
        if csc.weight_prefix is not None:
            self._write(f"{folder}/weight_prefix.npy", csc.weight_prefix)
        return EdgeMeta(
            edge_type,
            csc.num_edges,
            index_dtype="int64" if edge_index is None else dtype_name(edge_index.dtype),
            indices_dtype=dtype_name(indices),
            edge_id_dtype=None if csc.edge_id is None else dtype_name(edge_id),
            has_time=csc.time is not None,
            has_weight=csc.weight_prefix is not None,
            part_edges=[csc.num_edges],
        )

    def _attributes(
        self,
        store: BaseStorage,
        node: NodeMeta | None,
        edge: EdgeMeta | None,
        other: dict[str, Any],
        kind: NodeType | EdgeType,
    ) -> list[str]:
        """Write a storage: rows of nodes, rows of edges, and the rest; also return its names."""
        keys = []
        for name in list(store.keys()):
            value = _look(store, name)
            if value is None:
                continue
            keys.append(name)
            if name in _STRUCTURE:
                continue
            what = f"{name!r}{of(kind)}"
            if node is not None and name == FRAME and isinstance(value, TensorFrame):
                keys[-1:] = self._frame(store, value, node, what)
                continue
            if isinstance(value, np.ndarray):
                value = as_plain_tensor(value, what)
            if edge is not None and self._is_of_edges(store, name, value, edge):
                edge.attributes[name] = self._rows(edge_dir(edge.name, 0), name, value, what)
            elif node is not None and _is_of_nodes(store, name, value, node):
                node.attributes[name] = self._rows(node_dir(node.name, 0), name, value, what)
            else:
                other[name] = encode(
                    value, f"graph/{_folder(kind)}{quoted(name)}", what, self.writer
                )
        return keys

    def _seed_tables(self, data: DirectoryHeteroData, meta: Meta) -> None:
        """Keep the tasks of an opened graph."""
        found = seed_tables(data.graph_directory.meta.graph_attributes)
        if found and SEED_TABLES not in meta.graph_attributes:
            tables = decode(found, data.graph_directory)
            file = f"graph/{SEED_TABLES}"
            meta.graph_attributes[SEED_TABLES] = encode(tables, file, SEED_TABLES, self.writer)
            meta.keys = [*(meta.keys or []), SEED_TABLES]

    def _frame(
        self, store: BaseStorage, frame: TensorFrame, node: NodeMeta, what: str
    ) -> list[str]:
        """Write the arrays of a frame, and what is in them; return their names."""
        if len(frame) != node.num_nodes:
            raise ValueError(f"{what} has {len(frame)} rows, but there are {node.num_nodes} nodes")
        columns, arrays = taken_apart(frame, what)
        if isinstance(store, RecordedAttributes) and (known := store.frame_columns(FRAME)):
            columns.details = known.details
        for name, value in arrays.items():
            if name in store:
                raise ValueError(f"{what} is stored with an array {name!r}: rename the other one")
            node.attributes[name] = self._rows(node_dir(node.name, 0), name, value, what)
        file = f"graph/{_folder(node.name)}{COLUMNS}"
        node.other[COLUMNS] = encode(columns.plain(), file, what, self.writer)
        return [*arrays, COLUMNS]

    def _is_of_edges(self, store: BaseStorage, name: str, value: Any, edge: EdgeMeta) -> bool:
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != edge.num_edges:
            return False
        is_recorded = name in self._named and (edge.has_time or edge.has_weight)
        return store.is_edge_attr(name) or is_recorded

    def _rows(self, folder: str, name: str, value: Tensor, what: str) -> Attribute:
        value = as_plain_tensor(value, what)
        self._write(attribute_file(folder, name), value)
        return Attribute(dtype_name(value.dtype), tuple(value.shape[1:]))

    def _write(self, name: str, value: Tensor, dtype: torch.dtype | None = None) -> None:
        self.writer.write(name, value, dtype=dtype, progress=self.progress)


def _is_of_nodes(store: BaseStorage, name: str, value: Any, node: NodeMeta) -> bool:
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != node.num_nodes:
        return False
    return bool(store.is_node_attr(name))


def _folder(kind: NodeType | EdgeType) -> str:
    if kind is None:
        return ""
    names = kind if isinstance(kind, tuple) else (kind,)
    return ",".join(map(quoted, names)) + "/"


def data_of_stores(feature_store: FeatureStore, graph_store: GraphStore) -> Data | HeteroData:
    """All features and edges, in memory; edges in the order of their ids.

    Raises:
        ValueError: If the edges do not form a graph, or two features have the same name.
        TypeError: If the edges are not integers.
        IndexError: If an edge has a node that does not exist.
    """
    topology = topology_of((feature_store, graph_store))
    out: Any = HeteroData() if topology.is_hetero else Data()
    for node_type in topology.node_types:
        _of(out, node_type).num_nodes = topology.num_nodes[node_type]
    for attr in feature_store.get_all_tensor_attrs():
        attr = copy.copy(attr)
        attr.index = None
        group = attr.group_name if attr.is_set("group_name") else None
        group = tuple(group) if isinstance(group, list) else group
        store = _of(out, None if group == (None, None) else group)
        if attr.attr_name in store:
            raise ValueError(f"{attr.attr_name!r} is stored for nodes and for edges: rename one")
        store[attr.attr_name] = feature_store.get_tensor(attr)
    for edge_type, csc in topology.csc.items():
        _of(out, edge_type).edge_index = _edge_list(csc, topology.index_dtype)
    return out


def _of(data: Any, kind: Any) -> Any:
    return data._store if isinstance(data, Data) else data[kind]


def _edge_list(csc: CSC, dtype: torch.dtype) -> Tensor:
    out = torch.empty(2, csc.num_edges, dtype=dtype)
    places = FilledPlaces(csc.num_edges, "the edge list of the graph store")
    fill_edge_list(csc, out[1], out[0], places)
    places.check()
    return out
