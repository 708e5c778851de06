"""Rows of a table by index, gathered when somebody looks at them: a batch's lazy ``x``.

A first layer that adds up the features of neighbours reads each row about once. Gathering the rows
before that writes and reads them once more. :class:`LazyRows` stands for the rows: layers of
:mod:`pyg_scale.nn` read the table itself, by the ids of the nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_scale.ops.gather import gather

_TABLES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class LazyRows(Tensor):
    """``table[index]``, which is gathered once, by the first use that is not one of these.

    Its shape, dtype and device are known without the rows, and so is a slice ``x[:n]`` of the first
    rows: it is lazy too, and a copy, where that of a tensor would be a view. Everything else gets
    the rows as a plain tensor: functions of torch, in-place ones too, copies, pickles.

    Args:
        table: ``[num_rows, channels]``, see :meth:`takes`. It must not be changed until the rows
            are gathered.
        index: ``int64`` ``[n]``, rows that exist.

    Raises:
        TypeError: If the table cannot be read lazily.
    """

    _table: Tensor
    _index: Tensor
    _version_of_table: int
    _value: Tensor | None

    @staticmethod
    def __new__(cls, table: Tensor, index: Tensor) -> LazyRows:
        """See :class:`LazyRows`."""
        if not cls.takes(table):
            raise TypeError(
                "a lazy x needs a contiguous floating point matrix on the CPU, without a gradient"
            )
        made: LazyRows = Tensor._make_wrapper_subclass(
            cls, (index.numel(), table.size(1)), dtype=table.dtype, device=table.device
        )
        made._table, made._index, made._value = table, index, None
        made._version_of_table = _version(table)
        return made

    @staticmethod
    def takes(table: Any) -> bool:
        """Return True for a table whose rows can stay in it.

        It is a contiguous ``float32``, ``float64``, ``bfloat16`` or ``float16`` matrix on the CPU
        that needs no gradient.
        """
        return (
            type(table) is Tensor
            and table.layout == torch.strided
            and table.is_cpu
            and table.dim() == 2
            and table.dtype in _TABLES
            and table.is_contiguous()
            and not table.requires_grad
        )

    def rows(self) -> Tensor:
        """The rows as a plain tensor ``[n, channels]``.

        Raises:
            RuntimeError: If the table was changed since.
        """
        if self._value is None:
            table, index = self._checked()
            self._value = gather(table, index)
        return self._value

    def unread(self) -> tuple[Tensor, Tensor] | None:
        """The table and the ids, or ``None`` if the rows were gathered.

        Raises:
            RuntimeError: If the table was changed since.
        """
        return self._checked() if self._value is None else None

    def _checked(self) -> tuple[Tensor, Tensor]:
        if _version(self._table) != self._version_of_table:
            raise RuntimeError(
                "the features were changed in place after the batch was made, whose x is lazy: "
                "make the loader without lazy_x=True, or look at batch.x before"
            )
        return self._table, self._index

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no rows, and run everything else on plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA or func in _OF_A_LEAF:
                return func(*args, **(kwargs or {}))
            if func in _REFUSED:
                raise RuntimeError(
                    "x is lazy (lazy_x=True) and has no gradient: make the loader without it, or "
                    "take batch.x.clone()"
                )
            if func in _FIRST_ROWS:
                found = _first_rows(func, *args, **(kwargs or {}))
                if found is not None:
                    return found
            return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what comes from below Python on plain tensors too."""
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


def _version(table: Tensor) -> int:
    return -1 if table.is_inference() else table._version  # of those, no change can be detected


def _plain(value: Any) -> Any:
    return value.rows() if isinstance(value, LazyRows) else value


def _first_rows(func: Any, x: Any, *rest: Any) -> LazyRows | None:
    """The first rows, still lazy; ``None`` if others are asked for, or all were gathered."""
    if not isinstance(x, LazyRows) or x._value is not None:
        return None
    if func is Tensor.__getitem__:
        key = rest[0]
        if not isinstance(key, slice) or key.step not in (None, 1):
            return None
        first, stop, _ = key.indices(x.size(0))
        size = max(stop - first, 0)
    else:
        if len(rest) != 3 or rest[0] not in (0, -2) or not all(type(n) is int for n in rest):
            return None
        _, first, size = rest
        if size < 0 or first < 0 or first + size > x.size(0):
            return None  # and torch says what is wrong
    return LazyRows(x._table, x._index[first : first + size]) if first == 0 else None


METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_sparse")),
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex),
    *(Tensor.__len__, torch.is_floating_point, torch.is_complex, torch.numel),
}
"""The functions of torch that do not read what a tensor holds."""

_OF_A_LEAF = {
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "grad")),
}
_REFUSED = {
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    *(Tensor.requires_grad_, Tensor.retain_grad, Tensor.register_hook, Tensor.backward),
}
_FIRST_ROWS = {Tensor.__getitem__, Tensor.narrow, torch.narrow}
