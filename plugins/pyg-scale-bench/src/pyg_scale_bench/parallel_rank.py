"""One rank of ``pyg-scale bench parallel``: an epoch of every wrapper, on all ranks together."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import pyg_scale
from pyg_scale import distributed, parallel
from pyg_scale.comm import connect
from pyg_scale.loader import NeighborLoader
from pyg_scale_bench import memory

_RECEIVED = 128  # the place of tcpi_bytes_received in Linux's struct tcp_info


class Way(NamedTuple):
    """A wrapper with options.

    Attributes:
        method: Its name.
        full: Whether an epoch is one step on the full graph, and not sampled batches.
        options: Its options.
        ranks: The smallest number of ranks for which it is something of its own.
        most: The largest number of ranks that the model has layers for.
    """

    method: str
    full: bool
    options: dict[str, Any]
    ranks: int = 2
    most: int = 1 << 30

    def why_not(self, ranks: int) -> str:
        """The reason why it is not measured on so many ranks; empty if it is."""
        if ranks < self.ranks:
            return f"from {self.ranks} ranks on"
        return f"at most {self.most} ranks" if ranks > self.most else ""


WAYS: dict[str, Way] = {
    "ddp": Way("ddp", False, {}),
    "ddp+topk": Way("ddp", False, {"compress": "topk", "ratio": 0.05}),
    "fsdp": Way("fsdp", False, {}),
    "layer": Way("layer", False, {}, most=2),
    "local_sgd": Way("local_sgd", False, {"every": 8}),
    "async_ps": Way("async_ps", False, {"optimizer": partial(torch.optim.Adam, lr=0.01)}),
    "federated": Way("federated", False, {}),
    "halo": Way("halo", True, {}),
    "halo+remat": Way("halo", True, {"remat": True}),
    "halo+stale": Way("halo", True, {"stale": True}),
    "halo+smooth": Way("halo", True, {"stale": True, "smoothing": 0.95}),
    "halo+bf16": Way("halo", True, {"quantize": "bf16"}),
    "halo+sample=0.1": Way("halo", True, {"boundary_sample": 0.1}),
    "halo+sample=0.01": Way("halo", True, {"boundary_sample": 0.01}),
    "feature": Way("feature", True, {}),
    "mesh": Way("mesh", True, {}, 4),
}
"""The wrappers that are measured, by the name in the report."""


def model_of(features: int, hidden: int, classes: int) -> GraphSAGE:
    """The model of all ways."""
    torch.manual_seed(0)
    return GraphSAGE(features, hidden, 2, classes)


def shape_of_mesh(ranks: int) -> tuple[int, int]:
    """The numbers of ranks of `mesh` in the dimensions ``partition`` and ``feature``."""
    return ranks // 2, 2


def measured(settings: dict[str, Any], paths: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The measurements of this rank, once.

    Args:
        settings: The options of ``pyg-scale bench parallel``.
        paths: The parts of each graph.
    """
    torch.set_num_threads(settings["threads"])
    with distributed.init(timeout=settings["timeout"]):
        last = next(reversed(paths))  # whose labels can be learned
        yield {name: _of_graph(path, settings, name == last) for name, path in paths.items()}


def _of_graph(path: str, settings: dict[str, Any], with_curves: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with connect(timeout=settings["timeout"]) as comm, pyg_scale.open(path, comm=comm) as graph:
        names = [name for name in settings["ways"] if not WAYS[name].why_not(comm.world_size)]
        # The first one warms up: what is loaded at first use, once for all, is no wrapper's memory.
        for turn in range(1 + settings["rounds"]):
            for name in names:
                if turn <= 1:  # nothing of the first one is kept
                    found[name] = {"seconds": [], "received": [], "peak": []}
                _once(WAYS[name], graph, settings, found[name])
        for name, each in found.items():
            if with_curves and WAYS[name].method == "halo" and "remat" not in WAYS[name].options:
                each |= _learned(WAYS[name], graph, settings)
    return found


def _learned(way: Way, graph: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The loss and the accuracy after each step, and the bytes of halo rows that come in one.

    The accuracy is that of all nodes that were not trained on, computed exactly. The features of
    the graph are known to all after the first step, so that only the second of two layers sends
    rows, forward, and their gradients, backward.
    """
    model, epoch = _full(way, graph, settings)
    own = model.own_nodes
    y, test = graph.y[own], ~graph.train_mask[own] & (graph.y[own] >= 0)
    losses, accuracies = [], []
    for _ in range(settings["steps"]):
        losses.append(epoch())
        with torch.no_grad():
            right = (model.eval()().argmax(dim=1) == y)[test]
        model.train()
        sums = torch.tensor([right.sum(), right.numel()], dtype=torch.float64)
        dist.all_reduce(sums)
        accuracies.append(float(sums[0] / sums[1].clamp(min=1)))
    halo, share = model.shard.halos[None], way.options.get("boundary_sample", 1.0)
    rows = sum(round(share * n) for n in (*halo.num_received, *halo.num_sent))
    width = settings["hidden"] * (2 if way.options.get("quantize") == "bf16" else 4)
    return {"curve": losses, "accuracy": accuracies, "formula": rows * width}


def _once(way: Way, graph: Any, settings: dict[str, Any], found: dict[str, Any]) -> None:
    """A wrapper, an epoch to warm up, and those that are measured."""
    memory.give_back()
    memory.reset_peak()
    before = memory.resident() or 0
    model, epoch = (_full if way.full else _sampled)(way, graph, settings)
    epoch()
    for _ in range(settings["full_steps"] if way.full else 1):
        dist.barrier()
        received, start = bytes_received(), time.perf_counter()
        loss = epoch()
        dist.barrier()
        found["seconds"].append(time.perf_counter() - start)
        found["received"].append(bytes_received() - received)
    found["peak"].append((memory.peak() or 0) - before)
    found["loss"], found["exact"] = loss, bool(_method_of(way).exact)
    if hasattr(model, "close"):
        model.close()


def _method_of(way: Way) -> Any:
    return pyg_scale.plugins.get("parallel", way.method)(**way.options)


def _full(way: Way, graph: Any, settings: dict[str, Any]) -> tuple[Any, Callable[[], float]]:
    """Steps on the full graph; a step is an epoch."""
    size = dist.get_world_size()
    mesh = None
    if way.method == "mesh":
        shape = shape_of_mesh(size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("partition", "feature"))
    model = parallel.wrap(
        model_of(graph.num_features, settings["hidden"], int(graph.y.max()) + 1),
        _method_of(way),
        graph=graph,
        mesh=mesh,
    )
    own = model.own_nodes
    trains, y = graph.train_mask[own], graph.y[own]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model()[trains], y[trains])
        model.backward(loss, int(trains.sum()))
        optimizer.step()
        return _mean(loss, int(trains.sum()))

    return model, epoch


def _sampled(way: Way, graph: Any, settings: dict[str, Any]) -> tuple[Any, Callable[[], float]]:
    """Epochs of sampled batches."""
    data, rank = graph, dist.get_rank()
    if way.method == "federated":  # a part without edges to others, as a client would have it
        own = graph.graph_directory.books[None].nodes_of(rank)
        inside = torch.zeros(graph.num_nodes, dtype=torch.bool)
        inside[own] = True
        keep = inside[graph.edge_index[0]] & inside[graph.edge_index[1]]
        data = Data(x=graph.x[:], y=graph.y[:], edge_index=graph.edge_index[:, keep])
        data.train_mask = graph.train_mask & inside
    loader = NeighborLoader(
        data,
        settings["num_neighbors"],
        input_nodes=data.train_mask,
        batch_size=settings["batch_size"],
        shuffle=True,
        split_seeds=False if way.method == "federated" else "global",
    )
    model = parallel.wrap(
        model_of(graph.num_features, settings["hidden"], int(graph.y.max()) + 1), _method_of(way)
    )
    own_optimizer = getattr(model, "optimizer", None)
    optimizer = own_optimizer or torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> float:
        loss, seeds = torch.zeros(()), 0
        with model.join(optimizer):
            for batch in loader:
                optimizer.zero_grad()
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                loss = F.cross_entropy(out, batch.y[: batch.batch_size])
                model.backward(loss, batch.batch_size)
                optimizer.step()
                seeds += batch.batch_size
        return _mean(loss, seeds)

    return model, epoch


def _mean(loss: Tensor, seeds: int) -> float:
    """The mean of a loss over the seeds of all ranks."""
    sums = torch.tensor([float(loss.detach()) * seeds, seeds], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1].clamp(min=1))


def bytes_received() -> int:
    """Bytes that came to this process over TCP, on all connections that it has now (Linux)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                tcp = each.family in (socket.AF_INET, socket.AF_INET6)
                if tcp and each.type == socket.SOCK_STREAM:
                    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    if len(info) >= _RECEIVED + 8:
                        total += struct.unpack_from("Q", info, _RECEIVED)[0]
    return total
