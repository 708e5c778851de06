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
    """The in-edges of a graph, and a row for each node, on a device.

    Args:
        topology: All of it must be in this process.
        device: The device.
        rows: If True, there is a row for each node.

    Attributes:
        csc: ``indptr``, ``indices`` and ``edge_id`` of each edge type, contiguous.
        row_of: With ``rows``, of each node type ``int32`` ``[num_nodes + 1]``, the same large
            number for every node that is not in the batch. The last entry is of no node: what is
            written there is not read.
    """

    def __init__(self, topology: Topology, device: torch.device, *, rows: bool = True) -> None:
        self.device = device
        self.csc: dict[EdgeType, tuple[Tensor, Tensor, Tensor | None]] = {}
        for edge_type in topology.edge_types:
            csc = topology.csc[edge_type]
            ids = None if csc.edge_id is None else send_large(csc.edge_id, device)
            self.csc[edge_type] = (
                send_large(csc.indptr, device),
                send_large(csc.indices, device),
                ids,
            )
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
        held = [*self.row_of.values(), *(t for csc in self.csc.values() for t in csc)]
        return sum(allotted(tensor.nbytes) for tensor in held if tensor is not None)

    def forget(self, node: Mapping[NodeType, Tensor]) -> None:
        """The nodes of the batch are in no batch any more."""
        for node_type, row_of in self.row_of.items():
            if node[node_type].numel():
                row_of[node[node_type].to(torch.int64)] = _NONE


def graph_bytes(topology: Topology, *, rows: bool = True) -> int:
    """The bytes that :class:`DeviceGraph` takes on a device."""
    size = sum(allotted(4 * count + 4) for count in topology.num_nodes.values() if rows)
    return size + sum(_csc_bytes(csc) for csc in topology.csc.values())


def _csc_bytes(csc: CSC) -> int:
    tensors = [csc.indptr, csc.indices, *([] if csc.edge_id is None else [csc.edge_id])]
    return sum(allotted(each.numel() * each.element_size()) for each in tensors)
