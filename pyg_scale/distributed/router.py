"""Sampling across ranks: each hop asks all of them at once, and answers come in request order.

A rank reads its local parts itself, while the others work on its requests. The nodes of all edge
types and parts for which one rank answers are one request, with every node once. If a rank fails,
its requests go to the next ranks that hold its parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pyg_scale.comm import Service, Work
from pyg_scale.distributed.columns import Columns
from pyg_scale.distributed.described import describe
from pyg_scale.distributed.failover import Health, Route, Search
from pyg_scale.distributed.messages import Layout
from pyg_scale.distributed.ranks import Ranks
from pyg_scale.distributed.records import to_record
from pyg_scale.distributed.serving import EDGES, TIMES
from pyg_scale.errors import CommError
from pyg_scale.graph.base import TopologyOptions
from pyg_scale.graph.topology import NodeType
from pyg_scale.ops.split_rows import split_rows
from pyg_scale.ops.stitch import PartEdges, stitch_edges
from pyg_scale.sampler.choose import Ask, Picked
from pyg_scale.sampler.hop import HopSampler
from pyg_scale.sampler.parts import PartsRouter, end_of

if TYPE_CHECKING:
    from pyg_scale.store.directory import GraphDirectory


class _Share(NamedTuple):
    """One rank's share of an ask."""

    number: int  # the ask's
    ask: Ask  # with some of its nodes
    position: Tensor  # of the nodes in the whole ask
    take: Tensor | None  # for each position, the index in the share's nodes; None if one to one

    def answer(self, picked: Picked) -> PartEdges:
        """The rank's answer, as a part of the answer to the whole ask."""
        return PartEdges(self.position, self.take, *picked)


class RankRouter:
    """Samples in-edges on any rank; see :class:`~pyg_scale.graph.topology.Router`.

    Args:
        ranks: The ranks that have the graph open.
        local: Reads local parts.
        columns: Gathers times of all nodes.
        options: The options of the topology.
    """

    def __init__(
        self, ranks: Ranks, local: PartsRouter, columns: Columns, options: TopologyOptions
    ) -> None:
        self._ranks, self._local, self._columns = ranks, local, columns
        self._directory: GraphDirectory = local.directory
        self._direction, self._weighted = options.direction, options.weight_attr is not None
        self._layout = Layout(self._directory.meta)
        self._usual = Search(ranks.rank, ranks.owners, Health(0.0), 0.0).route()
        # the ranks from which nodes are requested once; the last entry stands for no rank
        self._nobody = torch.zeros(ranks.world_size + 1, dtype=torch.bool)
        self._others = ~self._nobody
        self._others[ranks.rank] = False
        self._times: dict[NodeType, Tensor] = {}
        self.timed_nodes, self.timed = local.timed_nodes, local.timed

    def parts_here(self) -> None:
        """``None``, as not all parts are local: other ranks are asked."""
        return None

    # Edges #################################################################################

    def expand(self, sampler: HopSampler, asks: Sequence[Ask]) -> list[Picked]:
        """The edges picked for the nodes of a hop, in their order, whichever rank owns them.

        Raises:
            CommError: If a rank is gone or sends a wrong answer, and no other has its part; names
                it.
            CommTimeoutError: If a rank does not answer in time; names it.
            NotImplementedError: If the sampler cannot be described to other ranks.
        """
        return self._expand(sampler, asks, self._ranks.search())

    def _expand(self, sampler: HopSampler, asks: Sequence[Ask], search: Search) -> list[Picked]:
        route = self._route(search)
        shares = self._shares(sampler, asks, route, search)
        own = shares.pop(self._ranks.rank, [])
        under_way: list[tuple[int, list[_Share], Work[Any] | CommError]] = []
        if shares:
            service, record = self._ranks.service, self._record(sampler)
            for rank, some in shares.items():
                tensors = self._layout.request(record, [share.ask for share in some])
                under_way.append((rank, some, _ask(service, rank, EDGES, tensors)))
        answers: list[list[PartEdges]] = [[] for _ in asks]
        local = self._local.expand(sampler, [share.ask for share in own])
        for share, picked in zip(own, local, strict=True):
            answers[share.number].append(share.answer(picked))
        if search.went_well:
            search.begin()
        failed: list[_Share] = []
        limits = _limits(search, route, [rank for rank, _, _ in under_way])
        for (rank, some, work), limit in zip(under_way, limits, strict=True):
            try:
                answered = self._answers(rank, some, work, limit)
            except CommError as error:
                search.failed(rank, error)
                failed += some
                continue
            search.answered(rank)
            for share, picked in zip(some, answered, strict=True):
                answers[share.number].append(share.answer(picked))
        if failed:
            again = self._expand(sampler, [share.ask for share in failed], search)
            for share, picked in zip(failed, again, strict=True):
                answers[share.number].append(share.answer(picked))
        return [
            Picked(*stitch_edges(ask.node.numel(), each))
            for ask, each in zip(asks, answers, strict=True)
        ]

    def _route(self, search: Search) -> Route:
        if search.went_well and not self._ranks.health.ill():
            return self._usual
        return search.route()

    def _ranks_of(self, part: Tensor, route: Route, search: Search) -> Tensor:
        """The ranks to ask for nodes of parts ``[n]``.

        Raises:
            CommError: If all ranks that hold one of them have failed; names them.
        """
        found = route.rank_of[part]
        if not search.went_well and found.numel() and int(found.min()) < 0:
            raise search.given_up(int(part[found < 0][0]))
        return found

    def _shares(
        self, sampler: HopSampler, asks: Sequence[Ask], route: Route, search: Search
    ) -> dict[int, list[_Share]]:
        """The shares of the asks, by rank."""
        shares: dict[int, list[_Share]] = {}
        draws = type(sampler).pick_all is not HopSampler.pick_all
        group = torch.where(route.rank_of < 0, self._ranks.world_size, route.rank_of)
        for number, ask in enumerate(asks):
            book = self._directory.books[end_of(ask.edge_type, self._direction, expanded=True)]
            # If times do not matter, the set of all in-edges is the same for every seed.
            one_for_all = not draws and ask.num_neighbors < 0 and ask.latest is None
            once = ask.component is None or one_for_all  # else a node is in a component once
            found = split_rows(
                book.part,
                None,
                book.offsets,
                ask.node,
                group,
                self._others if once else self._nobody,
                original=True,
            )
            for rank, ids, position, take in found:
                if rank == self._ranks.world_size:
                    raise search.given_up(int(book.part_of(ids[:1])))
                if once and rank != self._ranks.rank:
                    mine = ask._replace(node=ids, component=None)
                else:
                    mine = ask.at(position)
                shares.setdefault(rank, []).append(_Share(number, mine, position, take))
        return shares

    def _record(self, sampler: HopSampler) -> Tensor:
        return to_record({"sampler": describe(sampler), "weighted": self._weighted})

    def _answers(
        self, rank: int, shares: Sequence[_Share], work: Work[Any] | CommError, limit: float
    ) -> list[Picked]:
        found = _wait(work, limit)
        try:
            return self._layout.read_answer(found, [share.ask for share in shares])
        except CommError as error:
            raise CommError(f"the answer of rank {rank} cannot be used: {error}") from None

    # Times #################################################################################

    def node_time(self, node_type: NodeType, node: Tensor) -> Tensor:
        """The (sortable) times ``int64`` ``[n]`` of nodes ``[n]``, whichever rank owns them.

        Raises:
            CommError: If a rank is gone or sends a wrong answer; names it.
            CommTimeoutError: If a rank does not answer in time; names it.
        """
        if node_type in self._times:
            return self._times[node_type][node.to(torch.int64)]
        node = node.to(torch.int64)
        out = torch.empty(node.numel(), dtype=torch.int64)
        part = self._directory.books[node_type].part_of(node).to(torch.int64)
        left, search = torch.arange(node.numel()), self._ranks.search()
        while left.numel():
            left = self._some_times(node_type, node, part, left, out, search)
        return out

    def _some_times(
        self,
        node_type: NodeType,
        node: Tensor,
        part: Tensor,
        left: Tensor,
        out: Tensor,
        search: Search,
    ) -> Tensor:
        """Request the times of ``node[left]``; return the part of ``left`` to request again."""
        number = torch.tensor([list(self._directory.meta.nodes).index(node_type)])
        route = self._route(search)
        rank_of = self._ranks_of(part[left], route, search)
        under_way: list[tuple[int, Tensor, Work[Any] | CommError]] = []
        for rank in rank_of.unique().tolist():
            rows = left[rank_of == rank]
            if rank == self._ranks.rank:
                out[rows] = self._local.node_time(node_type, node[rows])
            else:
                asked = _ask(self._ranks.service, rank, TIMES, [number, node[rows]])
                under_way.append((rank, rows, asked))
        if search.went_well:
            search.begin()
        failed = [left[:0]]
        limits = _limits(search, route, [rank for rank, _, _ in under_way])
        for (rank, rows, work), limit in zip(under_way, limits, strict=True):
            try:
                out[rows] = _times(rank, rows, _wait(work, limit))
            except CommError as error:
                search.failed(rank, error)
                failed.append(rows)
            else:
                search.answered(rank)
        return torch.cat(failed)

    def all_node_times(self, node_type: NodeType) -> Tensor:
        """The (sortable) times of all nodes of a type; gathered once."""
        if node_type not in self._times:
            meta = self._directory.meta
            time = self._columns.gather(self._directory, node_type, meta.time_attr or "")
            self._times.setdefault(node_type, meta.sortable(time, node_type))
        return self._times[node_type]


def _ask(service: Service, rank: int, name: str, tensors: list[Tensor]) -> Work[Any] | CommError:
    """A request under way, or the error that prevented it."""
    try:
        return service.request(rank, name, tensors)
    except CommError as error:
        return error


def _limits(search: Search, route: Route, ranks: Sequence[int]) -> list[float]:
    """The deadlines of the waits for some ranks, all counted from now."""
    now = time.monotonic()
    return [now + search.patience(rank, route.chances[rank]) for rank in ranks]


def _wait(work: Work[Any] | CommError, limit: float) -> list[Tensor]:
    if isinstance(work, CommError):
        raise work
    found: list[Tensor] = work.wait(max(0.0, limit - time.monotonic()))
    return found


def _times(rank: int, rows: Tensor, found: Sequence[Tensor]) -> Tensor:
    if len(found) != 1 or found[0].dtype != torch.int64 or found[0].shape != rows.shape:
        raise CommError(f"rank {rank} sent something other than times of nodes")
    return found[0]
