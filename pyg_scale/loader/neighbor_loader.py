"""Mini-batches of sampled neighbourhoods."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch_geometric.loader
from torch import Tensor
from torch_geometric.sampler.base import SubgraphType

from pyg_scale.loader import resolve
from pyg_scale.loader.node_loader import NodeLoader


class NeighborLoader(NodeLoader, torch_geometric.loader.NeighborLoader):
    """Samples neighbours of seed nodes hop by hop (Hamilton et al.: "Inductive Representation
    Learning on Large Graphs", NeurIPS 2017).

    As :class:`torch_geometric.loader.NeighborLoader`, and a subclass of it, but needs nothing
    besides this package, is right where a seed occurs twice in a batch, and gives the same batches
    for any number and type of workers. See :class:`NodeLoader` for what is not said here.

    Args:
        data: ``Data``, ``HeteroData`` or ``(FeatureStore, GraphStore)``.
        num_neighbors: Neighbours per node and hop, -1 for all; in a heterogeneous graph also per
            edge type.
        input_nodes: See :class:`NodeLoader`.
        input_time: See :class:`NodeLoader`; needs ``time_attr``.
        replace: Whether to draw with replacement.
        subgraph_type: ``"directional"``, ``"bidirectional"`` or ``"induced"``.
        disjoint: Whether every seed gets a subgraph of its own; always so with times.
        temporal_strategy: ``"uniform"`` or ``"last"``, which needs ``time_attr``.
        time_attr: The attribute of nodes or edges that holds times. A seed sees what is not later
            than itself.
        weight_attr: The attribute of edges that holds weights, finite and not negative.
        transform: See :class:`NodeLoader`.
        transform_sampler_output: See :class:`NodeLoader`.
        is_sorted: Promises that edges are sorted by destination (then time). It is checked.
        filter_per_worker: See :class:`NodeLoader`.
        neighbor_sampler: A name, such as ``"native"`` (the default), a class, a sampler
            without data (takes these arguments), or a sampler. With ``device="cuda"`` the default
            is ``"cuda"`` where that can do what is asked for; ``stats()["device"]["sampling"]``
            says so.
        redraw: Whether neighbours are drawn anew in every batch. ``False``: what a node gets in a
            hop follows from ``seed=`` and the node alone, so that with ``disjoint=True`` (or
            times) a seed has the same neighbourhood in all epochs, in a batch with any others, and
            in :class:`pyg_scale.serving.Predictor`.
        time_window: A length of time ``w`` in the unit of ``time_attr``: a seed of time ``t`` sees
            what is in ``(t - w, t]``, in every hop. One number for all edge types that have times,
            or a dictionary by edge type, where types that are missing have no window. An integer,
            unless times are floating point numbers. Works with either ``temporal_strategy``.
        strictly_earlier: Whether a seed sees only what is before its own time, ``(t - w, t)``: it
            never sees its own row, nor the edge that it is to predict.
        directed: Deprecated; ``False`` means ``subgraph_type="induced"``.
        seed: See :class:`NodeLoader`.
        worker_type: See :class:`NodeLoader`.
        feature_store: See :class:`NodeLoader`.
        split_seeds: See :class:`NodeLoader`.
        uneven: See :class:`NodeLoader`.
        split_batches: See :class:`NodeLoader`.
        comm: See :class:`NodeLoader`.
        sampling: See :class:`NodeLoader`.
        batch_cost: See :class:`NodeLoader`.
        pad_to: See :class:`NodeLoader`.
        kwargs: ``custom_cls``, ``input_id`` and arguments of :class:`torch.utils.data.DataLoader`.

    Raises:
        NotImplementedError: If the sampler does not support an argument.
        TypeError: If an argument has a wrong type.
        ValueError: If arguments contradict each other or do not fit the graph.
        IndexError: If a seed is not a node.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[..., Any] | None = None,
        transform_sampler_output: Callable[..., Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        redraw: bool = True,
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
        if input_time is not None and time_attr is None:
            raise ValueError(
                "input_time is given, but time_attr= is not: say which attribute holds the times"
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
            **resolve.set_options(
                redraw=redraw, time_window=time_window, strictly_earlier=strictly_earlier
            ),
        )
        self._setup(
            data,
            input_nodes,
            input_time,
            kwargs.pop("input_id", None),
            make_sampler=make_sampler,
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
