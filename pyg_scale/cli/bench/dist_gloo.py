"""How fast bytes go between ranks by ``all_to_all`` of gloo, as torch.distributed has it."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale.comm import Communicator

_LIMIT = timedelta(seconds=60)
_count = itertools.count()


class Exchange:
    """A process group of gloo in which every rank sends to the next one.

    Args:
        comm: The ranks; all of them make one at the same time.
        num_bytes: Of a message.
    """

    def __init__(self, comm: Communicator, num_bytes: int) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _LIMIT
        assert comm.group is not None, "several ranks have met somewhere"
        # Addresses of an exchange before this one must not be found.
        store = PrefixStore(f"bench/gloo/{next(_count)}", comm.group.store)
        self._group: Any = dist.ProcessGroupGloo(store, comm.rank, comm.world_size, options)
        self._sent = torch.ones(num_bytes, dtype=torch.uint8)
        self._received = torch.ones(num_bytes, dtype=torch.uint8)
        self._to, self._from = [0] * comm.world_size, [0] * comm.world_size
        self._to[(comm.rank + 1) % comm.world_size] = num_bytes
        self._from[(comm.rank - 1) % comm.world_size] = num_bytes

    def turn(self, messages: int) -> None:
        """Send so many messages while as many come."""
        for _ in range(messages):
            self._group.alltoall_base(self._received, self._sent, self._from, self._to).wait()
