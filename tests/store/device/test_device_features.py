"""Features on a device: the same rows, from wherever they are, within the budget."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_scale.errors import DeviceError
from pyg_scale.store import DeviceFeatures, MemoryFeatureStore, Mmap
from pyg_scale.store.cache import by_degree
from pyg_scale.store.device.target import read_here
from pyg_scale.store.reading import take_reads
from pyg_scale.testing import graphs
from tests.store.feature_directories import write_features

CITES = ("paper", "cites", "paper")
CONTENT = {
    ("paper", "x"): torch.arange(4000.0).view(1000, 4),
    ("paper", "y"): torch.arange(1000) * 3,
    ("author", "x"): -torch.arange(3000.0).view(500, 6),
    (CITES, "edge_attr"): torch.arange(2000.0).view(2000, 1),
}
HOT = {"paper": torch.randperm(1000, generator=torch.Generator().manual_seed(0))}


def memory() -> MemoryFeatureStore:
    store = MemoryFeatureStore()
    for (group, name), tensor in CONTENT.items():
        store.put_tensor(tensor, group_name=group, attr_name=name, index=None)
    return store


def requests(seed: int) -> list[TensorAttr]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TensorAttr(group, name, torch.randint(0, tensor.size(0), (300,), generator=generator))
        for (group, name), tensor in CONTENT.items()
    ]


@pytest.mark.parametrize("budget", [0, 4_000, 15_000, 20_000, 10**6])
def test_rows_are_those_of_the_store(budget: int) -> None:
    store = DeviceFeatures(memory(), "cpu", budget, HOT)
    assert store.used <= budget
    for seed in range(3):
        asked = requests(seed)
        for attr, got in zip(asked, store.multi_get_tensor(asked), strict=True):
            assert torch.equal(got, CONTENT[attr.group_name, attr.attr_name][attr.index])


class Spy(MemoryFeatureStore):
    """Notes which rows are read."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["asked"] = []
        self.__dict__["calls"] = 0

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Any]:
        self.__dict__["calls"] += 1
        self.asked.extend((a.group_name, a.attr_name, a.index.tolist()) for a in attrs)
        return super()._multi_get_tensor(attrs)


def test_only_missing_rows_are_read_in_one_request_and_hits_are_counted() -> None:
    spy = Spy()
    spy.put_tensor(CONTENT["paper", "x"], group_name="paper", attr_name="x", index=None)
    spy.put_tensor(CONTENT["author", "x"], group_name="author", attr_name="x", index=None)
    store = DeviceFeatures(spy, "cpu", 4096, {"paper": [7, 5, 900], "author": [0]})
    assert store.stats()["tensors"]["paper/x"]["rows"] == 3
    take_reads()
    index = torch.tensor([5, 1, 900, 5, 2])
    spy.calls = 0
    x, other = store.multi_get_tensor(
        [TensorAttr("paper", "x", index), TensorAttr("author", "x", torch.tensor([3, 0]))]
    )
    assert torch.equal(x, CONTENT["paper", "x"][index])
    assert torch.equal(other, CONTENT["author", "x"][[3, 0]])
    assert spy.calls == 1 and spy.asked == [("paper", "x", [1, 2]), ("author", "x", [3])]
    reads = take_reads()
    assert (reads.device_rows, reads.device_bytes) == (4, 3 * 16 + 1 * 24)


def test_ids_on_a_device_come_to_the_host_once_for_all_staged_tensors() -> None:
    copied: list[int] = []

    class There(torch.Tensor):
        device = torch.device("cuda", 0)

        def cpu(self, *args: Any, **options: Any) -> torch.Tensor:
            copied.append(self.numel())
            return self.as_subclass(torch.Tensor)

    index, other = torch.tensor([5, 1, 900, 5]), torch.tensor([7])
    index, other = index.as_subclass(There), other.as_subclass(There)
    store = DeviceFeatures(memory(), "cpu", 4096, HOT)
    asked = [("x", index), ("y", index), ("x", other)]
    found = store.multi_get_tensor([TensorAttr("paper", name, ids) for name, ids in asked])
    for (name, ids), rows in zip(asked, found, strict=True):
        assert torch.equal(rows, CONTENT["paper", name][ids.as_subclass(torch.Tensor)])
    assert copied == [4, 1]


def test_the_most_wanted_rows_are_kept() -> None:
    data = graphs.hostile()
    store = MemoryFeatureStore()
    store.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    row_bytes = data.x[0].nbytes
    made = DeviceFeatures(store, "cpu", 1024, graph=data)
    count = made.stats()["tensors"]["x"]["rows"]
    assert count == 1024 // row_bytes < data.num_nodes
    take_reads()
    made.get_tensor(TensorAttr(None, "x", by_degree(data)[None][:count]))
    assert take_reads().device_rows == count
    made.get_tensor(TensorAttr(None, "x", by_degree(data)[None][count:]))
    assert take_reads().device_rows == 0


def test_without_a_list_tensors_are_there_as_a_whole_or_not() -> None:
    found = DeviceFeatures(memory(), "cpu", 21_000).stats()["tensors"]
    assert {name: each["rows"] for name, each in found.items()} == {
        "paper/x": 0,
        "paper/y": 1000,
        "author/x": 500,
        "paper,cites,paper/edge_attr": 0,
    }


def test_stats_say_what_is_where_and_why(tmp_path) -> None:
    store = Mmap(write_features(tmp_path / "features", CONTENT))
    found = DeviceFeatures(store, "cpu", 9_000, HOT).stats()
    assert found["device"] == "cpu" and found["used"] <= found["budget"] == 9_000
    x, y = found["tensors"]["paper/x"], found["tensors"]["paper/y"]
    assert y == {"where": "staged", "why": x["why"], "rows": 512, "of": 1000, "bytes": 4096}
    assert "can read host memory anyway" in x["why"]
    assert x["where"] == "staged" and 0 < x["rows"] < 1000


def test_a_store_without_views_is_staged() -> None:
    class Foreign(FeatureStore):
        """A store that only gives rows."""

        def _put_tensor(self, tensor, attr):
            return False

        def _get_tensor(self, attr):
            assert attr.index is not None, "the whole tensor is asked for"
            return CONTENT["paper", "x"].numpy()[np.asarray(attr.index)]

        def _remove_tensor(self, attr):
            return False

        def _get_tensor_size(self, attr):
            return (1000, 4)

        def get_all_tensor_attrs(self):
            return [TensorAttr("paper", "x")]

    store = DeviceFeatures(Foreign(), "cpu", 4096, HOT)
    index = torch.tensor([3, 999, 3])
    assert torch.equal(store["paper", "x", index], CONTENT["paper", "x"][index])
    assert store.stats()["tensors"]["paper/x"]["rows"] == 256
    with pytest.raises(ValueError, match="host='mapped': paper/x cannot be mapped"):
        DeviceFeatures(Foreign(), "cpu", 4096, HOT, host="mapped")


def test_a_store_that_returns_something_else_is_refused() -> None:
    class Wrong(MemoryFeatureStore):
        def _get_tensor(self, attr):
            got = super()._get_tensor(attr)
            return got if attr.index is None or len(attr.index) < 2 else got[1:]

    wrong = Wrong()
    wrong.put_tensor(torch.rand(9, 2), group_name=None, attr_name="x", index=None)
    store = DeviceFeatures(wrong, "cpu", 0)
    with pytest.raises(ValueError, match=r"of shape \[2, 2\] .* expected .* \[3, 2\]"):
        store[None, "x", torch.tensor([1, 2, 3])]


def test_pickled_it_is_placed_again() -> None:
    store = DeviceFeatures(memory(), "cpu", "15kB", HOT, host="staged")
    again = pickle.loads(pickle.dumps(store))
    assert again.stats() == store.stats()


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="store must be a FeatureStore"):
        DeviceFeatures(torch.rand(3), "cpu")
    with pytest.raises(TypeError, match="device must be"):
        DeviceFeatures(memory(), 3)
    with pytest.raises(DeviceError, match="not a device"):
        DeviceFeatures(memory(), "gpu of mine")
    with pytest.raises(DeviceError, match="only CUDA devices"):
        DeviceFeatures(memory(), "meta")
    with pytest.raises(ValueError, match="memory must be bytes or text"):
        DeviceFeatures(memory(), "cpu", "much")
    with pytest.raises(ValueError, match="host must be one of auto, mapped, staged"):
        DeviceFeatures(memory(), "cpu", host="uva")
    with pytest.raises(IndexError, match="hot has the id 1000, but paper/x has only 1000 rows"):
        DeviceFeatures(memory(), "cpu", hot={"paper": [1000]})


def test_what_is_missing_for_cuda_is_said(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=r"device='cuda': torch .* was built without CUDA"):
        DeviceFeatures(memory())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="finds no CUDA device"):
        DeviceFeatures(memory())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="device='cuda:5': this machine has only 2 CUDA devices"):
        DeviceFeatures(memory(), "cuda:5")


def test_what_is_on_the_device_already_stays_there(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in (("is_available", True), ("device_count", 1), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    store = MemoryFeatureStore()
    with FakeTensorMode():  # knows devices, needs none
        store.put_tensor(
            torch.empty(5, 2, device="cuda"), group_name=None, attr_name="x", index=None
        )
        found = DeviceFeatures(store, "cuda", 0)
    assert found.stats()["tensors"]["x"]["where"] == "device"
    assert found.used == 0


def test_freed_tables_wait_for_the_streams_that_read_them(monkeypatch) -> None:
    """The allocator must know of every stream: a loader's threads have streams of their own."""
    current, told = object(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: told.append(stream))
    with FakeTensorMode():
        table = torch.empty(8, 4, device="cuda")
        read_here(table, None, torch.empty(2))
    assert told == [current]
    kept: list[Any] = []
    monkeypatch.setattr("pyg_scale.store.device.table.read_here", lambda *of: kept.extend(of))
    store = MemoryFeatureStore()
    store["a", "x", None] = torch.randn(10, 4)
    features = DeviceFeatures(store, "cpu", memory="1MB")
    features.get_tensor(TensorAttr("a", "x", torch.tensor([1, 2])))
    assert [tuple(each.shape) for each in kept if each is not None] == [(10, 4)]
