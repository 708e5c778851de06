"""Mini-batches of random nodes: a new random partition of the nodes in every epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_scale.graph.base import SuppliesSampler
from pyg_scale.graph.topology import NodeType
from pyg_scale.loader.node_loader import NodeLoader
from pyg_scale.partitioner.base import check_num_parts
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.sampler.output import Sample


class RandomNodeLoader(NodeLoader, torch_geometric.loader.RandomNodeLoader):
    """Loads the subgraphs among random sets of nodes, which together are all nodes once an epoch.

    As :class:`torch_geometric.loader.RandomNodeLoader`, and a subclass of it. Nodes of a batch are
    in the order in which they were drawn, and its edges in that of ``data``: all edges that have
    both ends among them. Without ``shuffle=True`` the sets are ranges of ids, as in PyG. See
    :class:`NodeLoader` for workers, resuming, and what is not said here.

    Args:
        data: ``Data`` with ``edge_index`` or ``adj_t``, or a graph directory that was opened.
        num_parts: Number of sets, at most that of nodes. A set has
            ``ceil(num_nodes / num_parts)`` nodes, the last one what is left.
        seed: See :class:`NodeLoader`.
        worker_type: See :class:`NodeLoader`.
        feature_store: See :class:`NodeLoader`.
        kwargs: ``transform``, ``split_seeds``, ``uneven``, ``split_batches``, ``comm``,
            ``sampling``, ``device``, ``device_memory``, see :class:`NodeLoader`, and arguments of
            :class:`torch.utils.data.DataLoader` other than ``batch_size``.

    Raises:
        NotImplementedError: If the graph has types, or other processes sample it.
        TypeError: If an argument has a wrong type, or ``batch_size`` is given.
        ValueError: If ``num_parts`` is out of range, or arguments contradict each other.
    """

    def __init__(
        self,
        data: Data,
        num_parts: int,
        *,
        seed: int | None = None,
        worker_type: str | None = None,
        feature_store: Any = None,
        **kwargs: Any,
    ):
        _check_graph(data)
        num_nodes = data.num_nodes or 0
        check_num_parts(num_parts, num_nodes)
        if "batch_size" in kwargs:
            raise TypeError(
                "RandomNodeLoader takes no batch_size: num_parts says how large batches are"
            )
        self.num_parts = num_parts
        self._setup(
            data,
            None,
            None,
            None,
            make_sampler=self._sampler,
            feature_store=feature_store,
            transform=kwargs.pop("transform", None),
            transform_sampler_output=None,
            filter_per_worker=None,
            custom_cls=None,
            seed=seed,
            worker_type=worker_type,
            batch_size=-(-num_nodes // num_parts),
            **kwargs,
        )

    def _sampler(self) -> NativeSampler:
        return _AmongSeeds(self.data, [], subgraph_type="induced")


class _AmongSeeds(NativeSampler):
    """Takes all edges among the seeds, in the order of the graph."""

    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        """See :meth:`NeighborSampler.sample <pyg_scale.sampler.base.NeighborSampler.sample>`."""
        found = super().sample(seed, seed_time, key)
        edge = found.edge[None] if found.edge is not None else None
        assert edge is not None
        order = edge.argsort()
        return Sample(
            node=found.node,
            row={None: found.row[None][order]},
            col={None: found.col[None][order]},
            edge={None: edge[order]},
        )


def _check_graph(data: Any) -> None:
    if isinstance(data, HeteroData):
        raise NotImplementedError(
            "RandomNodeLoader does not take HeteroData: use data.to_homogeneous(), or a "
            "NeighborLoader per node type"
        )
    if isinstance(data, SuppliesSampler):
        raise NotImplementedError(
            "RandomNodeLoader samples in this process, but this graph is sampled by servers: "
            "use NeighborLoader(..., subgraph_type='induced')"
        )
    if not isinstance(data, Data):
        raise TypeError(f"data must be a Data (got {type(data).__name__})")
