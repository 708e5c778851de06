"""The content that the kit puts into feature stores, and comparisons with it."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import FeatureStore

from pyg_scale.store.base import DeclaresDtypes, DeclaresError


def numbers(*shape: int) -> Tensor:
    """Different numbers that every dtype of the tests holds exactly or rounds alike."""
    size = int(torch.tensor(shape).prod())
    return (torch.arange(size) * 7 % 101).float().view(shape)


def takes(store: FeatureStore, dtype: torch.dtype) -> bool:
    """Return True if a store accepts a dtype; by default it accepts all."""
    return not isinstance(store, DeclaresDtypes) or dtype in store.dtypes


def bound_of(store: FeatureStore, group: Any, name: str, index: Any = None) -> Tensor | None:
    """The largest error of rows of a store; ``None`` if they are exact."""
    return store.error_bound(name, group, index) if isinstance(store, DeclaresError) else None


def assert_holds(
    store: FeatureStore, group: Any, name: str, expected: Tensor, index: Any = None
) -> None:
    """Fail unless a store gives these rows, within its declared bound."""
    assert_same(store[group, name, index], expected, bound_of(store, group, name, index))


def assert_same(got: Any, expected: Tensor, bound: Tensor | None = None) -> None:
    """Fail unless a tensor has the same dtype and shape, and values within a bound."""
    if bound is None:
        assert_equal(got, expected)
        return
    assert got.dtype == expected.dtype, f"got {got.dtype}, {expected.dtype} was put"
    assert got.shape == expected.shape, f"got {list(got.shape)} instead of {list(expected.shape)}"
    far = (got.to(torch.float64) - expected.to(torch.float64)).abs()
    assert bool((far <= bound).all()), f"up to {float(far.max())} from what was put"


def forked(ask: Callable[[], bool], seconds: float = 60.0) -> bool:
    """The result of a function in a forked process; one that takes longer is killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which are intended
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(not ask())
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while True:
        found, result = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(result) == 0
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.01)


def assert_equal(got: Any, expected: Tensor) -> None:
    """Fail unless two tensors have the same dtype, shape and values."""
    assert isinstance(got, Tensor), f"got {type(got).__name__} instead of a tensor"
    assert got.dtype == expected.dtype, f"got {got.dtype}, {expected.dtype} was put"
    assert got.shape == expected.shape, f"got {list(got.shape)} instead of {list(expected.shape)}"
    assert torch.equal(got, expected), "got other values than were put"


def read_rows(store: FeatureStore, content: Any, seed: int) -> int:
    """Read rows of every tensor, low ones more often, some repeatedly; return their number."""
    generator, total = torch.Generator().manual_seed(seed % 4), 0
    for (group, name), tensor in content.items():
        index = (torch.rand(300, generator=generator) ** 4 * tensor.size(0)).long()
        assert_holds(store, group, name, tensor[index], index)
        total += index.numel()
    return total


def check_cache(store: Any, rows: int) -> None:
    """Fail unless the counts of a cache add up to the number of rows read by index."""
    stats = store.stats()
    assert stats["cached_bytes"] <= store.capacity, "the cache holds more than its capacity"
    assert stats["cached_bytes"] > 0, "nothing is cached"
    assert stats["hits"] + stats["misses"] == rows, (
        "hits and misses do not add up to the rows that were read"
    )
    assert stats["hits"] > 0 and stats["misses"] > 0
