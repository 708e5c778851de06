"""The options that decide the draws of a loader, as text that ranks can compare."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import Tensor
from torch_geometric.sampler import NumNeighbors

from pyg_scale.loader.seeds.epoch import BatchIndex
from pyg_scale.loader.seeds.sharding import fingerprint
from pyg_scale.ops import keys
from pyg_scale.sampler.base import DrawsByNode, MayKeepDraws, NeighborSampler

_OPTIONS = (
    "num_neighbors",
    "num_samples",
    "replace",
    "subgraph_type",
    "disjoint",
    "temporal_strategy",
    "sample_direction",
    "time_attr",
    "weight_attr",
    "redraw",
)
_NEGATIVES = ("mode", "amount", "src_weight", "dst_weight", "exclude_positives")


def drawn_by(sampler: Any, neg_sampling: Any = None) -> dict[str, str]:
    """The options in which ranks that share seeds must agree to draw the same batches.

    Args:
        sampler: The sampler of a loader.
        neg_sampling: Its negative sampling, if it has any.

    Returns:
        Arguments and their values as text; those that a sampler has not are left out.
    """
    found: dict[str, str] = {}
    if not type(sampler).__module__.startswith("pyg_scale."):  # of those all draw the same
        found["neighbor_sampler"] = type(sampler).__qualname__
    options: Mapping[str, Any] = getattr(sampler, "options", {})  # where servers sample
    for name in _OPTIONS:
        value = options.get(name, getattr(sampler, name, None))
        if name == "num_neighbors" and isinstance(sampler, NeighborSampler) and value is not None:
            value = sampler.hops()
        if value is not None:
            found[name] = _text(value)
    if neg_sampling is not None:
        for name in _NEGATIVES:
            found[f"neg_sampling.{name}"] = _text(getattr(neg_sampling, name, None))
    return found


def key_of(batch: BatchIndex, sampler: Any, by_place: bool = False) -> int:
    """The key to sample a batch with: where nodes alone decide, that of the whole step.

    Args:
        batch: Perhaps a piece of a step.
        sampler: By what.
        by_place: Whether something is drawn for places in the batch, such as negatives.
    """
    by_node = isinstance(sampler, DrawsByNode) and sampler.draws_by_node and not by_place
    return batch.key if by_node else batch.piece_key


def keeps_draws(sampler: Any) -> bool:
    """Return True if a sampler is to draw the same in all batches."""
    return isinstance(sampler, MayKeepDraws) and not sampler.redraw


def fixed_key(seed: int) -> int:
    """The key of all batches of a loader whose sampler keeps its draws, from the loader's seed."""
    return keys.fold(0, seed, keys.FIXED)


def _text(value: Any) -> str:
    if isinstance(value, NumNeighbors):
        return f"{_text(value.values)}, else {_text(value.default)}"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} {fingerprint([value])}"
    if isinstance(value, Mapping):
        if list(value) == [None]:  # of a graph without types
            return _text(value[None])
        pairs = {str(key): _text(each) for key, each in value.items()}
        return ", ".join(f"{key}: {pairs[key]}" for key in sorted(pairs))
    return str(value.value if isinstance(value, Enum) else value)
