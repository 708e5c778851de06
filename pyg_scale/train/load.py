"""The load of ranks: how many seconds each spends on what, and how even that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyg_scale.comm import Communicator, connect
from pyg_scale.comm.connect import num_ranks
from pyg_scale.train.steps import MeasuredLoader, Numbers, Step

MEASURES = ("steps", "seeds", "edges", "load", "compute", "wait", "sample", "fetch")
"""The columns of a :class:`Load`: numbers of steps, seeds and sampled edges, and seconds. ``load``
and ``compute`` are those of the loop, ``wait`` those in which it waited for other ranks; ``sample``
and ``fetch`` those of the loader, whose workers spend them beside the loop."""


def imbalance_of(values: Sequence[float]) -> float:
    """The largest value as a multiple of the mean; 1.0 if all are equal or zero."""
    mean = sum(values) / len(values) if values else 0.0
    return max(values) / mean if mean > 0 else 1.0


def variation_of(values: Sequence[float]) -> float:
    """The coefficient of variation: standard deviation by mean; 0.0 where the mean is zero."""
    mean = sum(values) / len(values) if values else 0.0
    if mean <= 0:
        return 0.0
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean


@dataclass(frozen=True)
class Load:
    """The work that the ranks did in some steps.

    Attributes:
        ranks: For each rank its numbers by :data:`MEASURES`.
    """

    ranks: tuple[dict[str, float], ...]

    @property
    def busy(self) -> list[float]:
        """Seconds in which each rank did not wait for others: loading and computing."""
        return [each["load"] + each["compute"] for each in self.ranks]

    @property
    def imbalance(self) -> float:
        """The busy seconds of the slowest rank as a multiple of their mean; at least 1."""
        return imbalance_of(self.busy)

    @property
    def efficiency(self) -> float:
        """``1 / imbalance``: the share of the time in which ranks that wait for each other work."""
        return 1 / self.imbalance

    @property
    def time_variation(self) -> float:
        """The coefficient of variation of the busy seconds."""
        return variation_of(self.busy)

    @property
    def size_variation(self) -> float:
        """The same of the sampled edges or, where nobody counts them, of the seeds."""
        edges = [each["edges"] for each in self.ranks]
        return variation_of(edges if any(edges) else [each["seeds"] for each in self.ranks])

    @property
    def speeds(self) -> list[float]:
        """Seeds for each busy second; 0.0 for a rank that had none."""
        pairs = zip(self.ranks, self.busy, strict=True)
        return [each["seeds"] / busy if busy > 0 else 0.0 for each, busy in pairs]


class LoadMonitor:
    """Measures how the ranks share the work.

    ```python
    monitor = LoadMonitor(model=model)
    for epoch in range(10):
        for batch in monitor(loader):
            train(batch)
        load = monitor.gather()             # every rank gets the same
        print(load.imbalance, load.ranks[1]["fetch"])
    ```

    Straggling ranks do not show in the times of whole steps, as gradients make all wait for the
    slowest. So waiting is measured by itself, by the model, and left out. It is also a sink of a
    :class:`~pyg_scale.train.recording.Recorder`.

    Args:
        model: The model as :func:`pyg_scale.parallel.wrap` made it; without it waiting counts as
            computing.
        comm: How ranks tell each other: see :class:`~pyg_scale.train.Checkpoint`.
        timeout: Seconds that they wait for each other.
        clock: Returns seconds; by default ``time.perf_counter``.

    Raises:
        CommTimeoutError: If not all ranks make one in time.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        comm: str | Communicator | None = None,
        timeout: float = 300.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._model, self._clock = model, clock
        self._numbers = Numbers()
        self._sums = torch.zeros(len(MEASURES), dtype=torch.float64)
        self._ranks = connect(comm or ("local" if num_ranks() == 1 else "gloo"), timeout=timeout)
        self._owns_ranks = self._ranks is not comm

    def __call__(self, loader: Iterable[Any]) -> MeasuredLoader:
        """The loader, whose steps are measured as it is iterated over."""
        return MeasuredLoader(
            loader, self, model=self._model, clock=self._clock, numbers=self._numbers
        )

    def write(self, step: Step) -> None:
        """Add a step."""
        self._sums += torch.tensor(_measured(step), dtype=torch.float64)

    def gather(self) -> Load:
        """The load of all ranks since this was called last. Every rank calls it, equally often.

        Raises:
            CommTimeoutError: If a rank does not come in time; names it.
        """
        found = self._ranks.all_gather(self._sums.clone())
        self._sums.zero_()
        return Load(tuple(dict(zip(MEASURES, each.tolist(), strict=True)) for each in found))

    def close(self) -> None:
        """Release the connections to other ranks; may be called again."""
        if self._owns_ranks:
            self._ranks.close()

    def __enter__(self) -> LoadMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_of(ranks: Iterable[Iterable[Step]]) -> Load:
    """The load of ranks from the steps that each has made."""
    sums = [[sum(column) for column in zip(*map(_measured, steps))] for steps in ranks]
    empty = [0.0] * len(MEASURES)
    return Load(tuple(dict(zip(MEASURES, each or empty, strict=True)) for each in sums))


def _measured(step: Step) -> list[float]:
    stages = step.stages
    found = (1, step.seeds, step.counts.get("edges", 0), step.load, step.compute, step.exchange)
    return [float(each) for each in (*found, stages.get("sample", 0), stages.get("fetch", 0))]
