"""The undirected graph with weights for partitioners, made of a user's graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_scale.graph.source import of
from pyg_scale.graph.topology import NodeType, Topology
from pyg_scale.ops.undirected import Block, facts, sort_rows, undirected
from pyg_scale.partitioner.base import BALANCES, PartitionGraph
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.topology import topology_of

Train = Tensor | Mapping[NodeType, Tensor] | str
"""Training nodes: a mask or ids, or a dictionary of these by node type, or the name of a set."""


def partition_graph(
    data: Any,
    *,
    balance: str | Sequence[str] = ("nodes",),
    train: Train | None = None,
    is_sorted: bool = True,
    is_simple: bool = True,
) -> PartitionGraph:
    """Make the graph for a partitioner.

    A graph with one type of nodes and edges is used in place, in memory or in a file, if all edges
    exist in both directions, and there are no self-loops and parallel edges (unless
    ``is_simple=False``). Any other is made undirected in memory, with 4 bytes for each direction of
    each edge and 24 for each node.

    Args:
        data: ``Data``, ``HeteroData``, ``(FeatureStore, GraphStore)``, a
            :class:`~pyg_scale.graph.topology.Topology`, or a graph directory, opened or by path.
        balance: Quantities to balance: any of ``"nodes"`` (of each type), ``"edges"`` (in-edges)
            and ``"train"`` (training nodes of each type).
        train: The training nodes. By default those of ``train_mask`` or, in a directory, of the
            index set ``"train"``.
        is_sorted: True if neighbours must be ascending within each node.
        is_simple: True if self-loops and parallel edges must be left out.

    Raises:
        ValueError: If ``balance`` is something else, or has training nodes that are not known.
        TypeError: If ``data`` or ``train`` is of another type.
        GraphDirectoryError: If the directory is damaged, or a part of it is missing.
    """
    kinds = _kinds(balance)
    if isinstance(data, (str, PathLike)):
        data = GraphDirectory(Path(data))
    source = _FromDirectory(data) if isinstance(data, GraphDirectory) else _FromTopology(data)
    offsets, begin = {}, 0
    for node_type, size in source.num_nodes.items():
        offsets[node_type] = (begin, begin + size)
        begin += size
    blocks, degree = source.blocks(offsets, begin)
    indptr, indices, ascending = _adjacency(blocks, begin, is_sorted, is_simple)
    chosen = source.train(train)
    trains = None if chosen is None else _numbered(chosen, offsets, begin)
    if "train" in kinds and trains is None:
        raise ValueError(
            "balance='train', but the training nodes are not known: give train= a mask or ids, or "
            "the graph a train_mask (a graph directory: an index set 'train')"
        )
    weights, names = _weights(kinds, offsets, degree, trains)
    return PartitionGraph(
        indptr, indices, offsets, weights, names, ascending, trains, source.topology
    )


def _kinds(balance: str | Sequence[str]) -> tuple[str, ...]:
    kinds = (balance,) if isinstance(balance, str) else tuple(balance)
    if not kinds or set(kinds) - set(BALANCES) or len(set(kinds)) < len(kinds):
        raise ValueError(
            f"balance must be one or several of {', '.join(map(repr, BALANCES))} (got {balance!r})"
        )
    return tuple(kind for kind in BALANCES if kind in kinds)


def _adjacency(
    blocks: list[Block], num_nodes: int, is_sorted: bool, is_simple: bool
) -> tuple[Tensor, Tensor, bool]:
    """Pointers, neighbours, and True if these are ascending."""
    blocks = [block for block in blocks if block.indices.numel()]
    if len(blocks) == 1:
        block = blocks[0]
        whole = block.indptr.numel() == num_nodes + 1 and block.rows is None
        if whole and block.dst_offset == block.src_offset == 0:
            found = facts(block.indptr, block.indices)
            as_it_is = not is_simple and (found.is_sorted or not is_sorted)
            if found.is_undirected and (found.is_simple or as_it_is):
                indices = block.indices
                if is_sorted and not found.is_sorted:
                    indices = sort_rows(block.indptr, indices)
                return block.indptr, indices, found.is_sorted or is_sorted
    return *undirected(blocks, num_nodes), True


def _weights(
    kinds: tuple[str, ...],
    offsets: Mapping[NodeType, tuple[int, int]],
    degree: Tensor,
    trains: Tensor | None,
) -> tuple[Tensor, tuple[str, ...]]:
    num_nodes = degree.numel()
    if kinds == ("nodes",) and len(offsets) == 1:  # no memory for ones
        return torch.ones(1, 1, dtype=torch.int64).expand(num_nodes, 1), ("nodes",)
    columns, names = [], []
    for kind in kinds:
        if kind == "edges":
            columns.append(degree)
            names.append("edges")
            continue
        for node_type, (begin, end) in offsets.items():
            column = torch.zeros(num_nodes, dtype=torch.int64)
            column[begin:end] = 1 if kind == "nodes" or trains is None else trains[begin:end].long()
            if len(offsets) == 1 or bool(column.any()):
                columns.append(column)
                names.append(kind + of(node_type))
    if not columns:  # types without nodes
        return torch.zeros(num_nodes, 1, dtype=torch.int64), ("nodes",)
    return torch.stack(columns, dim=1), tuple(names)


def _numbered(
    chosen: Mapping[NodeType, Tensor], offsets: Mapping[NodeType, tuple[int, int]], num_nodes: int
) -> Tensor:
    """Training nodes as one mask ``[num_nodes]``."""
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    for node_type, nodes in chosen.items():
        if node_type not in offsets:
            known = ", ".join(map(repr, offsets))
            raise ValueError(f"train names the node type {node_type!r}, the graph has {known}")
        begin, end = offsets[node_type]
        nodes = torch.as_tensor(nodes).detach().cpu()
        if nodes.dim() != 1 or nodes.is_floating_point() or nodes.is_complex():
            raise TypeError(
                f"the training nodes{of(node_type)} must be a mask [num_nodes] or ids [n] "
                f"(got {nodes.dtype} of shape {list(nodes.shape)}): give train= one of them"
            )
        if nodes.dtype == torch.bool:
            if nodes.numel() != end - begin:
                raise ValueError(
                    f"the mask of training nodes{of(node_type)} has {nodes.numel()} entries for "
                    f"{end - begin} nodes"
                )
            mask[begin:end] = nodes
        elif nodes.numel():
            low, high = (int(v) for v in torch.aminmax(nodes))
            if low < 0 or high >= end - begin:
                raise ValueError(
                    f"the training nodes{of(node_type)} go from {low} to {high}, but there are "
                    f"{end - begin} nodes"
                )
            mask[begin + nodes.to(torch.int64)] = True
    return mask


class _FromTopology:
    """The source of a graph in memory."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.topology = data if isinstance(data, Topology) else topology_of(data)
        self.num_nodes = {t: self.topology.num_nodes[t] for t in self.topology.node_types}

    def blocks(self, offsets: Mapping[NodeType, tuple[int, int]], num_nodes: int) -> Any:
        blocks, degree = [], torch.zeros(num_nodes, dtype=torch.int64)
        for edge_type, csc in self.topology.csc.items():
            begin, end = offsets[self.topology.expanded_type(edge_type)]
            source = offsets[self.topology.neighbor_type(edge_type)][0]
            degree[begin:end] += csc.indptr.diff()
            blocks.append(Block(csc.indptr, csc.indices, begin, source))
        return blocks, degree

    def train(self, given: Train | None) -> Mapping[NodeType, Tensor] | None:
        name = given if isinstance(given, str) else "train_mask" if given is None else None
        if name is None:
            return _by_type(given, self.num_nodes)
        found: dict[NodeType, Tensor] = {}
        for node_type in self.num_nodes:
            value = self._attribute(node_type, name)
            if value is None and given is not None:
                value = self._attribute(node_type, f"{name}_mask")
            usable = isinstance(value, (Tensor, np.ndarray)) and value.ndim == 1
            if value is not None and (usable or given is not None):
                found[node_type] = torch.as_tensor(value)
        if given is not None and not found:
            raise ValueError(f"train={given!r}: no nodes have that attribute, or {given}_mask")
        return found or None

    def _attribute(self, node_type: NodeType, name: str) -> Any:
        data = self.data
        if isinstance(data, Data):
            return data.get(name)
        if isinstance(data, HeteroData):
            known = node_type in data.node_types and name in data[node_type]
            return data[node_type][name] if known else None
        if isinstance(data, (tuple, list)):
            for attr in data[0].get_all_tensor_attrs():
                if attr.group_name == node_type and attr.attr_name == name:
                    return data[0].get_tensor(attr, index=None)
        return None


class _FromDirectory:
    """The source of a graph directory, of one part or of several."""

    def __init__(self, directory: GraphDirectory) -> None:
        self.directory = directory
        self.meta = directory.meta
        self.num_nodes = {t: node.num_nodes for t, node in self.meta.nodes.items()}
        self.topology: Topology | None = None
        if self.meta.num_parts == 1:
            part = directory.part(0)
            self.topology = Topology(
                node_types=tuple(self.meta.nodes),
                edge_types=tuple(self.meta.edges),
                num_nodes=self.num_nodes,
                csc={t: part.csc(t) for t in self.meta.edges},
                direction=self._direction(),
                float_time=self.meta.float_time,
            )

    def _direction(self) -> str:
        partition = self.meta.partition
        by_src = partition is not None and partition.edge_assign_strategy == "by_src"
        return "backward" if by_src else "forward"

    def blocks(self, offsets: Mapping[NodeType, tuple[int, int]], num_nodes: int) -> Any:
        forward = self._direction() == "forward"
        blocks, degree = [], torch.zeros(num_nodes, dtype=torch.int64)
        for edge_type in self.meta.edges:
            ends = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
            source, mine = ends if forward else ends[::-1]
            begin, end = offsets[mine]
            for number in range(self.meta.num_parts):
                part = self.directory.part(number)
                csc = part.csc(edge_type)
                rows = None if self.meta.num_parts == 1 else part.orig_id(mine)
                where = slice(begin, end) if rows is None else begin + rows
                degree[where] += csc.indptr.diff()
                blocks.append(Block(csc.indptr, csc.indices, begin, offsets[source][0], rows))
        return blocks, degree

    def train(self, given: Train | None) -> Mapping[NodeType, Tensor] | None:
        if given is not None and not isinstance(given, str):
            return _by_type(given, self.num_nodes)
        name = "train" if given is None else given
        found = {}
        for node_type, node in self.meta.nodes.items():
            if name in self.meta.index_sets.get(node_type or "", {}):
                found[node_type] = self.directory.index_set(name, node_type)
            elif f"{name}_mask" in node.attributes and self.meta.num_parts == 1:
                mask = self.directory.part(0).node_attribute(node_type, f"{name}_mask")
                if mask.dim() == 1 or given is not None:
                    found[node_type] = mask
        if given is not None and not found:
            raise ValueError(
                f"train={given!r}: {self.directory.path} has no index set and no mask of that name"
            )
        return found or None


def _by_type(given: Any, num_nodes: Mapping[NodeType, int]) -> Mapping[NodeType, Tensor]:
    if isinstance(given, Mapping):
        return given
    if not isinstance(given, (Tensor, np.ndarray)):
        raise TypeError(
            "train must be a mask, ids, one of them for each node type, or the name of a set "
            f"(got {type(given).__name__})"
        )
    if len(num_nodes) > 1:
        raise TypeError("the graph has several node types: give train={'paper': mask, ...}")
    return {next(iter(num_nodes)): torch.as_tensor(given)}
