"""The edges passed to a layer as an adjacency, and objects derived from it and kept with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from pyg_scale.nn.fallback import NotFused
from pyg_scale.ops.adjacency import Adjacency, from_edge_index, recording

T = TypeVar("T")

_INDEX_TYPES = (torch.int64, torch.int32)
_of_adjacency: weakref.WeakKeyDictionary[Adjacency, dict[Hashable, Any]]
_of_adjacency = weakref.WeakKeyDictionary()
_of_tensor: dict[int, tuple[weakref.ref[Tensor], int, dict[Hashable, Any]]] = {}


def edges_of(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    flow: str = "source_to_target",
    num_loops: int | None = None,
) -> Adjacency:
    """The edges grouped by the nodes that receive messages; looked up for a known tensor.

    Args:
        edge_index: ``int64`` or ``int32`` ``[2, num_edges]``; may be an ``EdgeIndex``.
        num_src: Number of nodes that send.
        num_dst: Number of nodes that receive.
        flow: As in PyG's ``MessagePassing``: row 1 receives, or row 0 for ``"target_to_source"``.
        num_loops: See :func:`~pyg_scale.ops.adjacency.from_edge_index`.

    Raises:
        NotFused: If the edges are invalid, so that PyG raises its error, or of a form that only PyG
            supports.
    """
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        raise NotFused(f"edge_index is a {type(edge_index).__name__}")
    if edge_index.dtype not in _INDEX_TYPES or edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise NotFused("edge_index is not an int64 or int32 tensor of shape [2, num_edges]")
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index._data  # the inner tensor, one object while edge_index lives
    if flow == "target_to_source":
        edge_index = _flipped(edge_index)
    try:
        return from_edge_index(edge_index, num_src, num_dst, num_loops)
    except ValueError as error:
        raise NotFused("edge_index has nodes that do not exist") from error


def is_sparse(edge_index: Any) -> bool:
    """Return True if the edges are a sparse matrix of torch or torch_sparse."""
    return isinstance(edge_index, SparseTensor) or is_torch_sparse_tensor(edge_index)


def edges_of_sparse(adj_t: Any, num_src: int) -> tuple[Adjacency, Tensor | None]:
    """The edges of a sparse matrix whose rows receive, and its values.

    Args:
        adj_t: ``[num_dst, num_src]``, of any of torch's layouts, or torch_sparse's.
        num_src: Number of nodes that send.

    Raises:
        NotFused: If it is invalid, so that PyG raises its error, or of a form that only PyG
            supports.
    """
    if adj_t.size(1) != num_src:
        raise NotFused("the sparse matrix does not fit the features")
    if isinstance(adj_t, SparseTensor):
        indptr, indices, value = adj_t.csr()
        if value is not None and value.requires_grad:
            raise NotFused("sparse matrix that requires grad")
        make = lambda: Adjacency(indptr.detach(), indices.detach(), num_src)  # noqa: E731
        # Matrices with other rows may share their columns: `sparse_resize` makes such ones.
        return _kept(indices, ("csr", num_src), make, of=indptr), value
    if adj_t.requires_grad:
        raise NotFused("sparse matrix that requires grad")

    def convert() -> tuple[Adjacency, Tensor]:
        csr = adj_t if adj_t.layout == torch.sparse_csr else adj_t.to_sparse_csr()
        edges = Adjacency(csr.crow_indices(), csr.col_indices(), num_src)
        return edges, csr.values()

    return _kept(adj_t, "csr", convert)


def derived(graph: Adjacency, name: Hashable, make: Callable[[], T], of: Tensor | None = None) -> T:
    """An object derived from an adjacency: made once by ``make``, kept while the adjacency lives.

    Args:
        graph: The edges.
        name: Name of the object.
        make: Makes the object.
        of: Another tensor from which it is made. It is made again for another tensor, or after a
            change of this one; and in every call if autograd needs the tensor or inference mode
            hides its changes.
    """
    if recording():
        return make()
    if of is not None and (of.requires_grad or of.is_inference()):
        return make()
    return _made_once(_of_adjacency.setdefault(graph, {}), name, make, of)


def _flipped(edge_index: Tensor) -> Tensor:
    return _kept(edge_index, "flipped", lambda: edge_index.detach().flip(0))


def _kept(tensor: Tensor, name: Hashable, make: Callable[[], T], of: Tensor | None = None) -> T:
    """The object made earlier of these tensors, if they were not changed in place since."""
    # Changes cannot be detected then.
    if recording() or tensor.is_inference() or (of is not None and of.is_inference()):
        return make()
    key = id(tensor)
    entry = _of_tensor.get(key)
    if entry is None or entry[0]() is not tensor or entry[1] != tensor._version:

        def forget(ref: weakref.ref[Tensor]) -> None:
            found = _of_tensor.get(key)
            if found is not None and found[0] is ref:  # not a later tensor of the same id
                _of_tensor.pop(key, None)

        entry = _of_tensor[key] = (weakref.ref(tensor, forget), tensor._version, {})
    return _made_once(entry[2], name, make, of)


def _made_once(
    kept: dict[Hashable, Any], name: Hashable, make: Callable[[], T], of: Tensor | None
) -> T:
    """The object of this name, made again for another ``of``, or after a change of it."""
    entry = kept.get(name)
    if entry is None or (of is not None and (entry[0]() is not of or entry[1] != of._version)):
        with torch.inference_mode(False):  # a backward pass may need the result later
            made = make()
        stamp = (lambda: None, 0) if of is None else (weakref.ref(of), of._version)
        entry = kept[name] = (*stamp, made)
    return entry[2]
