"""Neighbourhoods of a fixed size: the nodes of the largest personalised PageRank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_scale.graph.topology import EdgeType, Topology
from pyg_scale.ops import library
from pyg_scale.ops.ppr import ppr as ppr_op
from pyg_scale.sampler.base import one_of
from pyg_scale.sampler.walk_graph import as_data, integer, node_ids, walk_graph
from pyg_scale.store.topology import topology_of


class Ranked(NamedTuple):
    """Nodes of each seed by descending score, equal ones by id.

    Attributes:
        node: ``int64`` ``[num_seeds, k]``, -1 where there are no more nodes with a score.
        score: ``float64`` ``[num_seeds, k]``, 0 there.
    """

    node: Tensor
    score: Tensor


def ppr(
    data: Any,
    seed: Any,
    k: int,
    alpha: float = 0.15,
    eps: float = 1e-4,
    num_nodes: int | None = None,
    *,
    sample_direction: str = "forward",
    edge_types: Sequence[tuple[str, str, str]] | None = None,
) -> Ranked | dict[str, Ranked]:
    """The ``k`` nodes of the largest approximate personalised PageRank for each seed.

    The score of a node is about the probability that a walk from the seed ends there, if it ends at
    each step with the probability ``alpha``. It is computed by forward push (Andersen, Chung,
    Lang: "Local graph partitioning using PageRank vectors", FOCS 2006), which looks at no more than
    about ``1 / (alpha * eps)`` edges, however large the graph is. It is never too large. Where all
    edges go both ways, it is too small by less than ``eps`` times the degree of the node, and in
    every graph all of a seed's together by less than ``eps`` times the degrees of all nodes.
    :mod:`pyg_scale.ops.ppr` has the method to the bit. The seed is usually the first of its nodes.

    As samplers of neighbours do, it goes along in-edges, from destination to source. All edges of
    a node are equally likely, those of all types together. A walk ends at a node without edges:
    an isolated seed has one node, itself, of score 1. Nothing is drawn: the result depends on the
    graph alone, and not on the order of its edges. Grouped edges are kept for as long as ``data``
    is in memory.

    Args:
        data: ``edge_index`` ``[2, num_edges]``, ``Data``, ``HeteroData`` or
            ``(FeatureStore, GraphStore)``.
        seed: ``int64`` or ``int32`` ``[num_seeds]``; if there are node types, a pair of type and
            ids, as ``input_nodes`` of loaders.
        k: Number of nodes for each seed, and for each node type.
        alpha: The probability that a walk ends at a step: at least ``2**-16``, less than 1.
        eps: How exact the scores are: from ``2**-50`` to less than 1.
        num_nodes: Number of nodes, if ``data`` is an ``edge_index``. ``None``: as many as its edges
            have.
        sample_direction: ``"forward"`` for in-edges, ``"backward"`` for out-edges.
        edge_types: Edge types along which walks go. ``None``: all.

    Returns:
        Nodes and scores; by node type if there are several, each with its own ``k``.

    Raises:
        ValueError: If ``alpha``, ``eps`` or ``k`` is out of range, or there is no such edge type.
        IndexError: If a seed or an edge has a node that does not exist.
        TypeError: If an argument is of another type.
        NotImplementedError: If other processes have parts of the graph.
    """
    number = integer("k", k)
    check_numbers(alpha, eps)
    one_of("sample_direction", sample_direction, ("forward", "backward"))
    given, owner = as_data(data, num_nodes)
    topology = topology_of(given, direction=sample_direction)
    graph = walk_graph(topology, owner, sample_direction, _edge_types(topology, edge_types))
    kind, ids = _typed(topology, seed)
    nodes = node_ids("seed", ids, topology.num_nodes[kind]) + graph.offset[kind]
    if not library.compiled():
        library.warn_plain_path("ppr")
    found = ppr_op(
        graph.csc.indptr,
        graph.csc.indices,
        nodes,
        number,
        alpha=alpha,
        eps=eps,
        bounds=torch.tensor([*graph.offset.values(), graph.num_nodes]),
    )
    if not topology.is_hetero:
        return Ranked(found.node[:, 0], found.score[:, 0])
    out = {}
    for i, (node_type, first) in enumerate(graph.offset.items()):
        node = found.node[:, i]
        out[str(node_type)] = Ranked(torch.where(node < 0, node, node - first), found.score[:, i])
    return out


def check_numbers(alpha: Any, eps: Any) -> None:
    """Refuse what is no number; the op refuses what is out of range."""
    for name, value in (("alpha", alpha), ("eps", eps)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number (got {value!r})")


def _edge_types(topology: Topology, edge_types: Any) -> list[EdgeType]:
    """The chosen edge types in the order of the graph's metadata."""
    if edge_types is None:
        return list(topology.edge_types)
    if not topology.is_hetero:
        raise ValueError("edge_types is for graphs that have them: leave it out")
    wanted = [tuple(edge_type) for edge_type in edge_types]
    unknown = [edge_type for edge_type in wanted if edge_type not in topology.edge_types]
    if unknown:
        raise ValueError(
            f"edge_types has {unknown[0]}, but the edge types are "
            f"{', '.join(map(str, topology.edge_types))}"
        )
    return [edge_type for edge_type in topology.edge_types if edge_type in wanted]


def _typed(topology: Topology, seed: Any) -> tuple[Any, Any]:
    """The node type of the seeds, and their ids."""
    if not topology.is_hetero:
        return None, seed
    if not (isinstance(seed, tuple | list) and len(seed) == 2 and isinstance(seed[0], str)):
        raise TypeError("seed must be a pair of node type and ids, as the graph has node types")
    if seed[0] not in topology.node_types:
        raise ValueError(
            f"seed is of node type {seed[0]!r}, but the node types are "
            f"{', '.join(map(repr, topology.node_types))}"
        )
    return seed[0], seed[1]
