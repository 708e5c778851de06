"""The native sampler: the meaning of the reference, in C++."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch_geometric.sampler.base import SubgraphType

from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology
from pyg_scale.ops import library
from pyg_scale.ops.expand import ExpandedNodes, InEdges, expand_neighbors
from pyg_scale.ops.sample import (
    ABSENT,
    Choice,
    GraphTensors,
    SampledTensors,
    Seeds,
    SourceDraws,
)
from pyg_scale.sampler.base import Sample
from pyg_scale.sampler.capabilities import CAPABILITIES
from pyg_scale.sampler.choose import Ask, Picked, hop_key
from pyg_scale.sampler.reference import ReferenceSampler


class NativeSampler(ReferenceSampler):
    """Samples neighbours with the compiled op; supports everything in :data:`CAPABILITIES`.

    Returns the same bits as :class:`~pyg_scale.sampler.reference.ReferenceSampler`, whatever
    the number of threads, and the dtype in which the graph is stored. Where the kernels are not
    compiled it *is* that sampler, and says so once; with ``PYG_SCALE_KERNELS=require``
    it raises instead.
    """

    supports: ClassVar[frozenset[str]] = frozenset(CAPABILITIES)

    _kept: tuple[Topology, GraphTensors] | None = None  # of the graph that was sampled last

    @property
    def source_draws(self) -> SourceDraws | None:
        """Draws of a subclass by the random numbers of sources; ``None``: nodes have their own."""
        return None

    def sample(
        self,
        seed: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        key: int,
    ) -> Sample:
        """See :meth:`NeighborSampler.sample <pyg_scale.sampler.base.NeighborSampler.sample>`.

        Raises:
            KernelsError: If the kernels are not compiled and ``PYG_SCALE_KERNELS=require``.
            ValueError: If the batch has more nodes than its dtype can number.
        """
        if not library.compiled():
            library.warn_plain_path(type(self).__name__)
            return super().sample(seed, seed_time, key)
        graph = self.topology
        assert graph is not None
        tensors = self._tensors(graph)
        if tensors is None:
            return super().sample(seed, seed_time, key)
        hops, disjoint = self.hops(), self.disjoint
        out = neighbor_sample(
            tensors,
            self._seen(graph, [_int64(seed.get(t)) for t in graph.node_types], seed_time),
            [hops[edge_type] for edge_type in graph.edge_types],
            key,
            self._choice(self.source_draws),
            disjoint=disjoint,
            induced=self.subgraph_type == SubgraphType.induced,
            int32_output=graph.index_dtype == torch.int32,
        )
        nodes, edges = graph.node_types, graph.edge_types
        nodes_per_hop = out.num_sampled_nodes.tolist()
        edges_per_hop = out.num_sampled_edges.tolist()
        return self._finish(
            Sample(
                node=dict(zip(nodes, out.node, strict=True)),
                row=dict(zip(edges, out.row, strict=True)),
                col=dict(zip(edges, out.col, strict=True)),
                edge=dict(zip(edges, out.edge, strict=True)),
                batch=dict(zip(nodes, out.batch, strict=True)) if disjoint else None,
                num_sampled_nodes=dict(zip(nodes, nodes_per_hop, strict=True)),
                num_sampled_edges=dict(zip(edges, edges_per_hop, strict=True)),
                colptr=None if self.every_layer else dict(zip(edges, out.colptr, strict=True)),
                edge_attrs=_weights(dict(zip(edges, out.weight, strict=False))),
            )
        )

    def _tensors(self, graph: Topology) -> GraphTensors | None:
        """The graph as the op takes it; ``None`` if some of its parts are elsewhere."""
        if graph.router is None:
            if self._kept is None or self._kept[0] is not graph:
                csc = [graph.csc[edge_type] for edge_type in graph.edge_types]
                self._kept = graph, _graph_tensors(graph, csc)
            return self._kept[1]
        here = graph.router.parts_here()
        if here is None:
            return None
        csc = [part for edge_type in graph.edge_types for part in here.csc[edge_type]]
        books = [here.books[node_type] for node_type in graph.node_types]
        return _graph_tensors(graph, csc)._replace(
            part=[_or_absent(book.part) for book in books],
            local=[_or_absent(book.local) for book in books],
            offsets=[book.offsets for book in books],
            times_of_neighbors=graph.has_node_time,
        )

    def _choice(self, by_source: SourceDraws | None) -> Choice:
        last = self.temporal_strategy == "last"
        return Choice(self.replace, last, not self.redraw, by_source)

    def _seen(
        self, graph: Topology, node: list[Tensor], seed_time: Mapping[NodeType, Tensor] | None
    ) -> Seeds:
        """The seeds, with the last time that they see and, per edge type, that before it."""
        given = seed_time or {}
        time = [_int64(given.get(node_type)) for node_type in graph.node_types]
        if seed_time is None or (self.time_window is None and not self.strictly_earlier):
            return Seeds(node, time)
        limits = self.time_limits(time[0] if len(time) == 1 else torch.cat(time))
        latest = limits.latest.split([each.numel() for each in time])
        after = [_or_absent(limits.after.get(t)) for t in graph.edge_types]
        return Seeds(node, [*latest], after, self.strictly_earlier)

    def hop_draws(self, ask: Ask) -> tuple[int, SourceDraws | None]:
        """The key of a hop along an edge type, and its draws if those are by source."""
        return hop_key(ask), None

    def choose(
        self,
        csc: CSC,
        ask: Ask,
        place: Tensor | None,
        neighbor_time: Tensor | None,
        num_neighbor_nodes: int,
    ) -> Picked:
        """See :meth:`HopSampler.choose <pyg_scale.sampler.hop.HopSampler.choose>`."""
        by_node_time = ask.latest is not None and csc.time is None
        if by_node_time or not library.compiled():
            return super().choose(csc, ask, place, neighbor_time, num_neighbor_nodes)
        key, by_source = self.hop_draws(ask)
        found = expand_neighbors(
            InEdges(
                csc.indptr,
                csc.indices,
                csc.edge_id,
                csc.time,
                csc.weight_prefix,
                num_neighbor_nodes,
            ),
            ExpandedNodes(
                ask.node if place is None else place,
                ask.node,
                ask.component,
                ask.latest,
                ask.after,
            ),
            key,
            ask.num_neighbors,
            self._choice(by_source),
        )
        attrs = {"edge_weight": found.weight} if by_source and by_source.weighting else {}
        return Picked(found.counts, found.neighbor, found.edge, attrs)


def neighbor_sample(
    graph: GraphTensors,
    seeds: Seeds,
    num_neighbors: Sequence[Sequence[int]],
    key: int,
    choice: Choice,
    *,
    disjoint: bool = False,
    induced: bool = False,
    int32_output: bool = False,
) -> SampledTensors:
    """Sample the neighbourhood of seeds, hop by hop, with kernels that are loaded.

    Uses :func:`pyg_scale.ops.library.num_threads` threads; the result does not depend on their
    number.

    Args:
        graph: The graph.
        seeds: The seeds.
        num_neighbors: Per edge type, one number per hop; negative for all.
        key: The key of the batch, unsigned.
        choice: The choice of in-edges.
        disjoint: If True, every seed gets a subgraph of its own.
        induced: If True, return all edges among the sampled nodes.
        int32_output: If True, ``node``, ``row`` and ``col`` are ``int32``.

    Raises:
        ValueError: If an argument does not fit the others, a seed or neighbour is not a node,
            or the batch has more nodes than can be numbered.
    """
    draws = choice.by_source or SourceDraws()
    out = torch.ops.pyg_scale.neighbor_sample(
        graph.indptr,
        graph.indices,
        graph.edge_id,
        graph.edge_time,
        graph.weight_prefix,
        graph.node_time,
        graph.num_nodes,
        graph.expanded_type,
        graph.neighbor_type,
        graph.edge_type_hash,
        seeds.node,
        seeds.time,
        [n for per_hop in num_neighbors for n in per_hop],
        max(map(len, num_neighbors), default=0),
        choice.replace,
        disjoint,
        choice.last,
        induced,
        library.to_signed(key),
        int32_output,
        library.WAITING if graph.waits else library.num_threads(),
        list(graph.part),
        list(graph.local),
        list(graph.offsets),
        list(seeds.after),
        graph.times_of_neighbors,
        graph.waits,
        choice.by_node,
        choice.by_source is not None,
        draws.same_in_all_hops,
        library.to_signed(draws.next_key),
        draws.renewed,
        draws.weighting,
        draws.layers,
        seeds.strict,
    )
    return SampledTensors(*out)


def _graph_tensors(graph: Topology, csc: Sequence[CSC]) -> GraphTensors:
    return GraphTensors(
        indptr=[each.indptr for each in csc],
        indices=[each.indices for each in csc],
        edge_id=[_or_absent(each.edge_id) for each in csc],
        edge_time=[_or_absent(each.time) for each in csc],
        weight_prefix=[_or_absent(each.weight_prefix) for each in csc],
        node_time=[_or_absent(graph.node_time.get(t)) for t in graph.node_types],
        num_nodes=[graph.num_nodes[t] for t in graph.node_types],
        expanded_type=[*graph.expanded_types],
        neighbor_type=[*graph.neighbor_types],
        edge_type_hash=[library.to_signed(each) for each in graph.edge_type_hashes],
        waits=any(each.waits for each in csc),
    )


def _weights(weight: dict[EdgeType, Tensor]) -> dict[str, dict[EdgeType, Tensor]]:
    return {"edge_weight": weight} if weight else {}


def _or_absent(tensor: Tensor | None) -> Tensor:
    return ABSENT if tensor is None else tensor


def _int64(tensor: Tensor | None) -> Tensor:
    return ABSENT if tensor is None else tensor.to(torch.int64).contiguous()
