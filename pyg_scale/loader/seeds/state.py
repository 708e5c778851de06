"""Seeds, epochs, and resuming in the middle of one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pyg_scale.loader.seeds import index_state
from pyg_scale.loader.seeds.duplicates import DuplicateSeedCheck
from pyg_scale.loader.seeds.epoch import (
    LISTED,
    Batches,
    Cut,
    EpochPosition,
    EpochProgress,
    EqualNumbers,
    batches,
    batches_of,
    draw_seed,
)
from pyg_scale.loader.seeds.index_state import SamplerState
from pyg_scale.loader.seeds.plan import CostPlan
from pyg_scale.loader.seeds.sharding import SeedSharding
from pyg_scale.loader.seeds.share import EpochSegment

VERSION = 1


class Resumable:
    """The state of a loader's epochs. A base class of the loaders."""

    seed: int | None
    generator: torch.Generator | None
    dataset: Any
    batch_size: int | None
    drop_last: bool
    in_order: bool
    sampler: Any
    _index_sampler: Any
    _own_order: bool
    _shuffle: bool
    _sharing: SeedSharding | None
    _unsplit: DuplicateSeedCheck | None
    _plan: CostPlan | None
    _epoch = 0
    _pinned = False
    _progress: EpochProgress | None = None
    _resume: EpochProgress | None = None

    # Epochs ################################################################################

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next iteration starts."""
        return self._resume.epoch if self._resume is not None else self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch every following iteration is, until this is called again.

        With ``seed=`` the batches of an epoch are always the same, so ``seed=0`` and
        ``set_epoch(0)`` make validation batches that repeat. A user's own sampler that has
        ``set_epoch`` is told as well.

        Raises:
            ValueError: If the number is negative.
        """
        epoch = operator.index(epoch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative (got {epoch})")
        if self._resume is not None and self._resume.epoch != epoch:
            self._resume = None  # another epoch was asked for than the one to be resumed
        self._epoch = epoch
        self._pinned = True
        if not self._own_order:
            for sampler in (self._index_sampler, self.sampler):
                if callable(getattr(sampler, "set_epoch", None)):
                    sampler.set_epoch(epoch)

    def set_speed_shares(self, shares: Sequence[int] | None) -> None:
        """Say how many of each step's seeds each rank gets, from the next epoch on.

        Every rank says the same. The steps, and the seeds of each, stay what they are. It is part
        of the state, and forgotten where another number of ranks loads that.

        Args:
            shares: One for each rank, 0 or more, in any unit; ``None``: equal ones. Ranks that are
                twice as fast get twice as much; see :class:`pyg_scale.train.SpeedShares`.

        Raises:
            ValueError: If the loader has not ``split_batches=True``, or the shares cannot be.
        """
        if self._plan is not None:
            raise ValueError(
                "shares are pieces of steps that ranks share (split_batches=True), and with "
                "batch_cost= each rank has batches of its own, of equal cost: leave out one of them"
            )
        if self._sharing is None:
            if shares is None or len(shares) == 1:  # one rank has everything
                return
            raise ValueError(
                "shares are of ranks that share the seeds of a loader: give it "
                "split_batches=True, and run several ranks"
            )
        self._sharing.set_speed_shares(shares)

    def _shared(self) -> SeedSharding | None:
        """The sharing of the seeds; ``None`` if each process has its own."""
        if self._sharing is None or self._sharing.split_by_hand():
            return None
        return self._sharing

    def _begin_epoch(self) -> tuple[EpochProgress, Batches]:
        """The next epoch, or the rest of the one that was loaded."""
        resumed, self._resume = self._resume, None
        if resumed is None:
            seed = draw_seed(self.generator) if self.seed is None else self.seed
            progress = EpochProgress(seed, self._epoch)
            progress.speed_shares = None if self._sharing is None else self._sharing.speed_shares
        else:
            progress = EpochProgress(resumed.seed, resumed.epoch, resumed.position)
            progress.speed_shares = resumed.speed_shares
        sharing = self._shared()
        if sharing is not None:
            self._resume = resumed  # if the others do not come, nothing has begun
            progress.seed = sharing.begin(progress, self.seed is not None)
            self._resume = None
            self.seed = None if self.seed is None else progress.seed
        elif self._unsplit is not None:
            self._unsplit.look()
        if self.generator is not None:
            progress.generator = self.generator.get_state()
        # A drawn seed is new for every epoch: counting as well would make what follows
        # torch.manual_seed depend on how often the loader was used before.
        if not self._pinned and self.seed is not None:
            self._epoch = progress.epoch + 1
        self._progress = progress
        return progress, self._batches(progress, resumed is not None)

    def _batches(self, progress: EpochProgress, resumed: bool) -> Batches:
        seed, epoch, start = progress.seed, progress.epoch, progress.delivered
        sharing = self._shared()
        if sharing is not None:
            return sharing.batches(progress, self._cut())
        if self._own_order:
            return batches(self._cut(), seed=seed, epoch=epoch, start=start)
        sampler = self._index_sampler
        if resumed and progress.index_sampler is not None:
            entries = index_state.resume(sampler, progress.index_sampler, start)
        else:
            began = index_state.begin(sampler)
            progress.position = progress.position._replace(index_sampler=began)
            entries = iter(sampler)
        return batches_of(
            entries,
            len(self.dataset),
            seed=seed,
            epoch=epoch,
            start=start,
            snapshot=partial(index_state.snapshot, sampler),
        )

    def _cut(self) -> Cut:
        """The way in which the seeds are cut into batches."""
        if self._plan is not None:
            return self._plan
        size, shuffle = self.batch_size, self._shuffle
        return EqualNumbers(len(self.dataset), size, drop_last=self.drop_last, shuffle=shuffle)

    # Resuming ##############################################################################

    def state_dict(self) -> dict[str, Any]:
        """The position of the iteration that was started last: a few integers.

        Counts the batches that were handed out, not those that workers have ready. With an own
        ``sampler=``, ``batch_sampler=`` or ``generator=`` its state is included.

        Raises:
            TypeError: If the state of an own ``sampler=`` or ``batch_sampler=`` cannot be known.
            ValueError: If ``in_order=False``: what was handed out is then no beginning.
        """
        if not self.in_order:
            raise ValueError("a loader with in_order=False cannot be resumed: leave it out")
        if not self._own_order:
            index_state.refuse_unknown(self._index_sampler)
        progress = self._resume or self._progress
        if progress is not None and progress.finished:
            progress = None
        state: dict[str, Any] = {
            "version": VERSION,
            "running": progress is not None,
            "seed": self.seed,
            "fixed_seed": self.seed is not None,
            "epoch": self._epoch,
            "next_epoch": self._epoch,
            "pinned": self._pinned,
            "delivered": 0,
            **self._identity(),
        }
        if self._sharing is not None:
            now = None if progress is None else progress.speed_shares
            for name, shares in (("shares_now", now), ("shares_next", self._sharing.speed_shares)):
                if shares is not None:
                    state[name] = list(shares)
        generator = None if self.generator is None else self.generator.get_state()
        sampler = None
        if progress is not None:
            state["seed"], state["epoch"] = progress.seed, progress.epoch
            state["delivered"] = progress.delivered
            if progress.segments:
                state["shares"] = [each.to_list() for each in progress.segments]
            if progress.position.pieces is not None:
                state["pieces"] = list(progress.position.pieces)
            generator, sampler = progress.generator, progress.index_sampler
        elif not self._own_order:
            sampler = index_state.begin(self._index_sampler)
        if generator is not None:
            state["generator"] = generator
        if sampler is not None:
            state["sampler"] = tuple(sampler)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on where ``state`` was taken.

        The number of workers and their type may differ from then; afterwards everything
        continues as if it had never been interrupted. An epoch whose last batch was
        delivered, but whose end was not seen, has nothing left and yields no batch.

        Raises:
            TypeError: If it is no dictionary.
            ValueError: If the state is of another version or of a loader with other seeds or
                batches.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state must be what state_dict() returned (got {state!r:.60})")
        if state.get("version") != VERSION:
            raise ValueError(
                f"the loader state has version {state.get('version')!r}, this is version {VERSION}"
            )
        if missing := (_KEYS | self._identity().keys()) - _MAY_LACK - state.keys():
            raise ValueError(
                f"state must be what state_dict() returned; it lacks {', '.join(sorted(missing))}"
            )
        self._refuse_other_loader(state)
        self.seed = state["seed"] if state["fixed_seed"] else None
        self._pinned = state["pinned"]
        self._epoch = state["next_epoch"]
        self._progress = self._resume = None
        if self._sharing is not None:
            self._sharing.speed_shares = self._speed_shares(state.get("shares_next"))
        if self.generator is not None and "generator" in state:
            self.generator.set_state(state["generator"])
        saved = SamplerState(*state["sampler"]) if "sampler" in state else None
        if state["running"]:
            segments = tuple(map(EpochSegment.from_list, state.get("shares", ())))
            pieces = _pieces(state.get("pieces"))
            position = EpochPosition(state["delivered"], segments, saved, pieces)
            self._resume = EpochProgress(state["seed"], state["epoch"], position)
            self._resume.generator = state.get("generator")
            self._resume.speed_shares = self._speed_shares(state.get("shares_now"))
        elif saved is not None:
            index_state.restore(self._index_sampler, saved)

    def _speed_shares(self, found: Sequence[int] | None) -> tuple[int, ...] | None:
        """Shares of a state, if they are those of as many ranks as there are now."""
        if found is None or self._sharing is None:
            return None
        same = self._sharing.takes_shares and len(found) == self._sharing.ranks.world_size
        return tuple(map(int, found)) if same else None

    def _identity(self) -> dict[str, Any]:
        """The properties in which loaders with other batches differ."""
        sharing = self._shared()
        by_part = 0 if sharing is None else sharing.partition
        return {
            "num_seeds": len(self.dataset),
            "batch_size": self.batch_size or 0,
            "drop_last": self.drop_last,
            "shuffle": self._shuffle,
            **({"by_part": by_part} if by_part else {}),
            **({"snapshot": found} if (found := self._graph_snapshot()) else {}),
            **({"order": _COMPUTED} if self._computes_order(sharing) else {}),
            **({} if self._plan is None else self._plan.identity),
        }

    def _graph_snapshot(self) -> Any:
        """The number of the snapshot of the graph, or several; nothing else than 0 is noted."""
        return 0

    def _computes_order(self, sharing: SeedSharding | None) -> bool:
        """Return True if the seeds of an epoch come in an order that nobody lists."""
        grouped = sharing is not None and sharing.grouped
        listed = grouped or self._plan is not None or len(self.dataset) <= LISTED
        return self._own_order and self._shuffle and not listed

    def _refuse_other_loader(self, state: dict[str, Any]) -> None:
        identity = self._identity()
        if state.get("by_part", 0) != identity.pop("by_part", 0):
            raise ValueError(
                "the state was taken from a loader whose seeds were "
                + ("grouped by part" if "by_part" in state else "not grouped by part")
                + ", and this one has others, none, or those of another partition: build the "
                "loader as it was (split_seeds=)"
            )
        then, now = state.get("snapshot", 0), identity.pop("snapshot", 0)
        if then != now:
            raise ValueError(
                f"the state was taken at snapshot {then} of the graph, this loader has snapshot "
                f"{now}: open that one, pyg_scale.open(path, snapshot={then})"
            )
        ordered = identity.pop("order", None)
        if "batch_cost" in state and self._plan is None:
            raise ValueError(
                f"the state was taken from a loader with batch_cost={state['batch_cost']}, this "
                "one has none: its batches are others"
            )
        for name, value in identity.items():
            if state[name] != value:
                raise ValueError(
                    f"the state was taken from a loader with {name}={state[name]}, this one has "
                    f"{name}={value}: its batches are others"
                )
        if state["running"] and state.get("order") != ordered:
            raise ValueError(
                f"the state is of another order of these {len(self.dataset)} seeds: that of more "
                f"than {LISTED} shuffled seeds is computed now, and was sorted when the state was "
                "taken, by an earlier release; begin the epoch again"
            )
        if self.seed is not None and (state["fixed_seed"], state["seed"]) != (True, self.seed):
            was = f"seed={state['seed']}" if state["fixed_seed"] else "no seed="
            raise ValueError(
                f"the state was taken with {was}, this loader has seed={self.seed}: leave out "
                f"seed= to take on what the state says"
            )
        if ("sampler" in state) == self._own_order:
            raise ValueError(
                "the state was taken from a loader "
                + ("with" if "sampler" in state else "without")
                + " a sampler= or batch_sampler= of its own: build the loader as it was"
            )


_COMPUTED = "permuted"
"""The order of many shuffled seeds; a state without it is of few, or of an older release."""
_MAY_LACK = {"by_part", "order", "snapshot"}
_KEYS = {"running", "seed", "fixed_seed", "epoch", "next_epoch", "pinned", "delivered"}


def _pieces(found: Any) -> tuple[int, int] | None:
    """The entry ``pieces`` of a state.

    Raises:
        ValueError: If it is none.
    """
    if found is None:
        return None
    if not (isinstance(found, list | tuple) and len(found) == 2):
        raise ValueError(f"pieces={found!r} does not say how many pieces of which batch were had")
    return int(found[0]), int(found[1])
