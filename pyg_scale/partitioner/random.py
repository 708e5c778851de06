"""Partitioners that read no edges: by a hash of the node, and at random with equal sizes."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType
from pyg_scale.ops import keys
from pyg_scale.partitioner.base import Partitioner, PartitionGraph


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


class HashPartitioner(Partitioner):
    """Computes the part of a node only from its id, its type, the seed and the shares.

    A node keeps its part when others are added. Sizes are those of independent draws: with ``n``
    nodes, they deviate by about ``sqrt(n / num_parts)``; nothing else balances them.
    """

    balances = ()
    needs_sorted = False
    needs_simple = False

    def assign(self, graph: PartitionGraph, num_parts: int, *, seed: int, shares: Tensor) -> Tensor:
        """See :meth:`pyg_scale.partitioner.base.Partitioner.assign`."""
        # 31 bits of the hash are compared with the running sum of the shares.
        until = (shares.cumsum(0)[:-1] * 2**31).round().to(torch.int64)
        out = torch.empty(graph.num_nodes, dtype=torch.int32)
        for node_type, (begin, end) in graph.offsets.items():
            for first in range(begin, end, _CHUNK):
                last = min(end, first + _CHUNK)
                word = keys.fold_tensor(
                    type_key(seed, node_type), torch.arange(first - begin, last - begin)
                )
                bits = (word >> 33) & (2**31 - 1)
                out[first:last] = torch.searchsorted(until, bits, right=True, out_int32=True)
        return out


_CHUNK = 1 << 22  # nodes hashed at a time


def type_key(seed: int, node_type: NodeType) -> int:
    """The key of a node type: the seed, the purpose, and 8 bytes of BLAKE2b of the name."""
    name = (node_type or "").encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    of_type = 0 if node_type is None else int.from_bytes(digest, "little")
    return keys.fold(0, seed, keys.PARTITION, of_type)
