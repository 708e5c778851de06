"""The messages that PyG's TGN memory keeps outside its ``state_dict``, as state that is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.models.tgn import TGNMemory

_STORES = ("msg_s_store", "msg_d_store")
_COLUMNS = ("src", "dst", "t", "msg")


class TGNMessages:
    """The messages of every :class:`torch_geometric.nn.models.TGNMemory` in a module.

    A ``TGNMemory`` updates the memory of a node when the node occurs again, from the messages that
    it got last. They are dictionaries of tensors, no buffers, so that ``state_dict`` of the module
    lacks them, and a run that goes on without them is another one.
    :class:`~pyg_scale.train.Checkpoint` saves them with every module that has such a memory, as
    ``NAME-messages``; elsewhere save this beside the module.

    Args:
        module: A ``TGNMemory``, or what has some.

    Raises:
        ValueError: If it has none.
    """

    def __init__(self, module: nn.Module) -> None:
        self._memories = memories_of(module)
        if not self._memories:
            raise ValueError(f"{type(module).__name__} has no TGNMemory")

    def state_dict(self) -> dict[str, Any]:
        """The messages by path of the memory and by store.

        ``node`` has the nodes with messages ``[n]``, ``count`` how many each has ``[n]``, and
        ``src``, ``dst``, ``t`` and ``msg`` the messages ``[k, ...]``, node after node.
        """
        return {
            path: {store: _packed(getattr(memory, store)) for store in _STORES}
            for path, memory in self._memories.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put messages back, in the place of those that are there.

        Raises:
            ValueError: If they are of other memories, or are no messages.
        """
        if set(state) != set(self._memories):
            raise ValueError(
                f"the state has messages of {sorted(state)}, the module has the memories "
                f"{sorted(self._memories)}"
            )
        made = {
            (path, store): _unpacked(state[path][store], memory, f"{path or 'memory'}.{store}")
            for path, memory in self._memories.items()
            for store in _STORES
        }
        for (path, store), messages in made.items():
            setattr(self._memories[path], store, messages)


def memories_of(module: Any) -> dict[str, TGNMemory]:
    """Every ``TGNMemory`` in a module, by its path; empty if there is none, or it is no module."""
    if not isinstance(module, nn.Module):
        return {}
    return {path: each for path, each in module.named_modules() if isinstance(each, TGNMemory)}


def _packed(store: Mapping[int, tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """The messages of all nodes, together."""
    full = {node: messages for node, messages in store.items() if messages[0].numel()}
    counts = [messages[0].numel() for messages in full.values()]
    out = {"node": torch.tensor([*full], dtype=torch.int64), "count": torch.tensor(counts).long()}
    some = [*full.values()] or [*store.values()][:1]
    for i, name in enumerate(_COLUMNS):
        out[name] = torch.cat([messages[i] for messages in some]) if some else torch.empty(0)
    return out


def _unpacked(state: Any, memory: TGNMemory, where: str) -> dict[int, tuple[Tensor, ...]]:
    """The messages of each node, of a state that is checked."""
    names = ("node", "count", *_COLUMNS)
    tensors = isinstance(state, Mapping) and all(isinstance(state.get(n), Tensor) for n in names)
    if not tensors:
        raise ValueError(f"the state of {where} must have the tensors {', '.join(names)}")
    node, count, *columns = (state[name].to(memory.device) for name in names)
    nodes, counts = node.tolist(), count.tolist()
    total = sum(counts)
    if (
        len(nodes) != len(counts)
        or min(counts, default=1) < 1
        or len(set(nodes)) != len(nodes)
        or any(not 0 <= v < memory.num_nodes for v in nodes)
        or any(column.size(0) != total for column in columns)
        or columns[3].shape[1:] != (memory.raw_msg_dim,)
    ):
        raise ValueError(
            f"the state of {where} does not fit a memory of {memory.num_nodes} nodes and messages "
            f"of {memory.raw_msg_dim} numbers"
        )
    none = torch.empty(0, dtype=torch.int64, device=memory.device)
    empty = (none, none, none, memory.memory.new_empty((0, memory.raw_msg_dim)))
    found: dict[int, tuple[Tensor, ...]] = dict.fromkeys(range(memory.num_nodes), empty)
    found.update(zip(nodes, zip(*(column.split(counts) for column in columns)), strict=True))
    return found
