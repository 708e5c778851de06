"""Counters of the calls in which layers took PyG's own path, with the reasons."""

from __future__ import annotations

import threading
import weakref
from collections import Counter

import torch
from torch.nn import Module

SMALL = "small input"
"""The reason for calls that PyG's path runs faster; it is not a fault."""

RECORDED = "torch.compile or a CUDA graph"
"""The beginning of reasons that hold only while a call is recorded."""

_lock = threading.Lock()
_gone: Counter[tuple[str, str]] = Counter()  # of deleted layers, and of compilations
_of_layer: dict[int, tuple[str, Counter[str]]] = {}  # by id, as long as the layer lives


class NotFused(Exception):
    """Raised by a fused forward, before any other work, for calls that need PyG's path.

    The message is the reason that :func:`fallbacks` shows. It never reaches the user.
    """


def record(layer: Module, reason: str) -> None:
    """Count a call that took PyG's path."""
    if torch.compiler.is_compiling():
        _record_compiled(type(layer).__name__, reason)
        return
    # No lock, no weak key, no other call: a small layer takes hardly longer than these.
    entry = _of_layer.get(id(layer))
    counts = _start(layer) if entry is None else entry[1]
    counts[reason] += 1


def _start(layer: Module) -> Counter[str]:
    """Start the counts of a layer, which are added to those of its class when it is deleted."""
    key = id(layer)
    with _lock:
        entry = _of_layer.setdefault(key, (type(layer).__name__, Counter()))
    # It runs before the memory of the layer is free, so no later layer has its id yet.
    weakref.finalize(layer, _keep, key).atexit = False
    return entry[1]


def _keep(key: int) -> None:
    name, counts = _of_layer.pop(key)
    for reason, count in counts.items():
        _gone[name, reason] += count


@torch.compiler.assume_constant_result
def _record_compiled(layer: str, reason: str) -> bool:
    """Count once per compilation, as a compiled graph has no side effects."""
    with _lock:
        _gone[layer, reason] += 1
    return True


def fallbacks(model: Module | None = None) -> dict[str, dict[str, int]]:
    """Count the calls in which layers of :mod:`pyg_scale.nn` took PyG's own path, by reason.

    Args:
        model: Count for each of its layers; ``None`` counts by class, for the whole process.
            Compiled graphs count once per compilation, and only by class.

    Returns:
        ``{layer: {reason: number of calls}}``: the name of the class, or, with ``model``, that of
        the submodule (``""`` is the model itself). Layers that never fell back are left out. The
        reason ``"small input"`` (:data:`SMALL`) is not a fault: PyG's path is faster for such
        calls.
    """
    found: dict[str, dict[str, int]] = {}
    if model is not None:
        for name, module in model.named_modules():
            _, counts = _of_layer.get(id(module), ("", None))
            if counts:
                found[name] = dict(sorted(counts.items()))
        return found
    with _lock:
        total = Counter(_gone)
        for name, counts in list(_of_layer.values()):
            for reason, count in list(counts.items()):  # other threads may add a reason
                total[name, reason] += count
    for (name, reason), count in sorted(total.items()):
        found.setdefault(name, {})[reason] = count
    return found


def forget_fallbacks() -> None:
    """Reset all counts."""
    with _lock:
        _gone.clear()
        for _, counts in list(_of_layer.values()):
            counts.clear()
