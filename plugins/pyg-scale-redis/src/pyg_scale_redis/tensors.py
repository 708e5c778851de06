"""Tensors as rows of bytes, and their descriptions on the server."""

from __future__ import annotations

import json
import math
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.ops.raw_bytes import raw_bytes

Key = tuple[Any, str]
"""A group (node type, edge type, ``None`` or ``(None, None)``) and the name of an attribute."""


@dataclass(frozen=True)
class Spec:
    """A tensor on the server.

    Attributes:
        dtype: Dtype of its elements.
        row: The shape of a row.
        rows: Number of rows.
        version: Version under which its rows are stored; every put makes a new one.
    """

    dtype: torch.dtype
    row: tuple[int, ...]
    rows: int
    version: int = 0

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return math.prod(self.row) * self.dtype.itemsize

    def to_json(self) -> str:
        """The text stored on the server."""
        return json.dumps(
            {
                "dtype": str(self.dtype).removeprefix("torch."),
                "row": self.row,
                "rows": self.rows,
                "version": self.version,
                "byteorder": sys.byteorder,
            }
        )

    @classmethod
    def from_json(cls, text: bytes, what: str) -> Spec:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: If the text is invalid; names ``what``.
        """
        try:
            found = json.loads(text)
            dtype = getattr(torch, found["dtype"])
            row = tuple(found["row"])
            numbers = (*row, found["rows"], found["version"])
            if not isinstance(dtype, torch.dtype) or any(
                type(number) is not int or number < 0 for number in numbers
            ):
                raise TypeError(f"no dtype or no sizes: {found}")
            order = found["byteorder"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"what the server says about {what} is not what pyg-scale-redis writes "
                f"({type(error).__name__}: {error}): another program uses this prefix"
            ) from None
        if order != sys.byteorder:
            raise ValueError(f"{what} was written by a {order}-endian machine, this one is not")
        return cls(dtype, row, found["rows"], found["version"])


def key_text(key: Key) -> str:
    """A key as JSON."""
    return json.dumps(key)


def text_key(text: bytes) -> Key:
    """The key that :func:`key_text` wrote.

    Raises:
        ValueError: If the text is invalid.
    """
    try:
        group, name = json.loads(text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{text!r} is no name of a tensor: {error}") from None
    return (tuple(group) if isinstance(group, list) else group), name


def dense(value: Any, name: str) -> Tensor:
    """Convert a value to a dense tensor in memory.

    Raises:
        TypeError: If it is neither a dense tensor nor an array of numbers.
        ValueError: If it is a single number.
    """
    if isinstance(value, np.ndarray) and value.dtype != object:
        with warnings.catch_warnings():  # a read-only array is fine: nothing writes to it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        kind = f"layout {value.layout}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a dense tensor or an array of numbers (got {kind})")
    if value.dim() == 0:
        raise ValueError(f"{name} must have one row per node or edge (got a single number)")
    return value.detach().cpu()


def rows_of(tensor: Tensor) -> list[memoryview]:
    """The bytes of each row of ``[n, ...]``, without a copy if rows are contiguous."""
    rows = tensor.size(0)
    if not tensor.numel():
        return [memoryview(b"")] * rows
    flat = memoryview(raw_bytes(tensor.contiguous()).numpy())
    size = flat.nbytes // rows
    return [flat[begin : begin + size] for begin in range(0, flat.nbytes, size)]


def empty_rows(spec: Spec, rows: int) -> tuple[Tensor, memoryview]:
    """A tensor ``[rows, ...]`` to read into, and its bytes."""
    out = torch.empty((rows, *spec.row), dtype=spec.dtype)
    if not out.numel():
        return out, memoryview(bytearray())
    return out, memoryview(out.view(-1).view(torch.uint8).numpy())


def row_numbers(index: Any, rows: int, name: str) -> tuple[Tensor, bool]:
    """The rows ``int64`` ``[n]`` of an index, and True if it was a single number.

    Args:
        index: A tensor, an array, a number, a slice or ``None`` for all.
        rows: Number of rows of the tensor.
        name: Name of the tensor in errors.

    Raises:
        TypeError: If the index has another type.
        IndexError: If a row does not exist; names the first one and the number of rows.
    """
    if index is None:
        return torch.arange(rows), False
    if isinstance(index, slice):
        begin, end, step = index.indices(rows)
        if step < 1:
            raise ValueError(f"{name}: a slice must have a positive step (got {step})")
        return torch.arange(begin, max(begin, end), step), False
    numbers = index if isinstance(index, Tensor) else torch.as_tensor(index)
    if numbers.dtype not in (torch.int64, torch.int32) or numbers.dim() > 1:
        raise TypeError(
            f"the index of {name} must be int64 or int32, one-dimensional or a single number "
            f"(got {numbers.dtype} of shape {list(numbers.shape)})"
        )
    flat = numbers.reshape(-1).to(torch.int64).cpu()
    wrong = flat[(flat < 0) | (flat >= rows)]
    if wrong.numel():
        raise IndexError(f"{name}: row {int(wrong[0])} does not exist, there are only {rows} rows")
    return flat, numbers.dim() == 0
