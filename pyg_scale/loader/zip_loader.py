"""Several loaders side by side, over the same positions of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.loader.utils import infer_filter_per_worker

from pyg_scale.loader.base import SubgraphLoader
from pyg_scale.loader.batch.pin import pin_batch
from pyg_scale.loader.batch.placement import Placement
from pyg_scale.loader.seeds.epoch import BatchIndex, call_key
from pyg_scale.loader.seeds.split import communicator_of
from pyg_scale.loader.stats import Stats
from pyg_scale.loader.workers.randomness import torch_forked
from pyg_scale.ops import keys


class ZipLoader(SubgraphLoader, torch_geometric.loader.ZipLoader):
    """Loads tuples with one batch of each of several loaders.

    As :class:`torch_geometric.loader.ZipLoader`, and a subclass of it, but every loader keeps the
    key of its batch: with a seed of its own, batch ``i`` of epoch ``e`` is what this loader would
    have given alone for the same positions. A loader without one draws from
    ``fold(key, j)``, where ``key`` is that of the tuple and ``j`` its place in ``loaders``.

    Order, batch size, workers and pinning are those of the ``ZipLoader``, whatever the loaders were
    built with; ``state_dict()``, ``set_epoch()`` and ``stats()`` are as in
    :class:`~pyg_scale.loader.NodeLoader`. The end is that of the shortest input. Ranks share these
    positions if they share the seeds of one of the loaders.

    Args:
        loaders: Loaders of nodes or links, ours or PyG's. With one of PyG's workers are processes.
        filter_per_worker: Whether workers fetch features, for all loaders (it is set on
            each, as in PyG); ``None``: unless the data of the first is on a GPU.
        seed: See :class:`~pyg_scale.loader.NodeLoader`.
        worker_type: See there.
        split_seeds: See there; ``"part"`` is not supported, as the parts of seeds at the same
            position differ.
        uneven: See there.
        split_batches: See there.
        comm: See there.
        kwargs: Arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        NotImplementedError: If ``split_seeds="part"``.
        ValueError: If there are no loaders, or one is none; if arguments contradict each other.
    """

    def __init__(
        self,
        loaders: Sequence[Any],
        filter_per_worker: bool | None = None,
        *,
        seed: int | None = None,
        worker_type: str | None = None,
        split_seeds: str | bool | None = None,
        uneven: str = "join",
        split_batches: bool = False,
        comm: Any = None,
        **kwargs: Any,
    ):
        if len(loaders) == 0:
            raise ValueError("loaders is empty: give at least one")
        for loader in loaders:
            for name in ("collate_fn", "filter_fn"):
                if not callable(getattr(loader, name, None)):
                    raise ValueError(
                        f"loaders has a {type(loader).__name__}, which has no {name}(); it takes "
                        f"loaders of nodes or links"
                    )
            if isinstance(loader, torch_geometric.loader.TemporalDataLoader):
                raise ValueError(
                    f"loaders has a {type(loader).__name__}, whose positions are batches of "
                    f"events; it takes loaders of nodes or links"
                )
        if split_seeds == "part":
            raise NotImplementedError(
                "split_seeds='part': the seeds that loaders have at the same position are of "
                "different parts; pass 'global'"
            )
        if filter_per_worker is None:
            filter_per_worker = infer_filter_per_worker(getattr(loaders[0], "data", None))
        for loader in loaders:
            loader.filter_per_worker = filter_per_worker
        self.loaders = loaders
        self.filter_per_worker = filter_per_worker
        self._parts = [
            loader if isinstance(loader, SubgraphLoader) else _Foreign(loader) for loader in loaders
        ]
        ordered = kwargs.get("sampler") is not None or kwargs.get("batch_sampler") is not None
        if split_seeds is None and not ordered:
            own = [part for part in self._parts if isinstance(part, SubgraphLoader)]
            shared = any(part._sharing is not None for part in own)
            split_seeds = "global" if shared else None
        if comm is None:
            comm = next(filter(None, (communicator_of(part.data) for part in self._parts)), None)
        ours = (part for part in self._parts if isinstance(part, SubgraphLoader))
        if any(part.batch_cost is not None for part in ours):
            raise ValueError(
                "one of loaders has batch_cost=, but all loaders of a ZipLoader have the same "
                "positions: leave it out, and give batch_size= to the ZipLoader"
            )
        if kwargs.get("device_memory") is not None:
            raise ValueError("device_memory=: a ZipLoader copies tuples, and keeps no features")
        self._start(
            min(len(loader.dataset) for loader in loaders),
            seed=seed,
            worker_type=worker_type,
            split_seeds=split_seeds,
            uneven=uneven,
            split_batches=split_batches,
            comm=comm,
            **kwargs,
        )
        if any(part._placement.device is not None for part in self._parts):
            raise ValueError(
                "one of loaders was given device=: give it to the ZipLoader instead, which copies "
                "the tuples, and a feature_store=DeviceFeatures(...) to the loaders"
            )
        for loader, part in zip(loaders, self._parts, strict=True):
            if part._needs_processes:
                self._require_processes(
                    f"{type(loader).__name__} draws from torch's global generator, which threads "
                    f"would share: pass worker_type='process' or num_workers=0"
                )
        self._publish()

    def _check_rows(self) -> None:
        for part in self._parts:
            part._check_rows()

    def _seed_tensors(self) -> list[Tensor]:
        found = [torch.arange(len(self.dataset))]
        for part in self._parts:
            found += part._seed_tensors()
        return found

    def _draws(self) -> dict[str, str]:
        return {
            f"loaders[{number}].{name}": value
            for number, part in enumerate(self._parts)
            for name, value in part._draws().items()
        }

    def _split(self, batch: BatchIndex) -> Iterator[tuple[Any, BatchIndex]]:
        """Each loader with its batch."""
        for j, part in enumerate(self._parts):
            if part.seed is None:
                key = keys.fold(batch.key, j)
            elif batch.position < 0:
                key = call_key(part.seed, batch.index)
            else:
                key = keys.batch_key(part.seed, batch.epoch, batch.position)
            yield part, BatchIndex(batch.index, key, batch.position, batch.epoch, first=batch.first)

    def collate_fn(self, index: Any) -> tuple[Any, ...]:
        """One batch of each loader; sampled only, unless ``filter_per_worker``."""
        return tuple(part.collate_fn(batch) for part, batch in self._split(self._keyed(index)))

    def filter_fn(self, outs: Any) -> tuple[Any, ...]:
        """Fetch the features of what was sampled, and transform, for each loader."""
        return tuple(part.filter_fn(out) for part, out in zip(self._parts, outs, strict=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loaders={self.loaders})"

    # A stage of the whole is that stage of every loader.

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(ZipLoader, name)

    @property
    def _is_extended(self) -> bool:
        return self._overrides("collate_fn") or self._overrides("filter_fn")

    def _work(self, batch: BatchIndex, stats: Stats, pin: bool) -> tuple[str, Any]:
        if self._is_extended:
            with stats.stage("sample"):
                return "extended", self.collate_fn(batch)
        return "parts", tuple(part._work(b, stats, pin) for part, b in self._split(batch))

    def _process_work(self, batch: BatchIndex) -> tuple[int, tuple[str, Any], Stats]:
        stats = Stats()
        if self._is_extended:
            return batch.step, self._work(batch, stats, False), stats
        parts = [part._process_work(b) for part, b in self._split(batch)]
        for _, _, counted in parts:
            stats.add(counted)
        return batch.step, ("parts", tuple(made for _, made, _ in parts)), stats

    def _finish(self, batch: BatchIndex, made: tuple[str, Any], stats: Stats, pin: bool) -> Any:
        kind, out = made
        if kind == "parts":
            return tuple(
                part._finish(b, each, stats, pin)
                for (part, b), each in zip(self._split(batch), out, strict=True)
            )
        if not self.filter_per_worker:
            with stats.stage("fetch"):
                out = self.filter_fn(out)
        return pin_batch(out, stats) if pin else out

    def _graph_snapshot(self) -> list[Any]:
        parts = [each for each in self._parts if isinstance(each, SubgraphLoader)]
        found = [part._graph_snapshot() for part in parts]
        return found if any(found) else []

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"loader_seeds": [part.seed for part in self._parts]}


class _Foreign:
    """A loader of PyG, with torch's generator seeded from the key of its batch."""

    seed = None
    _needs_processes = True
    _placement = Placement()

    def __init__(self, loader: Any) -> None:
        self.loader, self.data = loader, getattr(loader, "data", None)

    def _check_rows(self) -> None:
        """PyG's loaders are as they are."""

    def _draws(self) -> dict[str, str]:
        return {}

    def _seed_tensors(self) -> list[Tensor]:
        inputs = getattr(self.loader, "input_data", None)
        values = (getattr(inputs, name, None) for name in ("node", "row", "col", "time"))
        return [value for value in values if isinstance(value, Tensor)]

    @property
    def filter_fn(self) -> Callable[[Any], Any]:
        return self.loader.filter_fn

    def collate_fn(self, batch: BatchIndex) -> Any:
        with torch_forked(keys.fold(batch.piece_key, keys.FOREIGN)):
            return self.loader.collate_fn(batch.index)

    def _work(self, batch: BatchIndex, stats: Stats, pin: bool) -> Any:
        with stats.stage("sample"):
            return self.collate_fn(batch)

    def _process_work(self, batch: BatchIndex) -> tuple[int, Any, Stats]:
        stats = Stats()
        return batch.step, self._work(batch, stats, False), stats

    def _finish(self, batch: BatchIndex, made: Any, stats: Stats, pin: bool) -> Any:
        if not self.loader.filter_per_worker:
            with stats.stage("fetch"):
                made = self.loader.filter_fn(made)
        return pin_batch(made, stats) if pin else made
