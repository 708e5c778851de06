"""Mini-batches with about as many nodes of every type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch_geometric.loader

from pyg_scale.graph.base import SuppliesSampler
from pyg_scale.loader.node_loader import NodeLoader
from pyg_scale.sampler.hgt import HGTSampler


class HGTLoader(NodeLoader, torch_geometric.loader.HGTLoader):
    """Loads subgraphs sampled as for the Heterogeneous Graph Transformer (Hu et al., WWW 2020).

    As :class:`torch_geometric.loader.HGTLoader`, and a subclass of it, but needs nothing besides
    this package; see :class:`~pyg_scale.sampler.hgt.HGTSampler` for what is sampled, and
    :class:`NodeLoader` for what is not said here.

    Args:
        data: ``HeteroData`` or ``(FeatureStore, GraphStore)`` with node types.
        num_samples: How many nodes each hop takes: one number per hop, or such a list for every
            node type. -1 takes all.
        input_nodes: See :class:`NodeLoader`.
        is_sorted: Promises that edges are sorted by destination. It is checked.
        transform: See :class:`NodeLoader`.
        transform_sampler_output: See :class:`NodeLoader`.
        filter_per_worker: See :class:`NodeLoader`.
        seed: See :class:`NodeLoader`.
        worker_type: See :class:`NodeLoader`.
        feature_store: See :class:`NodeLoader`.
        split_seeds: See :class:`NodeLoader`.
        uneven: See :class:`NodeLoader`.
        split_batches: See :class:`NodeLoader`.
        comm: See :class:`NodeLoader`.
        sampling: See :class:`NodeLoader`.
        kwargs: ``custom_cls``, ``input_id`` and arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        NotImplementedError: If the graph is homogeneous, or ``input_time`` is given.
        TypeError: If an argument has a wrong type.
        ValueError: If arguments contradict each other or do not fit the graph.
        IndexError: If a seed is not a node.
    """

    def __init__(
        self,
        data: Any,
        num_samples: Sequence[int] | Mapping[str, Sequence[int]],
        input_nodes: Any,
        is_sorted: bool = False,
        transform: Callable[..., Any] | None = None,
        transform_sampler_output: Callable[..., Any] | None = None,
        filter_per_worker: bool | None = None,
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
        if kwargs.pop("input_time", None) is not None:
            raise NotImplementedError(
                "input_time: HGT sampling does not look at times; NeighborLoader does"
            )
        self.num_samples = num_samples
        self._setup(
            data,
            input_nodes,
            None,
            kwargs.pop("input_id", None),
            make_sampler=partial(
                _sampler_of, data, kwargs.get("sampling"), num_samples, is_sorted=is_sorted
            ),
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


def _sampler_of(data: Any, sampling: Any, num_samples: Any, *, is_sorted: bool) -> Any:
    if isinstance(data, SuppliesSampler):
        return data.sampler_for(
            "hgt", {"num_samples": num_samples, "is_sorted": is_sorted}, sampling
        )
    return HGTSampler(data, num_samples, is_sorted=is_sorted)
