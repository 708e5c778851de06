"""Mini-batches of the sampled neighbourhoods of links."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch_geometric.loader
from torch import Tensor
from torch_geometric.sampler.base import SubgraphType

from pyg_scale.loader import resolve
from pyg_scale.loader.link_loader import LinkLoader, neg_sampling_of


class LinkNeighborLoader(LinkLoader, torch_geometric.loader.LinkNeighborLoader):
    """Samples neighbours of the endpoints of seed links hop by hop.

    As :class:`torch_geometric.loader.LinkNeighborLoader`, and a subclass of it, but needs nothing
    besides this package, can leave positives out of the negatives
    (``NegativeSampling(..., exclude_positives=True)``), never takes a negative that is later than
    its link, and gives the same batches for any number and type of workers.

    Args:
        data: ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``.
        num_neighbors: See :class:`~pyg_scale.loader.NeighborLoader`.
        edge_label_index: See :class:`LinkLoader`.
        edge_label: See :class:`LinkLoader`.
        edge_label_time: See :class:`LinkLoader`; goes with ``time_attr``.
        replace: See :class:`~pyg_scale.loader.NeighborLoader`.
        subgraph_type: See there.
        disjoint: See there: every endpoint gets a subgraph of its own, and ``batch`` says to which
            link it belongs.
        temporal_strategy: See there.
        neg_sampling: See :class:`LinkLoader`.
        neg_sampling_ratio: See :class:`LinkLoader`.
        time_attr: See :class:`~pyg_scale.loader.NeighborLoader`; goes with ``edge_label_time``.
        weight_attr: See there.
        transform: See :class:`LinkLoader`.
        transform_sampler_output: See :class:`LinkLoader`.
        is_sorted: See :class:`~pyg_scale.loader.NeighborLoader`.
        filter_per_worker: See :class:`LinkLoader`.
        neighbor_sampler: See :class:`~pyg_scale.loader.NeighborLoader`.
        directed: Deprecated; ``False`` means ``subgraph_type="induced"``.
        time_window: See :class:`~pyg_scale.loader.NeighborLoader`.
        strictly_earlier: See there: the seed links themselves, and all other edges of their times,
            are then in no neighbourhood.
        seed: See :class:`~pyg_scale.loader.NodeLoader`.
        worker_type: See there.
        feature_store: See there.
        split_seeds: See there.
        uneven: See there.
        split_batches: See there.
        comm: See there.
        sampling: See there.
        kwargs: ``custom_cls``, ``input_id`` and arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        NotImplementedError: If the sampler does not support an argument.
        TypeError: If an argument has a wrong type.
        ValueError: If arguments contradict each other or do not fit the graph.
        IndexError: If an endpoint is not a node.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: Any = None,
        neg_sampling_ratio: int | float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[..., Any] | None = None,
        transform_sampler_output: Callable[..., Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        time_window: Any = None,
        strictly_earlier: bool = False,
        seed: int | None = None,
        worker_type: str | None = None,
        feature_store: Any = None,
        split_seeds: str | bool | None = None,
        uneven: str = "join",
        split_batches: bool = False,
        comm: Any = None,
        **kwargs: Any,
    ):
        if (edge_label_time is None) != (time_attr is None):
            given, missing = "edge_label_time", "time_attr"
            if edge_label_time is None:
                given, missing = missing, given
            raise ValueError(
                f"{given!r} is given, but {missing!r} is not set: pass both or neither"
            )
        if not directed:
            warnings.warn(
                "directed=False is deprecated: use subgraph_type='induced'",
                DeprecationWarning,
                stacklevel=2,
            )
            subgraph_type = "induced"
        self._any_sampler = neighbor_sampler is None
        make_sampler = partial(
            resolve.resolve,
            "native" if neighbor_sampler is None else neighbor_sampler,
            data,
            "neighbor_sampler",
            sampling=kwargs.get("sampling"),
            num_neighbors=num_neighbors,
            replace=replace,
            subgraph_type=subgraph_type,
            disjoint=disjoint,
            temporal_strategy=temporal_strategy,
            time_attr=time_attr,
            weight_attr=weight_attr,
            is_sorted=is_sorted,
            **resolve.set_options(time_window=time_window, strictly_earlier=strictly_earlier),
        )
        self._setup(
            data,
            edge_label_index,
            edge_label,
            edge_label_time,
            kwargs.pop("input_id", None),
            make_sampler=make_sampler,
            neg_sampling=neg_sampling_of(neg_sampling, neg_sampling_ratio),
            feature_store=feature_store,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            custom_cls=kwargs.pop("custom_cls", None),
            seed=seed,
            worker_type=worker_type,
            split_seeds=split_seeds,
            uneven=uneven,
            split_batches=split_batches,
            comm=comm,
            **kwargs,
        )
