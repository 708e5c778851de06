"""Random walks along the edges of a graph, with the words of ``torch_cluster.random_walk``."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.data import Data, HeteroData

from pyg_scale.graph.topology import CSC, Topology
from pyg_scale.ops import keys, library
from pyg_scale.ops.csc import Compressed, build_csc, expand_pointers
from pyg_scale.ops.random_walk import Walks
from pyg_scale.ops.random_walk import random_walk as walk_op
from pyg_scale.sampler.arguments import flag
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


class WalkGraph(NamedTuple):
    """A graph as walks need it.

    Attributes:
        csc: The edges of each node along which walks go, by neighbour and edge id.
        num_nodes: Number of nodes.
    """

    csc: CSC
    num_nodes: int


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
    """:func:`random_walk` on a graph that was made by :func:`walk_graph`, with a key.

    ``edges`` asks for the positions of edges. The errors are those of :func:`random_walk`.
    """
    length = _integer("walk_length", walk_length)
    if length < 0:
        raise ValueError(f"walk_length must not be negative (got {length})")
    for name, value in (("p", p), ("q", q)):
        if not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number (got {value!r})")
    first = _nodes("start", start, graph.num_nodes)
    if walk is not None and (not isinstance(walk, Tensor) or walk.shape != first.shape):
        raise ValueError(
            f"walk must have a number for each of the {first.numel()} walks: a tensor "
            f"{list(first.shape)}, or None for their positions"
        )
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
        p=p,
        q=q,
        is_sorted=True,
        return_position=edges,
    )


# Arguments ################################################################################


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer (got {value!r})") from None


def _seed(seed: Any) -> int:
    if seed is None:
        return int(torch.empty((), dtype=torch.int64).random_())
    return _integer("seed", seed)


def _nodes(name: str, value: Any, num_nodes: int) -> Tensor:
    """Node ids ``int64`` ``[n]`` on the CPU, checked."""
    nodes = torch.as_tensor(value)
    if nodes.numel() == 0:
        nodes = nodes.to(torch.int64)
    if nodes.dim() != 1 or nodes.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"{name} must be node ids, int64 or int32 [n] (got {nodes.dtype} {list(nodes.shape)}; "
            f"of a mask, mask.nonzero().view(-1))"
        )
    nodes = nodes.to("cpu", torch.int64).contiguous()
    wrong = (nodes < 0) | (nodes >= num_nodes)
    if bool(wrong.any()):
        raise IndexError(
            f"{name}: node {int(nodes[wrong][0])} does not exist, there are {num_nodes}: set "
            "num_nodes if nodes without edges are missing"
        )
    return nodes


# The graph ################################################################################


class _Held(NamedTuple):
    topology: Topology
    graph: WalkGraph


_held: MutableMapping[Any, dict[str, _Held]] = weakref.WeakKeyDictionary()
_held_tensors = WeakTensorKeyDictionary()
_lock = threading.RLock()


def _graph_of(data: Any, weight: Tensor | str | None, num_nodes: int | None) -> WalkGraph:
    owner, name = data, weight if isinstance(weight, str) else None
    if isinstance(data, HeteroData):
        raise NotImplementedError(
            "random_walk needs one type of nodes and edges: walk on data.to_homogeneous(), or on "
            "the edge_index of one edge type"
        )
    if isinstance(data, Tensor):
        if data.dim() != 2 or data.size(0) != 2:
            raise ValueError(f"edge_index must be [2, num_edges] (got {list(data.shape)})")
        if isinstance(weight, str):
            raise TypeError(
                f"weight={weight!r}: edge_index has no attributes, give a tensor of weights"
            )
        if num_nodes is None:
            num_nodes = int(data.max()) + 1 if data.numel() else 0
        data = Data(edge_index=data, num_nodes=_integer("num_nodes", num_nodes))
        if weight is not None:
            data.weight, name = weight, "weight"
    elif num_nodes is not None:
        raise ValueError("num_nodes is for an edge_index: set data.num_nodes instead")
    elif weight is not None and not isinstance(weight, str):
        raise TypeError(
            f"weight must be the name of an attribute of data (got {type(weight).__name__}); "
            "weights of an edge_index are a tensor"
        )
    elif isinstance(data, tuple | list) and len(data) == 2:
        owner = data[1]
    try:
        topology = topology_of(data, direction="backward", weight_attr=name)
    except ValueError as error:
        raise ValueError(str(error).replace("weight_attr", "weight")) from None
    if topology.is_hetero or topology.router is not None:
        raise NotImplementedError(
            "random_walk needs a graph of one type of nodes and edges that this process has as a "
            "whole"
        )
    return walk_graph(topology, owner, str(name))


def walk_graph(topology: Topology, owner: Any, name: str) -> WalkGraph:
    """The edges along which walks go; made once for as long as ``owner`` is in memory.

    Args:
        topology: A homogeneous graph. Walks go from a node to the neighbours that its CSC lists.
        owner: The object from which the topology was made; the topology must not refer to it.
        name: The name under which it is kept, such as that of the weights.
    """
    held: Any = _held_tensors if isinstance(owner, Tensor) else _held
    with _lock:
        try:
            known = held.setdefault(owner, {})
        except TypeError:  # some stores have no hash
            known = {}
        before = known.get(name)
        if before is None or before.topology is not topology:
            graph = WalkGraph(_sorted(topology.csc[None]), topology.num_nodes[None])
            before = known[name] = _Held(topology, graph)
        return before.graph


def _sorted(csc: CSC) -> CSC:
    """The same edges, those of a node by neighbour and edge id."""
    num_nodes = csc.indptr.numel() - 1
    descends = csc.indices[1:] < csc.indices[:-1]
    starts = csc.indptr[1:-1]
    descends[starts[(starts > 0) & (starts < csc.num_edges)] - 1] = False
    indices = csc.indices.contiguous()
    if not bool(descends.any()):
        edge_id = None if csc.edge_id is None else csc.edge_id.contiguous()
        return CSC(csc.indptr, indices, edge_id, weight_prefix=csc.weight_prefix)
    node = expand_pointers(csc.indptr, csc.num_edges)
    by_neighbor = build_csc(indices, node, num_nodes, num_nodes)  # keeps the order of ids
    neighbor = expand_pointers(by_neighbor.indptr, csc.num_edges)
    by_node = build_csc(by_neighbor.indices, neighbor, num_nodes, num_nodes)
    position = _ids(by_node)
    if by_neighbor.edge_id is not None:
        position = by_neighbor.edge_id[position]
    position = position.to(torch.int64)
    prefix = csc.weight_prefix
    if prefix is not None:  # weights relative to the largest of the node stay what they are
        own = prefix - torch.cat([prefix.new_zeros(1), prefix])[:-1]
        first = csc.indptr[:-1][csc.indptr.diff() > 0]
        own[first] = prefix[first]
        total = own[position].cumsum(0)
        before = torch.cat([total.new_zeros(1), total])[csc.indptr[:-1]]
        prefix = total - before.repeat_interleave(csc.indptr.diff())
    edge_id = csc.original_id(position)
    if csc.num_edges < 2**31:
        edge_id = edge_id.to(torch.int32)
    return CSC(csc.indptr, by_node.indices.contiguous(), edge_id, weight_prefix=prefix)


def _ids(csc: Compressed) -> Tensor:
    return torch.arange(csc.indices.numel()) if csc.edge_id is None else csc.edge_id
