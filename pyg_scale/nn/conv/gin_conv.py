"""GINConv: neighbours are summed without a message for every edge."""

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.typing import Adj, OptPairTensor, Size

from pyg_scale.nn.aggregation import LINEAR, bipartite, reductions
from pyg_scale.nn.conv.base import FusedConv, pair_of, scriptable
from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.linear import apply_linear
from pyg_scale.nn.mapped import summed_with_own
from pyg_scale.nn.small import reduce_small, small


class GINConv(FusedConv, torch_geometric.nn.GINConv):
    """PyG's :class:`torch_geometric.nn.GINConv` (Xu et al., ICLR 2019), fused."""

    replaces = torch_geometric.nn.GINConv
    crossover = 350_000, 200_000
    by_edge = 2_000_000, 2_000_000
    reads_lazy = True
    propagate_type = {"x": OptPairTensor}  # noqa: RUF012
    _forward_of_pyg = scriptable(torch_geometric.nn.GINConv)

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj,
        size: Size = None,
    ) -> Tensor:
        """See PyG. ``[num_dst, out_channels]``."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            out = self._forward_of_pyg(x, edge_index, size)
        else:
            out = self.run(x, edge_index, size)
        return out

    def fused(self, x, edge_index, size=None):  # type: ignore[no-untyped-def]
        """See :meth:`FusedConv.fused`."""
        src, dst = pair_of(x)
        self._check_eps(src)
        how = reductions(self)
        graph, weight = bipartite(self, edge_index, (src, dst), None, size, sparse_values=False)
        out = summed_with_own(self, graph, (src, dst), weight, how, 1 + self.eps)
        return apply_linear(self.nn, out)

    def fused_small(self, x, edge_index, size=None):  # type: ignore[no-untyped-def]
        """See :attr:`FusedConv.fused_small`."""
        call = small(self, x, edge_index, size)
        src, dst, eps = call.src, call.dst, self.eps
        self._check_eps(src)
        if dst is src and call.how in LINEAR and not eps.requires_grad:
            return apply_linear(self.nn, reduce_small(call, own=1 + eps.item()))
        out = reduce_small(call)
        return apply_linear(self.nn, out if dst is None else out + (1 + eps) * dst)

    def _check_eps(self, src):  # type: ignore[no-untyped-def]
        """Accept only an ``eps`` that keeps the type of the features."""
        kind = self.eps.dtype
        if not isinstance(src, Tensor) or kind == src.dtype:
            return
        if torch.promote_types(kind, src.dtype) != src.dtype:
            raise NotFused(f"eps is {kind}, the features are {src.dtype}")
