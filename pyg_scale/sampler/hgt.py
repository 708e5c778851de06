"""The layer-wise sampler of the Heterogeneous Graph Transformer, with keyed draws."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_scale.graph.topology import NodeType
from pyg_scale.ops import library
from pyg_scale.ops.hgt import hgt_sample
from pyg_scale.sampler.base import NeighborSampler, Sample
from pyg_scale.sampler.hgt_across import sample_across
from pyg_scale.store.topology import topology_of

_ABSENT = torch.empty(0, dtype=torch.int64)


class HGTSampler(NeighborSampler):
    """Samples about as many nodes of every type, then takes all edges among them.

    The method is that of Hu, Dong, Wang, Sun: "Heterogeneous Graph Transformer", WWW 2020,
    algorithms 1 and 2; :mod:`pyg_scale.ops.hgt` says to the bit what is drawn. Takes the
    arguments of :class:`torch_geometric.sampler.HGTSampler`. Other than that one it looks at all
    in-edges of a node, not at 50 of them, so that no edge among the sampled nodes is missing;
    repeated seeds are right; and links can be seeds as well.

    Args:
        data: ``HeteroData`` or ``(FeatureStore, GraphStore)`` with node types.
        num_samples: How many nodes each hop takes: one number per hop, or such a list for every
            node type. -1 takes all.
        is_sorted: Whether edges are sorted by destination. It is checked.
        share_memory: Whether the graph is put into shared memory.

    Raises:
        NotImplementedError: If the graph is homogeneous.
        ValueError: If ``num_samples`` does not go with the node types.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"hetero", "links"})

    across_parts = True

    def __init__(
        self,
        data: Any,
        num_samples: Sequence[int] | Mapping[str, Sequence[int]],
        is_sorted: bool = False,
        share_memory: bool = False,
    ):
        super().__init__(is_sorted=is_sorted, share_memory=share_memory)
        graph = None if isinstance(data, Data) else topology_of(data, is_sorted=is_sorted)
        if graph is None or not graph.is_hetero:
            raise NotImplementedError(
                f"{type(self).__name__} needs a graph with node types (got "
                f"{type(data).__name__}); use NeighborLoader for others"
            )
        self._check_reach(graph)
        if share_memory:
            graph.share_memory_()
        self.topology = graph
        self.num_samples = self._per_type(num_samples)

    @property
    def num_hops(self) -> int:
        """Number of times that nodes are taken."""
        return max((len(numbers) for numbers in self.num_samples.values()), default=0)

    def _per_type(self, num_samples: Any) -> dict[str, list[int]]:
        graph = self.topology
        assert graph is not None
        if isinstance(num_samples, str) or not isinstance(num_samples, Iterable):
            raise TypeError(
                "num_samples must be one integer per hop, such as [512, 512], or such a list for "
                f"every node type (got {num_samples!r})"
            )
        if not isinstance(num_samples, Mapping):
            return {str(t): list(num_samples) for t in graph.node_types}
        unknown = set(num_samples) - set(graph.node_types)
        if unknown:
            raise ValueError(
                f"num_samples has {', '.join(map(repr, sorted(unknown)))}, but the node types are "
                f"{', '.join(map(repr, graph.node_types))}"
            )
        if len({len(numbers) for numbers in num_samples.values()}) != 1:
            raise ValueError("num_samples must have the same number of hops for every node type")
        for edge_type in graph.edge_types:
            if graph.neighbor_type(edge_type) not in num_samples:
                raise ValueError(
                    f"num_samples has no entry for node type {graph.neighbor_type(edge_type)!r}, "
                    f"which is reached by {edge_type}"
                )
        return {node_type: list(numbers) for node_type, numbers in num_samples.items()}

    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        """See :meth:`NeighborSampler.sample <pyg_scale.sampler.base.NeighborSampler.sample>`."""
        graph = self.topology
        assert graph is not None
        if not library.compiled():
            library.warn_plain_path(type(self).__name__)
        nothing = [0] * self.num_hops
        num_samples = {t: self.num_samples.get(str(t), nothing) for t in graph.node_types}
        type_hash = {t: _node_type_hash(t) for t in graph.node_types}
        if graph.router is not None:
            return sample_across(graph, seed, num_samples, type_hash, key)
        csc = [graph.csc[edge_type] for edge_type in graph.edge_types]
        number = {node_type: i for i, node_type in enumerate(graph.node_types)}
        out = hgt_sample(
            indptr=[c.indptr for c in csc],
            indices=[c.indices for c in csc],
            edge_id=[_ABSENT if c.edge_id is None else c.edge_id for c in csc],
            num_nodes=[graph.num_nodes[t] for t in graph.node_types],
            dst_type=[number[graph.expanded_type(e)] for e in graph.edge_types],
            src_type=[number[graph.neighbor_type(e)] for e in graph.edge_types],
            node_type_hash=list(type_hash.values()),
            seed=[seed.get(t, _ABSENT).to(torch.int64).contiguous() for t in graph.node_types],
            num_samples=list(num_samples.values()),
            key=key,
            int32_output=graph.index_dtype == torch.int32,
        )
        return Sample(
            node=dict(zip(graph.node_types, out.node, strict=True)),
            row=dict(zip(graph.edge_types, out.row, strict=True)),
            col=dict(zip(graph.edge_types, out.col, strict=True)),
            edge=dict(zip(graph.edge_types, out.edge, strict=True)),
            colptr=dict(zip(graph.edge_types, out.colptr, strict=True)),
        )


def _node_type_hash(node_type: NodeType) -> int:
    """The number of a node type in keys: the first eight bytes of BLAKE2b of its name."""
    digest = hashlib.blake2b(str(node_type).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
