"""The ranks that answer for each part, agreed once when a graph is opened.

Every part has an owner among the ranks that can read it. Ranks own equal numbers of parts if
possible (if all ranks can read all parts, rank ``p % world_size`` owns part ``p``). A rank that
would own nothing shares a part with its owner, so that all ranks answer if there are more ranks
than parts. When a rank fails, the next one that can read the part is asked, see
:mod:`pyg_scale.distributed.failover`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pyg_scale.comm import Communicator
from pyg_scale.distributed.records import from_record, to_record
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.store.directory import GraphDirectory


@dataclass(frozen=True)
class Owners:
    """Map of parts to ranks, the same on every rank except for :attr:`rank` and :attr:`direct`.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        readable: The parts that each rank can read.
        ranks_of: The ranks that answer for each part, the one that owns it first.
        direct: The parts that this rank maps and reads itself; it asks other ranks for all others.
    """

    rank: int
    world_size: int
    readable: tuple[tuple[int, ...], ...]
    ranks_of: tuple[tuple[int, ...], ...]
    direct: frozenset[int]

    @classmethod
    def agree(
        cls,
        comm: Communicator,
        directory: GraphDirectory | None,
        *,
        through: str = "mappings",
        error: str = "",
        tag: int | None = None,
    ) -> Owners:
        """Exchange the lists of readable parts with the other ranks. All ranks call it.

        Args:
            comm: The ranks.
            directory: The directory that this rank opened; ``None`` if it could not.
            through: ``"mappings"``: a rank reads every part that it can. ``"requests"``: it reads
                only those for which it answers.
            error: The reason why it could not.
            tag: See :class:`~pyg_scale.comm.Communicator`.

        Raises:
            GraphDirectoryError: If a rank could not open the graph, or opened another one, or
                no rank has a part; names it. The same on all ranks.
            ValueError: If ranks do not agree on ``through``.
            CommTimeoutError: If a rank does not answer in time; names it.
        """
        said: dict[str, Any] = {"error": error, "through": through}
        if directory is not None:
            said |= {
                "path": str(directory.path),
                "checksum": directory.checksum,
                "num_parts": directory.meta.num_parts,
                "parts": directory.parts,
            }
        records = comm.all_gather(to_record(said), tag=tag)
        found = [
            from_record(record, f"what rank {rank} opened") for rank, record in enumerate(records)
        ]
        _check_equal(found)
        parts = found[0]["num_parts"]
        readable = tuple(tuple(int(part) for part in each["parts"]) for each in found)
        ranks_of = share_out(readable, parts)
        missing = [part for part, ranks in enumerate(ranks_of) if not ranks]
        if missing:
            raise GraphDirectoryError(
                f"no rank has part {', '.join(map(str, missing))} of {found[0]['path']}: copy "
                f"part-{missing[0]} to the directory on one of the machines"
            )
        mine = readable[comm.rank]
        if through == "requests":
            mine = tuple(part for part in mine if comm.rank in ranks_of[part])
        return cls(comm.rank, comm.world_size, readable, ranks_of, frozenset(mine))

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return len(self.ranks_of)

    def owned(self, rank: int | None = None) -> tuple[int, ...]:
        """The parts for which a rank answers, by default this one."""
        rank = self.rank if rank is None else rank
        return tuple(part for part, ranks in enumerate(self.ranks_of) if rank in ranks)

    def ask(self, part: int) -> int:
        """The rank that this one asks for a part: itself if it reads the part directly.

        Ranks that ask take turns among those that answer for a part.
        """
        return self.rank if part in self.direct else self.holders(part)[0]

    def holders(self, part: int) -> tuple[int, ...]:
        """The ranks that can answer for a part, in the order in which this one asks them.

        First those that answer for the part, in turn; then this one, if it can read the part; then
        all others that can.
        """
        return self._holders[part]

    @cached_property
    def _holders(self) -> tuple[tuple[int, ...], ...]:
        parts = [frozenset(each) for each in self.readable]
        ranks = range(self.world_size)
        found = []
        for part, answer in enumerate(self.ranks_of):
            turn = self.rank % max(1, len(answer))
            others = [(self.rank + step) % self.world_size for step in ranks]  # this rank first
            able = [rank for rank in others if part in parts[rank]]
            found.append(tuple(dict.fromkeys([*answer[turn:], *answer[:turn], *able])))
        return tuple(found)

    @property
    def all_direct(self) -> bool:
        """True if this rank reads all parts itself."""
        return len(self.direct) == self.num_parts


def share_out(readable: Sequence[Sequence[int]], num_parts: int) -> tuple[tuple[int, ...], ...]:
    """The ranks that answer for each part, its owner first; none for a part that no rank can read.

    Args:
        readable: The parts that each rank can read.
        num_parts: Number of parts.
    """
    world_size = len(readable)
    held = [set(parts) for parts in readable]
    holders = [[r for r in range(world_size) if part in held[r]] for part in range(num_parts)]
    load = [0] * world_size
    answer: list[list[int]] = [[] for _ in range(num_parts)]
    for part in sorted(range(num_parts), key=lambda p: (len(holders[p]), p)):
        if holders[part]:
            owner = min(holders[part], key=lambda r: (load[r], (r - part) % world_size))
            answer[part].append(owner)
            load[owner] += 1
    for rank in range(world_size):
        if not load[rank] and held[rank]:
            part = min(held[rank], key=lambda p: (len(answer[p]), (p - rank) % num_parts))
            answer[part].append(rank)
    return tuple(tuple(ranks) for ranks in answer)


def _check_equal(found: Sequence[dict]) -> None:
    for rank, each in enumerate(found):
        if each["error"]:
            raise GraphDirectoryError(f"rank {rank} could not open the graph: {each['error']}")
    for rank, each in enumerate(found):
        if each["checksum"] != found[0]["checksum"]:
            raise GraphDirectoryError(
                f"rank {rank} opened {each['path']}, which is another graph than "
                f"{found[0]['path']} of rank 0 (their META.json differ): copy one directory to all "
                "machines"
            )
        if each["through"] != found[0]["through"]:
            raise ValueError(
                f"rank {rank} opened the graph with through={each['through']!r}, rank 0 with "
                f"through={found[0]['through']!r}: use the same on all ranks"
            )
