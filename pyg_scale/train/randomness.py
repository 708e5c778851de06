"""The random generators of a process: seeded in one call, saved and put back."""

from __future__ import annotations

import operator
import os
import random
import warnings
from typing import Any

import numpy as np
import torch

from pyg_scale.comm.connect import rank_here
from pyg_scale.ops import keys

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def seed_everything(seed: int, *, deterministic: bool = False, rank: int | None = None) -> None:
    """Seed torch, NumPy and Python, and have torch compute the same bits in every run.

    Loaders with ``seed=`` need none of it. Ranks draw different dropout masks: rank 0 has the seed
    itself, rank ``r`` a hash of both. Parameters are rank 0's after
    :func:`pyg_scale.parallel.wrap`. Two runs of a script that begins with it have equal weights,
    bit for bit, on the same machine, with the same versions, ranks and threads.

    Args:
        seed: From 0 to ``2**63 - 1``.
        deterministic: Whether torch must refuse ops whose results differ from run to run
            (``use_deterministic_algorithms``), and cuDNN must not choose by speed. ``False``
            changes nothing.
        rank: By default that of this process.

    Raises:
        TypeError: If the seed is no integer.
        ValueError: If the seed or rank is out of range.
        RuntimeError: If CUDA is in use already, without the setting of cuBLAS that deterministic
            sums need.
    """
    seed = operator.index(seed)
    rank = rank_here() if rank is None else operator.index(rank)
    if not 0 <= seed < 1 << 63 or rank < 0:
        raise ValueError(
            f"seed must be from 0 to 2**63 - 1, rank not negative (got {seed}, {rank})"
        )
    if deterministic:
        _be_deterministic()
    mine = keys.fold(0, seed, rank) >> 1 if rank else seed
    random.seed(mine)
    np.random.seed(keys.fold(0, mine) & 0xFFFF_FFFF if mine >= 1 << 32 else mine)
    torch.manual_seed(mine)  # of all devices


def _be_deterministic() -> None:
    if torch.cuda.is_available() and _WORKSPACE not in os.environ:
        if torch.cuda.is_initialized():
            raise RuntimeError(
                f"deterministic=True: CUDA is in use already, and cuBLAS reads {_WORKSPACE} once: "
                f"call seed_everything() before, or start with {_WORKSPACE}=:4096:8"
            )
        os.environ[_WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


class RandomState:
    """The random generators of a process, with a ``state_dict`` as modules have."""

    def state_dict(self) -> dict[str, Any]:
        """The states of torch's generators: on the CPU and, if CUDA is in use, on its device."""
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them back there."""
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
        if "cuda" not in state:
            return
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        else:
            warnings.warn(
                "the checkpoint has the state of a CUDA generator, and there is no CUDA here: "
                "what is drawn differs",
                stacklevel=2,
            )
