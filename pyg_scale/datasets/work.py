"""Keyed generators, and chunks of work over threads with one progress bar."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from tqdm import tqdm

from pyg_scale.ops.keys import fold
from pyg_scale.ops.library import renew_pool_after_fork

CHUNK = 1 << 21
"""Elements of one piece of work; part of what a graph is."""


def generator(key: int, *purpose: int) -> np.random.Generator:
    """The generator for one purpose (and chunk) of a key; counter-based."""
    return np.random.Generator(np.random.Philox(key=fold(key, *purpose)))


class ChunkWork:
    """Chunks over threads, with one progress bar."""

    def __init__(self, progress: bool, total: int):
        self._bar = tqdm(
            total=total,
            desc="Generating",
            unit_scale=True,
            leave=False,
            disable=None if progress else True,
        )
        renew_pool_after_fork()
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), "pyg_scale-datasets")

    def __enter__(self) -> ChunkWork:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._bar.close()

    def map(self, function: Callable[[int], None], count: int) -> None:
        """Call ``function`` with 0 to ``count - 1``; errors reach the caller."""
        for _ in self._pool.map(function, range(count)):
            pass

    def done(self, amount: int) -> None:
        """Move the bar."""
        self._bar.update(amount)
