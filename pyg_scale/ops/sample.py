"""The compiled neighbour sampler (``csrc/sample.cpp``).

Its plain-torch meaning, with the same bits, is :mod:`pyg_scale.sampler.reference`;
``docs/draws.md`` specifies both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import keys, library
from pyg_scale.ops.threads import WAITING, num_threads

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


def neighbor_sample(
    *,
    indptr: Sequence[Tensor],
    indices: Sequence[Tensor],
    edge_id: Sequence[Tensor],
    edge_time: Sequence[Tensor],
    weight_prefix: Sequence[Tensor],
    node_time: Sequence[Tensor],
    num_nodes: Sequence[int],
    expanded_type: Sequence[int],
    neighbor_type: Sequence[int],
    edge_type_hash: Sequence[int],
    seed: Sequence[Tensor],
    seed_time: Sequence[Tensor],
    num_neighbors: Sequence[Sequence[int]],
    num_hops: int,
    key: int,
    replace: bool = False,
    disjoint: bool = False,
    last: bool = False,
    induced: bool = False,
    int32_output: bool = False,
    part: Sequence[Tensor] = (),
    local: Sequence[Tensor] = (),
    offsets: Sequence[Tensor] = (),
    times_of_neighbors: bool = False,
    waits: bool = False,
    by_node: bool = False,
    by_source: SourceDraws | None = None,
    after: Sequence[Tensor] = (),
    strict: bool = False,
) -> SampledTensors:
    """Sample the neighbourhood of seeds, hop by hop.

    Tensors of the graph are as in :class:`pyg_scale.graph.topology.CSC`, one per edge type
    (``node_time``, ``num_nodes``, ``seed`` and ``seed_time``: per node type), :data:`ABSENT` where
    there is none. Uses :func:`pyg_scale.ops.threads.num_threads` threads; the result does not
    depend on their number.

    Args:
        expanded_type: For each edge type, the index of the node type whose in-edges it has.
        neighbor_type: For each edge type, the index of the node type of their other ends.
        edge_type_hash: Unsigned, see :func:`pyg_scale.ops.keys.edge_type_hash`.
        seed: ``int64`` node ids.
        seed_time: ``int64``, one per seed, if the graph is temporal.
        num_neighbors: Per edge type, one number per hop; negative for all.
        num_hops: Number of hops.
        key: The key of the batch, unsigned.
        last: If True, take the latest of the candidates that are not later than the seed.
        induced: If True, return all edges among the sampled nodes.
        int32_output: If True, ``node``, ``row`` and ``col`` are ``int32``.
        part: For in-edges in several parts, the partition book of every node type (see
            :class:`pyg_scale.store.directory.PartitionBook`), :data:`ABSENT` if parts are ranges.
            Tensors of in-edges are then given for all parts of the first edge type, then of the
            next one, and so on, by place in the part.
        local: See ``part``.
        offsets: See ``part``; without parts, an empty list.
        times_of_neighbors: True if ``edge_time`` has the times of the neighbours.
        waits: True if reading in-edges waits for a disk; then many threads of its own do it, not
            those of torch.
        by_node: If True, the draws of a node are the same for all seeds also if disjoint.
        by_source: Draws by the random numbers of sources, if not by those of expanded nodes.
        after: For every edge type, the time that edges must be after, ``int64`` ``[num_seeds]``
            over all types of seeds, :data:`ABSENT` where there is none; or an empty list.
        strict: True if ``seed_time`` is before the times of the seeds themselves: induced edges
            then do not come from the seeds either.

    Raises:
        ValueError: If an argument does not fit the others, a seed or neighbour is not a node,
            or the batch has more nodes than can be numbered.
        KernelsError: If the kernels are not compiled.
    """
    library.load()
    flat = [n for per_hop in num_neighbors for n in per_hop]
    draws = by_source or SourceDraws()
    out = torch.ops.pyg_scale.neighbor_sample(
        list(indptr),
        list(indices),
        list(edge_id),
        list(edge_time),
        list(weight_prefix),
        list(node_time),
        list(num_nodes),
        list(expanded_type),
        list(neighbor_type),
        [keys.to_signed(word) for word in edge_type_hash],
        list(seed),
        list(seed_time),
        flat,
        num_hops,
        replace,
        disjoint,
        last,
        induced,
        keys.to_signed(key),
        int32_output,
        WAITING if waits else num_threads(),
        list(part),
        list(local),
        list(offsets),
        list(after),
        times_of_neighbors,
        waits,
        by_node,
        by_source is not None,
        draws.same_in_all_hops,
        keys.to_signed(draws.next_key),
        draws.renewed,
        draws.weighting,
        draws.layers,
        strict,
    )
    return SampledTensors(*out)
