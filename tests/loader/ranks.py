"""Ranks in threads of this process, and the loader that they share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from pyg_scale.comm import Group
from pyg_scale.comm.base import Communicator, Work
from pyg_scale.loader import NeighborLoader
from pyg_scale.testing import graphs
from pyg_scale.testing.ranks import run_ranks

DATA = graphs.hostile()


class Ranks(Communicator):
    """Ranks that can tell each other nothing but where they met."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.timeout = group, group.timeout
        self.rank, self.world_size = group.rank, group.world_size

    def _exchange(self, *_: Any) -> Work[Any]:
        raise AssertionError("seeds are shared without a collective")

    def close(self) -> None:
        self._break("it was closed")


def loader(comm: Communicator | None = None, data: Any = DATA, **kwargs: Any) -> NeighborLoader:
    kwargs = {"num_neighbors": [4, 3], "batch_size": 9, "seed": 1, "shuffle": True} | kwargs
    if comm is not None:
        kwargs = {"split_seeds": "global"} | kwargs
    return NeighborLoader(data, comm=comm, **kwargs)


def on_ranks(world_size: int, function: Callable[[Communicator], Any], **kwargs: Any) -> list[Any]:
    return run_ranks(world_size, lambda group: function(Ranks(group)), **kwargs)


def some_steps(own: NeighborLoader, steps: int) -> list[Any]:
    return list(itertools.islice(own, steps))


def in_turn(batches: list[list[Any]]) -> list[Any]:
    """What ranks got, in the order of the list."""
    steps = itertools.zip_longest(*batches)
    return [batch for step in steps for batch in step if batch is not None]
