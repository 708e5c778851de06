"""Snapshots of a graph that grows, on several ranks and from servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pyg_scale
from pyg_scale.errors import GraphDirectoryError
from pyg_scale.loader import NeighborLoader
from pyg_scale.testing import graphs
from tests.distributed.across import on_ranks
from tests.distributed.served import Served
from tests.loader.batches import assert_same_batches
from tests.store.directory.appended import grown, in_order

pytestmark = pytest.mark.filterwarnings("ignore:all . ranks iterate over the same:UserWarning")
STEPS = 3


def loader(data: Any, **options: Any) -> NeighborLoader:
    return NeighborLoader(
        data, [4, 3], torch.arange(30), batch_size=9, seed=4, split_seeds=False, **options
    )


@pytest.mark.parametrize("options", [{}, {"time_attr": "time"}, {"weight_attr": "weight"}], ids=str)
def test_on_ranks(tmp_path: Path, options: dict[str, str]) -> None:
    states = grown(in_order(graphs.hostile(), STEPS), tmp_path / "graph", STEPS, **options)
    for number in (1, None):
        expected = list(loader(states[STEPS - 1 if number is None else number], **options))

        def work(found: Any, expected: list[Any] = expected) -> None:
            assert_same_batches(expected, loader(found, **options))

        on_ranks([tmp_path / "graph"] * 2, work, snapshot=number)


def test_ranks_at_other_snapshots_are_refused(tmp_path: Path) -> None:
    data = in_order(graphs.hostile(), STEPS)
    grown(data, tmp_path / "graph", STEPS)
    grown(data, tmp_path / "other", STEPS)
    for paths, snapshot, words in (
        (["graph", "other"], None, "which is another graph than"),
        (["graph", "graph"], 7, "no snapshot 7"),
    ):
        with pytest.raises(ExceptionGroup) as caught:
            on_ranks([tmp_path / path for path in paths], lambda found: None, snapshot=snapshot)
        for error in caught.value.exceptions:
            assert isinstance(error, GraphDirectoryError) and words in str(error)


def test_from_servers(tmp_path: Path) -> None:
    states = grown(in_order(graphs.hostile(), STEPS), tmp_path / "graph", STEPS)
    servers = Served(tmp_path / "graph", 1)
    try:
        opened = servers.open()
        pyg_scale.append(tmp_path / "graph", edges=states[0])
        expected = NeighborLoader(states[-1], [4, 3], torch.arange(30), batch_size=9, seed=4)
        found = NeighborLoader(opened, [4, 3], torch.arange(30), batch_size=9, seed=4)
        assert_same_batches(expected, found)
        assert torch.equal(opened.x, states[-1].x)
    finally:
        servers.close()
    with pytest.raises(ValueError, match="snapshot= is for directories"):
        pyg_scale.open("tcp://localhost:1", snapshot=1)
