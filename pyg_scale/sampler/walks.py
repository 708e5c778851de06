"""Random walks along the edges of a graph, with the words of ``torch_cluster.random_walk``."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_scale.ops import keys, library
from pyg_scale.ops.random_walk import Walks
from pyg_scale.ops.random_walk import random_walk as walk_op
from pyg_scale.sampler.base import flag
from pyg_scale.sampler.walk_graph import WalkGraph, as_data, integer, node_ids, walk_graph
from pyg_scale.store.topology import topology_of

# Walking ##################################################################################


def random_walk(
    data: Any,
    start: Tensor | Sequence[int],
    walk_length: int,
    p: float = 1.0,
    q: float = 1.0,
    weight: Tensor | str | None = None,
    num_nodes: int | None = None,
    *,
    seed: int | None = None,
    walk: Tensor | None = None,
    return_edge_id: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Walk from nodes along edges, from source to destination.

    Every edge of a node is equally likely, or is taken in proportion to its weight. With ``p`` or
    ``q`` other than 1, a step also depends on the node before, as in node2vec (Grover and
    Leskovec, KDD 2016, section 3.2.2): with ``u`` the node before and ``v`` the present one, the
    weight of an edge from ``v`` to ``x`` is multiplied by ``1 / p`` if ``x`` is ``u``, by 1 if
    there is an edge from ``u`` to ``x``, and by ``1 / q`` otherwise. A walk stays at a node
    without edges, or whose edges all have weight 0.

    A walk is a function of ``seed``, its number, its start and the graph: of nothing else. It
    is the same for any number of threads, and for any order of the edges unless some join the same
    nodes. Edges grouped by source are kept for as long as ``data`` is in memory, for the next call.

    Args:
        data: ``edge_index`` ``[2, num_edges]``, ``int64`` or ``int32``; a homogeneous ``Data``; or
            ``(FeatureStore, GraphStore)``.
        start: ``int64`` or ``int32`` ``[num_walks]``, the node at which each walk begins.
        walk_length: Number of steps.
        p: The larger, the less often a walk goes back where it came from.
        q: The larger, the more a walk stays near where it came from.
        weight: Weights ``[num_edges]`` of the edges of an ``edge_index``, finite and not negative;
            or the name of an attribute of ``data``.
        num_nodes: Number of nodes, if ``data`` is an ``edge_index``. ``None``: as many as its edges
            have.
        seed: Determines all walks. ``None``: drawn from torch's default generator.
        walk: ``int64`` ``[num_walks]``, the number of each walk. Processes that share walks give
            each its number, and get what one process would. ``None``: its position in ``start``.
        return_edge_id: If True, return edge ids, too.

    Returns:
        ``int64`` ``[num_walks, walk_length + 1]``, the nodes of each walk. With
        ``return_edge_id``, also ``int64`` ``[num_walks, walk_length]``: the position of each edge
        in ``edge_index``, -1 where a walk stayed.

    Raises:
        ValueError: If ``walk_length`` is negative, ``p`` or ``q`` not positive, or if a weight is
            missing, negative or NaN.
        IndexError: If ``start`` or an edge has a node that does not exist.
        TypeError: If an argument is of another type.
        NotImplementedError: If the graph has several node or edge types, or other processes have
            parts of it.
    """
    flag("return_edge_id", return_edge_id)
    key = keys.fold(0, _seed(seed), keys.WALK)
    graph = _graph_of(data, weight, num_nodes)
    found = walk_on(graph, start, walk_length, p, q, walk=walk, key=key, edges=return_edge_id)
    if found.position is None:
        return found.node
    stayed = found.position < 0
    if graph.csc.num_edges == 0:
        return found.node, found.position
    edge_id = graph.csc.original_id(found.position.clamp(min=0).view(-1)).view(stayed.shape)
    return found.node, edge_id.masked_fill(stayed, -1)


def walk_on(
    graph: WalkGraph,
    start: Any,
    walk_length: Any,
    p: float,
    q: float,
    *,
    walk: Tensor | None,
    key: int,
    edges: bool,
) -> Walks:
    """Walk on edges that are grouped already, with a key.

    ``edges`` asks for the positions of edges. The rest is as in :func:`random_walk`.
    """
    length = integer("walk_length", walk_length)
    if length < 0:
        raise ValueError(f"walk_length must not be negative (got {length})")
    for name, value in (("p", p), ("q", q)):
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number (got {value!r})")
    first = node_ids("start", start, graph.num_nodes)
    if walk is not None and (not isinstance(walk, Tensor) or walk.shape != first.shape):
        raise ValueError(
            f"walk must have a number for each of the {first.numel()} walks: a tensor "
            f"{list(first.shape)}, or None for their positions"
        )
    if walk is not None and walk.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"walk must be int64 or int32 (got {walk.dtype})")
    if not library.compiled():
        library.warn_plain_path("random_walk")
    return walk_op(
        graph.csc.indptr,
        graph.csc.indices,
        first,
        length,
        walk=None if walk is None else walk.to("cpu", torch.int64),
        key=key,
        weight_prefix=graph.csc.weight_prefix,
        p=float(p),
        q=float(q),
        is_sorted=True,
        return_position=edges,
    )


# Arguments ################################################################################


def _seed(seed: Any) -> int:
    if seed is None:
        return int(torch.empty((), dtype=torch.int64).random_())
    return integer("seed", seed)


def _graph_of(data: Any, weight: Tensor | str | None, num_nodes: int | None) -> WalkGraph:
    if isinstance(data, HeteroData):
        raise NotImplementedError(
            "random_walk needs one type of nodes and edges: walk on data.to_homogeneous(), or on "
            "the edge_index of one edge type"
        )
    graph, owner = as_data(data, num_nodes)
    name = weight if isinstance(weight, str) else None
    if isinstance(data, Tensor):
        if name is not None:
            raise TypeError(
                f"weight={weight!r}: edge_index has no attributes, give a tensor of weights"
            )
        if weight is not None:
            graph.weight, name = weight, "weight"
    elif weight is not None and name is None:
        raise TypeError(
            f"weight must be the name of an attribute of data (got {type(weight).__name__}); "
            "weights of an edge_index are a tensor"
        )
    try:
        topology = topology_of(graph, direction="backward", weight_attr=name)
    except ValueError as error:
        raise ValueError(str(error).replace("weight_attr", "weight")) from None
    if topology.is_hetero:
        raise NotImplementedError("random_walk needs one type of nodes and edges")
    return walk_graph(topology, owner, ("backward", name))
