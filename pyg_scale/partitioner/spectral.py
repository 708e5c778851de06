"""Spectral partitioning: recursive bisection along the Fiedler vector.

The method is that of Pothen, Simon, Liou: "Partitioning sparse matrices with eigenvectors of
graphs", SIAM J. Matrix Anal. 1990, with the normalised Laplacian and a sweep as in Shi and Malik,
PAMI 2000.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.ops import keys
from pyg_scale.ops.components import connected_components
from pyg_scale.ops.csc import expand_pointers
from pyg_scale.ops.refine_partition import refine_partition
from pyg_scale.partitioner.base import (
    Partitioner,
    PartitionGraph,
    check_count,
    check_imbalance,
)
from pyg_scale.partitioner.bisection import least_of_parts, recursive, sizes
from pyg_scale.partitioner.coarsening import Level
from pyg_scale.partitioner.fiedler import fiedler_vector

_LARGE = 1000  # components placed one by one; the others are divided together


class SpectralPartitioner(Partitioner):
    """Cuts few edges by eigenvectors, if the graph has large clusters.

    Connected components are kept whole if they fit. A component that has to be cut is cut at the
    place along its Fiedler vector with the fewest edges. Then single nodes move, to balance all
    quantities and to cut fewer edges. It takes about 80 bytes per directed edge besides the graph.

    Args:
        max_imbalance: A part may hold this many times its fair share.
        max_edges: Largest number of undirected edges; larger graphs are refused, as the work is
            that of hundreds of passes over all edges.
        products: Largest number of products with a matrix, for each cut and each of its levels.
        passes: Number of passes of refinement after each cut.

    Raises:
        ValueError: If an option is out of range.
    """

    minimises_cut = True

    def __init__(
        self,
        *,
        max_imbalance: float = 1.1,
        max_edges: int = 20_000_000,
        products: int = 60,
        passes: int = 8,
    ) -> None:
        counts = {"max_edges": max_edges, "products": products, "passes": passes}
        for name, value in counts.items():
            check_count(name, value)
        check_imbalance(max_imbalance)
        self.max_imbalance = max_imbalance
        self.max_edges = max_edges
        self.products = products
        self.passes = passes

    def assign(self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor) -> Tensor:
        """See :meth:`pyg_scale.partitioner.base.Partitioner.assign`.

        Raises:
            ValueError: If the graph has more than ``max_edges`` edges.
        """
        if graph.num_edges > self.max_edges:
            raise ValueError(
                f"spectral partitioning of {graph.num_edges} undirected edges would take too long "
                f"(max_edges={self.max_edges}): use method='multilevel', which is as good and "
                "faster, or 'fennel', which needs no edges in memory; or give max_edges="
            )
        capacity = self.capacity(graph, shares)
        minimum = least_of_parts(graph.weights, shares, self.max_imbalance)
        whole = Level(graph.indptr, graph.indices, graph.weights)
        key = keys.fold(0, seed, keys.SPECTRAL)
        with tqdm(total=num_parts - 1, desc="Cutting", disable=None, delay=1) as bar:

            def halve(*arguments: Any) -> Tensor:
                sides = self._halve(*arguments)
                bar.update()
                return sides

            assignment = recursive(whole, shares, capacity, minimum, key, halve)
        return self._refine(whole, assignment, capacity, minimum, key)

    def _refine(
        self, level: Level, assignment: Tensor, capacity: Tensor, minimum: Tensor, key: int
    ) -> Tensor:
        return refine_partition(
            level.indptr,
            level.indices,
            assignment,
            capacity,
            node_weights=level.weights,
            edge_weights=level.edge_weights,
            minimum=minimum,
            passes=self.passes,
            key=key,
        )

    def _halve(self, level: Level, share: float, room: Tensor, least: Tensor, key: int) -> Tensor:
        size = sizes(level.weights)
        component = connected_components(level.indptr, level.indices)
        sides, to_cut = _place(component, size, share)
        for number, inner_share in to_cut:
            nodes = (component == number).nonzero().view(-1)
            part = level if nodes.numel() == level.num_nodes else level.induced(nodes)
            order = fiedler_vector(part, key, products=self.products).argsort(stable=True)
            slack = (self.max_imbalance - 1) / 2
            sides[nodes] = _sweep(part, order, size[nodes], inner_share, slack)
        return self._refine(level, sides, room, least, key)


def _place(component: Tensor, size: Tensor, share: float) -> tuple[Tensor, list[tuple[int, float]]]:
    """Assign whole components to two sides; those that fit on neither have to be cut.

    Returns:
        The side ``int32`` ``[num_nodes]`` of every node, and the components to be cut, with the
        share of each that belongs on side 0.
    """
    count = int(component.max()) + 1
    total = torch.zeros(count, dtype=torch.int64).index_add_(0, component, size)
    order = total.argsort(descending=True, stable=True)
    side = torch.zeros(count, dtype=torch.int32)
    whole = int(total.sum())
    free = [int(whole * share), whole - int(whole * share)]
    to_cut = []
    for number in order[:_LARGE].tolist():
        weight = int(total[number])
        widest = int(free[1] > free[0])
        if weight > free[widest] and int((component == number).sum()) > 1:
            inner = free[0] / max(1, sum(free))
            to_cut.append((number, inner))
            taken = int(weight * inner)
            free = [max(0, free[0] - taken), max(0, free[1] - (weight - taken))]
        else:
            # Take the fuller side if it fits: this leaves room on the other one for those that need
            # it.
            where = 1 - widest if weight <= free[1 - widest] else widest
            side[number] = where
            free[where] -= weight
    rest = order[_LARGE:]
    side[rest] = (total[rest].cumsum(0) > free[0]).to(torch.int32)
    return side[component], to_cut


def _sweep(level: Level, order: Tensor, size: Tensor, share: float, slack: float) -> Tensor:
    """Cut a sequence of the nodes at the place with the fewest edges near the wanted share."""
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel())
    row = rank[expand_pointers(level.indptr, level.indices.numel()).to(torch.int64)]
    col = rank[level.indices.to(torch.int64)]
    ahead = row < col
    weight = torch.ones_like(row) if level.edge_weights is None else level.edge_weights
    # change[p]: difference between the cut before position p and the one before p - 1
    change = torch.zeros(order.numel() + 1, dtype=torch.int64)
    change.index_add_(0, row[ahead] + 1, weight[ahead])
    change.index_add_(0, col[ahead] + 1, -weight[ahead])
    cut = change.cumsum(0)[1:-1]
    held = size[order].cumsum(0)
    before, whole = held[:-1].to(torch.float64), float(held[-1])
    best: tuple[int, int, bool] | None = None
    for flipped in (False, True):
        wanted = whole * (1 - share if flipped else share)
        off = (before - wanted).abs()
        near = off <= max(slack * min(wanted, whole - wanted), float(off.min()))
        places = near.nonzero().view(-1)
        place = int(places[cut[places].argmin()])
        if best is None or int(cut[place]) < best[0]:
            best = (int(cut[place]), place, flipped)
    assert best is not None
    sides = (rank > best[1]).to(torch.int32)
    return 1 - sides if best[2] else sides
