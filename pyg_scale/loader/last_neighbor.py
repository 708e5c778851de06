"""The last events of nodes, in a stream of events: what TGN samples neighbours from."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyg_scale.ops.last_events import COLUMNS, entries_of, insert_events, keep_last, last_events

_LEAST = 4096  # entries; what a new log has room for


class LastNeighborLoader:
    """Remembers the last events of each node, and gives the neighbourhoods that they make.

    As :class:`torch_geometric.nn.models.tgn.LastNeighborLoader` (Rossi et al.: "Temporal Graph
    Networks for Deep Learning on Dynamic Graphs", 2020), with the same arguments and results.
    Instead of ``size`` places for every node there is a log of events, linked by node: memory
    follows the events that are kept (at most ``size`` of each node), with 8 bytes for each node.

    Where many events of one node are inserted at once, exactly its last ones are kept, in the
    order in which they were given. (PyG's can keep earlier ones where a node has more than
    ``size`` events in one call of :meth:`insert`.)

    Args:
        num_nodes: Number of nodes.
        size: How many events of each node are kept.
        device: Where results go. The log is in the memory of the processor.

    Raises:
        TypeError: If a number is none.
        ValueError: If a number is out of range.
    """

    def __init__(self, num_nodes: int, size: int, device: Any = None) -> None:
        self.num_nodes, self.size = operator.index(num_nodes), operator.index(size)
        if self.num_nodes < 0 or self.size < 1:
            raise ValueError(
                f"num_nodes must not be negative, and size at least 1 (got {num_nodes}, {size})"
            )
        self.device = torch.get_default_device() if device is None else torch.device(device)
        self.reset_state()

    def reset_state(self) -> None:
        """Forget all events."""
        self.cur_e_id = 0
        self._used = 0
        self._head = torch.zeros(self.num_nodes, dtype=torch.int64, device="cpu")
        self._log = torch.zeros(_LEAST * COLUMNS, dtype=torch.int64, device="cpu")

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return 8 * (self._head.numel() + self._log.numel())

    def __call__(self, n_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The last events of nodes.

        Args:
            n_id: Nodes ``int64`` ``[n]``.

        Returns:
            ``n_id``, the nodes and their neighbours ``[m]`` once each, ascending; ``edge_index``
            ``[2, k]``, from neighbour to node, by place in these; ``e_id`` ``[k]``, the numbers of
            the events, counted from 0 since the start.

        Raises:
            TypeError: If it is no list of nodes.
            IndexError: If a node does not exist.
        """
        nodes = self._nodes(n_id, "n_id")
        found = last_events(self._head, self._log, nodes, self.size)
        if self.device.type == "cpu":
            return found
        return tuple(each.to(self.device) for each in found)  # type: ignore[return-value]

    def insert(self, src: Tensor, dst: Tensor) -> None:
        """Add events, in the order in which they happened.

        Args:
            src: One end of each event, ``int64`` ``[n]``.
            dst: The other, ``int64`` ``[n]``.

        Raises:
            TypeError: If they are no lists of nodes.
            IndexError: If a node does not exist.
            ValueError: If they differ in size.
        """
        src, dst = self._nodes(src, "src"), self._nodes(dst, "dst")
        if src.numel() != dst.numel():
            raise ValueError(
                f"src and dst must have one node for each event (got {src.numel()} and "
                f"{dst.numel()})"
            )
        wanted = self._used + 2 * src.numel()
        if wanted * COLUMNS > self._log.numel():
            room = max(_LEAST, self._log.numel() // COLUMNS // 2)
            self._log, self._used = keep_last(self._head, self._log, self.size, room)
            wanted = self._used + 2 * src.numel()
            if 2 * wanted * COLUMNS > self._log.numel():  # else there is room for as many again
                more = self._log.new_zeros(2 * wanted * COLUMNS - self._log.numel())
                self._log = torch.cat([self._log, more])
        insert_events(self._head, self._log, src, dst, self._used, self.cur_e_id)
        self._used = wanted
        self.cur_e_id += src.numel()

    def _nodes(self, node: Tensor, name: str) -> Tensor:
        if not isinstance(node, Tensor) or node.dtype not in (torch.int64, torch.int32):
            kind = node.dtype if isinstance(node, Tensor) else type(node).__name__
            raise TypeError(f"{name} must be an int64 or int32 tensor of nodes (got {kind})")
        if node.dim() != 1:
            raise TypeError(f"{name} must be one-dimensional (got shape {list(node.shape)})")
        node = node.to("cpu", torch.int64).contiguous()
        if node.numel():
            low, high = (int(each) for each in torch.aminmax(node))
            if low < 0 or high >= self.num_nodes:
                raise IndexError(
                    f"{name}: node {low if low < 0 else high} does not exist: there are "
                    f"{self.num_nodes}"
                )
        return node

    # State #################################################################################

    def state_dict(self) -> dict[str, Any]:
        """The events that are kept, as numbers and tensors.

        ``node`` has the nodes with events ``[n]``, ``count`` how many each has ``[n]``,
        ``neighbor`` and ``event`` their other ends and numbers ``[k]``, the latest first.
        """
        nodes = self._head.nonzero().view(-1)
        entries = entries_of(self._head, self._log, nodes, self.size)
        found = self._log.view(-1, COLUMNS)[entries[entries > 0] - 1]
        return {
            "num_nodes": self.num_nodes,
            "size": self.size,
            "num_events": self.cur_e_id,
            "node": nodes,
            "count": (entries > 0).sum(1),
            "neighbor": found[:, 0].clone(),
            "event": found[:, 1].clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            TypeError: If it is no dictionary.
            ValueError: If it is of another number of nodes or another size, or is no such state.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be what state_dict() returned (got {state!r:.60})")
        for name in ("num_nodes", "size"):
            if state.get(name) != getattr(self, name):
                raise ValueError(
                    f"the state is of a LastNeighborLoader with {name}={state.get(name)!r}, this "
                    f"one has {name}={getattr(self, name)}"
                )
        node, count, neighbor, event = _checked(state, self.num_nodes, self.size)
        used = int(count.sum())
        self.reset_state()
        entries = torch.arange(used, 0, -1, device="cpu")  # the latest first, and so the greatest
        first = torch.zeros(used, dtype=torch.bool, device="cpu")
        first[count.cumsum(0) - 1] = True
        previous = torch.where(first, 0, entries - 1)
        room = max(_LEAST, 2 * used)
        log = torch.zeros(room, COLUMNS, dtype=torch.int64, device="cpu")
        log[entries - 1] = torch.stack([neighbor, event, previous], dim=1)
        self._log, self._used = log.view(-1), used
        self._head[node] = entries[count.cumsum(0) - count]
        self.cur_e_id = int(state["num_events"])


def _checked(state: Mapping[str, Any], num_nodes: int, size: int) -> tuple[Tensor, ...]:
    """The tensors of a state, if they can be those of one."""
    found = []
    for name in ("node", "count", "neighbor", "event"):
        value = state.get(name)
        if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != 1:
            raise ValueError(f"the state has no int64 list {name!r}")
        found.append(value.to("cpu"))
    node, count, neighbor, event = found
    num_events = state.get("num_events")
    if not isinstance(num_events, int) or num_events < 0:
        raise ValueError(f"the state has num_events={num_events!r}, which is no number of events")
    fits = (
        node.numel() == count.numel()
        and bool(((count >= 1) & (count <= size)).all())
        and int(count.sum()) == neighbor.numel() == event.numel()
        and bool((node.diff() > 0).all())
        and all(
            not ids.numel() or (int(ids.min()) >= 0 and int(ids.max()) < limit)
            for ids, limit in ((node, num_nodes), (neighbor, num_nodes), (event, num_events))
        )
    )
    if not fits:
        raise ValueError("the state is no state of a LastNeighborLoader: its lists do not fit")
    return node, count, neighbor, event
