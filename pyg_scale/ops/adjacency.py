"""Edges by destination, as the layers read them, and the same edges by source for gradients.

A gradient flows against the edges. Once they are grouped by source, one thread sums each row of a
gradient in a fixed order; a scatter would need atomics, whose order changes from run to run. The
grouping is kept with the graph, in an :class:`Adjacency`. It is looked up by the tensors it was
made of: by identity, through weak references, as an address may be reused. While a graph is
recorded (:func:`recording`) nothing is looked up: a CUDA graph would replay pointers to freed
edges.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import fused, library
from pyg_scale.ops.colptr import colptr, recall
from pyg_scale.ops.csc import build_csc

_INDEX_TYPES = (torch.int64, torch.int32)
_INT32_MAX = 2**31 - 1
_SORTABLE = _INT32_MAX
"""Number of keys that ``torch.sort`` takes on CUDA."""
_AT_ONCE = 1 << 17
"""Number of edges up to which one thread groups them as fast as several."""
_AT_ONCE_ON_CUDA = 1 << 20
"""Number of edges up to which an op of few kernels is taken in place of torch's sort. A guess,
until a GPU measures it: edges of a hub take the square of their number."""


class Transpose(NamedTuple):
    """The edges of an adjacency grouped by source, in the order of positions within a source."""

    indptr: Tensor
    """``int64`` ``[num_src + 1]``."""
    indices: Tensor
    """``[num_edges]``, the destination of each edge, of the type of the adjacency's indices."""
    position: Tensor
    """``[num_edges]``, the position of each edge in the adjacency; ``int32`` below 2**31 edges."""


class Adjacency:
    """The in-edges of every destination (CSR with destinations as rows).

    Args:
        indptr: ``int64`` or ``int32`` ``[num_dst + 1]``; the edges into row ``i`` have the
            positions ``indptr[i]`` to ``indptr[i + 1] - 1``.
        indices: ``int64`` or ``int32`` ``[num_edges]``, the source of each position.
        num_src: Number of source nodes, the rows of a feature matrix.
        edge_id: ``int64`` or ``int32`` ``[num_edges]``, a permutation: the edge of the caller's
            edge list at each position. Weights and edge features are in the order of that list.
            ``None``: positions are edge ids.

    Raises:
        TypeError: If an index tensor is neither ``int64`` nor ``int32``.
        ValueError: If shapes or devices do not fit, or a pointer or index is out of range.
    """

    def __init__(
        self, indptr: Tensor, indices: Tensor, num_src: int, edge_id: Tensor | None = None
    ) -> None:
        check_edges(indptr, indices, num_src, edge_id)
        self._set(indptr, indices, num_src, edge_id)

    @classmethod
    def of_checked(
        cls,
        indptr: Tensor,
        indices: Tensor,
        num_src: int,
        edge_id: Tensor | None = None,
        transposed: Transpose | None = None,
    ) -> Adjacency:
        """Make an adjacency of edges that were already checked; checks nothing.

        Args:
            indptr: See :class:`Adjacency`.
            indices: See :class:`Adjacency`.
            num_src: See :class:`Adjacency`.
            edge_id: See :class:`Adjacency`.
            transposed: The same edges by source, if they are known.
        """
        made = cls.__new__(cls)
        made._set(indptr, indices, num_src, edge_id)
        made._transpose = transposed
        return made

    def _set(self, indptr: Tensor, indices: Tensor, num_src: int, edge_id: Tensor | None) -> None:
        self.indptr = indptr.to(torch.int64).contiguous()
        self.indices = indices.contiguous()
        self.num_src = num_src
        self.edge_id = None if edge_id is None else edge_id.contiguous()
        self._transpose: Transpose | None = None
        self._num_expanded: int | None = None

    @property
    def num_dst(self) -> int:
        """Number of destinations."""
        return self.indptr.numel() - 1

    @property
    def num_expanded(self) -> int:
        """Number of first destinations that may have edges; the others have none."""
        return self.num_dst if self._num_expanded is None else self._num_expanded

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.indices.numel()

    @property
    def device(self) -> torch.device:
        """The device of the edges."""
        return self.indices.device

    @property
    def known_transpose(self) -> Transpose | None:
        """The edges by source if they were grouped before, else ``None``."""
        return self._transpose

    def expand_only(self, count: int) -> None:
        """Note that destinations after the first ``count`` have no edges."""
        self._num_expanded = min(count, self.num_dst)

    def transpose(self) -> Transpose:
        """The edges by source; grouped at the first call, kept from then on."""
        if self._transpose is None:
            self._transpose = transpose(self.indptr, self.indices, self.num_src)
        return self._transpose

    def __repr__(self) -> str:
        return f"Adjacency({self.num_src} -> {self.num_dst} nodes, {self.num_edges} edges)"


def transpose(indptr: Tensor, indices: Tensor, num_src: int) -> Transpose:
    """Group edges by source: a stable counting sort.

    Args:
        indptr: ``int64`` ``[num_dst + 1]``.
        indices: ``int64`` or ``int32`` ``[num_edges]``.
        num_src: Number of source nodes.
    """
    if fused.usable(indices):
        return Transpose(*torch.ops.pyg_scale.csr_transpose(indptr, indices, num_src))
    return transpose_plain(indptr, indices, num_src)


def transpose_on_cuda(indptr: Tensor, indices: Tensor, num_src: int) -> Transpose:
    """The implementation of ``csr_transpose`` on CUDA: a kernel's, or torch's sort if many."""
    if indices.numel() <= _AT_ONCE_ON_CUDA:
        return Transpose(*torch.ops.pyg_scale.csr_transpose_few(indptr, indices, num_src))
    return transpose_plain(indptr, indices, num_src)


def transpose_plain(indptr: Tensor, indices: Tensor, num_src: int) -> Transpose:
    """The plain-torch meaning of :func:`transpose`."""
    # On CUDA, a radix sort of short keys takes half the passes and needs no atomics.
    key_type = torch.int32 if num_src < _INT32_MAX else torch.int64
    pointers, order = sorted_by_key(indices.to(key_type), num_src)
    row = rows_of(indptr, indices.numel())
    narrow = torch.int32 if indices.numel() <= _INT32_MAX else torch.int64
    return Transpose(pointers, row[order].to(indices.dtype), order.to(narrow))


def recording() -> bool:
    """Return True if this run is recorded, to be replayed on tensors with other values.

    ``torch.compile`` and CUDA graphs do that. Then nothing made earlier is looked up, nothing is
    kept, and no value is read from the device: the recorded run groups the edges itself.
    """
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def rows_of(indptr: Tensor, num_edges: int) -> Tensor:
    """The destination of every position, ``int64`` ``[num_edges]``."""
    rows = torch.arange(indptr.numel() - 1, device=indptr.device)
    return rows.repeat_interleave(indptr.diff(), output_size=num_edges)


def check_edges(indptr: Tensor, indices: Tensor, num_src: int, edge_id: Tensor | None) -> None:
    """Refuse an invalid adjacency; contents are checked only on the CPU, and not in a trace."""
    for name, tensor in (("indptr", indptr), ("indices", indices), ("edge_id", edge_id)):
        if tensor is None:
            continue
        if tensor.dim() != 1 or tensor.dtype not in _INDEX_TYPES:
            raise TypeError(
                f"{name} must be a one-dimensional int64 or int32 tensor "
                f"(got {tensor.dtype} of shape {list(tensor.shape)})"
            )
        if tensor.device != indices.device:
            raise ValueError(f"{name} is on {tensor.device}, but indices is on {indices.device}")
    if edge_id is not None and edge_id.numel() != indices.numel():
        raise ValueError(
            f"edge_id has {edge_id.numel()} entries, but there are {indices.numel()} edges"
        )
    if indptr.numel() < 1:
        raise ValueError("indptr is empty; it has one entry more than there are destinations")
    if recording() or indices.device.type != "cpu":
        return  # must not wait for a GPU; the compiled ops check again
    num_edges = indices.numel()
    falls = bool((indptr[1:] < indptr[:-1]).any())  # differences could overflow
    if int(indptr[0]) != 0 or int(indptr[-1]) != num_edges or falls:
        raise ValueError(f"indptr must rise from 0 to the number of edges, {num_edges}")
    for name, tensor, size, what in (
        ("indices", indices, num_src, "source nodes"),
        ("edge_id", edge_id, num_edges, "edges"),
    ):
        if tensor is None or tensor.numel() == 0:
            continue
        low, high = (int(v) for v in torch.aminmax(tensor))
        if low < 0 or high >= size:
            at = int(((tensor < 0) | (tensor >= size)).nonzero()[0])
            raise ValueError(f"{name}[{at}] is {int(tensor[at])}, but there are only {size} {what}")


# Graphs by the tensors that they were made of ###############################################


class _Known(NamedTuple):
    refs: tuple[weakref.ref[Tensor] | None, ...]
    versions: tuple[int, ...]
    adjacency: Adjacency

    def is_of(self, tensors: tuple[Tensor | None, ...]) -> bool:
        return all(ref is None or ref() is one for ref, one in zip(self.refs, tensors))


_known: dict[tuple[int, ...], _Known] = {}


def from_csr(
    indptr: Tensor, indices: Tensor, num_src: int, edge_id: Tensor | None = None
) -> Adjacency:
    """The adjacency of these tensors, made once and kept while they live and are not changed.

    Arguments and errors are those of :class:`Adjacency`.
    """
    if recording():
        return Adjacency(indptr, indices, num_src, edge_id)

    def make() -> Adjacency:
        # New tensor objects on the same memory, so that the originals can be freed.
        alias = None if edge_id is None else edge_id.detach()
        return Adjacency(indptr.detach(), indices.detach(), num_src, alias)

    return _recall((indptr, indices, edge_id), (num_src,), make)


def from_edge_index(
    edge_index: Tensor, num_src: int, num_dst: int, num_loops: int | None = None
) -> Adjacency:
    """The adjacency of an edge list, made once and kept while that tensor lives and is not changed.

    Edges that are sorted by destination are used as they are, such as those of a loader's batch,
    whose pointers are already known. Others are grouped by a stable counting sort.

    Args:
        edge_index: ``int64`` or ``int32`` ``[2, num_edges]``, sources above destinations.
        num_src: Number of source nodes.
        num_dst: Number of destination nodes.
        num_loops: See :func:`grouped`; only for edges for which :func:`grouped_at_once` is True.

    Raises:
        TypeError: If ``edge_index`` has another shape or type.
        ValueError: If an edge has a node that does not exist.
    """
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype not in _INDEX_TYPES:
        raise TypeError(
            f"edge_index must be int64 or int32 of shape [2, num_edges] "
            f"(got {edge_index.dtype} of shape {list(edge_index.shape)})"
        )
    if recording():
        return _sorted_in_a_trace(edge_index, num_src, num_dst)
    if num_loops is not None:
        numbers: tuple[int, ...] = (num_src, num_dst, num_loops)
        return _recall((edge_index,), numbers, lambda: grouped(edge_index, *numbers))
    return _recall(
        (edge_index,), (num_src, num_dst), lambda: _from_edges(edge_index, num_src, num_dst)
    )


def _from_edges(edge_index: Tensor, num_src: int, num_dst: int) -> Adjacency:
    known = recall(edge_index)
    if known is None and grouped_at_once(edge_index):
        return grouped(edge_index, num_src, num_dst)
    src, dst = edge_index.detach()
    pointers = colptr(edge_index, num_dst)
    if pointers is not None:
        made = Adjacency(pointers, src, num_src)
        made.expand_only(num_dst if known is None else known.numel() - 1)
        return made
    if edge_index.device.type != "cpu":
        return _sorted_in_a_trace(edge_index, num_src, num_dst)
    try:
        csc = build_csc(dst, src, num_dst, num_src)
    except IndexError as error:
        raise ValueError(f"edge_index: {error}") from None
    return Adjacency.of_checked(csc.indptr, csc.indices, num_src, csc.edge_id)


def grouped_at_once(edge_index: Tensor) -> bool:
    """Return True if one compiled op groups the edges by both ends, as there are not many."""
    if edge_index.is_cuda:
        return edge_index.numel() <= 2 * _AT_ONCE_ON_CUDA and fused.usable(edge_index)
    return edge_index.is_cpu and edge_index.numel() <= 2 * _AT_ONCE and library.compiled()


def grouped(
    edge_index: Tensor, num_src: int, num_dst: int, num_loops: int | None = None
) -> Adjacency:
    """Group edges by destination, and by source if a gradient may need it, in one op.

    The order is that of a stable sort. On CUDA nobody waits for the device, so no size depends on
    the edges: self-loops that are replaced lead to one more destination, the last one.

    Args:
        edge_index: ``int64`` or ``int32`` ``[2, num_edges]``; not many, see
            :func:`grouped_at_once`.
        num_src: Number of source nodes.
        num_dst: Number of destination nodes.
        num_loops: If given, all self-loops are replaced by one at each of that many first nodes, as
            PyG's ``remove_self_loops`` and ``add_self_loops`` do. Remaining edges are numbered in
            their order, then the loops; on CUDA replaced ones have their numbers, too. The loop of
            a node is its last in-edge.

    Raises:
        ValueError: If an edge has a node that does not exist, on the CPU.
    """
    by_source = torch.is_grad_enabled()
    given = edge_index, num_src, num_dst, -1 if num_loops is None else num_loops, by_source
    if edge_index.is_cuda:
        found = torch.ops.pyg_scale.csr_group_padded(*given)
    elif library.compiled():
        found = torch.ops.pyg_scale.csr_group(*given)
    else:
        found = grouped_plain(*given)
    indptr, indices, edge_id, *transposed = found
    by_src = Transpose(*transposed) if by_source else None
    return Adjacency.of_checked(indptr, indices, num_src, edge_id, by_src)


def grouped_plain(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    num_loops: int,
    by_source: bool,
    padded: bool = False,
) -> tuple[Tensor, ...]:
    """The plain-torch meaning of the compiled ops; no loops are replaced if ``num_loops`` is -1.

    If ``padded``, replaced loops lead to one more destination, as on CUDA.
    """
    for ids, size in zip(edge_index, (num_src, num_dst), strict=True):
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise ValueError(f"edge_index names nodes that do not exist: there are {size}")
    here = edge_index.device
    src, dst = edge_index.to(torch.int64)
    if num_loops >= 0:
        others, node = src != dst, torch.arange(num_loops, device=here)
        if padded:
            dst, others = torch.where(others, dst, num_dst), torch.ones_like(others)
            num_dst += 1
        src, dst = torch.cat([src[others], node]), torch.cat([dst[others], node])
    dst, order = torch.sort(dst, stable=True)
    steps = torch.arange(num_dst + 1, device=here)
    indptr, indices = torch.searchsorted(dst, steps), src[order].to(torch.int32)
    none = torch.empty(0, dtype=torch.int32, device=here)
    transposed: tuple[Tensor, ...] = none.to(torch.int64), none, none
    if by_source:
        transposed = transpose_plain(indptr, indices, num_src)
    return indptr, indices, order.to(torch.int32), *transposed


def _sorted_in_a_trace(edge_index: Tensor, num_src: int, num_dst: int) -> Adjacency:
    """Make the adjacency with torch's own operations, whatever the values of the tensor."""
    pointers, order = sorted_by_key(edge_index[1], num_dst)
    return Adjacency(pointers, edge_index[0][order], num_src, order)


def sorted_by_key(keys: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Sort keys stably with torch: the pointers of every key, and the order of the positions.

    Any number of them: on CUDA ``torch.sort`` takes less than ``2**31``.

    Args:
        keys: ``int64`` or ``int32`` ``[size]``, from 0 to ``num_keys - 1``.
        num_keys: Number of different keys.

    Returns:
        ``int64`` ``[num_keys + 1]`` and ``int64`` ``[size]``.
    """
    if torch.compiler.is_compiling() or keys.numel() <= _SORTABLE:
        steps = torch.arange(num_keys + 1, device=keys.device, dtype=keys.dtype)
        ascending, order = torch.sort(keys, stable=True)
        return torch.searchsorted(ascending, steps), order
    pieces = keys.split(_SORTABLE)
    found = [sorted_by_key(piece, num_keys) for piece in pieces]
    pointers = torch.stack([of_piece for of_piece, _ in found]).sum(0)
    order = torch.empty(keys.numel(), dtype=torch.int64, device=keys.device)
    begin, first = pointers[:-1].clone(), 0
    for piece, (of_piece, within) in zip(pieces, found):  # behind the same keys of earlier pieces
        shift = (begin - of_piece[:-1]).index_select(0, piece[within])
        order[shift.add_(torch.arange(piece.numel(), device=keys.device))] = within + first
        begin += of_piece.diff()
        first += piece.numel()
    return pointers, order


def _recall(
    tensors: tuple[Tensor | None, ...], numbers: tuple[int, ...], make: Callable[[], Adjacency]
) -> Adjacency:
    if any(tensor is not None and tensor.is_inference() for tensor in tensors):
        return make()  # changes of such tensors cannot be detected
    name = (*(id(tensor) for tensor in tensors), *numbers)
    entry = _known.get(name)
    versions = tuple(-1 if tensor is None else tensor._version for tensor in tensors)
    if entry is not None and entry.versions == versions and entry.is_of(tensors):
        return entry.adjacency

    def forget(ref: weakref.ref[Tensor]) -> None:
        held = _known.get(name)
        if held is not None and any(ref is one for one in held.refs):
            _known.pop(name, None)

    with torch.inference_mode(False):  # a backward pass may need the result later
        adjacency = make()
    refs = tuple(None if tensor is None else weakref.ref(tensor, forget) for tensor in tensors)
    _known[name] = _Known(refs, versions, adjacency)
    return adjacency
