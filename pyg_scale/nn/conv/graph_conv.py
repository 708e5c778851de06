"""GraphConv: neighbours are weighted and reduced without a message for every edge."""

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size

from pyg_scale.nn.aggregation import bipartite, reductions
from pyg_scale.nn.conv.base import FusedConv, pair_of, scriptable
from pyg_scale.nn.mapped import mapped_with_root
from pyg_scale.nn.small import mapped_small, small, small_weight


class GraphConv(FusedConv, torch_geometric.nn.GraphConv):
    """PyG's :class:`torch_geometric.nn.GraphConv` (Morris et al., AAAI 2019), fused.

    ``lin_rel`` is applied before a sum or a mean instead of after it if that is cheaper.
    """

    replaces = torch_geometric.nn.GraphConv
    crossover = 550_000, 150_000
    reads_lazy = True
    propagate_type = {"x": OptPairTensor, "edge_weight": OptTensor}  # noqa: RUF012
    _forward_of_pyg = scriptable(torch_geometric.nn.GraphConv)

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj,
        edge_weight: OptTensor = None,
        size: Size = None,
    ) -> Tensor:
        """See PyG. ``[num_dst, out_channels]``."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            out = self._forward_of_pyg(x, edge_index, edge_weight, size)
        else:
            out = self.run(x, edge_index, edge_weight, size)
        return out

    def fused(self, x, edge_index, edge_weight=None, size=None):  # type: ignore[no-untyped-def]
        """See :meth:`FusedConv.fused`."""
        src, dst = pair_of(x)
        how = reductions(self)
        graph, weight = bipartite(
            self, edge_index, (src, dst), edge_weight, size, sparse_values=True
        )
        x = src, dst
        return mapped_with_root(self, self.lin_rel, self.lin_root, graph, x, weight, how)

    def fused_small(self, x, edge_index, edge_weight=None, size=None):  # type: ignore[no-untyped-def]
        """See :attr:`FusedConv.fused_small`."""
        call = small(self, x, edge_index, size)
        return mapped_small(call, small_weight(edge_weight, call), self.lin_rel, self.lin_root)
