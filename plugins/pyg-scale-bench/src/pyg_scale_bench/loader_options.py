"""Every option of the loaders on generated graphs, and the proof that the compiled op ran."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch_geometric.loader
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data, HeteroData

import pyg_scale.loader
from pyg_scale import plugins
from pyg_scale.datasets import hetero_communities, planted_communities
from pyg_scale.datasets.communities import TIME_RANGE
from pyg_scale_bench import graphs, peers, streams
from pyg_scale_bench.rounds import OURS, PYG
from pyg_scale_bench.streams import Case, Counted, Stream

SHARE = 10
"""The factor by which the graphs are smaller than that of the main measurement."""

SAMPLING_OPS = ("pyg_scale::neighbor_sample", "pyg_scale::hgt_sample")


@dataclass
class _Option:
    """A loader by name with arguments, for our module and PyG's.

    ``ours`` are further arguments that PyG's loader does not have.
    """

    label: str
    loader: str
    data: Data | HeteroData
    kwargs: dict[str, Any]
    ours: Callable[[], dict[str, Any]] = dict

    def make(self, module: Any, **more: Any) -> Any:
        kwargs = self.kwargs | more
        if module is pyg_scale.loader:
            kwargs |= self.ours()
        return getattr(module, self.loader)(self.data, **kwargs)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Cases for every option; ``args`` are those of :mod:`pyg_scale_bench.loader`.

    Raises:
        RuntimeError: If an option did not run a compiled sampling op.
    """
    names, workers = peers.working(args.no_pyg), max(args.workers)
    for option in _options(args):
        make = partial(option.make, pyg_scale.loader, num_workers=workers)
        ours = partial(streams.loaded, make)
        yield _case(option, OURS, "pyg_scale", ours, workers, compiled=_compiled_ops(option))
        for name in names:
            theirs = partial(_theirs, option, name, workers)
            yield _case(option, PYG, f"PyG on {name}", theirs, workers)


def _case(
    option: _Option, side: str, label: str, stream: Stream, workers: int, **notes: str
) -> Case:
    return Case(
        side=side,
        group="options",
        label=f"{label}, {workers} workers",
        variant=option.label,
        stream=stream,
        workers=workers,
        notes=notes,
    )


def num_nodes(args: argparse.Namespace) -> int:
    """Number of nodes of these graphs."""
    return int(args.nodes // SHARE)


def _theirs(option: _Option, name: str, workers: int) -> Counted:
    if option.ours is not dict:
        raise NotImplementedError("PyG's loader has no argument for this")
    make = partial(option.make, torch_geometric.loader, num_workers=workers)
    return streams.loaded_by_pyg(name, make)


class _Seen(TorchDispatchMode):
    """A context that collects the names of the ops that this thread calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def _compiled_ops(option: _Option) -> str:
    """The compiled sampling ops that run for one batch."""
    loader = option.make(pyg_scale.loader, num_workers=0)
    with _Seen() as seen:
        next(iter(loader))
    ops = [op for op in SAMPLING_OPS if op in seen.names]
    if not ops:
        raise RuntimeError(
            f"option {option.label!r} ran no compiled sampling op: expected one of "
            f"{', '.join(SAMPLING_OPS)}"
        )
    return ", ".join(op.removeprefix("pyg_scale::") for op in ops)


def _options(args: argparse.Namespace) -> Iterator[_Option]:
    nodes, edges = num_nodes(args), args.edges // SHARE // 2 * 2
    data = planted_communities(
        nodes, edges, 47, args.features, node_time=True, edge_time=True, edge_weight=True
    )
    need = (args.warmup + args.batches + 8) * args.batch_size
    node = graphs.seeds(nodes, need)
    now = torch.full_like(node, TIME_RANGE // 2)
    base = {"num_neighbors": args.num_neighbors, "batch_size": args.batch_size}
    seeds = base | {"input_nodes": node}
    plain = _without(data, "time", "edge_time", "edge_weight")
    weighted, timed = (
        _without(data, "time", "edge_time"),
        _without(data, "edge_time", "edge_weight"),
    )
    edge_timed = _without(data, "time", "edge_weight")

    def neighbor(label: str, graph: Data | HeteroData, **kwargs: Any) -> _Option:
        return _Option(label, "NeighborLoader", graph, seeds | kwargs)

    yield neighbor("uniform", plain)
    yield neighbor("replace", plain, replace=True)
    yield neighbor("disjoint", plain, disjoint=True)
    yield neighbor("weighted", weighted, weight_attr="edge_weight")
    yield neighbor("weighted, replace", weighted, weight_attr="edge_weight", replace=True)
    yield neighbor("node time", timed, time_attr="time")
    yield neighbor("node time, last", timed, time_attr="time", temporal_strategy="last")
    yield neighbor("edge time", edge_timed, time_attr="edge_time", input_time=now)
    yield neighbor("induced", plain, subgraph_type="induced")
    yield neighbor("induced, node time", timed, subgraph_type="induced", time_attr="time")
    yield neighbor("bidirectional", plain, subgraph_type="bidirectional")
    yield _Option("backward", "NeighborLoader", plain, seeds, _backward(plain, args))
    yield from _link_options(plain, base, need)
    yield from _hetero_options(args, base, need)


def _backward(data: Data, args: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    sampler = plugins.get("sampler", "native")(
        data, num_neighbors=args.num_neighbors, sample_direction="backward"
    )
    return lambda: {"neighbor_sampler": sampler}


def _link_options(data: Data, base: dict[str, Any], need: int) -> Iterator[_Option]:
    links = data.edge_index[:, graphs.seeds(data.edge_index.shape[1], need, seed=1)]
    kwargs = base | {"edge_label_index": links}
    yield _Option("links", "LinkNeighborLoader", data, kwargs)
    for mode in ("binary", "triplet"):
        yield _Option(
            f"links, {mode} negatives", "LinkNeighborLoader", data, kwargs | {"neg_sampling": mode}
        )


def _hetero_options(args: argparse.Namespace, base: dict[str, Any], need: int) -> Iterator[_Option]:
    papers, citations = args.nodes // SHARE // 2, args.edges // SHARE // 4
    data = hetero_communities(
        papers, papers // 2, citations, citations, 47, args.features, node_time=True
    )
    node: tuple[str, Tensor] = ("paper", graphs.seeds(papers, need, seed=2))
    plain = _without(data, "time")
    seeds = base | {"input_nodes": node}
    yield _Option("heterogeneous", "NeighborLoader", plain, seeds)
    yield _Option("heterogeneous, node time", "NeighborLoader", data, seeds | {"time_attr": "time"})
    yield _Option(
        "heterogeneous HGT",
        "HGTLoader",
        plain,
        {
            "input_nodes": node,
            "batch_size": args.batch_size,
            "num_samples": [args.batch_size] * len(args.num_neighbors),
        },
    )


def _without(data: Any, *names: str) -> Any:
    """The same graph, sharing its tensors, without some attributes of its nodes or edges."""
    out = data.__copy__()
    for store in out.stores:
        for name in (*names, "y", "community", "train_mask", "val_mask", "test_mask"):
            if name in store:
                del store[name]
    return out
