"""Small bipartite graphs by destination, hostile ones too."""

from __future__ import annotations

import torch
from torch import Tensor

HUB = 100_000


def bipartite(
    num_src: int, num_dst: int, num_edges: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """``indptr``, ``indices`` and a random ``edge_id``; many multi-edges and isolated nodes."""
    generator = torch.Generator().manual_seed(seed)
    degree = torch.rand(num_dst, generator=generator).pow(4)
    degree[:: max(num_dst // 5, 1)] = 0
    if num_dst:
        degree[-1] = 0  # the last row is empty
    total = degree.sum().clamp(min=1e-9)
    count = (degree / total * num_edges).to(torch.int64)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)])
    size = int(indptr[-1])
    indices = (torch.rand(size, generator=generator).pow(2) * num_src).to(torch.int64)
    return indptr, indices, torch.randperm(size, generator=generator)


def named(name: str) -> tuple[int, Tensor, Tensor, Tensor]:
    """``num_src`` and the tensors of one of :data:`NAMES`, or of ``tiny``."""
    none = torch.empty(0, dtype=torch.int64)
    if name == "empty":
        return 0, torch.zeros(1, dtype=torch.int64), none, none
    if name == "no edges":
        return 3, torch.zeros(5, dtype=torch.int64), none, none
    if name == "no rows":
        return 7, torch.zeros(1, dtype=torch.int64), none, none
    if name == "tiny":
        return 6, *bipartite(6, 5, 24)
    if name == "small":
        return 30, *bipartite(30, 20, 150)
    if name == "more rows than sources":
        return 5, *bipartite(5, 60, 400, 1)
    if name == "pieces":  # rows of exactly, just below and just above a piece of 2048 edges
        degree = torch.tensor([2047, 0, 2048, 2049, 1, 4096, 6145, 3])
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
        generator = torch.Generator().manual_seed(2)
        indices = torch.randint(50, (int(indptr[-1]),), generator=generator)
        return 50, indptr, indices, torch.randperm(indices.numel(), generator=generator)
    raise ValueError(name)


NAMES = ("empty", "no edges", "no rows", "small", "more rows than sources", "pieces")


def star() -> tuple[int, Tensor, Tensor]:
    """A hub with 10^5 in-edges and one out-edge to everybody."""
    leaves = torch.arange(1, HUB + 1)
    indptr = torch.cat([torch.tensor([0]), HUB + torch.arange(HUB + 1)])
    return HUB + 1, indptr, torch.cat([leaves, torch.zeros(HUB, dtype=torch.int64)])


def edge_index(indptr: Tensor, indices: Tensor) -> Tensor:
    """Sources above destinations, in the order of positions."""
    rows = torch.arange(indptr.numel() - 1).repeat_interleave(indptr.diff())
    return torch.stack([indices.to(torch.int64), rows])
