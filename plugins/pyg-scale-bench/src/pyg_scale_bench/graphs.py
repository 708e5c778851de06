"""The graphs of the benchmarks, and the forms in which a user could pass them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

import pyg_scale
from pyg_scale import cli
from pyg_scale.datasets import planted_communities
from pyg_scale_bench import memory
from pyg_scale_bench.benchmark import Option, Options

VARIANTS = ("int64 unsorted", "int64 sorted", "int32 unsorted", "int32 sorted")

REUSE: Options = {"reuse": Option(False, "use the graph that an earlier run with --keep left")}
"""The option of benchmarks that use :func:`converted`."""
_DRAWN_AT_ONCE = 1 << 24  # edges


def cached(folder: str | None, nodes: int, edges: int, features: int) -> Data:
    """A generated graph, kept as plain ``.npy`` files in ``folder`` if given."""
    if folder is None:
        return planted_communities(nodes, edges, 47, features)
    root = Path(folder) / f"planted-{nodes}-{edges}-{features}"
    if not root.is_dir():
        data = planted_communities(nodes, edges, 47, features)
        part = root.with_name(f"{root.name}.{os.getpid()}.part")
        part.mkdir(parents=True)
        np.save(part / "edge_index.npy", data.edge_index.numpy())
        if features:
            np.save(part / "x.npy", data.x.numpy())
        part.rename(root)
        return data
    data = Data(edge_index=torch.from_numpy(np.load(root / "edge_index.npy")), num_nodes=nodes)
    if features:
        data.x = torch.from_numpy(np.load(root / "x.npy"))
    return data


def power_law(nodes: int, edges: int, features: int, exponent: float) -> Data:
    """A graph of popular sources: the k-th is drawn in proportion to ``k ** -exponent``.

    All destinations are equally likely, so that in-degrees are those of a Poisson distribution.
    """
    generator = torch.Generator().manual_seed(0)
    rank = torch.arange(1, nodes + 1, dtype=torch.float64)
    below = (rank**-exponent).cumsum(0)
    number = torch.randperm(nodes, generator=generator)
    edge_index = torch.empty(2, edges, dtype=torch.int64)
    for begin in range(0, edges, _DRAWN_AT_ONCE):
        into = edge_index[:, begin : begin + _DRAWN_AT_ONCE]
        drawn = torch.rand(into.size(1), generator=generator, dtype=torch.float64) * below[-1]
        into[0] = number[torch.searchsorted(below, drawn).clamp_(max=nodes - 1)]
        into[1] = torch.randint(nodes, (into.size(1),), generator=generator)
    x = torch.rand(nodes, features, generator=generator)
    return Data(x=x, edge_index=edge_index)


def converted(
    path: str, values: Mapping[str, Any], memory_bytes: int | None = None
) -> Iterator[dict[str, Any]]:
    """Generate a graph during its conversion to a directory, so that it may exceed memory.

    Args:
        path: The directory.
        values: Options of the reader ``generated``.
        memory_bytes: Bytes that the conversion may use.
    """
    source = ",".join(f"{name}={value}" for name, value in {**values, "seed": 0}.items())
    limit = [] if memory_bytes is None else ["--memory", str(memory_bytes)]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if status := cli.main(["convert", f"generated:{source}", path, "--overwrite", *limit]):
        raise SystemExit(status)
    yield {"peak_resident": memory.peak()}


def reused(args: argparse.Namespace, found: dict[str, Any]) -> bool:
    """True if the graph of an earlier run in ``args.dir`` is used again.

    Its sizes then replace those of the options, and of the settings in ``found``.
    """
    graph = Path(args.dir).absolute() / "graph"
    if not (args.reuse and graph.exists()):
        return False
    data = pyg_scale.open(graph)
    sizes = {"nodes": data.num_nodes, "edges": data.num_edges, "features": data.num_features}
    sizes["dtype"] = str(data.x.dtype).removeprefix("torch.")
    for name in sizes.keys() & vars(args).keys():
        setattr(args, name, sizes[name])
        found["settings"][name] = sizes[name]
    return True


def variant_of(data: Data, variant: str) -> Data:
    """The graph ``data`` in another form.

    Args:
        data: The graph; ``edge_index`` and ``x`` are used, ``x`` is shared.
        variant: One of :data:`VARIANTS`; sorted means by destination, then source.
    """
    dtype, order = variant.split()
    edge_index = _sorted(data.edge_index) if order == "sorted" else _unsorted(data.edge_index)
    out = Data(edge_index=edge_index.to(getattr(torch, dtype)), num_nodes=data.num_nodes)
    if data.x is not None:
        out.x = data.x
    return out


def is_sorted(variant: str) -> bool:
    """The value of ``is_sorted=`` for a graph of that form."""
    return variant.endswith(" sorted")


def seeds(num_nodes: int, count: int, seed: int = 0) -> Tensor:
    """``count`` seed nodes: every node once in random order, then again in another one."""
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-count // num_nodes)
    orders = [torch.randperm(num_nodes, generator=generator) for _ in range(epochs)]
    return torch.cat(orders)[:count]


def _sorted(edge_index: Tensor) -> Tensor:
    src, dst = edge_index.numpy()
    pair = dst.astype(np.uint64)
    pair <<= np.uint64(32)
    pair |= src.astype(np.uint64)
    pair.sort()
    out = np.empty(edge_index.shape, dtype=np.int64)
    out[0], out[1] = pair & np.uint64(0xFFFFFFFF), pair >> np.uint64(32)
    return torch.from_numpy(out)


def _unsorted(edge_index: Tensor) -> Tensor:
    """The edges as given, or shuffled if these are sorted by destination."""
    dst = edge_index[1]
    if dst.numel() and bool((dst[1:] >= dst[:-1]).all()):
        generator = torch.Generator().manual_seed(0)
        return edge_index[:, torch.randperm(dst.numel(), generator=generator)]
    return edge_index
