"""Assignments as given by the user, checked and converted to a narrow dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.graph.topology import NodeType
from pyg_scale.partitioner.base import Partition, check_num_parts

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Assigned:
    """The part of every node in the narrowest dtype, with values derived from it.

    Attributes:
        num_parts: Number of parts.
        part: ``uint8`` (up to 256 parts) or ``int32`` ``[num_nodes]`` by node type.
        sizes: Number of nodes of each part ``[num_parts]`` by node type.
        is_range: By node type, True if parts are ranges of ids in order.
    """

    num_parts: int
    part: dict[NodeType, Tensor]
    sizes: dict[NodeType, list[int]]
    is_range: dict[NodeType, bool]


def check_assignment(
    assignment: Partition | Mapping[NodeType, Tensor] | Tensor,
    num_nodes: Mapping[NodeType, int],
    num_parts: int | None = None,
) -> Assigned:
    """Check an assignment of the nodes of a graph.

    Args:
        assignment: The part of each node: a finished partition, tensors ``[num_nodes]`` by node
            type, or in a homogeneous graph one tensor.
        num_nodes: Number of nodes of each type.
        num_parts: Number of parts. ``None``: that of the partition, else the largest part plus one.

    Raises:
        TypeError: If it is not made of one-dimensional integer tensors.
        ValueError: If a type is missing or unknown, a length is wrong, a part is out of range, or
            there are more parts than nodes; the message names it.
    """
    if isinstance(assignment, Partition):
        num_parts, assignment = assignment.num_parts, assignment.assignment
    by_type: Mapping[NodeType, Tensor]
    by_type = assignment if isinstance(assignment, Mapping) else {None: assignment}
    if by_type.keys() != num_nodes.keys():
        raise ValueError(
            f"the assignment has the node types {_names(by_type)}, expected one tensor for each "
            f"of {_names(num_nodes)}"
        )
    for node_type, part in by_type.items():
        _check_tensor(part, node_type, num_nodes[node_type])
    if num_parts is None:
        num_parts = 1 + max(
            (max(0, int(p.max())) for p in by_type.values() if p.numel()), default=0
        )
    check_num_parts(num_parts, sum(num_nodes.values()))
    narrow, sizes, is_range = {}, {}, {}
    for node_type in num_nodes:
        part = by_type[node_type]
        _check_range(part, node_type, num_parts)
        narrow[node_type] = part.to(torch.uint8 if num_parts <= 256 else torch.int32).contiguous()
        sizes[node_type] = _sizes(narrow[node_type], num_parts)
        is_range[node_type] = _is_sorted(narrow[node_type])
    return Assigned(num_parts, narrow, sizes, is_range)


def _check_tensor(part: Tensor, node_type: NodeType, size: int) -> None:
    what = "the assignment" if node_type is None else f"the assignment of {node_type!r}"
    if not isinstance(part, Tensor) or part.dim() != 1 or part.dtype not in _INTEGERS:
        got = (
            f"{part.dtype} of shape {list(part.shape)}"
            if isinstance(part, Tensor)
            else type(part).__name__
        )
        raise TypeError(
            f"{what} must be a one-dimensional integer tensor, the part of each node (got {got})"
        )
    if part.numel() != size:
        raise ValueError(f"{what} has {part.numel()} entries for {size} nodes: give one each")


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check_range(part: Tensor, node_type: NodeType, num_parts: int) -> None:
    if not part.numel():
        return
    low, high = (int(v) for v in torch.aminmax(part))
    if low < 0 or high >= num_parts:
        wrong = int(((part < 0) | (part >= num_parts)).nonzero()[0])
        of_type = "" if node_type is None else f" of type {node_type!r}"
        raise ValueError(
            f"node {wrong}{of_type} is assigned to part {int(part[wrong])}, expected 0 to "
            f"{num_parts - 1}"
        )


def _sizes(part: Tensor, num_parts: int) -> list[int]:
    sizes = np.zeros(num_parts, dtype=np.int64)
    for chunk in part.split(_CHUNK):
        sizes += np.bincount(chunk.numpy(), minlength=num_parts)
    return sizes.tolist()


def _is_sorted(part: Tensor) -> bool:
    for begin in range(0, part.numel(), _CHUNK):
        chunk = part[begin : begin + _CHUNK + 1]
        if bool((chunk[1:] < chunk[:-1]).any()):
            return False
    return True


def _names(types: Mapping[NodeType, Any]) -> str:
    return ", ".join(map(repr, types)) or "nothing"
