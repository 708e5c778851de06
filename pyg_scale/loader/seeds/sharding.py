"""Ranks that share the seeds of a loader: who they are, and that they mean the same."""

from __future__ import annotations

import functools
import hashlib
import operator
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_scale.comm import Group
from pyg_scale.errors import CommError
from pyg_scale.loader.seeds.agreement import Agreement
from pyg_scale.loader.seeds.epoch import (
    Batches,
    BatchIndex,
    Cut,
    EqualNumbers,
    SeedOrder,
    listed_order,
)
from pyg_scale.loader.seeds.share import (
    Epoch,
    SharingRanks,
    deal,
    default_owners,
    num_steps,
    order_by_part,
)
from pyg_scale.ops import keys
from pyg_scale.ops.mapped_file import pieces
from pyg_scale.ops.raw_bytes import raw_bytes


class SeedSharding:
    """The way in which ranks share the seeds of one loader.

    Args:
        name: The loader, for errors.
        group: The ranks.
        uneven: One of :data:`~pyg_scale.loader.seeds.share.UNEVEN`.
        split_batches: Whether ranks share the seeds of every batch, and not the batches.
        seeds: What the seeds are: the same tensors on all ranks, unless somebody split them.
        options: What else must be the same on all ranks.
        part: The part of each seed ``[num_seeds]``, to group them by part.
        owners: The ranks that have each part; by default they go to ranks in turn.
    """

    def __init__(
        self,
        name: str,
        group: Group,
        uneven: str,
        *,
        split_batches: bool = False,
        seeds: Sequence[Tensor],
        options: Mapping[str, Any],
        part: Tensor | None = None,
        owners: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.rank, self.uneven, self.part = group.rank, uneven, part
        self.split_batches = split_batches
        self.speed_shares: tuple[int, ...] | None = None
        self.ranks = SharingRanks(group.world_size)
        if part is not None:
            known = default_owners(int(part.max()) + 1 if part.numel() else 1, group.world_size)
            given = known if owners is None else tuple(tuple(map(int, each)) for each in owners)
            self.ranks = SharingRanks(group.world_size, given)
        self._name = name
        self._epochs = 0
        self._warned = False
        self._split_by_hand: bool | None = False
        self._agreement: Agreement | None = None
        if group.world_size > 1:
            self._split_by_hand = None
            self._agreement = Agreement(group, name, _ADVICE)
            known_as = {"seeds": fingerprint(seeds), "num_seeds": seeds[0].numel()}
            self._made = {**options, **known_as}

    @property
    def grouped(self) -> bool:
        """True if the list of batches is one of seeds that were grouped by part."""
        return self.part is not None and not self.split_batches

    @functools.cached_property
    def partition(self) -> int:
        """A fingerprint of the parts of the seeds; 0 if they are not grouped."""
        if self.part is None or not self.grouped:
            return 0
        return 1 + zlib.crc32(raw_bytes(self.part.contiguous()).numpy().data)

    # What ranks agree on ###################################################################

    def publish(self, draws: Mapping[str, str]) -> None:
        """Say to the other ranks that this one has made the loader; does not wait.

        Args:
            draws: What :func:`~pyg_scale.loader.resolve.drawn_by` says of it.

        Raises:
            CommError: If the store where the ranks met is gone.
        """
        if self._agreement is not None:
            self._agreement.publish("made", {**self._made, _DRAWS: dict(draws)})

    def split_by_hand(self) -> bool:
        """Return True if ranks gave different seeds: then nobody splits them again.

        Waits, once, until every rank has made the loader.

        Raises:
            CommTimeoutError: If one does not; names it.
            CommError: If the loaders differ in anything but their seeds.
        """
        if self._split_by_hand is None:
            made = self._connected().collect("made", "make")
            self._split_by_hand = self._differ(made)
        return self._split_by_hand

    def begin(self, progress: Any, seed_given: bool) -> int:
        """Begin an epoch, or the rest of one, all ranks together.

        Args:
            progress: The progress of this rank.
            seed_given: Whether its seed is that of the user.

        Returns:
            The seed of rank 0.

        Raises:
            CommTimeoutError: If a rank does not come; names it.
            CommError: If one begins something else.
        """
        if self.ranks.world_size == 1:
            return int(progress.seed)
        agreement, number = self._connected(), self._epochs
        self._epochs += 1
        state = {
            "seed_given": seed_given,
            "speed_shares": progress.speed_shares,
            "next_speed_shares": self.speed_shares,
            "epoch": progress.epoch,
            "delivered": progress.delivered,
            "shares": [each.to_list() for each in progress.segments],
        }
        agreement.publish(f"epoch/{number}", {"seed": progress.seed, **state})
        found = agreement.collect(f"epoch/{number}", "begin to iterate over")
        if number >= 2:  # every rank has begun the one after it, and read this one
            agreement.forget(f"epoch/{number - 2}")
        for rank, other in enumerate(found):
            for name in state:
                if other[name] != found[0][name]:
                    raise CommError(
                        f"rank {rank} begins an iteration of this {self._name} with {name}="
                        f"{other[name]}, rank 0 with {name}={found[0][name]}: pass seed= on every "
                        "rank or on none, call set_epoch() with the same number, and load the same "
                        "state"
                    )
        seeds = [int(each["seed"]) for each in found]
        if seed_given and self.rank == 0 and set(seeds) != {seeds[0]}:
            warnings.warn(
                f"the ranks gave this {self._name} different seed= ({seeds[0]}, "
                f"{next(seed for seed in seeds if seed != seeds[0])}, ...): that of rank 0 is "
                "everyone's, as ranks share one list of batches",
                stacklevel=2,
            )
        return seeds[0]

    def _differ(self, made: Sequence[Mapping[str, Any]]) -> bool:
        by_hand = any(each["seeds"] != made[0]["seeds"] for each in made)
        for rank, other in enumerate(made):
            said, first = _compared(other, by_hand), _compared(made[0], by_hand)
            for name in [*first, *said]:
                if said.get(name) != first.get(name):
                    raise CommError(
                        f"the {self._name} of rank {rank} has {name}={said.get(name)}, that of "
                        f"rank 0 {name}={first.get(name)}: ranks that share seeds make the same "
                        "loaders in the same order; one that not all of them make needs "
                        "split_seeds=False"
                    )
        if by_hand and self.split_batches:
            counts = ", ".join(str(each["num_seeds"]) for each in made[:16])
            raise CommError(
                f"the ranks gave this {self._name} different seeds ({counts}), but with "
                "split_batches=True they share the seeds of each step: give all of them to every "
                "rank"
            )
        if by_hand and self.rank == 0:
            counts = ", ".join(str(each["num_seeds"]) for each in made[:16])
            warnings.warn(
                f"the ranks gave this {self._name} different seeds ({counts}"
                f"{', ...' if len(made) > 16 else ''}): they count as split already, and each "
                "rank has its own; pass split_seeds=False to say so",
                stacklevel=2,
            )
        return by_hand

    def _connected(self) -> Agreement:
        if self._agreement is None:
            raise CommError(
                f"this {self._name} is a copy in another process, whose ranks do not know of it: "
                "make the loader there, or with split_seeds=False"
            )
        return self._agreement

    def __getstate__(self) -> dict[str, Any]:
        alone = self.ranks.world_size == 1
        return self.__dict__ | ({} if alone else {"_agreement": None, "_split_by_hand": None})

    # Batches ###############################################################################

    def num_batches(self, count: int) -> int:
        """The number of the ``count`` batches of an epoch of which this rank gets a share."""
        if self.split_batches:
            return count
        return num_steps(count, self.ranks.world_size, self.rank, self.uneven)

    def batches(self, progress: Any, cut: Cut) -> Batches:
        """The batches of this rank, from where an epoch stands.

        Args:
            progress: The progress of this rank; told who delivers the rest.
            cut: The way in which seeds are cut into batches; equal numbers with parts.
        """
        seed, number, count = progress.seed, progress.epoch, cut.count
        if self.split_batches:
            steps = cut.of_epoch(seed, number)
            shares = progress.speed_shares

            def piece(step: int) -> BatchIndex | None:
                if step >= count:
                    return None
                seeds = steps(step)
                mine = self._piece(seeds, shares)
                first = int(mine[0]) if mine.numel() else 0
                key = keys.batch_key(seed, number, step)
                return BatchIndex(seeds[mine], key, step, number, first=first)

            return Batches(piece, progress.delivered)
        self._warn_if_nothing_is_left(count)
        part = None
        if self.part is not None:
            assert isinstance(cut, EqualNumbers), "others are refused with split_seeds='part'"
            size = cut.batch_size
            listed = listed_order(cut.num_seeds, seed, number) if cut.shuffle else None
            grouped = order_by_part(self.part, size, listed)
            part = self.part[grouped[: count * size : size]].to(torch.int64)
            seeds_of = cut.of_order(SeedOrder(grouped))
        else:
            seeds_of = cut.of_epoch(seed, number)
        epoch = Epoch(count, part, progress.delivered, progress.segments).joined_by(self.ranks)
        progress.position = progress.position._replace(segments=epoch.segments)
        turns = epoch.turns(self.ranks, self.rank, self.uneven)

        def draw(step: int) -> BatchIndex | None:
            turn = turns.of_step(step)
            if turn is None:
                return None
            return BatchIndex(
                seeds_of(turn.number),
                keys.batch_key(seed, number, turn.number),
                turn.number,
                number,
                step=turn.step,
                delivered=turn.delivered,
                repeated=turn.repeated,
            )

        return Batches(draw, turns.first, turns.lacks_batches)

    @property
    def takes_shares(self) -> bool:
        """True if ranks share the seeds of steps, wherever these are."""
        return self.split_batches and self.part is None

    def set_speed_shares(self, shares: Sequence[int] | None) -> None:
        """Give ranks unequal pieces of every step, from the next epoch on.

        Args:
            shares: One for each rank, 0 or more, in any unit; ``None``: equal ones.

        Raises:
            ValueError: If ranks do not share the seeds of steps, or the shares cannot be.
        """
        if not self.takes_shares:
            raise ValueError(
                f"shares are pieces of every step: give this {self._name} split_batches=True, and "
                "split_seeds='global'"
            )
        if shares is None:
            self.speed_shares = None
            return
        found = tuple(map(operator.index, shares))
        if len(found) != self.ranks.world_size or min(found) < 0 or not 0 < sum(found) < 1 << 31:
            raise ValueError(
                f"shares must be {self.ranks.world_size} integers, one for each rank, not negative "
                f"and not all 0, with a sum below 2**31 (got {list(shares)})"
            )
        self.speed_shares = found

    def _piece(self, seeds: Tensor, shares: Sequence[int] | None) -> Tensor:
        """The positions of this rank's seeds in a step, ascending, ``int64`` ``[n]``.

        A run of them, or with parts those that it owns, as far as all ranks get equally many.
        """
        places, world_size = torch.arange(seeds.numel()), self.ranks.world_size
        if shares is not None:
            before, total = sum(shares[: self.rank]), sum(shares)
            begin = seeds.numel() * before // total
            return places[begin : seeds.numel() * (before + shares[self.rank]) // total]
        if self.part is None:
            return places.tensor_split(world_size)[self.rank]
        dealt = deal(places, self.ranks, self.part[seeds].to(torch.int64))[:, self.rank]
        return dealt[dealt >= 0]

    def _warn_if_nothing_is_left(self, count: int) -> None:
        world_size = self.ranks.world_size
        if self.uneven == "drop" and 0 < count < world_size and not self._warned:
            self._warned = True
            warnings.warn(
                f"uneven='drop' leaves no batch: {count} for {world_size} ranks; make batch_size "
                "smaller, or pass uneven='join' or 'repeat'",
                stacklevel=2,
            )


_ADVICE = (
    "but its seeds are shared by all ranks: it has failed or ended (see what it printed), or this "
    "is something that one rank does alone, such as evaluation, which needs a loader with "
    "split_seeds=False"
)
_DRAWS = "draws"
_LOCAL = ("batch_size", "drop_last")  # which who splits by hand may choose for each rank


def _compared(made: Mapping[str, Any], by_hand: bool) -> dict[str, Any]:
    """The values of a rank's loader that must be the same on all ranks."""
    left_out = ("seeds", "num_seeds", _DRAWS, *(_LOCAL if by_hand else ()))
    found = {name: value for name, value in made.items() if name not in left_out}
    return found if by_hand else found | made[_DRAWS]


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """A few letters that are the same for the same tensors; reads them piece by piece."""
    found = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        for piece in pieces(tensor):
            found.update(raw_bytes(piece).numpy().data)
    return found.hexdigest()
