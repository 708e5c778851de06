"""Counts of the edges that a partition cuts, the nodes it replicates, and its balance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.files.byte_size import byte_size
from pyg_scale.graph.topology import CSC, NodeType, Topology
from pyg_scale.partitioner.assigned import Assigned, check_assignment
from pyg_scale.partitioner.base import Partition
from pyg_scale.partitioner.counts import Quality
from pyg_scale.partitioner.remote import measure_remote
from pyg_scale.partitioner.rows import pieces
from pyg_scale.partitioner.train_nodes import count_train, train_nodes_of
from pyg_scale.partitioner.whole import directory_of, whole_topology

_EDGES = 1 << 22


def quality(
    data: Any,
    assignment: Partition | Mapping[NodeType, Tensor] | Tensor | None = None,
    *,
    num_parts: int | None = None,
    edge_assign_strategy: str = "by_dst",
    num_neighbors: Sequence[int] | None = None,
    batch_size: int = 1024,
    num_batches: int = 64,
    cache: Mapping[NodeType, Sequence[Tensor]] | None = None,
    seed: int = 0,
    memory: int | str = "1GB",
) -> Quality:
    """Measure a partition.

    Args:
        data: ``Data``, ``HeteroData``, ``(FeatureStore, GraphStore)``, or a graph directory or its
            path.
        assignment: The part of every node; ``None`` for a directory of several parts, whose counts
            were stored when it was written.
        num_parts: Number of parts, if the assignment does not determine it and the last ones may be
            empty.
        edge_assign_strategy: ``"by_dst"`` if edges are with their destination, ``"by_src"`` if with
            their source.
        num_neighbors: Neighbours per hop. If given, batches around the training nodes of each part
            (all its nodes if there are none) are sampled, to count features of other parts. Times
            and weights of edges are ignored.
        batch_size: Seeds of such a batch.
        num_batches: Number of batches over all parts (at least one for each part with seeds).
        cache: Cache lists as for :func:`~pyg_scale.partitioner.write.write_partition`, to count how
            many of these features they have.
        seed: Seed of the batches.
        memory: Bytes to use for marks of halo nodes; with less, edges are read more often.

    Raises:
        ValueError: If the assignment does not fit the graph, or there is none.
        TypeError: If an argument has a wrong type.
    """
    if assignment is None:
        found = stored_quality(data)
        if num_neighbors is not None:
            raise ValueError(
                "num_neighbors= asks for sampling, which needs the whole graph: pass that and the "
                "assignment"
            )
        return found
    budget = byte_size(memory, "memory")
    graph = whole_topology(data)
    assigned = check_assignment(assignment, graph.num_nodes, num_parts)
    train = train_nodes_of(data)
    found = count(graph, assigned, edge_assign_strategy, budget)
    found.train = count_train(train, assigned)
    found.method = assignment.method if isinstance(assignment, Partition) else None
    if num_neighbors is not None:
        found.remote = measure_remote(
            graph,
            assigned,
            train,
            num_neighbors,
            batch_size=batch_size,
            num_batches=num_batches,
            cache=cache,
            seed=seed,
        )
    return found


def stored_quality(data: Any) -> Quality:
    """The counts stored when a directory was partitioned.

    Raises:
        ValueError: If it has none, because it was not partitioned.
    """
    directory = directory_of(data)
    partition = None if directory is None else directory.meta.partition
    kept = None if partition is None else partition.extra.get("quality")
    if kept is None:
        what = "this graph" if directory is None else str(directory.path)
        raise ValueError(
            f"{what} was not partitioned: pass an assignment, the part of every node, or the path "
            "of a partitioned directory"
        )
    return Quality.from_dict(kept)


def count(
    graph: Topology, assigned: Assigned, edge_assign_strategy: str = "by_dst", memory: int = 1 << 30
) -> Quality:
    """Count everything that depends on the edges of a partition.

    Args:
        graph: In-edges of every node (``direction="forward"``).
        assigned: The part of every node.
        edge_assign_strategy: ``"by_dst"`` or ``"by_src"``.
        memory: Bytes for the marks of halo nodes.

    Raises:
        ValueError: If the strategy is neither.
    """
    if edge_assign_strategy not in ("by_dst", "by_src"):
        raise ValueError(
            f"edge_assign_strategy must be 'by_dst' or 'by_src' (got {edge_assign_strategy!r})"
        )
    by_dst, parts = edge_assign_strategy == "by_dst", assigned.num_parts
    found = Quality(
        num_parts=parts,
        nodes=assigned.sizes,
        edges={t: [0] * parts for t in graph.edge_types},
        cut_edges=dict.fromkeys(graph.edge_types, 0),
        halo={t: [0] * parts for t in graph.node_types},
        edge_assign_strategy=edge_assign_strategy,
    )
    largest = max(graph.num_nodes.values(), default=0)
    at_once = max(1, min(parts, memory // max(1, largest)))
    passes = -(-parts // at_once)
    total = passes * sum(csc.num_edges for csc in graph.csc.values())
    bar = tqdm(total=total, unit="edges", unit_scale=True, desc="quality", disable=None, delay=2)
    with bar:
        for first in range(0, parts, at_once):
            marks = {
                t: torch.zeros(min(at_once, parts - first), graph.num_nodes[t], dtype=torch.bool)
                for t in graph.node_types
            }
            for edge_type, csc in graph.csc.items():
                far_type = graph.neighbor_type(edge_type)
                near_type = graph.expanded_type(edge_type)
                if not by_dst:
                    near_type, far_type = far_type, near_type
                near_part, far_part = assigned.part[near_type], assigned.part[far_type]
                for dst, src in _edges(csc):
                    near, far = (dst, src) if by_dst else (src, dst)
                    mine, other = near_part[near].long(), far_part[far]
                    if first == 0:
                        sizes = torch.bincount(mine, minlength=parts).tolist()
                        before = found.edges[edge_type]
                        found.edges[edge_type] = [a + b for a, b in zip(before, sizes)]
                        found.cut_edges[edge_type] += int((mine != other).sum())
                    wanted = (mine != other) & (mine >= first) & (mine < first + at_once)
                    marks[far_type][mine[wanted] - first, far[wanted]] = True
                    bar.update(dst.numel())
            for node_type, mark in marks.items():
                found.halo[node_type][first : first + at_once] = mark.sum(1).tolist()
    return found


def _edges(csc: CSC) -> Iterator[tuple[Tensor, Tensor]]:
    """``(destinations, sources)``, a piece at a time, both ``int64``."""
    nodes = csc.indptr.numel() - 1
    for first in range(0, nodes, _EDGES):
        pointers = csc.indptr[first : first + _EDGES + 1]
        for low, counts, begin, end in pieces(pointers, _EDGES):
            node = torch.arange(first + low, first + low + counts.numel())
            yield node.repeat_interleave(counts), csc.indices[begin:end].to(torch.int64)
