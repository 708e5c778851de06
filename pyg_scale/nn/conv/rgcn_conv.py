"""RGCNConv: all relations are reduced at once, without a message for every edge."""

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.typing import Adj, OptTensor

from pyg_scale.nn.aggregation import LINEAR, reductions
from pyg_scale.nn.conv.base import FusedConv, check_features, pair_of, scriptable
from pyg_scale.nn.fallback import RECORDED, SMALL, NotFused
from pyg_scale.nn.graph import derived, edges_of, is_sparse
from pyg_scale.nn.linear import apply_weight
from pyg_scale.nn.relations import group_relations, rows_of_relations
from pyg_scale.nn.small import reduce_small, small
from pyg_scale.ops.adjacency import Adjacency, recording
from pyg_scale.ops.aggregate import aggregate
from pyg_scale.ops.dense_product import covers

_DENSE = 2
"""Number of pairs of a destination and a relation for each edge up to which a row for every pair,
also for those without edges, is cheaper than a list of those with edges."""


class RGCNConv(FusedConv, torch_geometric.nn.RGCNConv):
    """PyG's :class:`torch_geometric.nn.RGCNConv` (Schlichtkrull et al., ESWC 2018), fused.

    Reductions of all relations are mapped by one product, if most pairs of a relation and a node
    have edges. Otherwise the tensor kept for the gradient has a row for each pair that has; PyG
    keeps one for every relation and node.
    """

    replaces = torch_geometric.nn.RGCNConv
    crossover = 250_000, 250_000
    by_edge = 2_000_000, 2_000_000
    propagate_type = {"x": Tensor, "edge_type_ptr": OptTensor}  # noqa: RUF012
    _forward_of_pyg = scriptable(torch_geometric.nn.RGCNConv)

    def forward(
        self,
        x: OptTensor | tuple[OptTensor, Tensor],
        edge_index: Adj,
        edge_type: OptTensor = None,
    ) -> Tensor:
        """See PyG. ``[num_dst, out_channels]``."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            out = self._forward_of_pyg(x, edge_index, edge_type)
        else:
            out = self.run(x, edge_index, edge_type)
        return out

    def __prepare_scriptable__(self) -> Any:
        """See :class:`FusedConv`."""
        # PyG's path adds this to the layer in its first call, which compiled code cannot do.
        if not hasattr(self, "_use_segment_matmul_heuristic_output"):
            self._use_segment_matmul_heuristic_output = False
        return super().__prepare_scriptable__()

    def message_channels(self, x: Tensor) -> int:
        """See :meth:`FusedConv.message_channels`."""
        # Grouping edges by relation takes as long as two channels.
        return (x.size(-1) if x.is_floating_point() else self.out_channels) - 2

    def fused_small(self, x, edge_index, edge_type=None):  # type: ignore[no-untyped-def]
        """See :attr:`FusedConv.fused_small`."""
        if self.num_blocks is not None or torch.is_autocast_enabled("cpu"):
            return self.fused(x, edge_index, edge_type)
        call = small(self, x, edge_index)
        dst, num_edges = call.dst, edge_index.size(1)
        check_features(dst)
        if dst is None or dst.dtype != call.src.dtype:
            raise NotFused(SMALL)
        self._check_channels(call.src)
        rows = dst.size(0) * self.num_relations
        if rows > _DENSE * num_edges or call.how not in LINEAR:
            return self.fused(x, edge_index, edge_type)
        self._check_types(edge_type, edge_index)
        pair = torch.add(edge_type, edge_index[1], alpha=self.num_relations)
        pairs = torch.stack([edge_index[0], pair])
        return self._mapped(reduce_small(call._replace(edge_index=pairs, num_dst=rows)), dst)

    def _weights(self):  # type: ignore[no-untyped-def]
        """The matrices of all relations."""
        if self.num_bases is None:
            return self.weight
        return (self.comp @ self.weight.view(self.num_bases, -1)).view(
            self.num_relations, self.in_channels_l, self.out_channels
        )

    def _mapped(self, rows, dst):  # type: ignore[no-untyped-def]
        """The result, of a reduction for every destination and relation, in this order.

        torch computes a product for each relation: of one with the channels of all, its gradients
        have other last bits for other numbers of threads.
        """
        weights = self._weights()
        matrix = weights.flatten(0, 1)
        joined = rows.view(dst.size(0), matrix.size(0))
        if covers(joined, matrix):
            return self._with_root(apply_weight(joined, matrix.t()), dst)
        size = dst.size(0), self.num_relations, self.in_channels_l
        out = None
        for part, matrix in zip(rows.view(size).unbind(1), weights.unbind(0)):
            out = part @ matrix if out is None else torch.addmm(out, part, matrix)
        return self._with_root(out, dst)

    def _with_root(self, out, dst):  # type: ignore[no-untyped-def]
        out = out.to(torch.promote_types(out.dtype, torch.get_default_dtype()))
        if self.root is not None:
            own = apply_weight(dst, self.root.t()) if dst.is_floating_point() else self.root[dst]
            out = out + own
        return out if self.bias is None else out + self.bias

    def fused(self, x, edge_index, edge_type=None):  # type: ignore[no-untyped-def]
        """See :meth:`FusedConv.fused`."""
        if recording():
            raise NotFused(f"{RECORDED}: the number of rows depends on the edges")
        src, dst = pair_of(x) if isinstance(x, tuple) else (x, x)
        if src is None:
            src = torch.arange(self.in_channels_l, device=self.weight.device)
            dst = src if dst is None else dst
        self._check(src, dst, edge_index, edge_type)
        how = reductions(self)
        if len(how) != 1:
            raise NotFused(f"aggr={self.aggr}")
        graph = edges_of(edge_index, src.size(0), dst.size(0))
        num_rows = dst.size(0) * self.num_relations
        dense = self.num_blocks is None and num_rows <= _DENSE * edge_index.size(1)
        if dense and src.is_floating_point():
            rows = derived(
                graph,
                ("rows of relations", self.num_relations),
                lambda: rows_of_relations(graph, edge_type, self.num_relations),
                of=edge_type,
            )
            return self._mapped(aggregate(rows, src, None, how[0]), dst)
        relations = derived(
            graph,
            ("relations", self.num_relations),
            lambda: group_relations(graph, edge_type, self.num_relations),
            of=edge_type,
        )
        weight = self._weights()
        if src.is_floating_point():
            rows = aggregate(relations.rows, src, None, how[0])
            rows = self._transform(rows, weight, relations.row_counts)
        else:  # indices of embeddings: each relation has its own table
            table = weight.reshape(-1, self.out_channels)
            offset = relations.edge_type.to(torch.int64) * self.in_channels_l
            entries = src[relations.rows.indices.to(torch.int64)] + offset
            of_table = Adjacency.of_checked(relations.rows.indptr, entries, table.size(0))
            rows = aggregate(of_table, table, None, how[0])
        return self._with_root(aggregate(relations.destinations, rows, None, "sum"), dst)

    def _transform(self, rows, weight, row_counts):  # type: ignore[no-untyped-def]
        """Rows ``[num_rows, in_channels]`` times the matrix of their relation."""
        pairs = list(zip(rows.split(row_counts), weight.unbind(0)))
        used = [pair for pair in pairs if pair[0].size(0)]
        parts = []
        for part, matrix in used or pairs[:1]:  # without edges, the gradient of weights is zero
            if self.num_blocks is not None:
                blocks = part.view(part.size(0), matrix.size(0), matrix.size(1))
                part = torch.einsum("abc,bcd->abd", blocks, matrix)
                parts.append(part.reshape(part.size(0), self.out_channels))
            else:
                parts.append(apply_weight(part, matrix.t()))
        return torch.cat(parts)

    def _check(self, src, dst, edge_index, edge_type):  # type: ignore[no-untyped-def]
        """Accept only input that the fused path covers."""
        if is_sparse(edge_index) or not isinstance(edge_index, Tensor):
            raise NotFused("relations of a sparse matrix")
        if self.flow != "source_to_target":
            raise NotFused("flow='target_to_source'")
        if not isinstance(src, Tensor) or not isinstance(dst, Tensor):
            raise NotFused("features of one side only")
        if src.is_floating_point() and dst.is_floating_point():
            check_features(src, dst)
            self._check_channels(src)
        elif src.dtype != torch.int64 or dst.dtype != torch.int64 or src.dim() != 1:
            raise NotFused(f"features are {src.dtype} and {dst.dtype}")
        elif self.num_blocks is not None:
            raise NotFused("num_blocks without features")
        elif src.numel() and not 0 <= int(src.min()) <= int(src.max()) < self.in_channels_l:
            raise NotFused("indices of nodes that do not exist")
        self._check_types(edge_type, edge_index)

    def _check_channels(self, src):  # type: ignore[no-untyped-def]
        if src.size(1) != self.in_channels_l:
            raise NotFused("features are not of shape [num_nodes, in_channels]")

    def _check_types(self, edge_type, edge_index):  # type: ignore[no-untyped-def]
        if edge_type is None or edge_type.shape != edge_index.shape[1:]:
            raise NotFused("edge_type is not of shape [num_edges]")
        if edge_type.is_floating_point() or edge_type.dtype == torch.bool:
            raise NotFused(f"edge_type is {edge_type.dtype}")
        if edge_type.numel():
            low, high = torch.aminmax(edge_type)
            if low < 0 or high >= self.num_relations:
                raise NotFused("edge_type has relations that do not exist")
