"""Very many seeds in mapped files: nothing of them is copied, and nothing is sorted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from pyg_scale.comm.base import Communicator
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale.loader.seeds import epoch
from pyg_scale.ops import keys
from tests import preloaded
from tests.loader.batches import assert_same_batches
from tests.loader.ranks import on_ranks

DATA = Data(edge_index=torch.tensor([[1, 2, 3, 4, 0], [0, 1, 2, 3, 4]]), num_nodes=5)
COUNT = 8_000_000

SCRIPT = """
import numpy as np, torch
from torch_geometric.data import Data
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from tests.loader.ranks import on_ranks

def peak():  # KiB
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def mapped(path):
    return torch.from_numpy(np.load(path, mmap_mode="c"))

data = Data(edge_index=torch.tensor([[1, 2, 3, 4, 0], [0, 1, 2, 3, 4]]), num_nodes=5)
options = {{"num_neighbors": [2], "batch_size": 2, "shuffle": True, "seed": 1}}

def nodes(links, label, **more):
    return NeighborLoader(data, input_nodes=links[1], **options, **more)

def links(links, label, **more):
    ends = {{"edge_label_index": links, "edge_label": label, "neg_sampling": "binary"}}
    return LinkNeighborLoader(data, **ends, **options, **more)

def first(make, *seeds):
    next(iter(make(*seeds)))
    yield peak()
    on_ranks(2, lambda comm: next(iter(make(*seeds, comm=comm, split_batches=True))))
    yield peak()

few = torch.arange(10).view(2, 5) % 5, torch.zeros(5)
for make in (nodes, links):
    list(first(make, *few))  # what is needed once
    before = peak()
    for after in first(make, mapped({links!r}), mapped({label!r})):
        print(after - before)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("links")
    links = np.lib.format.open_memmap(folder / "links.npy", "w+", np.int64, (2, COUNT))
    for end in links:
        for begin in range(0, COUNT, 1 << 20):
            end[begin : begin + (1 << 20)] = np.arange(begin, min(COUNT, begin + (1 << 20))) % 5
    label = np.lib.format.open_memmap(folder / "label.npy", "w+", np.float32, (COUNT,))
    del links, label  # written; of zeros
    return {"links": str(folder / "links.npy"), "label": str(folder / "label.npy")}


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs the lists of Linux")
@pytest.mark.timeout(200)
def test_resident_memory_does_not_grow_with_the_seeds(files: dict[str, str]) -> None:
    """128 MB of links: a copy, a list of them, or all pages of the mapping would be seen."""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [preloaded.python(), "-c", SCRIPT.format(**files)],
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    # With a page that is looked at the system brings others, half a MiB of them.
    assert all(grown < 32 * 1024 for grown in map(int, done.stdout.split())), done.stdout


def mapped(tmp_path: Path, values: torch.Tensor) -> torch.Tensor:
    np.save(tmp_path / "values.npy", values.numpy())
    return torch.from_numpy(np.load(tmp_path / "values.npy", mmap_mode="c"))


def test_mapped_seeds_give_the_same_batches(tmp_path: Path) -> None:
    values = torch.arange(60).view(2, 30) * 7 % 5
    label = torch.arange(30) % 3
    both = []
    for links in (values, mapped(tmp_path, values)):
        own = LinkNeighborLoader(
            DATA, [2], links, label, neg_sampling="binary", batch_size=7, shuffle=True, seed=1
        )
        nodes = NeighborLoader(DATA, [2], links[1], batch_size=7, shuffle=True, seed=1)
        assert own.input_data.row.untyped_storage().data_ptr() != values.data_ptr()
        both.append((list(own), list(nodes)))
    assert own.input_data.row.data_ptr() == links.data_ptr()
    assert nodes.input_data.node.data_ptr() == links[1].data_ptr()
    for one, other in zip(*both):
        assert_same_batches(one, other)


def test_mapped_seeds_are_looked_at_when_a_batch_has_them(tmp_path: Path) -> None:
    values = mapped(tmp_path, torch.tensor([[0, 1, 2, 3], [4, 0, 1, 5]]))
    links = iter(LinkNeighborLoader(DATA, [2], values, batch_size=3))
    assert next(links).num_nodes == 5
    with pytest.raises(IndexError, match="5 as a destination, but there are 5 nodes"):
        next(links)
    nodes = iter(NeighborLoader(DATA, [2], values[1], batch_size=3))
    assert next(nodes).batch_size == 3
    with pytest.raises(IndexError, match="input_nodes has node 5, but there are 5 nodes"):
        next(nodes)


# The order #################################################################################


def positions(loader: Any, state: Any = None, count: int = 10**9) -> list[list[int]]:
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for batch in loader:
        found.append(batch.input_id.tolist())
        if len(found) == count:
            break
    return found


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tests of computed orders need no millions of seeds."""
    monkeypatch.setattr(epoch, "LISTED", 100)
    monkeypatch.setattr("pyg_scale.loader.seeds.state.LISTED", 100)
    monkeypatch.setattr(epoch, "_AT_ONCE", 50)


def nodes(count: int, **kwargs: Any) -> NeighborLoader:
    options = {"batch_size": 9, "shuffle": True, "seed": 3} | kwargs
    return NeighborLoader(DATA, [1], torch.arange(count) % 5, **options)


@pytest.mark.usefixtures("few_are_many")
def test_the_order_is_the_permutation_for_any_workers_ranks_and_stops() -> None:
    key = keys.fold(0, 3, 0, keys.SHUFFLE)
    whole = keys.permuted(key, 101, torch.arange(101))
    expected = [each.tolist() for each in whole.split(9)]
    assert positions(nodes(101)) == expected
    assert positions(nodes(101, num_workers=2)) == expected
    assert positions(nodes(101, num_workers=2, worker_type="process")) == expected
    assert positions(nodes(100)) != positions(nodes(101))[:11]

    def ranks(comm: Communicator, **kwargs: Any) -> list[list[int]]:
        return positions(nodes(101, comm=comm, **kwargs))

    found = on_ranks(3, ranks)
    assert [found[b % 3][b // 3] for b in range(12)] == expected
    found = on_ranks(2, lambda comm: ranks(comm, split_batches=True))
    assert [one + other for one, other in zip(*found)] == expected
    begun = nodes(101)
    assert positions(begun, count=4) == expected[:4]
    state = begun.state_dict()
    assert positions(nodes(101), state) == expected[4:]
    assert state["order"] == "permuted" and "order" not in nodes(100).state_dict()


@pytest.mark.usefixtures("few_are_many")
def test_a_state_of_another_order_is_refused() -> None:
    begun = nodes(101)
    next(iter(begun))
    state = begun.state_dict()
    del state["order"]  # as an earlier release
    with pytest.raises(ValueError, match="sorted when the state was taken.*begin the epoch again"):
        nodes(101).load_state_dict(state)
    assert "order" not in nodes(101, shuffle=False).state_dict()
    with pytest.raises(ValueError, match="num_seeds=100"):
        nodes(101).load_state_dict(nodes(100).state_dict())


@pytest.mark.usefixtures("few_are_many")
def test_the_index_sampler_of_a_loader_gives_the_order() -> None:
    own = nodes(230)
    assert sorted(own.sampler) == list(range(230)) and list(own.sampler) != list(own.sampler)
