"""The arguments and the results of the compiled neighbour samplers (``csrc/sample.cpp``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ABSENT = torch.empty(0, dtype=torch.int64)
"""Placeholder for a tensor that an edge type or a node type does not have."""


class SourceDraws(NamedTuple):
    """Draws with random numbers that belong to the sources of edges, see ``csrc/source_draws.h``.

    Attributes:
        same_in_all_hops: If True, the numbers of hop 0 are those of all hops.
        weighting: The weights of edges: 0 for none, 1 for ``1 / p`` where ``p`` is the probability
            of an edge, 2 for ``1 / (d p)`` with the degree ``d`` of the expanded node, 3 for the
            root of both ends' degrees in the place of ``d``.
        layers: If True, each hop expands all nodes of the batch, not only those that are new.
        next_key: The key of the numbers that a share of the sources has already.
        renewed: That share, as a number of ``2**32``.
    """

    same_in_all_hops: bool = False
    weighting: int = 0
    layers: bool = False
    next_key: int = 0
    renewed: int = 0


class GraphTensors(NamedTuple):
    """The graph of a call, as in :class:`pyg_scale.graph.topology.CSC`, one entry per edge type.

    :data:`ABSENT` stands where there is none. With in-edges in several parts, the first five have
    all parts of the first edge type, then those of the next one, and so on, by place in the part.

    Attributes:
        indptr: See there.
        indices: See there.
        edge_id: See there.
        edge_time: See there.
        weight_prefix: See there.
        node_time: One per node type.
        num_nodes: One per node type.
        expanded_type: The index of the node type whose in-edges it has.
        neighbor_type: The index of the node type of their other ends.
        edge_type_hash: Signed, see :func:`pyg_scale.ops.keys.edge_type_hash`.
        part: Of in-edges in several parts, the partition book of every node type (see
            :class:`pyg_scale.store.directory.PartitionBook`), :data:`ABSENT` if parts are ranges.
        local: See ``part``.
        offsets: See ``part``; without parts, an empty list.
        times_of_neighbors: True if ``edge_time`` has the times of the neighbours.
        waits: True if reading in-edges waits for a disk; then many threads of its own do it, not
            those of torch.
    """

    indptr: list[Tensor]
    indices: list[Tensor]
    edge_id: list[Tensor]
    edge_time: list[Tensor]
    weight_prefix: list[Tensor]
    node_time: list[Tensor]
    num_nodes: list[int]
    expanded_type: list[int]
    neighbor_type: list[int]
    edge_type_hash: list[int]
    part: Sequence[Tensor] = ()
    local: Sequence[Tensor] = ()
    offsets: Sequence[Tensor] = ()
    times_of_neighbors: bool = False
    waits: bool = False


class Seeds(NamedTuple):
    """The seeds of a batch, and what they see.

    Attributes:
        node: ``int64`` ids, one tensor per node type.
        time: ``int64``, one per seed, if the graph is temporal; one tensor per node type.
        after: For every edge type, the time that edges must be after, ``int64`` ``[num_seeds]``
            over all types of seeds, :data:`ABSENT` where there is none; or an empty list.
        strict: True if ``time`` is before the times of the seeds themselves: induced edges then do
            not come from the seeds either.
    """

    node: list[Tensor]
    time: list[Tensor]
    after: Sequence[Tensor] = ()
    strict: bool = False


class Choice(NamedTuple):
    """The way in which in-edges are chosen.

    Attributes:
        replace: If True, draw with replacement.
        last: If True, take the latest of the candidates that are not later than the seed.
        by_node: If True, the draws of a node are the same for all seeds also if disjoint.
        by_source: Draws by the random numbers of sources, if not by those of expanded nodes.
    """

    replace: bool = False
    last: bool = False
    by_node: bool = False
    by_source: SourceDraws | None = None


class SampledTensors(NamedTuple):
    """The result of the op; one tensor per node type or per edge type.

    Attributes:
        node: Original node ids, the seeds first.
        row: Position in ``node`` of the neighbour of each edge.
        col: Position in ``node`` of the expanded node of each edge, never decreasing.
        edge: Original edge ids, ``int64``.
        batch: Position of the seed of each node, ``int64``; an empty list if not disjoint.
        colptr: The edges into row ``i`` are ``colptr[i]`` to ``colptr[i + 1] - 1``. With
            ``layers``, rows are counted anew in every hop.
        weight: Weights of edges, ``float32``; an empty list if there are none.
        num_sampled_nodes: ``int64`` ``[num_node_types, num_hops + 1]``.
        num_sampled_edges: ``int64`` ``[num_edge_types, num_hops]``.
    """

    node: list[Tensor]
    row: list[Tensor]
    col: list[Tensor]
    edge: list[Tensor]
    batch: list[Tensor]
    colptr: list[Tensor]
    weight: list[Tensor]
    num_sampled_nodes: Tensor
    num_sampled_edges: Tensor
