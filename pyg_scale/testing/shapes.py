"""Graphs with known best cuts, and with nodes numbered at random."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data


def path(num_nodes: int) -> Data:
    """A path: every node is joined to the next."""
    return _mixed(torch.stack([torch.arange(num_nodes - 1), torch.arange(1, num_nodes)]), num_nodes)


def star(num_nodes: int) -> Data:
    """A star: one node is joined to all others."""
    others = torch.arange(1, num_nodes)
    return _mixed(torch.stack([torch.zeros_like(others), others]), num_nodes)


def grid(side: int) -> Data:
    """A grid of ``side * side`` nodes, each joined to the next in its row and its column."""
    node = torch.arange(side * side).view(side, side)
    across = torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()])
    down = torch.stack([node[:-1].flatten(), node[1:].flatten()])
    return _mixed(torch.cat([across, down], dim=1), side * side)


def cliques(number: int, size: int, joined: bool = True) -> Data:
    """Cliques in a row, each joined to the next by one edge if ``joined``."""
    one = torch.combinations(torch.arange(size)).t()
    edges = [one + size * i for i in range(number)]
    if joined:
        edges += [torch.tensor([[size * i - 1], [size * i]]) for i in range(1, number)]
    return _mixed(torch.cat(edges, dim=1), number * size)


def blocks(number: int, size: int) -> Data:
    """A planted partition: on average ten neighbours in a node's own block, and two in others."""
    generator = torch.Generator().manual_seed(number * size)
    inside = torch.randint(size, (2, 5 * size * number), generator=generator)
    inside += size * torch.arange(number).repeat(5 * size)
    outside = torch.randint(number * size, (2, size * number), generator=generator)
    return _mixed(torch.cat([inside, outside], dim=1), number * size)


def _mixed(edge_index: Tensor, num_nodes: int) -> Data:
    number = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(num_nodes))
    return Data(edge_index=number[edge_index], num_nodes=num_nodes)
