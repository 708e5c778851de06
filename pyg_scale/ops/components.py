"""The connected components of an undirected graph."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops.csc import expand_pointers


def connected_components(indptr: Tensor, indices: Tensor) -> Tensor:
    """Number the connected components in the order of their smallest nodes.

    Every node takes the smallest label of its neighbours, and labels are followed to their ends
    (Shiloach and Vishkin, J. Algorithms 1982): a few rounds, whatever the diameter.

    Args:
        indptr: ``int64`` ``[num_nodes + 1]``.
        indices: ``int32`` or ``int64`` ``[num_entries]``, each edge in both directions.

    Returns:
        ``int64`` ``[num_nodes]``, the component of each node.
    """
    row = expand_pointers(indptr, indices.numel()).to(torch.int64)
    col = indices.to(torch.int64)
    label = torch.arange(indptr.numel() - 1)
    while row.numel():
        low = torch.minimum(label[row], label[col])
        high = torch.maximum(label[row], label[col])
        apart = low < high
        if not bool(apart.any()):
            break
        row, col = row[apart], col[apart]
        label.scatter_reduce_(0, high[apart], low[apart], "amin")
        while not torch.equal(label, shorter := label[label]):
            label = shorter
    return torch.unique(label, return_inverse=True)[1]
