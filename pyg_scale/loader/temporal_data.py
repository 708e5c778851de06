"""Batches of events in the order of time."""

from __future__ import annotations

import copy
import math
import operator
from typing import Any, NamedTuple

import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import TemporalData

from pyg_scale.loader.base import SubgraphLoader
from pyg_scale.loader.seeds.epoch import BatchIndex, call_key, draw_seed
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import keys


class _Events(NamedTuple):
    """The events from ``begin`` to ``end - 1``, and the negatives that were drawn for them."""

    begin: int
    end: int
    neg_dst: Tensor | None


class TemporalDataLoader(SubgraphLoader, torch_geometric.loader.TemporalDataLoader):
    """Loads successive events of a :class:`torch_geometric.data.TemporalData`.

    As :class:`torch_geometric.loader.TemporalDataLoader`, and a subclass of it: a batch has the
    attributes of its events, ``neg_dst`` and ``n_id``, the nodes in it. Negatives are drawn from
    the key of the batch, so that an epoch is the same for any number of workers, and an
    iteration can be resumed (``state_dict``). A batch has memory of its own.

    Args:
        data: The events, in the order of time.
        batch_size: Events of a batch.
        neg_sampling_ratio: Negative destinations for each event. They are uniform among the
            numbers from the smallest to the largest destination in ``data``, as in PyG, so that
            a negative can be the destination of the event.
        seed: See :class:`~pyg_scale.loader.NodeLoader`.
        worker_type: See there.
        kwargs: ``split_seeds``, ``uneven``, ``comm``, ``device``, see there, and arguments of
            :class:`torch.utils.data.DataLoader`.

    Raises:
        TypeError: If ``data`` is no ``TemporalData``, or ``batch_size`` no integer.
        ValueError: If events are not in the order of time or one has none, ``shuffle=True`` or
            ``split_batches=True`` is given, or a number is out of range.
    """

    def __init__(
        self,
        data: TemporalData,
        batch_size: int = 1,
        neg_sampling_ratio: float = 0.0,
        *,
        seed: int | None = None,
        worker_type: str | None = None,
        **kwargs: Any,
    ):
        _check_events(data)
        if kwargs.pop("shuffle", False):
            raise ValueError("events are loaded in the order of time: leave out shuffle=True")
        if kwargs.get("split_batches"):
            raise ValueError(
                "split_batches=True cuts the seeds of a step, but a batch of events stays whole: "
                "use split_seeds='global', with which ranks take turns"
            )
        self.data = data
        self.events_per_batch = operator.index(batch_size)
        if self.events_per_batch < 1:
            raise ValueError(f"batch_size must be at least 1 (got {batch_size})")
        if not 0 <= neg_sampling_ratio < math.inf:
            raise ValueError(
                f"neg_sampling_ratio must be finite, and must not be negative (got "
                f"{neg_sampling_ratio})"
            )
        self.neg_sampling_ratio = neg_sampling_ratio
        if neg_sampling_ratio > 0 and data.num_events:
            self.min_dst, self.max_dst = int(data.dst.min()), int(data.dst.max())
        whole, rest = divmod(data.num_events, self.events_per_batch)
        drop_last = kwargs.get("drop_last", False)
        self._start(
            whole if drop_last else whole + (rest > 0),
            seed=seed,
            worker_type=worker_type,
            batch_size=1,
            **kwargs,
        )
        self._counts = _counts(data)
        self._publish()

    def __call__(self, arange: Any) -> TemporalData:
        """The batch that begins at an event.

        Args:
            arange: The number of its first event, in a list, as in PyG. Its negatives are a
                function of the loader's seed and of this number.

        Raises:
            IndexError: If there is no such event.
            ValueError: If none is given, or ``data`` has other numbers of events than before.
        """
        self._check_rows()
        if len(arange) == 0:
            raise ValueError("arange is empty: give the number of the batch's first event")
        begin = operator.index(arange[0])
        if not 0 <= begin < self.data.num_events:
            raise IndexError(f"event {begin} does not exist: there are {self.data.num_events}")
        seed = draw_seed(self.generator) if self.seed is None else self.seed
        found = self._fetch(self._events(begin, call_key(seed, torch.tensor([begin]))), Stats())
        return self._placement.bring(found, False)

    def _check_rows(self) -> None:
        """Refuse events whose number was changed after the loader was made."""
        now = _counts(self.data)
        for name, count in self._counts.items():
            if now.get(name, count) != count:
                raise ValueError(
                    f"data.{name} had {count} rows when this loader was made, and has {now[name]} "
                    "now: the loader goes on to cut the events that it was made with, which these "
                    "no longer fit; make a new loader"
                )

    def _seed_tensors(self) -> list[Tensor]:
        return [self.data.src, self.data.dst]

    def _parts_of_seeds(self) -> Tensor | None:
        return None

    def _draws(self) -> dict[str, str]:
        return {
            "batch_size": str(self.events_per_batch),
            "neg_sampling_ratio": str(self.neg_sampling_ratio),
        }

    def _sample(self, batch: BatchIndex) -> _Events:
        return self._events(int(batch.index) * self.events_per_batch, batch.key)

    def _events(self, begin: int, key: int) -> _Events:
        end = min(begin + self.events_per_batch, self.data.num_events)
        if self.neg_sampling_ratio <= 0:
            return _Events(begin, end, None)
        count = round(self.neg_sampling_ratio * (end - begin))
        size = self.max_dst - self.min_dst + 1
        drawn = keys.draws(keys.fold(key, keys.EVENT_NEGATIVE), count, size)
        dst = self.data.dst
        return _Events(begin, end, (drawn + self.min_dst).to(dst.device, dst.dtype))

    def _fetch(self, out: _Events, stats: Stats) -> TemporalData:
        num_events, batch = self.data.num_events, copy.copy(self.data)
        for name, value in self.data._store.items():
            if isinstance(value, Tensor) and value.dim() and value.size(0) == num_events:
                batch[name] = value[out.begin : out.end].clone()
        ends = [batch.src, batch.dst]
        if out.neg_dst is not None:
            batch.neg_dst = out.neg_dst
            ends.append(out.neg_dst)
        batch.n_id = torch.cat(ends).unique()
        stats.count("fetch", rows=out.end - out.begin)
        return batch


def _counts(data: TemporalData) -> dict[str, int]:
    """The number of rows of each tensor of the events."""
    return {
        name: value.size(0)
        for name, value in data._store.items()
        if isinstance(value, Tensor) and value.dim()
    }


def _check_events(data: Any) -> None:
    """Refuse what is no stream of events in the order of time."""
    if not isinstance(data, TemporalData):
        raise TypeError(f"data must be a TemporalData (got {type(data).__name__})")
    for name in ("src", "dst", "t"):
        value = data._store.get(name)
        if not isinstance(value, Tensor) or value.dim() != 1:
            raise ValueError(f"data must have {name}, one number for each event")
        if value.size(0) != data.num_events:
            raise ValueError(
                f"data.{name} has {value.size(0)} numbers for {data.num_events} events"
            )
    if data.t.is_floating_point() and bool(data.t.isnan().any()):
        raise ValueError("data.t has NaN in it: give every event a time")
    late = (data.t[1:] < data.t[:-1]).nonzero().view(-1)
    if late.numel():
        raise ValueError(
            f"events must be in the order of time, but event {int(late[0]) + 1} is earlier than "
            "the one before it: sort them, data = data[data.t.argsort(stable=True)]"
        )
