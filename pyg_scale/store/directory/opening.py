"""Open a graph directory as PyG's ``Data`` or ``HeteroData``."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, overload

from torch_geometric.typing import WITH_TORCH_FRAME

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.store.directory.data import (
    DirectoryData,
    DirectoryEdgeStorage,
    DirectoryGlobalStorage,
    DirectoryHeteroData,
    DirectoryNodeStorage,
)
from pyg_scale.store.directory.frame import COLUMNS, FRAME, FrameColumns
from pyg_scale.store.directory.lazy import EDGE_INDEX, LazyAttribute, LazyFrame, Read
from pyg_scale.store.directory.meta import EdgeMeta, NodeMeta
from pyg_scale.store.directory.reader import OPENINGS, GraphDirectory, Part
from pyg_scale.store.directory.tasks import SEED_TABLES, seed_tables
from pyg_scale.store.directory.values import decode
from pyg_scale.store.directory.verify import verify as verify_directory

_INFERS = ("x", "feat", "pos", "batch", "node_type", "n_id")  # PyG counts nodes by these


@overload
def open_graph(
    path: str | PathLike[str],
    part: None = None,
    *,
    verify: bool = False,
    snapshot: int | None = None,
) -> DirectoryData | DirectoryHeteroData: ...


@overload
def open_graph(
    path: str | PathLike[str], part: int, *, verify: bool = False, snapshot: int | None = None
) -> Part: ...


def open_graph(
    path: str | PathLike[str],
    part: int | None = None,
    *,
    verify: bool = False,
    snapshot: int | None = None,
) -> DirectoryData | DirectoryHeteroData | Part:
    """Open a graph directory. Only ``META.json`` and the headers of files are read.

    The graph is a ``Data`` or ``HeteroData`` that every loader accepts. Its tensors are
    memory-mapped, copy-on-write: the system reads only pages that are used, all processes of a
    machine share them, and a write stays in this process. The edge list is made on first access to
    ``edge_index`` and takes 16 bytes per edge (8 for ``int32``); loaders do not need it.

    A directory of several parts is one graph too if all of them are present. Its attributes and
    in-edges are joined in memory on first access, and take memory of their size; ids are the
    original ones.

    Args:
        path: The directory.
        part: Open this part alone.
        verify: Read everything, and check checksums, ids and orders; see
            :func:`pyg_scale.store.directory.verify.verify`.
        snapshot: The id of a snapshot, see :func:`pyg_scale.append`; ``None`` for the newest. What
            is appended later does not change the opened graph.

    Returns:
        The graph, or with ``part`` a :class:`~pyg_scale.store.directory.Part`.

    Raises:
        GraphDirectoryError: If it is not a graph directory, has a newer version, is damaged, or
            parts are missing; names the file or the parts. If the snapshot does not exist.
        IndexError: If the part does not exist.
    """
    for _ in range(OPENINGS - 1):
        directory = GraphDirectory.shared(Path(path), snapshot)
        try:
            return _opened(directory, part, verify)
        except GraphDirectoryError:
            if not directory.was_replaced():
                raise
    return _opened(GraphDirectory.shared(Path(path), snapshot), part, verify)


def _opened(
    directory: GraphDirectory, part: int | None, verify: bool
) -> DirectoryData | DirectoryHeteroData | Part:
    if verify:
        verify_directory(directory)
    if part is not None:
        return directory.part(part)
    absent = sorted(set(range(directory.meta.num_parts)) - set(directory.parts))
    if absent:
        raise GraphDirectoryError(
            f"{directory.path} has {directory.meta.num_parts} parts, of which "
            f"{', '.join(map(str, absent))} {'is' if len(absent) == 1 else 'are'} missing: open "
            "another one with part=, or copy the missing ones"
        )
    return graph_of(directory)


def graph_of(directory: GraphDirectory) -> DirectoryData | DirectoryHeteroData:
    """The graph of a directory whose parts are all local."""
    if directory.meta.is_hetero:
        return fill_hetero(directory, DirectoryHeteroData())
    return fill_homogeneous(directory, DirectoryData())


D = TypeVar("D", bound=DirectoryData)
H = TypeVar("H", bound=DirectoryHeteroData)


def fill_homogeneous(directory: GraphDirectory, out: D, read: Read | None = None) -> D:
    """Add everything in a directory to an empty ``Data``.

    Args:
        directory: A graph without types.
        out: The ``Data``.
        read: Reads attributes, see :class:`~pyg_scale.store.directory.lazy.LazyAttribute`.
    """
    meta = directory.meta
    node, edge = meta.nodes[None], meta.edges.get(None)
    values = _node_values(directory, node, read)
    if edge is not None:
        values |= _edge_values(directory, edge, read)
    values |= {name: decode(v, directory) for name, v in meta.graph_attributes.items()}
    store = DirectoryGlobalStorage(_parent=out)
    store.attach(directory, _with_frame(_listed(values, meta.keys, node)))
    out.__dict__["_store"] = store
    out.__dict__["_directory"] = directory
    return out


def fill_hetero(directory: GraphDirectory, out: H, read: Read | None = None) -> H:
    """Add everything in a directory to an empty ``HeteroData``; see :func:`fill_homogeneous`."""
    meta = directory.meta
    for node_type, node in meta.nodes.items():
        if node.listed:
            store = DirectoryNodeStorage(_parent=out, _key=node_type)
            values = _listed(_node_values(directory, node, read), node.keys, node)
            store.attach(directory, _with_frame(values), node_type=node_type)
            out._node_store_dict[node_type] = store
    for edge_type, edge in meta.edges.items():
        store = DirectoryEdgeStorage(_parent=out, _key=edge_type)
        values = _listed(_edge_values(directory, edge, read), edge.keys)
        store.attach(directory, values, edge_type=edge_type)
        out._edge_store_dict[edge_type] = store
    for name in meta.graph_attributes if meta.keys is None else meta.keys:
        if name == SEED_TABLES and seed_tables(meta.graph_attributes) is not None:
            continue  # graph.tasks, not to be carried along with every batch
        out._global_store[name] = decode(meta.graph_attributes[name], directory)
    out.__dict__["_directory"] = directory
    return out


def _node_values(directory: GraphDirectory, node: NodeMeta, read: Read | None) -> dict[str, Any]:
    out: dict[str, Any] = _entries(directory, False, node.name, node.attributes, read)
    if not any(name in _INFERS or "node" in name for name in out):
        out["num_nodes"] = node.num_nodes
    return out | {name: decode(value, directory) for name, value in node.other.items()}


def _with_frame(values: dict[str, Any]) -> dict[str, Any]:
    """The values with a frame in place of its arrays; as they are without torch_frame."""
    entries = {n: each for n, each in values.items() if isinstance(each, LazyAttribute)}
    rows = {name: entry.shape[1:] for name, entry in entries.items()}
    columns = FrameColumns.of(values.get(COLUMNS), rows)
    if columns is None or FRAME in values or not WITH_TORCH_FRAME:
        return values
    parts = {name: entries[name] for name in columns.parts}
    gone = parts.keys() | {COLUMNS}
    rest = {name: value for name, value in values.items() if name not in gone}
    return {FRAME: LazyFrame(columns, parts), **rest}


def _edge_values(directory: GraphDirectory, edge: EdgeMeta, read: Read | None) -> dict[str, Any]:
    names = [EDGE_INDEX, *edge.attributes]
    out: dict[str, Any] = _entries(directory, True, edge.name, names, read)
    return out | {name: decode(value, directory) for name, value in edge.other.items()}


def _entries(
    directory: GraphDirectory,
    of_edges: bool,
    kind: NodeType | EdgeType,
    names: Any,
    read: Read | None,
) -> dict[str, LazyAttribute]:
    out = {name: LazyAttribute(directory, of_edges, kind, name, read) for name in names}
    if directory.meta.num_parts == 1 and read is None:
        for name, entry in out.items():
            if name != EDGE_INDEX:
                entry.get()  # maps it, which checks the file
    return out


def _listed(
    values: dict[str, Any], keys: list[str] | None, node: NodeMeta | None = None
) -> dict[str, Any]:
    """The values in the order of the user's graph, if that is known."""
    if keys is None:
        return values
    if node is not None and "num_nodes" in keys and "num_nodes" not in values:
        values["num_nodes"] = node.num_nodes
    return {name: values[name] for name in keys}
