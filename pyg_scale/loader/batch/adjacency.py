"""The sampled edges in the sparse format of the user's ``adj_t``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor

from pyg_scale.ops.gather import gather


def adjacency_like(
    adj_t: Any, row: Tensor, col: Tensor, edge: Tensor | None, size: tuple[int, int]
) -> Any:
    """The transposed adjacency matrix ``[num_dst, num_src]`` of a batch.

    Values are taken by edge id, which is the position in ``adj_t``; without ids there are none
    (ones in torch's formats, which cannot be without).

    Args:
        adj_t: ``torch_sparse.SparseTensor``, or a sparse ``Tensor`` of layout CSR, CSC or COO.
        row: Positions of the sources ``[num_edges]``.
        col: Positions of the destinations ``[num_edges]``.
        edge: Original edge ids.
        size: Number of source and of destination nodes.
    """
    if isinstance(adj_t, Tensor):
        return _torch_sparse(adj_t, row, col, edge, size)
    row, col = row.to(adj_t.device()), col.to(adj_t.device())
    value = adj_t.storage.value()
    if value is not None:
        value = None if edge is None else gather(value, edge.to(value.device))
    return SparseTensor(
        row=col, col=row, value=value, sparse_sizes=size[::-1], is_sorted=False, trust_data=True
    )


def _torch_sparse(
    adj_t: Tensor, row: Tensor, col: Tensor, edge: Tensor | None, size: tuple[int, int]
) -> Tensor:
    values = adj_t._values() if adj_t.layout == torch.sparse_coo else adj_t.values()
    row, col = row.to(adj_t.device, torch.int64), col.to(adj_t.device, torch.int64)
    if edge is None:
        value = values.new_ones(row.numel(), *values.shape[1:])
    else:
        value = gather(values, edge.to(adj_t.device))
    shape = (size[1], size[0], *values.shape[1:])
    # An entry per edge, parallel edges too: nothing is summed up here.
    order = (col * size[0] + row).argsort(stable=True)
    row, col, value = row[order], col[order], value[order]
    if adj_t.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(torch.stack([col, row]), value, shape)
    if adj_t.layout == torch.sparse_csr:
        return torch.sparse_csr_tensor(_pointers(col, size[1]), row, value, shape)
    order = row.argsort(stable=True)
    return torch.sparse_csc_tensor(_pointers(row[order], size[0]), col[order], value[order], shape)


def _pointers(index: Tensor, size: int) -> Tensor:
    out = torch.zeros(size + 1, dtype=torch.int64, device=index.device)
    torch.cumsum(torch.bincount(index, minlength=size), 0, out=out[1:])
    return out
