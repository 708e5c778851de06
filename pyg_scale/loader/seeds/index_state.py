"""The state of a user's own index sampler, so that an epoch can be resumed.

Four kinds can be resumed: samplers with ``state_dict()`` and ``load_state_dict()`` (asked after
each batch), samplers whose randomness is one generator and torch's own random samplers (the state
of the generator when the epoch began; what was delivered is drawn again and skipped), samplers
that are a function of their epoch (torch's ``DistributedSampler``), and plain sequences.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_RANDOM = tuple(c.__iter__ for c in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
_FIXED = (list, tuple, range, Tensor, np.ndarray)


class SamplerState(NamedTuple):
    """The state of an index sampler when an epoch began.

    Attributes:
        kind: ``"state_dict"``, ``"generator"``, ``"default_generator"``, ``"epoch"``, ``"fixed"``
            or ``"unknown"``.
        value: What the kind needs.
    """

    kind: str
    value: Any = None


def begin(sampler: Any) -> SamplerState:
    """The state of a ``sampler`` or ``batch_sampler`` before it is iterated over."""
    kind, target = _kind(sampler)
    if kind == "state_dict":
        return SamplerState(kind, copy.deepcopy(target.state_dict()))
    if kind == "generator":
        return SamplerState(kind, target.generator.get_state())
    if kind == "default_generator":
        return SamplerState(kind, torch.get_rng_state())
    if kind == "epoch":
        return SamplerState(kind, target.epoch)
    return SamplerState(kind)


def snapshot(sampler: Any) -> Any:
    """The current state of a sampler with ``state_dict()``; ``None`` for other kinds."""
    kind, target = _kind(sampler)
    return copy.deepcopy(target.state_dict()) if kind == "state_dict" else None


def restore(sampler: Any, state: SamplerState) -> None:
    """Put a sampler back to where it stood when an epoch began (or a batch was handed out).

    Torch's default generator is left alone: restoring it is up to who saved it.

    Raises:
        ValueError: If the state is that of a sampler of another kind.
    """
    kind, target = _kind(sampler)
    if kind != state.kind:
        raise ValueError(
            f"the state was taken with a sampler of kind {state.kind!r}, but "
            f"{type(sampler).__name__} is of kind {kind!r}: build the loader as it was"
        )
    if kind == "state_dict":
        target.load_state_dict(copy.deepcopy(state.value))
    elif kind == "generator":
        target.generator.set_state(state.value)
    elif kind == "epoch":
        target.set_epoch(state.value)


def resume(sampler: Any, state: SamplerState, delivered: int) -> Iterator[Any]:
    """Iterate over a sampler from where it stood after ``delivered`` batches.

    Raises:
        ValueError: If the state is that of a sampler of another kind.
    """
    restore(sampler, state)
    if state.kind == "state_dict":
        return iter(sampler)
    if state.kind == "default_generator":
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state.value)
            return _skip(sampler, delivered)
    return _skip(sampler, delivered)


def refuse_unknown(sampler: Any) -> None:
    """Raise if nothing is known about where a sampler gets its order from.

    Raises:
        TypeError: Saying what to do.
    """
    kind, target = _kind(sampler)
    if kind == "unknown":
        raise TypeError(
            f"the loader cannot be resumed with a {type(target).__name__}, whose order it knows "
            f"nothing about: give it state_dict() and load_state_dict(), or draw its order "
            f"from a torch.Generator in its attribute 'generator'"
        )


def _kind(sampler: Any) -> tuple[str, Any]:
    if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
        return "state_dict", sampler
    if type(sampler).__iter__ is BatchSampler.__iter__:
        return _kind(sampler.sampler)
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        return "generator", sampler
    if type(sampler).__iter__ in _RANDOM:
        return "default_generator", sampler
    if type(sampler).__iter__ is DistributedSampler.__iter__:
        return "epoch", sampler
    if type(sampler).__iter__ is SequentialSampler.__iter__ or isinstance(sampler, _FIXED):
        return "fixed", sampler
    return "unknown", sampler


def _skip(sampler: Iterable[Any], count: int) -> Iterator[Any]:
    """Drop ``count`` entries and take one more: random samplers draw when they are first asked."""
    entries = iter(sampler)
    drawn = list(itertools.islice(entries, count, count + 1))
    return itertools.chain(drawn, entries)
