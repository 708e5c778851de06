"""Samplers of any origin behind one call with a key."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch_geometric.sampler as pyg
from torch import Tensor
from torch_geometric.sampler import NumNeighbors

from pyg_scale import plugins
from pyg_scale.graph.base import InDirectory, SuppliesSampler
from pyg_scale.loader.seeds.epoch import BatchIndex
from pyg_scale.loader.seeds.sharding import fingerprint
from pyg_scale.loader.workers.randomness import torch_forked
from pyg_scale.ops import keys
from pyg_scale.sampler.base import NeighborSampler
from pyg_scale.sampler.capabilities import DrawsByNode, FollowsSteps, MayKeepDraws, WeighsEdges


def takes_key(method: Callable[..., Any]) -> bool:
    """Return True if a method has a parameter ``key`` (the ``**kwargs`` of PyG do not count)."""
    return _takes_key(getattr(method, "__func__", method))


@functools.lru_cache
def _takes_key(function: Callable[..., Any]) -> bool:
    return "key" in inspect.signature(function).parameters


def call(method: Callable[..., Any], inputs: Any, key: int, **kwargs: Any) -> Any:
    """Sample with a key, or else with torch's generator seeded from it.

    Args:
        method: ``sample_from_nodes`` or ``sample_from_edges`` of a sampler.
        inputs: PyG's sampler input.
        key: The key of the batch.
        kwargs: Handed on.
    """
    if takes_key(method):
        return method(inputs, key=key, **kwargs)
    with torch_forked(keys.fold(key, keys.FOREIGN)):
        return method(inputs, **kwargs)


@dataclass(frozen=True)
class Drawing:
    """The properties of a sampler that a loader looks at for every batch.

    Attributes:
        takes_key: True if it takes the key of a batch; for others see :func:`call`.
        kept: True if it is to draw the same in all batches.
        follows_steps: True if it must know where batches stand among those of all epochs.
        why_processes: The reason why it cannot work in threads; empty if it can.
    """

    takes_key: bool
    kept: bool
    follows_steps: bool
    why_processes: str


def drawing_of(data: Any, sampler: Any, method: Callable[..., Any]) -> Drawing:
    """The properties of a loader's sampler; warns if ``data`` was partitioned for another.

    Args:
        data: What the loader was given.
        sampler: Its sampler.
        method: ``sample_from_nodes`` or ``sample_from_edges`` of it.
    """
    _warn_if_unplanned(data, sampler)
    keyed, why = takes_key(method), ""
    if not keyed:
        why = (
            f"{type(getattr(method, '__self__', method)).__name__} draws from torch's global "
            "generator, which threads would share: pass worker_type='process' or num_workers=0"
        )
    follows = isinstance(sampler, FollowsSteps) and sampler.batch_dependency > 1
    return Drawing(keyed, _keeps_draws(sampler), follows, why)


def key_of(batch: BatchIndex, sampler: Any, seed: int | None = None, by_place: bool = False) -> int:
    """The key to sample a batch with: where nodes alone decide, that of the whole step.

    Args:
        batch: Perhaps a piece of a step.
        sampler: The sampler.
        seed: The loader's, for a sampler that may keep its draws.
        by_place: True if something is drawn for places in the batch, such as negatives.
    """
    if seed is not None and _keeps_draws(sampler):
        return fixed_key(seed)
    if not batch.first:  # not a later piece
        return batch.key
    by_node = isinstance(sampler, DrawsByNode) and sampler.draws_by_node and not by_place
    return batch.key if by_node else batch.piece_key


def _keeps_draws(sampler: Any) -> bool:
    return isinstance(sampler, MayKeepDraws) and not sampler.redraw


def fixed_key(seed: int) -> int:
    """The key of all batches of a loader whose sampler keeps its draws, from the loader's seed."""
    return keys.fold(0, seed, keys.FIXED)


def resolve(
    sampler: Any, data: Any, argument: str, sampling: Any = None, **options: Any
) -> pyg.BaseSampler:
    """The bound sampler that ``neighbor_sampler=`` stands for.

    Args:
        sampler: A name, a class, a sampler without data (takes ``options``), or a sampler.
        data: What the loader was given.
        argument: The argument's name, for messages.
        sampling: :class:`~pyg_scale.loader.options.SamplingOptions`, for data that brings
            its own sampler.
        options: The loader's arguments for the sampler.

    Raises:
        TypeError: If it is no sampler.
        UnknownPluginError: If there is no sampler of that name.
        ValueError: If the sampler was built with other arguments.
        NotImplementedError: If the sampler does not support an argument.
    """
    if isinstance(data, SuppliesSampler):
        return data.sampler_for(sampler, options, sampling)
    if isinstance(sampler, str):
        sampler = _named(sampler, argument)
    if isinstance(sampler, type):
        if issubclass(sampler, NeighborSampler):
            sampler = _without_arguments(sampler, argument)
        elif issubclass(sampler, pyg.BaseSampler):
            foreign: Any = sampler
            options = _said(foreign, options)
            if not _takes_all(foreign, options):
                _refuse_own(foreign, options)
            return foreign(data, **options)
    if isinstance(sampler, NeighborSampler):
        return sampler.bind(data, **options)
    if isinstance(sampler, pyg.BaseSampler):
        _refuse_own(sampler, options)
        return sampler
    raise TypeError(
        f"{argument} must be a name, such as 'native', or a sampler "
        f"(got {type(sampler).__name__}); sampler= is torch's index sampler"
    )


def _named(name: str, argument: str) -> Any:
    """The class of samplers, or the sampler, that a name stands for."""
    found = plugins.get("sampler", name)
    kinds = (NeighborSampler, pyg.BaseSampler)
    if isinstance(found, kinds) or (isinstance(found, type) and issubclass(found, kinds)):
        return found
    raise TypeError(
        f"{argument}={name!r} must stand for a subclass of NeighborSampler, or of BaseSampler of "
        f"PyG (it is {found!r}, a fault of the plugin)"
    )


def _without_arguments(kind: Any, argument: str) -> NeighborSampler:
    """A sampler of a class, whose options all have defaults."""
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise TypeError(
            f"{argument}: {kind.__name__} cannot be made without arguments ({error}): give these "
            f"defaults, or pass a sampler, such as {kind.__name__}(...)"
        ) from None
    made: NeighborSampler = kind()
    return made


_OWN = ("redraw", "time_window", "strictly_earlier")
"""The options that PyG's samplers do not have, which the loaders hand on only if they are set."""


def set_options(
    *, redraw: bool = True, time_window: Any = None, strictly_earlier: bool = False
) -> dict[str, Any]:
    """Those of the options that PyG's samplers do not have which a caller has set."""
    given = {"redraw": redraw, "time_window": time_window, "strictly_earlier": strictly_earlier}
    usual = {"redraw": True, "time_window": None, "strictly_earlier": False}
    return {name: value for name, value in given.items() if value is not usual[name]}


def _refuse_own(sampler: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that a sampler of PyG's kind cannot follow."""
    for name in _OWN:
        if name in options:
            kind = sampler if isinstance(sampler, type) else type(sampler)
            raise NotImplementedError(
                f"{kind.__name__} knows no {name}= (got {options[name]!r}): leave it out, or use "
                "neighbor_sampler='native', which does"
            )


def _takes_all(cls: Any, options: Mapping[str, Any]) -> bool:
    """Return True if a class has parameters for all options."""
    known = inspect.signature(cls).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    return anything or options.keys() <= known.keys()


def _said(cls: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a class knows, and those that differ from what it would do without."""
    known = inspect.signature(cls).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    defaults = inspect.signature(NeighborSampler.__init__).parameters
    return {
        name: value
        for name, value in options.items()
        if name in known or anything or value != defaults[name].default
    }


def _warn_if_unplanned(data: Any, sampler: Any) -> None:
    """Warn if ``data`` was opened from a directory that was cut for another ``num_neighbors``.

    The partitioner ``frequency`` places nodes and lists what to cache by what sampling with its own
    ``num_neighbors`` reaches.

    Args:
        data: What the loader was given.
        sampler: Its sampler.
    """
    directory = data.graph_directory if isinstance(data, InDirectory) else None
    if directory is None or directory.meta.partition is None:
        return
    partition = directory.meta.partition
    planned, asked = partition.extra.get("num_neighbors"), getattr(sampler, "num_neighbors", None)
    if planned is None or not isinstance(asked, NumNeighbors):
        return
    values = asked.get_values()
    by_type = values.values() if isinstance(values, dict) else [values]
    found = [list(each) for each in by_type]
    if any(each != planned for each in found):
        warnings.warn(
            f"{directory.path} was partitioned by {partition.method!r} for num_neighbors="
            f"{planned}, the loader has {found[0] if len(found) == 1 else found}: nodes and cache "
            "lists fit less; partition again with option num_neighbors, or load with what it has",
            stacklevel=5,
        )


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
    "time_window",
    "strictly_earlier",
    "weights",
    "every_layer",
    "layer_dependency",
    "batch_dependency",
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
    ours = type(sampler).__module__.startswith("pyg_scale.")  # of those all draw the same, but ...
    if not ours or isinstance(sampler, WeighsEdges):
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
