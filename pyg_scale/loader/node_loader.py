"""Mini-batches around seed nodes, with any sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import TensorAttr
from torch_geometric.loader.utils import infer_filter_per_worker
from torch_geometric.sampler import NodeSamplerInput

from pyg_scale.graph.base import snapshot_of
from pyg_scale.graph.topology import NodeType
from pyg_scale.loader import resolve
from pyg_scale.loader.base import SubgraphLoader
from pyg_scale.loader.batch.build import build
from pyg_scale.loader.batch.padding import Padding, padding_of
from pyg_scale.loader.seeds.epoch import BatchIndex, num_batches
from pyg_scale.loader.seeds.nodes import seed_nodes_of
from pyg_scale.loader.seeds.plan import plan_of
from pyg_scale.loader.seeds.split import parts_of_nodes
from pyg_scale.loader.stats import Stats
from pyg_scale.loader.workers.affinity import WorkerControls
from pyg_scale.loader.workers.look_ahead import requests_of
from pyg_scale.loader.workers.remote import Pending, RemoteSampler
from pyg_scale.sampler.base import NeighborSampler, graph_of


class SampledLoader(WorkerControls, SubgraphLoader):
    """A loader of what a sampler draws around its seeds, which are nodes or links.

    A subclass sets ``input_data``, the seeds as a sampler takes them, and has the sampler as an
    attribute of its own.
    """

    input_data: Any
    custom_cls: Any = None
    _padding: Padding | None = None

    @property
    def _bound_sampler(self) -> Any:
        raise NotImplementedError

    def _set_options(
        self,
        data: Any,
        transform: Callable[..., Any] | None,
        transform_sampler_output: Callable[..., Any] | None,
        filter_per_worker: bool | None,
        custom_cls: Any,
        input_id: Tensor | None,
    ) -> None:
        self.data = data
        self.transform = transform
        self.transform_sampler_output = transform_sampler_output
        self.filter_per_worker = (
            infer_filter_per_worker(data) if filter_per_worker is None else filter_per_worker
        )
        self.custom_cls = custom_cls
        self.input_id = input_id

    def _complete(
        self, seeds: Sequence[tuple[NodeType, Tensor]], pad_to: Any, fetches: bool
    ) -> None:
        """Plan the batches and their sizes, and say to other ranks that this one is ready.

        Args:
            seeds: Types and ids ``[num_seeds]`` of the seeds, or of both ends of links.
            pad_to: See :class:`NodeLoader`.
            fetches: True if batches are made as this class makes them.
        """
        if self.batch_cost is not None:
            self._plan = plan_of(
                self.batch_cost,
                self.data,
                self._features,
                self._bound_sampler,
                seeds,
                shuffle=self._shuffle,
                collect=self.sampling.collect_features,
                sample=self._sample,
            )
        if pad_to is not None:
            if not fetches:
                raise NotImplementedError(f"pad_to= is not for {type(self).__name__}: leave it out")
            known = self._cut() if self._own_order else None
            self._padding = padding_of(pad_to, self.data, known, self._sample)
        self._publish()

    def _graph_snapshot(self) -> int:
        return snapshot_of(self.data)

    @property
    def _asks(self) -> bool:
        return isinstance(self._bound_sampler, RemoteSampler)

    def _wanted(self, out: Any) -> list[TensorAttr]:
        assert self._features is not None
        return requests_of(out, self._bound_sampler.edge_permutation, self._features)

    def _batch(self, out: Any, stats: Stats, lazy_x: bool = False) -> Any:
        """The batch of what was sampled, with features; nothing is said of its seeds yet."""
        return build(
            self.data,
            out,
            permutation=self._bound_sampler.edge_permutation,
            features=self._features,
            custom_cls=self.custom_cls,
            stats=stats,
            collect=self.sampling.collect_features,
            lazy_x=lazy_x,
        )


class NodeLoader(SampledLoader, torch_geometric.loader.NodeLoader):
    """Loads the sampled neighbourhoods of seed nodes.

    As :class:`torch_geometric.loader.NodeLoader`, and a subclass of it: the same arguments in the
    same order, the same attributes on every batch.

    ``num_workers=k`` means k threads of this process, ``worker_type="process"`` as many processes;
    batches are the same for any number and type. Small batches are made by the thread that asks for
    them where that is faster, unless ``worker_type="thread"`` is given.
    ``torch.utils.data.get_worker_info()`` is ``None`` in threads. ``transform`` and
    ``transform_sampler_output`` run where iteration does, in order (in worker processes: there),
    with torch's, NumPy's and Python's generators seeded per batch. ``state_dict()`` and
    ``load_state_dict()`` resume in the middle of an epoch, ``stats()`` says where the time goes.

    Args:
        data: ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``.
        node_sampler: A sampler with ``sample_from_nodes``. One that takes ``key=`` draws the same
            whoever runs it; any other gets torch's generator seeded, and processes as workers.
        input_nodes: The seeds: ids or a mask ``[num_seeds]``, ``None`` for all nodes; in a
            heterogeneous graph a node type or ``(node_type, ids or mask)``. Ids in a mapped file
            stay there: a batch reads its own.
        input_time: Times of the seeds ``[num_seeds]``, instead of those of the nodes.
        transform: Called with every batch.
        transform_sampler_output: Called with every sampled subgraph before features are fetched.
        filter_per_worker: Whether workers fetch features; ``None``: unless the data is on a GPU.
        custom_cls: The class of batches, if ``data`` is a pair of stores.
        input_id: What to call the seeds in ``input_id`` of batches ``[num_seeds]``.
        seed: Determines every batch of every epoch. Without it, a seed is drawn from torch's
            default generator (or ``generator=``) when an epoch starts.
        worker_type: ``"thread"``, ``"process"``, ``"ring"`` (processes whose batches come through
            bounded shared memory, without pickle), or ``None``: threads unless
            ``worker_init_fn`` or ``multiprocessing_context`` is given or the sampler takes no key.
        feature_store: A name or a PyG ``FeatureStore``: features that it has come from it. By name,
            such as ``"memory"``, one is made and filled from ``data``. With worker threads it is
            read by several threads at once.
        split_seeds: How ranks share the seeds. ``"global"``: the list of an epoch's batches is that
            of a single process, and ranks take turns. ``"part"``: the same, but batches hold seeds
            of one part of a graph directory as far as they fill, and go to ranks that have
            the part as far as all get equally many. ``False``: every rank has all seeds that it is
            given. ``None``: ``"global"`` if ``data`` was opened by several ranks together (or
            ``comm`` is given), unless ``sampler=`` or ``batch_sampler=`` say the order; else
            ``False``.
        uneven: What happens where the last batches do not go round. ``"join"``: the last
            ranks have one batch less (torch's ``Join`` waits for the others). ``"drop"``: those
            batches are left out. ``"repeat"``: ranks that have none get a batch of another rank
            again; every batch says so in its attribute ``repeated``.
        split_batches: Whether ``batch_size`` is that of a step of all ranks together, whatever
            their number: each has its piece of the seeds of every step, which is empty where there
            are fewer seeds than ranks. The steps of an epoch, and so ``state_dict()``, do not
            depend on the ranks, and all of them make equally many. With ``"part"`` the seeds of a
            step go to ranks that have their part as far as all get equally many. Implies
            ``split_seeds="global"`` if nothing else is said.
        comm: A communicator: its ranks share the seeds. By default that of ``data``, else the
            ranks of ``torch.distributed`` or torchrun.
        sampling: :class:`~pyg_scale.loader.SamplingOptions`: sampler processes or servers, and
            where batches go.
        batch_cost: A :class:`~pyg_scale.loader.Budget` instead of ``batch_size``: batches are
            planned to cost nearly the same, and none costs more; see ``docs/batch-cost.md``.
        pad_to: ``"buckets"`` or :class:`~pyg_scale.loader.Buckets`: batches are padded to few
            sizes, see ``docs/static-shapes.md``.
        device: Where batches arrive: ``"cuda"``, ``"cuda:1"`` or a ``torch.device``. Their copies
            overlap with training, by a stream and pinned memory of their own (whatever
            ``pin_memory`` is); workers are threads. Features are kept on the device as far as
            ``device_memory`` goes, see :class:`~pyg_scale.store.DeviceFeatures`, which several
            loaders share as ``feature_store=``. ``"cpu"`` does the same without a device.
        lazy_x: Whether ``x`` of a batch stays where it is, in memory, in a mapped file or in a
            cache, until somebody looks at it. Layers of :mod:`pyg_scale.nn` that get ``(x, x[:n])``
            then add up rows straight from there; see ``docs/convs.md``.
        device_memory: Bytes of the device for that, such as ``"4GB"``; ``None``: half of what is
            free, together with all other loaders and stores that were given no size.
        kwargs: Arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If arguments contradict each other or do not fit the graph.
        IndexError: If a seed is not a node; of mapped ids, when a batch has it.
        DeviceError: If ``device`` is not there; says what is missing.
    """

    def __init__(
        self,
        data: Any,
        node_sampler: Any,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        transform: Callable[..., Any] | None = None,
        transform_sampler_output: Callable[..., Any] | None = None,
        filter_per_worker: bool | None = None,
        custom_cls: Any = None,
        input_id: Tensor | None = None,
        *,
        seed: int | None = None,
        worker_type: str | None = None,
        feature_store: Any = None,
        split_seeds: str | bool | None = None,
        uneven: str = "join",
        split_batches: bool = False,
        comm: Any = None,
        **kwargs: Any,
    ):
        self._setup(
            data,
            input_nodes,
            input_time,
            input_id,
            make_sampler=lambda: node_sampler,
            feature_store=feature_store,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            custom_cls=custom_cls,
            seed=seed,
            worker_type=worker_type,
            split_seeds=split_seeds,
            uneven=uneven,
            split_batches=split_batches,
            comm=comm,
            **kwargs,
        )

    def _setup(
        self,
        data: Any,
        input_nodes: Any,
        input_time: Tensor | None,
        input_id: Tensor | None,
        *,
        make_sampler: Callable[[], Any],
        feature_store: Any,
        transform: Callable[..., Any] | None,
        transform_sampler_output: Callable[..., Any] | None,
        filter_per_worker: bool | None,
        custom_cls: Any,
        pad_to: Any = None,
        lazy_x: bool = False,
        **kwargs: Any,
    ) -> None:
        """Check everything that is cheap to check, then make the sampler, which may not be."""
        if not isinstance(lazy_x, bool):
            raise TypeError(f"lazy_x must be True or False (got {lazy_x!r})")
        self.input_data = self._seeds(data, input_nodes, input_time, input_id)
        node_type, time = self.input_data.input_type, self.input_data.time
        self.input_nodes = input_nodes
        self.input_time = input_time
        self._set_options(
            data, transform, transform_sampler_output, filter_per_worker, custom_cls, input_id
        )
        self._start(self.input_data.node.numel(), **kwargs)
        self._lazy_x = lazy_x
        if lazy_x:
            self._check_lazy(kwargs)
        sampler = make_sampler()
        _check_bound(sampler)
        self._drawing = resolve.drawing_of(data, sampler, sampler.sample_from_nodes)
        if isinstance(sampler, RemoteSampler):
            sampler.check_seeds(node_type, time is not None)
        check_has_time(sampler, node_type, time)
        if self._drawing.kept and self.seed is None:
            raise ValueError(
                "redraw=False needs seed=: the neighbours of a node follow from it, in all epochs"
            )
        if self._drawing.follows_steps and (
            self.seed is None or not self._own_order or self.batch_cost is not None
        ):
            raise ValueError(
                "batch_dependency= needs seed=, and batches in the loader's own order, without "
                "sampler=, batch_sampler= and batch_cost=: random numbers go on from batch to "
                "batch, over all epochs"
            )
        self.node_sampler = self._keep(sampler, feature_store, self._drawing.why_processes)
        if lazy_x and self._features is not None:
            self._features.check_lazy()
        fetches = type(self)._fetch is NodeLoader._fetch
        self._complete([(node_type, self.input_data.node)], pad_to, fetches)

    def _seeds(
        self, data: Any, input_nodes: Any, input_time: Tensor | None, input_id: Tensor | None
    ) -> NodeSamplerInput:
        return seed_nodes_of(data, input_nodes, input_time, input_id)

    @property
    def _bound_sampler(self) -> Any:
        return self.node_sampler

    def _check_lazy(self, given: dict[str, Any]) -> None:
        """Refuse loaders and options under which all rows would be gathered anyway."""
        if type(self)._fetch is not NodeLoader._fetch:
            raise NotImplementedError(f"lazy_x= is not for {type(self).__name__}: leave it out")
        if self.num_workers > 0 and self.worker_type != "thread":
            raise ValueError(
                f"lazy_x=True needs worker threads: {self.worker_type!r} workers send copies of "
                "rows; pass worker_type='thread', or leave lazy_x out"
            )
        moved = [name for name in ("device", "pin_memory") if given.get(name)]
        if moved or self.sampling.to_device is not None or self.sampling.pin_memory:
            raise ValueError(
                "lazy_x=True leaves x where it is, on the CPU: leave lazy_x out where batches are "
                "copied to a device or to pinned memory"
            )

    def _seed_tensors(self) -> list[Tensor]:
        time = self.input_data.time
        return [self.input_data.node, *([] if time is None else [time])]

    def _parts_of_seeds(self) -> Tensor | None:
        return parts_of_nodes(self.data, self.input_data.input_type, self.input_data.node)

    def _draws(self) -> dict[str, str]:
        return resolve.drawn_by(self.node_sampler)

    def _sample(self, batch: BatchIndex) -> Any:
        inputs, sampler = self.input_data[batch.index], self.node_sampler
        if self._drawing.follows_steps and self.seed is not None:
            sampler = self._sampler_at(batch, self.seed)
        if self._drawing.takes_key:
            return sampler.sample_from_nodes(inputs, key=self._key(batch))
        return resolve.call(sampler.sample_from_nodes, inputs, self._key(batch))

    def _sampler_at(self, batch: BatchIndex, seed: int) -> Any:
        """The sampler that knows where a batch stands."""
        if batch.position < 0:  # loader(index) is none of the batches
            return self.node_sampler.at_step(batch.key, 0)
        count = num_batches(len(self.dataset), self.batch_size, self.drop_last)
        return self.node_sampler.at_step(seed, batch.epoch * count + batch.position)

    def _key(self, batch: BatchIndex) -> int:
        """The key to sample a batch with."""
        if batch.first or self._drawing.kept:
            return resolve.key_of(batch, self.node_sampler, self.seed)
        return batch.key

    def _ask(self, batch: BatchIndex) -> Pending:
        sampler: Any = self.node_sampler
        return sampler.ask_from_nodes(self.input_data[batch.index], self._key(batch))

    def _fetch(self, out: Any, stats: Stats) -> Any:
        batch = self._batch(out, stats, self._lazy_x)
        node_type = self.input_data.input_type
        store = batch if node_type is None else batch[node_type]
        store.input_id, store.seed_time = out.metadata[0], out.metadata[1]
        store.batch_size = out.metadata[0].numel()
        if self._padding is not None:
            self._padding.pad(batch, self.data)
        return batch


def _check_bound(sampler: Any) -> None:
    if not callable(getattr(sampler, "sample_from_nodes", None)):
        raise TypeError(
            f"node_sampler must be a sampler with sample_from_nodes() (got {sampler!r}); a name is "
            f"for NeighborLoader(neighbor_sampler=...)"
        )
    if isinstance(sampler, NeighborSampler) and sampler.topology is None:
        raise ValueError(
            f"node_sampler is a {type(sampler).__name__} without a graph: pass data= to it, or use "
            f"NeighborLoader(neighbor_sampler=...), which does"
        )


def check_has_time(sampler: Any, node_type: NodeType, time: Tensor | None) -> None:
    """Seeds of a temporal graph have times, and others have none."""
    graph = graph_of(sampler)
    if graph is None:
        return
    if time is None and graph.is_temporal and not graph.has_times_of(node_type):
        raise ValueError(
            "input_time is missing: the seeds have no time of their own, as time_attr= is one of "
            + ("edges" if graph.has_edge_time else "other nodes")
        )
    if time is not None and not graph.is_temporal:
        raise ValueError("input_time is given, but the sampler has no time_attr=")
    if isinstance(time, Tensor):
        graph.check_time(time, "input_time")
