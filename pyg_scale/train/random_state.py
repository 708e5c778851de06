"""The random generators that belong to a process: torch's, CUDA's, NumPy's and Python's."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch


class RandomState:
    """Has a ``state_dict`` as modules have."""

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
