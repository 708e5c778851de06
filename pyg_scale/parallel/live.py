"""The bytes of tensors that live at the same time, and the operations that make them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operation(NamedTuple):
    """An operation on tensors that is no view.

    Attributes:
        name: The name that torch has for it, as ``"aten::index_select"``.
        given: Bytes of its tensors, of each storage what it shows.
        made: Bytes of its results.
        rows: Number of rows of the tensor that has most.
    """

    name: str
    given: int
    made: int
    rows: int


class LiveBytes(TorchDispatchMode):
    """Counts storages that are made within it, each once, for as long as they live.

    Args:
        before: Tensors that are there before, and are not counted.

    Attributes:
        most: The most bytes that have lived at a time.
        operations: The operations, in order.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.most = 0
        self.operations: list[Operation] = []
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
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if func._schema.is_mutable or any(_of(each) not in old for each in made):
            read, written = (sum(map(_shown, each)) for each in (given, made))
            rows = max((each.size(0) for each in [*given, *made] if each.dim()), default=0)
            self.operations.append(Operation(func._schema.name, read, written, rows))
        return out


def _shown(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
