"""An exception from outside while servers or other ranks are asked: the pass goes on exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pyg_scale
from pyg_scale.loader import NeighborLoader
from tests.distributed.across import in_parts, on_ranks, shares, spread
from tests.distributed.served import Served, graph
from tests.loader.test_interrupted import Interrupts, add_noise, go_on

FOLDERS = tuple(
    str(Path(pyg_scale.__file__).parent / name) for name in ("loader", "distributed", "comm")
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    pyg_scale.save(graph(60, 300), tmp_path / "graph")
    found = Served(tmp_path / "graph", 2)
    yield found
    found.close()


def run(loader: Any, wanted: list[Any], interrupts: Interrupts) -> None:
    """Passes until no line is left at which none was interrupted."""
    before = -1
    while interrupts.came > before:
        before = interrupts.came
        loader.set_epoch(0)
        go_on(loader, wanted, interrupts)
    assert interrupts.came > 60 / interrupts.every


@pytest.mark.parametrize("every", [23, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_servers_are_asked(served: Served, num_workers: int, every: int) -> None:
    data = served.open()

    def make() -> Any:
        kwargs: dict[str, Any] = {"batch_size": 4, "seed": 5, "shuffle": True}
        return NeighborLoader(data, [3, 2], transform=add_noise, num_workers=num_workers, **kwargs)

    run(make(), list(make()), Interrupts(every, FOLDERS))


@pytest.mark.parametrize("every", [97, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_are_asked(tmp_path: Path, num_workers: int, every: int) -> None:
    """Rank 0 is interrupted; the other one answers, and waits at the end."""
    data = graph(60, 300)

    def work(opened: Any) -> None:
        def make() -> Any:
            kwargs: dict[str, Any] = {"batch_size": 4, "seed": 5, "split_seeds": False}
            return NeighborLoader(opened, [3, 2], num_workers=num_workers, **kwargs)

        if opened.comm.rank == 0:
            loader, wanted = make(), list(make())
            run(loader, wanted, Interrupts(every, FOLDERS))
        opened.comm.barrier()

    on_ranks(spread(in_parts(data, tmp_path, 2), shares(2, 2)), work)
