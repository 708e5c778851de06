"""Which layers took PyG's own path instead of a fused one, how often, and why."""

from __future__ import annotations

import threading
import weakref
from collections import Counter

import torch
from torch.nn import Module

SMALL = "small input"
"""The reason of calls that PyG's path runs faster; nothing is wrong with them."""

RECORDED = "torch.compile or a CUDA graph"
"""How reasons begin that only hold where a call is recorded."""

_lock = threading.Lock()
_by_layer: Counter[tuple[str, str]] = Counter()
_by_module: weakref.WeakKeyDictionary[Module, Counter[str]] = weakref.WeakKeyDictionary()


class NotFused(Exception):
    """Raised by a fused forward, before it did anything, where only PyG's path is right.

    The message is the reason that :func:`fallbacks` shows. It never reaches the user.
    """


def record(layer: Module, reason: str) -> None:
    """Count a call that took PyG's path."""
    if torch.compiler.is_compiling():
        _record_compiled(type(layer).__name__, reason)
        return
    with _lock:
        _by_layer[type(layer).__name__, reason] += 1
        counts = _by_module.get(layer)
        if counts is None:
            counts = _by_module[layer] = Counter()
        counts[reason] += 1


@torch.compiler.assume_constant_result
def _record_compiled(layer: str, reason: str) -> bool:
    """Count once per compilation: while it is compiled, a graph has no side effects."""
    with _lock:
        _by_layer[layer, reason] += 1
    return True


def fallbacks(model: Module | None = None) -> dict[str, dict[str, int]]:
    """How often layers of :mod:`pyg_scale.nn` took PyG's own path, and why.

    Args:
        model: Count for each of its layers; ``None`` counts by class, for the whole process.
            Compiled graphs count once per compilation, and only by class.

    Returns:
        ``{layer: {reason: number of calls}}``: the name of the class, or, with ``model``, that of
        the submodule (``""`` is the model itself). Layers that never fell back are left out.
        The reason ``"small input"`` (:data:`SMALL`) is no fault: PyG's path is faster there.
    """
    found: dict[str, dict[str, int]] = {}
    with _lock:
        if model is None:
            for (name, reason), count in sorted(_by_layer.items()):
                found.setdefault(name, {})[reason] = count
            return found
        for name, module in model.named_modules():
            if counts := _by_module.get(module):
                found[name] = dict(sorted(counts.items()))
    return found


def forget_fallbacks() -> None:
    """Start counting anew."""
    with _lock:
        _by_layer.clear()
        _by_module.clear()
