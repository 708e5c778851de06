"""The plan of a read of features, before it is carried out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import TensorAttr

from pyg_scale.distributed.features.parts import FeatureColumn, Key
from pyg_scale.distributed.features.requests import RemoteRead
from pyg_scale.distributed.features.split import RowsByRank
from pyg_scale.ops.gather import gather
from pyg_scale.store.memory import _name, _rows


@dataclass
class ReadPlan:
    """The plan of a read.

    Attributes:
        attrs: The tensors to read, each with a tensor ``int64`` ``[n]`` as its index.
        wanted: Rows of each type and index, with the attributes to read.
        place: For each of ``attrs``, the index in ``wanted`` and the attribute.
        through_cache: For each of ``wanted``, original ids of the rows that are not local, if they
            are read through a cache.
        asked: The requests under way.
    """

    attrs: list[TensorAttr] = field(default_factory=list)
    wanted: list[tuple[RowsByRank, list[FeatureColumn]]] = field(default_factory=list)
    place: list[tuple[int, FeatureColumn]] = field(default_factory=list)
    through_cache: list[Tensor | None] = field(default_factory=list)
    asked: RemoteRead | None = None

    def coming(self, number: int, column: FeatureColumn | None = None) -> dict[Key, Tensor]:
        """Take the tensors to which requested rows are written as they arrive.

        Args:
            number: Index in :attr:`wanted`.
            column: Take the tensor of this attribute only.
        """
        columns = self.wanted[number][1] if column is None else [column]
        made = {} if self.asked is None else self.asked.out
        keys = [each.key for each in columns if (number, each.key) in made]
        return {key: made.pop((number, key)) for key in keys}

    def cache_attrs(self) -> list[TensorAttr]:
        """The tensors to read through a cache, by original id."""
        return [
            TensorAttr(*column.key, index=ids)
            for ids, (_, columns) in zip(self.through_cache, self.wanted)
            for column in columns
            if ids is not None and ids.numel()
        ]

    def local_attrs(self) -> list[TensorAttr]:
        """The tensors to read from local parts, by original id."""
        return [
            TensorAttr(*column.key, index=index)
            for rows, columns in self.wanted
            for _, index in here_of(rows)
            for column in columns
        ]


def here_of(rows: RowsByRank) -> Iterator[tuple[Tensor, Tensor]]:
    """``(positions, original ids)`` of the rows in local parts, if any."""
    count = rows.index.numel()
    if rows.absent.numel() == count:
        return
    if not rows.absent.numel():
        yield torch.from_numpy(np.arange(count)), rows.index
        return
    mine = np.ones(count, dtype=bool)
    mine[rows.absent.numpy()] = False
    position = torch.from_numpy(np.flatnonzero(mine))
    yield position, gather(rows.index, position)


def index_of(attr: TensorAttr, num_rows: int) -> Tensor:
    """The rows that a read asks for, ``int64`` ``[n]`` contiguous.

    Raises:
        IndexError: Names the row that does not exist, and how many there are.
        TypeError: If the index is not integers.
    """
    index: Any = attr.index
    if index is None or isinstance(index, slice):
        return torch.arange(num_rows)[slice(None) if index is None else index]
    if isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() == 1:
        rows = index
        ids = index.numpy()
        if ids.size and (ids.min() < 0 or ids.max() >= num_rows):
            wrong = ids[(ids < 0) | (ids >= num_rows)][0]
            raise IndexError(
                f"{_name(attr)}: row {wrong} does not exist, there are only {num_rows} rows"
            )
    else:
        rows = _rows(index, num_rows, attr).reshape(-1)
    return rows.contiguous()


def is_single(index: Any) -> bool:
    """Return True for an index of one row, whose result has no dimension of rows."""
    return isinstance(index, int | np.integer) or getattr(index, "ndim", 1) == 0


def checked_rows(value: Any, column: FeatureColumn, count: int, whose: str) -> Tensor:
    """The rows that a store returned, contiguous.

    Raises:
        ValueError: If their shape or dtype differs from the directory's.
    """
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    expected = [count, *column.row]
    if list(value.shape) != expected or value.dtype != column.dtype:
        raise ValueError(
            f"{whose} returned {value.dtype} of shape {list(value.shape)} for {column}, expected "
            f"{column.dtype} of shape {expected}"
        )
    return value.contiguous()
