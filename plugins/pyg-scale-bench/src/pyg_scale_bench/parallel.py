"""All wrappers of ``parallel.wrap``: time, bytes and memory of an epoch, and what ``advise`` says.

On a mesh, where parts have few neighbours, a graph with a power law, where they have many, ones
as dense as Reddit (of half as many neighbours) and products (OGB), a small world between mesh and
random graph, and real ones.
Wrappers of sampled batches make many steps in an epoch, those of the full graph one.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

import pyg_scale
from pyg_scale.datasets import planted_communities, read_npz
from pyg_scale.parallel import advise
from pyg_scale_bench.benchmark import FOLDER, Benchmark, Option, names_of
from pyg_scale_bench.chart import Bar, Curves, Panel
from pyg_scale_bench.child import Child, call
from pyg_scale_bench.parallel_rank import WAYS, Way, measured, model_of, shape_of_mesh
from pyg_scale_bench.report import Report, Table, listed, number

_SECONDS = 1800.0
_MB = 1e6
_NEAR = 1e-3  # of a loss: ranks add up in another order, in fp32
_CHECKS = ("small world", "tolokers")  # graphs that no constant of `advise` was set with


# Measuring ################################################################################


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Make the graphs, and run the measurements of the ranks."""
    root = Path(args.dir).absolute()
    sizes = {name: getattr(args, name) for name in ("nodes", "edges", "features", "hidden")}
    made = {
        "root": str(root),
        "ranks": args.ranks,
        "bandwidth": args.bandwidth,
        "npz": args.npz,
        "only_npz": args.only_npz,
        **sizes,
    }
    found["graphs"] = call(graphs, made, seconds=_SECONDS)
    paths = {name: str(root / name) for name in found["graphs"]}
    given = {"settings": found["settings"], "paths": paths}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(Child(measured, given, environ=environ, seconds=_SECONDS))
            for environ in _environs(args.ranks, args.threads)
        ]
        for rank in ranks:
            rank.ask()
        try:
            found["ranks"] = [rank.answer() for rank in ranks]
        except SystemExit:
            for rank in ranks:
                rank.kill()  # the others wait for the failed one
            raise


def _environs(ranks: int, threads: int) -> list[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["OMP_NUM_THREADS"] = str(threads)
    return [{**common, "RANK": str(rank)} for rank in range(ranks)]


def graphs(
    root: str,
    ranks: int,
    bandwidth: str,
    npz: str | None,
    only_npz: bool,
    nodes: int,
    edges: int,
    features: int,
    hidden: int,
) -> Iterator[dict[str, Any]]:
    """Write the parts of each graph; returns descriptions, with the advice for it."""
    found, made = {}, dict[str, Data]()
    if not only_npz:
        power = power_law(nodes, max(1, edges // (2 * nodes)))
        made = {
            "mesh": with_features(square(max(2, int(nodes**0.5))), features),
            "power law": with_features(power, features),
            "like Reddit": communities(nodes // 4, 200, features),
            "like products": communities(nodes // 2, 50, features),
            "small world": with_features(small_world(nodes, 4, 0.1), features),
        }
    for file in npz.split(",") if npz else ():
        made[Path(file).stem] = real(file, features)
    for name, data in made.items():
        generator = torch.Generator().manual_seed(0)
        data.train_mask = (torch.rand(data.num_nodes, generator=generator) < 0.5) & (data.y >= 0)
        path = Path(root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pyg_scale.partition(data, ranks, "multilevel", path, balance=("nodes", "edges"))
        model = model_of(data.num_features, hidden, int(data.y.max()) + 1)
        with pyg_scale.open(path) as parts:  # as it was cut for the ranks
            advice = advise(parts, model, ranks, bandwidth=bandwidth, memory="64GB")
        found[name] = {
            "nodes": data.num_nodes,
            "edges": data.num_edges,
            "replication": advice.replication,
            "advised": advice.method,
            "options": advice.options,
            "mesh": advice.mesh,
            "wrapper": advice.wrapper,
            "reasons": advice.reasons,
        }
    yield found


def communities(nodes: int, degree: int, features: int) -> Data:
    """A graph of eight communities with power laws; of few nodes, with smaller degrees."""
    found = planted_communities(
        nodes,
        nodes * max(1, min(degree, nodes // 25)) // 2 * 2,
        8,
        features,
        homophily=0.5,
        progress=False,
    )
    return Data(x=found.x, y=found.y, edge_index=found.edge_index)


def real(npz: str, features: int) -> Data:
    """A graph of an archive, with the features that most nodes have."""
    data = read_npz(npz)
    x = data.x.to_dense() if data.x.layout != torch.strided else data.x
    most = x.sum(dim=0).topk(min(features, x.size(1))).indices
    return Data(x=x[:, most].float(), y=data.y, edge_index=data.edge_index.long())


def square(side: int) -> Tensor:
    """The edges of a square grid with diagonals, as of finite elements, in both directions."""
    number = torch.arange(side * side).view(side, side)
    pairs = [
        (number[:, :-1], number[:, 1:]),
        (number[:-1], number[1:]),
        (number[:-1, :-1], number[1:, 1:]),
    ]
    half = torch.cat([torch.stack([a.reshape(-1), b.reshape(-1)]) for a, b in pairs], dim=1)
    return torch.cat([half, half.flip(0)], dim=1)


def power_law(nodes: int, degree: int) -> Tensor:
    """The edges of a graph of Barabasi and Albert (Science 1999), in both directions.

    An edge ends at a random end of an earlier edge (Batagelj and Brandes, Phys. Rev. E 2005).

    Args:
        nodes: Number of nodes.
        degree: Number of earlier nodes that each one is linked to.
    """
    generator = torch.Generator().manual_seed(1)
    source = torch.arange(nodes).repeat_interleave(degree)
    ends = 2 * torch.arange(nodes * degree)  # of earlier edges; at first there is none but itself
    place = (torch.rand(ends.numel(), generator=generator, dtype=torch.float64) * ends).long()
    while bool((place % 2).any()):  # an odd place is the end of an edge whose end is drawn, too
        place = torch.where(place % 2 == 1, place[place // 2], place)
    half = torch.stack([source, source[place // 2]])
    half = half[:, half[0] != half[1]]
    return torch.cat([half, half.flip(0)], dim=1)


def small_world(nodes: int, near: int, share: float) -> Tensor:
    """The edges of a graph of Watts and Strogatz (Nature 1998), in both directions.

    Args:
        nodes: Number of nodes, in a ring.
        near: Number of next ones that each is linked to.
        share: The share of edges that end anywhere instead.
    """
    generator = torch.Generator().manual_seed(3)
    source = torch.arange(nodes).repeat_interleave(near)
    end = (source + torch.arange(1, near + 1).repeat(nodes)) % nodes
    anywhere = torch.randint(nodes, (end.numel(),), generator=generator)
    end = torch.where(torch.rand(end.numel(), generator=generator) < share, anywhere, end)
    half = torch.stack([source, end])[:, source != end]
    return torch.cat([half, half.flip(0)], dim=1)


def with_features(edge_index: Tensor, features: int) -> Data:
    """A graph with random features, and labels of 8 classes."""
    generator, nodes = torch.Generator().manual_seed(2), int(edge_index.max()) + 1
    x = torch.randn(nodes, features, generator=generator)
    return Data(x=x, y=torch.randint(8, (nodes,), generator=generator), edge_index=edge_index)


# Numbers ##################################################################################


def numbers(found: Mapping[str, Any], graph: str) -> dict[str, dict[str, Any]]:
    """The seconds, bytes and memory of each wrapper; of the ranks the slowest and the fullest."""
    result: dict[str, dict[str, Any]] = {}
    for name, first in found["ranks"][0][graph].items():
        ranks = [rank[graph][name] for rank in found["ranks"]]
        rounds = [max(each) for each in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        result[name] = {
            "seconds": median(rounds),
            "spread": _quartiles(rounds),
            "received": max(median(rank["received"]) for rank in ranks),
            "peak": max(median(rank["peak"]) for rank in ranks),
            "exact": first["exact"],
            "loss": first["loss"],
            "advised": _is_advised(WAYS[name], found["graphs"][graph], len(found["ranks"])),
        }
    return result


def _is_advised(way: Way, about: Mapping[str, Any], ranks: int) -> bool:
    """True if a wrapper, its options and the shape of its mesh are those of the advice."""
    shape = list(shape_of_mesh(ranks)) if way.method == "mesh" else None
    said = about["advised"], about.get("options", {}), about.get("mesh")
    return (way.method, way.options, shape) == (*said[:2], said[2] and list(said[2]))


def _quartiles(seconds: list[float]) -> list[float]:
    """The first and the third one."""
    if len(seconds) == 1:
        return seconds * 2
    first, _, third = quantiles(seconds, n=4, method="inclusive")
    return [first, third]


class Place(NamedTuple):
    """The place by time of the advised wrapper among exact ones of its kind.

    Attributes:
        number: The place, from 1 on.
        of: How many there are.
        equal: Names of others whose quartiles meet those of the advised one.
    """

    number: int
    of: int
    equal: list[str]


def place_of_advised(found: Mapping[str, Any], graph: str) -> Place | None:
    """The place of the advised wrapper; ``None`` if it was not measured."""
    ways = numbers(found, graph)
    advised = next((name for name, each in ways.items() if each["advised"]), None)
    if advised is None:
        return None
    full = WAYS[advised].full
    plain = [n for n, each in ways.items() if each["exact"] and WAYS[n].full == full]
    order = sorted(plain, key=lambda name: ways[name]["seconds"])
    begin, end = ways[advised]["spread"]
    equal = [
        name
        for name in order
        if name != advised and ways[name]["spread"][0] <= end and ways[name]["spread"][1] >= begin
    ]
    return Place(order.index(advised) + 1, len(order), equal)


def different_losses(found: Mapping[str, Any], graph: str) -> list[str]:
    """The exact wrappers of the full graph whose loss is not that of the first one.

    All of them, if the first one's is not finite: no other one shows then that it is right.
    """
    ways = numbers(found, graph)
    exact = [n for n, each in ways.items() if each["exact"] and WAYS[n].full]
    if not exact:
        return []
    expected = ways[exact[0]]["loss"]
    return [name for name in exact if not _is_near(ways[name]["loss"], expected)]


def _is_near(loss: float | None, expected: float | None) -> bool:
    """False also if one of them is not finite, which is ``None`` in JSON."""
    if loss is None or expected is None or not math.isfinite(expected):
        return False
    return abs(loss - expected) <= _NEAR * abs(expected)


def curves(found: Mapping[str, Any], graph: str) -> list[list[str]]:
    """Rows of a table: loss and accuracy by step, and halo bytes of a step by the formula."""
    rows = []
    for name, first in found["ranks"][0][graph].items():
        if "curve" not in first:
            continue
        losses = first["curve"]
        places = sorted({0, len(losses) // 4, len(losses) // 2, len(losses) - 1})
        formula = max(rank[graph][name]["formula"] for rank in found["ranks"])
        rows.append(
            [
                graph,
                name,
                ", ".join(f"{number(losses[n], '.4f')} ({n + 1})" for n in places),
                ", ".join(f"{first['accuracy'][n]:.4f} ({n + 1})" for n in places),
                f"{formula / _MB:.3f}",
            ]
        )
    return rows


def drawn_curves(found: Mapping[str, Any]) -> list[Panel | Curves]:
    """Loss and accuracy by step, of the graph for which there are any."""
    ranks = found["ranks"][0]
    graph = next(g for g in found["graphs"] if any("curve" in each for each in ranks[g].values()))
    ways = {name: each for name, each in ranks[graph].items() if "curve" in each}
    return [
        Curves(
            f"{graph}: loss of training nodes",
            {name: each["curve"] for name, each in ways.items()},
            "mean loss",
        ),
        Curves(
            f"{graph}: accuracy of other nodes",
            {name: each["accuracy"] for name, each in ways.items()},
            "share",
        ),
    ]


# Report ###################################################################################


def report(found: Mapping[str, Any]) -> Report:
    """The report of the results."""
    settings, lines, rows = found["settings"], [], []
    panels: list[list[Panel | Curves]] = []
    wrong: list[str] = []
    for graph, about in found["graphs"].items():
        ways = numbers(found, graph)
        wrong += [f"{name} ({graph})" for name in different_losses(found, graph)]
        place = place_of_advised(found, graph)
        where = ""
        if place is not None:
            where = f", number {place.number} of {place.of} exact ones by time"
            if place.equal:
                where += f", equal to {', '.join(place.equal)} within quartiles"
        if graph in _CHECKS:
            where += "; no constant of advise was set with this graph"
        lines.append(
            f"{graph}: {about['nodes']:,} nodes, {about['edges']:,} directed edges, "
            f"{about['replication']:.2f} halo nodes per node; advise says "
            f"{about['wrapper']}{where}"
        )
        for name, each in ways.items():
            rows.append(
                [
                    graph,
                    name,
                    _side(name),
                    "yes" if each["exact"] else "no",
                    f"{each['seconds']:.3f}",
                    listed(each["spread"], ".3f"),
                    f"{each['received'] / _MB:.2f}",
                    f"{each['peak'] / _MB:.0f}",
                    "advised" if each["advised"] else "",
                ]
            )
        label = {n: f"{n} (advised)" if each["advised"] else n for n, each in ways.items()}
        spread = {n: (each["spread"][0], each["spread"][1]) for n, each in ways.items()}
        panels.append(
            [
                Panel(
                    f"{graph}: an epoch",
                    [
                        Bar(label[n], each["seconds"], _side(n), spread=spread[n])
                        for n, each in ways.items()
                    ],
                    "seconds",
                    ".3f",
                ),
                Panel(
                    f"{graph}: what comes to a rank",
                    [Bar(label[n], each["received"] / _MB, _side(n)) for n, each in ways.items()],
                    "MB an epoch",
                ),
            ]
        )
    if wrong:
        lines.insert(0, f"WRONG: the loss is not that of the first exact one: {', '.join(wrong)}")
    lines.append(
        f"GraphSAGE of 2 layers, {settings['features']} features, {settings['hidden']} hidden "
        f"channels; {settings['ranks']} ranks, {settings['threads']} thread each, on one machine; "
        f"batches of {settings['batch_size']} seeds, num_neighbors {settings['num_neighbors']}; "
        f"median of {settings['rounds']} rounds, the slowest rank; of the full graph "
        f"{settings.get('full_steps', 1)} steps a round"
    )
    reasons = {name: WAYS[name].why_not(settings["ranks"]) for name in settings["ways"]}
    if left_out := [f"{name} ({why})" for name, why in reasons.items() if why]:
        lines.append(f"left out on {settings['ranks']} ranks: {', '.join(left_out)}")
    cpus = found["environment"]["cpus"]
    if settings["ranks"] * settings["threads"] > cpus:
        lines.append(
            f"{settings['ranks']} ranks share {cpus} CPUs: seconds say nothing of speed here, "
            "bytes and memory of a rank are as anywhere"
        )
    header = ["graph", "wrapper", "steps on", "exact", "seconds", "quartiles"]
    header += ["MB come to a rank", "MB of memory", ""]
    note = (
        "Memory is what a rank needs above what it has before, its share of the graph included. "
        "An epoch of batches is many steps, one of the full graph is one: see which of them learns "
        "in fewer seconds for a task of yours."
    )
    tables = [Table(header, rows, "An epoch", note, align="llllrrrrl")]
    if listing := [row for graph in found["graphs"] for row in curves(found, graph)]:
        about = (
            "The bytes are those of halo rows that come to the fullest rank in a step, by the "
            "formula (docs/parallel.md), of `boundary_sample=p` about p times as many. What is "
            "measured above holds the gradients of the model, and messages that keep ranks "
            "together, too."
        )
        head = ["graph", "wrapper", "loss (step)", "accuracy (step)", "MB of halo rows, formula"]
        tables.append(Table(head, listing, "Convergence on the full graph", about, align="llllr"))
        panels.append(drawn_curves(found))
    return Report(
        found,
        lines,
        tables,
        panels,
        f"{settings['ranks']} ranks: all wrappers",
        failed=bool(wrong),
    )


def _side(name: str) -> str:
    return "full graph" if WAYS[name].full else "batches"


def _complaint(args: argparse.Namespace) -> str | None:
    if args.only_npz and args.npz is None:
        return "--only-npz needs --npz"
    if all(WAYS[name].why_not(args.ranks) for name in args.ways):
        return f"none of --ways is of use on {args.ranks} ranks"
    return None


BENCHMARK = Benchmark(
    "parallel",
    __doc__,
    {
        "graphs": {
            "nodes": Option(20_000, least=100),
            "edges": Option(300_000, "directed, of the power law"),
            "features": Option(64, "columns of fp32"),
            "npz": Option(help="real graphs as well: .npz archives, separated by commas"),
            "only_npz": Option(False, "no graphs but those"),
        },
        "how": {
            **FOLDER,
            "ways": Option(list(WAYS), f"some of {', '.join(WAYS)}", type=names_of(tuple(WAYS))),
            "ranks": Option(2, least=2),
            "threads": Option(1, "of each rank"),
            "hidden": Option(64),
            "batch_size": Option(512),
            "num_neighbors": Option([10, 5], "of each hop, as 10,5"),
            "rounds": Option(3, least=1),
            "full_steps": Option(5, "on the full graph that are measured in a round", least=1),
            "steps": Option(60, "of the last graph, whose losses are listed", least=1),
            "bandwidth": Option("1GB", "bytes a second, that advise is told"),
            "timeout": Option(120.0, "seconds that a rank waits for another one"),
        },
    },
    measure,
    report,
    {
        "nodes": 900, "edges": 6_000, "features": 8, "hidden": 8, "batch_size": 64,
        "num_neighbors": [3, 2], "rounds": 1, "steps": 3, "full_steps": 2,
    },
    _complaint,
)  # fmt: skip
