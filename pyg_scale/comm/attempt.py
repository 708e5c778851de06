"""A store without what an earlier attempt left in it.

torchrun starts the processes again when one died, and keeps the store where they meet: torch 2.13
then hands out the addresses of the dead ("Gloo connectFullMesh failed ... Connection refused").
How often was started again is known to each machine alone, so a number in the environment cannot
tell attempts apart. Here rank 0 draws a name for the attempt, and the others take it once rank 0
has answered what they themselves have drawn: nothing that was left behind can be mistaken for it.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale.errors import CommTimeoutError

_POLL = 0.005


def this_attempt(store: Any, rank: int, world_size: int, timeout: float) -> Any:
    """The part of ``store`` that only these ranks, in this attempt, know of. All ranks call it.

    Args:
        store: Of ``torch.distributed``; may hold anything.
        rank: Of this process.
        world_size: Number of ranks.
        timeout: Seconds to wait for the others.

    Returns:
        A ``PrefixStore``, the same on every rank.

    Raises:
        CommTimeoutError: If a rank does not come in time; names it.
    """
    deadline = time.monotonic() + timeout
    if rank == 0:
        name = _invite(store, world_size, deadline, timeout)
    else:
        name = _follow(store, rank, deadline, timeout)
    return PrefixStore(f"attempt/{name}", store)


def _invite(store: Any, world_size: int, deadline: float, timeout: float) -> str:
    name = secrets.token_hex(8)
    store.set("attempt", name)
    drawn = {}
    for rank in range(1, world_size):
        key = f"attempt/{name}/{rank}"
        try:
            store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError:
            raise CommTimeoutError(
                f"rank {rank} did not come within {timeout:g} seconds (waited for by rank 0)"
            ) from None
        drawn[rank] = store.get(key).decode()
    store.set(f"attempt/{name}/all", json.dumps(drawn))
    return name


def _follow(store: Any, rank: int, deadline: float, timeout: float) -> str:
    mine, asked = secrets.token_hex(8), None
    while time.monotonic() < deadline:
        if store.check(["attempt"]):
            name = store.get("attempt").decode()
            if name != asked:  # the first one may be that of an earlier attempt
                store.set(f"attempt/{name}/{rank}", mine)
                asked = name
            if store.check([f"attempt/{name}/all"]):
                answered = json.loads(store.get(f"attempt/{name}/all"))
                if answered.get(str(rank)) == mine:
                    return name
        time.sleep(_POLL)
    raise CommTimeoutError(
        f"rank 0 did not answer within {timeout:g} seconds (waited for by rank {rank})"
    )
