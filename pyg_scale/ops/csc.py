"""In-edges grouped by destination (CSC), built from an edge list without sorting it.

A counting sort places every edge after the earlier ones of its destination. The neighbour and the
id of an edge are side by side in memory, so one access reads both. In the compiled op, each thread
places the edges of its own range of destinations: the order needs no atomics, and no memory grows
with the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.ops import library, memory

_INT32_MAX = 2**31 - 1
_CHUNK = 1 << 22  # edges between two steps of the progress bar


class Compressed(NamedTuple):
    """Edges grouped by destination, see :class:`pyg_scale.graph.topology.CSC`."""

    indptr: Tensor
    """``int64`` ``[num_dst + 1]``."""
    indices: Tensor
    """The source of each position, ``int32`` if that holds all of them; may be strided."""
    edge_id: Tensor | None
    """The edge id of each position; ``None`` if ids are positions."""


def build_csc(
    dst: Tensor,
    src: Tensor,
    num_dst: int,
    num_src: int,
    *,
    is_sorted: bool = False,
    what: str = "edge {}",
    names: tuple[str, str] = ("destination", "source"),
) -> Compressed:
    """Group edges by destination; those of a destination stay in the given order.

    Args:
        dst: ``int64`` or ``int32`` ``[num_edges]``.
        src: ``int64`` or ``int32`` ``[num_edges]``.
        num_dst: Number of destination nodes.
        num_src: Number of source nodes.
        is_sorted: True declares ``dst`` to be sorted. Then ``src`` itself is kept if it is
            ``int32`` (or must be ``int64``), so do not change it afterwards.
        what: Name of an edge in errors, with ``{}`` for its number.
        names: Names of ``dst`` and ``src`` in errors.

    Raises:
        IndexError: If a node is negative or too large; names the first such edge.
        ValueError: If ``dst`` is declared sorted and is not; names the first such edge.
    """
    ascends = check_edges(dst, src, num_dst, num_src, is_sorted=is_sorted, what=what, names=names)
    if ascends:
        return Compressed(_pointers(dst, num_dst), _narrow(src, num_src, share=is_sorted), None)
    if library.compiled():
        return _scatter(dst, src, num_dst, num_src)
    order = torch.argsort(dst, stable=True)
    pair = torch.stack([src[order].to(torch.int64), order], dim=1)
    pair = pair.to(_pair_dtype(dst.numel(), num_src))
    return Compressed(_pointers(dst[order], num_dst), pair[:, 0], pair[:, 1])


def check_edges(
    dst: Tensor,
    src: Tensor,
    num_dst: int,
    num_src: int,
    *,
    is_sorted: bool = False,
    what: str = "edge {}",
    names: tuple[str, str] = ("destination", "source"),
) -> bool:
    """Check an edge list in one pass, and return True if it is sorted by destination.

    Takes the arguments of :func:`build_csc`.

    Raises:
        IndexError: If a node is negative or too large; names the first such edge.
        ValueError: If ``dst`` is declared sorted and is not; names the first such edge.
    """
    wrong, descent = _scan(dst, src, num_dst, num_src)
    if wrong >= 0:
        parts = zip(names, (dst, src), (num_dst, num_src))
        for name, node, size in parts:
            if not 0 <= int(node[wrong]) < size:
                raise IndexError(
                    f"{what.format(wrong)} has {name} {int(node[wrong])}, but there are "
                    f"{size} {name} nodes: set num_nodes, or correct the edge"
                )
    if descent >= 0 and is_sorted:
        raise ValueError(
            f"is_sorted=True, but the edges are not sorted by {names[0]}: {what.format(descent)} "
            f"has {int(dst[descent])}, the one before it {int(dst[descent - 1])}; sort them, or "
            "leave is_sorted out"
        )
    return descent < 0


def merge_csc(first: Compressed, second: Compressed) -> Compressed:
    """Edges of the same destinations, from two lists of edges of which one follows the other.

    Args:
        first: Edges, in any order within a destination.
        second: Later ones, with ids of their own: theirs continue those of ``first``.

    Returns:
        Within each destination, the edges of ``first`` in their order, then those of ``second``.
    """
    count = first.indices.numel()
    size = count + second.indices.numel()
    narrow = first.indices.dtype == second.indices.dtype == torch.int32 and size <= _INT32_MAX
    dtype = torch.int32 if narrow else torch.int64
    if library.compiled():
        pair = torch.ops.pyg_scale.huge_empty([size, 2], dtype)
        none = first.indptr.new_empty(0, dtype=torch.int32)
        lists = [
            tensor
            for csc in (first, second)
            for tensor in (csc.indptr, csc.indices, none if csc.edge_id is None else csc.edge_id)
        ]
        torch.ops.pyg_scale.csc_merge(*lists, pair, library.num_threads())
    else:
        pair = torch.empty(size, 2, dtype=dtype)
        shifts = second.indptr[:-1], first.indptr[1:]
        for csc, shift, first_id in zip((first, second), shifts, (0, count), strict=True):
            group = expand_pointers(csc.indptr, csc.indices.numel()).to(torch.int64)
            where = torch.arange(group.numel()) + shift[group]
            pair[where, 0] = csc.indices.to(dtype)
            pair[where, 1] = (_edge_id(csc) + first_id).to(dtype)
    indptr, indices, edge_id = first.indptr + second.indptr, pair[:, 0], pair[:, 1]
    if first.edge_id is None and bool((edge_id == torch.arange(size, dtype=dtype)).all()):
        return Compressed(indptr, indices.contiguous(), None)
    return Compressed(indptr, indices, edge_id)


def from_pointers(
    indptr: Tensor, indices: Tensor, num_dst: int, num_src: int, *, what: str = "edge {}"
) -> Compressed:
    """Use edges that are already grouped; an edge's id is its position.

    Raises:
        IndexError: If an entry of ``indices`` is not a source node.
        ValueError: If ``indptr`` does not rise from 0 to the number of edges, or does not have
            ``num_dst + 1`` entries.
    """
    if indptr.numel() != num_dst + 1:
        raise ValueError(
            f"the pointers have {indptr.numel()} entries, expected one more than the "
            f"{num_dst} nodes: correct num_nodes, or the pointers"
        )
    end = indices.numel()
    check_rising(indptr, end)
    if end:
        low, high = (int(v) for v in torch.aminmax(indices))
        if low < 0 or high >= num_src:
            wrong = int(((indices < 0) | (indices >= num_src)).nonzero()[0])
            raise IndexError(
                f"{what.format(wrong)} has neighbour {int(indices[wrong])}, but there are "
                f"{num_src} such nodes: set num_nodes, or correct the edge"
            )
    pointers = indptr.to(torch.int64).contiguous()
    return Compressed(pointers, _narrow(indices, num_src, share=False), None)


def check_rising(indptr: Tensor, end: int) -> None:
    """Check pointers.

    Raises:
        ValueError: If they do not rise from 0 to ``end``.
    """
    # differences could overflow
    if int(indptr[0]) != 0 or int(indptr[-1]) != end or bool((indptr[1:] < indptr[:-1]).any()):
        raise ValueError(f"the pointers must rise from 0 to the number of edges, {end}")


def expand_pointers(indptr: Tensor, num_edges: int) -> Tensor:
    """The group of each position ``[num_edges]``, ``int32`` if that holds it, else ``int64``.

    Raises:
        ValueError: If the pointers do not rise from 0 to ``num_edges``: torch would write as many
            entries as they say, beyond the end of the result.
    """
    size = indptr.numel() - 1
    check_rising(indptr, num_edges)
    dtype = torch.int32 if size <= _INT32_MAX else torch.int64
    groups = torch.arange(size, dtype=dtype)
    return groups.repeat_interleave(indptr.diff(), output_size=num_edges)


def order_by_time(csc: Compressed, time: Tensor, *, of_edges: bool) -> Compressed:
    """Order the edges of each destination by time, then by edge id.

    Args:
        csc: Edges in the order of their ids; may be changed in place.
        time: ``int64``, the time of every edge by its id, or of every source node.
        of_edges: True if ``time`` is by edge, False if by source node.
    """
    if library.compiled():
        op, threads = torch.ops.pyg_scale.csc_by_time, library.num_threads()
        none = csc.indptr.new_empty(0, dtype=torch.int32)
        edge_id = none if csc.edge_id is None else csc.edge_id
        if op(csc.indptr, csc.indices, edge_id, time, of_edges, False, threads):
            return csc
        if csc.edge_id is None:
            csc = _with_ids(csc)
        op(csc.indptr, csc.indices, csc.edge_id, time, of_edges, True, threads)
        return csc
    edge_id = _edge_id(csc)
    when = time[edge_id if of_edges else csc.indices.to(torch.int64)]
    order = torch.argsort(when, stable=True)
    group = expand_pointers(csc.indptr, csc.indices.numel())
    order = order[torch.argsort(group[order], stable=True)]
    if csc.edge_id is None and bool((order[1:] > order[:-1]).all()):
        return csc
    csc = _with_ids(csc)
    assert csc.edge_id is not None
    pair = torch.stack([csc.indices[order], csc.edge_id[order]], dim=1)
    return Compressed(csc.indptr, pair[:, 0], pair[:, 1])


def ids_ascend(csc: Compressed) -> bool:
    """True if the edges of each destination are in the order of their ids.

    Reads them in pieces, up to the first one that is not.
    """
    if csc.edge_id is None:
        return True
    for begin in range(0, csc.edge_id.numel() - 1, _CHUNK):
        piece = csc.edge_id[begin : begin + _CHUNK + 1]
        lower = (piece[1:] < piece[:-1]).nonzero().view(-1) + (begin + 1)
        # Ids may begin anew where the edges of a destination do.
        if bool((csc.indptr[torch.searchsorted(csc.indptr, lower)] != lower).any()):
            return False
    return True


def weight_prefix(csc: Compressed, weight: Tensor) -> Tensor:
    """The running sum of fixed-point weights within each destination.

    A weight ``w`` becomes 0 if it is 0, else ``max(1, floor(w / m * 2**32))`` in 64-bit floating
    point, where ``m`` is the largest weight of the same destination. All later arithmetic is exact.

    Args:
        csc: The edges.
        weight: ``[num_edges]``, floating point or integer, by edge id.

    Returns:
        ``int64`` ``[num_edges]`` by position; each sum includes its own entry.

    Raises:
        ValueError: If a weight is negative, NaN or infinite; names the first such edge.
    """
    weight = checked_weights(weight)
    if library.compiled():
        none = csc.indptr.new_empty(0, dtype=torch.int32)
        edge_id = none if csc.edge_id is None else csc.edge_id
        return torch.ops.pyg_scale.csc_weight_prefix(
            csc.indptr, edge_id, weight.contiguous(), library.num_threads()
        )
    value = weight.to(torch.float64)
    if csc.edge_id is not None:
        value = value[csc.edge_id.to(torch.int64)]
    group = expand_pointers(csc.indptr, value.numel()).to(torch.int64)
    largest = value.new_zeros(csc.indptr.numel() - 1).scatter_reduce(0, group, value, "amax")
    fixed = (value / largest[group] * 2.0**32).floor().clamp(min=1)
    fixed = torch.where(value == 0, 0.0, fixed).to(torch.int64)
    total = torch.cat([fixed.new_zeros(1), fixed.cumsum(0)])
    return total[1:] - total[csc.indptr[:-1]][group]


def checked_weights(weight: Tensor) -> Tensor:
    """The weights of edges ``[num_edges]``, in ``float32`` or ``float64``.

    Args:
        weight: ``[num_edges]``, floating point or integer, by edge id.

    Raises:
        ValueError: If a weight is negative, NaN or infinite; names the first such edge.
    """
    if weight.dtype in (torch.float16, torch.bfloat16):
        weight = weight.to(torch.float32)
    elif weight.dtype not in (torch.float32, torch.float64):
        weight = weight.to(torch.float64)
    good = torch.isfinite(weight) & (weight >= 0)
    if not bool(good.all()):
        first = int((~good).nonzero()[0])
        raise ValueError(
            f"the weight of edge {first} is {float(weight[first])}; weights must be finite and "
            "not negative"
        )
    return weight


# Parts ####################################################################################


def _scan(dst: Tensor, src: Tensor, num_dst: int, num_src: int) -> tuple[int, int]:
    """The first edge out of range and the first where ``dst`` descends, or -1."""
    if library.compiled():
        return torch.ops.pyg_scale.csc_scan(dst, src, num_dst, num_src, library.num_threads())
    wrong = (dst < 0) | (dst >= num_dst) | (src < 0) | (src >= num_src)
    return _first(wrong), _first(dst[1:] < dst[:-1], shift=1)


def _first(mask: Tensor, shift: int = 0) -> int:
    return int(mask.nonzero()[0]) + shift if bool(mask.any()) else -1


def _pointers(dst: Tensor, num_dst: int) -> Tensor:
    """The pointers of a sorted ``dst``."""
    if library.compiled():
        return torch.ops.pyg_scale.csc_pointers(dst, num_dst, library.num_threads())
    count = torch.bincount(dst, minlength=num_dst)
    return torch.cat([count.new_zeros(1), count.cumsum(0)])


def _narrow(index: Tensor, size: int, share: bool) -> Tensor:
    """``index`` as ``int32`` if ``size`` allows; itself only if ``share``."""
    dtype = torch.int32 if size <= _INT32_MAX else torch.int64
    if share and index.dtype == dtype:
        return memory.in_huge_pages(index)
    if not library.compiled():
        return index.to(dtype, copy=True).contiguous()
    return torch.ops.pyg_scale.huge_empty([index.numel()], dtype).copy_(index)


def _pair_dtype(num_edges: int, num_src: int) -> torch.dtype:
    return torch.int32 if max(num_edges, num_src) <= _INT32_MAX else torch.int64


def _scatter(dst: Tensor, src: Tensor, num_dst: int, num_src: int) -> Compressed:
    ops, threads, num_edges = torch.ops.pyg_scale, library.num_threads(), dst.numel()
    # cursor[v + 1] is the position of the next edge of v: first the beginning of v, at last its end
    cursor = ops.csc_cursor(dst, num_dst, threads)
    pair = ops.huge_empty([num_edges, 2], _pair_dtype(num_edges, num_src))
    for begin, end in _chunks(num_edges, "Grouping edges by destination"):
        ops.csc_place(dst, src, cursor, pair, begin, end, threads)
    return Compressed(cursor[:-1], pair[:, 0], pair[:, 1])


def _chunks(size: int, what: str) -> Iterator[tuple[int, int]]:
    if size <= _CHUNK:  # for a few edges, the progress bar would take longer than the work
        yield 0, size
        return
    with tqdm(total=size, desc=what, unit=" edges", unit_scale=True, disable=None, delay=1) as bar:
        for begin in range(0, size, _CHUNK):
            end = min(size, begin + _CHUNK)
            yield begin, end
            bar.update(end - begin)


def _edge_id(csc: Compressed) -> Tensor:
    if csc.edge_id is None:
        return torch.arange(csc.indices.numel())
    return csc.edge_id.to(torch.int64)


def _with_ids(csc: Compressed) -> Compressed:
    """The same edges with ids beside the neighbours."""
    if csc.edge_id is not None:
        return csc
    size = csc.indices.numel()
    dtype = torch.int32 if size <= _INT32_MAX and csc.indices.dtype == torch.int32 else torch.int64
    if library.compiled():
        pair = torch.ops.pyg_scale.huge_empty([size, 2], dtype)
    else:
        pair = torch.empty(size, 2, dtype=dtype)
    pair[:, 0] = csc.indices
    pair[:, 1] = torch.arange(size, dtype=dtype)
    return Compressed(csc.indptr, pair[:, 0], pair[:, 1])
