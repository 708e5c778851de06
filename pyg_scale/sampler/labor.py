"""LABOR: nodes draw with the random numbers of their neighbours, and so take the same ones.

The method of Balin and Catalyurek: "Layer-Neighbor Sampling -- Defusing Neighborhood Explosion in
GNNs", NeurIPS 2023. In the notation of :mod:`pyg_scale.ops.keys`, with the key ``K`` of the batch,
hop ``h`` and the hash ``r`` of the edge type, a source ``t`` has the number

    R(t) = source_number(fold(K, 25, h, r), t)   32 bits; h is 0 if layers depend on each other

and a node takes the in-edges whose sources' numbers are below a share ``c`` of ``2**32``:

* all in-edges, ``c = 2**32``, if ``k < 0`` or there are no more than ``k``;
* without weights ``c = ceil(k * 2**32 / d)``, where ``d`` is the number of its in-edges;
* with integer weights ``q``, in float64, ``rate = k * 2**32 / sum(q)``. In-edges with
  ``q * rate >= 2**32`` are certain: ``c = 2**32``. They leave ``k`` and the sum, and this is
  repeated until there are no more of them. Of the others,
  ``c = max(1, ceil(q * rate))``, and 0 where ``q = 0``.

With ``iterations`` (LABOR-i, ``LABOR-*``) shares ``c`` are those of the whole hop: sources that
many nodes of the hop want get more, so that fewer are expected, while sums vary as much as before;
see :mod:`pyg_scale.ops.labor_take`.

With ``batch_dependency=b``, batch number ``g`` of all epochs has ``K = fold(0, seed, 25, g // b)``.
A source with ``source_number(fold(k, 1), t) < ((g % b) << 32) // b``, where ``k`` is the key of its
number, has the number of the next ``K`` already. So each node gets a new number once in ``b``
batches, and at every batch numbers are uniform and independent between nodes.

The probability of an in-edge is thus exactly ``c / 2**32``, and the weights of
:class:`ImportanceSampler <pyg_scale.sampler.importance.ImportanceSampler>` are exact.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyg_scale.graph.topology import CSC, NodeType
from pyg_scale.ops.keys import SOURCE, fold, source_number
from pyg_scale.ops.labor_take import CONVERGED, MOST_ROUNDS, labor_take
from pyg_scale.ops.layer_take import fill
from pyg_scale.ops.sample import SourceDraws
from pyg_scale.sampler.base import Sample, flag
from pyg_scale.sampler.choose import Ask, Picked
from pyg_scale.sampler.frontier import Chosen, Frontier
from pyg_scale.sampler.importance import CERTAIN, WEIGHTS, ImportanceSampler
from pyg_scale.sampler.walk_graph import integer


class Labor(ImportanceSampler):
    """Samples about ``num_neighbors`` in-edges of every node, from as few sources as possible.

    Nodes of a hop share random numbers: what one takes, others are likely to take too. A batch has
    fewer nodes than with ``"native"``, and each node the same expected number of in-edges. Batches
    carry ``edge_weight``, with which sums over sampled in-edges are unbiased::

        loader = NeighborLoader(data, [15, 10, 5], neighbor_sampler=Labor(weights="mean"))
        for batch in loader:
            x = conv(batch.x, batch.edge_index, batch.edge_weight)  # GraphConv(aggr="add")

    Draws of a node depend on its in-edges and the key of the batch alone, so batches are the same
    for any number of workers, ranks and parts.

    Args:
        args: See :class:`~pyg_scale.sampler.NeighborSampler`, as for ``kwargs``.
        weights: The sum that the weights estimate without bias: ``"sum"``, ``"mean"``, ``"gcn"``,
            or ``None`` for no weights; see :class:`~pyg_scale.sampler.ImportanceSampler`.
        layer_dependency: If True, a node has the same random number in all hops, so that hops take
            the same nodes. Fewer nodes again, while layers are no longer independent.
        batch_dependency: The number of batches within which every node gets a new random number,
            each at a batch of its own. Batches that follow each other then share nodes, so that a
            cache reads fewer rows. With 1, batches are independent. More is for node loaders with
            a ``seed=``.
        iterations: How often probabilities are refined for the hop as a whole, so that fewer
            sources are expected at the same variance: 0 (LABOR-0), a number ``i`` (LABOR-i), or
            ``"*"`` (``LABOR-*``): until a round gains less than one part in 10,000, at most 100. A
            hop then reads all in-edges of its nodes, and a node gets ``num_neighbors`` or a few
            more. Without ``weight_attr=``.
        hops: ``"once"`` or ``"layers"``, as LABOR is defined; see there.
        kwargs: See there.

    Raises:
        ValueError: If an option is none of these.
        TypeError: If a flag is no bool, or a number no integer.
        NotImplementedError: If the arguments ask for times, ``disjoint``, ``replace`` or subgraphs
            that are not directional.
    """

    can: ClassVar[frozenset[str]] = frozenset({"hetero", "weighted", "backward", "links"})

    def __init__(
        self,
        *args: Any,
        weights: str | None = "mean",
        layer_dependency: bool = False,
        batch_dependency: int = 1,
        iterations: int | str = 0,
        hops: str = "once",
        **kwargs: Any,
    ) -> None:
        self.layer_dependency = flag("layer_dependency", layer_dependency)
        self.batch_dependency = integer("batch_dependency", batch_dependency)
        if not 1 <= self.batch_dependency < 2**31:
            raise ValueError(
                f"batch_dependency must be at least 1, and below 2**31 (got {batch_dependency})"
            )
        self.iterations = CONVERGED if iterations == "*" else _rounds(iterations)
        self._turn: list[int] = []  # key, next key, and how many nodes have numbers of that
        super().__init__(*args, weights=weights, hops=hops, **kwargs)

    @property
    def source_draws(self) -> SourceDraws:
        """See :attr:`NativeSampler.source_draws`."""
        draws = SourceDraws(self.layer_dependency, WEIGHTS.index(self.weights), self.every_layer)
        return (
            draws._replace(next_key=self._turn[1], renewed=self._turn[2]) if self._turn else draws
        )

    @property
    def by_hop(self) -> bool:
        """See :attr:`ImportanceSampler.by_hop`."""
        return self.iterations != 0

    @property
    def supports(self) -> frozenset[str]:  # type: ignore[override]
        """The capabilities with these options.

        Links have no batches that depend on each other, refined probabilities no weights.
        """
        without = {"links"} if self.batch_dependency > 1 else set()
        return super().supports - without - ({"weighted"} if self.by_hop else set())

    def at_step(self, seed: int, step: int) -> Labor:
        """See :class:`~pyg_scale.sampler.capabilities.FollowsSteps`."""
        number, of_batch = divmod(step, self.batch_dependency)
        placed = copy.copy(self)
        placed._turn = [
            fold(0, seed, SOURCE, number),
            fold(0, seed, SOURCE, number + 1),
            (of_batch << 32) // self.batch_dependency,
        ]
        return placed

    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        """See :meth:`NeighborSampler.sample <pyg_scale.sampler.base.NeighborSampler.sample>`.

        Raises:
            ValueError: If ``batch_dependency`` is more than 1, and :meth:`at_step` was not called.
        """
        if self.batch_dependency > 1 and not self._turn:
            raise ValueError(
                f"batch_dependency={self.batch_dependency} needs to know where a batch stands: "
                "give the sampler to a node loader of pyg_scale.loader, or call at_step()"
            )
        return super().sample(seed, seed_time, self._turn[0] if self._turn else key)

    def source_key(self, key: int, hop: int, edge_type: Any) -> int:
        """See :meth:`ImportanceSampler.source_key`."""
        return super().source_key(key, 0 if self.layer_dependency else hop, edge_type)

    def take(self, ask: Ask, every: Picked) -> Picked:
        """See :meth:`ImportanceSampler.take`."""
        if ask.num_neighbors < 0:
            share = torch.full(every.edge.shape, CERTAIN, dtype=torch.float64)
            return self.picked(every, torch.arange(every.edge.numel()), share)
        graph, draws = self.topology, self.source_draws
        assert graph is not None
        taken, share = labor_take(
            every.counts,
            every.neighbor,
            graph.num_nodes[graph.neighbor_type(ask.edge_type)],
            min(ask.num_neighbors, 2**31 - 1),
            self.iterations,
            self.source_key(ask.key, ask.hop, ask.edge_type),
            draws._replace(next_key=self.source_key(draws.next_key, ask.hop, ask.edge_type)),
        )
        return self.picked(every, taken, share)

    def pick(self, frontier: Frontier, k: int) -> Chosen:
        """See :meth:`HopSampler.pick <pyg_scale.sampler.hop.HopSampler.pick>`."""
        row, position = frontier.candidates()
        share = shares(frontier, row, position, k)
        key = self.source_key(frontier.batch_key, frontier.hop, frontier.edge_type)
        source = frontier.csc.indices[position]
        number = source_number(key, source)
        if self._turn and self._turn[2]:
            later = self.source_key(self._turn[1], frontier.hop, frontier.edge_type)
            has_later = source_number(fold(key, 1), source) < self._turn[2]
            number = torch.where(has_later, source_number(later, source), number)
        taken = number.to(torch.float64) < share
        return self.chosen(frontier, row[taken], position[taken], share[taken])

    def pick_all(self, frontier: Frontier) -> Chosen:
        """See :meth:`HopSampler.pick_all <pyg_scale.sampler.hop.HopSampler.pick_all>`."""
        if self.by_hop:  # take() weighs
            return super().pick_all(frontier)
        row, position = frontier.candidates()
        return self.chosen(frontier, row, position, torch.full(row.shape, CERTAIN))

    def choose(
        self,
        csc: CSC,
        ask: Ask,
        place: Tensor | None,
        neighbor_time: Tensor | None,
        num_neighbor_nodes: int,
    ) -> Picked:
        """See :meth:`HopSampler.choose <pyg_scale.sampler.hop.HopSampler.choose>`."""
        if self.weights == "gcn" and not self.by_hop:
            return self.choose_plainly(csc, ask, place)
        return super().choose(csc, ask, place, neighbor_time, num_neighbor_nodes)

    def hop_draws(self, ask: Ask) -> tuple[int, SourceDraws | None]:
        """See :meth:`NativeSampler.hop_draws`."""
        if self.by_hop:  # all in-edges
            return super().hop_draws(ask)
        draws = self.source_draws
        later = self.source_key(draws.next_key, ask.hop, ask.edge_type)
        key = self.source_key(ask.key, ask.hop, ask.edge_type)
        return key, draws._replace(next_key=later)


def _rounds(iterations: Any) -> int:
    number = integer("iterations", iterations)
    if not 0 <= number <= MOST_ROUNDS:
        raise ValueError(
            "iterations must be '*' (until it converges), or at least 0 and at most "
            f"{MOST_ROUNDS} (got {iterations!r})"
        )
    return number


def shares(frontier: Frontier, row: Tensor, position: Tensor, k: int) -> Tensor:
    """Probabilities of candidates as numbers of ``2**32``, ``float64`` ``[m]``; see above.

    Args:
        frontier: The nodes.
        row: The row of each candidate, ``int64`` ``[m]``, all candidates in order.
        position: Its position, ``int64`` ``[m]``.
        k: How many in-edges are wanted, at least 0.
    """
    degree = frontier.num_candidates
    if frontier.csc.weight_prefix is None:
        size = degree.clamp(min=1)
        share = ((min(k, 2**31) << 32) + size - 1) // size
        return share.clamp(max=1 << 32).to(torch.float64)[row]
    prefix = frontier.csc.weight_prefix
    weight = prefix[position]
    weight = weight - torch.where(position == frontier.first[row], 0, prefix[position - 1])
    return fill(weight, row, torch.full_like(degree, k), (degree <= k)[row])
