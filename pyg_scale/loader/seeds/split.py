"""The arguments ``split_seeds``, ``uneven``, ``split_batches`` and ``comm`` of loaders."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_scale import comm as comms
from pyg_scale.comm import Communicator, Group
from pyg_scale.graph.base import HasBooks, HasOwners, OnRanks, directory_of
from pyg_scale.graph.topology import NodeType
from pyg_scale.loader.seeds.duplicates import DuplicateSeedCheck
from pyg_scale.loader.seeds.sharding import SeedSharding
from pyg_scale.loader.seeds.share import UNEVEN

SPLIT_SEEDS = ("global", "part")


def _check(split_seeds: Any, uneven: Any, split_batches: Any, comm: Any) -> None:
    """Refuse what these arguments cannot be."""
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


@dataclass(frozen=True)
class SharedSeeds:
    """The seeds of a loader, and its arguments about sharing them with other ranks.

    Attributes:
        name: The name of the loader's class.
        data: The loader's graph.
        split_seeds: See :class:`~pyg_scale.loader.NodeLoader`.
        uneven: See there.
        split_batches: See there.
        batch_size: The loader's; ``None`` if it makes no batches.
        own_order: True if the loader has no ``sampler=`` nor ``batch_sampler=``.
        tensors: Returns the seeds, one row per seed.
        parts: Returns the part of each seed, ``int32`` ``[num_seeds]``, or ``None``.
        identity: Returns the properties in which loaders with other batches differ.
    """

    name: str
    data: Any
    split_seeds: str | bool | None
    uneven: str
    split_batches: bool
    batch_size: int | None
    own_order: bool
    tensors: Callable[[], list[Tensor]]
    parts: Callable[[], Tensor | None]
    identity: Callable[[], dict[str, Any]]

    def among(
        self, comm: Communicator | None
    ) -> tuple[SeedSharding | None, DuplicateSeedCheck | None]:
        """The sharing of the seeds or, without any, the check that ranks differ.

        Args:
            comm: See :class:`~pyg_scale.loader.NodeLoader`.

        Raises:
            TypeError: If ``comm`` is no communicator, or ``split_batches`` no bool.
            ValueError: If an argument is none of those that there are, or means nothing here, or
                the seeds cannot be shared as asked for.
        """
        _check(self.split_seeds, self.uneven, self.split_batches, comm)
        opened = communicator_of(self.data) if comm is None else comm
        mode = self._mode(opened)
        if mode is None:
            return None, None
        if not mode:
            several = opened is not None and opened.world_size > 1
            group = opened.group if opened is not None and several else _group_of_torch()
            if group is None or group.store is None:
                return None, None
            return None, DuplicateSeedCheck(self.name, group, self.tensors())
        part = self.parts() if mode == "part" else None
        if mode == "part" and part is None:
            raise ValueError(
                f"split_seeds='part' needs seeds of a graph directory, which knows in which part "
                f"they are (data is {type(self.data).__name__}): open one with pyg_scale.open(), "
                "or pass split_seeds='global'"
            )
        group = _group_of(opened)
        if group.world_size == 1 and (part is None or self.split_batches):
            return None, None
        owners = None
        if part is not None and opened is communicator_of(self.data):
            owners = self.data.owners.ranks_of if isinstance(self.data, HasOwners) else None
        options: dict[str, Any] = {"loader": self.name, "split_seeds": mode, "uneven": self.uneven}
        options |= {"split_batches": self.split_batches, **self.identity()}
        sharing = SeedSharding(
            self.name,
            group,
            self.uneven,
            split_batches=self.split_batches,
            seeds=self.tensors(),
            options=options,
            part=part,
            owners=owners,
        )
        return sharing, None

    def _mode(self, opened: Communicator | None) -> str | bool | None:
        """The sharing mode: "global", "part" or False (not at all); None if nothing can be said."""
        if not self.own_order:
            if self.split_seeds or self.split_batches:
                said = "split_batches=True"
                if self.split_seeds:
                    said = f"split_seeds={self.split_seeds!r}"
                raise ValueError(
                    f"{said} shares out the order of the loader, but sampler= or batch_sampler= is "
                    "an order of its own: leave out one of them (PyTorch Lightning: "
                    "Trainer(use_distributed_sampler=False))"
                )
            return None
        if self.split_batches and self.batch_size is None:
            raise ValueError("split_batches=True cuts batches, but batch_size=None makes none")
        if self.split_seeds is not None:
            return self.split_seeds
        if opened is not None or self.split_batches:
            return "global"
        # The same script shares seeds when it runs on several ranks.
        if self.uneven != "join" and directory_of(self.data) is None:
            raise ValueError(
                f"uneven={self.uneven!r} is about ranks that share seeds: pass split_seeds='global'"
            )
        return False


def parts_of_nodes(data: Any, node_type: NodeType, nodes: Tensor) -> Tensor | None:
    """The part of nodes of an opened graph directory.

    Args:
        data: What a loader was given.
        node_type: Their type.
        nodes: Their ids ``[n]``.

    Returns:
        ``int32`` ``[n]``, or ``None`` if ``data`` is no opened directory.
    """
    directory = directory_of(data)
    if not isinstance(directory, HasBooks) or node_type not in directory.books:
        return None
    part: Tensor = directory.books[node_type].part_of(nodes)
    return part.to(torch.int32)


def communicator_of(data: Any) -> Communicator | None:
    """The communicator of a graph, if ranks opened it together."""
    found = data.comm if isinstance(data, OnRanks) else None
    return found if isinstance(found, Communicator) else None


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


def _group_of_torch() -> Group | None:
    """The ranks of ``torch.distributed``, if there are several."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    return Group(PrefixStore("pyg_scale", store), dist.get_rank(), dist.get_world_size())
