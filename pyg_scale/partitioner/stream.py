"""The streaming partitioners LDG and Fennel, which place nodes one by one, in several passes.

LDG is from Stanton and Kliot ("Streaming graph partitioning for large distributed graphs", KDD
2012), Fennel from Tsourakakis, Gkantsidis, Radunovic and Vojnovic ("FENNEL: streaming graph
partitioning for massive scale graphs", WSDM 2014), restreaming from Nishimura and Ugander
("Restreaming graph partitioning", KDD 2013). Beyond these papers there are hard bounds for several
quantities at once, and moves of single nodes at the end (:mod:`pyg_scale.ops.refine_partition`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.ops import keys
from pyg_scale.ops.cut_edges import cut_edges
from pyg_scale.ops.refine_partition import refine_partition
from pyg_scale.ops.stream_partition import FRACTION, breadth_first, stream_partition
from pyg_scale.partitioner.base import (
    Partitioner,
    PartitionGraph,
    check_count,
    check_imbalance,
)

_AT_ONCE = 1 << 22
ORDERS = ("natural", "random", "degree", "bfs")
"""Orders of the nodes: by id, at random, by descending degree, breadth first."""


class StreamPartitioner(Partitioner):
    """The base class of :class:`LDG` and :class:`Fennel`.

    Args:
        passes: Number of times that each node is placed; later passes know the parts of all its
            neighbours.
        order: The order of the nodes, one of :data:`ORDERS`. If several are given, each is tried,
            and the parts with the fewest edges between them are kept. All but ``"natural"`` read
            the graph at random: for a graph on disk that is larger than memory, use only
            ``"natural"``, with ``refine=0``. Then edges are read in place from end to end, and
            parallel edges count each time.
        refine: Largest number of passes of moves of single nodes at the end; 0 for none.
        max_imbalance: A part may hold this many times its fair share.
        chunk_size: Number of nodes between two steps of the progress bar; results do not depend on
            it.

    Raises:
        ValueError: If an option is out of range.
    """

    minimises_cut = True
    needs_sorted = False
    ldg = False

    def __init__(
        self,
        passes: int = 5,
        order: str | Sequence[str] = ("natural", "bfs"),
        refine: int = 8,
        max_imbalance: float = 1.1,
        chunk_size: int = 1 << 20,
    ) -> None:
        check_count("passes", passes)
        check_count("refine", refine, least=0)
        check_count("chunk_size", chunk_size)
        check_imbalance(max_imbalance)
        if max_imbalance == float("inf"):
            raise ValueError(f"max_imbalance must be finite (got {max_imbalance!r})")
        orders = (order,) if isinstance(order, str) else tuple(order)
        if not orders or set(orders) - set(ORDERS):
            raise ValueError(
                f"order must be one or several of {', '.join(map(repr, ORDERS))} (got {order!r})"
            )
        self.passes, self.refine, self.chunk_size = passes, refine, chunk_size
        self.max_imbalance = max_imbalance
        self.order = order if isinstance(order, str) else list(order)
        self._orders = tuple(dict.fromkeys(orders))
        self.needs_simple = orders != ("natural",) or refine > 0

    def assign(self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor) -> Tensor:
        """See :meth:`pyg_scale.partitioner.base.Partitioner.assign`."""
        capacity = self.capacity(graph, shares).contiguous()
        within = capacity
        if graph.weights.size(1) > 1:
            # If parts are full in different columns, no single move can improve one; spare room in
            # all of them avoids that. The room is given back when nodes are moved at the end.
            fair = (shares.view(-1, 1) * graph.weights.sum(0)).ceil().to(torch.int64)
            within = (capacity - (capacity - fair).clamp(min=0) // 4).contiguous()
        coefficient = _coefficient(graph, shares)
        key = keys.fold(0, seed, keys.PARTITION)
        found = [
            self._streamed(graph, within, coefficient, _order(name, graph, key), name)
            for name in self._orders
        ]
        if len(found) > 1:
            cuts = [cut_edges(graph.indptr, graph.indices, part) for part in found]
            found = [found[cuts.index(min(cuts))]]
        part = found[0].to(torch.int32)
        if not self.refine and _fits(part, graph.weights, capacity):
            return part
        # also without passes: with several columns, a part may be too full
        return refine_partition(
            graph.indptr,
            graph.indices,
            part,
            capacity,
            node_weights=graph.weights,
            passes=self.refine,
            key=key,
        )

    def _streamed(
        self,
        graph: PartitionGraph,
        capacity: Tensor,
        coefficient: Tensor,
        order: Tensor,
        name: str,
    ) -> Tensor:
        size = graph.num_nodes
        # looked up for every edge: one byte per node stays in a core's cache longer
        dtype = torch.int8 if capacity.size(0) <= torch.iinfo(torch.int8).max else torch.int32
        part = torch.full((size,), -1, dtype=dtype)
        load = torch.zeros_like(capacity)
        total = size * self.passes
        what = f"Placing nodes ({name})"
        with tqdm(
            total=total, desc=what, unit=" nodes", unit_scale=True, disable=None, delay=1
        ) as bar:
            for _ in range(self.passes):
                moved = 0
                for begin in range(0, size, self.chunk_size):
                    end = min(size, begin + self.chunk_size)
                    moved += stream_partition(
                        graph.indptr,
                        graph.indices,
                        graph.weights,
                        order,
                        part,
                        load,
                        capacity,
                        coefficient,
                        ldg=self.ldg,
                        begin=begin,
                        end=end,
                    )
                    bar.update(end - begin)
                if not moved:  # further passes would not change anything
                    break
        return part


class LDG(StreamPartitioner):
    """Linear deterministic greedy: maximises neighbours times the remaining capacity of a part."""

    ldg = True


class Fennel(StreamPartitioner):
    """Maximises neighbours minus a price that rises with the square root of a part's load.

    The exponent is 1.5, and the weight of the price is that of section 3 of the paper, for each
    balanced quantity.
    """


def _fits(part: Tensor, weights: Tensor, capacity: Tensor) -> bool:
    """Return True if no part exceeds its capacity."""
    for column, most in zip(weights.unbind(1), capacity.unbind(1), strict=True):
        held = torch.zeros_like(most)
        for begin in range(0, part.numel(), _AT_ONCE):
            at = slice(begin, begin + _AT_ONCE)
            held.index_add_(0, part[at], column[at])
        if bool((held > most).any()):
            return False
    return True


def _coefficient(graph: PartitionGraph, shares: Tensor) -> Tensor:
    """Fennel's price, ``float64`` ``[num_parts, num_constraints]``, of a unit at load 1.

    A node of average weight pays ``1.5 * num_edges / num_nodes`` in a part that holds its fair
    share; several kinds of columns share that.
    """
    total = graph.weights.sum(0).to(torch.float64)
    weighing = (graph.weights > 0).sum(0).to(torch.float64)
    kinds = len({name.partition(" ")[0] for name in graph.names})
    price = 1.5 * graph.num_edges / graph.num_nodes / kinds * 2**FRACTION
    fair = shares.view(-1, 1) * total
    found = price * weighing / total / fair.sqrt()
    return torch.where(fair > 0, found, 0.0).contiguous()


def _order(name: str, graph: PartitionGraph, key: int) -> Tensor:
    if name == "random":
        return keys.permutation(key, graph.num_nodes)
    if name == "degree":
        return graph.indptr.diff().argsort(descending=True, stable=True)
    if name == "bfs":
        return breadth_first(graph.indptr, graph.indices)
    return torch.empty(0, dtype=torch.int64)
