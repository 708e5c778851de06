"""Batches of subgraphs among the nodes of the largest personalised PageRank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType
from pyg_scale.ops import library
from pyg_scale.ops.ppr import ppr as ppr_op
from pyg_scale.sampler.base import NeighborSampler, Sample
from pyg_scale.sampler.pagerank import check_numbers
from pyg_scale.sampler.subgraph import edges_among
from pyg_scale.sampler.walk_graph import as_data, integer, walk_graph
from pyg_scale.store.topology import topology_of


class PPRSampler(NeighborSampler):
    """Takes the best nodes for each seed, and all edges among them.

    Every seed has a subgraph of its own, as in Zeng et al.: "Decoupling the depth and scope of
    graph neural networks" (shaDow-GNN), NeurIPS 2021: itself, and the ``k`` other nodes of the
    largest personalised PageRank, see :func:`pyg_scale.sampler.ppr`. Nothing is drawn. A batch has
    ``batch``, the seed to which each node belongs, and ``score``, its rank (``float64``)::

        sampler = PPRSampler(data, k=32)
        loader = pyg_scale.loader.NodeLoader(data, sampler, input_nodes=data.train_mask)

    Args:
        data: ``Data`` or ``(FeatureStore, GraphStore)``, homogeneous.
        k: Number of nodes for each seed, besides itself, if so many have a score.
        alpha: The probability that a walk ends at a step.
        eps: How exact the scores are.

    Raises:
        TypeError: If one of them is no number.
        ValueError: If ``k``, ``alpha`` or ``eps`` is out of range.
        NotImplementedError: If the graph has several types, or other processes have parts of it.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"disjoint"})

    uniform = False

    exact_count = False

    def __init__(self, data: Any, k: int, alpha: float = 0.15, eps: float = 1e-4):
        super().__init__(disjoint=True)
        check_numbers(alpha, eps)
        graph = topology_of(data)
        if graph.is_hetero:
            raise NotImplementedError(
                "PPRSampler needs one type of nodes and edges; pyg_scale.sampler.ppr ranks the "
                "nodes of several"
            )
        self._check_reach(graph)
        self.topology, self.k, self.alpha, self.eps = graph, integer("k", k), alpha, eps
        _, owner = as_data(data, None)
        self._csc = walk_graph(graph, owner, "forward").csc
        self._rank(torch.empty(0, dtype=torch.int64))  # refuses wrong arguments

    def _rank(self, seed: Tensor) -> Any:
        csc = self._csc
        if self.k < 1:
            raise ValueError(f"k must be at least 1 (got {self.k})")
        number = min(self.k, csc.indptr.numel() - 1) + 1  # one of them may be the seed
        return ppr_op(csc.indptr, csc.indices, seed, number, alpha=self.alpha, eps=self.eps)

    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        """See :meth:`NeighborSampler.sample <pyg_scale.sampler.base.NeighborSampler.sample>`."""
        graph = self.topology
        assert graph is not None
        if not library.compiled():
            library.warn_plain_path(type(self).__name__)
        first = seed[None].to(torch.int64).contiguous()
        found = self._rank(first)
        ranked, score = found.node[:, 0], found.score[:, 0]
        own = ranked == first[:, None]
        other = (ranked >= 0) & ~own
        other &= other.cumsum(1) <= self.k
        node = torch.cat([first, ranked[other]])
        batch = torch.cat([torch.arange(first.numel()), other.nonzero()[:, 0]])
        value = torch.cat([score.masked_fill(~own, 0).sum(1), score[other]])
        row, col, edge = self._edges(node, batch)
        dtype = graph.index_dtype
        return Sample(
            node={None: node.to(dtype)},
            row={None: row.to(dtype)},
            col={None: col.to(dtype)},
            edge={None: edge},
            batch={None: batch},
            node_attrs={"score": {None: value}},
        )

    def _edges(self, node: Tensor, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All edges among the nodes of a seed, by (column, edge id)."""
        assert self.topology is not None
        csc, size = self._csc, self.topology.num_nodes[None]
        begin = csc.indptr[node]
        degree = csc.indptr[node + 1] - begin
        col = torch.arange(node.numel()).repeat_interleave(degree)
        before = degree.cumsum(0) - degree
        position = torch.arange(col.numel()) + (begin - before)[col]
        identity, order = (batch * size + node).sort()
        wanted = batch[col] * size + csc.indices[position].to(torch.int64)
        at = torch.searchsorted(identity, wanted).clamp(max=max(identity.numel() - 1, 0))
        row = torch.where(identity[at] == wanted, order[at], -1)
        return edges_among(row, col, csc.original_id(position))
