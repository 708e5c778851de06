"""A graph as a sampler on a device sees it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyg_scale.graph.topology import CSC, EdgeType, NodeType, Topology
from pyg_scale.store.device.placement import allotted
from pyg_scale.store.device.target import send_large

_NONE = 2**31 - 1


class DeviceGraph:
    """The in-edges of a graph with times and weights, and a row for each node, on a device.

    Args:
        topology: All of it must be in this process.
        device: The device.
        rows: If True, there is a row for each node.

    Attributes:
        csc: The in-edges of each edge type; all tensors are contiguous.
        node_time: ``int64`` (sortable) ``[num_nodes]`` of the node types that have a time.
        row_of: With ``rows``, of each node type ``int32`` ``[num_nodes + 1]``, the same large
            number for every node that is not in the batch. The last entry is of no node: what is
            written there is not read.
    """

    def __init__(self, topology: Topology, device: torch.device, *, rows: bool = True) -> None:
        self.device = device

        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else send_large(tensor, device)

        self.csc: dict[EdgeType, CSC] = {
            edge_type: CSC(
                send_large(csc.indptr, device),
                send_large(csc.indices, device),
                there(csc.edge_id),
                there(csc.time),
                there(csc.weight_prefix),
            )
            for edge_type, csc in topology.csc.items()
        }
        self.node_time: dict[NodeType, Tensor] = {
            node_type: send_large(time, device) for node_type, time in topology.node_time.items()
        }
        self.row_of: dict[NodeType, Tensor] = {
            node_type: torch.full((count + 1,), _NONE, dtype=torch.int32, device=device)
            for node_type, count in topology.num_nodes.items()
            if rows
        }
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # any stream may read from now on

    @property
    def num_bytes(self) -> int:
        """The bytes on the device."""
        return _bytes_of(self) + sum(allotted(each.nbytes) for each in self.row_of.values())

    def forget(self, node: Mapping[NodeType, Tensor]) -> None:
        """The nodes of the batch are in no batch any more."""
        for node_type, row_of in self.row_of.items():
            if node[node_type].numel():
                row_of[node[node_type].to(torch.int64)] = _NONE


def graph_bytes(topology: Topology, *, rows: bool = True) -> int:
    """The bytes that :class:`DeviceGraph` takes on a device."""
    size = sum(allotted(4 * count + 4) for count in topology.num_nodes.values() if rows)
    return size + _bytes_of(topology)


def _bytes_of(graph: Topology | DeviceGraph) -> int:
    held = [*graph.node_time.values()]
    for csc in graph.csc.values():
        optional = csc.edge_id, csc.time, csc.weight_prefix
        held += [csc.indptr, csc.indices, *(each for each in optional if each is not None)]
    return sum(allotted(each.numel() * each.element_size()) for each in held)
