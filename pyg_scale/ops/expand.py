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
from pyg_scale.ops.sample import ABSENT, Choice, SourceDraws


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


class InEdges(NamedTuple):
    """The in-edges of a part, or of all nodes, as in :class:`pyg_scale.graph.topology.CSC`.

    Attributes:
        indptr: See there.
        indices: See there.
        edge_id: See there.
        time: See there.
        weight_prefix: See there.
        num_neighbor_nodes: Number of nodes of the neighbours' type.
    """

    indptr: Tensor
    indices: Tensor
    edge_id: Tensor | None
    time: Tensor | None
    weight_prefix: Tensor | None
    num_neighbor_nodes: int


class ExpandedNodes(NamedTuple):
    """The nodes that get in-edges.

    Attributes:
        place: Row of ``indptr`` of each node, ``int64`` ``[n]``.
        node: Original ids, which key the draws, ``int64`` ``[n]``.
        seed: Position of the seed of each node, ``int64`` ``[n]``, if disjoint.
        latest: The latest time of an edge for each node, ``int64`` ``[n]``; times are ignored if
            ``None``.
        after: The time that edges must be after, ``int64`` ``[n]``, or ``None``; goes with
            ``latest``.
    """

    place: Tensor
    node: Tensor
    seed: Tensor | None = None
    latest: Tensor | None = None
    after: Tensor | None = None


def expand_neighbors(
    edges: InEdges, nodes: ExpandedNodes, key: int, num_neighbors: int, choice: Choice
) -> Expanded:
    """Choose in-edges of nodes; compiled only.

    Args:
        edges: The in-edges.
        nodes: The nodes.
        key: Key of the hop and the edge type. With draws by source, it and ``next_key`` are those
            of the sources in this hop.
        num_neighbors: Number of draws for each node, -1 for all in-edges.
        choice: The choice among them.
    """
    draws, timed = choice.by_source or SourceDraws(), edges.time is not None
    found = torch.ops.pyg_scale.expand_neighbors(
        edges.indptr,
        edges.indices,
        _or_absent(edges.edge_id),
        _or_absent(None if nodes.latest is None else edges.time),
        _or_absent(edges.weight_prefix),
        nodes.place,
        nodes.node,
        _or_absent(nodes.seed),
        _or_absent(nodes.latest),
        _or_absent(nodes.after if timed else None),
        edges.num_neighbor_nodes,
        keys.to_signed(key),
        num_neighbors,
        choice.replace,
        choice.last,
        choice.by_node,
        choice.by_source is not None,
        keys.to_signed(draws.next_key),
        draws.renewed,
        draws.weighting,
    )
    return Expanded(*found)


def _or_absent(tensor: Tensor | None) -> Tensor:
    return ABSENT if tensor is None else tensor


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
            _or_absent(known_seed).contiguous(),
            node.contiguous(),
            _or_absent(seed).contiguous(),
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
