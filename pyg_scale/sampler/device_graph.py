"""A graph as a sampler on a device sees it: there as far as it fits, the rest on the host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pyg_scale.errors import DeviceError
from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology
from pyg_scale.ops.mapped_rows import MappedRows, map_numbers
from pyg_scale.store.device.placement import allotted
from pyg_scale.store.device.target import read_here, send_large
from pyg_scale.store.directory.page_faults import usable_memory

_NONE = 2**31 - 1
_WARP = 32  # lanes, which search together

Part = tuple[str, EdgeType | NodeType]
"""A tensor of a graph: the name of an attribute of :class:`.CSC` and the edge type, or
``"node_time"`` and the node type."""


class DeviceGraph:
    """The in-edges of a graph with times and weights, and a row for each node, on a device.

    What is not on the device lies on the host, where kernels read it over the bus
    (:mod:`pyg_scale.ops.mapped_rows`). Its pages stay locked as long as this object lives, and
    until the device has done what it was asked for.

    Args:
        topology: All of it must be in this process.
        device: The device.
        rows: If True, there is a row for each node.
        there: The parts on the device beside pointers and rows, as :func:`place` chooses them;
            ``None``: all.

    Attributes:
        csc: The in-edges of each edge type; what is on the device is contiguous.
        node_time: ``int64`` (sortable) ``[num_nodes]`` of the node types that have a time.
        row_of: With ``rows``, of each node type ``int32`` ``[num_nodes + 1]``, the same large
            number for every node that is not in the batch. The last entry is of no node: what is
            written there is not read.
        num_bytes: Bytes on the device.
        host_bytes: Bytes that it reads from the host.

    Raises:
        DeviceError: If a part cannot be mapped for the device.
    """

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        *,
        rows: bool = True,
        there: Collection[Part] | None = None,
    ) -> None:
        self.device = device
        self.num_bytes = self.host_bytes = 0
        self._process = os.getpid()
        self._there = there
        self._pages: list[MappedRows] = []
        self.csc: dict[EdgeType, CSC] = {
            edge_type: CSC(
                self._send(csc.indptr),
                self._put(("indices", edge_type), csc.indices),
                self._maybe(("edge_id", edge_type), csc.edge_id),
                self._maybe(("time", edge_type), csc.time),
                self._maybe(("weight_prefix", edge_type), csc.weight_prefix),
            )
            for edge_type, csc in topology.csc.items()
        }
        self.node_time: dict[NodeType, Tensor] = {
            node_type: self._put(("node_time", node_type), time)
            for node_type, time in topology.node_time.items()
        }
        self.row_of: dict[NodeType, Tensor] = {
            node_type: torch.full((count + 1,), _NONE, dtype=torch.int32, device=device)
            for node_type, count in topology.num_nodes.items()
            if rows
        }
        self.num_bytes += sum(allotted(each.nbytes) for each in self.row_of.values())
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # any stream may read from now on

    @property
    def is_here(self) -> bool:
        """False in a fork of the process that locked pages, as these are locked for that alone."""
        return not self._pages or self._process == os.getpid()

    def forget(self, node: Mapping[NodeType, Tensor]) -> None:
        """The nodes of the batch are in no batch any more.

        Nobody waits for it, so the rows outlive this object until it is done.
        """
        read_here(*self.row_of.values())
        for node_type, row_of in self.row_of.items():
            if node[node_type].numel():
                row_of[node[node_type].to(torch.int64)] = _NONE

    def _send(self, tensor: Tensor) -> Tensor:
        self.num_bytes += allotted(_size(tensor))
        return send_large(tensor, self.device)

    def _put(self, part: Part, tensor: Tensor) -> Tensor:
        if self._there is None or part in self._there or not tensor.numel():
            return self._send(tensor)
        self.host_bytes += _size(tensor)
        try:
            here, pages = map_numbers(tensor, self.device, usable_memory() // 2)
        except DeviceError as error:
            name, of = part
            of_type = "" if of is None else f" of {of}"
            raise DeviceError(
                f"{name}{of_type} cannot be read from the host: {error}; raise the limit of locked "
                "memory (ulimit -l), give the graph more of the device (memory=), or sample on the "
                "CPU (neighbor_sampler='native')"
            ) from error
        if pages is not None:
            self._pages.append(pages)
        return here

    def _maybe(self, part: Part, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._put(part, tensor)


def pointer_bytes(topology: Topology, *, rows: bool = True) -> int:
    """The bytes of pointers and rows, which are on the device in any case."""
    size = sum(allotted(4 * count + 4) for count in topology.num_nodes.values() if rows)
    return size + sum(allotted(_size(csc.indptr)) for csc in topology.csc.values())


def graph_bytes(topology: Topology, *, rows: bool = True) -> int:
    """The bytes that all of :class:`DeviceGraph` takes on a device."""
    parts = sum(allotted(_size(tensor)) for _, tensor in _parts(topology))
    return pointer_bytes(topology, rows=rows) + parts


def place(
    topology: Topology,
    budget: int,
    hops: Mapping[EdgeType, Sequence[int]],
    *,
    rows: bool = True,
) -> frozenset[Part]:
    """The parts of a graph that lie on a device within a budget, beside pointers and rows.

    Those that are read most often for their size come first, and each that still fits is taken. A
    draw reads one entry of ``indices`` and ``edge_id``. A search for a limit of time reads up to 32
    times at once, and so does each draw by weight. Every node is taken to be expanded once a hop.

    Args:
        topology: The graph.
        budget: Bytes of the device, those of :func:`pointer_bytes` included.
        hops: Number of draws in each hop along each edge type, -1 for all in-edges.
        rows: See :class:`DeviceGraph`.
    """
    left = budget - pointer_bytes(topology, rows=rows)
    sizes = {part: allotted(_size(tensor)) for part, tensor in _parts(topology)}
    reads = _reads(topology, hops)
    found = []
    for part in sorted(sizes, key=lambda part: -reads[part] / max(1, sizes[part])):
        if sizes[part] <= left:
            found.append(part)
            left -= sizes[part]
    return frozenset(found)


def _reads(topology: Topology, hops: Mapping[EdgeType, Sequence[int]]) -> Counter[Part]:
    """Number of entries that are read of each part."""
    found: Counter[Part] = Counter()
    for edge_type, csc in topology.csc.items():
        nodes, edges = csc.indptr.numel() - 1, csc.num_edges
        searched = min(edges, _WARP * nodes)  # the places that one search of every node reads
        for k in hops[edge_type]:
            drawn = edges if k < 0 else min(edges, k * nodes)
            found["indices", edge_type] += drawn
            found["edge_id", edge_type] += drawn
            if k > 0:
                found["weight_prefix", edge_type] += k * searched
            if not topology.is_timed(edge_type):
                continue
            if csc.time is not None:
                found["time", edge_type] += searched
            else:
                found["indices", edge_type] += searched
                found["node_time", topology.neighbor_type(edge_type)] += searched
    return found


def _parts(topology: Topology) -> Iterator[tuple[Part, Tensor]]:
    """All that may lie on the host."""
    for edge_type, csc in topology.csc.items():
        yield ("indices", edge_type), csc.indices
        optional = {
            "edge_id": csc.edge_id,
            "time": csc.time,
            "weight_prefix": csc.weight_prefix,
        }
        for name, tensor in optional.items():
            if tensor is not None:
                yield (name, edge_type), tensor
    for node_type, time in topology.node_time.items():
        yield ("node_time", node_type), time


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
