"""Rows of the tensors of a feature store: how they are requested, and checks of what is returned.

Stores over other stores (caches, devices), stores of files, and stores of several ranks share
these.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale.ops.raw_bytes import raw_bytes

Key = tuple[Any, str]
"""Group and name of a tensor; the group of edges is a tuple."""


@dataclass(frozen=True)
class TensorRows:
    """The rows of one tensor of a store.

    Attributes:
        num_rows: Their number.
        row: Shape of a row.
        dtype: Their dtype.
    """

    num_rows: int
    row: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return self.dtype.itemsize * math.prod(self.row)

    def checked(self, value: Any, count: int, name: str, source: Any) -> Tensor:
        """The rows ``[count, *row]`` that a store returned.

        Args:
            value: A tensor or an array.
            count: Number of requested rows.
            name: The name of the tensor in errors.
            source: The store, or its name, in errors.

        Raises:
            ValueError: If their shape or dtype is another one.
        """
        value = as_tensor(value)
        expected = [count, *self.row]
        if list(value.shape) != expected or value.dtype != self.dtype:
            raise ValueError(
                f"{source} returned {value.dtype} of shape {list(value.shape)} for {name}, "
                f"expected {self.dtype} of shape {expected}"
            )
        return value


def rows_in(store: FeatureStore) -> dict[Key, TensorRows]:
    """The rows of every tensor of a store that tells its size."""
    found = {}
    for attr in store.get_all_tensor_attrs():
        size = store.get_tensor_size(request(attr, None))
        if size is not None:
            none = as_tensor(store.get_tensor(request(attr, torch.empty(0, dtype=torch.int64))))
            found[key_of(attr)] = TensorRows(int(size[0]), tuple(none.shape[1:]), none.dtype)
    return found


# Requests #################################################################################


def key_of(attr: TensorAttr) -> Key:
    """The group and name of a tensor."""
    group = attr.group_name if attr.is_set("group_name") else None
    return (tuple(group) if isinstance(group, list) else group), attr.attr_name


def name_of(attr: TensorAttr) -> str:
    """A tensor in errors: ``'x'``, or ``'x' of 'paper'``."""
    group, name = key_of(attr)
    return f"{name!r}" if group is None else f"{name!r} of {group!r}"


def title_of(key: Key) -> str:
    """A tensor in statistics: ``x``, or ``paper/x``."""
    group, name = key
    if group is None:
        return name
    return "/".join([",".join(map(str, group)) if isinstance(group, tuple) else group, name])


def request(attr: TensorAttr, index: Any) -> TensorAttr:
    """A request for other rows of the same tensor."""
    made = copy.copy(attr)
    made.index = index
    if not made.is_set("group_name"):  # Data has only the name
        made.group_name = None
    return made


def unknown(attr: TensorAttr, known: Iterable[Key]) -> KeyError:
    """The error for a tensor that a store lacks; names those that it has."""
    listed = ", ".join(f"{name!r} of {group!r}" for group, name in known)
    return KeyError(f"{name_of(attr)} is not in the store, which has: {listed or 'nothing'}")


def listed_ids(index: Any) -> Tensor | None:
    """The ids ``int64`` ``[n]`` of an index that lists them; ``None`` for any other index."""
    if isinstance(index, np.ndarray):
        index = torch.from_numpy(index)
    if not isinstance(index, Tensor) or index.dim() != 1:
        return None
    if index.dtype not in (torch.int64, torch.int32):
        return None
    return index.to(torch.int64).contiguous()


def integers(index: Any, attr: TensorAttr) -> Tensor:
    """An index of rows as a tensor ``int64`` or ``int32``, of one dimension or none.

    Raises:
        TypeError: If it is none.
    """
    rows = index if isinstance(index, Tensor) else torch.as_tensor(index)
    if rows.dtype not in (torch.int64, torch.int32) or rows.dim() > 1:
        raise TypeError(
            f"the index of {name_of(attr)} must be int64 or int32, one-dimensional or a single "
            f"number (got {rows.dtype} of shape {list(rows.shape)})"
        )
    return rows


def existing(index: Any, num_rows: int, attr: TensorAttr) -> Tensor:
    """An index of rows, all of which exist, as a tensor ``int64``.

    Raises:
        IndexError: Names the row that does not exist, and how many there are.
        TypeError: If the index is not integers.
    """
    rows = integers(index, attr)
    # NumPy, as torch would start threads for this in every worker thread of a loader.
    ids = rows.numpy(force=True)
    if ids.size and (ids.min() < 0 or ids.max() >= num_rows):
        wrong = ids[(ids < 0) | (ids >= num_rows)].flat[0]
        raise IndexError(
            f"{name_of(attr)}: row {int(wrong)} does not exist, there are only {num_rows} rows"
        )
    return rows.to(torch.int64)


def ids_of(attr: TensorAttr, num_rows: int) -> Tensor:
    """The rows that a read asks for, ``int64`` ``[n]`` contiguous.

    Raises:
        IndexError: Names the row that does not exist, and how many there are.
        TypeError: If the index is not integers.
    """
    index: Any = attr.index
    if index is None or isinstance(index, slice):
        return torch.arange(num_rows)[slice(None) if index is None else index]
    return existing(index, num_rows, attr).reshape(-1).contiguous()


def is_single(index: Any) -> bool:
    """Return True for an index of one row, whose result has no dimension of rows."""
    return isinstance(index, int | np.integer) or getattr(index, "ndim", 1) == 0


# Values ###################################################################################


def as_tensor(value: Any) -> Tensor:
    """A tensor of an array, the same memory; a tensor as it is."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def dense(value: Any, name: str) -> Tensor:
    """A tensor or an array of numbers as a tensor ``[n, ...]``, the same memory.

    Raises:
        TypeError: If it is something else.
        ValueError: If it has no dimension of rows.
    """
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            raise TypeError(f"{name} must be an array of numbers (got dtype object)")
        with warnings.catch_warnings():  # a read-only memory map is fine, as nothing writes to it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        kind = f"layout {value.layout}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a dense tensor or an array (got {kind})")
    if value.dim() == 0:
        raise ValueError(f"{name} must have one row per node or edge (got a single number)")
    return value


def raw_rows(tensor: Tensor) -> Tensor:
    """A contiguous tensor ``[n, ...]`` as ``uint8`` ``[n, row_bytes]``, the same memory."""
    row_bytes = tensor.dtype.itemsize * math.prod(tensor.shape[1:])
    return raw_bytes(tensor).view(tensor.size(0), row_bytes)


class ReadOnlyFeatures(FeatureStore):
    """A feature store that takes no new tensors.

    Attributes:
        why_read_only: The reason, and what to do instead.
    """

    read_only = True
    why_read_only: str

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        raise NotImplementedError(self.why_read_only)

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Refused.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(self.why_read_only)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise NotImplementedError(self.why_read_only)
