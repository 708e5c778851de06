"""The batches of each rank: a function of the epoch's list, the ranks and who owns the parts.

The list of an epoch's batches does not depend on the ranks; here it is dealt out to them. Every
step gives each rank one batch, so that after ``s`` steps ``s * world_size`` batches are delivered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

UNEVEN = ("join", "drop", "repeat")
"""The ways to end an epoch whose last step has too few batches for all ranks."""


@dataclass(frozen=True)
class SharingRanks:
    """The ranks that share an epoch.

    Attributes:
        world_size: Number of ranks.
        owners: For each part the ranks that have it; empty if batches are dealt in turn.
    """

    world_size: int
    owners: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class EpochSegment:
    """Steps of an epoch that one set of ranks made, or makes.

    Attributes:
        ranks: Who.
        steps: How many steps they made.
    """

    ranks: SharingRanks
    steps: int = 0

    def to_list(self) -> list[object]:
        """As plain values, for a loader's state."""
        return [self.ranks.world_size, self.steps, [list(each) for each in self.ranks.owners]]

    @classmethod
    def from_list(cls, found: Sequence[object]) -> EpochSegment:
        """The reverse.

        Raises:
            ValueError: If it is none.
        """
        try:
            world_size, steps, owners = found
            parts = tuple(tuple(int(rank) for rank in each) for each in owners)  # type: ignore
            return cls(SharingRanks(int(world_size), parts), int(steps))  # type: ignore[call-overload]
        except (TypeError, ValueError):
            raise ValueError(f"{found!r} does not say which ranks made how many steps") from None


@dataclass(frozen=True)
class Turn:
    """One batch for one rank.

    Attributes:
        number: Its place in the list.
        step: In which step, counted from the begin of the segment.
        delivered: How many batches of the list are delivered after that step.
        repeated: Whether it is another rank's, given once more to fill the last step.
    """

    number: int
    step: int
    delivered: int
    repeated: bool = False


@dataclass(frozen=True)
class Epoch:
    """The list of an epoch as it is dealt out.

    Attributes:
        count: Batches in the list.
        part: The part of each batch ``int64`` ``[count]``; ``None`` if they are dealt in turn.
        delivered: How many were delivered before; without parts these are the first ones.
        segments: With parts: who delivered them.
    """

    count: int
    part: Tensor | None = None
    delivered: int = 0
    segments: tuple[EpochSegment, ...] = field(default=())

    def joined_by(self, ranks: SharingRanks) -> Epoch:
        """The same epoch, to be gone on with by these ranks."""
        if self.part is None or (self.segments and self.segments[-1].ranks == ranks):
            return self
        return replace(self, segments=(*self.segments, EpochSegment(ranks)))

    def turns(self, ranks: SharingRanks, rank: int, uneven: str) -> RemainingBatches:
        """The batches that a rank has still to deliver, in order.

        Args:
            ranks: Who goes on with the epoch.
            rank: Of these.
            uneven: One of :data:`UNEVEN`.
        """
        numbers, begin, before = self._left(ranks)
        return RemainingBatches(self, ranks, rank, uneven, numbers, begin, before)

    def _left(self, ranks: SharingRanks) -> tuple[Tensor, int, int]:
        """Batches to deal, how many steps of that were made, and what was delivered before."""
        if self.part is None:
            return torch.arange(self.delivered, self.count), 0, self.delivered
        left = torch.ones(self.count, dtype=torch.bool)
        epoch = self.joined_by(ranks)
        for segment in epoch.segments[:-1]:
            dealt = deal(left.nonzero().view(-1), segment.ranks, self.part)[: segment.steps]
            left[dealt[dealt >= 0]] = False
        return left.nonzero().view(-1), epoch.segments[-1].steps, self.count - int(left.sum())


class RemainingBatches:
    """The batches that a rank has still to deliver, by step; see :meth:`Epoch.turns`.

    Args:
        epoch: The epoch.
        ranks: Who goes on with it.
        rank: Of these.
        uneven: One of :data:`UNEVEN`.
        numbers: Batches to deal, by their place in the list.
        first: How many steps of that were made.
        before: How many batches were delivered before all of that.
    """

    def __init__(
        self,
        epoch: Epoch,
        ranks: SharingRanks,
        rank: int,
        uneven: str,
        numbers: Tensor,
        first: int,
        before: int,
    ) -> None:
        self.first = first
        self._count, self._ranks, self._uneven = epoch.count, ranks, uneven
        self._numbers, self._before = numbers.numel(), before
        dealt = deal(numbers, ranks, epoch.part)
        self._mine, self._filled = dealt[:, rank], (dealt >= 0).all(dim=1)
        self._others = rank - numbers.numel() % ranks.world_size

    def __iter__(self) -> Iterator[Turn]:
        step = self.first
        while (turn := self.of_step(step)) is not None:
            yield turn
            step += 1

    def of_step(self, step: int) -> Turn | None:
        """The rank's batch in a step; ``None`` after its last one."""
        if step >= self._mine.numel():
            return None
        done = (step + 1) * self._ranks.world_size
        delivered = self._before + min(done, self._numbers)
        if self._filled[step] or (self._uneven != "drop" and self._mine[step] >= 0):
            return Turn(int(self._mine[step]), step, delivered)
        if self._uneven == "repeat":
            return Turn(self._again(self._others), step, delivered, repeated=True)
        return None

    def lacks_batches(self, step: int) -> bool:
        """Return True if some rank has no batch in a step."""
        if step >= self._filled.numel():
            return True
        return self._uneven != "repeat" and not bool(self._filled[step])

    def _again(self, number: int) -> int:
        """A batch of another rank, as torch's ``DistributedSampler`` takes them from the front."""
        own = set(self._mine.tolist())
        while number % self._count in own:
            number += 1
        return number % self._count


def deal(numbers: Tensor, ranks: SharingRanks, part: Tensor | None) -> Tensor:
    """Deal out batches, each to one rank, as many to each as to the others.

    Where ``n % world_size`` ranks get one more, these are the first ones. Without parts, ranks take
    turns. With parts, a batch goes to an owner of its part (several owners take turns) while
    that has less than its number; the batches that are left go to the ranks that lack some.

    Args:
        numbers: Batches by their place in the list, ascending, ``int64`` ``[n]``.
        ranks: To whom.
        part: The part of every batch of the list.

    Returns:
        ``int64`` ``[ceil(n / world_size), world_size]``: in the order of steps; -1 for no batch.
    """
    count, world_size = numbers.numel(), ranks.world_size
    steps = -(-count // world_size)
    dealt = numbers.new_full((steps * world_size,), -1)
    if part is None or not ranks.owners:
        dealt[:count] = numbers
        return dealt.view(steps, world_size)
    number_of = torch.full((world_size,), count // world_size)
    number_of[: count % world_size] += 1
    rank = _owner(part[numbers], ranks)
    rank[_place(rank, world_size + 1) >= torch.cat([number_of, number_of[:1]])[rank]] = world_size
    lacking = number_of - torch.bincount(rank, minlength=world_size + 1)[:world_size]
    rank[rank == world_size] = torch.arange(world_size).repeat_interleave(lacking)
    dealt[_place(rank, world_size) * world_size + rank] = numbers
    return dealt.view(steps, world_size)


def _owner(part: Tensor, ranks: SharingRanks) -> Tensor:
    """For batches of parts ``[n]``, the rank each should go to; ``world_size`` for none."""
    several = max(map(len, ranks.owners))
    if not several:
        return torch.full_like(part, ranks.world_size)
    lists = [(list(each) or [ranks.world_size]) for each in ranks.owners]
    table = torch.tensor([(each * several)[:several] for each in lists])
    length = torch.tensor([len(each) for each in lists])
    return table[part, _place(part, len(lists)) % length[part]]


def _place(group: Tensor, num_groups: int) -> Tensor:
    """Number of earlier entries of the same group, for each entry."""
    at = group.argsort(stable=True)
    counts = torch.bincount(group, minlength=num_groups)
    out = torch.empty_like(at)
    out[at] = torch.arange(group.numel()) - (counts.cumsum(0) - counts)[group[at]]
    return out


def num_steps(count: int, world_size: int, rank: int, uneven: str) -> int:
    """Number of batches of a whole epoch that a rank gets.

    Args:
        count: Batches in the list.
        world_size: Number of ranks.
        rank: Which.
        uneven: One of :data:`UNEVEN`.
    """
    steps, more = divmod(count, world_size)
    return steps + {"drop": 0, "repeat": int(more > 0), "join": int(rank < more)}[uneven]


def default_owners(num_parts: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """The owners of parts by default: parts go to ranks in turn, or ranks to parts."""
    if num_parts >= world_size:
        return tuple((part % world_size,) for part in range(num_parts))
    return tuple(tuple(range(part, world_size, num_parts)) for part in range(num_parts))


def order_by_part(part: Tensor, batch_size: int, ordered: Tensor | None) -> Tensor:
    """The order of an epoch whose batches hold seeds of one part each, as far as they fill.

    Each part cuts its seeds, in the order of the epoch, into full batches; what is left over of
    all parts, one part after the other, is cut into batches as well. There are thus as many batches
    as without parts, and but one that is not full. Full batches come in the order in which the
    epoch has their first seeds, so that parts alternate; the one that is not full comes last.

    It is a function of the seeds alone, whatever the number of ranks.

    Args:
        part: The part of every seed, ``int64`` ``[num_seeds]``, by its position in the input.
        batch_size: Seeds per batch.
        ordered: The order of the epoch ``int64`` ``[num_seeds]``; ``None`` for as given.

    Returns:
        ``int64`` ``[num_seeds]``: a permutation of the positions; batch ``b`` is what is at
        ``b * batch_size`` and after.
    """
    size = part.numel()
    if ordered is None:
        ordered = torch.arange(size)
    if size == 0:
        return ordered
    parts = part[ordered]
    at = parts.argsort(stable=True)  # places in the epoch, by part
    counts = torch.bincount(parts)
    first = counts.cumsum(0) - counts
    parts = parts[at]
    full = torch.arange(size) - first[parts] < (counts - counts % batch_size)[parts]
    at = torch.cat([at[full], at[~full]])
    cut = size - size % batch_size
    rows = at[:cut].view(-1, batch_size)
    rows = rows[rows[:, :1].flatten().argsort(stable=True)]
    return ordered[torch.cat([rows.flatten(), at[cut:]])]
