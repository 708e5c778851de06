"""Ranks in one process that have the features of a directory together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore

from pyg_scale.comm import Communicator, Group, Service, Work
from pyg_scale.comm.gloo import Gloo
from pyg_scale.distributed.features.serve import FEATURES, FeatureAnswers
from pyg_scale.distributed.features.store import RankFeatures
from pyg_scale.store.directory import GraphDirectory


@dataclass(frozen=True)
class Shared:
    """Part ``p`` is that of rank ``p % world_size``; nobody reads another's."""

    rank: int
    world_size: int
    num_parts: int

    @property
    def direct(self) -> frozenset[int]:
        return frozenset(p for p in range(self.num_parts) if p % self.world_size == self.rank)

    def holders(self, part: int) -> list[int]:
        assert part not in self.direct
        return [part % self.world_size]


class Recorder(Service):
    """Records requests and the bytes of answers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.rank, self.world_size, self.timeout = service.rank, service.world_size, service.timeout
        self.requests: list[tuple[int, list[Tensor]]] = []
        self.received = 0
        self.on_wait: Callable[[], object] = lambda: None

    def request(self, rank: int, name: str, tensors: Sequence[Tensor]) -> Work[list[Tensor]]:
        self.requests.append((rank, list(tensors)))
        return _Counted(self, self._service.request(rank, name, tensors))

    def close(self, wait: float = 0.0) -> list[int]:
        return self._service.close(wait)

    def take(self) -> tuple[list[int], int]:
        """Whom was asked, and how many bytes came, since this was asked last."""
        found = [rank for rank, _ in self.requests], self.received
        self.requests, self.received = [], 0
        return found


class _Counted(Work[list[Tensor]]):
    def __init__(self, recorder: Recorder, work: Work[list[Tensor]]) -> None:
        self._recorder, self._work = recorder, work

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        self._recorder.on_wait()
        found = self._work.wait(timeout)
        self._recorder.received += sum(each.nbytes for each in found)
        return found


class Ranks:
    """Every rank of a directory, in this process.

    Attributes:
        services: One per rank, recording.
        features: One per rank that asks.
        owners: Who has which part, one per rank.
    """

    def __init__(
        self,
        path: Path,
        world_size: int,
        *,
        handler: Callable[[int, FeatureAnswers], Any] = lambda rank, answers: answers,
        timeout: float = 20.0,
        asking: Collection[int] | None = None,
        **options: Any,
    ) -> None:
        self.comms: list[Communicator] = []
        self.services: list[Recorder] = []
        self.features: list[RankFeatures] = []
        self.owners: list[Shared] = []
        store, found = HashStore(), dict[int, Any]()

        def join(rank: int) -> None:
            group = Group(PrefixStore("ranks", store), rank, world_size, timeout)
            comm = Gloo.join(group)
            directory = GraphDirectory(path)
            owners = Shared(rank, world_size, directory.meta.num_parts)
            answers = handler(rank, FeatureAnswers(directory, owners.direct))
            service = Recorder(comm.serve({FEATURES: answers}))
            found[rank] = comm, service, directory, owners

        threads = [threading.Thread(target=join, args=(r,), daemon=True) for r in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(found) == world_size, "a rank did not come"
        for rank in range(world_size):
            comm, service, directory, owners = found[rank]
            self.comms.append(comm)
            self.services.append(service)
            self.owners.append(owners)
            if asking is None or rank in asking:
                self.features.append(RankFeatures(directory, service, owners, **options))

    def close(self) -> None:
        for each in [*self.services, *self.comms]:
            each.close()


@contextmanager
def ranks(path: Path, world_size: int, **options: Any) -> Iterator[Ranks]:
    made = Ranks(path, world_size, **options)
    try:
        yield made
    finally:
        made.close()


def content_of(data: Any) -> Mapping[tuple[Any, str], Tensor]:
    """Every tensor with a row per node or edge, by group and name."""
    found: dict[tuple[Any, str], Tensor] = {}
    hetero = hasattr(data, "node_types")
    stores = [*data.node_items(), *data.edge_items()] if hetero else [(None, data._store)]
    for kind, store in stores:
        for name, value in store.items():
            if not isinstance(value, Tensor) or name == "edge_index":
                continue
            if hetero or store.is_node_attr(name):
                found[kind, name] = value
            elif store.is_edge_attr(name):
                found[(None, None), name] = value
    return found


def some_rows(num_rows: int, count: int, seed: int) -> Tensor:
    """Rows, some of them more than once."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_rows, (count,), generator=generator)
