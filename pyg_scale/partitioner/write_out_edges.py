"""Writing of the edges of a directory partitioned by source: in-edges become out-edges.

Every edge is first written to a file of its source's part, in the order of reading. Each file is
then read once for every range of sources whose edges fit in memory, and these are sorted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.ops.csc import Compressed, weight_prefix
from pyg_scale.partitioner.assigned import Assigned
from pyg_scale.partitioner.rows import RowsByPart, RowWriter, ranks
from pyg_scale.partitioner.write_edges import (
    EDGE_BYTES,
    EdgeFiles,
    edges_at_once,
    end_of,
    id_dtype,
    neighbor_times,
    pointer_writers,
)
from pyg_scale.partitioner.write_nodes import Progress
from pyg_scale.store.directory import DirectoryWriter, EdgeMeta, GraphDirectory
from pyg_scale.store.directory.meta import edge_dir


@dataclass
class _Spill:
    """Columns of edges by part, in temporary files."""

    folder: Path
    dtypes: dict[str, np.dtype]

    def append(self, split: RowsByPart, columns: dict[str, Tensor]) -> None:
        for name, dtype in self.dtypes.items():
            values = columns[name][split.order].numpy().astype(dtype, copy=False)
            for part in np.flatnonzero(split.counts):
                path = self._file(name, int(part))
                try:
                    with path.open("ab") as file:
                        file.write(values[split.bounds[part] : split.bounds[part + 1]].data)
                except OSError as error:
                    raise GraphDirectoryError(f"{path} cannot be written: {error}") from error

    def chunks(self, part: int, rows: int) -> Iterator[dict[str, np.ndarray]]:
        begin, names = 0, list(self.dtypes)
        while self._file(names[0], part).exists():
            piece = {}
            for name, dtype in self.dtypes.items():
                offset = begin * dtype.itemsize
                piece[name] = np.fromfile(self._file(name, part), dtype, rows, offset=offset)
            if not piece[names[0]].size:
                return
            yield piece
            begin += piece[names[0]].size

    def remove(self, part: int) -> None:
        for name in self.dtypes:
            self._file(name, part).unlink(missing_ok=True)

    def _file(self, name: str, part: int) -> Path:
        return self.folder / f"{name}-{part}.bin"


def write_out_edges(
    source: GraphDirectory,
    writer: DirectoryWriter,
    assigned: Assigned,
    edge_type: EdgeType,
    memory: int,
    progress: Progress,
) -> EdgeMeta:
    """Write the edges of a type, each to the part of its source, grouped by source.

    Within a source edges are ordered by original edge id or, if the graph has times, by time and
    then edge id; running sums of weights are those of out-edges. The in-edges are read once. Needs
    disk space for a second copy of the edges meanwhile.

    Args:
        source: A directory of one part.
        writer: The directory that is written.
        assigned: The part of every node.
        edge_type: The edge type.
        memory: Bytes that may be used besides the assignment and eight bytes per node; the
            out-edges of one node must fit.
        progress: Called with the number of bytes read.

    Returns:
        The description of the edge type for ``META.json``.
    """
    meta = source.meta
    edge, start, parts = meta.edges[edge_type], end_of(edge_type, 0), assigned.num_parts
    folder = writer.staging / "spill"
    folder.mkdir(exist_ok=True)
    spill, degree = _distribute(source, assigned, edge_type, folder, memory, progress)
    written = EdgeMeta(**vars(edge))
    size_of_neighbors = meta.nodes[end_of(edge_type, 2)].num_nodes
    ids = id_dtype(edge.num_edges)
    written.edge_id_dtype = str(ids).removeprefix("torch.")
    narrow = size_of_neighbors < 2**31
    written.indices_dtype = "int32" if narrow else "int64"
    dtypes = {"indices": torch.int32 if narrow else torch.int64, "edge_id": ids}
    written.has_time = "time" in spill.dtypes
    if written.has_time:
        dtypes["time"] = torch.int64
    if edge.has_weight:
        dtypes["weight_prefix"] = torch.int64
    pointers = pointer_writers(writer, edge_type, assigned.sizes[start])
    written.part_edges = []
    for number in range(parts):
        mine = degree[assigned.part[start] == number]
        indptr = torch.cat([mine.new_zeros(1), mine.cumsum(0)])
        pointers[number].append(indptr[1:])
        pointers[number].finish()
        size = int(indptr[-1])
        written.part_edges.append(size)
        out = {
            name: RowWriter(writer, f"{edge_dir(edge_type, number)}/{name}.npy", dtype, (size,))
            for name, dtype in dtypes.items()
        }
        _write_sorted(source, spill, number, indptr, edge, out, memory)
        spill.remove(number)
    folder.rmdir()
    return written


def _write_sorted(
    source: GraphDirectory,
    spill: _Spill,
    number: int,
    indptr: Tensor,
    edge: EdgeMeta,
    out: dict[str, RowWriter],
    memory: int,
) -> None:
    """Write the out-edges of a part, one range of its sources after the other."""
    for begin, end in _ranges(indptr, max(1, memory // EDGE_BYTES)):
        columns = _gather(spill, number, begin, end, edges_at_once(memory))
        keys = [columns[name] for name in ("edge_id", "time", "node") if name in columns]
        order = torch.from_numpy(np.lexsort(keys))
        rows = {name: torch.from_numpy(values)[order] for name, values in columns.items()}
        if edge.has_weight:
            group = Compressed(indptr[begin : end + 1] - indptr[begin], rows["indices"], None)
            weight = _weights(source, rows["edge_id"], edge)
            rows["weight_prefix"] = weight_prefix(group, weight)
        for name, file in out.items():
            file.append(rows[name])
    for file in out.values():
        file.finish()


def _distribute(
    source: GraphDirectory,
    assigned: Assigned,
    edge_type: EdgeType,
    folder: Path,
    memory: int,
    progress: Progress,
) -> tuple[_Spill, Tensor]:
    """Write edges to the file of their source's part; return all out-degrees, ``int64``."""
    edge, files = source.meta.edges[edge_type], EdgeFiles.of(source, edge_type)
    start = end_of(edge_type, 0)
    part = assigned.part[start]
    degree = torch.zeros(part.numel(), dtype=torch.int64)
    node_time = None if edge.has_time else neighbor_times(source, edge_type, 2)
    dtypes = {
        "node": np.dtype("<i8"),
        "indices": np.dtype("<i8"),
        "edge_id": np.dtype("<i4" if edge.num_edges < 2**31 else "<i8"),
    }
    if edge.has_time or node_time is not None:
        dtypes["time"] = np.dtype("<i8")
    local = _local_ids(assigned, start, edges_at_once(memory))
    spill = _Spill(folder, dtypes)
    for first, counts, columns in files.chunks(edges_at_once(memory)):
        node = columns["indices"].to(torch.int64)
        degree.index_add_(0, node, torch.ones_like(node))
        last = first + counts.numel()
        target = torch.arange(first, last).repeat_interleave(counts)
        here = {"node": local[node], "indices": target, "edge_id": columns["edge_id"]}
        if edge.has_time:
            here["time"] = columns["time"]
        elif node_time is not None:
            when = source.meta.sortable(node_time[first:last])
            here["time"] = when.repeat_interleave(counts)
        spill.append(RowsByPart(part[node], assigned.num_parts), here)
        progress(sum(c.numel() * c.element_size() for c in columns.values()))
    return spill, degree


def _local_ids(assigned: Assigned, node_type: NodeType, rows: int) -> Tensor:
    """The rank of every node within its part."""
    part = assigned.part[node_type]
    local = torch.empty(part.numel(), dtype=torch.int32 if part.numel() < 2**31 else torch.int64)
    for begin, _, rank in ranks(part, assigned.num_parts, rows):
        local[begin : begin + rank.numel()] = rank
    return local


def _weights(source: GraphDirectory, edge_id: Tensor, edge: EdgeMeta) -> Tensor:
    """The weights of edges by their ids."""
    name = source.meta.weight_attr
    if name is None or name not in edge.attributes:
        raise GraphDirectoryError(
            f"{source.path} has running sums of weights but not the weights themselves: they are "
            "needed to partition by source; save the graph again with its weight attribute"
        )
    weight = source.part(0).edge_attribute(edge.name, name).view(-1)
    return weight[edge_id.to(torch.int64)]


def _ranges(indptr: Tensor, edges: int) -> Iterator[tuple[int, int]]:
    """Ranges of nodes with at most ``edges`` edges each, but at least one node."""
    begin, nodes = 0, indptr.numel() - 1
    while begin < nodes:
        limit = indptr[begin] + edges
        end = max(begin + 1, int(torch.searchsorted(indptr, limit, right=True)) - 1)
        yield begin, end
        begin = end


def _gather(spill: _Spill, part: int, begin: int, end: int, rows: int) -> dict[str, np.ndarray]:
    """The edges of a range of a part's sources, in the order of the file."""
    found: dict[str, list[np.ndarray]] = {
        name: [np.empty(0, dtype)] for name, dtype in spill.dtypes.items()
    }
    for piece in spill.chunks(part, rows):
        mine = (piece["node"] >= begin) & (piece["node"] < end)
        for name, values in piece.items():
            found[name].append(values[mine])
    return {name: np.concatenate(pieces) for name, pieces in found.items()}
