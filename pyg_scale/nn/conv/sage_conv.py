"""SAGEConv: neighbours are reduced without a message for every edge."""

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch_geometric.typing import Adj, OptPairTensor, Size

from pyg_scale.nn.aggregation import bipartite, reductions
from pyg_scale.nn.conv.base import FusedConv, observed, pair_of, scriptable, unfusable, untouched
from pyg_scale.nn.linear import apply_linear
from pyg_scale.nn.mapped import mapped_with_root
from pyg_scale.nn.small import mapped_small, prepared_map, small


class SAGEConv(FusedConv, torch_geometric.nn.SAGEConv):
    """PyG's :class:`torch_geometric.nn.SAGEConv` (Hamilton et al., NeurIPS 2017), fused.

    ``lin_l`` is applied before a sum or a mean instead of after it if that is cheaper.
    """

    replaces = torch_geometric.nn.SAGEConv
    crossover = 450_000, 150_000
    reads_lazy = True
    propagate_type = {"x": OptPairTensor}  # noqa: RUF012
    _forward_of_pyg = scriptable(torch_geometric.nn.SAGEConv)

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
        how = reductions(self)
        graph, weight = bipartite(self, edge_index, (src, dst), None, size, sparse_values=False)
        if self.project:
            src = apply_linear(self.lin, src).relu()
        root = self.lin_r if self.root_weight else None
        out = mapped_with_root(self, self.lin_l, root, graph, (src, dst), weight, how)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def fused_small(self, x, edge_index, size=None):  # type: ignore[no-untyped-def]
        """See :attr:`FusedConv.fused_small`."""
        call = small(self, x, edge_index, size)
        if self.project:
            call = call._replace(src=apply_linear(self.lin, call.src).relu())
        out = mapped_small(call, None, self.lin_l, self.lin_r if self.root_weight else None)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def prepared(self):  # type: ignore[no-untyped-def]
        """See :meth:`FusedConv.prepared`."""
        if not untouched(self, SAGEConv):  # another forward than this class's
            return None
        root = self.lin_r if self.root_weight else None
        compute = prepared_map(self, self.lin_l, root)
        if compute is None or self.project or self.normalize or unfusable(self) is not None:
            return None

        def run(src: Tensor, dst: Tensor, edge_index: Tensor) -> Tensor:
            if self._is_small(self.crossover, src, edge_index) and observed(self) is None:
                out: Tensor | None = compute(src, dst, edge_index)
                if out is not None:
                    return out
            return self((src, dst), edge_index)

        return run
