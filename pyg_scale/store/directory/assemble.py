"""A graph in the user's order, from the parts of a directory: attributes, edge list, in-edges.

A single part is mapped. Several parts are joined in memory, which needs the size of the result, and
temporarily a byte for each row or edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import torch_dtype
from pyg_scale.graph.source import of
from pyg_scale.graph.topology import CSC, EdgeType, NodeType
from pyg_scale.ops.csc import expand_pointers
from pyg_scale.store.directory.reader import GraphDirectory, Part
from pyg_scale.store.directory.verify import check_ends

_CHUNK = 1 << 23  # edges that are processed at a time


class FilledPlaces:
    """The places of a result that is joined by ids: each must be filled exactly once.

    Otherwise the result would contain uninitialised memory.

    Args:
        size: Number of places.
        what: The name of the result in errors.
    """

    def __init__(self, size: int, what: str) -> None:
        self._seen, self._what = torch.zeros(size, dtype=torch.bool), what
        self._left = size

    def fill(self, where: Tensor | slice) -> None:
        """Mark places as filled.

        Raises:
            GraphDirectoryError: If a place does not exist.
        """
        size = self._seen.numel()
        if isinstance(where, slice):
            self._left -= len(range(*where.indices(size)))
        elif where.numel():
            low, high = (int(each) for each in torch.aminmax(where))
            if low < 0 or high >= size:
                wrong = low if low < 0 else high
                raise self._error(f"the id {wrong}, expected 0 to {size - 1}")
            self._left -= where.numel()
        self._seen[where] = True

    def check(self) -> None:
        """Check that every place was filled once.

        Raises:
            GraphDirectoryError: If a place was filled twice, or not at all; names it.
        """
        if not bool(self._seen.all()):
            missing = int(self._seen.logical_not_().nonzero()[0])
            raise self._error(f"no value for the id {missing}, and repeated or too few ids")
        if self._left:
            raise self._error("a repeated id")

    def _error(self, what: str) -> GraphDirectoryError:
        return GraphDirectoryError(
            f"{self._what} has {what}: its files are damaged or of two graphs; "
            "`pyg-scale info DIR --verify` says which, write the directory again"
        )


def node_attribute(directory: GraphDirectory, node_type: NodeType, name: str) -> Tensor:
    """``[num_nodes, ...]`` by original id: mapped if there is one part."""
    meta = directory.meta
    parts = [directory.part(number) for number in range(meta.num_parts)]
    if len(parts) == 1:
        return parts[0].node_attribute(node_type, name)
    node = meta.nodes[node_type]
    spec = node.attributes[name]
    out = torch.empty((node.num_nodes, *spec.row), dtype=torch_dtype(spec.dtype))
    places = FilledPlaces(node.num_nodes, f"{name!r}{of(node_type)} of {directory.path}")
    for part in parts:
        values = part.node_attribute(node_type, name)
        _put_rows(out, part.orig_id(node_type), values, places)
    places.check()
    return out


def edge_attribute(directory: GraphDirectory, edge_type: EdgeType, name: str) -> Tensor:
    """``[num_edges, ...]`` by original edge id: mapped if there is one part."""
    meta = directory.meta
    parts = [directory.part(number) for number in range(meta.num_parts)]
    if len(parts) == 1 and parts[0].edge_ids(edge_type) is None:
        return parts[0].edge_attribute(edge_type, name)
    edge = meta.edges[edge_type]
    spec = edge.attributes[name]
    out = torch.empty((edge.num_edges, *spec.row), dtype=torch_dtype(spec.dtype))
    places = FilledPlaces(edge.num_edges, f"{name!r}{of(edge_type)} of {directory.path}")
    for part in parts:
        ids = part.edge_ids(edge_type)
        values = part.edge_attribute(edge_type, name)
        _put_rows(out, torch.arange(len(values)) if ids is None else ids, values, places)
    places.check()
    return out


def _put_rows(out: Tensor, index: Tensor, values: Tensor, places: FilledPlaces) -> None:
    """Do ``out[index] = values``, some rows at a time and for every dtype."""
    row = values[:1].numel() * values.element_size()
    step = max(1, (1 << 26) // max(1, row))
    out, values = _bytes(out), _bytes(values)
    for begin in range(0, index.numel(), step):
        rows = index[begin : begin + step].to(torch.int64)
        places.fill(rows)
        out.index_copy_(0, rows, values[begin : begin + step])


def _bytes(value: Tensor) -> Tensor:
    """Small floating point numbers as their bits, which every op supports."""
    if value.element_size() > 2 or value.dtype == torch.bool:
        return value
    return value.view(torch.int16 if value.element_size() == 2 else torch.uint8)


# Edges ####################################################################################


def edge_list(directory: GraphDirectory, edge_type: EdgeType) -> Tensor:
    """The edge list ``[2, num_edges]`` in the order of the edge ids, in the user's dtype.

    Raises:
        GraphDirectoryError: If the files of the edges are damaged.
    """
    edge = directory.meta.edges[edge_type]
    out = torch.empty(2, edge.num_edges, dtype=torch_dtype(edge.index_dtype))
    end = directory.meta.grouped_by(edge_type)
    by_src = (edge_type is not None and end != edge_type[2]) or _is_by_src(directory)
    grouped, other = (out[0], out[1]) if by_src else (out[1], out[0])
    places = FilledPlaces(edge.num_edges, f"the edge list{of(edge_type)} of {directory.path}")
    what = "Making the edge list"
    with tqdm(total=edge.num_edges, desc=what, unit_scale=True, disable=None, delay=2) as bar:
        for number in range(directory.meta.num_parts):
            part = directory.part(number)
            csc = part.csc(edge_type)
            check_ends(directory, edge_type, number, csc)
            names = part.orig_id(end) if directory.meta.num_parts > 1 else None
            fill_edge_list(csc, grouped, other, places, names, bar.update)
    places.check()
    return out


def fill_edge_list(
    csc: CSC,
    grouped: Tensor,
    other: Tensor,
    places: FilledPlaces,
    names: Tensor | None = None,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write the ends of edges to the positions given by their ids.

    Args:
        csc: The edges.
        grouped: Receives the nodes by which they are grouped, ``[num_edges]``.
        other: Receives their other ends, ``[num_edges]``.
        places: The places of all edges.
        names: The ids of the nodes by which they are grouped, if not 0, 1, ...
        progress: Called with the number of edges that were written.

    Raises:
        GraphDirectoryError: If a place does not exist.
    """
    for piece in _pieces(csc):
        group = piece.group if names is None else names[piece.group]
        where: Any = piece.where
        if csc.edge_id is not None:
            where = csc.edge_id[piece.where].to(torch.int64)
        places.fill(where)
        grouped[where] = group.to(grouped.dtype)
        other[where] = csc.indices[piece.where].to(other.dtype)
        if progress is not None:
            progress(piece.where.stop - piece.where.start)


def _is_by_src(directory: GraphDirectory) -> bool:
    partition = directory.meta.partition
    return partition is not None and partition.edge_assign_strategy == "by_src"


class _Piece:
    """Some positions of a CSC, and the group ``int64`` of each."""

    def __init__(self, csc: CSC, first: int, last: int) -> None:
        begin, end = int(csc.indptr[first]), int(csc.indptr[last])
        self.where = slice(begin, end)
        pointers = csc.indptr[first : last + 1] - begin
        self.group = expand_pointers(pointers, end - begin).to(torch.int64) + first


def _pieces(csc: CSC) -> Iterator[_Piece]:
    """A CSC in ranges of groups with about ``_CHUNK`` edges each."""
    size = csc.indptr.numel() - 1
    marks = torch.arange(0, csc.num_edges, _CHUNK)
    first = 0
    bounds = torch.searchsorted(csc.indptr, marks[1:], right=False).tolist()
    for last in [*bounds, size]:
        last = min(max(last, first), size)
        if last > first:
            yield _Piece(csc, first, last)
            first = last


def in_edges(directory: GraphDirectory, edge_type: EdgeType) -> CSC | None:
    """The in-edges of all nodes by original id: mapped if there is one part.

    ``None`` if the parts hold out-edges.

    Raises:
        GraphDirectoryError: If files of several parts are damaged. Those of one part are not read.
    """
    if _is_by_src(directory):
        return None
    parts = [directory.part(number) for number in range(directory.meta.num_parts)]
    if len(parts) == 1:
        return parts[0].csc(edge_type)
    return _joined(directory, parts, edge_type)


def _joined(directory: GraphDirectory, parts: list[Part], edge_type: EdgeType) -> CSC:
    edge = directory.meta.edges[edge_type]
    end = directory.meta.grouped_by(edge_type)
    indptr = torch.zeros(directory.meta.nodes[end].num_nodes + 1, dtype=torch.int64)
    held = [(part.orig_id(end), part.csc(edge_type)) for part in parts]
    for part, (_, csc) in zip(parts, held):
        check_ends(directory, edge_type, part.number, csc)
    nodes = FilledPlaces(indptr.numel() - 1, f"the nodes{of(end)} of {directory.path}")
    for names, csc in held:
        nodes.fill(names)
        indptr[names + 1] = csc.indptr.diff()
    nodes.check()
    torch.cumsum(indptr, 0, out=indptr)
    columns: dict[str, Any] = {}
    for name, dtype in (
        ("indices", torch_dtype(edge.indices_dtype)),
        ("edge_id", torch_dtype(edge.edge_id_dtype or "int64")),
        ("time", torch.int64 if edge.has_time and directory.meta.time_of_edges else None),
        ("weight_prefix", torch.int64 if edge.has_weight else None),
    ):
        columns[name] = None if dtype is None else torch.empty(edge.num_edges, dtype=dtype)
    places = FilledPlaces(edge.num_edges, f"the in-edges{of(edge_type)} of {directory.path}")
    what = "Joining the parts"
    with tqdm(total=edge.num_edges, desc=what, unit_scale=True, disable=None, delay=2) as bar:
        for names, csc in held:
            shift = indptr[names] - csc.indptr[:-1]
            for piece in _pieces(csc):
                begin, stop = piece.where.start, piece.where.stop
                where = torch.arange(begin, stop) + shift[piece.group]
                places.fill(where)
                for name, out in columns.items():
                    if out is not None:
                        out[where] = getattr(csc, name)[piece.where]
                bar.update(stop - begin)
    places.check()
    return CSC(indptr, **columns)
