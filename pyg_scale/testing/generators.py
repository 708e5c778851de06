"""A check that global random number generators, which belong to the user, are left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def assert_leaves_generators_alone(call: Callable[[], Any]) -> Any:
    """Call a function, and fail if it uses or seeds a generator of torch, NumPy or Python."""
    before = _states()
    result = call()
    for name, state in _states().items():
        assert state == before[name], (
            f"the global generator of {name} was used or seeded: other threads and the user share "
            "it; draw from the keys, see pyg_scale.ops.keys"
        )
    return result


def _states() -> dict[str, Any]:
    _, words, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().tolist(),
        "NumPy": (np.asarray(words).tolist(), rest),
        "Python": random.getstate(),
    }
