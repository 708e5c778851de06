"""The memory of devices that a process fills where nobody says how much it may take."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

_SHARE = 0.5


class DeviceShares:
    """Half of the memory of each device, for all loaders and stores without a size of their own.

    They take from it in the order in which they are made, and give back what they took when they
    are freed. What others hold is not counted: it is not free, that is all.

    Args:
        free: The free bytes of a device.
    """

    def __init__(self, free: Callable[[torch.device], int]) -> None:
        self._free = free
        self._held: dict[torch.device, dict[int, int]] = {}
        self._lock = threading.RLock()  # an owner may be freed at any time, on any thread

    def left(self, device: torch.device) -> int:
        """The bytes that nobody has taken yet: half of the free and the taken ones, less those."""
        with self._lock:
            held = sum([*self._held.get(device, {}).values()])  # an owner may be freed meanwhile
            return max(0, int((self._free(device) + held) * _SHARE) - held)

    def take(self, owner: object, device: torch.device, num_bytes: int) -> None:
        """Note that an object holds bytes of a device for as long as it lives."""
        with self._lock:
            self._held.setdefault(device, {})[id(owner)] = num_bytes
        weakref.finalize(owner, self._give_back, device, id(owner)).atexit = False

    def _give_back(self, device: torch.device, owner: int) -> None:
        with self._lock:
            self._held[device].pop(owner, None)


def free_bytes(device: torch.device) -> int:
    """Bytes that CUDA can still give to torch, with those that torch keeps unused."""
    if device.type != "cuda":
        return 0
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + kept)


SHARES = DeviceShares(free_bytes)
"""Those of this process."""
