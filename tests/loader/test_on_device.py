"""Loaders with ``device=``: the same batches, features within a budget, copies beside training."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import pyg_scale
from pyg_scale.errors import DeviceError
from pyg_scale.loader import (
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    SamplingOptions,
    ZipLoader,
)
from pyg_scale.loader.batch import placement
from pyg_scale.loader.batch.placement import Landed, OnDevice, tensors_of
from pyg_scale.loader.stats import Stats
from pyg_scale.ops import colptr
from pyg_scale.sampler import CudaSampler, device_graph
from pyg_scale.sampler.device_graph import graph_bytes, pointer_bytes
from pyg_scale.store import Cached, DeviceFeatures, MemoryFeatureStore
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches

HOMO: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 20, "seed": 1, "shuffle": True}
HETERO: dict[str, Any] = {
    "num_neighbors": [3, 2],
    "input_nodes": "item",
    "batch_size": 4,
    "seed": 1,
}


@pytest.mark.parametrize("memory", [None, 0, 600, "1MB"], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same(memory: Any, workers: int) -> None:
    data = graphs.hostile()
    expected = NeighborLoader(data, **HOMO)
    loader = NeighborLoader(data, **HOMO, device="cpu", device_memory=memory, num_workers=workers)
    assert_same_batches(expected, loader)
    found = loader.stats()
    assert found["epoch"]["copy"]["rows"] == found["epoch"]["batches"] == len(loader)
    assert found["device"]["used"] <= found["device"]["budget"]
    rows = found["epoch"]["fetch"]["device_rows"]
    assert rows == 0 if not memory else 0 < rows <= found["epoch"]["fetch"]["rows"]


@pytest.mark.parametrize("memory", [0, 700, "1MB"], ids=str)
def test_heterogeneous_batches_are_the_same(memory: Any) -> None:
    data = graphs.hetero()
    loader = NeighborLoader(data, **HETERO, device="cpu", device_memory=memory, num_workers=1)
    assert_same_batches(NeighborLoader(data, **HETERO), loader)
    assert set(loader.stats()["device"]["tensors"]) >= {"item/x", "user/x"}


def test_links_and_hgt() -> None:
    data, hetero = graphs.hostile(), graphs.hetero()
    links: dict[str, Any] = {"num_neighbors": [3], "batch_size": 16, "seed": 1, "neg_sampling": "binary"}  # noqa: E501  # fmt: skip
    device = {"device": "cpu", "device_memory": 900}
    assert_same_batches(
        LinkNeighborLoader(data, **links), LinkNeighborLoader(data, **links, **device)
    )
    hgt: dict[str, Any] = {"num_samples": [4], "input_nodes": "item", "batch_size": 4, "seed": 1}
    assert_same_batches(HGTLoader(hetero, **hgt), HGTLoader(hetero, **hgt, **device))


def test_stores_and_graph_directories(tmp_path) -> None:
    data = graphs.hostile()
    del data.when
    expected = list(NeighborLoader(data, **HOMO))
    pyg_scale.save(data, tmp_path / "graph")
    opened = pyg_scale.open(tmp_path / "graph")
    loader = NeighborLoader(opened, **HOMO, device="cpu", device_memory=900)
    assert_same_batches(expected, loader)
    x = loader.stats()["device"]["tensors"]["x"]
    assert x["where"] == "staged" and 0 < x["rows"] < x["of"]
    features, graph = graphs.stores(data)
    named = NeighborLoader((features, graph), **HOMO, device="cpu", device_memory="1MB")
    for batch, other in zip(named, expected, strict=True):
        assert torch.equal(batch.x, other.x)


def test_several_loaders_share_a_store() -> None:
    data = graphs.hostile()
    store = MemoryFeatureStore()
    store.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    features = DeviceFeatures(store, "cpu", 800, graph=data)
    loaders = [NeighborLoader(data, **HOMO, feature_store=features, device="cpu") for _ in range(2)]
    assert all(loader._features.store is features for loader in loaders)
    assert_same_batches(NeighborLoader(data, **HOMO), loaders[0])
    with pytest.raises(ValueError, match="feature_store has memory= of its own"):
        NeighborLoader(data, **HOMO, feature_store=features, device="cpu", device_memory=800)


def test_transforms_run_on_the_device_after_the_copies(recorded: Recorded) -> None:
    seen: list[Any] = []

    def transform(batch: Data) -> Data:
        seen.append([*recorded.calls[-2:], batch.x.device.type])
        return batch

    loader = NeighborLoader(graphs.hostile(), **HOMO, device="cpu", transform=transform)
    loader._placement = recorded.target
    next(iter(loader))
    assert seen == [["record_stream", "record_stream", "cpu"]]


def test_features_that_are_not_kept_are_copied_and_it_is_said() -> None:
    data = graphs.hostile()
    features, graph = graphs.stores(data)
    cached = Cached(features, "1kB")
    loader = NeighborLoader((cached, graph), **HOMO, device="cpu")
    assert len(list(loader)) == len(loader)
    assert "looks ahead, and keeps rows itself" in loader.stats()["device"]["why"]
    assert loader.stats()["device"]["tensors"] == {}
    with pytest.raises(ValueError, match="device_memory= is of no use: .* looks ahead"):
        NeighborLoader((cached, graph), **HOMO, device="cpu", device_memory=100)


def test_a_batch_without_features_and_one_called_by_index() -> None:
    data = graphs.hostile()
    bare = SamplingOptions(collect_features=False)
    loader = NeighborLoader(data, **HOMO, device="cpu", sampling=bare)
    assert "x" not in next(iter(loader))
    expected = NeighborLoader(data, [4], seed=3)([5, 6])
    assert_same_batches([expected], [NeighborLoader(data, [4], seed=3, device="cpu")([5, 6])])


def test_what_contradicts_is_refused() -> None:
    data = graphs.hostile()
    with pytest.raises(ValueError, match="device_memory= is of a device: give device= too"):
        NeighborLoader(data, **HOMO, device_memory="1GB")
    with pytest.raises(ValueError, match="device= and sampling.to_device are given"):
        NeighborLoader(data, **HOMO, device="cpu", sampling=SamplingOptions(to_device="cpu"))
    with pytest.raises(ValueError, match="device_memory must be bytes or text"):
        NeighborLoader(data, **HOMO, device="cpu", device_memory="some")
    for kind in ("process", "ring"):
        with pytest.raises(ValueError, match="device= needs threads as workers"):
            NeighborLoader(data, **HOMO, device="cpu", num_workers=1, worker_type=kind)
    plain, placed = NeighborLoader(data, **HOMO), NeighborLoader(data, **HOMO, device="cpu")
    with pytest.raises(ValueError, match="give it to the ZipLoader instead"):
        ZipLoader([plain, placed], batch_size=5)
    with pytest.raises(ValueError, match="a ZipLoader copies tuples"):
        ZipLoader([plain, plain], batch_size=5, device="cpu", device_memory=5)
    zipped = ZipLoader([plain, plain], batch_size=20, seed=1, device="cpu")
    assert_same_batches(
        [b for pair in ZipLoader([plain, plain], batch_size=20, seed=1) for b in pair],
        [b for pair in zipped for b in pair],
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_is_said_at_once() -> None:
    with pytest.raises(DeviceError, match="device='cuda': torch .*CUDA"):
        NeighborLoader(graphs.hostile(), **HOMO, device="cuda")


class Recorded:
    """What is asked of ``torch.cuda``, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now = "main"
        self.streams = 0
        self.target = OnDevice("cpu", cuda=self._cuda())

    def note(self, what: str) -> None:
        self.calls.append(what)

    def _cuda(self) -> Any:
        recorded = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                recorded.streams += 1
                self.name = f"side {recorded.streams}"

        class Event:
            def record(self, stream: Stream) -> None:
                recorded.note(f"record {stream.name}")

        @contextlib.contextmanager
        def stream(stream: Stream) -> Iterator[None]:
            before, recorded.now = recorded.now, stream.name
            try:
                yield
            finally:
                recorded.now = before

        main = SimpleNamespace(wait_event=lambda event: recorded.note("wait"))
        return SimpleNamespace(
            Stream=Stream,
            Event=Event,
            stream=stream,
            device=lambda device: contextlib.nullcontext(),
            current_stream=lambda device: main,
        )


@pytest.fixture
def recorded(monkeypatch) -> Recorded:
    made = Recorded()
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: made.note("record_stream"))
    return made


def test_copies_are_on_a_side_stream_and_whoever_takes_the_batch_waits(recorded: Recorded) -> None:
    data = graphs.hostile()
    batch = next(iter(NeighborLoader(data, **HOMO)))
    assert colptr.recall(batch.edge_index) is not None
    tensors = list(tensors_of(batch))
    assert any(each is colptr.recall(batch.edge_index) for each in tensors)
    assert any(each is batch.edge_index for each in tensors)

    def fetch(stats: Stats) -> Data:
        recorded.note(f"fetch on {recorded.now}")
        return batch

    def made() -> Landed:
        with recorded.target.beside_training():
            return recorded.target.made(fetch(Stats()), Stats())

    landed = made()
    assert recorded.calls == ["fetch on side 1", "record side 1"], "nobody waits in the worker"
    assert landed.take() is batch
    assert recorded.calls[2:] == ["wait"] + ["record_stream"] * len(tensors)
    assert recorded.now == "main"
    made()
    assert recorded.streams == 1, "the next batch takes the same stream"


def test_a_thread_has_a_stream_of_its_own_until_it_is_done(recorded: Recorded) -> None:
    copying = recorded.target.beside_training

    def on_a_thread() -> str:
        found: list[str] = []

        def work() -> None:
            with copying():
                found.append(recorded.now)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
        return found[0]

    with copying():
        with copying():
            assert recorded.now == "side 1", "that of the thread, within itself too"
        assert recorded.now == "side 1"
        assert on_a_thread() == "side 2"
    with pytest.raises(ValueError, match="no such row"), copying():
        raise ValueError("no such row")
    assert {on_a_thread() for _ in range(5)} <= {"side 1", "side 2"}
    assert recorded.streams == 2, "those of threads that ended are used again"


def test_everything_of_a_batch_is_sent_and_its_pointers_are_known_there(monkeypatch) -> None:
    batch = next(iter(NeighborLoader(graphs.hetero(), **HETERO)))
    before, expected = len(list(tensors_of(batch))), copy.copy(batch)
    sent: dict[int, Tensor] = {}

    def send(tensor: Tensor, device: torch.device) -> Tensor:
        assert device.type == "meta"
        there = tensor.clone()
        sent[id(there)] = there
        return there

    monkeypatch.setattr(placement, "send", send)
    target, stats = OnDevice("cpu"), Stats()
    target.device = torch.device("meta")
    found = target.made((batch, "what is no batch"), stats).take()
    assert found[0] is batch and found[1] == "what is no batch"
    assert {id(tensor) for tensor in tensors_of(batch)} == sent.keys()
    assert len(sent) == before
    assert_same_batches([expected], [batch])
    for store in batch.edge_stores:
        known = colptr.recall(store.edge_index)
        counts = torch.bincount(store.edge_index[1], minlength=known.numel() - 1)
        assert torch.equal(known[1:], counts.cumsum(0))
    counted = stats.as_dict()["copy"]
    assert counted["bytes"] == sum(tensor.nbytes for tensor in sent.values())


def test_worker_threads_of_later_epochs_take_the_same_streams(recorded: Recorded) -> None:
    loader = NeighborLoader(graphs.hostile(), **HOMO, num_workers=1, device="cpu")
    loader._placement = recorded.target
    for _ in range(3):
        list(loader)
    assert recorded.streams == 1
    assert recorded.calls.count("wait") == 3 * len(loader)


# Sampling there ################################################################################


@pytest.fixture
def like_a_gpu(monkeypatch) -> None:
    """The CPU is a device with kernels."""
    monkeypatch.setattr(placement, "_no_kernels", lambda device: "")


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_default_sampler_is_that_of_the_device(workers: int) -> None:
    disjoint = {**HOMO, "disjoint": True}
    for data, arguments in (
        (graphs.hostile(), HOMO),
        (graphs.hetero(), HETERO),
        (graphs.hostile(), disjoint),
    ):
        loader = NeighborLoader(
            data, **arguments, device="cpu", device_memory="1MB", num_workers=workers
        )
        assert isinstance(loader.node_sampler, CudaSampler)
        assert_same_batches(NeighborLoader(data, **arguments), loader)
        found = loader.stats()["device"]
        assert found["sampling"] == {
            "where": "cpu", "why": "", "bytes": loader.node_sampler.num_bytes, "mapped": 0,
        }  # fmt: skip
        assert found["used"] <= found["budget"] == 1_000_000 - found["sampling"]["bytes"]
        sampler = loader.node_sampler
        assert sampler.num_bytes > 0
        assert graph_bytes(sampler.topology, rows=not sampler.disjoint) == sampler.num_bytes


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize(
    "more",
    [
        {"weight_attr": "weight"},
        {"weight_attr": "weight", "replace": True},
        {"time_attr": "time"},
        {"time_attr": "time", "temporal_strategy": "last", "weight_attr": "weight"},
        {"time_attr": "when", "time_window": 4, "strictly_earlier": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("arguments", [HOMO, HETERO], ids=["homogeneous", "heterogeneous"])
def test_weights_and_times_are_drawn_there(arguments: dict[str, Any], more: dict[str, Any]) -> None:
    data = graphs.hostile() if arguments is HOMO else graphs.hetero()
    given = {**arguments, **more}
    plain = NeighborLoader(data, **arguments, device="cpu", device_memory="1MB")
    if more.get("time_attr") == "when":
        seeds = NeighborLoader(data, **arguments).input_data.node.numel()
        given["input_time"] = torch.arange(seeds) % 9
    for workers in (0, 2):
        there = {"device": "cpu", "device_memory": "1MB", "num_workers": workers}
        loader = NeighborLoader(data, **given, **there)
        sampler = loader.node_sampler
        assert isinstance(sampler, CudaSampler)
        assert_same_batches(NeighborLoader(data, **given), loader)
        assert sampler.num_bytes > plain.node_sampler.num_bytes - 4096  # no rows if disjoint
        assert graph_bytes(sampler.topology, rows=not sampler.disjoint) == sampler.num_bytes


@pytest.mark.usefixtures("like_a_gpu")
def test_what_does_not_fit_of_a_graph_stays_on_the_host(monkeypatch) -> None:
    data = graphs.hostile()
    topology = NeighborLoader(data, **HOMO).node_sampler.topology
    least, whole = pointer_bytes(topology), graph_bytes(topology)
    for memory in (2 * least, least + whole, 2 * whole):
        loader = NeighborLoader(data, **HOMO, device="cpu", device_memory=memory)
        assert isinstance(loader.node_sampler, CudaSampler)
        assert_same_batches(NeighborLoader(data, **HOMO), loader)
        found = loader.stats()["device"]
        there, mapped = found["sampling"]["bytes"], found["sampling"]["mapped"]
        assert least <= there <= memory // 2 and found["used"] <= memory - there
        assert (mapped == 0) == (memory == 2 * whole) and (mapped == 0) == (there == whole)

    def refuse(*_: Any) -> Any:
        raise DeviceError("no more pages can be locked")

    monkeypatch.setattr(device_graph, "map_numbers", refuse)
    loader = NeighborLoader(data, **HOMO, device="cpu", device_memory=2 * least)
    assert not isinstance(loader.node_sampler, CudaSampler)
    assert_same_batches(NeighborLoader(data, **HOMO), loader)
    why = loader.stats()["device"]["sampling"]["why"]
    assert "no more pages can be locked; raise the limit of locked memory (ulimit -l)" in why


@pytest.mark.usefixtures("like_a_gpu")
def test_where_it_samples_on_the_cpu_and_why() -> None:
    data = graphs.hostile()
    features, graph = graphs.stores(data)

    def why(source: Any, **more: Any) -> str:
        loader = NeighborLoader(source, **{**HOMO, "device": "cpu", **more})
        assert not isinstance(loader.node_sampler, CudaSampler)
        assert_same_batches(
            NeighborLoader(source, **{**HOMO, **more, "device_memory": None}), loader
        )
        return loader.stats()["device"]["sampling"]["why"]

    memory = {"device_memory": "1MB"}
    assert "does not support subgraph_type=" in why(data, subgraph_type="induced", **memory)
    assert "does not support subgraph_type=" in why(
        data, subgraph_type="bidirectional", weight_attr="weight", **memory
    )
    assert why(data, device_memory=900).startswith("the graph takes ")
    assert why(data, neighbor_sampler="native") == "NativeSampler was asked for"
    assert "looks ahead" in why((Cached(features, "1kB"), graph))
    assert "another one makes the batch" in why(
        data, num_workers=1, transform_sampler_output=lambda out: out, **memory
    )


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
@pytest.mark.parametrize("time_attr", [None, "when", "time"])
def test_links_are_sampled_there(
    negatives: str | None, disjoint: bool, time_attr: str | None
) -> None:
    data = graphs.hostile()
    links = {**HOMO, "edge_label_index": data.edge_index[:, :50], "disjoint": disjoint}
    links |= {"neg_sampling": negatives, "time_attr": time_attr}
    if time_attr:
        links |= {"edge_label_time": torch.arange(50) % 8 + 1}
    loader = LinkNeighborLoader(data, **links, device="cpu", device_memory="1MB", num_workers=1)
    assert isinstance(loader.link_sampler, CudaSampler)
    assert_same_batches(LinkNeighborLoader(data, **links), loader)
    assert loader.stats()["device"]["sampling"]["where"] == "cpu"
    rows = not (disjoint or time_attr)
    assert graph_bytes(loader.link_sampler.topology, rows=rows) == (loader.link_sampler.num_bytes)


def test_a_sampler_for_a_device_by_name_or_instance() -> None:
    data = graphs.hostile()
    sampler = CudaSampler(device="cpu")
    loader = NeighborLoader(data, **HOMO, neighbor_sampler=sampler, device="cpu", num_workers=1)
    assert_same_batches(NeighborLoader(data, **HOMO), loader)
    assert loader.stats()["device"]["sampling"]["where"] == "cpu"
    with pytest.raises(ValueError, match="neighbor_sampler='cuda' is of no use: .* the batch"):
        NeighborLoader(
            data,
            **HOMO,
            neighbor_sampler=sampler,
            device="cpu",
            num_workers=1,
            filter_per_worker=False,
        )
    with pytest.raises(NotImplementedError, match="CudaSampler does not support .*induced"):
        NeighborLoader(
            data, **HOMO, neighbor_sampler=sampler, device="cpu", subgraph_type="induced"
        )
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="device='cuda'"):
            NeighborLoader(data, **HOMO, neighbor_sampler="cuda", device="cpu")
