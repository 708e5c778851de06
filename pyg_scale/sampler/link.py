"""Sampling around links: their endpoints, and those of negatives, are the seeds.

What comes out is what PyG's link loaders expect of ``sample_from_edges``. Differences, all of
them where PyG's answer depends on luck or is wrong:

* A negative belongs to the same seed link whatever the options: number ``p`` to link
  ``p mod num_positives``. (In PyG it is ``p // amount`` if not disjoint.)
* With ``disjoint=True`` and a fractional ``amount``, ``batch`` is the seed link of every node. (In
  PyG, nodes of destinations get the number of another link.)
* Node times without times of the links limit negatives as well. (In PyG, an assertion fails.)
* A batch without links works.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput

from pyg_scale.graph.topology import EdgeType, NodeType, Topology
from pyg_scale.sampler.negative import NegativeSampling, sample_negatives
from pyg_scale.store.device.target import send

if TYPE_CHECKING:
    from pyg_scale.sampler.base import HeteroSamplerOutput, NeighborSampler, SamplerOutput


def sample_links(
    sampler: NeighborSampler, inputs: EdgeSamplerInput, neg_sampling: Any, key: int
) -> SamplerOutput | HeteroSamplerOutput:
    """Sample the neighbourhoods of the endpoints of links.

    If not disjoint, the seeds of a node type are its endpoints once each, sorted; if disjoint,
    all endpoints in order: sources, those of negatives, destinations, those of negatives.
    ``P`` links with ``N`` negatives give the ``metadata``

    * without negatives, and in mode ``"binary"``: ``input_id`` ``[P]``, ``edge_label_index``
      ``[2, P + N]`` (rows of the batch), ``edge_label`` ``[P + N, ...]`` (0 for negatives, the
      given labels or 1.0 for links; ``None`` with neither labels nor negatives), times
      ``[P + N]`` or ``None``;
    * in mode ``"triplet"``: ``input_id`` ``[P]``, ``src_index`` ``[P]``, ``dst_pos_index``
      ``[P]``, ``dst_neg_index`` ``[P]`` or ``[P, amount]``, times ``[P]`` or ``None``.

    Args:
        sampler: A sampler that knows its graph.
        inputs: The links, with labels and times.
        neg_sampling: PyG's or our ``NegativeSampling``, or what it is made from, or ``None``.
        key: The key of the batch.

    Raises:
        IndexError: If an endpoint is not a node.
        NotImplementedError: If the sampler does not declare that it supports links.
        TypeError: If endpoints are not integers.
        ValueError: If labels or times do not go with the links, or nothing can be a negative.
    """
    from pyg_scale.sampler.base import check_nodes
    from pyg_scale.sampler.capabilities import CAPABILITIES

    if "links" not in sampler.supports:
        raise NotImplementedError(
            f"{type(sampler).__name__} does not support {CAPABILITIES['links']}; "
            f"neighbor_sampler='native' does"
        )
    graph, edge_type = sampler.topology, inputs.input_type
    if graph is None:
        raise ValueError(f"{type(sampler).__name__} has no graph: pass data=")
    source, destination = _end_types(graph, edge_type)
    check_nodes(inputs.row, graph, source, "edge_label_index[0]")
    check_nodes(inputs.col, graph, destination, "edge_label_index[1]")
    neg_sampling = NegativeSampling.cast(neg_sampling)
    _check_inputs(inputs, neg_sampling)

    src, dst = inputs.row.to(torch.int64), inputs.col.to(torch.int64)
    src_time = dst_time = time = inputs.time
    label = inputs.label
    num_links, num_negatives = src.numel(), 0
    if neg_sampling is not None:
        limit = None if time is None else graph.to_time(time)
        src_neg, dst_neg = sample_negatives(neg_sampling, graph, edge_type, src, dst, limit, key)
        num_negatives = dst_neg.numel()
        dst, dst_time = torch.cat([dst, dst_neg]), _repeat(time, num_links + num_negatives)
        if src_neg is not None:
            src, src_time = torch.cat([src, src_neg]), dst_time
            label = torch.ones(num_links) if label is None else label
            label = torch.cat([label, label.new_zeros((num_negatives, *label.shape[1:]))])

    seeds = _Seeds(sampler, source, destination, src, dst)
    out = sampler.sample_checked(seeds.node, seeds.times(src_time, dst_time), key).to_output()
    if sampler.disjoint:
        _name_links(out, graph, seeds, num_links)
    if neg_sampling is not None and neg_sampling.is_triplet():
        positive, negative = seeds.dst_index[:num_links], seeds.dst_index[num_links:]
        if neg_sampling.amount > 1:
            negative = (
                negative.view(-1, num_links).t().contiguous()
                if num_links
                else negative.view(0, neg_sampling.amount)
            )
        out.metadata = (inputs.input_id, seeds.src_index, positive, negative, src_time)
    else:
        index = torch.stack([seeds.src_index, seeds.dst_index])
        out.metadata = (inputs.input_id, index, label, src_time)
    return out


class _Seeds:
    """The endpoints of links as seeds, and the rows that they get in the batch."""

    def __init__(
        self,
        sampler: NeighborSampler,
        source: NodeType,
        destination: NodeType,
        src: Tensor,
        dst: Tensor,
    ):
        self.ends = (source, destination)
        self.sizes = (src.numel(), dst.numel())
        self.node: dict[NodeType, Tensor]
        if source == destination:
            node, index = _rows(torch.cat([src, dst]), sampler.disjoint)
            self.node = {source: node}
            self.src_index, self.dst_index = index.split(self.sizes)
        else:
            src, self.src_index = _rows(src, sampler.disjoint)
            dst, self.dst_index = _rows(dst, sampler.disjoint)
            self.node = {source: src, destination: dst}

    def times(self, src: Tensor | None, dst: Tensor | None) -> dict[NodeType, Tensor] | None:
        """The times of the seeds; links have times only if the graph is temporal (disjoint)."""
        return None if src is None or dst is None else self._by_type(src, dst)

    def links(self, num_links: int) -> dict[NodeType, Tensor]:
        """The link to which each seed belongs, if disjoint."""
        src, dst = (torch.arange(size) % max(num_links, 1) for size in self.sizes)
        return self._by_type(src, dst)

    def _by_type(self, src: Tensor, dst: Tensor) -> dict[NodeType, Tensor]:
        source, destination = self.ends
        if source == destination:
            return {source: torch.cat([src, dst])}
        return {source: src, destination: dst}


def _rows(node: Tensor, disjoint: bool) -> tuple[Tensor, Tensor]:
    """Seeds, and the row of each of ``node`` among them."""
    if disjoint:
        return node, torch.arange(node.numel())
    return torch.unique(node, return_inverse=True)


def _name_links(
    out: SamplerOutput | HeteroSamplerOutput, graph: Topology, seeds: _Seeds, num_links: int
) -> None:
    """Put links in the place of seeds in ``batch``; seeds are numbered type after type."""
    links = seeds.links(num_links)
    link = torch.cat([links[node_type] for node_type in graph.node_types if node_type in links])
    if isinstance(out.batch, dict):
        out.batch = {t: send(link, batch.device)[batch] for t, batch in out.batch.items()}
    elif out.batch is not None:
        out.batch = send(link, out.batch.device)[out.batch]


def _repeat(time: Tensor | None, size: int) -> Tensor | None:
    """The times of the links again and again: negative ``p`` has that of link ``p mod P``."""
    if time is None or time.numel() == 0:
        return time
    return time.repeat(math.ceil(size / time.numel()))[:size]


def _end_types(graph: Topology, edge_type: EdgeType) -> tuple[NodeType, NodeType]:
    if graph.is_hetero != (edge_type is not None):
        raise ValueError(
            f"edge_label_index: links of type {edge_type} do not go with a "
            f"{'heterogeneous' if graph.is_hetero else 'homogeneous'} graph"
        )
    return (None, None) if edge_type is None else (edge_type[0], edge_type[2])


def _check_inputs(inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None) -> None:
    num_links = inputs.row.numel()
    for name, value in (
        ("edge_label_index[1]", inputs.col),
        ("edge_label", inputs.label),
        ("edge_label_time", inputs.time),
        ("input_id", inputs.input_id),
    ):
        if value is not None and value.size(0) != num_links:
            raise ValueError(
                f"{name} must have one entry per link, {num_links} (got {value.size(0)})"
            )
    if neg_sampling is not None and neg_sampling.is_triplet() and inputs.label is not None:
        raise ValueError("edge_label must be None in mode 'triplet': its roles say what is a link")
