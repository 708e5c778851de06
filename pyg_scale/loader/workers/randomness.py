"""Generators that give a transform the same draws whoever runs it, and are put back after it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from pyg_scale.ops import keys


@contextlib.contextmanager
def forked(key: int | None, *words: int) -> Iterator[None]:
    """Within it, torch's, NumPy's and Python's default generators are seeded from ``key``.

    Torch's are the CPU's and, if CUDA is in use, that of the current device.

    Args:
        key: An unsigned 64-bit integer; ``None``: they go on as they are.
        words: Are folded into it.
    """
    if key is None:
        yield
        return
    key = keys.fold(key, *words)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:  # an exception may come from outside at any place
            torch.default_generator.manual_seed(keys.to_signed(key))
            for device in devices:
                torch.cuda.default_generators[device].manual_seed(keys.to_signed(key))
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def torch_forked(key: int) -> Iterator[None]:
    """Within it, torch's default CPU generator is seeded from ``key``."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(keys.to_signed(key))
        yield
