"""The ranks: those of ``torch.distributed``, of torchrun's environment, or this process alone."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale import plugins
from pyg_scale.comm.base import Communicator, JoinsRanks
from pyg_scale.comm.meeting import meet, open_store
from pyg_scale.comm.secret import known_secret

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# By number of ranks: one that met others in a smaller group counts as those that did not.
_counts: dict[int, itertools.count[int]] = defaultdict(itertools.count)


@dataclass(frozen=True)
class Group:
    """Ranks that can find each other.

    Attributes:
        store: The store in which they meet; each user of it needs a prefix of its own. ``None`` for
            one rank.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Seconds that a collective may take.
        secret: The secret that callers must prove to have before ranks answer them, by default that
            of the environment. With ``None``, ranks answer everyone who can read the store.
    """

    store: Any
    rank: int
    world_size: int
    timeout: float = 300.0
    secret: str | None = field(default_factory=known_secret, repr=False)


def group(timeout: float = 300.0, name: str | None = None) -> Group:
    """The ranks that this process belongs to, without connecting them; see :func:`connect`.

    Under torchrun all ranks call it: they agree on a part of the store that no earlier attempt
    has used.

    Args:
        timeout: Seconds that a collective may take.
        name: See :func:`connect`.

    Raises:
        ValueError: If the environment is incomplete, or its secret is not valid.
        CommTimeoutError: If not all ranks arrive in time; names those that did not.
    """
    return _group(timeout, name, meets="TORCHELASTIC_RUN_ID" in os.environ)


def connect(
    backend: str | Communicator | None = None, *, timeout: float = 300.0, name: str | None = None
) -> Communicator:
    """Connect this rank to the others. Every rank calls it, in the same order.

    The ranks are those of ``torch.distributed`` if that is initialised, else those of torchrun
    (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), else this process alone. A
    communicator has connections of its own: it may be used beside DDP, at any time.

    Args:
        backend: A name of the kind ``comm``; by default ``"local"`` for one rank, ``"hybrid"``
            where there is CUDA, else ``"gloo"``. An instance is returned as it is.
        timeout: Seconds that a collective may take.
        name: Names the connection; needed only where ranks do not all make the same ones in the
            same order.

    Raises:
        ValueError: If the environment is incomplete, its secret is not valid, or ``timeout`` is not
            above 0.
        UnknownPluginError: If the backend does not exist.
        TypeError: If the backend is for servers and clients only, or is not a communicator.
        CommTimeoutError: If not all ranks arrive in time; names those that did not.
        CommError: If the port of rank 0 is in use.
    """
    if isinstance(backend, Communicator):
        return backend
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds (got {timeout!r})")
    found = _group(timeout, name)
    if backend is None:
        several = "hybrid" if torch.cuda.is_available() else "gloo"
        backend = "local" if found.world_size == 1 else several
    kind = plugins.get("comm", backend)
    if not isinstance(kind, JoinsRanks):
        raise TypeError(f"comm {backend!r} cannot join ranks: it has no class method join(group)")
    joined = kind.join(found)
    joined.group = joined.group or found
    return joined


def num_ranks() -> int:
    """Number of ranks that :func:`connect` would connect, without connecting them.

    Raises:
        ValueError: If ``WORLD_SIZE`` is not a number.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_here() -> int:
    """The rank that :func:`connect` would give this process, without connecting it.

    Raises:
        ValueError: If ``RANK`` is not a number.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _group(timeout: float, name: str | None, meets: bool = True) -> Group:
    known_secret()  # first, so that no rank waits for one whose secret is wrong
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
    else:
        known = [key for key in _ENVIRONMENT if key in os.environ]
        if not known or os.environ.get("WORLD_SIZE") == "1":
            return Group(None, 0, 1, timeout)
        if len(known) < len(_ENVIRONMENT):
            missing = ", ".join(key for key in _ENVIRONMENT if key not in os.environ)
            raise ValueError(f"{', '.join(known)} are set, but not {missing}: start with torchrun")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = open_store(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            rank,
            hosted=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            timeout=timeout,
        )
    if name is None:
        name = f"{world_size}/{next(_counts[world_size])}"
    store = PrefixStore(f"pyg_scale/{name}", store)
    if meets:
        store = meet(store, rank, world_size, timeout=timeout).store
    return Group(store, rank, world_size, timeout)
