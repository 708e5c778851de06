"""GCNConv: normalised edges are kept, and neighbours summed without a message for every edge."""

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import Adj, OptTensor, SparseTensor

from pyg_scale.nn.aggregation import movable, product_first, reduce_neighbors, reductions
from pyg_scale.nn.conv.base import FusedConv, check_features, check_weight, scriptable
from pyg_scale.nn.fallback import SMALL, NotFused
from pyg_scale.nn.graph import edges_of, edges_of_sparse, is_sparse
from pyg_scale.nn.linear import apply_linear
from pyg_scale.nn.loops import gcn_edges, gcn_edges_at_once, gcn_edges_in_a_trace, scaled_weights
from pyg_scale.nn.small import Small, reduce_small, small, small_weight
from pyg_scale.ops.adjacency import grouped_at_once, recording


class GCNConv(FusedConv, torch_geometric.nn.GCNConv):
    """PyG's :class:`torch_geometric.nn.GCNConv` (Kipf, Welling, ICLR 2017), fused.

    The normalisation is kept with the edges, while they and their weights live and are not changed.
    ``lin`` is applied after the sum instead of before it if that is cheaper.
    """

    replaces = torch_geometric.nn.GCNConv
    crossover = 300_000, 160_000
    by_edge = 1_500_000, 1_500_000
    propagate_type = {"x": Tensor, "edge_weight": OptTensor}  # noqa: RUF012
    _forward_of_pyg = scriptable(torch_geometric.nn.GCNConv)

    def forward(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor = None) -> Tensor:
        """See PyG. ``[num_nodes, out_channels]``."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            out = self._forward_of_pyg(x, edge_index, edge_weight)
        else:
            out = self.run(x, edge_index, edge_weight)
        return out

    def message_channels(self, x: Tensor) -> int:
        """See :meth:`FusedConv.message_channels`."""
        return self.out_channels

    def fused(self, x, edge_index, edge_weight=None):  # type: ignore[no-untyped-def]
        """See :meth:`FusedConv.fused`."""
        check_features(x)
        if self.node_dim not in (-2, 0):
            raise NotFused("node_dim")
        how = reductions(self)
        graph, weight = self._edges(x, edge_index, edge_weight)
        # In a trace and on CUDA there may be one row more: replaced self-loops lead to it.
        size = x.size(0)
        if (
            self.lin.bias is None
            and movable(self.lin, how)
            and not product_first(self.lin, graph, x)
        ):
            out = apply_linear(self.lin, reduce_neighbors(self, graph, x, weight, how)[:size])
        else:
            out = reduce_neighbors(self, graph, apply_linear(self.lin, x), weight, how)[:size]
        return out if self.bias is None else out + self.bias

    def fused_small(self, x, edge_index, edge_weight=None):  # type: ignore[no-untyped-def]
        """See :attr:`FusedConv.fused_small`."""
        if not isinstance(x, Tensor) or torch.is_autocast_enabled("cpu"):
            raise NotFused(SMALL)
        call = small(self, x, edge_index)
        weight = small_weight(edge_weight, call)
        if call.how != "sum":
            raise NotFused(SMALL)
        how, size, loop = "sum", call.num_dst, None
        if self.normalize:
            if self.cached or self._cached_edge_index is not None:
                raise NotFused(SMALL)
            if weight is None or not (self.improved or weight.requires_grad):
                how = "gcn" if self.add_self_loops else "symmetric"
            else:
                options = self.improved, self.add_self_loops
                weight, loop = scaled_weights(edge_index, weight, size, *options)
        x = apply_linear(self.lin, x)
        out = reduce_small(Small(x, None, edge_index, size, how), weight)
        if loop is not None:
            out = torch.addcmul(out, x, loop.view(-1, 1))
        return out if self.bias is None else out + self.bias

    def _edges(self, x, edge_index, edge_weight):  # type: ignore[no-untyped-def]
        """The edges to multiply with, and their weights by edge id."""
        if is_sparse(edge_index):
            if self.flow == "target_to_source":
                raise NotFused("a sparse matrix with flow='target_to_source'")
            graph, value = edges_of_sparse(self._normalized(x, edge_index, None)[0], x.size(0))
            if value is not None and (value.dim() != 1 or value.dtype != x.dtype):
                raise NotFused("the values of the sparse matrix do not fit the features")
            return graph, value
        if not isinstance(edge_index, Tensor):
            raise NotFused(f"edge_index is a {type(edge_index).__name__}")
        size = x.size(0)
        kept = self.normalize and (self.cached or self._cached_edge_index is not None)
        if isinstance(edge_index, EdgeIndex) and not {
            edge_index.num_rows,
            edge_index.num_cols,
        } <= {None, size}:
            raise NotFused("the EdgeIndex is of another size than the features")
        if not kept:
            if (
                self.normalize
                and self.add_self_loops
                and edge_weight is None
                and edge_index.is_cuda
                and not recording()
                and grouped_at_once(edge_index)
            ):
                return gcn_edges_at_once(edge_index, size, self.flow, x.dtype)
            graph = edges_of(edge_index, size, size, self.flow)
            check_weight(edge_weight, graph.num_edges, x.dtype)
            if not self.normalize:
                return graph, edge_weight
            options = self.improved, self.add_self_loops, x.dtype
            if recording():
                flow = self.flow
                return gcn_edges_in_a_trace(edge_index, edge_weight, size, flow, *options)
            return gcn_edges(graph, edge_index, edge_weight, *options)
        edge_index, edge_weight = self._normalized(x, edge_index, edge_weight)
        graph = edges_of(edge_index, size, size, self.flow)
        check_weight(edge_weight, graph.num_edges, x.dtype)
        return graph, edge_weight

    def _normalized(self, x, edge_index, edge_weight):  # type: ignore[no-untyped-def]
        """The result of PyG's ``gcn_norm``, kept as PyG keeps it if ``cached``."""
        if not self.normalize:
            return edge_index, edge_weight
        name = "_cached_adj_t" if isinstance(edge_index, SparseTensor) else "_cached_edge_index"
        kept = getattr(self, name)
        if kept is None:
            options = self.improved, self.add_self_loops, self.flow, x.dtype
            kept = gcn_norm(edge_index, edge_weight, x.size(0), *options)
            if self.cached:
                setattr(self, name, kept)
        return kept if isinstance(kept, tuple) else (kept, None)
