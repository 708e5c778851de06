"""The halves of a hop over a graph in parts (``csrc/expand.cpp``).

The rank that has the in-edges of nodes chooses among them (:func:`expand_neighbors`, whose plain
meaning is :func:`pyg_scale.sampler.choose.choose`). The rank that samples numbers the nodes that it
receives (:func:`number_nodes`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import keys, library
from pyg_scale.ops.sample import SourceDraws

_ABSENT = torch.empty(0, dtype=torch.int64)


class Expanded(NamedTuple):
    """In-edges chosen for some nodes.

    Attributes:
        counts: Number of in-edges of each node, ``int64`` ``[n]``.
        neighbor: Sources, node after node, in the order of the draws, ``int64`` ``[m]``.
        edge: Original edge ids, ``int64`` ``[m]``.
        weight: Their weights, ``float32`` ``[m]``; empty if there are none.
    """

    counts: Tensor
    neighbor: Tensor
    edge: Tensor
    weight: Tensor


def expand_neighbors(
    indptr: Tensor,
    indices: Tensor,
    edge_id: Tensor | None,
    time: Tensor | None,
    weight_prefix: Tensor | None,
    place: Tensor,
    node: Tensor,
    seed: Tensor | None,
    latest: Tensor | None,
    after: Tensor | None,
    num_neighbor_nodes: int,
    key: int,
    num_neighbors: int,
    *,
    replace: bool,
    last: bool,
    by_node: bool = False,
    by_source: SourceDraws | None = None,
) -> Expanded:
    """Choose in-edges of nodes; compiled only.

    Args:
        indptr: Pointers of the in-edges of a part, or of all nodes; this and the next four are as
            in :class:`pyg_scale.graph.topology.CSC`.
        indices: See there.
        edge_id: See there.
        time: See there.
        weight_prefix: See there.
        place: Row of ``indptr`` of each node, ``int64`` ``[n]``.
        node: Original ids, which key the draws, ``int64`` ``[n]``.
        seed: Position of the seed of each node, ``int64`` ``[n]``, if disjoint.
        latest: The latest time of an edge for each node, ``int64`` ``[n]``; times are ignored if
            ``None``.
        after: The time that edges must be after, ``int64`` ``[n]``, or ``None``; goes with
            ``latest``.
        num_neighbor_nodes: Number of nodes of the neighbours' type.
        key: Key of the hop and the edge type.
        num_neighbors: Number of draws for each node, -1 for all in-edges.
        replace: If True, draw with replacement.
        last: If True, only the last ones in time are candidates.
        by_node: If True, ``seed`` is not part of the keys of the draws.
        by_source: Draws by the random numbers of sources. ``key`` and its ``next_key`` are then
            those of the sources in this hop.
    """
    draws = by_source or SourceDraws()
    found = torch.ops.pyg_scale.expand_neighbors(
        indptr,
        indices,
        _ABSENT if edge_id is None else edge_id,
        _ABSENT if time is None or latest is None else time,
        _ABSENT if weight_prefix is None else weight_prefix,
        place,
        node,
        _ABSENT if seed is None else seed,
        _ABSENT if latest is None else latest,
        _ABSENT if after is None or time is None else after,
        num_neighbor_nodes,
        keys.to_signed(key),
        num_neighbors,
        replace,
        last,
        by_node,
        by_source is not None,
        keys.to_signed(draws.next_key),
        draws.renewed,
        draws.weighting,
    )
    return Expanded(*found)


def number_nodes(
    known: Tensor,
    known_seed: Tensor | None,
    node: Tensor,
    seed: Tensor | None,
    num_nodes: int,
    num_seeds: int,
    *,
    append: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Look nodes up in a batch: by id or, if disjoint, by seed and id.

    Args:
        known: The nodes of the batch, ``int64`` ``[size]``; the first of equal ones is found.
        known_seed: Their seeds, ``int64`` ``[size]``, if disjoint.
        node: The nodes to look up, ``int64`` ``[n]``.
        seed: Their seeds, ``int64`` ``[n]``, if disjoint.
        num_nodes: Number of nodes of the type.
        num_seeds: Number of seeds of the batch.
        append: If True, a node that is not found is added to the end of the batch.

    Returns:
        The nodes of the batch, their seeds, and the row of each ``node``, -1 for one that is not
        found.

    Raises:
        ValueError: If a node does not exist.
    """
    if library.compiled():
        disjoint = known_seed is not None
        nodes, seeds, row = torch.ops.pyg_scale.number_nodes(
            known.contiguous(),
            known_seed.contiguous() if known_seed is not None else _ABSENT,
            node.contiguous(),
            seed.contiguous() if seed is not None else _ABSENT,
            num_nodes,
            num_seeds,
            disjoint,
            append,
        )
        return nodes, seeds if disjoint else None, row
    size = known.numel()
    everyone = torch.cat([known, node])
    seeds = None if known_seed is None or seed is None else torch.cat([known_seed, seed])
    identity = everyone if seeds is None else seeds * num_nodes + everyone
    distinct, group = torch.unique(identity, return_inverse=True)
    place = torch.arange(identity.numel())
    first = torch.zeros_like(distinct).scatter_reduce_(0, group, place, "amin", include_self=False)
    found = first[group]
    if not append:
        row = found[size:]
        return known, known_seed, torch.where(row < size, row, -1)
    new = found == place
    new[:size] = True  # a repeated seed keeps its row
    row = (new.cumsum(0) - 1)[found[size:]]
    return everyone[new], None if seeds is None else seeds[new], row
