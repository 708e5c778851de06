"""Rows of a table by index, gathered when somebody looks at them: a batch's lazy ``x``.

A first layer that adds up the features of neighbours reads each row about once. Gathering the rows
before that writes and reads them once more. :class:`LazyRows` stands for the rows: layers of
:mod:`pyg_scale.nn` read a :class:`Table` itself, by the places of the nodes' rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_scale.ops.stored_rows import StoredRows


class Table:
    """Rows that stay where they are until a batch has been used.

    Args:
        stored: The rows; if their owner may change them, with a lease that keeps it from that.
    """

    def __init__(self, stored: StoredRows) -> None:
        self.stored = stored

    def check(self) -> None:
        """Refuse rows that are no longer those of the batch.

        Raises:
            RuntimeError: If they were changed.
        """

    def read_as(
        self, dtype: torch.dtype, scale: Tensor | None = None, zero: Tensor | None = None
    ) -> Table:
        """The same rows, read as numbers of another dtype; see :class:`StoredRows`."""
        made = copy.copy(self)
        made.stored = self.stored._replace(dtype=dtype, scale=scale, zero=zero)
        return made


class WholeTable(Table):
    """All rows of a tensor, which a change in place would change.

    Args:
        rows: ``[num_rows, width]``.
    """

    def __init__(self, rows: Tensor) -> None:
        super().__init__(StoredRows(rows, rows.dtype))
        self._version = _version(rows)

    def check(self) -> None:
        """See :meth:`Table.check`."""
        if _version(self.stored.rows) != self._version:
            raise RuntimeError(
                "the features were changed in place after the batch was made, whose x is lazy: "
                "make the loader without lazy_x=True, or look at batch.x before"
            )


class LazyRows(Tensor):
    """``table[index]``, which is gathered once, by the first use that is not one of these.

    Its shape, dtype and device are known without the rows, and so is a slice ``x[:n]`` of the first
    rows: it is lazy too, and a copy, where that of a tensor would be a view. Everything else gets
    the rows as a plain tensor: functions of torch, in-place ones too, copies, pickles.

    Args:
        table: A table, or a tensor ``[num_rows, channels]``, see :meth:`takes`. It must not be
            changed until the rows are gathered.
        index: ``int64`` ``[n]``, places of rows that exist.

    Raises:
        TypeError: If the table cannot be read lazily.
    """

    _table: Table | None
    _index: Tensor
    _value: Tensor | None

    @staticmethod
    def __new__(cls, table: Tensor | Table, index: Tensor) -> LazyRows:
        """See :class:`LazyRows`."""
        if not cls.takes(table):
            raise TypeError(
                "a lazy x needs a contiguous floating point matrix on the CPU, without a gradient"
            )
        table = table if isinstance(table, Table) else WholeTable(table)
        stored = table.stored
        made: LazyRows = Tensor._make_wrapper_subclass(
            cls, (index.numel(), stored.columns), dtype=stored.dtype, device=stored.rows.device
        )
        made._table, made._index, made._value = table, index, None
        return made

    @staticmethod
    def takes(table: Any) -> bool:
        """Return True for a table whose rows can stay in it.

        It is a contiguous ``float32``, ``float64``, ``bfloat16`` or ``float16`` matrix on the CPU
        that needs no gradient, or one of fewer bytes that is read as such.
        """
        if isinstance(table, Table):
            return table.stored.readable
        return isinstance(table, Tensor) and StoredRows(table, table.dtype).readable

    def rows(self) -> Tensor:
        """The rows as a plain tensor ``[n, channels]``.

        Raises:
            RuntimeError: If the table was changed since.
        """
        if self._value is None:
            stored, index = self._checked()
            self._value = stored.gather(index)
            self._table = None  # which may lend its rows to others again
        return self._value

    def unread(self) -> tuple[StoredRows, Tensor] | None:
        """The table's rows and the places in them, or ``None`` if the rows were gathered.

        Raises:
            RuntimeError: If the table was changed since.
        """
        return self._checked() if self._value is None else None

    def _checked(self) -> tuple[StoredRows, Tensor]:
        assert self._table is not None
        self._table.check()
        return self._table.stored, self._index

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
    if first or x._table is None:
        return None
    return LazyRows(x._table, x._index[:size])


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
