"""Mini-batches of random nodes: a new random partition of the nodes in every epoch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, NodeSamplerInput, SamplerOutput

from pyg_scale.graph.base import SuppliesSampler
from pyg_scale.graph.topology import NodeType
from pyg_scale.loader.node_loader import NodeLoader
from pyg_scale.loader.seeds.nodes import num_nodes_of
from pyg_scale.loader.seeds.split import parts_of_nodes
from pyg_scale.loader.stats import Stats
from pyg_scale.partitioner.base import check_num_parts
from pyg_scale.sampler.base import Sample
from pyg_scale.sampler.native import NativeSampler

_NOT_PYGS = ("input_id", "batch_size", "n_id", "e_id", "num_sampled_nodes", "num_sampled_edges")


class RandomNodeLoader(NodeLoader, torch_geometric.loader.RandomNodeLoader):
    """Loads the subgraphs among random sets of nodes, which together are all nodes once an epoch.

    As :class:`torch_geometric.loader.RandomNodeLoader`, and a subclass of it: a batch is
    ``data.subgraph(nodes)``, with the attributes of ``data`` and no others. Nodes of a batch are
    in the order in which they were drawn, and its edges in that of ``data``: all edges that have
    both ends among them. Nodes of all types are drawn together. Without ``shuffle=True`` the sets
    are ranges of ids, type after type, as in PyG. See :class:`NodeLoader` for workers, resuming,
    and what is not said here.

    Args:
        data: ``Data`` or ``HeteroData`` with ``edge_index`` or ``adj_t``, or a graph directory that
            was opened.
        num_parts: Number of sets, at most that of nodes. A set has
            ``ceil(num_nodes / num_parts)`` nodes, the last one what is left.
        seed: See :class:`NodeLoader`.
        worker_type: See :class:`NodeLoader`.
        feature_store: See :class:`NodeLoader`.
        kwargs: ``transform``, ``split_seeds``, ``uneven``, ``split_batches``, ``comm``,
            ``sampling``, ``device``, ``device_memory``, see :class:`NodeLoader`, and arguments of
            :class:`torch.utils.data.DataLoader` other than ``batch_size``.

    Raises:
        NotImplementedError: If other processes sample the graph, or ``batch_cost`` is given.
        TypeError: If an argument has a wrong type, or ``batch_size`` is given.
        ValueError: If ``num_parts`` is out of range, there are no nodes, or arguments contradict
            each other.
    """

    def __init__(
        self,
        data: Data | HeteroData,
        num_parts: int,
        *,
        seed: int | None = None,
        worker_type: str | None = None,
        feature_store: Any = None,
        **kwargs: Any,
    ):
        _check_graph(data)
        self._offset = _offsets(data)
        check_num_parts(num_parts, self._offset[-1])
        if not self._offset[-1]:
            raise ValueError("data has no nodes: there are no batches to make")
        if kwargs.get("batch_cost") is not None:
            raise NotImplementedError(
                "batch_cost= is not for RandomNodeLoader, whose batches are num_parts: leave it out"
            )
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
            batch_size=-(-self._offset[-1] // num_parts),
            **kwargs,
        )

    def _seeds(self, data: Any, *_: Any) -> NodeSamplerInput:
        """All nodes, numbered type after type."""
        return NodeSamplerInput(input_id=None, node=torch.arange(self._offset[-1]))

    def _parts_of_seeds(self) -> Tensor | None:
        types = self.data.node_types if isinstance(self.data, HeteroData) else [None]
        sizes = zip(self._offset, self._offset[1:], strict=False)
        parts = [
            parts_of_nodes(self.data, node_type, torch.arange(end - begin))
            for node_type, (begin, end) in zip(types, sizes, strict=True)
        ]
        found = [each for each in parts if each is not None]
        return torch.cat(found) if len(found) == len(parts) else None

    def _sampler(self) -> NativeSampler:
        return _AmongSeeds(self.data, [], subgraph_type="induced")

    def _fetch(self, out: Any, stats: Stats) -> Any:
        batch = self._batch(out, stats)
        given = {store._key: set(store.keys()) for store in self.data.stores}
        for store in batch.stores:
            for name in _NOT_PYGS:
                if name in store and name not in given.get(store._key, ()):
                    del store[name]
        return batch


class _AmongSeeds(NativeSampler):
    """Takes all edges among the seeds, in the order of the graph."""

    def sample_from_nodes(
        self, index: NodeSamplerInput, key: int | None = None, **kwargs: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        """As that of every sampler, of nodes of all types, which are numbered type after type."""
        graph, inputs = self.topology, NodeSamplerInput.cast(index)
        assert graph is not None
        seed, first = {}, 0
        for node_type in graph.node_types:
            end = first + graph.num_nodes[node_type]
            seed[node_type] = inputs.node[(inputs.node >= first) & (inputs.node < end)] - first
            first = end
        out = self.sample_checked(seed, None, key).to_output()
        out.metadata = (inputs.input_id, None)
        return out

    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        """See :meth:`NeighborSampler.sample <pyg_scale.sampler.base.NeighborSampler.sample>`."""
        found = super().sample(seed, seed_time, key)
        order = {kind: edge.argsort() for kind, edge in found.edge.items() if edge is not None}
        return Sample(
            node=found.node,
            row={kind: found.row[kind][each] for kind, each in order.items()},
            col={kind: found.col[kind][each] for kind, each in order.items()},
            edge={kind: each[order[kind]] for kind, each in found.edge.items() if each is not None},
        )


def _offsets(data: Data | HeteroData) -> list[int]:
    """The number of the first node of each type, and that of all nodes."""
    if isinstance(data, HeteroData):
        sizes = [num_nodes_of(data, node_type) for node_type in data.node_types]
    else:
        sizes = [num_nodes_of(data, None)]
    return [0, *itertools.accumulate(sizes)]


def _check_graph(data: Any) -> None:
    if isinstance(data, SuppliesSampler):
        raise NotImplementedError(
            "RandomNodeLoader samples in this process, but this graph is sampled by servers: "
            "use NeighborLoader(..., subgraph_type='induced')"
        )
    if not isinstance(data, Data | HeteroData):
        raise TypeError(f"data must be a Data or HeteroData (got {type(data).__name__})")
