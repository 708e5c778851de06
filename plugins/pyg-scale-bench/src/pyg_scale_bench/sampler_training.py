"""Accuracy after equal epochs and after equal time, of one model trained with each sampler.

The model has a layer of ``GraphConv`` for each hop, which adds up weighted neighbours: with
samplers that bring weights those of the batch, else one over the number of in-edges that the batch
has, as a mean does; it is accelerated. An epoch is equally many steps for all. After it, the clock
stands still while the model predicts the classes of all test nodes with all in-edges. Who is done
with all epochs early goes on for as long as sampling neighbours took. There are enough epochs for
the accuracy with neighbours to change little over the second half of them. GraphSAINT goes without
its norms, which would take longer to estimate than the training takes. A batch of clusters is a
quarter of them: the communities of the generated graph are larger than a cluster, and a tenth would
lose nine tenths of the edges.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, repeat, starmap
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv
from torch_geometric.transforms import RandomNodeSplit

from pyg_scale.datasets import load, planted_communities
from pyg_scale.loader import (
    ClusterData,
    ClusterLoader,
    GraphSAINTRandomWalkSampler,
    NeighborLoader,
    ShaDowKHopSampler,
)
from pyg_scale.nn import accelerate
from pyg_scale.sampler import Labor, Ladies
from pyg_scale_bench.benchmark import Option, Options
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.report import Table

OPTIONS: Options = {
    "data": Option(help="an .npz archive or a data set of PyG to train on; default: generated"),
    "train_nodes": Option(20_000, "of the generated graph"),
    "train_edges": Option(400_000, "of it"),
    "train_share": Option(0.5, "of its nodes to train on; a quarter are for testing"),
    "train_signal": Option(0.4, "of its features: half the distance of centres over the noise"),
    "epochs": Option(20, least=1),
    "repeats": Option(6, "seeds of model and loader", least=1),
    "hidden": Option(64, "channels of the model"),
    "train_batch_size": Option(512, "seeds", least=1),
    "train_neighbors": Option([10, 10], "of each hop, as 10,10: so many layers has the model"),
    "labor_alone": Option(False, "train with neighbours and with LABOR alone"),
}

QUICK = {
    "train_nodes": 1_000, "train_edges": 10_000, "epochs": 2, "repeats": 2, "hidden": 16,
    "train_batch_size": 128,
}  # fmt: skip

BASE = "neighbours"
_CLUSTERS = 10  # for each step of an epoch
_BATCHES = 4  # batches in which all clusters come once
_MOST_EPOCHS = 10  # times as many as were asked for


class Step(NamedTuple):
    """A batch as the model takes it.

    Attributes:
        x: ``[num_nodes, num_features]``.
        edge_index: ``[2, num_edges]``.
        weight: ``[num_edges]``.
        rows: The rows that count in the loss ``[n]``.
        y: Their classes ``[n]``.
    """

    x: Tensor
    edge_index: Tensor
    weight: Tensor
    rows: Tensor
    y: Tensor


class Sums(nn.Module):
    """Layers that add up weighted neighbours.

    Args:
        channels: Numbers of channels before, between and after them.
    """

    def __init__(self, *channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(starmap(GraphConv, pairwise(channels)))

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        """Class scores ``[num_nodes, num_classes]``."""
        *first, last = self.layers
        for layer in first:
            x = layer(x, edge_index, weight).relu()
        return last(x, edge_index, weight)


def mean_weights(edge_index: Tensor, num_nodes: int) -> Tensor:
    """One over the number of in-edges of each edge's destination, ``[num_edges]``."""
    degree = torch.bincount(edge_index[1], minlength=num_nodes)
    return 1 / degree[edge_index[1]].float()


Epoch = Callable[[], Iterator[Step]]


def _ways(data: Data, args: argparse.Namespace, seed: int) -> dict[str, Epoch]:
    """The steps of an epoch of each sampler."""
    hops, size = args.train_neighbors, args.train_batch_size
    common: dict[str, Any] = {"shuffle": True, "seed": seed}
    steps = -(-int(data.train_mask.sum()) // size)

    def of_seeds(one: Any, numbers: Sequence[int] = hops) -> Epoch:
        loader = NeighborLoader(
            data, numbers, data.train_mask, batch_size=size, neighbor_sampler=one, **common
        )

        def epoch() -> Iterator[Step]:
            for batch in loader:
                own = "edge_weight" in batch
                edges, n = batch.edge_index, batch.batch_size
                weight = batch.edge_weight if own else mean_weights(edges, batch.num_nodes)
                yield Step(batch.x, edges, weight, torch.arange(n), batch.y[:n])

        return epoch

    def of_subgraphs(loader: Any) -> Epoch:
        def epoch() -> Iterator[Step]:
            passes = chain.from_iterable(repeat(loader))
            for batch in islice(passes, steps):
                rows = batch.train_mask.nonzero().view(-1)
                if not rows.numel():
                    continue
                weight = mean_weights(batch.edge_index, batch.num_nodes)
                yield Step(batch.x, batch.edge_index, weight, rows, batch.y[rows])

        return epoch

    def of_roots() -> Epoch:
        loader = ShaDowKHopSampler(data, len(hops), few, data.train_mask, batch_size=size, **common)

        def epoch() -> Iterator[Step]:
            for batch in loader:
                weight = mean_weights(batch.edge_index, batch.num_nodes)
                yield Step(batch.x, batch.edge_index, weight, batch.root_n_id, batch.y)

        return epoch

    of_labor = {
        BASE: of_seeds("native"),
        "LABOR": of_seeds(Labor()),
        "LABOR, layers dependent": of_seeds(Labor(layer_dependency=True)),
    }
    if args.labor_alone:
        return of_labor
    few = max(1, min(hops) // 2)  # each root has nodes of its own
    cut = ClusterData(data, _CLUSTERS * steps, log=False, method="multilevel")
    quarter = -(-len(cut) // _BATCHES)
    roots = max(1, (data.num_nodes or 0) // 10)
    return of_labor | {
        **{
            f"LABOR, {number:,} batches dependent": of_seeds(Labor(batch_dependency=number))
            for number in (steps, args.dependency)
        },
        "LADIES": of_seeds(Ladies(), [4 * size] * len(hops)),
        "clusters": of_subgraphs(ClusterLoader(cut, batch_size=quarter, **common)),
        "GraphSAINT": of_subgraphs(
            GraphSAINTRandomWalkSampler(data, roots, 2, num_steps=steps, log=False, seed=seed)
        ),
        f"ShaDow, {few} neighbours": of_roots(),
    }


def measure(args: argparse.Namespace, _: Callable[[], Data]) -> dict[str, Any]:
    """Train with every sampler, one epoch each in turns, and repeat it with other seeds."""
    data = _data(args)
    everything = mean_weights(data.edge_index, data.num_nodes or 0)
    classes = int(data.y.max()) + 1
    runs: dict[str, list[list[tuple[float, float]]]] = {}
    for seed in range(args.repeats):
        print(f"training with seed {seed}", file=sys.stderr)
        ways = _ways(data, args, seed)
        models, optimizers = {}, {}
        for name in ways:
            torch.manual_seed(seed)
            hidden = [args.hidden] * (len(args.train_neighbors) - 1)
            models[name] = Sums(data.num_features, *hidden, classes)
            accelerate(models[name])
            optimizers[name] = torch.optim.Adam(models[name].parameters(), lr=0.01)
            runs.setdefault(name, []).append([])
        for number in range(_MOST_EPOCHS * args.epochs):
            for name, epoch in ways.items():
                found = runs[name][-1]
                if number >= args.epochs and found[-1][0] >= runs[BASE][-1][args.epochs - 1][0]:
                    continue
                begin = time.perf_counter()
                _train(models[name], optimizers[name], epoch())
                seconds = time.perf_counter() - begin + (found[-1][0] if found else 0)
                with torch.no_grad():
                    out = models[name](data.x, data.edge_index, everything)
                right = out.argmax(1)[data.test_mask] == data.y[data.test_mask]
                found.append((seconds, float(right.float().mean())))
    size = {"nodes": data.num_nodes, "edges": data.num_edges, "classes": classes}
    return {"runs": runs, "graph": size, "epochs": args.epochs}


def _data(args: argparse.Namespace) -> Data:
    if args.data is None:
        size = (args.train_nodes, args.train_edges, 16, 32)
        split = (args.train_share, 0.75 - args.train_share, 0.25)
        return planted_communities(*size, homophily=0.7, signal=args.train_signal, split=split)
    data = load(args.data)
    if "train_mask" not in data:
        torch.manual_seed(0)
        data = RandomNodeSplit(num_val=0.25, num_test=0.25)(data)
    return data


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[Step]) -> None:
    for step in steps:
        out = model(step.x, step.edge_index, step.weight)[step.rows]
        loss = F.cross_entropy(out, step.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Report ###################################################################################


def points_apart(run: Sequence[float], base: Sequence[float]) -> str:
    """The mean of the differences seed by seed, in points, and its standard error."""
    apart = [100 * (one - other) for one, other in zip(run, base, strict=True)]
    error = f" ± {stdev(apart) / len(apart) ** 0.5:.2f}" if len(apart) > 1 else ""
    return f"{mean(apart):+.2f}{error}"


def accuracy_at(run: Sequence[Sequence[float]], seconds: float) -> float:
    """The accuracy after the last epoch that ended in time; 0 if none did."""
    return max([(end, accuracy) for end, accuracy in run if end <= seconds], default=(0, 0))[1]


def report(part: Mapping[str, Any], lines: list[str]) -> tuple[Table, list[Panel]]:
    """The table and the panels of what :func:`measure` found."""
    runs, epochs = part["runs"], part["epochs"]
    rows, equal_epochs, equal_time = [], [], []
    of_base = [run[epochs - 1][1] for run in runs[BASE]]
    for name, each in runs.items():
        last = [run[epochs - 1][1] for run in each]
        pairs = zip(each, runs[BASE])
        in_time = [accuracy_at(run, base[epochs - 1][0]) for run, base in pairs]
        seconds = mean(run[epochs - 1][0] for run in each)
        halfway = mean(run[(epochs - 1) // 2][1] for run in each)
        cells = [f"{mean(last):.4f}", f"{min(last):.4f} to {max(last):.4f}"]
        cells += [points_apart(last, of_base) if name != BASE else "", f"{halfway:.4f}"]
        rows.append([name, *cells, f"{mean(in_time):.4f}", f"{seconds:.2f}"])
        spread = (min(last), max(last))
        equal_epochs.append(Bar(name, mean(last), spread=spread))
        equal_time.append(Bar(name, mean(in_time), spread=(min(in_time), max(in_time))))
    graph = part["graph"]
    note = (
        f"Test accuracy, {graph['nodes']:,} nodes, {graph['edges']:,} edges, {graph['classes']} "
        f"classes; {epochs} epochs, means of {len(runs[BASE])} seeds; points from {BASE} are the "
        "mean difference of runs with the same seed, with its standard error. Equal time is what "
        f"{BASE} took for all epochs, whole epochs alone; seconds are those of all epochs. With "
        "more dependent batches than there are steps, all steps see nearly the same sample."
    )
    header = ["sampler", "equal epochs", "lowest to highest"]
    header += [f"points from {BASE}", "half of them", "equal time", "seconds"]
    row = [
        Panel(f"Accuracy after {epochs} epochs", equal_epochs, "of test nodes", form=".4f"),
        Panel("Accuracy after equal time", equal_time, "of test nodes", form=".4f"),
    ]
    return Table(header, rows, "Training", note, align="lr"), row
