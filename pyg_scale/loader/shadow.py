"""Mini-batches in which every root has a small subgraph of its own."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

from pyg_scale.graph.base import SuppliesSampler
from pyg_scale.graph.topology import NodeType
from pyg_scale.loader.batch.build import build
from pyg_scale.loader.induced import refuse_overrides
from pyg_scale.loader.node_loader import NodeLoader
from pyg_scale.loader.stats import Stats
from pyg_scale.ops.sort_subgraphs import sort_subgraphs
from pyg_scale.sampler.base import Sample, flag
from pyg_scale.sampler.native import NativeSampler

_OF_THE_SAMPLE = {"edge_index", "adj_t", "num_nodes", "batch", "ptr"}
_NOT_PYGS = {"n_id", "e_id", "num_sampled_nodes", "num_sampled_edges"}


class ShaDowKHopSampler(NodeLoader, torch_geometric.loader.ShaDowKHopSampler):
    """Loads the sampled neighbourhood of every root as a graph of its own, with all its edges.

    As :class:`torch_geometric.loader.ShaDowKHopSampler`, and a subclass of it, but needs nothing
    besides this package. The method is that of Zeng et al.: "Decoupling the Depth and Scope of
    Graph Neural Networks", NeurIPS 2021. A batch is a ``Batch`` of ``batch_size`` graphs:
    ``batch`` ``[num_nodes]`` and ``ptr`` ``[batch_size + 1]`` say whose a node is, ``root_n_id``
    ``[batch_size]`` where the roots are, and ``y`` has their rows alone. Nodes of a graph are
    sorted, edges by source, then destination.

    A node is expanded once, in the hop after the one that found it. Each of its in-edges is as
    likely as any other; see :class:`NeighborLoader` for ``replace``. See :class:`NodeLoader` for
    workers, resuming, and what is not said here.

    Args:
        data: ``Data`` with ``edge_index`` or ``adj_t``.
        depth: Number of hops.
        num_neighbors: Neighbours of a node to sample in every hop, -1 for all.
        node_idx: The roots: ids or a mask ``[num_nodes]``, ``None`` for all nodes.
        replace: Whether to draw with replacement.
        seed: See :class:`NodeLoader`.
        worker_type: See :class:`NodeLoader`.
        feature_store: See :class:`NodeLoader`.
        kwargs: ``transform``, ``split_seeds``, ``uneven``, ``split_batches``, ``comm``,
            ``sampling``, ``device``, ``device_memory``, see :class:`NodeLoader`, and arguments of
            :class:`torch.utils.data.DataLoader`.

    Raises:
        NotImplementedError: If the graph has types, or other processes sample it.
        TypeError: If an argument has a wrong type.
        ValueError: If ``depth`` or ``num_neighbors`` is out of range, or arguments contradict each
            other.
        IndexError: If a root is not a node.
    """

    def __init__(
        self,
        data: Data,
        depth: int,
        num_neighbors: int,
        node_idx: Tensor | None = None,
        replace: bool = False,
        *,
        seed: int | None = None,
        worker_type: str | None = None,
        feature_store: Any = None,
        **kwargs: Any,
    ):
        refuse_overrides(self, "__collate__")
        _check_graph(data)
        self.depth = _number("depth", depth, 0)
        self.num_neighbors = _number("num_neighbors", num_neighbors, -1)
        self.replace = flag("replace", replace)
        self.is_sparse_tensor = "edge_index" not in data
        self._setup(
            data,
            node_idx,
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
            **kwargs,
        )
        self.node_idx = self.input_data.node

    def _seeds(self, *given: Any) -> Any:
        try:
            return super()._seeds(*given)
        except (TypeError, ValueError, IndexError) as error:
            raise type(error)(str(error).replace("input_nodes", "node_idx")) from None

    def _sampler(self) -> NativeSampler:
        return _EgoSampler(
            self.data,
            [self.num_neighbors] * self.depth,
            subgraph_type="induced",
            replace=self.replace,
            disjoint=True,
        )

    def _fetch(self, out: Any, stats: Stats) -> Batch:
        root = out.node_attrs.pop("root")
        made = build(
            self.data,
            out,
            permutation=self.node_sampler.edge_permutation,
            features=self._features,
            stats=stats,
            collect=self.sampling.collect_features,
        )
        ptr = torch.searchsorted(out.batch, torch.arange(root.numel() + 1))
        batch = Batch(batch=out.batch, ptr=ptr)
        batch.root_n_id = root
        name = "adj_t" if self.is_sparse_tensor else "edge_index"
        batch[name] = made[name]
        given = set(self.data.keys())
        for key, value in made.items():
            if key in _OF_THE_SAMPLE or (key in _NOT_PYGS and key not in given):
                continue
            of_nodes = isinstance(value, Tensor) and value.size()[:1] == out.node.size()
            if key == "y" and of_nodes and (key not in given or self.data.is_node_attr(key)):
                value = value[root.to(value.device)]
            given_list = isinstance(self.data.get(key), list | tuple)
            batch[key] = self.data[key] if given_list else value
        return batch


class _EgoSampler(NativeSampler):
    """Samples a subgraph of each seed, with its nodes in ascending order and all its edges."""

    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        """See :meth:`NeighborSampler.sample <pyg_scale.sampler.base.NeighborSampler.sample>`."""
        found = super().sample(seed, seed_time, key)
        edge, roots = found.edge[None], seed[None].numel()
        assert found.batch is not None and edge is not None
        ends = found.row[None], found.col[None]
        out = sort_subgraphs(found.node[None], found.batch[None], *ends, edge, roots)
        dtype = found.node[None].dtype
        return Sample(
            node={None: out.node.to(dtype)},
            row={None: out.row.to(dtype)},
            col={None: out.col.to(dtype)},
            edge={None: out.edge},
            batch={None: out.batch},
            node_attrs={"root": {None: out.place[:roots]}},
        )


def _check_graph(data: Any) -> None:
    if isinstance(data, HeteroData):
        raise NotImplementedError(
            "ShaDowKHopSampler does not take HeteroData: use NeighborLoader(..., disjoint=True, "
            "subgraph_type='induced'), or data.to_homogeneous()"
        )
    if isinstance(data, SuppliesSampler):
        raise NotImplementedError(
            "ShaDowKHopSampler samples in this process, but this graph is sampled by servers: "
            "use NeighborLoader(..., disjoint=True, subgraph_type='induced')"
        )
    if not isinstance(data, Data):
        raise TypeError(f"data must be a Data (got {type(data).__name__})")


def _number(name: str, value: Any, least: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be one integer, the same for every hop (got {value!r}); NeighborLoader "
            "takes a number per hop"
        ) from None
    if number < least:
        raise ValueError(f"{name} must be {least} or more (got {number})")
    return number
