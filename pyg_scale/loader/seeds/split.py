"""The arguments ``split_seeds``, ``uneven``, ``split_batches`` and ``comm`` of loaders."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_scale import comm as comms
from pyg_scale.comm import Communicator, Group
from pyg_scale.graph.base import directory_of
from pyg_scale.graph.topology import NodeType
from pyg_scale.loader.seeds.duplicates import DuplicateSeedCheck, group_of_torch
from pyg_scale.loader.seeds.sharding import SeedSharding
from pyg_scale.loader.seeds.share import UNEVEN

SPLIT_SEEDS = ("global", "part")


def check_split_seeds(split_seeds: Any, uneven: Any, split_batches: Any, comm: Any) -> None:
    """Refuse what these arguments cannot be.

    Raises:
        TypeError: If ``comm`` is no communicator, or ``split_batches`` no bool.
        ValueError: If a name is none of those that there are, or means nothing here.
    """
    if split_seeds not in (None, False, *SPLIT_SEEDS) or split_seeds is True:
        raise ValueError(
            f"split_seeds must be 'global', 'part', False or None (got {split_seeds!r})"
        )
    if uneven not in UNEVEN:
        raise ValueError(f"uneven must be one of {', '.join(UNEVEN)} (got {uneven!r})")
    if comm is not None and not isinstance(comm, Communicator):
        raise TypeError(f"comm must be a Communicator (got {type(comm).__name__})")
    if not isinstance(split_batches, bool):
        raise TypeError(f"split_batches must be a bool (got {split_batches!r})")
    if split_batches and split_seeds is False:
        raise ValueError(
            "split_batches=True is about ranks that share seeds, but split_seeds=False: leave out "
            "one of them"
        )
    if split_batches and uneven != "join":
        raise ValueError(
            f"uneven={uneven!r} is about ranks that have no batch in the last step, but with "
            "split_batches=True all have a piece of every step: leave out one of them"
        )
    if split_seeds is False and uneven != "join":
        raise ValueError(
            f"uneven={uneven!r} is about ranks that share seeds, but split_seeds=False: leave out "
            "one of them"
        )


def sharing_of(
    loader: Any, comm: Communicator | None
) -> tuple[SeedSharding | None, DuplicateSeedCheck | None]:
    """The sharing of the seeds of a loader or, without any, the check that ranks differ.

    Args:
        loader: A :class:`~pyg_scale.loader.base.SubgraphLoader`, with its seeds and what it was
            told about sharing them.
        comm: See :class:`~pyg_scale.loader.NodeLoader`.

    Raises:
        ValueError: If the seeds cannot be shared as asked for.
    """
    name, split_batches = type(loader).__name__, loader.split_batches
    split_seeds, uneven = loader.split_seeds, loader.uneven
    opened = communicator_of(loader) if comm is None else comm
    several = opened is not None and opened.world_size > 1
    if not loader._own_order:
        if split_seeds or split_batches:
            said = f"split_seeds={split_seeds!r}" if split_seeds else "split_batches=True"
            raise ValueError(
                f"{said} shares out the order of the loader, but sampler= or "
                "batch_sampler= is an order of its own: leave out one of them (PyTorch Lightning: "
                "Trainer(use_distributed_sampler=False))"
            )
        return None, None
    if split_batches and loader.batch_size is None:
        raise ValueError("split_batches=True cuts batches, but batch_size=None makes none")
    mode = split_seeds
    if mode is None and (opened is not None or split_batches):
        mode = "global"
    if not mode:
        if mode is None and uneven != "join" and not _may_have_ranks(loader):
            raise ValueError(
                f"uneven={uneven!r} is about ranks that share seeds: pass split_seeds='global'"
            )
        group = opened.group if opened is not None and several else group_of_torch()
        if group is None or group.store is None:
            return None, None
        return None, DuplicateSeedCheck(name, group, loader._seed_tensors())
    part = loader._parts_of_seeds() if mode == "part" else None
    if mode == "part" and part is None:
        raise ValueError(
            f"split_seeds='part' needs seeds of a graph directory, which knows in which part they "
            f"are (data is {type(getattr(loader, 'data', None)).__name__}): open one with "
            "pyg_scale.open(), or pass split_seeds='global'"
        )
    group = _group_of(opened)
    if group.world_size == 1 and (part is None or split_batches):
        return None, None
    owners = None
    if part is not None and opened is communicator_of(loader):
        owners = getattr(getattr(loader.data, "owners", None), "ranks_of", None)
    options = {"loader": name, "split_seeds": mode, "uneven": uneven}
    options |= {"split_batches": split_batches, **loader._identity()}
    sharing = SeedSharding(
        name,
        group,
        uneven,
        split_batches=split_batches,
        seeds=loader._seed_tensors(),
        options=options,
        part=part,
        owners=owners,
    )
    return sharing, None


def parts_of_nodes(data: Any, node_type: NodeType, nodes: Tensor) -> Tensor | None:
    """The part of nodes of an opened graph directory.

    Args:
        data: What a loader was given.
        node_type: Their type.
        nodes: Their ids ``[n]``.

    Returns:
        ``int32`` ``[n]``, or ``None`` if ``data`` is no opened directory.
    """
    # Servers keep the books of a graph: a client cannot say who has which node.
    books = getattr(directory_of(data), "books", {})
    if node_type not in books:
        return None
    return books[node_type].part_of(nodes).to(torch.int32)


def communicator_of(loader: Any) -> Communicator | None:
    """The communicator of the graph that a loader was given, if ranks opened it together."""
    found = getattr(getattr(loader, "data", None), "comm", None)
    return found if isinstance(found, Communicator) else None


def _may_have_ranks(loader: Any) -> bool:
    """Return True if the same script shares seeds when it runs on several ranks."""
    return directory_of(getattr(loader, "data", None)) is not None


def _group_of(comm: Communicator | None) -> Group:
    """The ranks of a communicator, or else those of this process.

    Raises:
        ValueError: If the communicator does not say where its ranks met.
    """
    if comm is None:
        known = dist.is_available() and dist.is_initialized()
        where = [os.environ.get(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")]
        return _group_of_process(dist.group.WORLD if known else None, *where)
    if comm.world_size == 1:
        return Group(None, 0, 1, comm.timeout)
    if comm.group is None:
        raise ValueError(
            f"{type(comm).__name__} does not say where its ranks met: set its attribute `group`"
        )
    return comm.group


@functools.lru_cache(maxsize=1)
def _group_of_process(*_: Any) -> Group:
    return comms.group(name="seeds")
