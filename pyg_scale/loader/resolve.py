"""Samplers of any origin behind one call with a key."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch_geometric.sampler as pyg

from pyg_scale import plugins
from pyg_scale.graph.base import SuppliesSampler
from pyg_scale.loader.workers.randomness import torch_forked
from pyg_scale.ops import keys
from pyg_scale.sampler.base import NeighborSampler


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


def why_processes(method: Callable[..., Any]) -> str:
    """The reason why a sampler cannot work in threads; empty if it can."""
    if takes_key(method):
        return ""
    name = type(getattr(method, "__self__", method)).__name__
    return (
        f"{name} draws from torch's global generator, which threads would share: pass "
        f"worker_type='process' or num_workers=0"
    )


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
        sampler = plugins.get("sampler", sampler)
    if isinstance(sampler, type):
        if issubclass(sampler, NeighborSampler):
            sampler = sampler()
        elif issubclass(sampler, pyg.BaseSampler):
            foreign: Any = sampler
            return foreign(data, **_said(foreign, options))
    if isinstance(sampler, NeighborSampler):
        return sampler.bind(data, **options)
    if isinstance(sampler, pyg.BaseSampler):
        return sampler
    raise TypeError(
        f"{argument} must be a name, such as 'native', or a sampler "
        f"(got {type(sampler).__name__}); sampler= is torch's index sampler"
    )


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
