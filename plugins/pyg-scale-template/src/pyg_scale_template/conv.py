"""A fused layer: LightGCN's convolution, which has no parameters."""

import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import Adj, OptTensor

from pyg_scale.nn import FusedConv
from pyg_scale.nn.conv.base import check_features, check_weight
from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.graph import edges_of, is_sparse
from pyg_scale.ops.aggregate import aggregate


class TemplateConv(FusedConv, torch_geometric.nn.LGConv):
    """PyG's ``LGConv``, without a message for every edge."""

    replaces = torch_geometric.nn.LGConv
    # The arguments of propagate(), which PyG would read from the source of a class of this name.
    propagate_type = {"x": Tensor, "edge_weight": OptTensor}  # noqa: RUF012

    def forward(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor = None) -> Tensor:
        """The signature is PyG's; ``run`` takes the fused path or, if necessary, PyG's."""
        return self.run(x, edge_index, edge_weight)

    def fused(self, x, edge_index, edge_weight=None):
        """The same result as PyG's. Raises NotFused, before any other work, for other calls."""
        check_features(x)
        if is_sparse(edge_index):
            raise NotFused("a sparse matrix")
        graph = edges_of(edge_index, x.size(0), x.size(0), self.flow)
        check_weight(edge_weight, graph.num_edges, x.dtype)
        if self.normalize:
            edge_index, edge_weight = gcn_norm(
                edge_index, edge_weight, x.size(0), False, False, self.flow, x.dtype
            )
        return aggregate(graph, x, edge_weight, "sum")
