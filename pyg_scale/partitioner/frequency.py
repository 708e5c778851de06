"""Partitioning by sampling frequency: nodes go to the part whose batches sample them most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_scale import plugins
from pyg_scale.graph.topology import CSC, NodeType, Topology
from pyg_scale.partitioner.base import Partitioner, PartitionGraph, check_imbalance
from pyg_scale.partitioner.hotness import METHODS, sample_prob


class FrequencyPartitioner(Partitioner):
    """Places features by their sampling frequency, as GraphLearn-for-PyTorch does.

    Training nodes are divided first, by another method; those of a part are its seeds. For every
    part, each node gets the probability that sampling around them reaches it
    (:func:`~pyg_scale.partitioner.hotness.sample_prob`). Then each node goes to the part that
    samples it most, as long as there is room; nodes for which it matters most come first. Without
    training nodes, all nodes are seeds. It needs 4 bytes for each node and part.

    Args:
        num_neighbors: Neighbours per hop in training, -1 for all. Stored in the directory; a loader
            with others warns.
        cache_ratio: Share of the nodes of each type whose features every part should cache: nodes
            of other parts that it samples most. Written as lists, hottest first.
        batch_size: Seeds of a batch. ``None``: all seeds of a part, so that it counts if an epoch
            reaches a node.
        initial: The name of the method, with its defaults, that divides the training nodes and
            decides ties. GraphLearn-for-PyTorch uses ``"random"``.
        probabilities: ``method`` of :func:`~pyg_scale.partitioner.hotness.sample_prob`.
        max_imbalance: A part may hold this many times its fair share.

    Raises:
        ValueError: If an option is out of range.
        UnknownPluginError: If the initial method does not exist.
    """

    minimises_cut = True

    def __init__(
        self,
        *,
        num_neighbors: Sequence[int] = (15, 10, 5),
        cache_ratio: float = 0.0,
        batch_size: int | None = 1024,
        initial: str = "multilevel",
        probabilities: str = "propagate",
        max_imbalance: float = 1.1,
    ) -> None:
        if not 0 <= cache_ratio <= 1:
            raise ValueError(f"cache_ratio must be from 0 to 1 (got {cache_ratio!r})")
        if probabilities not in METHODS:
            known = ", ".join(map(repr, METHODS))
            raise ValueError(f"probabilities must be one of {known} (got {probabilities!r})")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 (got {batch_size})")
        check_imbalance(max_imbalance)
        if isinstance(num_neighbors, str) or any(
            isinstance(k, bool) or not isinstance(k, int) or k < -1 for k in num_neighbors
        ):
            raise ValueError(
                f"num_neighbors must be one number per hop, -1 for all (got {num_neighbors!r})"
            )
        self.num_neighbors = list(num_neighbors)
        self.cache_ratio = cache_ratio
        self.batch_size = batch_size
        self.initial = initial
        self.probabilities = probabilities
        self.max_imbalance = max_imbalance
        self.needs_sorted = plugins.get("partitioner", initial).needs_sorted

    def extra(self) -> dict[str, object]:
        """The ``num_neighbors`` that loaders should use."""
        return {"num_neighbors": self.num_neighbors}

    def assign(self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor) -> Tensor:
        """See :meth:`pyg_scale.partitioner.base.Partitioner.assign`."""
        return self.assign_and_cache(graph, num_parts, seed=seed, shares=shares)[0]

    def assign_and_cache(
        self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor
    ) -> tuple[Tensor, dict[NodeType, list[Tensor]]]:
        """See :meth:`pyg_scale.partitioner.base.Partitioner.assign_and_cache`."""
        start = plugins.get("partitioner", self.initial)()
        initial = start.assign(graph, num_parts, seed=seed, shares=shares).to(torch.int64)
        need = torch.empty(num_parts, graph.num_nodes, dtype=torch.float32)
        for part in range(num_parts):
            need[part] = self._probability(graph, initial == part, seed)
        assignment = place(need, graph.weights, self.capacity(graph, shares), initial)
        cache: dict[NodeType, list[Tensor]] = {}
        if self.cache_ratio:
            for node_type, (begin, end) in graph.offsets.items():
                cache[node_type] = [
                    self._cached(need[part, begin:end], assignment[begin:end] == part)
                    for part in range(num_parts)
                ]
        return assignment, cache

    def _probability(self, graph: PartitionGraph, mine: Tensor, seed: int) -> Tensor:
        """The frequency with which a part samples each node, over all types."""
        seeds = mine if graph.train is None else mine & graph.train
        topology, ranges = graph.topology, graph.offsets
        if topology is None:
            topology, ranges = _undirected(graph), {None: (0, graph.num_nodes)}
        ids = {name: seeds[begin:end].nonzero().view(-1) for name, (begin, end) in ranges.items()}
        found = sample_prob(
            topology,
            {name: nodes for name, nodes in ids.items() if nodes.numel()},
            self.num_neighbors,
            batch_size=self.batch_size,
            method=self.probabilities,
            seed=seed,
        )
        return torch.cat([found[name] for name in topology.node_types]).to(torch.float32)

    def _cached(self, need: Tensor, own: Tensor) -> Tensor:
        """The nodes of other parts that a part samples most, hottest first."""
        count = int(self.cache_ratio * need.numel())
        order = need.masked_fill(own, 0).argsort(descending=True, stable=True)[:count]
        return order[need[order] > 0]


def _undirected(graph: PartitionGraph) -> Topology:
    """The undirected graph as a topology, if the user's graph is not available."""
    return Topology(
        node_types=(None,),
        edge_types=(None,),
        num_nodes={None: graph.num_nodes},
        csc={None: CSC(graph.indptr, graph.indices)},
    )


def place(need: Tensor, weights: Tensor, capacity: Tensor, initial: Tensor) -> Tensor:
    """Assign nodes to parts; first those that lose most with their second choice.

    In each round, every remaining node requests the part that needs it most among those with room
    for it (ties go to its initial part, else to the first). Each part accepts requests, in order,
    up to the first node that does not fit. A node that fits nowhere goes to the part with the
    largest share of room left.

    Args:
        need: ``float32`` ``[num_parts, num_nodes]``.
        weights: ``int64`` ``[num_nodes, num_constraints]``, the room that nodes take.
        capacity: ``int64`` ``[num_parts, num_constraints]``.
        initial: ``int64`` ``[num_nodes]``, the part that wins ties.

    Returns:
        ``int32`` ``[num_nodes]``.
    """
    parts = need.size(0)
    out = initial.to(torch.int32).clone()
    top = need.topk(min(2, parts), dim=0).values
    left = (top[0] - top[-1]).argsort(descending=True, stable=True)
    room = capacity.clone()
    while left.numel():
        choice = _choices(need, weights, room, initial, left)
        lost = left[choice < 0]
        for node in lost.tolist():
            part = int((room / capacity.clamp(min=1)).amin(1).argmax())
            out[node] = part
            room[part] -= weights[node]
        left, choice = left[choice >= 0], choice[choice >= 0]
        taken = torch.zeros(left.numel(), dtype=torch.bool)
        for part in range(parts):
            asking = (choice == part).nonzero().view(-1)
            weight = weights[left[asking]]
            fits = ((weight.cumsum(0) <= room[part]) | (weight == 0)).all(1)
            fits = fits.to(torch.int64).cumprod(0).bool()
            mine = asking[fits]
            out[left[mine]] = part
            taken[mine] = True
            room[part] -= weight[fits].sum(0)
        left = left[~taken]
    return out


def _choices(need: Tensor, weights: Tensor, room: Tensor, initial: Tensor, left: Tensor) -> Tensor:
    """The part that each remaining node requests; -1 if it fits nowhere."""
    weight = weights[left]
    best = torch.full((left.numel(),), -1.0)
    choice = torch.full((left.numel(),), -1, dtype=torch.int64)
    for part in range(need.size(0)):
        mine, home = need[part, left], initial[left] == part
        fits = ((weight <= room[part]) | (weight == 0)).all(1)
        better = fits & ((mine > best) | ((mine == best) & home))
        best = torch.where(better, mine, best)
        choice = torch.where(better, part, choice)
    return choice
