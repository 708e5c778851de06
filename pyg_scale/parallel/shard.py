"""One rank's share of a graph directory: its own nodes, their in-edges, and the halo.

Nodes have local numbers: first the own ones, in the order of the rank's parts, then those of the
halo, by the rank that owns them. All in-edges of an own node are here, so that any aggregation is
that of the whole graph once the halo has the rows of its owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyg_scale.graph.base import InDirectory
from pyg_scale.graph.topology import EdgeType, NodeType
from pyg_scale.parallel.peers import Peers
from pyg_scale.store.directory import GraphDirectory, PartitionBook
from pyg_scale.store.directory.data import unchanged_directory


@dataclass
class Halo:
    """The nodes of a type that a rank needs of others, and those that others need of it.

    Attributes:
        num_own: Number of own nodes.
        num_halo: Number of nodes of other ranks.
        send: Local numbers ``int64`` ``[num_sent]`` of own nodes that others need, by rank.
        num_sent: How many each rank needs.
        num_received: How many come from each rank.
        own_ids: Original ids ``int64`` ``[num_own]``.
        halo_ids: Original ids ``int64`` ``[num_halo]``.
    """

    num_own: int
    num_halo: int
    send: Tensor
    num_sent: list[int]
    num_received: list[int]
    own_ids: Tensor
    halo_ids: Tensor


@dataclass
class Shard:
    """The share of one rank.

    Attributes:
        directory: The graph directory.
        parts: The parts of this rank.
        halos: The nodes of each type.
        edges: By edge type ``int64`` ``[2, num_edges]``, local numbers, grouped by destination.
        edge_ids: By edge type the original ids ``int64`` ``[num_edges]``.
        own: By node type the own nodes of this rank among those of the parts; all of them, but
            where several ranks share the same parts.
    """

    directory: GraphDirectory
    parts: list[int]
    halos: dict[NodeType, Halo]
    edges: dict[EdgeType, Tensor]
    edge_ids: dict[EdgeType, Tensor]
    own: dict[NodeType, slice] = field(default_factory=dict)
    _rows: dict[EdgeType, Tensor] = field(default_factory=dict)

    @property
    def is_hetero(self) -> bool:
        """True if nodes have types."""
        return self.directory.meta.is_hetero

    @property
    def own_ids(self) -> dict[NodeType, Tensor]:
        """The original ids ``int64`` ``[num_own]`` of the own nodes of this rank, by type."""
        return {kind: halo.own_ids[self._own(kind)] for kind, halo in self.halos.items()}

    def input(self, name: str) -> Any:
        """An attribute of the graph for own nodes or their in-edges, or a dictionary by type.

        ``n_id`` and ``n_id_dict``, where the graph has no such attribute, are the original ids of
        own nodes.

        Raises:
            ValueError: If the graph has no such attribute; lists those that there are.
        """
        meta = self.directory.meta
        if not self.is_hetero:
            if name == "edge_index":
                return self.edges[None]
            if name in meta.nodes[None].attributes:
                return self._of_nodes(None, name)
            if None in meta.edges and name in meta.edges[None].attributes:
                return self.of_edges(None, name)
            if name == "n_id":
                return self.own_ids[None]
            known = {"edge_index", "n_id", *meta.nodes[None].attributes}
            known |= set(meta.edges[None].attributes) if None in meta.edges else set()
            raise ValueError(_unknown(name, known))
        if name == "edge_index_dict":
            return dict(self.edges)
        of = name.removesuffix("_dict")
        found: dict[Any, Tensor] = {}
        if name.endswith("_dict"):
            for node in meta.nodes.values():
                if of in node.attributes:
                    found[node.name] = self._of_nodes(node.name, of)
            for edge in meta.edges.values():
                if of in edge.attributes:
                    found[edge.name] = self.of_edges(edge.name, of)
        if not found and name == "n_id_dict":
            return self.own_ids
        if not found:
            known = {"edge_index_dict", "n_id_dict"}
            known |= {f"{each}_dict" for node in meta.nodes.values() for each in node.attributes}
            known |= {f"{each}_dict" for edge in meta.edges.values() for each in edge.attributes}
            raise ValueError(_unknown(name, known))
        return found

    def _own(self, node_type: NodeType) -> slice:
        return self.own.get(node_type, slice(None))

    def _of_nodes(self, node_type: NodeType, name: str) -> Tensor:
        parts = [self.directory.part(part).node_attribute(node_type, name) for part in self.parts]
        first, last, _ = self._own(node_type).indices(sum(part.size(0) for part in parts))
        found, begin = [], 0
        for part in parts:
            found.append(part[max(0, first - begin) : max(0, last - begin)])
            begin += part.size(0)
        return torch.cat(found)

    def of_edges(self, edge_type: EdgeType, name: str) -> Tensor:
        """An attribute ``[num_edges, ...]`` of the edges of a type."""
        if edge_type not in self._rows:
            rows, begin = [], 0
            for number in self.parts:
                part = self.directory.part(number)
                ids, csc = part.edge_ids(edge_type), part.csc(edge_type)
                size = part.num_edges(edge_type)
                if csc.edge_id is None:
                    found = torch.arange(size)
                elif ids is None:
                    found = csc.edge_id.to(torch.int64)
                else:
                    found = torch.searchsorted(ids.to(torch.int64), csc.edge_id.to(torch.int64))
                rows.append(found + begin)
                begin += size
            self._rows[edge_type] = torch.cat(rows)
        parts = [self.directory.part(part).edge_attribute(edge_type, name) for part in self.parts]
        return torch.cat(parts)[self._rows[edge_type]]


def share(graph: Any, peers: Peers) -> Shard:
    """The share of this rank of a graph. Every rank calls it.

    Every part belongs to one rank among those that can read it, equal numbers to each if possible.

    Args:
        graph: What :func:`pyg_scale.open` returned.
        peers: The ranks.

    Raises:
        TypeError: If it is something else.
        ValueError: If it was changed since, has fewer parts than there are ranks, has out-edges in
            its parts, or ranks have different graphs. The same on all ranks.
        GraphDirectoryError: If no rank has a part, or a file is damaged.
        CommError: If a rank is gone or late; names it.
    """
    with peers.together():
        directory = directory_of(graph)
        meta = directory.meta
        if meta.num_parts < peers.size:
            raise ValueError(
                f"{directory.path} has {meta.num_parts} parts for {peers.size} ranks: partition it "
                f"into at least {peers.size}, pyg_scale.partition(data, {peers.size}, path=...)"
            )
        if meta.partition is not None and meta.partition.edge_assign_strategy == "by_src":
            raise ValueError(
                f"parts of {directory.path} have the out-edges of their nodes: partition it with "
                "edge_assign_strategy='by_dst', so that a rank has all in-edges of a node"
            )
    found = peers.gather([directory.checksum, directory.parts])
    with peers.together():
        other = next((rank for rank, each in enumerate(found) if each[0] != found[0][0]), None)
        if other is not None:
            raise ValueError(f"rank {other} has another graph than rank 0: their META.json differ")
        owner = _owners([each[1] for each in found], meta.num_parts)
        parts = [part for part in range(meta.num_parts) if owner[part] == peers.rank]
        if not parts:
            raise ValueError(
                f"there is no part of {directory.path} for this rank, which can read "
                f"{directory.parts or 'none'}: copy another one to its machine"
            )
        wanted = {t: _wanted(directory, t, parts, owner) for t in meta.nodes}
    halos = {t: _halo(directory.books[t], wanted[t], parts, owner, peers) for t in meta.nodes}
    edges, edge_ids = {}, {}
    with peers.together():
        for edge_type in meta.edges:
            src, dst = (None, None) if edge_type is None else (edge_type[0], edge_type[2])
            edges[edge_type], edge_ids[edge_type] = _edges(
                directory, edge_type, parts, owner, peers.rank, halos[src], src, dst
            )
            edges[edge_type] = edges[edge_type].to(peers.device)
    return Shard(directory, parts, halos, edges, edge_ids)


def sizes_of(number: int, size: int) -> list[int]:
    """The sizes of ``size`` shares of ``number`` things in a row, which differ by 1 at most."""
    return [number // size + (rank < number % size) for rank in range(size)]


def slice_of(shard: Shard, peers: Peers) -> tuple[Shard, dict[NodeType, list[int]]]:
    """A share of which each of several ranks owns a slice of nodes, and all have the edges.

    Args:
        shard: The share of all of them.
        peers: The ranks.

    Returns:
        The share with the slice of this rank, and by node type the sizes of all slices.

    Raises:
        ValueError: If ranks have other parts. The same on all ranks.
        CommError: If a rank is gone or late; names it.
    """
    others = peers.gather(shard.parts)
    with peers.together():
        if any(parts != others[0] for parts in others):
            raise ValueError(
                f"ranks that share parts of {shard.directory.path} can read different ones: copy "
                f"the same parts to the machines of these ranks (they would take {others})"
            )
    sizes = {kind: sizes_of(halo.num_own, peers.size) for kind, halo in shard.halos.items()}
    begins = {kind: sum(each[: peers.rank]) for kind, each in sizes.items()}
    own = {k: slice(begin, begin + sizes[k][peers.rank]) for k, begin in begins.items()}
    return replace(shard, own=own), sizes


def directory_of(graph: Any) -> GraphDirectory:
    """The directory of an opened graph.

    Raises:
        TypeError: If it is none.
        ValueError: If it was changed since.
    """
    directory = unchanged_directory(graph)
    if directory is not None:
        return directory
    if not isinstance(graph, InDirectory):
        raise TypeError(
            f"graph must be an opened graph directory (got {type(graph).__name__}): write it with "
            "pyg_scale.partition(data, num_parts, path='parts'), and graph=pyg_scale.open('parts')"
        )
    raise ValueError(
        "the graph was changed after it was opened, which other ranks do not know: change it "
        "before it is partitioned, or give changed rows to the model, model(x=rows)"
    )


def _owners(readable: Sequence[Sequence[int]], num_parts: int) -> list[int]:
    """The rank that owns each part."""
    holders = [[r for r, parts in enumerate(readable) if p in parts] for p in range(num_parts)]
    load, owner = [0] * len(readable), [0] * num_parts
    for part in sorted(range(num_parts), key=lambda p: (len(holders[p]), p)):
        if not holders[part]:
            who = "no rank has" if len(readable) > 1 else "this rank needs"
            raise ValueError(f"{who} part {part}: copy part-{part} to its machine")
        owner[part] = min(holders[part], key=lambda r: (load[r], (r - part) % len(readable)))
        load[owner[part]] += 1
    return owner


def _wanted(
    directory: GraphDirectory, node_type: NodeType, parts: Sequence[int], owner: Sequence[int]
) -> Tensor:
    """Original ids of nodes of other ranks, by rank, then ascending."""
    listed = [directory.part(part).halo(node_type) for part in parts]
    ids = torch.cat(listed).unique()
    ranks = torch.tensor(owner)[directory.books[node_type].part_of(ids)]
    others = ranks != owner[parts[0]]
    return ids[others][ranks[others].argsort(stable=True)]


def _starts(book: PartitionBook, parts: Sequence[int]) -> Tensor:
    """The local number of the first node of each part ``[num_parts]``; of other ranks', 0."""
    sizes, starts, begin = book.offsets.diff(), torch.zeros(book.num_parts, dtype=torch.int64), 0
    for part in parts:
        starts[part] = begin
        begin += int(sizes[part])
    return starts


def _halo(
    book: PartitionBook, wanted: Tensor, parts: Sequence[int], owner: Sequence[int], peers: Peers
) -> Halo:
    """Tell each rank which of its nodes this one needs."""
    own = [book.nodes_of(part) for part in parts]
    own_ids = torch.cat(own)
    ranks = torch.tensor(owner)[book.part_of(wanted)]
    num_received = torch.bincount(ranks, minlength=peers.size)
    num_sent, device = num_received.clone(), peers.device
    asked = wanted.new_empty(0)
    if peers.size > 1:
        ones = [1] * peers.size
        counts = num_sent.to(device)
        peers.all_to_all(counts, num_received.to(device), ones, ones)
        num_sent = counts.cpu()
        received = torch.empty(int(num_sent.sum()), dtype=torch.int64, device=device)
        peers.all_to_all(received, wanted.to(device), num_sent.tolist(), num_received.tolist())
        asked = received.cpu()
    send = _starts(book, parts)[book.part_of(asked)] + book.local_of(asked)
    return Halo(
        own_ids.numel(),
        wanted.numel(),
        send.to(device),
        num_sent.tolist(),
        num_received.tolist(),
        own_ids,
        wanted,
    )


def _edges(
    directory: GraphDirectory,
    edge_type: EdgeType,
    parts: Sequence[int],
    owner: Sequence[int],
    rank: int,
    sources: Halo,
    src: NodeType,
    dst: NodeType,
) -> tuple[Tensor, Tensor]:
    """The in-edges of own nodes by local numbers, and their original ids."""
    book = directory.books[src]
    starts, of = _starts(book, parts), torch.tensor(owner)
    order = sources.halo_ids.argsort()
    ordered = sources.halo_ids[order]
    begins = _starts(directory.books[dst], parts)
    rows, columns, ids = [], [], []
    for number in parts:
        csc = directory.part(number).csc(edge_type)
        source = csc.indices.to(torch.int64)
        part = book.part_of(source)
        is_own = of[part] == rank
        local = torch.empty_like(source)
        local[is_own] = (starts[part] + book.local_of(source))[is_own]
        local[~is_own] = order[torch.searchsorted(ordered, source[~is_own])] + sources.num_own
        degrees = csc.indptr.diff()
        rows.append(local)
        columns.append(torch.arange(degrees.numel()).repeat_interleave(degrees) + begins[number])
        size = source.numel()
        ids.append(torch.arange(size) if csc.edge_id is None else csc.edge_id.to(torch.int64))
    return torch.stack([torch.cat(rows), torch.cat(columns)]), torch.cat(ids)


def _unknown(name: str, known: set[str]) -> str:
    return f"the graph has no {name}, which is one of inputs=; it has {', '.join(sorted(known))}"
