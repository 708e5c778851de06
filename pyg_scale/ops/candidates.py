"""The in-edges among which nodes choose, on any device (``csrc/cuda/candidates.cuh``).

Times say among which in-edges a node chooses, and weights how many it gets: ``docs/draws.md``. This
module has the plain-torch meaning, which runs on every device of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import fused, library


class Choosing(NamedTuple):
    """The nodes that choose among their in-edges along one edge type.

    Attributes:
        indptr: ``int64`` ``[num_rows + 1]``, see :class:`pyg_scale.graph.topology.CSC`. All tensors
            are contiguous and on one device.
        indices: ``int64`` or ``int32`` ``[num_edges]``.
        node: ``int64`` ``[n]``, nodes of ``indptr``.
        num_neighbors: Number of draws for each node, -1 for all in-edges.
        time: The time of each position, ``int64`` ``[num_edges]``; ``None`` if edges have none.
        neighbor_time: The times of the neighbours by id, ``int64`` ``[num_nodes]``; ``None`` if
            nodes have none.
        weight_prefix: The running sums of the weights within each node, ``int64``
            ``[num_edges]``; ``None`` without weights.
        latest: The time that no edge may be after, ``int64`` ``[n]``; ``None`` without times.
        after: The time that every edge must be after, ``int64`` ``[n]``; ``None`` if there is none.
    """

    indptr: Tensor
    indices: Tensor
    node: Tensor
    num_neighbors: int
    time: Tensor | None = None
    neighbor_time: Tensor | None = None
    weight_prefix: Tensor | None = None
    latest: Tensor | None = None
    after: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True if a node chooses among all of its in-edges, and none is without weight."""
        return self.latest is None and self.weight_prefix is None


class Candidates(NamedTuple):
    """The in-edges among which nodes choose.

    Attributes:
        counts: Number of in-edges that each node gets, ``int64`` ``[n]``.
        begin: The first position among which each chooses, ``int64`` ``[n]``; ``None`` if all
            choose among all in-edges.
        end: The position after the last one, as ``begin``.
    """

    counts: Tensor
    begin: Tensor | None = None
    end: Tensor | None = None


def counts_of(indptr: Tensor, node: Tensor, num_neighbors: int, replace: bool) -> Tensor:
    """Number of in-edges that each node gets without times and weights, ``int64`` ``[n]``."""
    return _most(indptr[node + 1] - indptr[node], num_neighbors, replace)


def candidates_along_types(
    choosing: Sequence[Choosing], replace: bool, last: bool = False
) -> list[Candidates]:
    """Find the candidates of nodes along several edge types, on a CUDA device by one kernel.

    Edge types with neither times nor weights take a few operations of torch.

    Args:
        choosing: The edge types.
        replace: If True, nodes draw with replacement.
        last: If True, the last ``num_neighbors`` of the in-edges within the times are the
            candidates, unless all are wanted.

    Raises:
        KernelsError: If there are no kernels and ``PYG_SCALE_KERNELS=require``.
    """
    special = [each for each in choosing if not each.is_plain]
    found = iter(_special(special, replace, last) if special else [])
    return [
        Candidates(counts_of(each.indptr, each.node, each.num_neighbors, replace))
        if each.is_plain
        else next(found)
        for each in choosing
    ]


def first_where(
    low: Tensor, high: Tensor, size: int, condition: Callable[[Tensor], Tensor]
) -> Tensor:
    """The first position of each range from which on a condition holds, else its end.

    Args:
        low: The first position of each range, ``int64`` ``[n]``.
        high: The position after the last one, ``int64`` ``[n]``.
        size: Number of all positions.
        condition: Takes one position per range, ``int64`` ``[n]``, and returns ``bool`` ``[n]``.
            Within a range it must not turn from true to false.
    """
    while bool((low < high).any()):
        middle = (low + high) // 2
        # A range that is done may ask about a position that does not exist.
        holds = condition(middle.clamp(max=size - 1)) | (low >= high)
        low, high = torch.where(holds, low, middle + 1), torch.where(holds, middle, high)
    return low


def sums_before(prefix: Tensor, position: Tensor, first: Tensor) -> Tensor:
    """The sum of the weights of a node before some of its in-edges, ``int64`` ``[n]``.

    Args:
        prefix: ``weight_prefix`` of :class:`Choosing`.
        position: The positions ``[n]``.
        first: The first position of the node of each, ``[n]``.
    """
    is_first = position == first
    if not prefix.numel():
        return torch.zeros_like(position)
    return torch.where(is_first, 0, prefix[(position - 1).clamp(min=0)])


def _special(choosing: Sequence[Choosing], replace: bool, last: bool) -> list[Candidates]:
    here = choosing[0].node
    if not (library.compiled() if here.device.type == "cpu" else fused.usable(here)):
        return [_candidates(each, replace, last) for each in choosing]
    none = here.new_empty(0)  # in the place of what is not there

    def given(tensors: Sequence[Tensor | None]) -> list[Tensor]:
        return [none if tensor is None else tensor for tensor in tensors]

    begin, end, counts = torch.ops.pyg_scale.candidates(
        [each.indptr for each in choosing],
        [each.indices for each in choosing],
        given([each.time for each in choosing]),
        given([each.neighbor_time for each in choosing]),
        given([each.weight_prefix for each in choosing]),
        [each.node for each in choosing],
        given([each.latest for each in choosing]),
        given([each.after for each in choosing]),
        [each.num_neighbors for each in choosing],
        replace,
        last,
    )
    sizes = [each.node.numel() for each in choosing]
    parts = zip(counts.split(sizes), begin.split(sizes), end.split(sizes), strict=True)
    return [Candidates(*part) for part in parts]


def _most(size: Tensor, num_neighbors: int, replace: bool) -> Tensor:
    """Number of draws from some candidates."""
    if num_neighbors < 0:
        return size
    return torch.where(size > 0, num_neighbors, 0) if replace else size.clamp(max=num_neighbors)


def _candidates(of: Choosing, replace: bool, last: bool) -> Candidates:
    first, k = of.indptr[of.node], of.num_neighbors
    begin, end = first, of.indptr[of.node + 1]

    def until(limit: Tensor) -> Tensor:
        def later(position: Tensor) -> Tensor:
            if of.time is not None:
                return of.time[position] > limit
            assert of.neighbor_time is not None
            return of.neighbor_time[of.indices[position].to(torch.int64)] > limit

        return first_where(begin, end, of.indices.numel(), later)

    if of.latest is not None:
        end = until(of.latest)
        if of.after is not None:
            begin = until(of.after)
        if last and k >= 0:
            begin = torch.maximum(begin, end - k)
    size = end - begin
    counts = _most(size, k, replace)
    if of.weight_prefix is not None and k >= 0:
        positive = _positive(of.weight_prefix, first, begin, size)
        if replace:
            counts = torch.where(positive > 0, counts, 0)
        else:
            counts = torch.where(size > k, positive.clamp(max=k), counts)
    return Candidates(counts, begin, end)


def _positive(prefix: Tensor, first: Tensor, begin: Tensor, size: Tensor) -> Tensor:
    """Number of candidates of each node that have a weight, ``int64`` ``[n]``."""
    row = torch.repeat_interleave(torch.arange(size.numel(), device=size.device), size)
    before = size.cumsum(0) - size
    position = begin[row] + torch.arange(row.numel(), device=row.device) - before[row]
    has_weight = prefix[position] > sums_before(prefix, position, first[row])
    return torch.zeros_like(size).index_add_(0, row, has_weight.to(torch.int64))
