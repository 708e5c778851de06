"""Rows that a batch reads where a store holds them, instead of a copy (``lazy_x=True``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale.ops.lazy_rows import LazyRows, Table, WholeTable
from pyg_scale.store.base import LendsRows, returns_views
from pyg_scale.store.rows import as_tensor, request


class LentRows(NamedTuple):
    """Rows of a matrix where they are."""

    table: Table
    """Has the rows."""
    places: Tensor
    """``int64`` ``[n]``, the place of each in the table."""

    @property
    def num_copied(self) -> int:
        """Number of rows that were brought for this request, and are not where the store has
        them."""
        rest = self.table.stored.rest
        return 0 if rest is None else rest.size(0)

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes, as it is held."""
        rows = self.table.stored.rows
        return rows.size(1) * rows.element_size()


def lends_rows(store: FeatureStore) -> bool:
    """Return True if a store has rows that can be read where they are."""
    return store.lends_rows if isinstance(store, LendsRows) else returns_views(store)


def lend(store: FeatureStore, attr: TensorAttr) -> LentRows | None:
    """Rows of a store where they are; ``None`` if they have to be read.

    Args:
        store: Any feature store.
        attr: A tensor, with ids ``int64`` ``[n]`` that exist as its index.
    """
    if isinstance(store, LendsRows):
        return store.lend_rows(attr) if store.lends_rows else None
    if not returns_views(store):
        return None
    whole = as_tensor(store.get_tensor(request(attr, None)))
    if not isinstance(whole, Tensor) or whole.dim() != 2 or not whole.is_contiguous():
        return None
    return LentRows(WholeTable(whole), attr.index)


def lends_features(store: FeatureStore, attr: TensorAttr) -> bool:
    """Return True if the rows of a tensor can be those of a lazy ``x``: floating point numbers."""
    none = lend(store, request(attr, torch.empty(0, dtype=torch.int64)))
    return none is not None and LazyRows.takes(none.table)
