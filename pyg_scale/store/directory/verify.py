"""Reads a whole graph directory, and refuses altered or inconsistent files."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.graph.topology import CSC, EdgeType, NodeType
from pyg_scale.store.directory.checksums import find_altered
from pyg_scale.store.directory.layout import expected_files
from pyg_scale.store.directory.paths import edge_dir, node_dir, set_file
from pyg_scale.store.directory.reader import GraphDirectory

_CHUNK = 1 << 23
_WINDOW = 1 << 28  # edge ids that are checked for repetition at a time


def verify(directory: GraphDirectory) -> None:
    """Check the local parts.

    It checks checksums of all files, of appended rows up to the newest snapshot; pointers that rise
    from 0 to the number of edges; nodes, edge ids, parts and local ids that exist; every edge id
    once, if all parts are local; edges of a node in their order; halo nodes and original ids that
    rise. It needs at most 256 MB in addition to the book (and memory for in-edges that were
    appended to), and time: everything is read twice, and edge ids once per 268 million.

    Raises:
        GraphDirectoryError: If a file is wrong; names the first and its fault.
    """
    meta = directory.meta
    try:
        altered = find_altered(directory.file, directory.files_here())
        altered = altered or _altered_rows(directory)
    except OSError as error:
        raise GraphDirectoryError(f"{directory.path} cannot be read: {error}") from None
    if altered is not None:
        raise GraphDirectoryError(
            f"{directory.path / altered} does not have its checksum: it was altered"
        )
    delta = directory.delta
    for file in expected_files(directory.base_meta, directory.parts):
        if delta is not None and file.name in delta.columns:
            delta.array(file.name)
        else:
            directory.array(file.name, file.dtype, file.shape)
    for node_type in meta.nodes:
        for name in meta.index_sets.get(node_type or "", {}):
            ids = directory.index_set(name, node_type)
            _in_range(directory, set_file(node_type, name), ids, meta.nodes[node_type].num_nodes)
    for node_type in meta.nodes:
        _check_nodes(directory, node_type)
    for edge_type in meta.edges:
        _check_edge_type(directory, edge_type)


def check_ends(directory: GraphDirectory, edge_type: EdgeType, number: int, csc: CSC) -> None:
    """Check that the edges of a part, in a CSC, lead from and to nodes that exist.

    Raises:
        GraphDirectoryError: If pointers do not rise from 0 to the number of edges, or a neighbour
            does not exist; names the file.
    """
    folder, pointers = edge_dir(edge_type, number), csc.indptr
    if int(pointers[0]) != 0 or int(pointers[-1]) != csc.num_edges:
        raise _wrong(directory, f"{folder}/indptr.npy", "does not go from 0 to its edges")
    for chunk in _overlapping(pointers):
        if bool((chunk[1:] < chunk[:-1]).any()):  # differences could overflow
            raise _wrong(directory, f"{folder}/indptr.npy", "goes down")
    neighbor = None if edge_type is None else edge_type[2 if _by_src(directory) else 0]
    size = directory.meta.nodes[neighbor].num_nodes
    _in_range(directory, f"{folder}/indices.npy", csc.indices, size)


def _altered_rows(directory: GraphDirectory) -> str | None:
    """The first file of appended rows that differs from its checksum; ``None`` if there is none."""
    for name, file in directory.head.files.items():
        with directory.file(name) as rows:
            crc, left = 0, file.bytes
            while left and (piece := rows.read(min(left, _CHUNK))):
                crc, left = zlib.crc32(piece, crc), left - len(piece)
        if left or crc != file.crc32:
            return name
    return None


def _check_nodes(directory: GraphDirectory, node_type: NodeType) -> None:
    node = directory.meta.nodes[node_type]
    book = directory.books[node_type]
    if node.book:
        assert book.part is not None and book.local is not None
        name = f"{node_dir(node_type)}/part.npy"
        _in_range(directory, name, book.part, directory.meta.num_parts)
        counts = torch.zeros(directory.meta.num_parts, dtype=torch.int64)
        for chunk in book.part.split(_CHUNK):
            counts += torch.bincount(chunk, minlength=directory.meta.num_parts)
        if counts.tolist() != node.part_nodes:
            raise _wrong(directory, name, f"has {counts.tolist()} nodes in the parts")
    for number in directory.parts:
        part, folder = directory.part(number), node_dir(node_type, number)
        own = part.orig_id(node_type)
        _in_range(directory, f"{folder}/orig_id.npy", own, node.num_nodes)
        _rises(directory, f"{folder}/orig_id.npy", own)
        for begin in range(0, own.numel(), _CHUNK):
            ids = own[begin : begin + _CHUNK]
            local = torch.arange(begin, begin + ids.numel())
            if not torch.equal(book.local_of(ids), local) or bool(
                (book.part_of(ids) != number).any()
            ):
                raise _wrong(directory, f"{folder}/orig_id.npy", "does not fit the partition book")
        halo = part.halo(node_type)
        _in_range(directory, f"{folder}/halo.npy", halo, node.num_nodes)
        _rises(directory, f"{folder}/halo.npy", halo)
        if any(bool((book.part_of(ids) == number).any()) for ids in halo.split(_CHUNK)):
            raise _wrong(directory, f"{folder}/halo.npy", "has a node of the part itself")


def _check_edge_type(directory: GraphDirectory, edge_type: EdgeType) -> None:
    meta = directory.meta
    edge = meta.edges[edge_type]
    files: list[tuple[str, Tensor]] = []
    book = directory.edge_book(edge_type)
    if book is not None:
        _check_edge_book(directory, edge_type, book)
    for number in directory.parts:
        part, folder = directory.part(number), edge_dir(edge_type, number)
        csc = part.csc(edge_type)
        check_ends(directory, edge_type, number, csc)
        if csc.edge_id is not None:
            name = f"{folder}/edge_id.npy"
            _in_range(directory, name, csc.edge_id, edge.num_edges)
            files.append((name, csc.edge_id))
        by_node_time = csc.time is None and meta.times_neighbors(edge_type)
        _check_order(directory, folder, csc, by_node_time=by_node_time)
        ids = part.edge_ids(edge_type)
        if ids is not None:
            _in_range(directory, f"{folder}/ids.npy", ids, edge.num_edges)
            _rises(directory, f"{folder}/ids.npy", ids)
            if book is not None and any(
                bool((book[each.to(torch.int64)] != number).any()) for each in ids.split(_CHUNK)
            ):
                raise _wrong(directory, f"{folder}/ids.npy", "does not fit the book of edges")
    if len(directory.parts) == meta.num_parts and files:
        _all_different(directory, files, edge.num_edges)


def _check_edge_book(directory: GraphDirectory, edge_type: EdgeType, book: Tensor) -> None:
    name = f"{edge_dir(edge_type)}/part.npy"
    _in_range(directory, name, book, directory.meta.num_parts)
    counts = torch.zeros(directory.meta.num_parts, dtype=torch.int64)
    for chunk in book.split(_CHUNK):
        counts += torch.bincount(chunk, minlength=directory.meta.num_parts)
    if counts.tolist() != directory.meta.edges[edge_type].part_edges:
        raise _wrong(directory, name, f"has {counts.tolist()} edges in the parts")


def _by_src(directory: GraphDirectory) -> bool:
    partition = directory.meta.partition
    return partition is not None and partition.edge_assign_strategy == "by_src"


def _check_order(directory: GraphDirectory, folder: str, csc: CSC, *, by_node_time: bool) -> None:
    """Check that edges of a node are in order of id, or time and id, and prefix sums do not fall.

    If times are those of neighbours and not stored with the edges, as in a graph of one part, the
    order is not checked.
    """
    starts = csc.indptr[:-1]
    for begin in range(0, max(0, csc.num_edges - 1), _CHUNK):
        end = min(csc.num_edges - 1, begin + _CHUNK)
        # position p + 1 has the same node as p unless a node begins at it
        inside = torch.ones(end - begin, dtype=torch.bool)
        first = int(torch.searchsorted(starts, begin + 1))
        last = int(torch.searchsorted(starts, end + 1))
        inside[starts[first:last] - begin - 1] = False
        here, following = slice(begin, end), slice(begin + 1, end + 1)
        equal = torch.ones_like(inside)
        if csc.time is not None:
            if bool((inside & (csc.time[following] < csc.time[here])).any()):
                raise _wrong(directory, f"{folder}/time.npy", "goes down within a node")
            equal = csc.time[following] == csc.time[here]
        if csc.edge_id is not None and not by_node_time:
            down = csc.edge_id[following] <= csc.edge_id[here]
            if bool((inside & equal & down).any()):
                raise _wrong(directory, f"{folder}/edge_id.npy", "is out of order within a node")
        if csc.weight_prefix is not None:
            down = csc.weight_prefix[following] < csc.weight_prefix[here]
            if bool((inside & down).any()):
                raise _wrong(directory, f"{folder}/weight_prefix.npy", "goes down within a node")


def _all_different(
    directory: GraphDirectory, files: list[tuple[str, Tensor]], num_edges: int
) -> None:
    """Refuse a repeated edge id; the ids are known to be in range, and as many as the edges."""
    what = f"Edge ids of {directory.path.name}"
    total = num_edges * -(-num_edges // _WINDOW)
    with tqdm(total=total, desc=what, unit_scale=True, disable=None, delay=2) as bar:
        for low in range(0, num_edges, _WINDOW):
            seen = torch.zeros(min(_WINDOW, num_edges - low), dtype=torch.bool)
            count = 0
            for name, ids in files:
                for chunk in ids.split(_CHUNK):
                    mine = chunk[(chunk >= low) & (chunk < low + _WINDOW)].to(torch.int64) - low
                    seen[mine] = True
                    count += mine.numel()
                    bar.update(chunk.numel())
                if int(seen.sum()) != count:
                    raise _wrong(directory, name, "has a repeated edge id")


def _in_range(directory: GraphDirectory, name: str, values: Tensor, size: int) -> None:
    for chunk in values.split(_CHUNK):
        if chunk.numel():
            low, high = (int(v) for v in torch.aminmax(chunk))
            if low < 0 or high >= size:
                wrong = low if low < 0 else high
                raise _wrong(directory, name, f"has {wrong}, expected 0 to {size - 1}")


def _rises(directory: GraphDirectory, name: str, values: Tensor) -> None:
    for chunk in _overlapping(values):
        if bool((chunk.diff() <= 0).any()):
            raise _wrong(directory, name, "does not rise")


def _overlapping(values: Tensor) -> Iterator[Tensor]:
    for begin in range(0, values.numel(), _CHUNK):
        yield values[begin : begin + _CHUNK + 1]


def _wrong(directory: GraphDirectory, name: str, what: str) -> GraphDirectoryError:
    return GraphDirectoryError(f"{directory.path / name} {what}: write the directory again")
