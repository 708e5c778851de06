"""Samplers whose batches carry weights, with which what layers add up is unbiased."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology
from pyg_scale.ops.keys import SOURCE, edge_type_hash, fold
from pyg_scale.sampler.base import Sample, one_of
from pyg_scale.sampler.choose import Ask, Picked, choose
from pyg_scale.sampler.frontier import Chosen, Frontier
from pyg_scale.sampler.hop import HopSampler
from pyg_scale.sampler.native import NativeSampler

WEIGHTS: list[str | None] = [None, "sum", "mean", "gcn"]
"""Values of ``weights=``; their places are the numbers that compiled ops take."""

CERTAIN = float(1 << 32)
"""The share, as a number of ``2**32``, of what is always taken."""


class ImportanceSampler(NativeSampler):
    """Takes in-edges with known probabilities, and weighs them by the inverse (Horvitz-Thompson).

    An in-edge ``t -> s`` that is taken with probability ``p`` has the (``float32``) ``edge_weight``

    * ``1 / p`` with ``weights="sum"``: a weighted sum over sampled in-edges has the expectation of
      the sum over all in-edges;
    * ``1 / (d(s) * p)`` with ``"mean"``, where ``d`` is the number of in-edges: that of the mean;
    * ``1 / (sqrt(d(s) * d(t)) * p)`` with ``"gcn"``: that of a ``GCNConv`` that adds no self-loops;
      0 where ``d(t) = 0``, as there. Self-loops are edges like others: add them to the graph.

    The loader multiplies them with the ``edge_weight`` of the data, if there is one.

    Args:
        args: See :class:`~pyg_scale.sampler.NeighborSampler`, as for ``kwargs``.
        weights: One of these, or ``None`` for no weights.
        hops: ``"once"``: a node is expanded in the hop after it was reached, as in PyG.
            ``"layers"``: in every hop from then on; layers of a model then have edges of their
            own, see :func:`pyg_scale.sampler.edges_by_layer`.
        kwargs: See there.

    Raises:
        ValueError: If an option is none of these.
        NotImplementedError: If the arguments ask for times, ``disjoint``, ``replace`` or subgraphs
            that are not directional.
    """

    can: ClassVar[frozenset[str]] = frozenset()
    """The :data:`.CAPABILITIES` of a subclass, whatever the weights."""

    exact_count: ClassVar[bool] = False

    uniform: ClassVar[bool] = False

    def __init__(
        self, *args: Any, weights: str | None = "mean", hops: str = "once", **kwargs: Any
    ) -> None:
        if weights is not None:
            one_of("weights", weights, ("sum", "mean", "gcn"))
        self.weights = weights
        self.every_layer = one_of("hops", hops, ("once", "layers")) == "layers"
        super().__init__(*args, **kwargs)

    @property
    def by_hop(self) -> bool:
        """True if in-edges are chosen for a hop as a whole, by :meth:`take`."""
        return False

    @property
    def draws_by_node(self) -> bool:
        """See :class:`.DrawsByNode`; else other nodes of the hop count."""
        return not self.by_hop

    @property
    def supports(self) -> frozenset[str]:  # type: ignore[override]
        """The capabilities with these options; GCN's weights are for one edge type."""
        return self.can - {"hetero"} if self.weights == "gcn" else self.can

    def _check_supported(self) -> None:
        graph = self.topology
        assert graph is not None
        if self.weights == "gcn" and graph.is_hetero:
            raise NotImplementedError(
                "weights='gcn' needs one type of nodes and edges, as GCNConv does ('hetero'); "
                "weights='sum' and 'mean' are defined along each edge type"
            )
        super()._check_supported()
        if self.weights != "gcn":
            return
        if graph.router is not None and graph.router.parts_here() is None:
            raise NotImplementedError(
                "weights='gcn' needs the degrees of all neighbours, but other ranks have parts of "
                "the graph; weights='sum' and 'mean' do not"
            )

    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        """See :meth:`NeighborSampler.sample <pyg_scale.sampler.base.NeighborSampler.sample>`."""
        if self.by_hop:
            return self.weighed(HopSampler.sample(self, seed, seed_time, key))
        return self.weighed(super().sample(seed, seed_time, key))

    def expand(self, asks: Sequence[Ask]) -> list[Picked]:
        """See :meth:`HopSampler.expand <pyg_scale.sampler.hop.HopSampler.expand>`.

        For a choice by hop all in-edges of the nodes are read, wherever they are.
        """
        if not self.by_hop:
            return super().expand(asks)
        every = super().expand([ask._replace(num_neighbors=-1) for ask in asks])
        return [self.take(ask, picked) for ask, picked in zip(asks, every, strict=True)]

    def take(self, ask: Ask, every: Picked) -> Picked:
        """The in-edges that the nodes of a hop get.

        Args:
            ask: The nodes.
            every: All their in-edges.
        """
        raise NotImplementedError

    def source_key(self, key: int, hop: int, edge_type: EdgeType) -> int:
        """The key of the random numbers of sources in a hop along an edge type."""
        return fold(key, SOURCE, hop, edge_type_hash(edge_type))

    def weighed(self, sample: Sample) -> Sample:
        """A sample in plain torch with the weights that need degrees of both ends."""
        if self.weights is None:
            return sample
        none = {t: torch.empty(0) for t in sample.edge}  # without hops nothing gives weights
        weight = sample.edge_attrs.setdefault("edge_weight", none)
        if self.weights == "gcn" and weight[None].dtype == torch.float64:
            assert self.topology is not None
            degree = degrees_of(self.topology, None, sample.node[None]).to(torch.float64)
            root = (degree[sample.row[None]] * degree[sample.col[None]]).sqrt()
            value = torch.where(root > 0, weight[None] / root, 0)
            sample.edge_attrs["edge_weight"] = {None: value.to(torch.float32)}
        return sample

    def choose_plainly(self, csc: CSC, ask: Ask, place: Tensor | None) -> Picked:
        """:func:`~pyg_scale.sampler.choose.choose` with this sampler."""
        return choose(self, csc, ask, place, None)

    def chosen(self, frontier: Frontier, row: Tensor, position: Tensor, share: Tensor) -> Chosen:
        """In-edges that were taken, with what they weigh.

        Args:
            frontier: The nodes.
            row: See :class:`~pyg_scale.sampler.Chosen`.
            position: See there.
            share: Their probabilities as numbers of ``2**32``, ``float64`` ``[m]``.
        """
        return Chosen(row, position, self.weights_of(row, frontier.num_candidates, share) or None)

    def picked(self, every: Picked, taken: Tensor, share: Tensor) -> Picked:
        """Some of all in-edges of the nodes of a hop, with what they weigh.

        Args:
            every: All in-edges.
            taken: The places of those, rising, ``int64`` ``[m]``.
            share: Their probabilities as numbers of ``2**32``, ``float64`` ``[m]``.
        """
        counts = every.counts
        row = torch.searchsorted(counts.cumsum(0), taken, right=True)
        return Picked(
            torch.bincount(row, minlength=counts.numel()),
            every.neighbor[taken],
            every.edge[taken],
            self.weights_of(row, counts, share),
        )

    def weights_of(self, row: Tensor, degree: Tensor, share: Tensor) -> dict[str, Tensor]:
        """The extra tensors of edges that were taken.

        Args:
            row: The place of each edge's destination, ``int64`` ``[m]``.
            degree: Numbers of in-edges of destinations, ``int64`` ``[n]``.
            share: The probabilities of edges as numbers of ``2**32``, ``float64`` ``[m]``.
        """
        if self.weights is None:
            return {}
        weight = CERTAIN / share.to(torch.float64)
        if self.weights == "gcn":  # weighed() knows the degrees of both ends
            return {"edge_weight": weight}
        if self.weights == "mean":
            weight = weight / degree[row].to(torch.float64)
        return {"edge_weight": weight.to(torch.float32)}


def degrees_of(graph: Topology, edge_type: EdgeType, node: Tensor) -> Tensor:
    """Numbers of in-edges of nodes, ``int64`` ``[n]``; this process must read all parts."""
    node = node.to(torch.int64)
    if graph.router is None:
        indptr = graph.csc[edge_type].indptr
        return indptr[node + 1] - indptr[node]
    here = graph.router.parts_here()
    assert here is not None
    book = here.books[graph.expanded_type(edge_type)]
    part, place = book.part_of(node), book.local_of(node).to(torch.int64)
    out = torch.empty_like(node)
    for number, csc in enumerate(here.csc[edge_type]):
        mine = (part == number).nonzero().view(-1)
        out[mine] = csc.indptr[place[mine] + 1] - csc.indptr[place[mine]]
    return out


def edges_by_layer(batch: Any) -> list[tuple[Any, Any]]:
    """The edges of each layer of a model, for batches of a sampler with ``hops="layers"``.

    The first layer aggregates along the edges of the last hop, and so on. Each layer computes all
    nodes of the batch; those that the next one reads are right::

        x = batch.x
        for conv, (edge_index, edge_weight) in zip(convs, edges_by_layer(batch)):
            x = conv(x, edge_index, edge_weight).relu()

    Args:
        batch: A ``Data`` or ``HeteroData`` of a loader.

    Returns:
        ``edge_index`` ``[2, m]`` and ``edge_weight`` ``[m]`` of each hop, the last hop first;
        weights are ``None`` if there are none. In a heterogeneous batch, dictionaries by edge type.

    Raises:
        ValueError: If the batch does not say how many edges each hop has.
    """
    if isinstance(batch, HeteroData):
        by_type = {t: _hops(batch[t], str(t)) for t in batch.edge_types}
        number = max(map(len, by_type.values()), default=0)
        return [
            tuple({t: hops[i][part] for t, hops in by_type.items()} for part in (0, 1))  # type: ignore[misc]
            for i in range(number)
        ]
    return _hops(batch, "the batch")


def _hops(store: Any, name: str) -> list[tuple[Tensor, Tensor | None]]:
    number = store.num_sampled_edges if "num_sampled_edges" in store else None
    if number is None:
        raise ValueError(f"{name} has no num_sampled_edges: it is not of a sampler hop by hop")
    weight = store.edge_weight if "edge_weight" in store else None
    edges = store.edge_index.split(number, dim=1)
    weights = [None] * len(number) if weight is None else weight.split(number)
    return list(zip(edges, weights, strict=True))[::-1]
