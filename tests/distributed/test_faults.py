"""Ranks that die, hang or answer nonsense: an error that names them, in time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import pyg_scale
from pyg_scale.comm import Counting, Fault, Faulty, Group
from pyg_scale.comm.gloo import Gloo
from pyg_scale.errors import CommError, CommTimeoutError
from pyg_scale.loader import NeighborLoader
from pyg_scale.sampler import ReferenceSampler
from pyg_scale.testing import graphs
from pyg_scale.testing.ranks import run_ranks
from tests.distributed.across import in_parts, on_ranks, shares, spread
from tests.loader.batches import assert_same_batches

pytestmark = pytest.mark.filterwarnings("ignore:all . ranks iterate over the same:UserWarning")


def _loader(data: Any, **options: Any) -> NeighborLoader:
    return NeighborLoader(
        data, [4, 3], torch.arange(30), batch_size=9, seed=4, split_seeds=False, **options
    )


def _with_faults(paths: list[Path], faults: list[Fault], check: Any, timeout: float) -> None:
    """Ranks of which the last one has faults, and the first one loads batches."""
    done = threading.Event()
    last = len(paths) - 1

    def work(group: Group) -> None:
        with Faulty(Gloo.join(group), faults if group.rank == last else []) as comm:
            data = pyg_scale.open(paths[group.rank], comm=comm)
            try:
                if group.rank == 0:
                    check(data)
            finally:
                if group.rank == 0:
                    done.set()
                assert done.wait(30)
                data.close(0.0)

    run_ranks(len(paths), work, timeout=timeout)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        ("drop", CommTimeoutError, "rank 2 did not answer the request 'edges' within [23]"),
        ("raise", CommError, "rank 2 could not answer: CommError: answer \\d"),
        ("garble", CommError, "the answer of rank 2 cannot be used"),
    ],
)
def test_a_rank_that_fails_is_named(
    tmp_path: Path, action: str, error: type, message: str, num_workers: int
) -> None:
    paths = spread(in_parts(graphs.hostile(), tmp_path, 3), shares(3, 3))

    def check(data: Any) -> None:
        with pytest.raises(error, match=message):
            list(_loader(data, num_workers=num_workers))

    _with_faults(paths, [Fault(action, of="answer")], check, timeout=3.0)


def test_what_is_late_is_no_error(tmp_path: Path) -> None:
    data = graphs.hostile()
    paths = spread(in_parts(data, tmp_path, 2), shares(2, 2))
    expected = list(_loader(data))
    late = [Fault("delay", seconds=0.01, of="answer"), Fault("delay", seconds=0.01, of="request")]
    _with_faults(paths, late, lambda g: assert_same_batches(expected, _loader(g)), timeout=20.0)


def test_a_rank_that_has_gone_is_named(tmp_path: Path) -> None:
    paths = spread(in_parts(graphs.hostile(), tmp_path, 2), shares(2, 2))
    gone = threading.Event()

    def work(group: Group) -> None:
        with Gloo.join(group) as comm:
            data = pyg_scale.open(paths[group.rank], comm=comm)
            if group.rank == 1:
                data.close(0.0)
                gone.set()
                return
            assert gone.wait(20)
            with pytest.raises(CommError, match="rank 1"):
                list(_loader(data))
            data.close(0.0)

    run_ranks(2, work)


def test_only_unique_nodes_of_other_ranks_are_asked_for(tmp_path: Path) -> None:
    data = graphs.hostile()
    paths = spread(in_parts(data, tmp_path, 2), shares(2, 2))

    def work(found: Any) -> dict[str, Any]:
        before = found.comm.traffic()
        seeds = torch.arange(100).repeat(3)
        loader = NeighborLoader(found, [0], seeds, batch_size=300, seed=1, split_seeds=False)
        list(loader)
        after = found.comm.traffic()["request edges"]
        assert "request edges" not in before
        elsewhere = found.graph_directory.books[None].part_of(torch.arange(100)) != found.comm.rank
        record = after.sent - 6 * 8 - 4 * int(elsewhere.sum())
        assert after.calls == 1 and 0 < record < 200, after
        return {}

    on_ranks(paths, work, wrap=Counting)


def test_a_sampler_that_is_no_plugin(tmp_path: Path) -> None:
    class Mine(ReferenceSampler):
        pass

    paths = spread(in_parts(graphs.hostile(), tmp_path, 2), shares(2, 2))

    def work(found: Any) -> None:
        with pytest.raises(NotImplementedError, match="Mine is not a plugin"):
            list(_loader(found, neighbor_sampler=Mine()))

    on_ranks(paths, work)
