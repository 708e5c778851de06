"""Small undirected graphs as partitioners see them, and what their tests measure."""

from __future__ import annotations

import torch
from torch import Tensor


def undirected(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """``indptr`` and ``indices`` of a graph: each edge both ways, once, without self-loops."""
    src, dst = edge_index[:, edge_index[0] != edge_index[1]]
    both = torch.unique(torch.cat([src * num_nodes + dst, dst * num_nodes + src]))
    count = torch.bincount(both // num_nodes, minlength=num_nodes)
    return torch.cat([count.new_zeros(1), count.cumsum(0)]), both % num_nodes


def random_graph(num_nodes: int, num_edges: int, seed: int) -> tuple[Tensor, Tensor]:
    """Edges between random nodes; the last two nodes are isolated."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes - 2, (2, num_edges), generator=generator)
    return undirected(edges, num_nodes)


def symmetric_weights(indptr: Tensor, indices: Tensor) -> Tensor:
    """Weights from 1 to 5 of the entries, the same in both directions."""
    row = rows(indptr)
    return (torch.minimum(row, indices) * 7 + torch.maximum(row, indices) * 3) % 5 + 1


def planted(sizes: list[int], inside: float, across: float, seed: int) -> tuple[Tensor, Tensor]:
    """A planted partition: ``edge_index`` and the block of each node, in a random order.

    Args:
        sizes: Nodes of each block.
        inside: Expected edges of a node within its block.
        across: Expected edges of a node to other blocks.
        seed: Of the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    block = block[torch.randperm(block.numel(), generator=generator)]
    size = block.numel()
    edges = []
    for b in range(len(sizes)):
        mine = (block == b).nonzero().view(-1)
        pick = torch.randint(mine.numel(), (2, int(mine.numel() * inside / 2)), generator=generator)
        edges.append(mine[pick])
    edges.append(torch.randint(size, (2, int(size * across / 2)), generator=generator))
    return torch.cat(edges, dim=1), block


def barbell(size: int) -> Tensor:
    """``edge_index`` of two cliques joined by one edge."""
    clique = torch.combinations(torch.arange(size)).t()
    return torch.cat([clique, clique + size, torch.tensor([[size - 1], [size]])], dim=1)


def rows(indptr: Tensor) -> Tensor:
    """The node of each entry."""
    return torch.arange(indptr.numel() - 1).repeat_interleave(indptr.diff())


def cut_weight(
    indptr: Tensor, indices: Tensor, assignment: Tensor, weights: Tensor | None = None
) -> int:
    """The weight of the edges between parts."""
    apart = assignment[rows(indptr)] != assignment[indices.long()]
    return int((apart if weights is None else apart * weights).sum()) // 2


def held(assignment: Tensor, weights: Tensor, num_parts: int) -> Tensor:
    """``[num_parts, num_constraints]``: the weights of each part."""
    out = torch.zeros(num_parts, weights.size(1), dtype=torch.int64)
    return out.index_add_(0, assignment.long(), weights)
