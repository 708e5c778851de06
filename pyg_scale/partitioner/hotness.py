"""The hotness of nodes: the probability that sampling neighbours for a batch reaches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.graph.topology import CSC, NodeType, Topology
from pyg_scale.ops import keys
from pyg_scale.partitioner.remote import batches, sampler_of
from pyg_scale.partitioner.rows import pieces
from pyg_scale.partitioner.whole import whole_topology

METHODS = ("auto", "propagate", "sample")
_EDGES = 1 << 22


def sample_prob(
    data: Any,
    seeds: Tensor | Mapping[NodeType, Tensor],
    num_neighbors: Sequence[int],
    *,
    batch_size: int | None = None,
    method: str = "auto",
    num_batches: int = 1000,
    seed: int = 0,
) -> dict[NodeType, Tensor]:
    """Estimate the probability of every node to be in the subgraph sampled for a batch.

    ``"propagate"`` follows probabilities hop by hop: an expanded node takes each of its ``d``
    in-edges with probability ``min(1, k / d)``, and a node is missed if all edges that lead to it
    are. This is exact if every node can be reached on only one path (trees of in-edges), or with
    certainty. Otherwise it assumes independence of dependent events, and usually gives slightly too
    large values. ``"sample"`` counts the occurrences of nodes in sampled batches; its standard
    error is ``sqrt(p (1 - p) / num_batches)``. ``"auto"`` propagates if that is exact and samples
    otherwise.

    Propagation is as for the cache of "GNNLab: A Factored System for Sample-based GNN Training over
    GPUs" (Yang et al., EuroSys 2022) and of "Communication-Efficient Graph Neural Networks with
    Probabilistic Neighborhood Expansion Analysis and Caching" (Kaler et al., MLSys 2023).

    Args:
        data: A :class:`~pyg_scale.graph.topology.Topology`, ``Data``, ``HeteroData``, or a graph
            directory of one part or its path. Times and weights of edges are ignored.
        seeds: The training nodes ``[n]``, distinct, by node type if there are types.
        num_neighbors: Neighbours per hop, for all edge types; -1 for all.
        batch_size: Seeds of a batch, drawn from ``seeds`` of each type without replacement.
            ``None``: all seeds are one batch.
        method: ``"auto"``, ``"propagate"`` or ``"sample"``.
        num_batches: Number of batches to sample.
        seed: Seed of the batches.

    Returns:
        ``float64`` ``[num_nodes]`` by node type (``None`` in a homogeneous graph).

    Raises:
        ValueError: If an argument is out of range.
        IndexError: If a seed is not a node.
        TypeError: If an argument has a wrong type.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))} (got {method!r})")
    for name, value in (("batch_size", batch_size), ("num_batches", num_batches)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1 (got {value})")
    graph = whole_topology(data)
    by_type = seeds if isinstance(seeds, Mapping) else {graph.node_types[0]: seeds}
    if not isinstance(seeds, Mapping) and graph.is_hetero:
        raise TypeError("the graph has several node types: give seeds={'paper': ids, ...}")
    chosen: dict[NodeType, Tensor] = {}
    for node_type, node in by_type.items():
        _check_seeds(node, node_type, graph)
        chosen[node_type] = node.to(torch.int64)
    sampler_of(graph, num_neighbors)  # refuses anything but a list of numbers
    hops = [int(k) for k in num_neighbors]
    if method != "sample":
        spread = _Spread(graph, chosen, batch_size)
        for k in hops:
            spread.hop(k)
        if method == "propagate" or spread.is_exact:
            return {name: torch.from_numpy(1 - missed) for name, missed in spread.missed.items()}
    return _sampled(graph, chosen, hops, batch_size, num_batches, seed)


def _check_seeds(node: Tensor, node_type: NodeType, graph: Topology) -> None:
    if node_type not in graph.num_nodes:
        known = ", ".join(map(repr, graph.node_types))
        raise ValueError(f"seeds are of the unknown node type {node_type!r}, the graph has {known}")
    if node.dtype not in (torch.int64, torch.int32) or node.dim() != 1:
        raise TypeError(
            "seeds must be a one-dimensional int64 or int32 tensor "
            f"(got {node.dtype} of shape {list(node.shape)})"
        )
    wrong = node[(node < 0) | (node >= graph.num_nodes[node_type])]
    if wrong.numel():
        raise IndexError(
            f"seed {int(wrong[0])} is out of range: there are {graph.num_nodes[node_type]} nodes"
        )
    if node.unique().numel() < node.numel():
        raise ValueError("seeds must be distinct")


class _Spread:
    """Probabilities after a number of hops.

    Attributes:
        missed: Probability that a node is not in the batch.
        new: Probability that it was added by the last hop.
        hits: Number of paths on which it can be reached, up to 2.
        certain: True if some hop is certain to add it, unless an earlier one did.
    """

    def __init__(
        self, graph: Topology, seeds: Mapping[NodeType, Tensor], batch_size: int | None
    ) -> None:
        self.graph = graph
        self.missed, self.new, self.hits, self.certain = {}, {}, {}, {}
        for name, size in graph.num_nodes.items():
            new = np.zeros(size)
            if name in seeds:
                count = seeds[name].numel()
                drawn = count if batch_size is None else min(batch_size, count)
                new[seeds[name].numpy()] = drawn / max(1, count)
            self.new[name], self.missed[name] = new, 1 - new
            self.hits[name], self.certain[name] = (new > 0).astype(np.uint8), new == 1

    @property
    def is_exact(self) -> bool:
        """True if no node can be reached on two paths, unless it is certain to be reached."""
        return not any(((hits > 1) & ~self.certain[n]).any() for n, hits in self.hits.items())

    def hop(self, k: int) -> None:
        """Expand what the last hop added, each node along ``k`` in-edges of each type."""
        missed = {name: np.ones_like(values) for name, values in self.missed.items()}
        for edge_type, csc in self.graph.csc.items():
            expanded = self.new[self.graph.expanded_type(edge_type)]
            neighbor = self.graph.neighbor_type(edge_type)
            for taken, node in _taken(csc, expanded, k):
                # Edges are processed one after the other, so the results do not depend on the
                # pieces.
                np.multiply.at(missed[neighbor], node, 1 - taken)
                hits = np.bincount(node, minlength=0)
                before = self.hits[neighbor][: hits.size]
                self.hits[neighbor][: hits.size] = np.minimum(2, before + np.minimum(hits, 2))
        for name, factor in missed.items():
            after = self.missed[name] * factor
            self.new[name] = self.missed[name] - after
            self.certain[name] |= self.new[name] == 1
            self.missed[name] = after


def _taken(csc: CSC, expanded: np.ndarray, k: int) -> Any:
    """``(probability that an edge is taken, neighbour)`` for edges that can be taken."""
    nodes = csc.indptr.numel() - 1
    for first in range(0, nodes, _EDGES):
        pointers = csc.indptr[first : first + _EDGES + 1]
        degree = pointers.diff().numpy()
        share = np.ones(degree.size) if k < 0 else np.minimum(1, k / np.maximum(1, degree))
        share = share * expanded[first : first + degree.size]
        if not share.any():
            continue
        for low, counts, begin, end in pieces(pointers, _EDGES):
            taken = np.repeat(share[low : low + counts.numel()], counts.numpy())
            node = csc.indices[begin:end].numpy()
            mine = taken > 0
            yield taken[mine], node[mine]


def _sampled(
    graph: Topology,
    seeds: Mapping[NodeType, Tensor],
    hops: Sequence[int],
    batch_size: int | None,
    num_batches: int,
    seed: int,
) -> dict[NodeType, Tensor]:
    """The frequency of nodes in batches of the native sampler."""
    sampler = sampler_of(graph, hops)
    key = keys.fold(0, seed)
    streams = {
        name: batches(
            node,
            min(batch_size or node.numel(), node.numel()),
            num_batches,
            keys.fold(key, number),
            drop_last=True,
        )
        for number, (name, node) in enumerate(seeds.items())
        if node.numel()
    }
    count = {name: torch.zeros(size, dtype=torch.int64) for name, size in graph.num_nodes.items()}
    for index in tqdm(range(num_batches), desc="sample_prob", disable=None, delay=2):
        batch = {name: next(stream) for name, stream in streams.items()}
        sample = sampler.sample(batch, None, keys.batch_key(key, 0, index))
        for name, node in sample.node.items():
            count[name][node.long()] += 1
    return {name: each.to(torch.float64) / num_batches for name, each in count.items()}
