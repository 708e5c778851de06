"""Sampling across the parts of a graph directory: each part answers for its own nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.graph.topology import CSC, EdgeType, NodeType, PartsHere, Router, Topology
from pyg_scale.ops.split_rows import split_rows
from pyg_scale.ops.stitch import PartEdges, stitch_edges
from pyg_scale.sampler.choose import Ask, Picked
from pyg_scale.store.directory import GraphDirectory
from pyg_scale.store.directory.page_faults import no_readahead_beyond_memory
from pyg_scale.store.directory.paths import edge_dir

if TYPE_CHECKING:
    from pyg_scale.sampler.hop import HopSampler


MakeRouter = Callable[["PartsRouter"], Router]
"""Makes a router that reaches further than the one it is given, which reads what is here."""


def parts_topology(
    directory: GraphDirectory,
    *,
    direction: str = "forward",
    time_attr: str | None = None,
    weight_attr: str | None = None,
    make_router: MakeRouter | None = None,
) -> Topology:
    """The topology of a directory of several parts: each part answers for its own nodes.

    Args:
        directory: The graph.
        direction: ``"forward"`` for in-edges, ``"backward"`` for out-edges.
        time_attr: The attribute that holds times; that by which the directory is ordered.
        weight_attr: The attribute that holds weights: that which the directory has, or ``None``.
        make_router: How parts are reached that this process does not read; by default it reads
            all of them.

    Raises:
        ValueError: If edges are assigned to parts, ordered or weighted in another way; says how to
            write the directory again.
    """
    meta = directory.meta
    _check_written_for(directory, direction, time_attr, weight_attr)
    types = tuple(meta.edges) if meta.is_hetero else (None,)
    narrow = bool(meta.edges) and all(e.index_dtype == "int32" for e in meta.edges.values())
    num_nodes = {node_type: node.num_nodes for node_type, node in meta.nodes.items()}
    answers = PartAnswers(directory, num_nodes, direction, weighted=weight_attr is not None)
    router = PartsRouter(directory, direction, answers)
    return Topology(
        node_types=tuple(meta.nodes),
        edge_types=types,
        num_nodes=num_nodes,
        csc={},
        index_dtype=torch.int32 if narrow else torch.int64,
        direction=direction,
        float_time=meta.float_time,
        router=router if make_router is None else make_router(router),
    )


def _check_written_for(
    directory: GraphDirectory, direction: str, time_attr: str | None, weight_attr: str | None
) -> None:
    meta = directory.meta
    strategy = "by_dst" if meta.partition is None else meta.partition.edge_assign_strategy
    wanted = "by_dst" if direction == "forward" else "by_src"
    if strategy != wanted:
        raise ValueError(
            f"{directory.path} has the edges of each node's {'in' if wanted == 'by_src' else 'out'}"
            f"-neighbourhood together (edge_assign_strategy={strategy!r}), sample_direction="
            f"{direction!r} needs {wanted!r}: pyg-scale partition ... --edge-assign-strategy "
            f"{wanted}"
        )
    if time_attr != meta.time_attr or weight_attr not in (None, meta.weight_attr):
        name = "time_attr" if time_attr != meta.time_attr else "weight_attr"
        asked = time_attr if name == "time_attr" else weight_attr
        raise ValueError(
            f"{directory.path} was written with {name}={getattr(meta, name)!r}, the sampler has "
            f"{name}={asked!r}: write it again with that, or ask for what it has"
        )


class PartAnswers:
    """Answers for the parts that this process can read.

    Args:
        directory: The graph.
        num_nodes: Nodes of each type.
        direction: ``"forward"`` or ``"backward"``.
        weighted: Whether edges are chosen by weight.
    """

    def __init__(
        self,
        directory: GraphDirectory,
        num_nodes: Mapping[NodeType, int],
        direction: str,
        *,
        weighted: bool,
    ) -> None:
        self._directory, self._num_nodes, self._direction = directory, num_nodes, direction
        self._weighted = weighted
        self._csc: dict[tuple[int, EdgeType], CSC] = {}

    def answer(self, sampler: HopSampler, part: int, ask: Ask, place: Tensor) -> Picked:
        """Choose in-edges of nodes of a part.

        Args:
            sampler: Says which.
            part: The part.
            ask: The nodes, all of the part.
            place: Their local ids, ``int64`` ``[n]``.
        """
        neighbors = end_of(ask.edge_type, self._direction, expanded=False)
        csc = self.csc(part, ask.edge_type)
        return sampler.choose(csc, ask, place, None, self._num_nodes[neighbors])

    def csc(self, part: int, edge_type: EdgeType) -> CSC:
        """The in-edges of a part with their times, always the same object."""
        key = part, edge_type
        if key not in self._csc:
            neighbors = end_of(edge_type, self._direction, expanded=False)
            csc = self._directory.part(part).csc(edge_type)
            waits = no_readahead_beyond_memory(csc, len(self._directory.parts))
            csc = replace(csc, waits=waits)
            if csc.time is None and neighbors in timed_nodes(self._directory):
                csc = replace(csc, time=self._neighbor_time(part, edge_type, csc))
            self._csc[key] = csc if self._weighted else replace(csc, weight_prefix=None)
        return self._csc[key]

    def _neighbor_time(self, part: int, edge_type: EdgeType, csc: CSC) -> Tensor:
        """The times of neighbours, which parts of an earlier release lack; all must be here."""
        directory = self._directory
        if len(directory.parts) < directory.meta.num_parts:
            raise GraphDirectoryError(
                f"{directory.path / edge_dir(edge_type, part)} has no time.npy with the times of "
                "neighbours, as it was written by an earlier release: partition the graph again"
            )
        neighbors = end_of(edge_type, self._direction, expanded=False)
        return node_times(directory, neighbors, csc.indices.to(torch.int64))


def end_of(edge_type: EdgeType, direction: str, *, expanded: bool) -> NodeType:
    """The node type that is expanded along an edge type, or that of the neighbours."""
    if edge_type is None:
        return None
    return edge_type[2 if (direction == "forward") == expanded else 0]


class PartsRouter:
    """Splits a hop by the parts that own its nodes, and puts the answers together again.

    Args:
        directory: The graph.
        direction: ``"forward"`` or ``"backward"``.
        answers: Answers for a part.
    """

    def __init__(self, directory: GraphDirectory, direction: str, answers: PartAnswers) -> None:
        meta = directory.meta
        self.directory, self._direction, self._answers = directory, direction, answers
        self._times: dict[NodeType, Tensor] = {}
        self._here: PartsHere | None = None
        self._each_part = torch.arange(meta.num_parts)
        self._in_order = torch.zeros(meta.num_parts, dtype=torch.bool)
        self.timed_nodes = timed_nodes(directory)
        self.timed = frozenset(
            edge_type
            for edge_type, edge in meta.edges.items()
            if edge.has_time or end_of(edge_type, direction, expanded=False) in self.timed_nodes
        )

    def parts_here(self) -> PartsHere | None:
        """All in-edges, if all parts are here."""
        directory = self.directory
        if len(directory.parts) < directory.meta.num_parts:
            return None
        if self._here is None:
            types = list(directory.meta.edges) if directory.meta.is_hetero else [None]
            self._here = PartsHere(
                {t: [self._answers.csc(p, t) for p in directory.parts] for t in types},
                directory.books,
            )
        return self._here

    def expand(self, sampler: HopSampler, asks: Sequence[Ask]) -> list[Picked]:
        """The in-edges of the nodes of a hop, in their order, whichever part they are in."""
        return [self._expand(sampler, ask) for ask in asks]

    def _expand(self, sampler: HopSampler, ask: Ask) -> Picked:
        book = self.directory.books[end_of(ask.edge_type, self._direction, expanded=True)]
        shares = split_rows(
            book.part, book.local, book.offsets, ask.node, self._each_part, self._in_order
        )
        if len(shares) == 1:  # all of them, as they were given
            return self._answers.answer(sampler, shares[0].group, ask, shares[0].ids)
        answers = []
        for part, place, rows, _ in shares:
            picked = self._answers.answer(sampler, part, ask.at(rows), place)
            answers.append(PartEdges(rows, None, *picked))
        return Picked(*stitch_edges(ask.node.numel(), answers))

    def node_time(self, node_type: NodeType, node: Tensor) -> Tensor:
        """The times of nodes, whichever part they are in."""
        return node_times(self.directory, node_type, node.to(torch.int64))

    def all_node_times(self, node_type: NodeType) -> Tensor:
        """The times of all nodes of a type, which needs all parts."""
        if node_type not in self._times:
            every = torch.arange(self.directory.meta.nodes[node_type].num_nodes)
            self._times[node_type] = node_times(self.directory, node_type, every)
        return self._times[node_type]


def timed_nodes(directory: GraphDirectory) -> frozenset[NodeType]:
    """The node types by whose times in-edges are ordered."""
    meta = directory.meta
    if meta.time_attr is None or meta.time_of_edges:
        return frozenset()
    return frozenset(t for t, node in meta.nodes.items() if meta.time_attr in node.attributes)


def node_times(directory: GraphDirectory, node_type: NodeType, node: Tensor) -> Tensor:
    """The (sortable) times ``int64`` ``[n]`` of nodes ``[n]``, from their parts.

    Raises:
        GraphDirectoryError: If one of the parts is not here.
    """
    book, meta = directory.books[node_type], directory.meta
    owner, place = book.part_of(node), book.local_of(node)
    out = torch.empty(node.numel(), dtype=torch.int64)
    for part in owner.unique().tolist():
        mine = (owner == part).nonzero().view(-1)
        time = directory.part(part).node_attribute(node_type, meta.time_attr or "")[place[mine]]
        out[mine] = meta.sortable(time, node_type)
    return out
