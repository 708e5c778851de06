"""Sampling that waits for other ranks: several batches at a time, also without workers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pyg_scale.comm import Communicator, Faulty, Service
from pyg_scale.comm.service import Handler
from pyg_scale.distributed.serving import EDGES
from pyg_scale.loader import NeighborLoader
from pyg_scale.testing import graphs
from tests.distributed.across import in_parts, on_ranks, shares, spread
from tests.loader.batches import assert_same_batches


class Together(Faulty):
    """Answers the first two requests for edges when both are there."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm, [])
        self._both, self._calls = threading.Barrier(2), itertools.count()

    def serve(self, handlers: Mapping[str, Handler], *, num_threads: int = 2) -> Service:
        def edges(tensors: list[Tensor]) -> Any:
            if next(self._calls) < 2:
                self._both.wait(20)
            return handlers[EDGES](tensors)

        return super().serve({**handlers, EDGES: edges}, num_threads=max(2, num_threads))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_several_batches_are_sampled_at_a_time(tmp_path: Path, workers: int) -> None:
    data = graphs.hostile()

    def loader(graph: Any, workers: int = 0) -> NeighborLoader:
        options: dict[str, Any] = {"batch_size": 9, "seed": 4, "split_seeds": False}
        return NeighborLoader(graph, [4, 3], **options, num_workers=workers)

    def work(graph: Any) -> Any:
        return list(loader(graph, workers)) if graph.ranks.rank == 0 else []

    paths = spread(in_parts(data, tmp_path, 2), shares(2, 2))
    found, _ = on_ranks(paths, work, wrap=Together)
    assert_same_batches(list(loader(data)), found)
    left = [each.name for each in threading.enumerate() if "loader" in each.name]
    assert left == [], "threads end with the iteration"
