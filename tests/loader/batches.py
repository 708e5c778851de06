"""Comparing batches bit by bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData


def contents(batch: Data | HeteroData) -> dict[tuple[Any, str], Any]:
    """Every attribute of a batch, by (type, name)."""
    if isinstance(batch, HeteroData):
        stores = batch.node_items() + batch.edge_items()
        return {(kind, name): v for kind, store in stores for name, v in store.items()}
    return {(None, name): value for name, value in batch.to_dict().items()}


def assert_same(left: Data | HeteroData, right: Data | HeteroData) -> None:
    """Equal to the bit: attributes, dtypes, values, order."""
    ours, theirs = contents(left), contents(right)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        if isinstance(value, Tensor):
            assert value.dtype == other.dtype, name
            assert torch.equal(value, other), name
        else:
            assert value == other, name


def assert_same_batches(left: Iterable[Any], right: Iterable[Any]) -> None:
    left, right = list(left), list(right)
    assert len(left) == len(right)
    for a, b in zip(left, right):
        assert_same(a, b)
