"""Parts by a hash of the node id: the part of a node is known without a partition book."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType
from pyg_scale.ops import keys
from pyg_scale.partitioner.base import Partitioner, PartitionGraph


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
