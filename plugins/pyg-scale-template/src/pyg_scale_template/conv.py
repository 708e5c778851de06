"""A fused layer: LightGCN's convolution, which has no parameters."""

import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import Adj, OptTensor

from pyg_scale.nn import FusedConv
from pyg_scale.nn.conv.base import check_features, check_weight
from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.graph import edges_of, is_sparse
from pyg_scale.nn.small import reduce_small, small, small_weight
from pyg_scale.ops.aggregate import aggregate


class TemplateConv(FusedConv, torch_geometric.nn.LGConv):
    """PyG's ``LGConv``, without a message for every edge."""

    replaces = torch_geometric.nn.LGConv
    crossover = 400_000, 250_000  # edges times channels below which fused_small is faster
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

    def fused_small(self, x, edge_index, edge_weight=None):
        """The same result for inputs so small that grouping their edges does not pay."""
        call = small(self, x, edge_index)
        weight = small_weight(edge_weight, call)
        if self.normalize:
            if weight is not None and weight.requires_grad:
                edge_index, weight = gcn_norm(
                    edge_index, weight, x.size(0), False, False, self.flow, x.dtype
                )
                call = call._replace(edge_index=edge_index)
            else:
                call = call._replace(how="symmetric")
        return reduce_small(call, weight)
