"""The same graph as a user could hand it over: int32 or int64, sorted or not."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

VARIANTS = ("int64 unsorted", "int64 sorted", "int32 unsorted", "int32 sorted")


def variant_of(data: Data, variant: str) -> Data:
    """A graph of ``data``'s nodes and edges in another form.

    Args:
        data: ``edge_index`` and ``x`` are used, ``x`` is shared.
        variant: One of :data:`VARIANTS`; sorted means by destination, then source.
    """
    dtype, order = variant.split()
    edge_index = _sorted(data.edge_index) if order == "sorted" else _unsorted(data.edge_index)
    out = Data(edge_index=edge_index.to(getattr(torch, dtype)), num_nodes=data.num_nodes)
    if data.x is not None:
        out.x = data.x
    return out


def is_sorted(variant: str) -> bool:
    """What to pass as ``is_sorted=`` for a graph of that form."""
    return variant.endswith(" sorted")


def seeds(num_nodes: int, count: int, seed: int = 0) -> Tensor:
    """``count`` seed nodes: every node once in random order, then again in another one."""
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-count // num_nodes)
    orders = [torch.randperm(num_nodes, generator=generator) for _ in range(epochs)]
    return torch.cat(orders)[:count]


def _sorted(edge_index: Tensor) -> Tensor:
    src, dst = edge_index.numpy()
    pair = dst.astype(np.uint64)
    pair <<= np.uint64(32)
    pair |= src.astype(np.uint64)
    pair.sort()
    out = np.empty(edge_index.shape, dtype=np.int64)
    out[0], out[1] = pair & np.uint64(0xFFFFFFFF), pair >> np.uint64(32)
    return torch.from_numpy(out)


def _unsorted(edge_index: Tensor) -> Tensor:
    """As given; shuffled if that happens to be sorted by destination."""
    dst = edge_index[1]
    if dst.numel() and bool((dst[1:] >= dst[:-1]).all()):
        generator = torch.Generator().manual_seed(0)
        return edge_index[:, torch.randperm(dst.numel(), generator=generator)]
    return edge_index
