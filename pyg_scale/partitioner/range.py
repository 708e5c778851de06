"""Parts that are ranges of node ids, for graphs whose neighbours have close ids."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.partitioner.base import BALANCES, Partitioner, PartitionGraph


class RangePartitioner(Partitioner):
    """Cuts the ids of each type into ranges, such that one quantity is balanced.

    The directory of a graph in ranges has two numbers per part instead of a partition book. It
    suits graphs whose ids are meaningful: crawls, times, an order by communities.
    """

    balances = BALANCES
    needs_sorted = False
    needs_simple = False

    def assign(self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor) -> Tensor:
        """See :meth:`pyg_scale.partitioner.base.Partitioner.assign`.

        Raises:
            ValueError: If several quantities are to be balanced.
        """
        kinds = {name.partition(" ")[0] for name in graph.names}
        if len(kinds) > 1:
            raise ValueError(
                f"ranges can balance one of {', '.join(sorted(kinds))}, not several at once: give "
                "balance= one of them, or use method='fennel'"
            )
        out = torch.empty(graph.num_nodes, dtype=torch.int32)
        # In-edges of all types are one quantity: the excess of a part in one type is subtracted in
        # the next. Nodes and training nodes are balanced within each type.
        together = kinds == {"edges"}
        held, seen = torch.zeros(num_parts, dtype=torch.float64), 0
        for begin, end in graph.offsets.values():
            weight = graph.weights[begin:end].sum(1)
            mine, total = shares, int(weight.sum())
            if together and total:
                seen += total
                due = (shares * seen - held).clamp(min=0)
                mine = due / due.sum()
            out[begin:end] = ranges(weight, mine)
            if together:
                held.index_add_(0, out[begin:end], weight.to(torch.float64))
        return out


def ranges(weight: Tensor, shares: Tensor) -> Tensor:
    """Cut a sequence into consecutive runs; run ``p`` has the share ``shares[p]`` of the weight.

    An element belongs to the run in whose share it begins, so that a run weighs at most its share
    plus the heaviest element. If all weights are 0, all count as equal.

    Args:
        weight: ``int64`` ``[n]``, not negative.
        shares: ``float64`` ``[num_parts]``, of sum 1.

    Returns:
        ``int32`` ``[n]``, the run of each element.
    """
    total = int(weight.sum())
    if total == 0:
        weight = torch.ones_like(weight)
        total = weight.numel()
    until = (shares.cumsum(0)[:-1] * total).round().to(torch.int64)
    return torch.searchsorted(until, weight.cumsum(0) - weight, right=True, out_int32=True)
