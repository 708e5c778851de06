"""Every option of SamplingOptions has its effect, or raises where it cannot have it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyg_scale.distributed import SamplingOptions
from pyg_scale.loader import NeighborLoader
from tests.distributed.network import until
from tests.distributed.served import graph
from tests.loader.batches import assert_same_batches

pytestmark = pytest.mark.matrix(3)

NODES: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 10, "seed": 7, "shuffle": True}


class Gate:
    """Answers of batches wait until they are let through."""

    def __init__(self, servers: Any) -> None:
        self.open = threading.Event()
        self.waiting = 0
        self._lock = threading.Lock()
        for address in servers.addresses:
            servers.network.fault[address] = self

    def __call__(self, number: int, name: str, answer: Any) -> Any:
        if name == "nodes":
            with self._lock:
                self.waiting += 1
            assert self.open.wait(30)
        return answer


def under_way(
    serve: Callable[..., Any], expected: int, num_servers: int = 1, **options: Any
) -> int:
    """How many batches are asked for while none has come, once that many ``expected`` are."""
    data = graph()
    servers = serve(data, num_servers)
    for number, listener in enumerate(servers.listeners):
        listener.close()
        servers.listeners[number] = servers.listen(number, num_threads=32)
    workers = options.pop("workers", 0)
    loader = NeighborLoader(
        servers.open(30.0), **NODES, num_workers=workers, sampling=SamplingOptions(**options)
    )
    gate, found = Gate(servers), []
    thread = threading.Thread(target=lambda: found.extend(loader))
    thread.start()
    until(lambda: gate.waiting >= expected)
    time.sleep(0.3)  # for those that should not come
    most = gate.waiting
    gate.open.set()
    thread.join(30)
    assert_same_batches(NeighborLoader(data, **NODES), found)
    return most


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_prefetch_size(serve: Callable[..., Any], size: int, workers: int) -> None:
    assert under_way(serve, size, prefetch_size=size, workers=workers) == size


@pytest.mark.parametrize(
    ("num_workers", "concurrency", "servers"), [(1, 1, 1), (2, 1, 2), (1, 3, 1)]
)
def test_num_workers_and_worker_concurrency_of_servers(
    serve: Callable[..., Any], num_workers: int, concurrency: int, servers: int
) -> None:
    expected = num_workers * concurrency * servers
    most = under_way(
        serve,
        expected,
        servers,
        prefetch_size=20,
        num_workers=num_workers,
        worker_concurrency=concurrency,
    )
    assert most == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_buffer_size(serve: Callable[..., Any], workers: int) -> None:
    """One batch is waited for to know how large they are, then as many as fit."""
    data = graph()
    servers = serve(data)
    size = max(
        sum(v.nbytes for v in batch.to_dict().values() if isinstance(v, torch.Tensor))
        for batch in NeighborLoader(data, **NODES)
    )
    ahead = {}
    for batches in (1, 3):
        options = SamplingOptions(prefetch_size=20, buffer_size=int(batches * 1.5 * size))
        loader = NeighborLoader(servers.open(), **NODES, num_workers=workers, sampling=options)
        before = servers.counts()[0]
        iterator, most = iter(loader), 0
        for used in range(1, len(loader)):
            next(iterator)
            time.sleep(0.05)
            most = max(most, servers.counts()[0] - before - used)
        ahead[batches] = most
        iterator.close()
    assert 0 <= ahead[1] <= 1 < ahead[3] <= 6


@pytest.mark.parametrize(("ranks", "asked"), [(1, {1}), ([0, 2], {0, 2}), (None, {0, 1, 2})])
def test_server_rank(serve: Callable[..., Any], ranks: Any, asked: set[int]) -> None:
    data = graph()
    servers = serve(data, 3)
    options = SamplingOptions(server_rank=ranks)
    loader = NeighborLoader(servers.open(), **NODES, sampling=options)
    assert_same_batches(NeighborLoader(data, **NODES), loader)
    assert {i for i, count in enumerate(servers.counts()) if count} == asked
    with pytest.raises(ValueError, match="server_rank=3 is no server: there are 3"):
        NeighborLoader(servers.opened[0], **NODES, sampling=SamplingOptions(server_rank=3))


def test_to_device() -> None:
    data = graph()
    options = SamplingOptions(to_device="cpu")
    loader = NeighborLoader(data, **NODES, sampling=options)
    assert_same_batches(NeighborLoader(data, **NODES), loader)
    with pytest.raises(ValueError, match="no such device"):
        SamplingOptions(to_device="cuda:63")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_to_a_gpu(workers: int) -> None:
    data = graph()
    options = SamplingOptions(to_device="cuda", pin_memory=True)
    found = list(NeighborLoader(data, **NODES, num_workers=workers, sampling=options))
    assert all(batch.x.is_cuda and batch.edge_index.is_cuda for batch in found)
    assert_same_batches(NeighborLoader(data, **NODES), [batch.cpu() for batch in found])
    assert NeighborLoader(data, **NODES, sampling=options)([1, 2]).x.is_cuda


def test_pin_memory() -> None:
    loader = NeighborLoader(graph(), **NODES, sampling=SamplingOptions(pin_memory=True))
    assert loader.pin_memory
    if not torch.accelerator.is_available():
        with pytest.warns(UserWarning, match="pin_memory"):
            next(iter(loader))


def test_collect_features_of_a_graph_in_memory() -> None:
    data = graph()
    options = SamplingOptions(collect_features=False)
    for found, full in zip(
        NeighborLoader(data, **NODES, sampling=options), NeighborLoader(data, **NODES), strict=True
    ):
        assert not {"x", "y", "edge_attr", "train_mask"} & set(found.keys())
        assert torch.equal(data.x[found.n_id], full.x)
        assert torch.equal(found.edge_index, full.edge_index)


def test_what_samplers_cannot_have_raises() -> None:
    with pytest.raises(NotImplementedError, match="samplers work on the CPU"):
        SamplingOptions(worker_devices="cuda")
    with pytest.raises(ValueError, match="one entry for each of 2 workers"):
        SamplingOptions(num_workers=2, worker_devices=["cpu"])
    SamplingOptions(num_workers=2, worker_devices=["cpu", "cpu"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_workers": 0}, ValueError),
        ({"num_workers": 1.5}, TypeError),
        ({"prefetch_size": 0}, ValueError),
        ({"channel_size": "much"}, ValueError),
        ({"buffer_size": -1}, ValueError),
        ({"pin_memory": "yes"}, TypeError),
        ({"server_rank": "one"}, TypeError),
        ({"server_rank": -1}, ValueError),
        ({"collect_features": 1}, TypeError),
    ],
)
def test_wrong_values(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        SamplingOptions(**options)


def test_options_of_the_other_mode_raise(serve: Callable[..., Any]) -> None:
    data = graph()
    served = serve(data).open()
    for name, value in (("server_rank", 0), ("buffer_size", "1MB"), ("prefetch_size", 2)):
        with pytest.raises(ValueError, match=f"{name} means nothing for a graph of this process"):
            NeighborLoader(data, **NODES, sampling=SamplingOptions(**{name: value}))
    with pytest.raises(ValueError, match="channel_size means nothing for a graph opened as"):
        NeighborLoader(served, **NODES, sampling=SamplingOptions(channel_size="1MB"))
    with pytest.raises(ValueError, match="give that too"):
        NeighborLoader(served, **NODES, sampling=SamplingOptions(worker_concurrency=2))
    with pytest.raises(TypeError, match="sampling must be SamplingOptions"):
        NeighborLoader(data, **NODES, sampling={"num_workers": 2})  # type: ignore[arg-type]
