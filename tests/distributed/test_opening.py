"""What ``pyg_scale.open`` returns on several ranks, and how long it lasts."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.comm.gloo import Gloo
from pyg_scale.distributed import ranks
from pyg_scale.distributed.graph import RankData, RankHeteroData
from pyg_scale.errors import CommError, CommTimeoutError, GraphDirectoryError
from pyg_scale.loader import NeighborLoader
from pyg_scale.store.directory.data import DirectoryData
from pyg_scale.testing import graphs
from pyg_scale.testing.ranks import run_ranks
from tests.distributed.across import in_parts, on_ranks, shares, spread
from tests.loader.batches import assert_same_batches
from tests.store.directory.graphs import everything

pytestmark = pytest.mark.filterwarnings("ignore:all . ranks iterate over the same:UserWarning")


def _neighbors(data: Any, nodes: Any = None, **options: Any) -> NeighborLoader:
    return NeighborLoader(data, [4, 3], nodes, batch_size=9, seed=4, split_seeds=False, **options)


def test_it_is_a_data(tmp_path: Path) -> None:
    data = everything()
    path = in_parts(data, tmp_path, 3, index_sets={"train": data.train_mask})

    def work(found: Any) -> None:
        assert type(found) is RankData and isinstance(found, Data)
        assert found.num_nodes == data.num_nodes and found.num_edges == data.num_edges
        assert found.num_features == data.num_features
        assert found.keys() == data.keys()
        assert torch.equal(found.train_mask, data.train_mask)
        assert torch.equal(found.column, data.column) and torch.equal(found.y, data.y)
        assert found.name == data.name and found.num_classes == 3
        assert torch.equal(found.index_set("train"), data.train_mask.nonzero().view(-1))
        assert f"x=[{data.num_nodes}, {data.x.size(1)}]" in repr(found)
        for name in ("x", "edge_index", "edge_features"):
            with pytest.raises(GraphDirectoryError, match="NeighborLoader") as caught:
                found[name]
            assert "spread over ranks" in str(caught.value)
        other = copy.copy(found)
        assert other.comm is found.comm and copy.deepcopy(found).owners is found.owners
        with pytest.raises(TypeError, match="threads"):
            pickle.dumps(found)

    on_ranks(spread(path, shares(2, 3)), work)


def test_it_is_a_hetero_data(tmp_path: Path) -> None:
    data = graphs.hetero()

    def work(found: Any) -> None:
        assert type(found) is RankHeteroData and isinstance(found, HeteroData)
        assert found.metadata() == data.metadata()
        for node_type in data.node_types:
            assert found[node_type].num_nodes == data[node_type].num_nodes

    on_ranks(spread(in_parts(data, tmp_path, 3), shares(2, 3)), work)


def test_one_process_is_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = in_parts(graphs.hostile(), tmp_path, 2)
    assert type(pyg_scale.open(path)) is DirectoryData
    assert pyg_scale.open(path, 1).number == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert type(pyg_scale.open(path, comm="local")) is DirectoryData
    assert pyg_scale.open(path, 1).number == 1
    with pytest.raises(ValueError, match="start with torchrun"):
        pyg_scale.open(path)
    with pytest.raises(ValueError, match="through must be one of"):
        pyg_scale.open(path, through="pigeons")


def test_one_part_is_read_by_all_ranks(tmp_path: Path) -> None:
    data = everything()
    path = pyg_scale.save(data, tmp_path / "whole")
    expected = list(_neighbors(data))

    def work(found: Any) -> None:
        assert torch.equal(found.x, data.x) and torch.equal(found.edge_index, data.edge_index)
        assert_same_batches(expected, _neighbors(found))

    on_ranks([path] * 3, work)


def test_ranks_do_what_they_like(tmp_path: Path) -> None:
    """One leaves its loop, one evaluates alone, one does nothing; and one has no part at all."""
    data = graphs.hostile()
    expected = list(_neighbors(data))
    paths = spread(in_parts(data, tmp_path, 3), [[0], [1], [2], []])

    def work(found: Any) -> None:
        rank = found.comm.rank
        if rank == 0:
            assert_same_batches(expected, _neighbors(found))
            assert_same_batches(expected, _neighbors(found, num_workers=2))
        elif rank == 1:
            for _ in _neighbors(found, num_workers=2):
                break
        elif rank == 3:
            assert not found.owners.owned()
            assert_same_batches(expected, _neighbors(found))

    on_ranks(paths, work)


def test_a_part_without_nodes(tmp_path: Path) -> None:
    data = graphs.hostile(num_nodes=40)
    path = tmp_path / "parts"
    part = torch.zeros(data.num_nodes, dtype=torch.int32)
    part[20:] = 2
    pyg_scale.partition(data, 3, path=path, assignment=part)
    expected = list(_neighbors(data))
    paths = spread(path, [[0], [1], [2]])
    on_ranks(paths, lambda found: assert_same_batches(expected, _neighbors(found)))


def test_an_end_of_use(tmp_path: Path) -> None:
    path = in_parts(graphs.hostile(), tmp_path, 2)
    paths = spread(path, [[0], [1]])

    def work(group: Any) -> None:
        with Gloo.join(group) as comm:
            data = pyg_scale.open(paths[group.rank], comm=comm)
            loader = _neighbors(data)
            next(iter(loader))
            data.close()
            data.close()
            assert data.ranks.closed
            with pytest.raises(CommError, match="was closed on this rank"):
                next(iter(loader))
            comm.barrier()  # a communicator that was given is not closed

    run_ranks(2, work)


@pytest.mark.parametrize("again", [False, True])
def test_a_dropped_graph_serves_the_others_until_they_are_done(tmp_path: Path, again: bool) -> None:
    """Also in a script that caught what failed, and has opened the graph once more."""
    if again:
        ranks.script_failed()
    data = graphs.hostile()
    expected = list(_neighbors(data))
    paths = spread(in_parts(data, tmp_path, 2), [[0], [1]])
    dropped = threading.Event()

    def work(group: Any) -> None:
        with Gloo.join(group) as comm:
            found = pyg_scale.open(paths[group.rank], comm=comm)
            if group.rank == 1:
                del found
                gc.collect()
                dropped.set()
                return
            assert dropped.wait(20)
            time.sleep(0.2)
            assert_same_batches(expected, _neighbors(found))
            found.close()

    run_ranks(2, work)


def test_closing_says_who_has_not(tmp_path: Path) -> None:
    path = in_parts(graphs.hostile(), tmp_path, 2)
    waited = threading.Event()

    def work(group: Any) -> None:
        with Gloo.join(group) as comm:
            data = pyg_scale.open(path, comm=comm)
            if group.rank == 0:
                with pytest.raises(CommTimeoutError, match="rank 1 did not close"):
                    data.close(0.3)
                waited.set()
            else:
                assert waited.wait(20)
                data.close()

    run_ranks(2, work)


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    data = graphs.hetero()

    def work(found: Any) -> None:
        with pytest.raises(ValueError, match="worker_type='thread'"):
            _neighbors(found, "item", num_workers=1, worker_type="process")
        with pytest.raises(ValueError, match="is_sorted"):
            _neighbors(found, "item", is_sorted=True)
        with pytest.raises(ValueError, match="time_attr='time'"):
            _neighbors(found, "item", time_attr="time")
        changed = copy.copy(found)
        del changed[changed.edge_types[0]]
        with pytest.raises(ValueError, match="types of .* were changed"):
            _neighbors(changed, "item")

    on_ranks(spread(in_parts(data, tmp_path, 2), [[0], [1]]), work)


def test_a_process_alone_loads_nothing_that_talks_to_others(tmp_path: Path) -> None:
    """Most of the time that a first ``open`` takes is that of what it imports."""
    pyg_scale.save(everything(), tmp_path / "graph")
    code = (
        "import sys, pyg_scale; pyg_scale.open(sys.argv[1]); "
        "print(*(m for m in sys.modules if m.startswith('pyg_scale.')))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "graph")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    loaded = set(done.stdout.split())
    assert "pyg_scale.store.directory.reader" in loaded
    others = ("pyg_scale.comm", "pyg_scale.loader", "pyg_scale.sampler", "pyg_scale.store.cache")
    assert not [name for name in loaded if name.startswith(others)]
