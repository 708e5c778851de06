"""The caches of all tensors of a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyg_scale.ops.belady import Belady
from pyg_scale.ops.row_cache import Placed
from pyg_scale.ops.sieve import Sieve
from pyg_scale.store.cache.budget import Rows, slots_of
from pyg_scale.store.cache.hot import hot_of
from pyg_scale.store.cache.row_cache import Policy, RowCache
from pyg_scale.store.cache.schedule import Key


class State:
    """A cache for every tensor that gets a share of the capacity.

    Replaced as a whole by a write to the store.

    Args:
        rows: The tensors by group and name.
        capacity: Capacity in bytes.
        policy: ``"belady"``, ``"sieve"`` or ``"placed"``.
        hot: For ``"placed"``: ids by group.
        look_ahead: For ``"belady"``.
    """

    def __init__(
        self,
        rows: Mapping[Key, Rows],
        capacity: int,
        policy: str,
        hot: Mapping[Any, Tensor] | None,
        look_ahead: int,
    ) -> None:
        self.rows = rows
        self.caches: dict[Key, RowCache] = {}
        listed = {key: _listed(hot or {}, key, each) for key, each in rows.items()}
        useful = {key: each._replace(num_rows=listed[key].numel()) for key, each in rows.items()}
        for key, slots in slots_of(rows if hot is None else useful, capacity).items():
            if not slots:
                continue
            kept = None if hot is None else listed[key]
            made = _policy(rows[key].num_rows, slots, policy, kept, look_ahead)
            self.caches[key] = RowCache(rows[key].row_bytes, slots, made)


def _policy(num_rows: int, slots: int, name: str, listed: Tensor | None, look_ahead: int) -> Policy:
    if listed is not None:
        return Placed(num_rows, listed[:slots])
    if slots == num_rows:
        return Placed(num_rows, torch.arange(num_rows))
    return Sieve(num_rows, slots) if name == "sieve" else Belady(num_rows, slots, look_ahead)


def _listed(hot: Mapping[Any, Tensor], key: Key, rows: Rows) -> Tensor:
    ids = hot_of(hot, key[0])
    return torch.empty(0, dtype=torch.int64) if ids is None else ids[ids < rows.num_rows]
