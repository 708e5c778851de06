"""Multilevel partitioning: coarsen, partition the smallest graph, refine on the way back.

This is the scheme of METIS (Karypis and Kumar: "A fast and high quality multilevel scheme for
partitioning irregular graphs", SIAM J. Sci. Comput. 1998), with coarsening by clusters rather than
by matchings, which suits graphs with hubs (Meyerhenke, Sanders, Schulz, SEA 2014). The steps are
separate ops, each with a meaning in plain Python: :mod:`pyg_scale.ops.cluster_nodes`,
:mod:`pyg_scale.ops.contract_graph`, :mod:`pyg_scale.ops.grow_part` and
:mod:`pyg_scale.ops.refine_partition`.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.ops import keys
from pyg_scale.ops.refine_partition import refine_partition
from pyg_scale.partitioner.base import (
    Partitioner,
    PartitionGraph,
    check_count,
    check_imbalance,
)
from pyg_scale.partitioner.bisection import bisect, least_of_parts
from pyg_scale.partitioner.coarsening import Level, coarsen

_NODES_PER_PART = 60  # of the smallest graph
_CLUSTERS_PER_PART = 20  # at least, whatever their weight, so that parts can be balanced


class MultilevelPartitioner(Partitioner):
    """Cuts few edges, in memory, without other libraries.

    It takes about 40 bytes per directed edge besides the graph, and balances any number of columns,
    by ``shares``.

    Args:
        max_imbalance: The largest part may be this many times its share.
        cycles: Number of times to coarsen and refine; each cycle after the first starts from the
            previous partition and only improves it.
        tries: Number of bisections of the smallest graph, of which the best is taken.
        passes: Number of passes of refinement on each level.
        rounds: Number of rounds of label propagation to coarsen by one level.

    Raises:
        ValueError: If an option is out of range.
    """

    minimises_cut = True
    needs_sorted = False

    def __init__(
        self,
        *,
        max_imbalance: float = 1.1,
        cycles: int = 1,
        tries: int = 8,
        passes: int = 8,
        rounds: int = 2,
    ) -> None:
        counts = {"cycles": cycles, "tries": tries, "passes": passes, "rounds": rounds}
        for name, value in counts.items():
            check_count(name, value)
        check_imbalance(max_imbalance)
        self.max_imbalance = max_imbalance
        self.cycles = cycles
        self.tries = tries
        self.passes = passes
        self.rounds = rounds

    def assign(self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor) -> Tensor:
        """See :meth:`pyg_scale.partitioner.base.Partitioner.assign`."""
        capacity = self.capacity(graph, shares)
        least = least_of_parts(graph.weights, shares, self.max_imbalance)
        finest = Level(graph.indptr, graph.indices, graph.weights)
        key = keys.fold(0, seed, keys.MULTILEVEL)
        total = graph.weights.sum(0)
        fair = total.to(torch.float64) * float(shares.min())
        limit = (fair / _CLUSTERS_PER_PART).ceil().to(torch.int64).clamp(min=1)
        steps = tqdm(total=2 * self.cycles, desc="Partitioning", disable=None, delay=1)
        assignment = None
        with steps:
            for cycle in range(self.cycles):
                levels = coarsen(
                    finest,
                    _NODES_PER_PART * num_parts,
                    limit,
                    keys.fold(key, cycle),
                    rounds=self.rounds,
                    group=assignment,
                )
                steps.update()
                if assignment is None:
                    assignment = bisect(
                        levels[-1], shares, capacity, least, tries=self.tries, key=key
                    )
                else:
                    assignment = _project(levels, assignment)
                for level in reversed(levels):
                    if level.cluster is not None:
                        assignment = assignment[level.cluster]
                    assignment = refine_partition(
                        level.indptr,
                        level.indices,
                        assignment,
                        capacity,
                        node_weights=level.weights,
                        edge_weights=level.edge_weights,
                        minimum=least,
                        passes=self.passes,
                        key=keys.fold(key, cycle),
                    )
                steps.update()
        assert assignment is not None
        return assignment


def _project(levels: list[Level], assignment: Tensor) -> Tensor:
    """The parts of the nodes of the last level; the members of each are all in one part."""
    for level, smaller in itertools.pairwise(levels):
        assert level.cluster is not None
        assignment = assignment.new_zeros(smaller.num_nodes).scatter_(0, level.cluster, assignment)
    return assignment
