"""An undirected graph of directed edges: no self-loops, no copies, neighbours in ascending order.

Entries are counted, placed and then sorted in place node by node, so that it needs no memory beyond
the result and two numbers per node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.ops import library
from pyg_scale.ops.csc import expand_pointers
from pyg_scale.ops.keys import GOLDEN, mix_tensor, to_signed

_CHUNK = 1 << 24  # entries between two steps of the progress bar


class AdjacencyFacts(NamedTuple):
    """Properties of an adjacency, see :func:`facts`."""

    is_sorted: bool
    """True if neighbours are ascending within each node."""
    is_undirected: bool
    """True if every edge exists in both directions, equally often."""
    is_simple: bool
    """True if there are no self-loops and no repeated edges."""


class Block(NamedTuple):
    """The edges of one type, or of some nodes of it, grouped by one of their ends.

    The nodes of all types are numbered consecutively; ``dst_offset`` and ``src_offset`` are the
    numbers of the first nodes of the two types.
    """

    indptr: Tensor
    """``int64`` ``[n + 1]``."""
    indices: Tensor
    """``int32`` or ``int64``, the neighbours, counted within their type; may be strided."""
    dst_offset: int = 0
    src_offset: int = 0
    rows: Tensor | None = None
    """The nodes ``[n]`` themselves, counted within their type; 0, 1, ... if ``None``."""


def facts(indptr: Tensor, indices: Tensor) -> AdjacencyFacts:
    """Properties of an adjacency, found in one pass over it, without memory of its own.

    To find out if every edge has its reverse, it compares the sums of 64-bit hashes of all entries
    and of all reversed entries: a directed graph passes for an undirected one with probability
    ``2**-64``.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``; may be strided.

    Raises:
        ValueError: If a neighbour is not a node, or the pointers descend.
    """
    is_sorted, is_simple, out, back = True, True, 0, 0
    for begin, end in _ranges(indptr, "Looking at edges"):
        if library.compiled():
            op = torch.ops.pyg_scale.adjacency_facts
            found = op(indptr, indices, begin, end, library.num_threads())
        else:
            found = facts_reference(indptr, indices, begin, end)
        ascending, loops, copies, of_out, of_back = found
        is_sorted &= ascending
        is_simple &= not (loops or copies)
        out, back = out + of_out, back + of_back
    return AdjacencyFacts(is_sorted, (out - back) % (1 << 64) == 0, is_simple)


def facts_reference(
    indptr: Tensor, indices: Tensor, begin: int, end: int
) -> tuple[bool, bool, bool, int, int]:
    """The plain-torch meaning of ``adjacency_facts``, for the nodes ``begin`` to ``end - 1``.

    Returns:
        True if neighbours are ascending, if there are self-loops, if there are copies; then the
        sums of the hashes of all entries, and of all reversed ones.
    """
    first, last = int(indptr[begin]), int(indptr[end])
    size = indptr.numel() - 1
    if bool((indptr[begin : end + 1].diff() < 0).any()):
        raise ValueError("the pointers descend")
    u = indices[first:last].to(torch.int64)
    v = begin + expand_pointers(indptr[begin : end + 1] - first, last - first).to(torch.int64)
    if bool(((u < 0) | (u >= size)).any()):
        raise ValueError(f"a node has a neighbour that is none of the {size} nodes")
    order = torch.argsort(u, stable=True)
    order = order[torch.argsort(v[order], stable=True)]
    row, neighbor = v[order], u[order]
    same = v[1:] == v[:-1]
    ascending = not bool((same & (u[1:] < u[:-1])).any())
    copies = bool(((row[1:] == row[:-1]) & (neighbor[1:] == neighbor[:-1])).any())
    sums = [int(_hash(a, b).sum()) for a, b in ((v, u), (u, v))]
    return ascending, bool((u == v).any()), copies, sums[0], sums[1]


def _hash(v: Tensor, u: Tensor) -> Tensor:
    golden = to_signed(GOLDEN)
    return mix_tensor(mix_tensor(v + golden) + u * golden)


def undirected(blocks: Sequence[Block], num_nodes: int) -> tuple[Tensor, Tensor]:
    """Make the undirected graph of some directed edges.

    Args:
        blocks: The edges.
        num_nodes: Number of nodes of all types.

    Returns:
        ``int64`` ``[num_nodes + 1]`` pointers, and the neighbours ``int32`` (``int64`` beyond
        ``2**31`` nodes), ascending within each node.

    Raises:
        ValueError: If an edge has a node that does not exist.
    """
    dtype = torch.int32 if num_nodes <= 2**31 else torch.int64
    if not library.compiled():
        return undirected_reference(blocks, num_nodes, dtype)
    ops, none = torch.ops.pyg_scale, torch.empty(0, dtype=torch.int64)
    cursor = torch.zeros(num_nodes + 2, dtype=torch.int64)
    for block, begin, end in _steps(blocks, "Counting neighbours"):
        rows = none if block.rows is None else block.rows
        offsets = (block.dst_offset, block.src_offset)
        ops.undirected_count(block.indptr, block.indices, rows, *offsets, begin, end, cursor)
    torch.cumsum(cursor, 0, out=cursor)
    entries = ops.huge_empty([int(cursor[-1])], dtype)
    for block, begin, end in _steps(blocks, "Placing neighbours"):
        rows = none if block.rows is None else block.rows
        offsets = (block.dst_offset, block.src_offset)
        ops.undirected_place(
            block.indptr, block.indices, rows, *offsets, begin, end, cursor, entries
        )
    return _sorted_rows(cursor[:-1], entries)


def sort_rows(indptr: Tensor, indices: Tensor) -> Tensor:
    """A copy of the neighbours, ascending within each node, ``[num_entries]``.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, without copies; may be strided.
    """
    if not library.compiled():
        order = torch.argsort(indices.to(torch.int64), stable=True)
        row = expand_pointers(indptr, indices.numel())
        return indices[order[torch.argsort(row[order], stable=True)]]
    out = torch.ops.pyg_scale.huge_empty([indices.numel()], indices.dtype)
    return _sorted_rows(indptr, out.copy_(indices))[1]


def undirected_reference(
    blocks: Sequence[Block], num_nodes: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The plain-torch meaning of :func:`undirected`."""
    keys = []
    for block in blocks:
        row = expand_pointers(block.indptr, block.indices.numel()).to(torch.int64)
        v = (row if block.rows is None else block.rows[row]) + block.dst_offset
        u = block.indices.to(torch.int64) + block.src_offset
        if bool(((v < 0) | (v >= num_nodes) | (u < 0) | (u >= num_nodes)).any()):
            raise ValueError(f"an edge has a node that is none of the {num_nodes}")
        keep = v != u
        keys += [(v * num_nodes + u)[keep], (u * num_nodes + v)[keep]]
    key = torch.cat([torch.empty(0, dtype=torch.int64), *keys]).unique()
    count = torch.bincount(key // max(1, num_nodes), minlength=num_nodes)
    indptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
    return indptr, (key % max(1, num_nodes)).to(dtype)


def _sorted_rows(indptr: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the entries of each node in place, and drop copies."""
    ops = torch.ops.pyg_scale
    degree = torch.empty(indptr.numel() - 1, dtype=torch.int64)
    for begin, end in _ranges(indptr, "Sorting neighbours"):
        ops.undirected_sort(indptr, entries, begin, end, degree, library.num_threads())
    kept = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    ops.undirected_compact(indptr, kept, entries)
    return kept, entries[: int(kept[-1])]


def _ranges(indptr: Tensor, what: str) -> Iterator[tuple[int, int]]:
    for _, begin, end in _steps([Block(indptr, indptr)], what):
        yield begin, end


def _steps(blocks: Sequence[Block], what: str) -> Iterator[tuple[Block, int, int]]:
    """Ranges of the nodes of every block with about ``_CHUNK`` entries each."""
    total = sum(int(block.indptr[-1]) for block in blocks)
    with tqdm(total=total, desc=what, unit=" edges", unit_scale=True, disable=None, delay=1) as bar:
        for block in blocks:
            begin, size = 0, block.indptr.numel() - 1
            while begin < size:
                until = int(block.indptr[begin]) + _CHUNK
                end = int(torch.searchsorted(block.indptr, until, right=True)) - 1
                end = min(size, max(end, begin + 1))
                yield block, begin, end
                bar.update(int(block.indptr[end]) - int(block.indptr[begin]))
                begin = end
