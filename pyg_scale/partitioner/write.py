"""Writing of a graph directory of several parts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from tqdm.auto import tqdm

from pyg_scale.files.byte_size import byte_size
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.partitioner.assigned import Assigned, check_assignment
from pyg_scale.partitioner.base import Partition
from pyg_scale.partitioner.counts import Quality
from pyg_scale.partitioner.train_nodes import count_train, train_nodes_of
from pyg_scale.partitioner.whole import whole_directory
from pyg_scale.partitioner.write_edges import (
    end_of,
    write_edge_attributes,
    write_halo,
    write_in_edges,
)
from pyg_scale.partitioner.write_nodes import write_attributes, write_book
from pyg_scale.partitioner.write_out_edges import write_out_edges
from pyg_scale.store.directory import (
    DirectoryWriter,
    EdgeMeta,
    GraphDirectory,
    Meta,
    PartitionMeta,
)
from pyg_scale.store.directory.meta import node_dir

STRATEGIES = ("by_dst", "by_src")


def write_partition(
    data: Any,
    partition: Partition,
    path: str | Path,
    *,
    edge_assign_strategy: str = "by_dst",
    cache: Mapping[NodeType, Sequence[Tensor]] | None = None,
    quality: Quality | None = None,
    overwrite: bool = False,
    memory: int | str = "1GB",
) -> GraphDirectory:
    """Write a graph directory with a part for each part of a partition.

    Nodes, with features, labels and masks, are in the part to which they are assigned; edges, with
    their attributes, are in the part of their destination. All ids are original ids; local ids are
    ranks within a part. The input is read once, from beginning to end (except edge attributes if
    memory has less than a byte for each edge).

    Args:
        data: A graph directory of one part, opened or by its path. Also ``Data`` or ``HeteroData``,
            or a directory of several parts, which are merged in memory; these are first saved next
            to ``path``.
        partition: The part of every node.
        path: The directory to write. If the graph itself is there (``overwrite=True``), it is
            replaced at the end.
        edge_assign_strategy: ``"by_dst"``: each part has the in-edges of its nodes, as samplers
            need them. ``"by_src"``: each part has the out-edges, for
            ``sample_direction="backward"``.
        cache: The original ids ``[n]`` of nodes of other parts whose features each part should
            cache, hottest first: a tensor per part by node type. ``None``: those of the
            partitioner.
        quality: Measures to store in the directory that are not counted during writing, such as
            :attr:`~pyg_scale.partitioner.counts.Quality.remote`.
        overwrite: If True, a graph directory at ``path`` may be replaced.
        memory: Bytes to use besides the assignment, such as ``"1GB"``; see
            :func:`~pyg_scale.files.byte_size.byte_size`.

    Returns:
        The directory, opened.

    Raises:
        ValueError: If the partition does not fit the graph, or an option is wrong.
        TypeError: If the assignment is not an integer tensor, or ``data`` not a graph.
        GraphDirectoryError: If ``data`` is damaged, or the disk is full.
        FileExistsError: If something is at ``path`` and ``overwrite`` is not set.
    """
    if edge_assign_strategy not in STRATEGIES:
        raise ValueError(
            f"edge_assign_strategy must be one of {', '.join(map(repr, STRATEGIES))} "
            f"(got {edge_assign_strategy!r})"
        )
    budget = max(1 << 20, byte_size(memory, "memory"))
    if (known := _counts(data)) is not None:
        check_assignment(partition, known)  # before a graph in memory is saved
    wanted = partition.cache if cache is None else cache
    with (
        DirectoryWriter(path, overwrite=overwrite) as writer,
        whole_directory(data, Path(path)) as source,
    ):
        counts = {name: node.num_nodes for name, node in source.meta.nodes.items()}
        assigned = check_assignment(partition, counts)
        lists = _checked_cache(wanted, counts, assigned.num_parts)
        meta, cut = _write(source, writer, assigned, edge_assign_strategy, lists, budget)
        found = _quality(source, meta, assigned, cut)
        found.method = partition.method
        if quality is not None:
            found.seconds, found.remote = quality.seconds, quality.remote
        meta.partition = PartitionMeta(
            method=partition.method,
            options=dict(partition.options),
            seed=partition.seed,
            edge_assign_strategy=edge_assign_strategy,
            extra={**partition.extra, "quality": found.to_dict()},
        )
        writer.commit(meta)
    return GraphDirectory(path)


def _counts(data: Any) -> dict[NodeType, int] | None:
    """Number of nodes of each type of a graph in memory; ``None`` if not known for all types."""
    if isinstance(data, Data):
        return {None: int(data.num_nodes or 0)}
    if not isinstance(data, HeteroData):
        return None
    ends = {end for source, _, target in data.edge_types for end in (source, target)}
    if not ends <= set(data.node_types) or any(data[t].num_nodes is None for t in data.node_types):
        return None
    return {name: int(data[name].num_nodes) for name in data.node_types}


def _checked_cache(
    cache: Mapping[NodeType, Sequence[Tensor]],
    num_nodes: Mapping[NodeType, int],
    num_parts: int,
) -> dict[NodeType, list[Tensor]]:
    """The cache lists of every part, ``int64``."""
    checked: dict[NodeType, list[Tensor]] = {}
    for node_type, lists in cache.items():
        of = "cache" if node_type is None else f"cache of {node_type!r}"
        if node_type not in num_nodes:
            raise ValueError(f"{of}: the graph has no such node type")
        if len(lists) != num_parts:
            raise ValueError(f"{of} has {len(lists)} lists for {num_parts} parts: give one each")
        for ids in lists:
            if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
                raise TypeError(f"{of} must hold one-dimensional int64 or int32 tensors of ids")
            wrong = ids[(ids < 0) | (ids >= num_nodes[node_type])]
            if wrong.numel():
                raise IndexError(
                    f"{of} has node {int(wrong[0])}, there are only {num_nodes[node_type]}"
                )
        checked[node_type] = [ids.to(torch.int64) for ids in lists]
    return checked


def _write(
    source: GraphDirectory,
    writer: DirectoryWriter,
    assigned: Assigned,
    strategy: str,
    cache: Mapping[NodeType, list[Tensor]],
    memory: int,
) -> tuple[Meta, dict[EdgeType, int]]:
    """Write all files; return their description for ``META.json``, and the number of cut edges."""
    _copy_common_files(source, writer)
    edges: dict[EdgeType, EdgeMeta] = {}
    with tqdm(
        total=_bytes_to_read(source),
        unit="B",
        unit_scale=True,
        desc="partition",
        disable=None,
        delay=2,
    ) as bar:
        for node_type in source.meta.nodes:
            write_book(writer, assigned, node_type, max(1, min(1 << 22, memory // 64)))
            write_attributes(source, writer, assigned, node_type, _chunk(memory), bar.update)
        write_edges = write_in_edges if strategy == "by_dst" else write_out_edges
        for edge_type in source.meta.edges:
            edge = write_edges(source, writer, assigned, edge_type, memory, bar.update)
            write_edge_attributes(source, writer, assigned.num_parts, edge, memory, bar.update)
            edges[edge_type] = edge
    neighbors: dict[NodeType, list[tuple[EdgeType, EdgeMeta]]] = {}
    for edge_type, edge in edges.items():
        end = end_of(edge_type, 0 if strategy == "by_dst" else 2)
        neighbors.setdefault(end, []).append((edge_type, edge))
    halo, cut = write_halo(writer, assigned, neighbors, memory)
    nodes = {
        name: replace(
            node,
            book=not assigned.is_range[name],
            part_nodes=assigned.sizes[name],
            part_halo=halo[name],
            part_cache=[ids.numel() for ids in cache.get(name, ())],
        )
        for name, node in source.meta.nodes.items()
    }
    for node_type, lists in cache.items():
        for number, ids in enumerate(lists):
            writer.write(f"{node_dir(node_type, number)}/cache.npy", ids)
    partition = PartitionMeta("", edge_assign_strategy=strategy)
    meta = replace(
        source.meta,
        nodes=nodes,
        edges=edges,
        num_parts=assigned.num_parts,
        partition=partition,
        files={},
    )
    return meta, cut


def _chunk(memory: int) -> int:
    """Bytes of rows to read at a time; sorting takes as much again."""
    return max(1 << 16, min(1 << 27, memory // 4))


def _copy_common_files(source: GraphDirectory, writer: DirectoryWriter) -> None:
    """Copy files that belong to no part: index sets, and additions of later versions."""
    for name in source.meta.files:
        if not name.startswith(("part-", "book/")):
            target = writer.staging / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with source.file(name) as old, target.open("wb") as new:
                shutil.copyfileobj(old, new)


def _bytes_to_read(source: GraphDirectory) -> int:
    skipped = ("indptr.npy", "orig_id.npy")
    return sum(
        file.bytes
        for name, file in source.meta.files.items()
        if name.startswith("part-") and not name.endswith(skipped)
    )


def _quality(
    source: GraphDirectory, meta: Meta, assigned: Assigned, cut: dict[EdgeType, int]
) -> Quality:
    """The measures counted during writing."""
    assert meta.partition is not None
    return Quality(
        num_parts=meta.num_parts,
        nodes={name: node.part_nodes for name, node in meta.nodes.items()},
        edges={name: edge.part_edges for name, edge in meta.edges.items()},
        cut_edges=cut,
        halo={name: node.part_halo for name, node in meta.nodes.items()},
        train=count_train(train_nodes_of(source), assigned),
        edge_assign_strategy=meta.partition.edge_assign_strategy,
    )
