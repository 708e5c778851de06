"""The last events of nodes: PyG's ring buffer where that is right, brute force everywhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn.models.tgn import LastNeighborLoader as PyGLoader

from pyg_scale.loader import LastNeighborLoader
from pyg_scale.ops import library
from pyg_scale.train import Checkpoint

Found = tuple[Tensor, Tensor, Tensor]


class EveryEvent:
    """All events of all nodes, in lists."""

    def __init__(self, num_nodes: int, size: int) -> None:
        self.size = size
        self.events: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]
        self.count = 0

    def insert(self, src: list[int], dst: list[int]) -> None:
        for a, b in zip(src, dst, strict=True):
            self.events[b].append((a, self.count))
            self.events[a].append((b, self.count))
            self.count += 1

    def __call__(self, n_id: list[int]) -> Found:
        found = [(v, *each) for v in n_id for each in self.events[v][: -self.size - 1 : -1]]
        nodes = sorted({*n_id, *(neighbor for _, neighbor, _ in found)})
        at = {v: i for i, v in enumerate(nodes)}
        ends = [[at[neighbor] for _, neighbor, _ in found], [at[v] for v, _, _ in found]]
        return (
            torch.tensor(nodes, dtype=torch.int64),
            torch.tensor(ends, dtype=torch.int64).view(2, -1),
            torch.tensor([event for _, _, event in found], dtype=torch.int64),
        )


def equal(found: Any, expected: Any) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


@pytest.fixture(params=["compiled", "plain"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    elif not library.compiled():
        pytest.skip("needs the compiled kernels")
    return request.param


@pytest.mark.parametrize("size", [1, 3, 10])
@pytest.mark.parametrize("dense", [False, True])
def test_the_last_events_of_every_node(way: str, size: int, dense: bool) -> None:
    rng = random.Random(size)
    num_nodes = 6 if dense else 90
    ours, truth = LastNeighborLoader(num_nodes, size), EveryEvent(num_nodes, size)
    for _ in range(60):
        count = rng.choice([0, 1, 7, 60])
        src = [rng.randrange(num_nodes) for _ in range(count)]
        dst = [rng.randrange(num_nodes) for _ in range(count)]
        asked = [rng.randrange(num_nodes) for _ in range(rng.choice([0, 1, 20]))]
        assert equal(ours(torch.tensor(asked, dtype=torch.int64)), truth(asked))
        ours.insert(torch.tensor(src).long(), torch.tensor(dst).long())
        truth.insert(src, dst)
    assert ours.cur_e_id == truth.count


def test_many_events_make_no_difference_to_what_is_kept(way: str) -> None:
    rng = random.Random(5)
    ours, truth = LastNeighborLoader(700, 4), EveryEvent(700, 4)
    for _ in range(40):
        src = [int(700 * rng.random() ** 3) for _ in range(900)]
        dst = [rng.randrange(700) for _ in range(900)]
        ours.insert(torch.tensor(src), torch.tensor(dst))
        truth.insert(src, dst)
        asked = [rng.randrange(700) for _ in range(50)]
        assert equal(ours(torch.tensor(asked)), truth(asked))
    everyone = list(range(700))
    assert equal(ours(torch.tensor(everyone)), truth(everyone))
    kept = sum(min(4, len(events)) for events in truth.events)
    assert ours.num_bytes <= 8 * 700 + 24 * 4 * kept + 24 * 3 * 2 * 900


def test_results_are_those_of_pyg_where_no_node_has_more_events_at_once() -> None:
    rng = random.Random(1)
    ours, theirs = LastNeighborLoader(300, 10), PyGLoader(300, 10)
    for _ in range(60):
        ends = rng.sample(range(300), 80)
        ends[40:50] = ends[:10]  # some nodes twice
        src, dst = torch.tensor(ends[:40]), torch.tensor(ends[40:])
        asked = torch.tensor([rng.randrange(300) for _ in range(30)])
        assert equal(ours(asked), theirs(asked))
        ours.insert(src, dst)
        theirs.insert(src, dst)


def test_many_events_of_one_node_at_once() -> None:
    loader = LastNeighborLoader(60, 10)
    loader.insert(torch.tensor([7]), torch.tensor([8]))
    loader.insert(torch.zeros(50, dtype=torch.int64), torch.arange(1, 51))
    assert loader(torch.tensor([0]))[2].tolist() == list(range(50, 40, -1))
    assert loader(torch.tensor([0]))[0].tolist() == [0, *range(41, 51)]


def test_an_event_of_a_node_with_itself_is_there_twice_as_in_pyg() -> None:
    ours, theirs = LastNeighborLoader(4, 3), PyGLoader(4, 3)
    for loader in (ours, theirs):
        loader.insert(torch.tensor([1]), torch.tensor([1]))
    assert equal(ours(torch.tensor([1])), theirs(torch.tensor([1])))


def test_compiled_and_plain_keep_the_same_log(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.compiled():
        pytest.skip("needs the compiled kernels")
    rng = random.Random(3)
    compiled, plain = LastNeighborLoader(20, 3), LastNeighborLoader(20, 3)
    for _ in range(30):
        src, dst = (torch.tensor([rng.randrange(20) for _ in range(150)]) for _ in range(2))
        for loader, mode in ((compiled, "require"), (plain, "never")):
            with monkeypatch.context() as patch:
                patch.setenv("PYG_SCALE_KERNELS", mode)
                loader.insert(src, dst)
    for name in ("_head", "_log"):
        assert torch.equal(getattr(compiled, name), getattr(plain, name))


def test_few_nodes_of_very_many() -> None:
    loader = LastNeighborLoader(50_000_000, 10)
    far = torch.tensor([49_999_999, 3, 20_000_000])
    loader.insert(far, far.roll(1))
    assert loader(far)[0].tolist() == [3, 20_000_000, 49_999_999]
    assert loader(far)[2].tolist() == [1, 0, 2, 1, 2, 0]
    assert loader.num_bytes - 8 * 50_000_000 < 200_000


def test_default_device_does_not_matter(way: str) -> None:
    rng = torch.Generator().manual_seed(0)
    inserts = [torch.randint(0, 100, (2, 200), generator=rng) for _ in range(30)]
    nodes = torch.arange(100)

    def run() -> tuple[Found, dict[str, Any]]:
        loader = LastNeighborLoader(100, 5, device="cpu")
        for src, dst in inserts:
            loader.insert(src, dst)
        again = LastNeighborLoader(100, 5, device="cpu")
        again.load_state_dict(loader.state_dict())
        return again(nodes), again.state_dict()

    expected, state = run()
    with torch.device("meta"):
        found, other = run()
    assert equal(found, expected)
    assert all(torch.equal(v, other[k]) for k, v in state.items() if isinstance(v, Tensor))


def test_forgetting() -> None:
    loader = LastNeighborLoader(5, 2)
    loader.insert(torch.tensor([1]), torch.tensor([2]))
    loader.reset_state()
    n_id, edge_index, e_id = loader(torch.tensor([1, 2]))
    assert n_id.tolist() == [1, 2]
    assert edge_index.shape == (2, 0)
    assert e_id.numel() == 0
    loader.insert(torch.tensor([3]), torch.tensor([2]))
    assert loader(torch.tensor([2]))[2].tolist() == [0]


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(2)

    def some() -> tuple[Tensor, Tensor]:
        src, dst = ([rng.randrange(40) for _ in range(70)] for _ in range(2))
        return torch.tensor(src), torch.tensor(dst)

    loader = LastNeighborLoader(40, 5)
    for _ in range(9):
        loader.insert(*some())
    with Checkpoint(tmp_path, {"neighbors": loader}) as checkpoint:
        checkpoint.save(1)
    again = LastNeighborLoader(40, 5)
    with Checkpoint(tmp_path, {"neighbors": again}) as checkpoint:
        assert checkpoint.load().step == 1
    everyone = torch.arange(40)
    for _ in range(4):
        assert equal(again(everyone), loader(everyone))
        events = some()
        loader.insert(*events)
        again.insert(*events)


def damaged(name: str, value: Any) -> dict[str, Any]:
    loader = LastNeighborLoader(9, 3)
    loader.insert(torch.tensor([1, 2]), torch.tensor([3, 1]))
    return loader.state_dict() | {name: value}


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("num_nodes", 10, "with num_nodes=10, this one has num_nodes=9"),
        ("size", 4, "with size=4"),
        ("node", None, "no int64 list 'node'"),
        ("node", torch.tensor([1, 3, 2]), "do not fit"),
        ("node", torch.tensor([1, 2, 9]), "do not fit"),
        ("count", torch.tensor([2, 1, 4]), "do not fit"),
        ("neighbor", torch.tensor([1, 2, -3, 1]), "do not fit"),
        ("event", torch.tensor([1, 0, 1, 2]), "do not fit"),
        ("num_events", -1, "num_events=-1"),
    ],
)
def test_a_state_that_is_none_changes_nothing(name: str, value: Any, match: str) -> None:
    loader = LastNeighborLoader(9, 3)
    loader.insert(torch.tensor([5]), torch.tensor([6]))
    with pytest.raises(ValueError, match=match):
        loader.load_state_dict(damaged(name, value))
    assert loader(torch.tensor([5]))[2].tolist() == [0]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: x(torch.tensor([9])), IndexError, "n_id: node 9 does not exist: there are 9"),
        (lambda x: x(torch.tensor([0.5])), TypeError, "n_id must be an int64"),
        (lambda x: x([1]), TypeError, "n_id must be an int64 .* list"),
        (lambda x: x(torch.tensor([[1]])), TypeError, "n_id must be one-dimensional"),
        (
            lambda x: x.insert(torch.tensor([1]), torch.tensor([1, 2])),
            ValueError,
            "one node for each event",
        ),
        (lambda x: x.insert(torch.tensor([-1]), torch.tensor([1])), IndexError, "src: node -1"),
        (lambda x: x.load_state_dict(None), TypeError, r"what state_dict\(\) returned \(got None"),
        (lambda x: x.load_state_dict([1]), TypeError, r"what state_dict\(\) returned \(got \[1\]"),
        (lambda x: LastNeighborLoader(3, 0), ValueError, "size at least 1"),
        (lambda x: LastNeighborLoader(-3, 1), ValueError, "num_nodes must not be negative"),
    ],
)
def test_wrong_input(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call(LastNeighborLoader(9, 3))
