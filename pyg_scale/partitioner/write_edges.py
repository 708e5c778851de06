"""Writing of the edges of a partitioned directory, which are read once in their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.partitioner.assigned import Assigned
from pyg_scale.partitioner.rows import FileRows, RowsByPart, RowWriter, pieces
from pyg_scale.partitioner.write_nodes import Progress, split_rows, writers
from pyg_scale.store.directory import DirectoryWriter, GraphDirectory
from pyg_scale.store.directory.layout import book_dtype
from pyg_scale.store.directory.meta import EdgeMeta, attribute_file, edge_dir, node_dir

EDGE_BYTES = 192
"""Largest number of bytes that an edge needs while it is sorted by part."""


@dataclass
class EdgeFiles:
    """The files of one edge type in a directory of one part."""

    indptr: FileRows
    columns: dict[str, FileRows] = field(default_factory=dict)

    @classmethod
    def of(cls, source: GraphDirectory, edge_type: EdgeType) -> EdgeFiles:
        """Open the files, and check that they exist."""
        edge, folder = source.meta.edges[edge_type], edge_dir(edge_type, 0)
        size, shape = source.meta.nodes[end_of(edge_type, 2)].num_nodes, (edge.num_edges,)
        dtypes = {
            "indices": edge.indices_dtype,
            "edge_id": edge.edge_id_dtype,
            "time": "int64" if edge.has_time else None,
            "weight_prefix": "int64" if edge.has_weight else None,
        }
        return cls(
            FileRows(source, f"{folder}/indptr.npy", "int64", (size + 1,)),
            {
                name: FileRows(source, f"{folder}/{name}.npy", dtype, shape)
                for name, dtype in dtypes.items()
                if dtype is not None
            },
        )

    def chunks(self, edges: int) -> Iterator[tuple[int, Tensor, dict[str, Tensor]]]:
        """``(first destination, number of in-edges of it and each later one, columns)``.

        A node with many in-edges may be in several pieces.

        Args:
            edges: Largest number of edges at a time. ``edge_id`` is always among the columns.
        """
        nodes = len(self.indptr) - 1
        for first in range(0, nodes, edges):
            pointers = self.indptr.read(first, min(nodes, first + edges) + 1)
            for low, counts, begin, end in pieces(pointers, edges):
                columns = {name: r.read(begin, end) for name, r in self.columns.items()}
                columns.setdefault("edge_id", torch.arange(begin, end))
                yield first + low, counts, columns


def end_of(edge_type: EdgeType, position: int) -> NodeType:
    """The source (0) or destination (2) type."""
    return None if edge_type is None else edge_type[position]


def neighbor_times(source: GraphDirectory, edge_type: EdgeType, end: int) -> Tensor | None:
    """The mapped times of the nodes at the source (0) or destination (2) end of edges.

    ``None`` if the edges are not ordered by such times. The times of neighbours are stored with the
    edges of a part, as the neighbours may be in parts on other machines.
    """
    meta, node_type = source.meta, end_of(edge_type, end)
    known = meta.nodes[node_type].attributes
    if meta.time_attr is None or meta.time_of_edges or meta.time_attr not in known:
        return None
    return source.part(0).node_attribute(node_type, meta.time_attr)


def id_dtype(num_edges: int) -> torch.dtype:
    """The dtype in which original edge ids are written."""
    return torch.int32 if num_edges < 2**31 else torch.int64


def write_in_edges(
    source: GraphDirectory,
    writer: DirectoryWriter,
    assigned: Assigned,
    edge_type: EdgeType,
    memory: int,
    progress: Progress,
) -> EdgeMeta:
    """Write the edges of a type, each to the part of its destination.

    Args:
        source: A directory of one part.
        writer: The directory that is written.
        assigned: The part of every node.
        edge_type: The edge type.
        memory: Bytes that may be used besides the assignment.
        progress: Called with the number of bytes read.

    Returns:
        The description of the edge type for ``META.json``.
    """
    edge, files = source.meta.edges[edge_type], EdgeFiles.of(source, edge_type)
    end, parts = end_of(edge_type, 2), assigned.num_parts
    part = assigned.part[end]
    keep_ids = parts == 1 and edge.edge_id_dtype is None
    node_time = neighbor_times(source, edge_type, 0) if parts > 1 and not edge.has_time else None
    sizes = _write_pointers(files.indptr, writer, assigned, edge_type, memory)
    dtypes = {name: getattr(torch, reader.dtype) for name, reader in files.columns.items()}
    if not keep_ids:
        dtypes["edge_id"] = id_dtype(edge.num_edges)
    if node_time is not None:
        dtypes["time"] = torch.int64
    out = {
        name: _column_writers(writer, edge_type, name, dtype, sizes)
        for name, dtype in dtypes.items()
    }
    for first, counts, columns in files.chunks(edges_at_once(memory)):
        of_nodes = part[first : first + counts.numel()]
        split = RowsByPart(of_nodes.repeat_interleave(counts), parts)
        if node_time is not None:
            when = node_time[columns["indices"].to(torch.int64)]
            columns["time"] = source.meta.sortable(when)
        for name, files_of in out.items():
            split.append(columns[name], files_of)
            progress(columns[name].numel() * columns[name].element_size())
    _finish(out)
    written = EdgeMeta(**vars(edge))
    written.part_edges = sizes
    written.has_time = edge.has_time or node_time is not None
    written.edge_id_dtype = None if keep_ids else str(dtypes["edge_id"]).removeprefix("torch.")
    return written


def _write_pointers(
    indptr: FileRows,
    writer: DirectoryWriter,
    assigned: Assigned,
    edge_type: EdgeType,
    memory: int,
) -> list[int]:
    """Write the pointers of each part; return its number of edges."""
    end, parts = end_of(edge_type, 2), assigned.num_parts
    out = pointer_writers(writer, edge_type, assigned.sizes[end])
    sizes = np.zeros(parts, dtype=np.int64)
    nodes, rows = len(indptr) - 1, max(1, memory // 128)
    for begin in range(0, nodes, rows):
        degree = indptr.read(begin, min(nodes, begin + rows) + 1).diff()
        split = RowsByPart(assigned.part[end][begin : begin + rows], parts)
        degree = degree[split.order]
        for number in range(parts):
            mine = degree[split.bounds[number] : split.bounds[number + 1]].cumsum(0)
            out[number].append(mine + sizes[number])
            sizes[number] += int(mine[-1]) if mine.numel() else 0
    for each in out:
        each.finish()
    return sizes.tolist()


def pointer_writers(
    writer: DirectoryWriter, edge_type: EdgeType, part_nodes: list[int]
) -> list[RowWriter]:
    """The files of pointers, with the first 0 written."""
    out = [
        RowWriter(writer, f"{edge_dir(edge_type, p)}/indptr.npy", torch.int64, (size + 1,))
        for p, size in enumerate(part_nodes)
    ]
    for each in out:
        each.append(torch.zeros(1, dtype=torch.int64))
    return out


def _column_writers(
    writer: DirectoryWriter, edge_type: EdgeType, name: str, dtype: torch.dtype, sizes: list[int]
) -> list[RowWriter]:
    return [
        RowWriter(writer, f"{edge_dir(edge_type, p)}/{name}.npy", dtype, (size,))
        for p, size in enumerate(sizes)
    ]


def _finish(out: dict[str, list[RowWriter]]) -> None:
    for files in out.values():
        for each in files:
            each.finish()


def edges_at_once(memory: int) -> int:
    """Number of edges that are sorted at a time."""
    return min(1 << 22, max(1, memory // EDGE_BYTES))


def write_halo(
    writer: DirectoryWriter,
    assigned: Assigned,
    neighbors: dict[NodeType, list[tuple[EdgeType, EdgeMeta]]],
    memory: int,
) -> tuple[dict[NodeType, list[int]], dict[EdgeType, int]]:
    """Write the neighbours of each part that other parts own.

    Args:
        writer: The directory to be, with its edges.
        assigned: The part of every node.
        neighbors: For each node type, the edge types whose neighbours are of that type.
        memory: Bytes that may be used.

    Returns:
        The numbers of halo nodes per part, by node type, and the cut edges of each edge type.
    """
    rows = edges_at_once(memory)
    halo: dict[NodeType, list[int]] = {t: [] for t in assigned.part}
    cut: dict[EdgeType, int] = {e: 0 for edges in neighbors.values() for e, _ in edges}
    for node_type, part in assigned.part.items():
        for number in range(assigned.num_parts):
            mark = torch.zeros(part.numel(), dtype=torch.bool)
            for edge_type, edge in neighbors.get(node_type, ()):
                name = f"{edge_dir(edge_type, number)}/indices.npy"
                for node in _written(writer, name, edge.part_edges[number], rows):
                    node = node[part[node] != number]
                    mark[node] = True
                    cut[edge_type] += node.numel()
            size = int(mark.sum())
            halo[node_type].append(size)
            if size:
                name = f"{node_dir(node_type, number)}/halo.npy"
                out = RowWriter(writer, name, torch.int64, (size,))
                for begin in range(0, part.numel(), rows):
                    out.append(mark[begin : begin + rows].nonzero().view(-1) + begin)
                out.finish()
    return halo, cut


def _written(writer: DirectoryWriter, name: str, size: int, rows: int) -> Iterator[Tensor]:
    """The pieces of a written column of integers, as ``int64``."""
    path = writer.staging / name
    if not size:
        return
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        assert version == (1, 0)
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
        while (array := np.fromfile(file, dtype, rows)).size:
            yield torch.from_numpy(array).to(torch.int64)


def write_edge_attributes(
    source: GraphDirectory,
    writer: DirectoryWriter,
    num_parts: int,
    edge: EdgeMeta,
    memory: int,
    progress: Progress,
) -> None:
    """Write the attributes of an edge type, each row to the part that has its edge.

    It also writes a book with the part of every edge, which does not follow from its id.

    Rows are read once and in order, so the part of every edge must be known by its id: for as many
    ids as memory allows, parts are looked up in the written edges, then the rows are read.

    Args:
        source: A directory of one part.
        writer: The directory to be, with its edges.
        num_parts: Number of parts.
        edge: The description of the edge type as written.
        memory: Bytes that may be used.
        progress: Called with the number of bytes read.
    """
    if not edge.attributes:
        return
    folders = [edge_dir(edge.name, p) for p in range(num_parts)]
    ids = [
        RowWriter(writer, f"{folder}/ids.npy", id_dtype(edge.num_edges), (size,))
        for folder, size in zip(folders, edge.part_edges, strict=True)
        if num_parts > 1
    ]
    files = []
    for name, spec in edge.attributes.items():
        old = attribute_file(edge_dir(edge.name, 0), name)
        reader = FileRows(source, old, spec.dtype, (edge.num_edges, *spec.row))
        out = writers(writer, [attribute_file(f, name) for f in folders], reader, edge.part_edges)
        files.append((reader, out))
    dtype = getattr(torch, book_dtype(num_parts))
    book = (
        [RowWriter(writer, f"{edge_dir(edge.name)}/part.npy", dtype, (edge.num_edges,))]
        if num_parts > 1
        else []
    )
    window, rows = max(1, memory // 2 // dtype.itemsize), edges_at_once(memory // 2)
    for begin in range(0, max(1, edge.num_edges), window):
        end = min(edge.num_edges, begin + window)
        where = torch.zeros(end - begin, dtype=dtype)
        for number in range(1, num_parts):
            name = f"{folders[number]}/edge_id.npy"
            for edge_id in _written(writer, name, edge.part_edges[number], rows):
                where[edge_id[(edge_id >= begin) & (edge_id < end)] - begin] = number
        for each in book:
            each.append(where)
        for start in range(0, end - begin, rows) if ids else ():
            here = where[start : start + rows]
            edge_id = torch.arange(begin + start, begin + start + here.numel())
            RowsByPart(here, num_parts).append(edge_id, ids)
        for reader, out in files:
            split_rows(reader, where, num_parts, out, memory // 8, progress, begin)
    for each in [*book, *ids]:
        each.finish()
