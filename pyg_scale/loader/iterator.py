"""One pass over a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch_geometric.data.data import BaseData

from pyg_scale.loader.epoch import BatchIndex
from pyg_scale.loader.state import Progress
from pyg_scale.loader.stats import Stats

if TYPE_CHECKING:
    from pyg_scale.loader.base import SubgraphLoader


class Source(Protocol):
    """Where the work of a pass is done: in this thread, in threads, in processes."""

    def __next__(self) -> tuple[BatchIndex, Any, Stats]:
        """The next batch, what came of it, and what that took."""

    def pause(self) -> None:
        """An exception leaves the iterator: hold no thread; go on if asked for more."""

    def close(self) -> None:
        """Nobody will ask for more."""


def _mark(out: Any, repeated: bool) -> None:
    """Say on a batch whether another rank has it too.

    Raises:
        TypeError: If it is none of PyG's.
    """
    for each in out if isinstance(out, tuple) else (out,):
        if not isinstance(each, BaseData):
            raise TypeError(
                f"uneven='repeat' marks every batch with its attribute `repeated`, but this loader "
                f"makes a {type(each).__name__}: pass uneven='join' or 'drop'"
            )
        each.repeated = repeated


class EpochIterator:
    """One pass over a loader, or the rest of one."""

    def __init__(
        self,
        loader: SubgraphLoader,
        source: Source,
        progress: Progress,
        stats: Stats,
        pin: bool,
    ) -> None:
        self._loader = loader
        self._source = source
        self._progress = progress
        self._stats = stats
        self._pin = pin
        self._profile_name = f"enumerate(DataLoader)#{type(loader).__name__}.__next__"

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        with torch.autograd.profiler.record_function(self._profile_name):
            try:
                batch, made, stats = next(self._source)
                out = self._loader._finish(batch, made, stats, self._pin)
            except StopIteration:
                self._progress.finished = True
                raise
            except BaseException:
                self._source.pause()
                raise
        if self._loader.uneven == "repeat":
            _mark(out, batch.repeated)
        self._progress.deliver(batch)
        stats.batches = 1
        self._stats.add(stats)
        self._loader._total_stats.add(stats)
        return out

    def close(self) -> None:
        """Stop the workers of this iteration now, rather than when the last reference is gone."""
        self._source.close()
