"""Mini-batches around seed links, with any sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch_geometric.loader
from torch import Tensor

from pyg_scale.loader import resolve
from pyg_scale.loader.node_loader import SampledLoader
from pyg_scale.loader.seeds.epoch import BatchIndex
from pyg_scale.loader.seeds.links import check_labels, seed_links_of
from pyg_scale.loader.seeds.nodes import check_time
from pyg_scale.loader.seeds.split import parts_of_nodes
from pyg_scale.loader.stats import Stats
from pyg_scale.loader.workers.remote import Pending
from pyg_scale.sampler.base import NeighborSampler, graph_of
from pyg_scale.sampler.capabilities import ExcludesPositives
from pyg_scale.sampler.negative import NegativeSampling


class LinkLoader(SampledLoader, torch_geometric.loader.LinkLoader):
    """Loads the sampled neighbourhoods of the endpoints of seed links, and of negative ones.

    As :class:`torch_geometric.loader.LinkLoader`, and a subclass of it: the same arguments in the
    same order, the same attributes on every batch. What is said of workers, of resuming and of
    ``stats()`` in :class:`~pyg_scale.loader.NodeLoader` holds here as well; negatives are
    drawn as :mod:`pyg_scale.sampler.negative` says.

    Args:
        data: ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``.
        link_sampler: A sampler with ``sample_from_edges``.
        edge_label_index: The seed links ``[2, num_links]``, ``None`` for all edges; in a
            heterogeneous graph an edge type or ``(edge_type, links or None)``. Those of a mapped
            file stay there: a batch reads its own.
        edge_label: Labels of the seed links ``[num_links, ...]``. With binary negatives, labels
            that begin at 0 are shifted by 1, since 0 means "negative" then.
        edge_label_time: Times of the seed links ``[num_links]``.
        neg_sampling: PyG's or our :class:`~pyg_scale.sampler.NegativeSampling`, or ``"binary"``
            or ``"triplet"``, or ``None``. Ours can leave out positives.
        neg_sampling_ratio: Deprecated; ``r`` means ``neg_sampling=("binary", r)``.
        transform: Called with every batch.
        transform_sampler_output: Called with every sampled subgraph before features are fetched.
        filter_per_worker: Whether workers fetch features; ``None``: unless the data is on a GPU.
        custom_cls: The class of batches, if ``data`` is a pair of stores.
        input_id: What to call the seed links in ``input_id`` of batches ``[num_links]``.
        seed: See :class:`~pyg_scale.loader.NodeLoader`.
        worker_type: See there.
        feature_store: See there.
        split_seeds: See there.
        uneven: See there.
        split_batches: See there.
        comm: See there.
        sampling: See there.
        kwargs: Arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If arguments contradict each other or do not fit the graph.
        IndexError: If an endpoint is not a node; of mapped links, when a batch has it.
        NotImplementedError: If the sampler cannot leave out positives, and should.
    """

    def __init__(
        self,
        data: Any,
        link_sampler: Any,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        neg_sampling: Any = None,
        neg_sampling_ratio: int | float | None = None,
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
            edge_label_index,
            edge_label,
            edge_label_time,
            input_id,
            make_sampler=lambda: link_sampler,
            neg_sampling=neg_sampling_of(neg_sampling, neg_sampling_ratio),
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
        edge_label_index: Any,
        edge_label: Tensor | None,
        edge_label_time: Tensor | None,
        input_id: Tensor | None,
        *,
        make_sampler: Callable[[], Any],
        neg_sampling: NegativeSampling | None,
        feature_store: Any,
        transform: Callable[..., Any] | None,
        transform_sampler_output: Callable[..., Any] | None,
        filter_per_worker: bool | None,
        custom_cls: Any,
        pad_to: Any = None,
        **kwargs: Any,
    ) -> None:
        """Check everything that is cheap to check, then make the sampler, which may not be."""
        links = seed_links_of(data, edge_label_index)
        num_links = links.edge_index.size(1)
        self.edge_label_index = edge_label_index
        self.edge_label = edge_label
        self.edge_label_time = edge_label_time
        self.neg_sampling = neg_sampling
        self._set_options(
            data, transform, transform_sampler_output, filter_per_worker, custom_cls, input_id
        )
        self.input_data = links.inputs(
            check_labels(input_id, num_links, "input_id"),
            check_labels(edge_label, num_links),
            check_time(edge_label_time, links.edge_index[0], "edge_label_time"),
            shift=_shifts(edge_label, neg_sampling),
        )
        self._start(num_links, **kwargs)
        sampler = make_sampler()
        check_link_sampler(sampler, neg_sampling)
        graph, time = graph_of(sampler), self.input_data.time
        if graph is not None and time is not None:
            graph.check_time(time, "edge_label_time")
        why_processes = resolve.drawing_of(data, sampler, sampler.sample_from_edges).why_processes
        # The seed links are positives too, also where they are no edges (held-out links).
        self._negatives = neg_sampling
        if neg_sampling is not None and neg_sampling.exclude_positives is not False:
            self._negatives = (
                neg_sampling if links.are_edges else neg_sampling.with_links(links.edge_index)
            )
        self.link_sampler = self._keep(sampler, feature_store, why_processes, links=True)
        edge_type = self.input_data.input_type
        ends = (None, None) if edge_type is None else edge_type[::2]
        seeds = [*zip(ends, (self.input_data.row, self.input_data.col), strict=True)]
        self._complete(seeds, pad_to, type(self)._fetch is LinkLoader._fetch)

    @property
    def _bound_sampler(self) -> Any:
        return self.link_sampler

    def _seed_tensors(self) -> list[Tensor]:
        time = self.input_data.time
        ends = [self.input_data.row, self.input_data.col]
        return [*ends, *([] if time is None else [time])]

    def _parts_of_seeds(self) -> Tensor | None:
        """Those of the destinations, whose parts hold the links if they are edges."""
        edge_type = self.input_data.input_type
        node_type = None if edge_type is None else edge_type[2]
        return parts_of_nodes(self.data, node_type, self.input_data.col)

    def _draws(self) -> dict[str, str]:
        return resolve.drawn_by(self.link_sampler, self.neg_sampling)

    def _key_of(self, batch: BatchIndex) -> int:
        return resolve.key_of(batch, self.link_sampler, by_place=self.neg_sampling is not None)

    def _sample(self, batch: BatchIndex) -> Any:
        return resolve.call(
            self.link_sampler.sample_from_edges,
            self.input_data[batch.index],
            self._key_of(batch),
            neg_sampling=self._negatives,
        )

    def _ask(self, batch: BatchIndex) -> Pending:
        sampler: Any = self.link_sampler
        inputs = self.input_data[batch.index]
        return sampler.ask_from_edges(inputs, self._negatives, self._key_of(batch))

    def _fetch(self, out: Any, stats: Stats) -> Any:
        batch = self._batch(out, stats)
        if self._padding is not None:
            self._padding.pad(batch, self.data)
        edge_type = self.input_data.input_type
        links = batch if edge_type is None else batch[edge_type]
        links.input_id = out.metadata[0]
        if self.neg_sampling is None or self.neg_sampling.is_binary():
            links.edge_label_index, links.edge_label, links.edge_label_time = out.metadata[1:4]
            return batch
        _, src_index, dst_pos_index, dst_neg_index, time = out.metadata[:5]
        source = batch if edge_type is None else batch[edge_type[0]]
        destination = batch if edge_type is None else batch[edge_type[2]]
        source.src_index, source.seed_time = src_index, time
        destination.dst_pos_index, destination.dst_neg_index = dst_pos_index, dst_neg_index
        destination.seed_time = time
        # The graph may have these as attributes of its own, which mean nothing here.
        links.edge_label_index = links.edge_label_time = None
        return batch


def neg_sampling_of(neg_sampling: Any, ratio: int | float | None) -> NegativeSampling | None:
    """The negative sampling that ``neg_sampling`` and ``neg_sampling_ratio`` stand for."""
    if ratio is None or ratio == 0:
        return NegativeSampling.cast(neg_sampling)
    if neg_sampling is not None:
        raise ValueError("pass neg_sampling= or neg_sampling_ratio=, not both")
    return NegativeSampling("binary", ratio)


def _shifts(label: Any, neg_sampling: NegativeSampling | None) -> bool:
    """Return True if labels must leave 0 to negatives."""
    if label is None or neg_sampling is None:
        return False
    if neg_sampling.is_triplet():
        raise ValueError(
            "edge_label must be None with negatives of mode 'triplet': src_index, dst_pos_index "
            "and dst_neg_index of a batch say what is positive"
        )
    return True


def check_link_sampler(sampler: Any, neg_sampling: NegativeSampling | None) -> None:
    """Refuse a sampler that cannot sample around links, or not with these negatives.

    Raises:
        TypeError: If it has no ``sample_from_edges``.
        ValueError: If it has no graph.
        NotImplementedError: If it cannot leave out positives, and should.
    """
    if not callable(getattr(sampler, "sample_from_edges", None)):
        raise TypeError(
            f"link_sampler must be a sampler with sample_from_edges() (got {sampler!r}); a name "
            f"is for LinkNeighborLoader(neighbor_sampler=...)"
        )
    if isinstance(sampler, NeighborSampler):
        if not sampler.is_bound:
            raise ValueError(
                f"link_sampler is a {type(sampler).__name__} without a graph: pass data= to it, or "
                f"use LinkNeighborLoader(neighbor_sampler=...), which does"
            )
    elif isinstance(sampler, ExcludesPositives) and sampler.knows_exclude_positives:
        return
    elif neg_sampling is not None and neg_sampling.exclude_positives is not False:
        raise NotImplementedError(
            f"{type(sampler).__name__} draws negatives itself and does not know exclude_positives; "
            f"neighbor_sampler='native' does"
        )
