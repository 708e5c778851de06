"""Reactions to an uneven load: fewer seeds for slow ranks, another partition, other ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from pyg_scale.graph.topology import NodeType
from pyg_scale.partitioner import Partition, Repartition, repartition
from pyg_scale.train.load import Load, LoadMonitor

UNITS = 1 << 16
"""The sum of the shares of all ranks, but for rounding."""


class TakesShares(Protocol):
    """A loader whose steps ranks share unequally, as ours do with ``split_batches=True``."""

    def set_speed_shares(self, shares: Sequence[int] | None) -> None: ...


def shares_of(speeds: Sequence[float], least: float = 0.05) -> list[int]:
    """The shares of ranks in proportion to their speeds, integers that add up to about 65536.

    Args:
        speeds: Of each rank, in any unit; 0.0 where nobody knows: the mean of the others.
        least: No rank gets less than this part of an equal share: it goes on being measured.

    Raises:
        ValueError: If a speed is negative or not finite.
    """
    if any(not (math.isfinite(speed) and speed >= 0) for speed in speeds):
        raise ValueError(f"speeds must be finite and not negative (got {list(speeds)})")
    known = [speed for speed in speeds if speed > 0]
    mean = sum(known) / len(known) if known else 1.0
    filled = [speed or mean for speed in speeds]
    total = sum(filled)
    floor = least / len(filled)
    return [round(UNITS * max(speed / total, floor)) for speed in filled]


class SpeedShares:
    """Gives every rank seeds in proportion to its measured speed.

    ```python
    monitor = LoadMonitor(model=model)
    shares = SpeedShares(loader, monitor)           # loader: split_batches=True
    for epoch in range(10):
        for batch in monitor(loader):
            train(batch)
        load = shares.step()                        # for the next epoch
    ```

    A rank of half the speed gets half the seeds, in each step, so that all are done together. The
    gradient of a step stays what it was, as ``ddp`` weighs by seeds. All ranks compute the same
    shares from the same numbers. They are part of the loader's state, and the
    speeds of this object's: add both to a :class:`~pyg_scale.train.Checkpoint`.

    Args:
        loader: With ``split_batches=True``.
        monitor: Measures its steps, and is asked for nothing by anybody else.
        smoothing: The weight of the newest measurement, above 0, at most 1.
        tolerance: Shares stay as they are as long as none would change by more than this part of
            itself, so that noise moves nothing.

    Attributes:
        shares: Those of the next epoch; ``None``: equal ones.
        speeds: Seeds per busy second of each rank, smoothed.

    Raises:
        ValueError: If a number cannot be, or the loader has not ``split_batches=True``.
    """

    def __init__(
        self,
        loader: TakesShares,
        monitor: LoadMonitor,
        *,
        smoothing: float = 0.5,
        tolerance: float = 0.05,
    ) -> None:
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing must be above 0 and at most 1 (got {smoothing})")
        if not tolerance >= 0:
            raise ValueError(f"tolerance must not be negative (got {tolerance})")
        loader.set_speed_shares(None)  # raises where ranks do not share steps
        self._loader, self._monitor = loader, monitor
        self._smoothing, self._tolerance = smoothing, tolerance
        self.shares: list[int] | None = None
        self.speeds: list[float] = []

    def step(self) -> Load:
        """Measure what was done since the last call, and share out the next epoch by it.

        Every rank calls it, once after each epoch.

        Returns:
            The load by which it went.
        """
        load = self._monitor.gather()
        if len(self.speeds) != len(load.ranks):
            self.speeds = [0.0] * len(load.ranks)
        pairs = zip(self.speeds, load.speeds, strict=True)
        self.speeds = [self._smoothed(old, new) for old, new in pairs]
        wanted = shares_of(self.speeds)
        present = self.shares or [UNITS // len(wanted)] * len(wanted)
        changes = [abs(a / b - 1) for a, b in zip(wanted, present, strict=True)]
        if max(changes) > self._tolerance:
            self.shares = wanted
            self._loader.set_speed_shares(wanted)
        return load

    def _smoothed(self, old: float, new: float) -> float:
        if not (old and new):
            return new or old
        return old + self._smoothing * (new - old)

    def state_dict(self) -> dict[str, Any]:
        """The speeds and shares."""
        return {"speeds": list(self.speeds), "shares": self.shares and list(self.shares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a state. Where it is that of another number of ranks, all begin anew.

        The loader's own state says what it does; load that as well.
        """
        self.speeds, self.shares = list(state["speeds"]), state["shares"]


class AdaptivePartition:
    """Decides when nodes move between parts, and which ones, after measured loads.

    Nothing moves until the imbalance was above ``threshold`` in ``patience`` loads in a row, and
    then nothing for ``cooldown`` loads, so that noise moves nothing and a move shows its effect
    before the next one. The nodes are those of :func:`pyg_scale.partitioner.repartition`: few, at
    boundaries; parts within the tolerance stay.

    The result is an assignment. Write it with :func:`pyg_scale.partitioner.write_partition`, and
    open the graph again between epochs.

    Args:
        data: The graph, as :func:`pyg_scale.partition` takes it.
        assignment: The part of every node: one part for each rank.
        threshold: An imbalance above 1.
        patience: How many loads in a row.
        cooldown: How many loads are passed over after a move.
        tolerance: How far a part may be from its target.
        seed: Of the order of equally good moves.

    Attributes:
        assignment: The present one.

    Raises:
        ValueError: If a number cannot be.
    """

    def __init__(
        self,
        data: Any,
        assignment: Partition | Mapping[NodeType, Tensor] | Tensor,
        *,
        threshold: float = 1.2,
        patience: int = 3,
        cooldown: int = 5,
        tolerance: float = 0.05,
        seed: int = 0,
    ) -> None:
        if not threshold > 1:
            raise ValueError(f"threshold is an imbalance and must be above 1 (got {threshold})")
        if patience < 1 or cooldown < 0:
            raise ValueError(
                f"patience must be 1 or more, cooldown not negative (got {patience}, {cooldown})"
            )
        self.assignment: Any = assignment
        self._data, self._tolerance, self._seed = data, tolerance, seed
        self._threshold, self._patience, self._cooldown = threshold, patience, cooldown
        self._above = self._resting = 0

    def step(self, load: Load) -> Repartition | None:
        """Take a load of all ranks, such as one epoch's.

        Returns:
            What is to move; ``None`` if nothing is.

        Raises:
            ValueError: If there are not as many parts as ranks.
        """
        if self._resting:
            self._resting -= 1
            return None
        self._above = self._above + 1 if load.imbalance > self._threshold else 0
        if self._above < self._patience:
            return None
        work = [each["edges"] or each["seeds"] for each in load.ranks]
        found = repartition(
            self._data,
            self.assignment,
            loads=work,
            capabilities=[w / busy for w, busy in zip(work, load.busy, strict=True)],
            num_parts=len(load.ranks),
            tolerance=self._tolerance,
            seed=self._seed,
        )
        self._above, self._resting = 0, self._cooldown
        if not found.num_moved:
            return None
        self.assignment = found.assignment
        return found


@dataclass(frozen=True)
class ScalingAdvice:
    """Advice about the number of ranks.

    Attributes:
        action: ``"grow"``, ``"shrink"`` or ``"hold"``.
        reason: Why, in a sentence.
        growth: By how much the throughput of the last epochs exceeds that of those before; ``None``
            while there are too few.
    """

    action: str
    reason: str
    growth: float | None = None


class ScalingAdvisor:
    """Says whether more ranks, or fewer, are worth trying.

    It compares the mean throughput of the last five epochs with that of the five before. While it
    still grows, there is nothing to do. Where it has settled (less than 5 % of change), more ranks
    are worth trying, unless those that there are wait for each other. Where it falls, fewer are.
    It only says so: a process cannot make machines. Where torchrun runs with ``--nnodes 1:4``,
    start or stop an agent (``docs/launching.md``).

    Args:
        window: How many epochs are compared with as many.
        change: The relative change below which the throughput has settled.
        efficiency: Below this efficiency of a load more ranks are not worth trying.

    Raises:
        ValueError: If a number cannot be.
    """

    def __init__(self, window: int = 5, change: float = 0.05, efficiency: float = 0.8) -> None:
        if window < 1 or not change > 0 or not 0 < efficiency <= 1:
            raise ValueError(
                "window must be 1 or more, change above 0, efficiency above 0 and at most 1 (got "
                f"{window}, {change}, {efficiency})"
            )
        self._window, self._change, self._efficiency = window, change, efficiency
        self._history: deque[float] = deque(maxlen=2 * window)

    def step(self, throughput: float, efficiency: float = 1.0) -> ScalingAdvice:
        """Take an epoch.

        Args:
            throughput: Seeds per second of all ranks together.
            efficiency: Of its :class:`~pyg_scale.train.Load`.

        Raises:
            ValueError: If the throughput is negative or not finite.
        """
        if not (math.isfinite(throughput) and throughput >= 0):
            raise ValueError(f"throughput must be finite and not negative (got {throughput})")
        self._history.append(throughput)
        epochs = len(self._history)
        if epochs < 2 * self._window:
            return ScalingAdvice("hold", f"{epochs} of {2 * self._window} epochs are known")
        history = list(self._history)
        before, now = sum(history[: self._window]), sum(history[self._window :])
        if before <= 0:
            return ScalingAdvice("hold", "there was no throughput to compare with")
        growth = now / before - 1
        if growth >= self._change:
            return ScalingAdvice("hold", f"the throughput still grows, by {growth:.1%}", growth)
        if growth <= -self._change:
            return ScalingAdvice("shrink", f"the throughput falls, by {-growth:.1%}", growth)
        if efficiency < self._efficiency:
            reason = (
                f"the throughput has settled, but ranks work in {efficiency:.0%} of their time "
                "only and else wait for the slowest: balance them first"
            )
            return ScalingAdvice("hold", reason, growth)
        return ScalingAdvice("grow", f"the throughput has settled ({growth:+.1%})", growth)

    def reset(self) -> None:
        """Begin anew, as after the number of ranks has changed."""
        self._history.clear()
