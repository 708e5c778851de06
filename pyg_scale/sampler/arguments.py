"""Arguments of samplers, checked."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from torch import Tensor
from torch_geometric.sampler import NumNeighbors


def number_of_neighbors(value: Any) -> NumNeighbors | None:
    """``num_neighbors`` in PyG's form; ``None`` stays ``None``."""
    if value is None or isinstance(value, NumNeighbors):
        return value
    if isinstance(value, str | int | float):
        raise TypeError(
            f"num_neighbors must be one integer per hop, such as [15, 10] (got {value!r})"
        )
    return NumNeighbors(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)


def integers(num_neighbors: Any) -> list[int]:
    """The numbers of neighbours of an edge type, one per hop."""
    try:
        numbers = [operator.index(k) for k in num_neighbors]
    except TypeError:
        raise TypeError(
            f"num_neighbors must be integers, one per hop (got {num_neighbors!r})"
        ) from None
    if min(numbers, default=0) < -1:
        raise ValueError(
            f"num_neighbors must be -1 (all), 0 (none) or more (got {num_neighbors!r})"
        )
    return numbers


def flag(name: str, value: Any) -> bool:
    """An argument that must be a bool."""
    if value not in (True, False):
        raise TypeError(f"{name} must be True or False (got {value!r})")
    return bool(value)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """An argument that must be one of some words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))} (got {value!r})")
    return value
