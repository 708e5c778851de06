"""The base of the loaders of sampled subgraphs: stages, workers, epochs, statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import TensorAttr
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_scale.graph.base import needs_threads
from pyg_scale.loader.batch.features import Features
from pyg_scale.loader.batch.pin import pin_batch
from pyg_scale.loader.batch.placement import Landed, Placement, placement_of
from pyg_scale.loader.batch.source import RowCounts, features_of
from pyg_scale.loader.iterator import BatchSource, EpochIterator, Inline
from pyg_scale.loader.options import SamplingOptions, check_workers, checked
from pyg_scale.loader.seeds.budget import Budget
from pyg_scale.loader.seeds.epoch import (
    BatchIndex,
    EpochProgress,
    KeyedRandomSampler,
    call_key,
    draw_seed,
    to_index,
)
from pyg_scale.loader.seeds.plan import Pieces, each_piece, refuse_beside_cost, wanted_of
from pyg_scale.loader.seeds.split import SharedSeeds
from pyg_scale.loader.seeds.state import Resumable
from pyg_scale.loader.stats import Counted, Stats, count_sampled
from pyg_scale.loader.workers.affinity import log_memory
from pyg_scale.loader.workers.look_ahead import LookAhead, batches_under_way, warn_not_told
from pyg_scale.loader.workers.pace import Course, Pace
from pyg_scale.loader.workers.processes import ProcessPipeline, WorkerProcesses
from pyg_scale.loader.workers.randomness import forked
from pyg_scale.loader.workers.remote import Ahead, Pending, most_under_way
from pyg_scale.loader.workers.ring_workers import RingPipeline
from pyg_scale.loader.workers.threads import Borrowed, Pipeline, WorkerThreads
from pyg_scale.ops import keys

_SAMPLED, _FETCHED, _DONE = "sampled", "fetched", "done"
_OF_PYG = (SamplerOutput, HeteroSamplerOutput)


class SubgraphLoader(Resumable, DataLoader[Any]):
    """A ``DataLoader`` whose batches are sampled with a key, fetched, and transformed.

    A subclass calls :meth:`_start` and supplies the two stages below. ``collate_fn`` and
    ``filter_fn`` mean what they mean in PyG; a subclass may override them (a ``filter_fn`` of
    its own runs on the consumer's thread).
    """

    data: Any = None
    transform: Callable[[Any], Any] | None = None
    transform_sampler_output: Callable[[Any], Any] | None = None
    filter_per_worker: bool = True
    _rows: RowCounts | None = None
    _features: Features | None = None
    _any_sampler = False  # True if the user named none
    _counted: tuple[Counted, Counted] | None = None  # of the iteration that began last, and of all

    # Supplied by the subclass ##############################################################

    def _sample(self, batch: BatchIndex) -> Any:
        """Sample a batch."""
        raise NotImplementedError

    @property
    def _asks(self) -> bool:
        """True if batches are made elsewhere and asked for by :meth:`_ask`."""
        return False

    def _ask(self, batch: BatchIndex) -> Pending:
        """Ask for what :meth:`_sample` would return, without waiting."""
        raise NotImplementedError

    def _wanted(self, out: Any) -> list[TensorAttr]:
        """The rows that :meth:`_fetch` will read from a feature store that looks ahead."""
        raise NotImplementedError

    def _fetch(self, out: Any, stats: Stats) -> Any:
        """Turn what was sampled into a batch with features; counts what it reads in ``stats``."""
        raise NotImplementedError

    def _seed_tensors(self) -> list[Tensor]:
        """The seeds, to compare them with those of other ranks; one row per seed."""
        raise NotImplementedError

    def _parts_of_seeds(self) -> Tensor | None:
        """The part of each seed ``int32`` ``[num_seeds]``; ``None`` where nothing has parts."""
        raise NotImplementedError

    def _draws(self) -> dict[str, str]:
        """The options in which ranks that share seeds must agree to draw the same batches."""
        raise NotImplementedError

    # Construction ##########################################################################

    def _start(
        self,
        num_seeds: int,
        *,
        seed: int | None,
        worker_type: str | None,
        split_seeds: str | bool | None = None,
        uneven: str = "join",
        split_batches: bool = False,
        comm: Any = None,
        sampling: SamplingOptions | None = None,
        batch_cost: Budget | None = None,
        **kwargs: Any,
    ) -> None:
        """Call ``DataLoader.__init__``. Everything else that the loader has must be set before.

        Args:
            num_seeds: How many seeds there are.
            seed: See :class:`~pyg_scale.loader.NodeLoader`.
            worker_type: See there.
            split_seeds: See there.
            uneven: See there.
            split_batches: See there.
            comm: See there.
            sampling: See there.
            batch_cost: See there; a subclass that takes it makes the plan, ``_plan``.
            kwargs: ``device``, ``device_memory`` and arguments of ``DataLoader``.

        Raises:
            ValueError: If arguments contradict each other.
        """
        kwargs.pop("dataset", None)  # PyTorch Lightning builds loaders again with these
        kwargs.pop("collate_fn", None)
        self.sampling, worker_type, self.seed = checked(
            sampling, self.data, worker_type, seed, kwargs, type(self).__name__
        )
        self._placement: Placement = placement_of(
            kwargs.pop("device", None), kwargs.pop("device_memory", None), self.sampling.to_device
        )
        self._needs_processes = False
        self._worker_type = worker_type
        self._threads: WorkerThreads | None = None
        self._processes: WorkerProcesses | None = None
        self._cores: list[list[int]] | None = None
        self._log_memory = False
        self._pace: Pace | None = None
        self.split_seeds, self.uneven, self.split_batches = split_seeds, uneven, split_batches
        self._sharing, self._unsplit, self._plan = None, None, None
        self.batch_cost = batch_cost
        if batch_cost is not None:
            own = self._overrides("collate_fn") or self._overrides("filter_fn")
            refuse_beside_cost(batch_cost, kwargs, split_seeds, split_batches, own_stages=own)
        self._own_order = kwargs.get("sampler") is None and kwargs.get("batch_sampler") is None
        self._shuffle = bool(kwargs.get("shuffle"))
        dataset: Any = range(num_seeds)
        if self._own_order and self._shuffle:
            del kwargs["shuffle"]
            kwargs["sampler"] = KeyedRandomSampler(dataset, kwargs.get("generator"))
        DataLoader.__init__(self, dataset, collate_fn=self.collate_fn, **kwargs)
        del self.__dict__["collate_fn"]  # the method does; as an attribute it would be a cycle
        self._sharing, self._unsplit = SharedSeeds(
            name=type(self).__name__,
            data=self.data,
            split_seeds=split_seeds,
            uneven=uneven,
            split_batches=split_batches,
            batch_size=self.batch_size,
            own_order=self._own_order,
            tensors=self._seed_tensors,
            parts=self._parts_of_seeds,
            identity=self._identity,
        ).among(comm)

    @property
    def worker_type(self) -> str:
        """``"thread"``, ``"process"`` or ``"ring"``: what ``num_workers`` counts."""
        if self._worker_type is not None:
            return self._worker_type
        processes = (
            self._needs_processes
            or self.worker_init_fn is not None
            or self.multiprocessing_context is not None
        )
        return "process" if processes else "thread"

    @worker_type.setter
    def worker_type(self, value: str | None) -> None:
        names = ("num_workers", "worker_init_fn", "multiprocessing_context")
        check_workers(value, {name: getattr(self, name) for name in names})
        self._worker_type = value

    def _require_processes(self, reason: str) -> None:
        """Say that threads are impossible, and why; an empty reason says nothing.

        Raises:
            ValueError: If there are workers, and they are to be threads.
        """
        if reason and self._worker_type == "thread" and self.num_workers > 0:
            raise ValueError(f"worker_type='thread' is impossible: {reason}")
        self._needs_processes = bool(reason)

    def _keep(
        self, sampler: Any, feature_store: Any, why_processes: str, links: bool = False
    ) -> Any:
        """Keep the graph and its features where batches are made of them.

        Args:
            sampler: A bound sampler.
            feature_store: See :class:`~pyg_scale.loader.NodeLoader`.
            why_processes: The reason why the sampler cannot work in threads; empty if it can.
            links: True if seeds are links.

        Returns:
            The sampler to use.
        """
        self._require_processes(why_processes)
        self.feature_store = feature_store
        elsewhere = ""
        if self.num_workers > 0 and not self._fetches_in_threads:
            elsewhere = "the loader's threads sample only, and another one makes the batch"
        sampler, self._features = self._placement.keep(
            self.data,
            sampler,
            features_of(self.data, feature_store, sampler),
            links=links,
            any_sampler=self._any_sampler,
            collect=self.sampling.collect_features,
            elsewhere=elsewhere,
        )
        self._refuse_processes()
        self._rows = RowCounts(self.data)
        return sampler

    def _publish(self) -> None:
        """Say to the ranks that share the seeds that this one has made its loader.

        Raises:
            CommError: If the store where the ranks met is gone.
        """
        if self.batch_cost is not None and self._plan is None:
            raise NotImplementedError(f"batch_cost= is not for {type(self).__name__}: leave it out")
        if self._sharing is not None:
            planned = {} if self._plan is None else self._plan.identity
            self._sharing.publish(self._draws() | planned)

    def _refuse_processes(self) -> None:
        """Refuse worker processes where the device, the graph or the features need threads.

        Raises:
            ValueError: If the loader's workers are processes, and must not be.
        """
        if self.num_workers == 0 or self.worker_type == "thread":
            return
        if self._placement.device is not None:
            raise ValueError(
                f"device= needs threads as workers, which share the device (got "
                f"worker_type={self.worker_type!r}): pass worker_type='thread', or leave device= "
                "out and copy batches yourself"
            )
        reason = needs_threads(self.data)
        if reason:
            raise ValueError(f"{reason}: pass worker_type='thread' instead of processes")
        if self._features is not None and self._features.look_ahead:
            raise ValueError(
                f"{self._features.store!r} looks ahead, but worker processes would each have a "
                "copy of it that does not: pass worker_type='thread', or a store with "
                "look_ahead=0, of which every process then has its own cache"
            )

    def check_worker_number_rationality(self) -> None:
        """Torch's warning about too many worker processes; threads need none."""
        if self.worker_type == "process":
            super().check_worker_number_rationality()

    # PyG's methods #########################################################################

    def __call__(self, index: Any) -> Any:
        """The batch of given seeds.

        Args:
            index: Positions in the loader's input, a list or an integer tensor. Its draws are a
                function of the loader's seed and of these positions: with ``seed=`` the same
                call gives the same batch, without it a seed is drawn as for an epoch.
        """
        self._check_rows()
        out = self.collate_fn(index)
        return self._placement.bring(out if self.filter_per_worker else self.filter_fn(out), False)

    def _check_rows(self) -> None:
        """Refuse a graph whose numbers of rows were changed after the loader was made."""
        if self._rows is not None:
            self._rows.check(self.data)

    def collate_fn(self, index: Any) -> Any:
        """Sample a batch and, if ``filter_per_worker``, fetch its features."""
        out = self._sample_stage(self._keyed(index), Stats())
        return self.filter_fn(out) if self.filter_per_worker else out

    def filter_fn(self, out: Any) -> Any:
        """Fetch the features of what was sampled, and transform."""
        return self._filter(out, Stats())

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # Stages ################################################################################

    def _keyed(self, index: Any) -> BatchIndex:
        if isinstance(index, BatchIndex):
            return index
        index = to_index(index, len(self.dataset), "index")
        seed = draw_seed(self.generator) if self.seed is None else self.seed
        return BatchIndex(index, call_key(seed, index))

    def _sample_stage(self, batch: BatchIndex, stats: Stats, pending: Pending | None = None) -> Any:
        with stats.stage("sample"):
            if self._plan is not None and batch.position >= 0:
                pieces = self._plan.sampled(batch, self._sample)
                for each in pieces:
                    self._sampled(each.out, batch.part(each.begin, each.end), stats)
                return pieces
            out = self._sample(batch) if pending is None else pending.wait()
            return self._sampled(out, batch, stats)

    def _sampled(self, out: Any, batch: BatchIndex, stats: Stats) -> Any:
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, _OF_PYG):
                each._batch_key = batch.piece_key
                count_sampled(each, stats)
        return out

    def _fetch_stage(self, out: Any, stats: Stats) -> Any:
        schedule, step = getattr(out, "_announced", (None, -1))
        with stats.stage("fetch"), nullcontext() if schedule is None else schedule.serving(step):
            if self._plan is None:
                return self._fetch(out, stats)
            return each_piece(out, partial(self._fetch, stats=stats))

    def _transform_stage(self, data: Any, key: int | None, stats: Stats) -> Any:
        if self.transform is None:
            return data
        with stats.stage("transform"):
            stats.count("transform", rows=1)
            with forked(key, keys.TRANSFORM):
                return self.transform(data)

    def _filter(self, out: Any, stats: Stats) -> Any:
        """All that comes after sampling."""
        first = out[0] if isinstance(out, tuple) and out else out
        key = getattr(first, "_batch_key", None)
        if self.transform_sampler_output is not None:
            with stats.stage("transform"), forked(key, keys.TRANSFORM, 1):
                out = self.transform_sampler_output(out)
        return self._transform_stage(self._fetch_stage(out, stats), key, stats)

    @property
    def _fetches_in_threads(self) -> bool:
        return (
            self.filter_per_worker
            and self.transform_sampler_output is None
            and not self._overrides("filter_fn")
        )

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(SubgraphLoader, name)

    def _work(self, batch: BatchIndex, stats: Stats, pin: bool) -> tuple[str, Any]:
        """The work of a worker thread for a batch; without workers, that of the consumer."""
        if self._overrides("collate_fn"):
            with stats.stage("sample"):
                out = self.collate_fn(batch)
            return (_DONE if self.filter_per_worker else _SAMPLED), out
        if not self._fetches_in_threads:
            return _SAMPLED, self._sample_stage(batch, stats)
        with self._placement.beside_training():
            return self._made(self._sample_stage(batch, stats), stats, pin)

    def _after_sampling(self, out: Any, stats: Stats, pin: bool) -> tuple[str, Any]:
        """The rest of the work of a worker thread for a batch that was sampled already."""
        if not self._fetches_in_threads:
            return _SAMPLED, out
        with self._placement.beside_training():
            return self._made(out, stats, pin)

    def _made(self, out: Any, stats: Stats, pin: bool) -> tuple[str, Any]:
        done = pin and self.transform is None
        out = self._placement.made(self._fetch_stage(out, stats), stats, done)
        return (_DONE if done else _FETCHED), out

    def _process_work(self, batch: BatchIndex) -> tuple[int, tuple[str, Any], Stats]:
        """The work of a worker process for a batch: all of it, or sampling only."""
        stats = Stats()
        if self._overrides("collate_fn") or self._overrides("filter_fn"):
            with stats.stage("sample"):
                out = self.collate_fn(batch)
        else:
            out = self._sample_stage(batch, stats)
            if self.filter_per_worker:
                out = each_piece(out, partial(self._filter, stats=stats))
            if isinstance(out, Pieces):
                out = out.plain()
        return batch.step, (_DONE if self.filter_per_worker else _SAMPLED, out), stats

    def _pieces(
        self, batch: BatchIndex, made: tuple[str, Any], stats: Stats
    ) -> list[tuple[BatchIndex, tuple[str, Any], Stats]]:
        """The pieces of what was made of a planned batch; the first has all that it counted."""
        stage, out = made
        pieces = Pieces.apart(batch, out.take() if isinstance(out, Landed) else out)
        return [(i, (stage, each), Stats() if i.piece else stats) for i, each in pieces]

    def _finish(self, batch: BatchIndex, made: tuple[str, Any], stats: Stats, pin: bool) -> Any:
        """The work of the consumer for a batch."""
        return self._placement.bring(self._completed(batch, made, stats, pin), pin)

    def _completed(self, batch: BatchIndex, made: tuple[str, Any], stats: Stats, pin: bool) -> Any:
        stage, out = made
        if isinstance(out, Landed):
            out = out.take()
        if stage == _DONE:
            return out
        if stage == _FETCHED:
            out = self._transform_stage(out, batch.piece_key, stats)
        elif self._overrides("filter_fn"):
            with stats.stage("fetch"):
                out = self.filter_fn(out)
        else:
            out = self._filter(out, stats)
        return pin_batch(out, stats) if pin else out

    # Iteration #############################################################################

    def __len__(self) -> int:
        sharing = self._shared()
        if sharing is None:
            return super().__len__() if self._plan is None else self._plan.count
        return sharing.num_batches(self._cut().count)

    def __iter__(self) -> EpochIterator:  # type: ignore[override]
        return self._get_iterator()

    def _get_iterator(self) -> EpochIterator:  # type: ignore[override]
        if self._log_memory:
            log_memory(self.num_workers)
        self._check_rows()
        self._refuse_processes()
        pin, features = self._placement.pins(self), self._features_to_announce()
        progress, batches = self._begin_epoch()
        self._counted = Counted(), Counted() if self._counted is None else self._counted[1]
        begin = partial(self._begin_source, features=features, progress=progress, pin=pin)
        return EpochIterator(
            self,
            begin,
            None if self._plan is None else self._pieces,
            partial(self._finish, pin=pin),
            batches,
            progress,
            self._counted,
        )

    def _features_to_announce(self) -> Features | None:
        """The features whose rows are announced to their store before they are read, if any are."""
        features = self._features
        if features is None or not features.look_ahead:
            return None
        if self._overrides("collate_fn") or self._overrides("filter_fn"):
            reason = "collate_fn or filter_fn is its own"
        elif self.transform_sampler_output is not None:
            reason = "transform_sampler_output= may change what is read"
        else:
            return features
        warn_not_told(type(self).__name__, reason)
        return None

    def _begin_source(
        self,
        batches: Iterator[BatchIndex],
        features: Features | None,
        progress: EpochProgress,
        pin: bool,
    ) -> BatchSource:
        """Begin to make batches, where and how this loader does."""
        if self.num_workers > 0 and self.worker_type == "process":
            return ProcessPipeline(batches, self._get_processes(pin, progress))
        if self.num_workers > 0 and self.worker_type == "ring":
            return RingPipeline(
                batches,
                self._process_work,
                num_workers=self.num_workers,
                ring_bytes=self.sampling.ring_bytes,
                concurrency=self.sampling.worker_concurrency,
                prefetch=self.prefetch_factor or 1,
                timeout=self.timeout,
                pin=pin and self.filter_per_worker,
                context=self.multiprocessing_context,
            )
        threads = self._get_threads() if self.num_workers > 0 else None
        finish = partial(self._after_sampling, pin=pin)
        if features is not None:
            return LookAhead(
                features.store.schedule(),
                batches,
                self._source,
                sample=self._sample_stage,
                wanted=partial(wanted_of, self._wanted),
                finish=finish,
                threads=threads,
                in_order=self.in_order,
                under_way=batches_under_way(self.data, features, self.num_workers),
            )
        if self._asks and not self._overrides("collate_fn"):
            return Ahead(
                batches,
                self._source,
                ask=self._ask,
                sample=self._sample_stage,
                finish=finish,
                threads=threads,
                in_order=self.in_order,
                size=most_under_way(self.sampling, self.data),
                buffer_bytes=self.sampling.buffer_bytes,
                most_used=self.num_workers * (self.prefetch_factor or 1),
            )
        work = partial(self._work, pin=pin)
        return self._source(batches, work, threads, self.in_order, either=True)

    def _source(
        self,
        items: Iterator[Any],
        work: Callable[[Any, Stats], Any],
        threads: WorkerThreads | Borrowed | None,
        in_order: bool,
        limit: int | None = None,
        either: bool = False,
    ) -> Inline | Pipeline:
        """The results of ``work`` for ``items``, made by threads or, without any, by this one.

        At most ``limit`` of them are ready ahead. Small ones are made by ``either``, if that is so.
        """
        if threads is None:
            return Inline(items, work)
        limit = self.num_workers * (self.prefetch_factor or 1) if limit is None else limit
        return Pipeline(
            items,
            work,
            threads,
            owned=not self.persistent_workers,
            limit=limit,
            timeout=self.timeout,
            in_order=in_order,
            course=self._course(limit) if either else None,
        )

    def _course(self, limit: int) -> Course | None:
        told = self._worker_type == "thread" or self._cores is not None
        if told or self.timeout > 0 or self._placement.device is not None:
            return None  # these mean threads, however small the batches are
        self._pace = self._pace or Pace()
        return self._pace.course(limit)

    def _get_threads(self) -> WorkerThreads:
        if not self.persistent_workers:
            return WorkerThreads(self.num_workers, self._cores)
        if self._threads is None or self._threads.num_threads != self.num_workers:
            self._threads = WorkerThreads(self.num_workers, self._cores)
        return self._threads

    def _get_processes(self, pin: bool, progress: EpochProgress) -> WorkerProcesses:
        """The worker processes: those that are there, or new ones."""
        if self._processes is not None:
            if self._processes.usable:
                return self._processes
            self._processes.stop()
        key = keys.fold(0, progress.seed, progress.epoch)
        made = WorkerProcesses(self, self._process_work, pin and self.filter_per_worker, key)
        self._processes = made if self.persistent_workers else None
        return made

    def stats(self) -> dict[str, Any]:
        """Seconds, bytes and rows of every stage (:data:`~pyg_scale.loader.stats.STAGES`).

        Counts the batches that were handed out.

        Returns:
            ``{"epoch": ..., "total": ...}``, of the iteration that began last and of all of them.
            Each has ``"batches"``, ``"in_consumer"`` (those that the consumer made in spite of
            workers), per stage ``{"seconds": ..., "bytes": ..., "rows": ...}``, and for ``"fetch"``
            the numbers of :class:`~pyg_scale.store.reading.Reads`. With ``device=`` also
            ``"device"``: what is on it.
        """
        epoch, total = self._counted or (Counted(), Counted())
        counted = {"epoch": epoch.sum.as_dict(), "total": total.sum.as_dict()}
        return counted | self._placement.stats(self._features)

    def __getstate__(self) -> dict[str, Any]:
        # Threads and processes stay where they are.
        return self.__dict__ | {"_threads": None, "_processes": None, "_iterator": None}
