"""The edges along which walks and PageRank go, grouped once for each graph."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.data import Data

from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology
from pyg_scale.ops.csc import Compressed, build_csc, expand_pointers

# Arguments ################################################################################


def integer(name: str, value: Any) -> int:
    """An argument that must be an integer.

    Raises:
        TypeError: If it is not; names it.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer (got {value!r})") from None


def node_ids(name: str, value: Any, num_nodes: int) -> Tensor:
    """An argument that must be node ids, as ``int64`` ``[n]`` on the CPU.

    Raises:
        TypeError: If they are of another dtype or shape.
        IndexError: If one is not below ``num_nodes``.
    """
    try:
        nodes = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be node ids, int64 or int32 [n] (got {value!r})") from None
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


def as_data(data: Any, num_nodes: Any) -> tuple[Any, Any]:
    """A graph as :func:`~pyg_scale.store.topology.topology_of` takes it, and who owns its edges.

    Args:
        data: ``edge_index`` ``[2, num_edges]``, or what ``topology_of`` takes.
        num_nodes: Number of nodes of an ``edge_index``; ``None``: as many as its edges have.

    Returns:
        ``data``, with an ``edge_index`` made into ``Data``, and the object with whose end nobody
        needs its edges any more.

    Raises:
        ValueError: If ``edge_index`` is of another shape, or ``num_nodes`` is given for ``data``.
        TypeError: If ``num_nodes`` is not an integer.
    """
    if not isinstance(data, Tensor):
        if num_nodes is not None:
            raise ValueError("num_nodes is for an edge_index: set data.num_nodes instead")
        return data, data[1] if isinstance(data, tuple | list) and len(data) == 2 else data
    if data.dim() != 2 or data.size(0) != 2:
        raise ValueError(f"edge_index must be [2, num_edges] (got {list(data.shape)})")
    if num_nodes is None:
        num_nodes = _least_size(data)
    return Data(edge_index=data, num_nodes=integer("num_nodes", num_nodes)), data


_sizes = WeakTensorKeyDictionary()


def _least_size(edge_index: Tensor) -> int:
    """The smallest number of nodes for some edges, looked up once while they do not change."""
    version = -1 if edge_index.is_inference() else edge_index._version
    before, size = _sizes.get(edge_index, (-1, 0))
    if version < 0 or before != version:
        size = int(edge_index.max()) + 1 if edge_index.numel() else 0
        _sizes[edge_index] = (version, size)
    return size


# Grouping #################################################################################


class WalkGraph(NamedTuple):
    """A graph as walks and PageRank need it.

    Attributes:
        csc: The edges of each node along which walks go, by neighbour and edge id. The nodes of
            several types are numbered one after the other.
        num_nodes: Number of nodes, of all types together.
        offset: The number of the first node of each type.
    """

    csc: CSC
    num_nodes: int
    offset: dict[NodeType, int]


class _Held(NamedTuple):
    topology: Topology
    graph: WalkGraph


_held: dict[int, tuple[weakref.ref, dict[Any, _Held]]] = {}  # by id: Data has no hash
_held_tensors = WeakTensorKeyDictionary()
_lock = threading.RLock()


def walk_graph(
    topology: Topology, owner: Any, name: Any, edge_types: Sequence[EdgeType] | None = None
) -> WalkGraph:
    """The edges along which walks go; made once for as long as ``owner`` is in memory.

    Args:
        topology: A graph. Walks go from a node to the neighbours that its CSC lists.
        owner: The object from which the topology was made; the topology must not refer to it.
        name: The options of the topology, under which the graph is kept.
        edge_types: Those along which walks go; ``None``: all.

    Raises:
        NotImplementedError: If other processes have parts of the graph.
    """
    if topology.router is not None:
        raise NotImplementedError(
            "walks need a graph that this process has as a whole: one part, or all of them opened "
            "as one"
        )
    chosen = topology.edge_types if edge_types is None else tuple(edge_types)
    with _lock:
        known = _kept_for(owner)
        before = known.get((name, chosen))
        if before is None or before.topology is not topology:
            before = known[name, chosen] = _Held(topology, _joined(topology, chosen))
        return before.graph


def _kept_for(owner: Any) -> dict[Any, _Held]:
    """The graphs that are kept for as long as an object is in memory."""
    if isinstance(owner, Tensor):
        return _held_tensors.setdefault(owner, {})
    number = id(owner)
    before = _held.get(number)
    if before is not None and before[0]() is owner:
        return before[1]

    def forget(reference: weakref.ref) -> None:
        if number in _held and _held[number][0] is reference:
            del _held[number]

    try:
        _held[number] = (weakref.ref(owner, forget), {})
    except TypeError:  # of an object without weak references nothing can be kept
        return {}
    return _held[number][1]


def _joined(topology: Topology, edge_types: Sequence[EdgeType]) -> WalkGraph:
    """The edges of all types as those of one."""
    offset, size = {}, 0
    for node_type in topology.node_types:
        offset[node_type] = size
        size += topology.num_nodes[node_type]
    if not topology.is_hetero:
        return WalkGraph(_sorted(topology.csc[None]), size, offset)
    node, neighbor = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for edge_type in edge_types:
        csc = topology.csc[edge_type]
        source = expand_pointers(csc.indptr, csc.num_edges).to(torch.int64)
        node.append(source + offset[topology.expanded_type(edge_type)])
        neighbor.append(csc.indices.to(torch.int64) + offset[topology.neighbor_type(edge_type)])
    joined = build_csc(torch.cat(node), torch.cat(neighbor), size, size)
    return WalkGraph(_sorted(CSC(joined.indptr, joined.indices, joined.edge_id)), size, offset)


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
