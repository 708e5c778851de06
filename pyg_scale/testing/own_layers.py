"""Layers as users of PyG write them: each is none of ``torch_geometric.nn.conv``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from pyg_scale.testing.layers import Example, featured

HEADS = 4


class _Own(MessagePassing):
    """A layer that maps features and adds its messages up."""

    def __init__(self, channels: int, maps: int = 1) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.lin = nn.Linear(channels, maps * channels, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """``[num_nodes, ...]``."""
        out: Tensor = self.propagate(edge_index, x=self.lin(x), edge_attr=edge_attr)
        return out


class AdditiveAttention(_Own):
    """Attention of a network of one layer on the sum of both ends and the edge, in heads."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.att = nn.Parameter(torch.linspace(-1, 1, channels).view(1, HEADS, channels // HEADS))

    def message(
        self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        """Weighted sources."""
        x_i, x_j, e = (x.view(-1, HEADS, x.size(-1) // HEADS) for x in (x_i, x_j, edge_attr))
        alpha = (F.leaky_relu(x_i + x_j + e, 0.2) * self.att).sum(dim=-1)
        return x_j * softmax(alpha, index, num_nodes=size_i).unsqueeze(-1)


class DotAttention(_Own):
    """Attention by products of destinations with the sum of sources and edges, in heads."""

    def message(
        self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        """Weighted sums of sources and edges."""
        x_i, x_j, e = (x.view(-1, HEADS, x.size(-1) // HEADS) for x in (x_i, x_j, edge_attr))
        alpha = (x_i * (x_j + e)).sum(dim=-1) / x_i.size(-1) ** 0.5
        return (x_j + e) * softmax(alpha, index, num_nodes=size_i).unsqueeze(-1)


class Kernel(_Own):
    """Sources, weighted by a Gaussian kernel of the distance of both ends."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        """Weighted sources."""
        distance = (x_i - x_j).square().sum(dim=-1, keepdim=True)
        return x_j * torch.exp(-distance / x_j.size(-1))


class Gates(_Own):
    """Half of a sum of maps of both ends, gated by the other half."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, maps=2)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        """Gated numbers."""
        gate, value = (x_i + x_j).chunk(2, dim=-1)
        return gate.sigmoid() * value


class SideBySide(_Own):
    """Features of edges beside those of sources."""

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        """Sources, then edges."""
        return torch.cat([x_j, edge_attr], dim=-1)


class Differences(_Own):
    """Sources beside their difference from the destination."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        """Positive numbers."""
        return torch.relu(torch.cat([x_j, x_j - x_i], dim=-1))


OWN: dict[str, Example] = {
    cls.__name__: Example(cls, featured)
    for cls in (AdditiveAttention, DotAttention, Kernel, Gates, SideBySide, Differences)
}
"""The layers by name."""
