"""Random parts of equal size: the nodes of each type in random order, divided by shares."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_scale.ops import keys
from pyg_scale.partitioner.base import Partitioner, PartitionGraph
from pyg_scale.partitioner.hash import type_key


class RandomPartitioner(Partitioner):
    """Chooses equal numbers of nodes of each type at random.

    It reads no edges and cuts most of them: the share ``1 - 1 / num_parts``.
    """

    balances = ("nodes",)
    needs_sorted = False
    needs_simple = False

    def assign(self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor) -> Tensor:
        """See :meth:`pyg_scale.partitioner.base.Partitioner.assign`."""
        out = torch.empty(graph.num_nodes, dtype=torch.int32)
        for number, (node_type, (begin, end)) in enumerate(graph.offsets.items()):
            order = keys.permutation(keys.fold(type_key(seed, node_type), 1), end - begin)
            # A type with fewer nodes than parts begins at a different part than the previous type.
            turn = number % num_parts
            dealt = torch.roll(torch.arange(num_parts, dtype=torch.int32), turn)
            sizes = part_sizes(end - begin, shares.roll(turn))
            out[begin + order] = dealt.repeat_interleave(sizes)
        return out


def part_sizes(total: int, shares: Tensor) -> Tensor:
    """Integers ``int64`` ``[num_parts]`` of sum ``total``, each less than 1 from its share.

    With equal shares, the first parts are larger by one.
    """
    ideal = shares * total
    sizes = (ideal + 1e-9 * ideal).floor().to(torch.int64)
    missing = total - int(sizes.sum())
    if missing > 0:  # parts that lost most by rounding down, ties in order
        rest = ((ideal - sizes) * 2**20).round()
        sizes[rest.argsort(descending=True, stable=True)[:missing]] += 1
    return sizes
