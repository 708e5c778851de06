"""The partition book of one node type: the part of each node, and its place in the part.

Within a part, nodes have the local ids 0, 1, ... in the order of their original ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PartitionBook:
    """Maps original ids to parts and back.

    Parts that are ranges of original ids need only ``offsets``; else ``part`` and ``local`` have an
    entry per node.

    Attributes:
        num_parts: Number of parts.
        num_nodes: Number of nodes of the type in all parts.
        offsets: ``int64`` ``[num_parts + 1]``: part ``p`` has the nodes ``offsets[p]`` to
            ``offsets[p + 1] - 1`` if parts are ranges; else only the sizes ``offsets.diff()`` are
            meaningful.
        part: ``uint8``, ``int16`` or ``int32`` ``[num_nodes]``, or ``None``.
        local: ``int32`` or ``int64`` ``[num_nodes]``, or ``None``.
    """

    num_parts: int
    num_nodes: int
    offsets: Tensor
    part: Tensor | None = None
    local: Tensor | None = None

    @classmethod
    def from_assignment(cls, assignment: Tensor, num_parts: int) -> PartitionBook:
        """The book of an assignment.

        Args:
            assignment: Integers ``[num_nodes]`` from 0 to ``num_parts - 1``.
            num_parts: Number of parts; some may be empty.

        Raises:
            ValueError: If an entry is out of range; names the first such node.
            TypeError: If it is not a one-dimensional integer tensor.
        """
        if assignment.dim() != 1 or assignment.is_floating_point() or assignment.is_complex():
            raise TypeError(
                "an assignment must be a one-dimensional integer tensor, the part of each node "
                f"(got {assignment.dtype} of shape {list(assignment.shape)})"
            )
        size = assignment.numel()
        if size:
            low, high = (int(v) for v in torch.aminmax(assignment))
            if low < 0 or high >= num_parts:
                wrong = int(((assignment < 0) | (assignment >= num_parts)).nonzero()[0])
                raise ValueError(
                    f"node {wrong} is assigned to part {int(assignment[wrong])}, expected 0 to "
                    f"{num_parts - 1}"
                )
        sizes = torch.zeros(num_parts, dtype=torch.int64)
        for chunk in assignment.split(1 << 24):
            sizes += torch.bincount(chunk, minlength=num_parts)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        if num_parts == 1 or bool((assignment[1:] >= assignment[:-1]).all()):
            return cls(num_parts, size, offsets)
        narrow = torch.uint8 if num_parts <= 256 else torch.int32
        part = assignment.to(narrow)
        local = torch.empty(size, dtype=torch.int32 if size < 2**31 else torch.int64)
        seen = torch.zeros(num_parts, dtype=torch.int64)
        for begin in range(0, size, 1 << 24):
            chunk = part[begin : begin + (1 << 24)]
            order = chunk.argsort(stable=True)
            counts = torch.bincount(chunk, minlength=num_parts)
            first = seen - (counts.cumsum(0) - counts)  # of a part, minus its beginning in `order`
            rank = torch.arange(order.numel()) + first[chunk[order].to(torch.int64)]
            local[begin + order] = rank.to(local.dtype)
            seen += counts
        return cls(num_parts, size, offsets, part, local)

    def part_of(self, node: Tensor) -> Tensor:
        """The part ``int64`` ``[n]`` of nodes ``[n]`` given by their original ids."""
        if self.part is None:
            if self.num_parts == 1:
                return torch.zeros(node.shape, dtype=torch.int64)
            return torch.searchsorted(self.offsets[1:], node.to(torch.int64), right=True)
        return self.part[node.to(torch.int64)].to(torch.int64)

    def local_of(self, node: Tensor) -> Tensor:
        """The local id ``int64`` ``[n]`` of each node within its part."""
        node = node.to(torch.int64)
        if self.local is None:
            return node if self.num_parts == 1 else node - self.offsets[self.part_of(node)]
        return self.local[node].to(torch.int64)

    def nodes_of(self, part: int) -> Tensor:
        """The original ids ``int64`` of the nodes of a part, ascending: by local id."""
        if self.part is None:
            return torch.arange(int(self.offsets[part]), int(self.offsets[part + 1]))
        return (self.part == part).nonzero().view(-1)

    def assignment(self) -> Tensor:
        """The part ``int64`` ``[num_nodes]`` of every node."""
        if self.part is not None:
            return self.part.to(torch.int64)
        return torch.arange(self.num_parts).repeat_interleave(self.offsets.diff())
