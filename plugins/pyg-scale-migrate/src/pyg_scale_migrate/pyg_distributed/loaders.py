"""``DistNeighborLoader`` and ``DistLinkNeighborLoader``: our loaders with the arguments of PyG's.

Each rank passes its own seeds, as in scripts for ``torch_geometric.distributed``; the ranks meet at
``master_addr:master_port`` and sample across all parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling
from torch_geometric.sampler.base import SubgraphType

from pyg_scale.loader import LinkNeighborLoader, NeighborLoader, SamplingOptions
from pyg_scale_migrate.pyg_distributed.meeting import (
    address_of,
    open_together,
    stores_of,
    with_labels,
)


class _Dist:
    """Mixin of the two loaders."""

    data: Any
    num_workers: int

    def close(self, timeout: float | None = None) -> None:
        """Serve this rank's parts until all ranks have closed their loaders, then stop.

        Loaders with the same stores and address share the connection, and end together. A script
        that does not call this does the same at its end.

        Args:
            timeout: Seconds to wait for the others; by default ``rpc_timeout``.

        Raises:
            CommTimeoutError: If some ranks have not closed it by then; names them.
        """
        self.data.close(timeout)

    def __enter__(self) -> Any:
        return iter(self)  # type: ignore[call-overload]

    def __exit__(self, *_: object) -> None:
        """End the iteration, not the loader, as in PyG."""

    @contextmanager
    def enable_multithreading(self, worker_threads: int | None = None) -> Iterator[None]:
        """Have each sampler work on several batches at a time, within the ``with`` statement.

        Args:
            worker_threads: Number of batches for each of ``num_workers``; ``None``: one per core.

        Raises:
            ValueError: If it is below 1, or there are no workers.
        """
        before = self.num_workers
        if before < 1:
            raise ValueError("enable_multithreading() is for num_workers > 0 (got 0)")
        if worker_threads is None:
            worker_threads = max(1, len(os.sched_getaffinity(0)) // before)
        if worker_threads < 1:
            raise ValueError(f"worker_threads must be at least 1 (got {worker_threads})")
        self.num_workers = before * worker_threads
        try:
            yield
        finally:
            self.num_workers = before

    def _prepare(
        self,
        data: Any,
        seeds: Any,
        master_addr: str | None,
        master_port: int | str | None,
        current_ctx: Any,
        dist_sampler: Any,
        concurrency: int,
        num_rpc_threads: int,
        async_sampling: bool,
        device: Any,
        time_attr: str | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """Open the graph; ``kwargs`` become those of our loaders."""
        if dist_sampler is not None:
            raise NotImplementedError(
                "dist_sampler=: samplers are of the kind sampler here, pass neighbor_sampler= (a "
                "name, a class or an instance)"
            )
        for name, value in (("concurrency", concurrency), ("num_rpc_threads", num_rpc_threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a number of at least 1 (got {value!r})")
        if concurrency > 1 and not async_sampling:
            raise ValueError(
                f"concurrency={concurrency} batches at a time need async_sampling=True"
            )
        if device is not None:
            if kwargs.get("sampling") is not None:
                raise ValueError("device= and sampling= were given: say to_device= in sampling=")
            kwargs["sampling"] = SamplingOptions(to_device=torch.device(device))
        features, graph_store = stores_of(data)
        timeout = kwargs.pop("rpc_timeout", 180.0)
        if not timeout > 0:
            raise ValueError(f"rpc_timeout must be above 0 seconds (got {timeout!r})")
        address = address_of(master_addr, master_port)
        if async_sampling:
            kwargs["num_workers"] = max(1, kwargs.get("num_workers", 0)) * concurrency
        by_hand = not _are_all(seeds) and kwargs.get("sampler") is None
        if by_hand and kwargs.get("split_seeds") is None:
            kwargs["split_seeds"] = False
        graph = open_together(
            features,
            graph_store,
            address,
            current_ctx,
            num_rpc_threads,
            timeout,
            time_attr,
            kwargs.get("weight_attr"),
        )
        self.current_ctx = current_ctx
        self.master_addr, self.master_port = address
        return with_labels(graph, features, _node_type(seeds))


class DistNeighborLoader(_Dist, NeighborLoader):
    """Samples neighbours of this rank's seed nodes across the parts of all ranks.

    It replaces ``torch_geometric.distributed.DistNeighborLoader``, and is a
    :class:`~pyg_scale.loader.NeighborLoader`: batches are those of one process with the whole graph
    and the same seeds, and it has ``seed=``, ``state_dict()`` and ``stats()``. All ranks must make
    their loaders in the same order. Ranks may have different numbers of batches.

    Args:
        data: ``(LocalFeatureStore, LocalGraphStore)`` of this rank's part.
        num_neighbors: See :class:`~pyg_scale.loader.NeighborLoader`.
        master_addr: The address of rank 0; ``None``: ``MASTER_ADDR``.
        master_port: A port of rank 0, not that of DDP; ``None``: the one after ``MASTER_PORT``.
            Loaders with the same stores and port share a connection.
        current_ctx: The rank of this process, as our or PyG's ``DistContext``.
        input_nodes: This rank's seeds, by original id. For ``None`` or only a node type, the ranks
            share all nodes; ``split_seeds="global"`` shares seeds that all ranks pass alike.
        input_time: See :class:`~pyg_scale.loader.NeighborLoader`.
        dist_sampler: Not supported; pass ``neighbor_sampler=``.
        replace: See :class:`~pyg_scale.loader.NeighborLoader`.
        subgraph_type: See there.
        disjoint: See there.
        temporal_strategy: See there.
        time_attr: See there; must be the one with which the graph was partitioned.
        transform: See there.
        concurrency: Number of batches that a sampler has under way at a time.
        num_rpc_threads: Number of requests of other ranks that this one answers at a time.
        filter_per_worker: See :class:`~pyg_scale.loader.NodeLoader`.
        async_sampling: If True, batches are made during training, by ``concurrency`` threads for
            each of ``num_workers``, at least one. Otherwise, according to ``num_workers``.
        device: Device of batches; ``None``: the CPU.
        kwargs: Arguments of :class:`~pyg_scale.loader.NeighborLoader`, and ``rpc_timeout``, the
            time limit in seconds (180) for other ranks to join and to answer.

    Raises:
        TypeError: If ``data`` are other stores, or an argument has a wrong type.
        ValueError: If arguments contradict each other or do not fit the graph.
        NotImplementedError: If ``dist_sampler`` is given.
        CommError: If rank 0 cannot use the port.
        CommTimeoutError: If some ranks do not join in time; names them.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        master_addr: str | None,
        master_port: int | str | None,
        current_ctx: Any,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        dist_sampler: Any = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        transform: Callable[..., Any] | None = None,
        concurrency: int = 1,
        num_rpc_threads: int = 16,
        filter_per_worker: bool | None = None,
        async_sampling: bool = True,
        device: Any = None,
        **kwargs: Any,
    ):
        graph = self._prepare(
            data,
            input_nodes,
            master_addr,
            master_port,
            current_ctx,
            dist_sampler,
            concurrency,
            num_rpc_threads,
            async_sampling,
            device,
            time_attr,
            kwargs,
        )
        super().__init__(
            graph,
            num_neighbors,
            input_nodes,
            input_time,
            replace=replace,
            subgraph_type=subgraph_type,
            disjoint=disjoint,
            temporal_strategy=temporal_strategy,
            time_attr=time_attr,
            transform=transform,
            filter_per_worker=filter_per_worker,
            **kwargs,
        )


class DistLinkNeighborLoader(_Dist, LinkNeighborLoader):
    """Samples neighbours of the endpoints of this rank's links across the parts of all ranks.

    It replaces ``torch_geometric.distributed.DistLinkNeighborLoader``, and is a
    :class:`~pyg_scale.loader.LinkNeighborLoader`.

    Args:
        data: See :class:`DistNeighborLoader`.
        num_neighbors: See there.
        master_addr: See there.
        master_port: See there.
        current_ctx: See there.
        edge_label_index: This rank's links, by original ids; with types ``(edge_type, links)``.
        edge_label: See :class:`~pyg_scale.loader.LinkNeighborLoader`.
        edge_label_time: See there.
        dist_sampler: Not supported; pass ``neighbor_sampler=``.
        replace: See :class:`~pyg_scale.loader.LinkNeighborLoader`.
        subgraph_type: See there.
        disjoint: See there.
        temporal_strategy: See there.
        neg_sampling: See there.
        neg_sampling_ratio: See there.
        time_attr: See there.
        transform: See there.
        concurrency: See :class:`DistNeighborLoader`.
        num_rpc_threads: See there.
        filter_per_worker: See there.
        async_sampling: See there.
        device: See there.
        kwargs: See there.

    Raises:
        ValueError: As :class:`DistNeighborLoader`, and if no links are given.
        TypeError: As there.
        NotImplementedError: As there.
        CommError: As there.
        CommTimeoutError: As there.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        master_addr: str | None,
        master_port: int | str | None,
        current_ctx: Any,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        dist_sampler: Any = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: NegativeSampling | None = None,
        neg_sampling_ratio: int | float | None = None,
        time_attr: str | None = None,
        transform: Callable[..., Any] | None = None,
        concurrency: int = 1,
        num_rpc_threads: int = 16,
        filter_per_worker: bool | None = None,
        async_sampling: bool = True,
        device: Any = None,
        **kwargs: Any,
    ):
        graph = self._prepare(
            data,
            edge_label_index,
            master_addr,
            master_port,
            current_ctx,
            dist_sampler,
            concurrency,
            num_rpc_threads,
            async_sampling,
            device,
            time_attr,
            kwargs,
        )
        super().__init__(
            graph,
            num_neighbors,
            edge_label_index,
            edge_label,
            edge_label_time,
            replace=replace,
            subgraph_type=subgraph_type,
            disjoint=disjoint,
            temporal_strategy=temporal_strategy,
            neg_sampling=neg_sampling,
            neg_sampling_ratio=neg_sampling_ratio,
            time_attr=time_attr,
            transform=transform,
            filter_per_worker=filter_per_worker,
            **kwargs,
        )


def _are_all(seeds: Any) -> bool:
    """Return True if seeds are all nodes, or all of a type."""
    if isinstance(seeds, tuple) and len(seeds) == 2:
        return seeds[1] is None
    names = seeds if isinstance(seeds, tuple) else (seeds,)
    return seeds is None or all(isinstance(name, str) for name in names)


def _node_type(seeds: Any) -> str | None:
    found = seeds[0] if isinstance(seeds, tuple) and len(seeds) == 2 else seeds
    return found if isinstance(found, str) else None
