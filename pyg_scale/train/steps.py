"""The steps of a training loop, measured: loading, computing, waiting for other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch_geometric.data.data import BaseData

from pyg_scale.loader.stats import STAGES
from pyg_scale.parallel.base import CountsWaiting
from pyg_scale.train.accumulation import KnowsEnd

COUNTS = {
    "edges": ("sample", "rows"),
    "rows": ("fetch", "rows"),
    "bytes": ("fetch", "bytes"),
    "cache_hits": ("fetch", "cache_hits"),
    "device_rows": ("fetch", "device_rows"),
    "remote_rows": ("fetch", "remote_rows"),
    "remote_bytes": ("fetch", "remote_bytes"),
}
"""The counts of a step, and where ``loader.stats()`` has them: edges that were sampled, rows of
features that were read and their bytes, rows that were in a cache, that were on the device, and
those that other ranks sent, with their bytes."""


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Step(NamedTuple):
    """One step of a loop on one rank, in seconds and counts.

    Attributes:
        number: Counts the steps from 0.
        epoch: Counts the passes over loaders from 0.
        begin: When the batch was asked for, seconds of the clock.
        load: Seconds until it was there.
        body: Seconds of the body of the loop, until the next batch was asked for.
        exchange: Seconds of the body in which gradients of other ranks were waited for.
        seeds: The batch's number of seeds, 0 if it does not say.
        stages: Seconds of each stage of the loader, by :data:`~pyg_scale.loader.stats.STAGES`; its
            workers spend them beside the loop.
        counts: By :data:`COUNTS`.
        values: What the user logged: numbers, or tensors of one number.
    """

    number: int
    epoch: int
    begin: float
    load: float
    body: float
    exchange: float = 0.0
    seeds: int = 0
    stages: Mapping[str, float] = _NOTHING
    counts: Mapping[str, int] = _NOTHING
    values: Mapping[str, Any] = _NOTHING

    @property
    def compute(self) -> float:
        """Seconds of the body in which this rank did something of its own."""
        return max(0.0, self.body - self.exchange)

    @property
    def busy(self) -> float:
        """Seconds in which this rank did not wait for others."""
        return self.load + self.compute


class Sink(Protocol):
    """A place for measured steps: a file, a dashboard, a monitor."""

    def write(self, step: Step) -> None:
        """Take a step that was made."""
        ...


@runtime_checkable
class HasStats(Protocol):
    """A loader that counts what its stages take, as ours do."""

    def stats(self) -> dict[str, Any]: ...


@dataclass
class Numbers:
    """The numbers of the next epoch and step, which go on from one pass to the next."""

    epoch: int = 0
    step: int = 0


class MeasuredLoader:
    """A loader whose steps are measured as it is iterated over.

    A step ends when the next batch is asked for. One that a ``break`` leaves has no end, and is not
    counted.

    Args:
        loader: Any loader; ours also say what their stages take.
        sink: Gets every step, once it was made.
        model: The wrapped model, if it counts how long it waited (``parallel.wrap(model, "ddp")``).
        clock: Returns seconds.
        values: Returns what was logged since it was called last.
        numbers: Those of the first epoch and step.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        sink: Sink,
        *,
        model: Any = None,
        clock: Callable[[], float] | None = None,
        values: Callable[[], Mapping[str, Any]] = dict,
        numbers: Numbers | None = None,
    ) -> None:
        self.loader, self.sink = loader, sink
        self.clock = clock or time.perf_counter
        self.model = model if isinstance(model, CountsWaiting) else None
        self.values = values
        self.numbers = numbers or Numbers()
        self._stats = loader.stats if isinstance(loader, HasStats) else None

    def __iter__(self) -> Iterator[Any]:
        inner = iter(self.loader)
        return (_StepsWithEnd if isinstance(inner, KnowsEnd) else _Steps)(self, inner)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def waited(self) -> float:
        """Seconds that the model has waited for other ranks so far."""
        return 0.0 if self.model is None else self.model.seconds_waited

    def counted(self) -> dict[str, Any]:
        """The loader's own counts so far; empty if it counts nothing."""
        return {} if self._stats is None else self._stats()["total"]


class _Steps(Iterator[Any]):
    def __init__(self, measured: MeasuredLoader, inner: Iterator[Any]) -> None:
        self._measured, self._inner = measured, inner
        self._epoch = measured.numbers.epoch
        measured.numbers.epoch += 1
        self._counted = measured.counted()
        self._under_way: tuple[float, float, float, int] | None = None

    def __next__(self) -> Any:
        measured = self._measured
        asked = measured.clock()
        self._end(asked)
        batch = next(self._inner)
        self._under_way = asked, measured.clock(), measured.waited(), _num_seeds(batch)
        return batch

    def _end(self, now: float) -> None:
        """The body of the step that is under way, if there is one, has ended."""
        if self._under_way is None:
            return
        asked, there, waited, seeds = self._under_way
        self._under_way, measured = None, self._measured
        before, self._counted = self._counted, measured.counted()
        stages, counts = _between(before, self._counted)
        number = measured.numbers.step
        measured.numbers.step += 1
        measured.sink.write(
            Step(
                number=number,
                epoch=self._epoch,
                begin=asked,
                load=there - asked,
                body=now - there,
                exchange=max(0.0, measured.waited() - waited),
                seeds=seeds,
                stages=stages,
                counts=counts,
                values=measured.values(),
            )
        )


class _StepsWithEnd(_Steps):
    @property
    def at_end(self) -> bool:
        return self._inner.at_end  # type: ignore[attr-defined]


def _num_seeds(batch: Any) -> int:
    """The number of seeds of a batch, as PyG's say it; of a tuple the sum; 0 if it does not say."""
    if isinstance(batch, tuple):
        return sum(map(_num_seeds, batch))
    if not isinstance(batch, BaseData):
        return 0
    stores = [store for store in batch.node_stores if "batch_size" in store]
    return sum(int(store["batch_size"]) for store in stores)


def _between(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict, dict]:
    """Seconds of stages and counts from one look at a loader to the next."""
    if not after:
        return {}, {}

    stages = {stage: after[stage]["seconds"] for stage in STAGES}
    counts = {name: after[stage][key] for name, (stage, key) in COUNTS.items()}
    if before:
        for stage in STAGES:
            stages[stage] -= before[stage]["seconds"]
        for name, (stage, key) in COUNTS.items():
            counts[name] -= before[stage][key]
    return stages, counts
