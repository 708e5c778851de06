"""The model that benchmarks train."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import SAGEConv


class GraphSAGE(torch.nn.Module):
    """Three layers of mean aggregation.

    Args:
        in_channels: Columns of the features.
        hidden: Channels between layers.
        num_classes: Columns of the result.
    """

    def __init__(self, in_channels: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        sizes = [in_channels, hidden, hidden, num_classes]
        self.convs = torch.nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(sizes))

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        num_sampled_nodes: Sequence[int] | None = None,
        num_sampled_edges: Sequence[int] | None = None,
    ) -> Tensor:
        """Class scores ``[num_nodes, num_classes]``.

        Given what each hop of a batch added, a layer works on the nodes and edges that are still
        needed only, and the scores are those of the seeds.
        """
        for number, conv in enumerate(self.convs):
            if num_sampled_nodes is not None and num_sampled_edges is not None:
                hops = len(num_sampled_edges) - number
                edge_index = edge_index[:, : sum(num_sampled_edges[:hops])]
                x = x[: sum(num_sampled_nodes[: hops + 1])]
                x = conv((x, x[: sum(num_sampled_nodes[:hops])]), edge_index)
            else:
                x = conv(x, edge_index)
            if number < len(self.convs) - 1:
                x = F.relu(x)
        return x
