"""The destination pointers of a block, without a new key on the batch.

A sampler knows these destination pointers anyway. They are looked up by the tensor object that is
the block's ``edge_index``, through a weak reference, as an address may be reused. A batch that is
moved or copied as a whole keeps them (:func:`keep`). For other copies, such as those of a
transform, they are recomputed, and also for tensors of ``torch.inference_mode()``, whose in-place
changes cannot be detected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage
from torch_geometric.index import index2ptr

_COPIES = tuple(
    f"BaseData.{name}.<locals>.<lambda>"
    for name in ("to", "cpu", "cuda", "pin_memory", "clone", "contiguous", "detach")
)
"""The functions by which PyG moves or copies all tensors of a batch."""

_known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}


def remember(edge_index: Tensor, colptr: Tensor) -> None:
    """Keep the destination pointers of a block as long as its ``edge_index`` lives.

    Args:
        edge_index: ``[2, num_edges]``, sorted by destination. For an inference tensor nothing is
            kept.
        colptr: ``int64`` ``[n + 1]``; nodes from ``n`` on have no edges.
    """
    if edge_index.is_inference():
        return
    name = id(edge_index)

    def forget(ref: weakref.ref[Tensor]) -> None:
        entry = _known.get(name)
        if entry is not None and entry[0] is ref:  # not a later tensor of the same id
            _known.pop(name, None)

    _known[name] = (weakref.ref(edge_index, forget), edge_index._version, colptr)


def keep(store: BaseStorage, colptr: Tensor) -> None:
    """Keep the destination pointers of a block, and of what ``batch.to(device)`` makes of it.

    Args:
        store: Edges of a batch, with an ``edge_index``. Nothing about it changes but that it takes
            the pointers along; a pickled one is PyG's.
        colptr: See :func:`remember`.
    """
    remember(store.edge_index, colptr)
    kind = _KEEPING.get(type(store))
    if kind is not None:
        object.__setattr__(store, "__class__", kind)


def _apply(store: Any, func: Callable[..., Any], *args: str) -> Any:
    known = None
    if getattr(func, "__qualname__", "") in _COPIES and "edge_index" in store:
        known = recall(store.edge_index)
    super(type(store), store).apply(func, *args)
    if known is not None and recall(store.edge_index) is None:
        remember(store.edge_index, func(known))
    return store


def _reduce(store: Any, protocol: Any) -> Any:
    # Nothing of ours is named, so that whoever has PyG alone can read a batch.
    return type(store).__base__, (), store.__getstate__()


# Derived from one class each, as the class of an object can only become one of its layout.
_KEEPING: dict[type, type] = {
    kind: type(f"_Keeping{kind.__name__}", (kind,), {"apply": _apply, "__reduce_ex__": _reduce})
    for kind in (EdgeStorage, GlobalStorage)
}


def recall(edge_index: Tensor) -> Tensor | None:
    """The pointers kept for this tensor, if it was not changed in place since."""
    entry = _known.get(id(edge_index))
    if entry is None or entry[0]() is not edge_index or entry[1] != edge_index._version:
        return None
    return entry[2]


def colptr(edge_index: Tensor, num_nodes: int) -> Tensor | None:
    """The destination pointers of a block, recomputed if they are not kept.

    Args:
        edge_index: ``[2, num_edges]``.
        num_nodes: Number of nodes of the block.

    Returns:
        ``int64`` ``[num_nodes + 1]`` on the device of ``edge_index``: the edges into node ``i``
        are ``colptr[i]`` to ``colptr[i + 1] - 1``. ``None`` if the edges are not sorted by
        destination.

    Raises:
        ValueError: If an edge goes to a node that is not in the block.
    """
    known = recall(edge_index)
    if known is not None:
        missing = num_nodes + 1 - known.numel()
        if missing < 0 and int(known[num_nodes]) != edge_index.size(1):
            raise ValueError(f"edge_index has edges to more than num_nodes={num_nodes} nodes")
        known = known.to(edge_index.device, torch.int64)
        if missing <= 0:
            return known[: num_nodes + 1]
        if edge_index.is_cuda:  # one kernel instead of two
            return index2ptr(edge_index[1].contiguous(), num_nodes).to(torch.int64)
        return torch.cat([known, known.new_full((missing,), edge_index.size(1))])
    col = edge_index[1]
    if col.numel() == 0:
        return col.new_zeros(num_nodes + 1, dtype=torch.int64)
    if bool((col[1:] < col[:-1]).any()):
        return None
    if int(col[0]) < 0 or int(col[-1]) >= num_nodes:
        raise ValueError(f"edge_index has edges to more than num_nodes={num_nodes} nodes")
    return index2ptr(col.contiguous(), num_nodes).to(torch.int64)  # it reads no strides
