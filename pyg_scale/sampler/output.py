"""The output of a sampler: one sampled subgraph, by types or as PyG's ``SamplerOutput``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch_geometric.sampler as pyg
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, NodeType


@dataclass
class Sample:
    """One sampled subgraph, per node type and edge type (``None`` in a homogeneous graph).

    Attributes:
        node: Original node ids, the seeds first and in order (repeats kept), then nodes in
            the order in which they were first reached.
        row: Position in ``node`` of the neighbour of each edge.
        col: Position in ``node`` of the expanded node of each edge; never decreases in a
            directional sample.
        edge: Original edge id of each edge, ``int64``; ``None`` where an edge stands for
            two of different types.
        batch: Position of the seed to which each node belongs, if disjoint.
        num_sampled_nodes: New nodes of each hop, the seeds first (``num_hops + 1`` numbers).
        num_sampled_edges: Edges of each hop (``num_hops`` numbers).
        colptr: ``int64``; the edges into node ``i`` are ``colptr[i]`` to ``colptr[i+1] - 1``.
            Covers the nodes that were expanded; nodes beyond it have no edges.
        node_attrs: Extra tensors per node, by name, put on the batch.
        edge_attrs: Extra tensors per edge, by name (such as importance weights as
            ``edge_weight``), put on the batch.
    """

    node: dict[NodeType, Tensor]
    row: dict[EdgeType, Tensor]
    col: dict[EdgeType, Tensor]
    edge: dict[EdgeType, Tensor | None]
    batch: dict[NodeType, Tensor] | None = None
    num_sampled_nodes: dict[NodeType, list[int]] | None = None
    num_sampled_edges: dict[EdgeType, list[int]] | None = None
    colptr: dict[EdgeType, Tensor] | None = None
    node_attrs: dict[str, dict[NodeType, Tensor]] = field(default_factory=dict)
    edge_attrs: dict[str, dict[EdgeType, Tensor]] = field(default_factory=dict)

    def to_output(self) -> SamplerOutput | HeteroSamplerOutput:
        """The same as PyG's ``SamplerOutput`` or ``HeteroSamplerOutput``."""
        if None not in self.node:
            return HeteroSamplerOutput(**vars(self))
        return SamplerOutput(**{k: _single(v) for k, v in vars(self).items()})


def _single(value: Any) -> Any:
    """The entry of the one type of a homogeneous graph, also inside named extras."""
    if not isinstance(value, dict):
        return value
    if None in value:
        return value[None]
    return {name: entry[None] for name, entry in value.items()}


@dataclass
class SamplerOutput(pyg.SamplerOutput):
    """PyG's ``SamplerOutput`` with destination pointers and named extra tensors."""

    colptr: Tensor | None = field(default=None, repr=False)
    node_attrs: dict[str, Tensor] = field(default_factory=dict, repr=False)
    edge_attrs: dict[str, Tensor] = field(default_factory=dict, repr=False)


@dataclass
class HeteroSamplerOutput(pyg.HeteroSamplerOutput):
    """PyG's ``HeteroSamplerOutput`` with destination pointers and named extra tensors."""

    colptr: dict[EdgeType, Tensor] | None = field(default=None, repr=False)
    node_attrs: dict[str, dict[NodeType, Tensor]] = field(default_factory=dict, repr=False)
    edge_attrs: dict[str, dict[EdgeType, Tensor]] = field(default_factory=dict, repr=False)
