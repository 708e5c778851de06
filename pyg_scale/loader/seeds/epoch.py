"""Seeds to batches: a pure function of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from pyg_scale.loader.seeds.index_state import SamplerState
from pyg_scale.loader.seeds.share import EpochSegment
from pyg_scale.ops import keys

_T = TypeVar("_T")

LISTED = 1 << 22
"""Up to so many seeds a shuffled epoch is a list in memory, 32 MB; beyond it is computed."""
_AT_ONCE = 1 << 14  # of them are computed at a time
_BATCHES_AT_ONCE = 64  # at most, of which seeds and keys are


class BatchIndex:
    """One batch before it is sampled: which seeds, and the key of its draws.

    Attributes:
        index: ``int64`` ``[batch_size]``, positions in the loader's input.
        key: The key of the batch, an unsigned 64-bit integer; that of the step where ranks share
            the seeds of a step.
        position: Where the batch stands in the epoch's list; -1 for ``loader(index)``.
        epoch: The number of the epoch.
        step: Counts the batches of this process; increases within an iteration. The same as
            ``position`` unless ranks share the list.
        delivered: How many of the list are delivered with it, by all ranks together.
        repeated: Whether another rank has it too, which it is counted for.
        first: Of a piece of a step, where in the step its first seed stands; else 0.
        piece_key: The key of this piece of a step: ``key`` where it holds the step's first seed.
        piece: Of a planned batch that was cut to fit its budget, which piece this is; else 0.
        num_pieces: Into how many it was cut.
        sampler_state: What the user's index sampler said after handing out this batch.
    """

    __slots__ = (
        "delivered",
        "epoch",
        "first",
        "index",
        "key",
        "num_pieces",
        "piece",
        "piece_key",
        "position",
        "repeated",
        "sampler_state",
        "step",
    )

    def __init__(
        self,
        index: Tensor,
        key: int,
        position: int = -1,
        epoch: int = 0,
        *,
        step: int | None = None,
        delivered: int | None = None,
        repeated: bool = False,
        first: int = 0,
    ) -> None:
        self.index = index
        self.key = key
        self.position = position
        self.epoch = epoch
        self.step = position if step is None else step
        self.delivered = position + 1 if delivered is None else delivered
        self.repeated = repeated
        self.first = first
        self.piece_key = keys.fold(key, keys.PIECE, first) if first else key
        self.piece, self.num_pieces = 0, 1
        self.sampler_state: Any = None

    def part(self, begin: int, end: int, piece: int = 0, num_pieces: int = 1) -> BatchIndex:
        """The batch of the seeds from place ``begin`` to ``end - 1`` of this one.

        Args:
            begin: At least 0.
            end: At most the number of seeds.
            piece: Which piece it is.
            num_pieces: Of how many.
        """
        found = BatchIndex(
            self.index[begin:end],
            self.key,
            self.position,
            self.epoch,
            step=self.step,
            delivered=self.delivered,
            repeated=self.repeated,
            first=self.first + begin,
        )
        found.piece, found.num_pieces = piece, num_pieces
        found.sampler_state = self.sampler_state
        return found

    @property
    def is_last_piece(self) -> bool:
        """True if nothing of the planned batch comes after it."""
        return self.piece + 1 == self.num_pieces

    def __len__(self) -> int:
        return self.index.numel()

    def __iter__(self) -> Iterator[int]:
        return iter(self.index.tolist())

    def __str__(self) -> str:
        return f"batch {self.position} of epoch {self.epoch}"

    def __reduce__(self) -> tuple[Any, ...]:
        # A tensor would move its whole storage, all seeds of the epoch, to shared memory.
        values = self.key, self.position, self.epoch, self.step, self.first
        return _rebuild, (self.index.numpy(), *values)


def _rebuild(
    index: np.ndarray, key: int, position: int, epoch: int, step: int, first: int
) -> BatchIndex:
    return BatchIndex(torch.from_numpy(index), key, position, epoch, step=step, first=first)


class KeyedRandomSampler(RandomSampler):
    """The ``loader.sampler`` of ``shuffle=True``: the seeds in the order of keyed hashes.

    The loader orders its epochs by :func:`order`. Iterating over this object itself (as code
    does that builds another loader around it) draws a seed from the generator, as torch's does.
    """

    def __init__(self, data_source: Sized, generator: torch.Generator | None = None) -> None:
        self.data_source = data_source
        self.replacement = False
        self._num_samples = None
        self.generator = generator  # not super().__init__(), which refuses an empty source

    def __iter__(self) -> Iterator[int]:
        count = len(self.data_source)
        ordered = order(count, draw_seed(self.generator), 0)
        starts = range(0, count, _AT_ONCE)
        pieces = (ordered.between(at, min(at + _AT_ONCE, count)) for at in starts)
        return (position for piece in pieces for position in piece.tolist())


def draw_seed(generator: torch.Generator | None = None) -> int:
    """A seed from a generator, torch's default one if ``None``; takes one 64-bit draw."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


class SeedOrder:
    """The order in which an epoch has its seeds, read piece by piece.

    Args:
        listed: The positions in order ``int64`` ``[num_seeds]``, where somebody made a list.
        num_seeds: How many seeds there are, where nobody did.
        key: Of the keyed permutation by which they come then; ``None``: as they were given.
    """

    def __init__(
        self, listed: Tensor | None = None, num_seeds: int = 0, key: int | None = None
    ) -> None:
        self._listed = listed
        self._num_seeds, self._key = num_seeds, key
        self._begin = self._end = 0  # of the piece that was computed last: calls are many, small
        self._piece = torch.empty(0, dtype=torch.int64)

    def between(self, begin: int, end: int) -> Tensor:
        """The positions of the seeds from place ``begin`` to ``end - 1`` of the epoch, ``int64``.

        Args:
            begin: At least 0.
            end: At most the number of seeds.
        """
        if self._listed is not None:
            return self._listed[begin:end]
        if self._key is None:
            return torch.arange(begin, end)
        if not self._begin <= begin <= end <= self._end:
            self._begin, self._end = begin, min(max(end, begin + _AT_ONCE), self._num_seeds)
            places = torch.arange(self._begin, self._end)
            self._piece = keys.permuted(self._key, self._num_seeds, places)
        return self._piece[begin - self._begin : end - self._begin]


def order(num_seeds: int, seed: int, epoch: int) -> SeedOrder:
    """The order of a shuffled epoch: of more than :data:`LISTED` seeds computed as it is read."""
    if num_seeds > LISTED:
        return SeedOrder(num_seeds=num_seeds, key=_shuffle_key(seed, epoch))
    return SeedOrder(listed_order(num_seeds, seed, epoch))


def listed_order(num_seeds: int, seed: int, epoch: int) -> Tensor:
    """The order of a shuffled epoch as a list, ``int64`` ``[num_seeds]``: an argsort of hashes."""
    return keys.permutation(_shuffle_key(seed, epoch), num_seeds)


def _shuffle_key(seed: int, epoch: int) -> int:
    return keys.fold(0, seed, epoch, keys.SHUFFLE)


def num_batches(num_seeds: int, batch_size: int | None, drop_last: bool) -> int:
    """Number of batches of an epoch; ``batch_size=None`` is one seed per batch."""
    size = batch_size or 1
    return num_seeds // size if drop_last else -(-num_seeds // size)


class EpochPosition(NamedTuple):
    """The position of an epoch: replaced as a whole, so that nobody sees half a step.

    Attributes:
        delivered: How many batches were; where ranks share the epoch, by all of them when all have
            made as many steps as this one.
        segments: Of ranks with seeds by part: who delivered.
        index_sampler: Where a user's sampler stands; ``None``: the order is our own.
        pieces: The planned batch of which some pieces were delivered, and how many; ``None``
            between two batches.
    """

    delivered: int = 0
    segments: tuple[EpochSegment, ...] = ()
    index_sampler: SamplerState | None = None
    pieces: tuple[int, int] | None = None

    def after(self, batch: BatchIndex) -> EpochPosition:
        """The position after one more batch, or piece of one."""
        if not batch.is_last_piece:
            return self._replace(pieces=(batch.position, batch.piece + 1))
        segments, index_sampler, pieces = self.segments, self.index_sampler, self.pieces
        if segments:
            segments = (*segments[:-1], replace(segments[-1], steps=batch.step + 1))
        if index_sampler is not None and index_sampler.kind == "state_dict":
            index_sampler = SamplerState("state_dict", batch.sampler_state)
        if pieces is not None and pieces[0] == batch.position:
            pieces = None
        return EpochPosition(batch.delivered, segments, index_sampler, pieces)


class EpochProgress:
    """The progress of an epoch: its key, the batches delivered, and the origin of its order."""

    def __init__(self, seed: int, epoch: int, position: EpochPosition | None = None) -> None:
        self.seed = seed
        self.epoch = epoch
        self.position = EpochPosition() if position is None else position
        self.finished = False
        self.generator: Tensor | None = None
        self.speed_shares: tuple[int, ...] | None = None

    @property
    def delivered(self) -> int:
        return self.position.delivered

    @property
    def segments(self) -> tuple[EpochSegment, ...]:
        return self.position.segments

    @property
    def index_sampler(self) -> SamplerState | None:
        return self.position.index_sampler


class Passed(NamedTuple):
    """The steps of a pass that it is done with.

    Attributes:
        all_before: The first step that it is not done with.
        later: Those after it that it is done with, where batches come as they are finished.
    """

    all_before: int
    later: frozenset[int] = frozenset()

    def after(self, batch: BatchIndex) -> Passed:
        """The same after one more batch, or piece of one; another object at every call."""
        if not batch.is_last_piece:
            return Passed(*self)
        first = self.all_before
        if not self.later and batch.step == first:
            return Passed(first + 1)
        later = self.later | {batch.step}
        while first in later:
            later, first = later - {first}, first + 1
        return Passed(first, later)


class Batches:
    """The batches of one pass over a loader. One that was drawn can be drawn again.

    Args:
        draw: The batch of a step, ``None`` after the last one.
        first: The first step.
        alone: Returns True for a step in which another rank has no batch; ``None``: there is none.
    """

    def __init__(
        self,
        draw: Callable[[int], BatchIndex | None],
        first: int = 0,
        alone: Callable[[int], bool] | None = None,
    ) -> None:
        self.first = first
        self._alone = alone
        self.end: int | None = None
        """The step after the last one, once it is known."""
        self._draw = draw

    def __iter__(self) -> Iterator[BatchIndex]:
        return self.rest(Passed(self.first))

    def rest(self, passed: Passed) -> Iterator[BatchIndex]:
        """The batches that a pass is not done with, in order."""
        step = passed.all_before
        while (batch := self._draw(step)) is not None:
            if step not in passed.later:
                yield batch
            step += 1
        self.end = step

    def at_end(self, passed: Passed) -> bool:
        """Return True if this rank, or another one, has no batch after those of ``passed``."""
        if self._alone is not None and self._alone(passed.all_before):
            return True
        return next(self.rest(passed), None) is None

    def forget(self, passed: Passed) -> None:
        """Keep nothing of what a pass is done with."""
        if isinstance(self._draw, _Drawn):
            self._draw.forget(passed.all_before)


class Cut(Protocol):
    """The way in which an epoch's seeds are cut into batches: a pure function of seed and epoch.

    Attributes:
        count: Batches of an epoch.
    """

    count: int

    def of_epoch(self, seed: int, epoch: int) -> Callable[[int], Tensor]:
        """A function from the number of a batch to the positions ``int64`` of its seeds."""


class EqualNumbers:
    """Batches with equal numbers of seeds.

    Args:
        num_seeds: How many seeds the loader has.
        batch_size: Seeds per batch; ``None`` is one seed per batch, as nothing is batched then.
        drop_last: Whether to leave out a last batch that is not full.
        shuffle: Whether seeds come in the order of :func:`order` or as they were given.
    """

    def __init__(
        self, num_seeds: int, batch_size: int | None, *, drop_last: bool, shuffle: bool
    ) -> None:
        self.num_seeds, self.batch_size, self.shuffle = num_seeds, batch_size or 1, shuffle
        self.count = num_batches(num_seeds, batch_size, drop_last)

    def of_epoch(self, seed: int, epoch: int) -> Callable[[int], Tensor]:
        shuffled = self.shuffle and self.count > 0
        return self.of_order(order(self.num_seeds, seed, epoch) if shuffled else SeedOrder())

    def of_order(self, ordered: SeedOrder) -> Callable[[int], Tensor]:
        """The same for seeds in another order."""
        size, num_seeds = self.batch_size, self.num_seeds

        def of_batches(first: int, end: int) -> Sequence[Tensor]:
            return ordered.between(first * size, min(end * size, num_seeds)).split(size)

        return _SomeAtOnce(of_batches, self.count, min(_BATCHES_AT_ONCE, _AT_ONCE // size))


class _SomeAtOnce(Generic[_T]):
    """Something for each batch of an epoch, computed for some at a time as it is read.

    Args:
        compute: Gives what there is for batches ``first`` to ``end - 1``.
        count: Number of batches.
        at_once: Number of batches for which it is computed at a time; less than one is one.
    """

    def __init__(
        self, compute: Callable[[int, int], Sequence[_T]], count: int, at_once: int
    ) -> None:
        self._compute, self._count, self._at_once = compute, count, max(at_once, 1)
        self._piece: tuple[int, Sequence[_T]] = 0, ()  # replaced as a whole: threads may read

    def __call__(self, number: int) -> _T:
        first, found = self._piece
        if not first <= number < first + len(found):
            first = number - number % self._at_once
            found = self._compute(first, min(first + self._at_once, self._count))
            self._piece = first, found
        return found[number - first]


def _batch_keys(seed: int, epoch: int, count: int) -> Callable[[int], int]:
    def of_batches(first: int, end: int) -> list[int]:
        return [keys.batch_key(seed, epoch, each) for each in range(first, end)]

    return _SomeAtOnce(of_batches, count, _BATCHES_AT_ONCE)


def batches(cut: Cut, *, seed: int, epoch: int, start: int = 0) -> Batches:
    """The batches of an epoch from number ``start`` on.

    Args:
        cut: The way in which seeds are cut into batches.
        seed: The loader's seed of this epoch.
        epoch: The number of the epoch.
        start: How many batches were delivered already.
    """
    seeds = cut.of_epoch(seed, epoch) if start < cut.count else None
    key_of = _batch_keys(seed, epoch, cut.count)

    def draw(step: int) -> BatchIndex | None:
        if seeds is None or step >= cut.count:
            return None
        return BatchIndex(seeds(step), key_of(step), step, epoch)

    return Batches(draw, start)


def batches_of(
    index_sampler: Iterable[Any],
    num_seeds: int,
    *,
    seed: int,
    epoch: int,
    start: int = 0,
    snapshot: Callable[[], Any] = lambda: None,
) -> Batches:
    """The batches of a user's own sampler; the first one that it hands out has number ``start``.

    Args:
        index_sampler: Hands out positions in the loader's input.
        num_seeds: How many seeds the loader has.
        seed: The loader's seed of this epoch.
        epoch: The number of the epoch.
        start: How many batches were delivered already.
        snapshot: The state of the sampler after it handed out a batch.
    """

    def made(step: int, entry: Any) -> BatchIndex:
        key = keys.batch_key(seed, epoch, step)
        batch = BatchIndex(to_index(entry, num_seeds), key, step, epoch)
        batch.sampler_state = snapshot()
        return batch

    return Batches(_Drawn(iter(index_sampler), made), start)


class _Drawn:
    """Batches of a sampler that can be asked only once, kept until they are forgotten."""

    def __init__(self, entries: Iterator[Any], made: Callable[[int, Any], BatchIndex]) -> None:
        self._entries, self._made = entries, made
        self._kept: dict[int, BatchIndex] = {}
        self._asking = False

    def __call__(self, step: int) -> BatchIndex | None:
        if step in self._kept:
            return self._kept[step]
        if self._asking:
            raise RuntimeError(
                f"an exception left the sampler= or batch_sampler= of this loader while it drew "
                f"batch {step}, and what it would have drawn is not known: iter(loader) begins "
                "anew; after loader.load_state_dict(loader.state_dict()) it goes on with this "
                "epoch, if the sampler can be resumed"
            )
        self._asking = True
        try:
            entry = next(self._entries)
        except StopIteration:
            self._asking = False
            return None
        batch = self._made(step, entry)
        self._kept[step], self._asking = batch, False  # at once: no call is in between
        return batch

    def forget(self, all_before: int) -> None:
        while self._kept and (first := next(iter(self._kept))) < all_before:
            del self._kept[first]


def to_index(entry: Any, num_seeds: int, name: str = "sampler") -> Tensor:
    """Positions in a loader's input as ``int64`` ``[batch_size]``; negative ones from the end.

    Raises:
        TypeError: If they are not integers.
        ValueError: If they are not one-dimensional.
        IndexError: If one is out of range.
    """
    index = entry if isinstance(entry, Tensor) else torch.as_tensor(entry)
    if index.dim() > 1:
        raise ValueError(
            f"{name} must give positions in the loader's input, one dimension "
            f"(got shape {list(index.shape)}); seeds themselves are given when a loader is made"
        )
    if index.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    if index.dtype == torch.bool or index.is_floating_point() or index.is_complex():
        raise TypeError(
            f"{name} must give integer positions in the loader's input (got {index.dtype})"
        )
    index = index.to("cpu", torch.int64).reshape(-1)
    low, high = int(index.min()), int(index.max())
    if low < -num_seeds or high >= num_seeds:
        raise IndexError(
            f"{name} gives position {low if low < -num_seeds else high}, but the loader's input "
            f"has {num_seeds} seeds"
        )
    return torch.where(index < 0, index + num_seeds, index) if low < 0 else index


def call_key(seed: int, index: Tensor) -> int:
    """The key of ``loader(index)``: a function of the seed and of which seeds, in which order.

    ``fold(B, n, s)`` where ``B = fold(0, seed, CALL)``, ``n`` is the number of seeds and ``s`` the
    sum over positions ``p`` of ``fold(B, p, index[p])``, modulo 2**64.
    """
    base = keys.fold(0, seed, keys.CALL)
    at = keys.fold_tensor(base, torch.arange(index.numel()))
    total = int(keys.fold_tensor(at, index).sum())
    return keys.fold(base, index.numel(), total)
