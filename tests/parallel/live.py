"""The bytes of tensors that live at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that are made within it, each once, for as long as they live.

    Args:
        before: Tensors that are there before, and are not counted.

    Attributes:
        most: The most bytes that have lived at a time.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.most = 0
        self._known = {_of(each): None for each in before}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        """The bytes that live now."""
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        out = func(*args, **(kwargs or {}))
        old = {_of(each) for each in given}
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.device.type != "meta":
                key = _of(each)
                if key in old and key not in self._live:
                    continue  # a view of what was there before
                if key not in self._known:
                    storage = each.untyped_storage()
                    self._live[key] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now)
        return out


def _of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
