"""What is measured: streams of batches, each counted, made by ours or by PyG's code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput

from pyg_scale.cli.bench import peers
from pyg_scale.cli.bench.measure import Counts
from pyg_scale.ops import threads


def loaded(make: Callable[[], Any]) -> Iterator[Counts]:
    """The batches of a loader; the last one is alive while the next one is made."""
    for batch in make():
        yield count(batch)


def loaded_by_pyg(name: str, make: Callable[[], Any]) -> Iterator[Counts]:
    """The batches of a loader of PyG that samples with the package ``name``."""
    with peers.using(name):
        yield from loaded(make)


def sampled(sampler: Any, node: Tensor, batch_size: int) -> Iterator[Counts]:
    """Sampling alone, on one thread, with our sampler."""
    with threads.serial():
        for key, seed in enumerate(node.split(batch_size)):
            out = sampler.sample_from_nodes(NodeSamplerInput(None, seed), key=key)
            yield Counts(out.node.numel(), out.row.numel())


def sampled_by_pyg(name: str, sampler: Any, node: Tensor, batch_size: int) -> Iterator[Counts]:
    """Sampling alone, on one thread, with PyG's sampler and the package ``name``."""
    with peers.using(name), _one_thread():
        for seed in node.split(batch_size):
            out = sampler.sample_from_nodes(NodeSamplerInput(None, seed))
            yield Counts(out.node.numel(), out.row.numel())


def limit(
    sampler: Any, data: Data, node: Tensor, batch_size: int, num_threads: int
) -> Iterator[Counts]:
    """Sampling, then copying as many bytes as the features have, from one place to another.

    No loader that samples so and copies features can be faster here.
    """
    width = row_bytes(data)
    source = np.empty(0, np.uint8)
    if data.x is not None:
        source = data.x.contiguous().numpy().reshape(-1).view(np.uint8)
    own = threading.local()

    def work(item: tuple[int, Tensor]) -> Counts:
        key, seed = item
        with threads.serial():
            out = sampler.sample_from_nodes(NodeSamplerInput(None, seed), key=key)
        size = min(out.node.numel() * width, source.size)
        if getattr(own, "target", source[:0]).size < size:
            own.target = np.empty(size + size // 4, np.uint8)
        begin = (key * 2_654_435_761) % (source.size - size + 1)
        np.copyto(own.target[:size], source[begin : begin + size])
        return Counts(out.node.numel(), out.row.numel(), size)

    with ThreadPoolExecutor(num_threads, "pyg_scale-bench") as pool:
        try:
            yield from pool.map(work, enumerate(node.split(batch_size)))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def count(batch: Data | HeteroData) -> Counts:
    """How much a batch holds."""
    x = [store.x for store in batch.node_stores if "x" in store]
    return Counts(
        sum(store.n_id.numel() for store in batch.node_stores),
        sum(store.edge_index.shape[1] for store in batch.edge_stores),
        sum(each.numel() * each.element_size() for each in x),
    )


def row_bytes(data: Data) -> int:
    """Bytes of the features of one node."""
    return 0 if data.x is None else data.x[:1].numel() * data.x.element_size()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
