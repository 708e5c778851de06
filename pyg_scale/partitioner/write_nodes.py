"""Writing of the nodes of a partitioned directory: partition book, original ids, attributes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType
from pyg_scale.partitioner.assigned import Assigned
from pyg_scale.partitioner.rows import FileRows, RowsByPart, RowWriter, ranks
from pyg_scale.store.directory import DirectoryWriter, GraphDirectory
from pyg_scale.store.directory.meta import attribute_file, node_dir

Progress = Callable[[int], object]


def write_book(writer: DirectoryWriter, assigned: Assigned, node_type: NodeType, rows: int) -> None:
    """Write the partition book of a node type and the original ids of each part's nodes.

    Parts that are ranges of ids need neither: they follow from the sizes in ``META.json``.

    Args:
        writer: The directory that is written.
        assigned: The part of every node.
        node_type: The node type.
        rows: Number of nodes at a time.
    """
    if assigned.is_range[node_type]:
        return
    part, sizes = assigned.part[node_type], assigned.sizes[node_type]
    folder, shape = node_dir(node_type), (part.numel(),)
    book = RowWriter(writer, f"{folder}/part.npy", part.dtype, shape)
    wide = torch.int32 if part.numel() < 2**31 else torch.int64
    local = RowWriter(writer, f"{folder}/local.npy", wide, shape)
    orig_id = [
        RowWriter(writer, f"{node_dir(node_type, p)}/orig_id.npy", torch.int64, (size,))
        for p, size in enumerate(sizes)
    ]
    for begin, split, rank in ranks(part, assigned.num_parts, rows):
        book.append(part[begin : begin + rows])
        local.append(rank)
        split.append(torch.arange(begin, begin + rank.numel()), orig_id)
    for each in (book, local, *orig_id):
        each.finish()


def write_attributes(
    source: GraphDirectory,
    writer: DirectoryWriter,
    assigned: Assigned,
    node_type: NodeType,
    chunk_bytes: int,
    progress: Progress,
) -> None:
    """Write the attributes of a node type, each row to the part of its node.

    Args:
        source: A directory of one part.
        writer: The directory that is written.
        assigned: The part of every node.
        node_type: The node type.
        chunk_bytes: Bytes to read at a time, at least one row.
        progress: Called with the number of bytes read.
    """
    node = source.meta.nodes[node_type]
    for name, spec in node.attributes.items():
        shape = (node.num_nodes, *spec.row)
        reader = FileRows(source, attribute_file(node_dir(node_type, 0), name), spec.dtype, shape)
        out = writers(
            writer,
            [attribute_file(node_dir(node_type, p), name) for p in range(assigned.num_parts)],
            reader,
            assigned.sizes[node_type],
        )
        split_rows(reader, assigned.part[node_type], assigned.num_parts, out, chunk_bytes, progress)


def writers(
    writer: DirectoryWriter, names: list[str], like: FileRows, sizes: list[int]
) -> list[RowWriter]:
    """Files for the rows of each part, with the dtype and the row shape of ``like``."""
    dtype = getattr(torch, like.dtype)
    row = like.shape[1:]
    return [RowWriter(writer, n, dtype, (size, *row)) for n, size in zip(names, sizes, strict=True)]


def split_rows(
    reader: FileRows,
    part: Tensor,
    num_parts: int,
    out: list[RowWriter],
    chunk_bytes: int,
    progress: Progress,
    begin: int = 0,
) -> None:
    """Read rows from ``begin`` on and write each to the file of its part.

    Args:
        reader: The reader of the rows.
        part: The part of each row ``[n]``, from row ``begin`` on.
        num_parts: Number of parts.
        out: The files, which are finished after the last row of ``reader``.
        chunk_bytes: Bytes to read at a time.
        progress: Called with the number of bytes read.
        begin: The first row.
    """
    rows = max(1, chunk_bytes // max(1, reader.row_bytes + 16))
    end = begin + part.numel()
    for start, values in reader.chunks(rows, begin, end):
        mine = part[start - begin : start - begin + values.size(0)]
        RowsByPart(mine, num_parts).append(values, out)
        progress(values.numel() * values.element_size())
    if end == len(reader):
        for each in out:
            each.finish()
