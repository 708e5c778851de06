"""LADIES and FastGCN: a hop takes about as many nodes as are wanted, whatever they lead to.

Sources are chosen for the hop as a whole. Each is in it by itself, with a probability in proportion
to its squared column norm ``q(t)``, so that a hop has ``k`` sources on average (Poisson sampling:
"PLADIES" in Balin and Catalyurek, NeurIPS 2023, which varies less than draws with replacement). All
edges from these sources are taken. In integers, and thus the same wherever it is computed:

* an edge ``t -> s`` of weight ``w`` (see :class:`~pyg_scale.sampler.ImportanceSampler`; without
  weights, that of the mean) adds ``max(1, floor(w * w * 2**32))`` to ``q(t)``;
* the shares ``c(t)`` of the sources follow from ``q`` and ``k`` as those of weighted in-edges do in
  :mod:`pyg_scale.sampler.labor`: ``q * rate``, none above ``2**32``;
* a source is taken if its random number is below its share, as there.

In LADIES, ``q`` sums over the edges into the nodes that the hop expands, in FastGCN over all edges.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from pyg_scale.ops.layer_take import layer_shares, layer_take, layer_take_by, squares
from pyg_scale.sampler.choose import Ask, Picked
from pyg_scale.sampler.importance import CERTAIN, ImportanceSampler, degrees_of

_EDGES_AT_ONCE = 1 << 24


class Ladies(ImportanceSampler):
    """Samples about ``num_neighbors`` sources in each hop, among the neighbours of its nodes.

    The method of Zou et al.: "Layer-Dependent Importance Sampling for Training Deep and Large Graph
    Convolutional Networks", NeurIPS 2019, with independent draws. ``num_neighbors`` counts nodes
    of a hop, not in-edges of a node; -1 takes all::

        loader = NeighborLoader(data, [512, 512], neighbor_sampler=Ladies(weights="gcn"))

    Args:
        args: See :class:`~pyg_scale.sampler.NeighborSampler`, as for ``kwargs``.
        weights: See :class:`~pyg_scale.sampler.ImportanceSampler`, also for ``hops`` and errors.
        hops: See there.
        kwargs: See there.
    """

    can: ClassVar[frozenset[str]] = frozenset({"backward", "links"})

    @property
    def by_hop(self) -> bool:
        """See :attr:`ImportanceSampler.by_hop`."""
        return True

    def take(self, ask: Ask, every: Picked) -> Picked:
        """See :meth:`ImportanceSampler.take`."""
        if ask.num_neighbors < 0:
            share = torch.full(every.edge.shape, CERTAIN, dtype=torch.float64)
            return self.picked(every, torch.arange(every.edge.numel()), share)
        key = self.source_key(ask.key, ask.hop, ask.edge_type)
        return self.picked(every, *self.choose_sources(every, ask.num_neighbors, key))

    def choose_sources(self, every: Picked, k: int, key: int) -> tuple[Tensor, Tensor]:
        """The in-edges from the sources of a hop, see :func:`.layer_take`.

        Args:
            every: All in-edges of the hop.
            k: Sources that are expected, at least 0.
            key: The key of the numbers of sources.
        """
        graph = self.topology
        assert graph is not None
        theirs = self._degrees(every.neighbor) if self.weights == "gcn" else None
        num_nodes = graph.num_nodes[None]
        return layer_take(every.counts, every.neighbor, num_nodes, k, self.weights, key, theirs)

    def _degrees(self, node: Tensor) -> Tensor:
        assert self.topology is not None
        return degrees_of(self.topology, None, node)


class FastGCN(Ladies):
    """Samples about ``num_neighbors`` nodes of the graph for each hop, and the edges from them.

    The method of Chen, Ma, Xiao: "FastGCN: Fast Learning with Graph Convolutional Networks via
    Importance Sampling", ICLR 2018: probabilities are those of the whole graph, in proportion to
    the squared norms of its columns, with independent draws. Many of the nodes that are drawn are
    neighbours of none that is expanded; these are not in the batch.

    Args:
        args: See :class:`~pyg_scale.sampler.NeighborSampler`, as for ``kwargs``.
        weights: See :class:`~pyg_scale.sampler.ImportanceSampler`, also for ``hops`` and errors.
        hops: See there.
        kwargs: See there.

    Raises:
        NotImplementedError: If other ranks have parts of the graph.
    """

    @property
    def draws_by_node(self) -> bool:
        """See :class:`~pyg_scale.sampler.capabilities.DrawsByNode`."""
        return True

    def _attach(self, data: Any) -> None:
        super()._attach(data)
        self._norm = self.column_norms()
        self._shares: dict[int, Tensor] = {}  # of all nodes, by how many are expected

    def _check_supported(self) -> None:
        super()._check_supported()
        graph = self.topology
        assert graph is not None
        if graph.router is not None and graph.router.parts_here() is None:
            raise NotImplementedError(
                "FastGCN draws with the probabilities of the whole graph, but other ranks have "
                "parts of it; neighbor_sampler='ladies' and 'labor' need only the nodes of a hop"
            )

    def choose_sources(self, every: Picked, k: int, key: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Ladies.choose_sources`."""
        if k not in self._shares:
            self._shares[k] = layer_shares(self._norm, k)
        return layer_take_by(every.neighbor, self._shares[k], key)

    def column_norms(self) -> Tensor:
        """The squared norm of each node's column in fixed point, ``int64`` ``[num_nodes]``."""
        graph = self.topology
        assert graph is not None
        norm = torch.zeros(graph.num_nodes[None], dtype=torch.int64)
        here = None if graph.router is None else graph.router.parts_here()
        for csc in [graph.csc[None]] if here is None else here.csc[None]:
            degree = csc.indptr.diff()
            for begin in range(0, csc.num_edges, _EDGES_AT_ONCE):
                position = torch.arange(begin, min(begin + _EDGES_AT_ONCE, csc.num_edges))
                row = torch.searchsorted(csc.indptr, position, right=True) - 1
                source = csc.indices[position].to(torch.int64)
                theirs = self._degrees(source) if self.weights == "gcn" else None
                norm.index_add_(0, source, squares(self.weights, degree[row], theirs))
        return norm
