"""The sizes of the shares that ranks would have of a partition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_scale.store.directory import GraphDirectory

_EDGES = 1 << 22  # that are looked at together


@dataclass(frozen=True)
class Sizes:
    """The sizes of a share.

    Attributes:
        own: Number of own nodes, of all ranks that divide channels together.
        halo: Number of nodes of other ranks that edges start from.
        sent: Number of rows that others need.
        outer: Number of own nodes with a neighbour in the halo.
        inner_edges: Number of edges that end at other own nodes.
        outer_edges: Number of edges that end at these.
        crossing: Number of edges that start in the halo.
    """

    own: int
    halo: int
    sent: int
    outer: int
    inner_edges: int
    outer_edges: int
    crossing: int

    @property
    def edges(self) -> int:
        """Number of edges."""
        return self.inner_edges + self.outer_edges

    @property
    def rows(self) -> int:
        """Number of nodes and edges."""
        return self.own + self.halo + self.edges

    def scaled(self, factor: float) -> Sizes:
        """Sizes by a factor; what there is stays at least 1."""
        return Sizes(*(max(1, round(n * factor)) if n else 0 for n in astuple(self)))


def shares_of(data: Data | GraphDirectory, part: Tensor, ranks: int) -> list[Sizes]:
    """The sizes of the share of each rank, which owns every ``ranks``-th part.

    Args:
        data: A graph without types; a directory is read part by part.
        part: The part of every node ``[num_nodes]``.
        ranks: Number of ranks.
    """
    owner = part.long() % ranks
    number = owner.numel()
    is_outer, degree = torch.zeros(number, dtype=torch.bool), torch.zeros_like(owner)
    pairs = torch.empty(0, dtype=torch.int64)  # of a rank, and a node that it needs
    crossing = torch.zeros(ranks, dtype=torch.int64)
    for src, dst in _edges(data):
        degree += torch.bincount(dst, minlength=number)
        crosses = owner[src] != owner[dst]
        src, dst = src[crosses], dst[crosses]
        is_outer[dst] = True
        crossing += torch.bincount(owner[dst], minlength=ranks)
        pairs = torch.cat([pairs, owner[dst] * number + src]).unique()
    counts = [
        torch.bincount(owner, minlength=ranks),
        torch.bincount(pairs // max(1, number), minlength=ranks),
        torch.bincount(owner[pairs % max(1, number)], minlength=ranks),
        torch.bincount(owner[is_outer], minlength=ranks),
        *(
            torch.zeros(ranks, dtype=torch.int64).index_add_(0, owner[of], degree[of])
            for of in (~is_outer, is_outer)
        ),
        crossing,
    ]
    return [Sizes(*each) for each in torch.stack(counts, dim=1).tolist()]


def _edges(data: Data | GraphDirectory) -> Iterator[tuple[Tensor, Tensor]]:
    """Sources and destinations, original ids, some at a time."""
    if isinstance(data, Data):
        number = data.edge_index.size(1)
        for begin in range(0, number, _EDGES):
            src, dst = data.edge_index[:, begin : begin + _EDGES].long()
            yield src, dst
        return
    for number in range(data.meta.num_parts):
        csc, nodes = data.part(number).csc(None), data.books[None].nodes_of(number)
        yield csc.indices.to(torch.int64), nodes.repeat_interleave(csc.indptr.diff())
