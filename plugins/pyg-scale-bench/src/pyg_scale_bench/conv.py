"""Time and memory of layers and their ops, compared with PyG and ``torch.sparse.mm``.

Every op and every layer runs on a whole generated graph and on blocks as sampled by a neighbour
loader, forward only and with gradients. All sides of a comparison take turns within a round; rounds
are repeated, and medians are given. For ops of attention, PyG's side is its layer's attention and
aggregation without the projections before them. Layers are compared as a whole, and two SAGE layers
by a training step on a loader's batches. For ops the report gives the rate at which rows of
features are read (one for every edge, however many of them are in a cache) beside the machine's
measured copy bandwidth. Last, two layers of every kind of PyG run on small graphs with new edges in
every step, where Python's time counts (:mod:`pyg_scale_bench.small`).

``--all`` compares every layer of PyG on the whole graph instead, forward and backward, before and
after :func:`pyg_scale.nn.accelerate`; ``--own`` layers as users write them.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, groupby
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing

import pyg_scale.nn
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.nn.chunks import is_cut
from pyg_scale.nn.conv.traced import TracedConv
from pyg_scale.nn.fallback import SMALL
from pyg_scale.nn.linear import LINEAR_MAPS
from pyg_scale.testing.layers import LAYERS as EVERY_LAYER
from pyg_scale.testing.layers import MATRIX_PER_EDGE, OTHERS
from pyg_scale.testing.own_layers import OWN
from pyg_scale_bench import small
from pyg_scale_bench.benchmark import Benchmark, Option, names_of
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.report import GB, Report, Table
from pyg_scale_bench.rounds import OURS, PYG
from pyg_scale_bench.steps import LAYERS, OPS, RELATIONS, SPARSE, Case, Gauge, Graph, compare, once
from pyg_scale_bench.training import (
    CLASSES,
    FEATURES,
    FIRST,
    MODELS,
    TRIMS,
    TwoLayers,
    batches,
    first_layer_step,
    two_layer_step,
)

STEPS = {"sage": "whole", "sage-trimmed": "trimmed", "sage-pairs": "pairs"}
"""Every training step by name, with the rows that layers compute: see :class:`TwoLayers`."""
_ABOUT_FIRST = """; first, in turns: our loader and a SAGE layer, which in -lazy reads features \
itself; cached: a cache of half of the rows over memory"""
ALONE = ", messages"
"""The end of the names of layers of which only messages and their aggregation are measured."""
BATCHES = "batches"
"""The name of the graph of a training step in the report."""
_COPY_BYTES = 1 << 28
_SHORT_SECONDS = 1.0

# Measuring ################################################################################


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure the requested ops, layers and steps."""
    gc.collect()
    gc.freeze()  # the collector before every measurement skips existing objects
    try:
        _measure(args, found, Gauge(torch.device("cpu")))
    finally:
        gc.unfreeze()


def _measure(args: argparse.Namespace, found: dict[str, Any], gauge: Gauge) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    found |= {"models": MODELS, "trims": TRIMS, "graphs": [], "cases": []}
    found["copy_bytes_per_s"] = gauge.copy_bandwidth(_COPY_BYTES)

    def run(name: str, where: str, cases: Sequence[Case], gauge: Gauge = gauge) -> None:
        print(f"measuring {name} on {where}", file=sys.stderr)
        for _, group in groupby(cases, key=lambda case: case.about["backward"]):
            gauge.measure(list(group), args.rounds, 0.0 if args.quick else _SHORT_SECONDS)
        found["cases"] += [case.to_dict() for case in cases]

    data = planted_communities(args.nodes, args.edges, 16, 1)
    if args.all or args.own:
        nodes = int(data.num_nodes or 0)
        graph = Graph.of("whole graph", data.edge_index, nodes, nodes)
        found["graphs"].append(_described(graph.name, nodes, nodes, graph.num_edges))
        found["how"] = {}
        for name in [*(EVERY_LAYER if args.all else ()), *(OWN if args.own else ())]:
            torch.manual_seed(0)
            cases, layer = every_layer_cases(name, graph, args.channels)
            run(name, graph.name, cases)
            found["how"][name] = how_fused(layer)
        return
    for graph in _graphs(data, args):
        found["graphs"].append(
            _described(graph.name, graph.num_src, graph.num_dst, graph.num_edges)
        )
        torch.manual_seed(0)
        for name in args.ops:
            run(name, graph.name, op_cases(name, graph, args.channels, args.heads))
        for name in args.layers:
            run(name, graph.name, layer_cases(name, graph, args.channels, args.heads))
    if args.steps:
        seen = batches(data, args.num_neighbors, args.batch_size)
        reached = seen[0].edge_index[1].unique().numel()
        found["graphs"].append(_described(BATCHES, seen[0].num_nodes, reached, seen[0].num_edges))
        torch.manual_seed(0)
        for name in args.steps:
            if name not in FIRST:
                run(name, BATCHES, step_cases(name, seen, args.hidden))
        sizes = args.num_neighbors, args.batch_size, args.hidden
        # All in one, as lazy rows are compared with gathered ones.
        if first := [name for name in args.steps if name in FIRST]:
            cases = [case for name in first for case in first_layer_cases(name, data, *sizes)]
            run(", ".join(first), BATCHES, cases)
    seconds = 0.0 if args.quick else args.small_seconds
    found["small"] = small.measure(args.small, args.sizes, args.small_channels, seconds)


def _described(name: str, *sizes: int) -> dict[str, Any]:
    return {"name": name, **dict(zip(("sources", "destinations", "edges"), sizes, strict=True))}


def _graphs(data: Data, args: argparse.Namespace) -> list[Graph]:
    size = int(data.num_nodes or 0)
    whole = Graph.of("whole graph", data.edge_index, size, size)
    loader = NeighborLoader(
        data, args.num_neighbors, batch_size=args.batch_size, shuffle=True, seed=0
    )
    batch = next(iter(loader))
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    blocks = []
    for hops in range(len(args.num_neighbors), 0, -1):  # trimmed as layers need them
        index: Tensor = batch.edge_index[:, : sum(edges[:hops])]
        sizes = sum(nodes[: hops + 1]), sum(nodes[:hops])
        blocks.append(Graph.of(f"block of {hops} hops", index, *sizes, is_block=True))
    return [whole, *blocks[: args.blocks]]


# Cases ####################################################################################


def op_cases(op: str, graph: Graph, channels: int, heads: int) -> list[Case]:
    """All sides of an op on a graph, forward only and with gradients."""
    compared = compare(op, graph, channels, heads)
    row = channels * compared.inputs[0].element_size()
    gradient: list[Tensor] = []  # the same for all sides
    return [
        _case(
            op, graph.name, backward, side, graph.num_edges, row, compared.reads[backward],
            once(run, compared.inputs, gradient if backward else None),
        )
        for backward in (False, True)
        for side, run in compared.sides.items()
    ]  # fmt: skip


def layer_cases(name: str, graph: Graph, channels: int, heads: int) -> list[Case]:
    """Both sides of a layer, forward only and with gradients of features and parameters.

    On a block, destinations are the first of the sources, as in a trimmed batch of a loader;
    ``GCNConv``, which has one set of nodes, gets all of them.

    Args:
        name: A name of :data:`LAYERS`.
        graph: The edges.
        channels: Number of channels of the features and of the result, over all heads.
        heads: Number of heads of attention.
    """
    theirs = LAYERS[name](getattr(torch_geometric.nn, name), channels, heads)
    is_map = name == "Linear"
    cls = LINEAR_MAPS[type(theirs)] if is_map else getattr(pyg_scale.nn, name)
    ours = LAYERS[name](cls, channels, heads)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(graph.num_src, channels)
    rest = (torch.randint(RELATIONS, (graph.num_edges,)),) if name == "RGCNConv" else ()
    pair = graph.num_src != graph.num_dst and name != "GCNConv"

    def call(layer: nn.Module) -> Callable[..., Any]:
        def run(x: Tensor, *parameters: Tensor) -> Any:
            if is_map:
                return layer(x)
            features = (x, x[: graph.num_dst]) if pair else x
            return layer(features, graph.fresh_edge_index(), *rest)

        return run

    gradient: list[Tensor] = []  # the same for both sides
    row = channels * x.element_size()
    return [
        _case(
            name, graph.name, backward, side, graph.num_edges, row, 0,
            once(call(layer), [x, *layer.parameters()], gradient if backward else None),
        )
        for backward in (False, True)
        for side, layer in ((OURS, ours), (PYG, theirs))
    ]  # fmt: skip


def every_layer_cases(name: str, graph: Graph, channels: int) -> tuple[list[Case], nn.Module]:
    """Both sides of any layer with gradients, and the accelerated layer.

    Args:
        name: A name of :data:`pyg_scale.testing.layers.LAYERS` or of ``OWN``.
        graph: The edges.
        channels: Number of channels of the features and of the result, a multiple of 4.
    """
    example = OWN[name] if name in OWN else EVERY_LAYER[name]
    width = min(channels, small.FEW_CHANNELS) if name in MATRIX_PER_EDGE else channels
    theirs = example.make(width)
    ours = copy.deepcopy(theirs)
    pyg_scale.nn.accelerate(ours)
    for traced in _traced(ours):
        type(traced).steps = None  # which a small call looks up, as `how_fused` sees
    inputs = example.inputs(torch.randn(graph.num_src, width), graph.edge_index)
    cases = _with_gradients(name, graph, ours, theirs, inputs, lambda layer, given: layer(*given))
    return cases + _message_cases(name, graph, ours, theirs, inputs), ours


def _message_cases(
    name: str, graph: Graph, ours: nn.Module, theirs: nn.Module, inputs: Sequence[Any]
) -> list[Case]:
    """Messages and their aggregation alone: the first ``propagate`` of a layer, with gradients.

    Both sides get the arguments of PyG's. There are none if ours is a class with a fused forward.
    """
    seen: list[tuple[str, Any]] = []
    handles = [
        layer.register_propagate_forward_pre_hook(
            lambda _, given, where=where: seen.append((where, given))
        )
        for where, layer in theirs.named_modules()
        if isinstance(layer, MessagePassing)
    ]
    theirs(*inputs)
    for handle in handles:
        handle.remove()
    where, (edge_index, size, arguments) = seen[0]
    both = ours.get_submodule(where), theirs.get_submodule(where)
    if not isinstance(both[0], TracedConv):
        return []
    values, form = tree_flatten(arguments)

    def propagate(layer: Any, given: list[Any]) -> Any:
        return layer.propagate(edge_index, size=size, **tree_unflatten(given, form))

    return _with_gradients(name + ALONE, graph, *both, values, propagate)


def _with_gradients(
    op: str,
    graph: Graph,
    ours: nn.Module,
    theirs: nn.Module,
    values: Sequence[Any],
    call: Callable[[Any, list[Any]], Any],
) -> list[Case]:
    """Both sides of a call, with gradients of the features and parameters that it depends on."""
    places = [k for k, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]

    def run(layer: nn.Module, *leaves: Tensor) -> Any:
        given = list(values)
        for k, leaf in zip(places, leaves):
            given[k] = leaf
        out = call(layer, given)
        return out[0] if isinstance(out, tuple) else out

    def used(layer: nn.Module, leaves: list[Tensor]) -> list[bool]:
        tensors = [*leaves, *layer.parameters()]
        grads = torch.autograd.grad(run(layer, *leaves).sum(), tensors, allow_unused=True)
        return [grad is not None for grad in grads]

    leaves = [values[k].detach().requires_grad_() for k in places]
    places = list(compress(places, used(theirs, leaves)))
    gradient: list[Tensor] = []  # the same for both sides
    cases = []
    for side, layer in ((OURS, ours), (PYG, theirs)):
        leaves = [values[k].detach().requires_grad_() for k in places]
        wanted = list(compress([*leaves, *layer.parameters()], used(layer, leaves)))
        step = once(functools.partial(run, layer), wanted, gradient)
        cases.append(_case(op, graph.name, True, side, graph.num_edges, 0, 0, step))
    return cases


def how_fused(layer: nn.Module) -> str:
    """The way in which the calls of an accelerated layer were computed so far."""
    calls = pyg_scale.nn.fallbacks(layer)
    reasons = sorted({reason for counts in calls.values() for reason in counts})
    if reasons:
        return "PyG's path: small input" if reasons == [SMALL] else "; ".join(reasons)
    traced = _traced(layer)
    if not traced:
        return "a layer of ours"
    if any(each.steps and not each.adds_rows for each in traced):
        return "PyG's steps at this size"
    return "in chunks" if any(map(is_cut, layer.modules())) else "fused messages"


def _traced(layer: nn.Module) -> list[TracedConv]:
    return [each for each in layer.modules() if isinstance(each, TracedConv)]


def _case(
    op: str,
    graph: str,
    backward: bool,
    side: str,
    edges: int,
    row_bytes: int,
    gathers: int,
    step: Callable[[], Any],
) -> Case:
    about = {"op": op, "graph": graph, "backward": backward, "edges": edges}
    about |= {"row_bytes": row_bytes, "gathers": gathers}
    return Case(side=side, about=about, bytes=gathers * row_bytes * edges, step=step)


def step_cases(name: str, data: list[Data], hidden: int) -> list[Case]:
    """One training step of each model: forward, loss, gradients, Adam.

    Args:
        name: A name of :data:`STEPS`.
        data: The batches, which take turns; each turn has new edges, as from a loader.
        hidden: Channels between the layers.
    """
    edges = sum(batch.num_edges for batch in data) // len(data)
    graphs = [
        Graph.of(BATCHES, batch.edge_index, batch.num_nodes, batch.num_nodes, is_block=True)
        for batch in data
    ]
    theirs = TwoLayers(hidden, STEPS[name])
    ours = copy.deepcopy(theirs)
    pyg_scale.nn.accelerate(ours)
    return [
        _case(
            name, BATCHES, True, side, edges, 4 * hidden, 0,
            two_layer_step(model, data, [graph.fresh_edge_index for graph in graphs]),
        )
        for side, model in ((OURS, ours), (PYG, theirs))
    ]  # fmt: skip


def first_layer_cases(
    name: str, data: Data, num_neighbors: Sequence[int], batch_size: int, hidden: int
) -> list[Case]:
    """A batch of our loader, and the first SAGE layer on it with gradients of its parameters.

    Args:
        name: A name of :data:`FIRST`.
        data: The graph, of which ``edge_index`` is used.
        num_neighbors: See :func:`first_layer_step`, as for ``batch_size``.
        batch_size: See there.
        hidden: Channels of the layer's result.
    """
    theirs, ours = (n.SAGEConv(FEATURES, hidden) for n in (torch_geometric.nn, pyg_scale.nn))
    ours.load_state_dict(theirs.state_dict())
    store, lazy = FIRST[name]
    return [
        _case(
            name, BATCHES, True, side, 0, 0, 0,
            first_layer_step(layer, data, num_neighbors, batch_size, store, lazy_x),
        )
        for side, layer, lazy_x in ((OURS, ours, lazy), (PYG, theirs, False))
    ]  # fmt: skip


# Report ###################################################################################

_BEFORE = "two SAGE layers", "by trim_to_layer"  # of results that do not say it


def comparisons(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry per op, graph and direction: its cases by side, and the speedup of ours."""
    out: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for case in found["cases"]:
        key = case["op"], case["graph"], case["backward"]
        entry = out.setdefault(key, dict(zip(("op", "graph", "backward"), key)) | {"sides": {}})
        entry["sides"][case["side"]] = case
    for entry in out.values():
        ours = entry["sides"][OURS]
        for side in (PYG, SPARSE):
            other = entry["sides"].get(side, {})
            if "median_seconds" in other:
                entry[f"times {side}"] = other["median_seconds"] / ours["median_seconds"]
    return list(out.values())


def report(found: Mapping[str, Any]) -> Report:
    """The report of the results."""
    settings, compared = found["settings"], comparisons(found)
    if "how" in found:
        return _every_layer(found, compared)
    graphs = "; ".join(
        f"{g['name']}: {g['edges']:,} edges from {g['sources']:,} to {g['destinations']:,} nodes"
        for g in found["graphs"]
    )
    lines = [
        (
            f"fp32, {settings['channels']} channels, {settings['heads']} heads; medians of "
            f"{settings['rounds']} rounds, of short steps up to 100; the whole graph is grouped by "
            "source before, a block in every step with gradients, as every batch has another"
        ),
        (
            "layers: with their linear maps, gradients of features and parameters, options as they "
            "are by default (our GCNConv keeps the normalisation of a whole graph, PyG's makes it "
            "in every step)"
        ),
        (
            f"steps: {found.get('models', _BEFORE[0])}, {FEATURES} features, "
            f"{settings['hidden']} hidden channels, {CLASSES} classes, cross entropy, Adam; "
            f"batches of our loader, made before; trimmed: {found.get('trims', _BEFORE[1])}"
            f"{_ABOUT_FIRST if FIRST.keys() & set(settings['steps']) else ''}"
        ),
        f"graphs: {graphs}",
        f"copying memory: {found['copy_bytes_per_s'] / GB:.1f} GB/s, read and written",
        "peak: memory that a first step needs beyond what there was, inputs not counted",
    ]
    on_small = found.get("small", [])  # which reports of earlier releases lack
    lines += small.lines(on_small, settings["small_channels"]) if on_small else []
    errors = {f"{c['side']} {c['op']}: {c['error']}" for c in found["cases"] if c["error"]}
    header = ["what", "graph", "direction", "ms", "PyG ms", "faster", "sparse.mm ms", "faster"]
    header += ["rows GB/s", "of copy", "peak MB", "PyG peak MB"]
    rows = [_row(entry, found["copy_bytes_per_s"]) for entry in compared]
    return Report(
        found,
        [*lines, *sorted(errors)],
        [Table(header, rows, align="lllr"), small.table(on_small)],
        _panels([graph["name"] for graph in found["graphs"]], compared, small.panels(on_small)),
        f"{settings['channels']} channels fp32, {settings['heads']} heads",
    )


def _every_layer(found: Mapping[str, Any], compared: Sequence[Mapping[str, Any]]) -> Report:
    settings, (graph,) = found["settings"], found["graphs"]
    lines = [
        (
            f"fp32, {settings['channels']} channels; {graph['edges']:,} edges of "
            f"{graph['sources']:,} nodes; forward and gradients of features, values of edges and "
            f"parameters; medians of {settings['rounds']} rounds, in turns"
        ),
        "messages: their first propagate alone, of the same arguments, on edges grouped before",
        "peak: memory that a first step needs beyond what there was, inputs not counted",
    ]
    if settings["all"]:
        lines.append(f"of {', '.join(MATRIX_PER_EDGE)} only {small.FEW_CHANNELS} channels")
        lines += [f"not measured: {name}: {reason}" for name, reason in OTHERS.items()]
    lines += sorted({f"{c['side']} {c['op']}: {c['error']}" for c in found["cases"] if c["error"]})
    header = ["layer", "how", "ms", "PyG ms", "faster", "messages ms", "PyG ms", "faster"]
    header += ["peak MB", "PyG peak MB"]
    by_name, rows = {entry["op"]: entry for entry in compared}, []
    for name, how in found["how"].items():
        whole, alone = by_name[name], by_name.get(name + ALONE, {"sides": {}})
        row = [name, how]
        for entry in (whole, alone):
            row += [_milliseconds(entry["sides"].get(side)) for side in (OURS, PYG)]
            row.append(_times(entry, PYG))
        rows.append([*row, *(_megabytes(whole["sides"][side]) for side in (OURS, PYG))])
    panel = _panel(graph["name"], compared)
    layers = "every layer of PyG" if settings["all"] else "layers of one's own"
    title = f"{layers}, {settings['channels']} channels fp32"
    return Report(found, lines, [Table(header, rows, align="llr")], [[panel]], title)


def _row(entry: Mapping[str, Any], copy: float) -> list[str]:
    ours, pyg, sparse = (entry["sides"].get(side) for side in (OURS, PYG, SPARSE))
    rate = ours["bytes_per_s"]
    rates = ["", ""] if rate is None else [f"{rate / GB:.1f}", f"{rate / copy:.0%}"]
    row = [entry["op"], entry["graph"], _direction(entry)]
    for side, seconds in ((PYG, [ours, pyg]), (SPARSE, [sparse])):
        row += [*map(_milliseconds, seconds), _times(entry, side)]
    return [*row, *rates, _megabytes(ours), _megabytes(pyg)]


def _direction(entry: Mapping[str, Any]) -> str:
    return "step" if entry["op"] in STEPS | FIRST else "both" if entry["backward"] else "forward"


def _milliseconds(case: Mapping[str, Any] | None) -> str:
    if case is None or "median_seconds" not in case:
        return "failed" if case else ""
    milliseconds = 1e3 * case["median_seconds"]
    return f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def _times(entry: Mapping[str, Any], side: str) -> str:
    return f"{entry[f'times {side}']:.1f}x" if f"times {side}" in entry else ""


def _megabytes(case: Mapping[str, Any] | None) -> str:
    peak = None if case is None else case["peak_bytes"]
    return "" if peak is None else f"{peak / 1e6:.0f}"


def _panels(
    graphs: Sequence[str], compared: Sequence[Mapping[str, Any]], on_small: list[Panel]
) -> list[list[Panel]]:
    """The panels of the graphs, and below them those of small graphs, with what was measured."""
    seen = dict.fromkeys(entry["graph"] for entry in compared)
    rows = [name for name in seen if name in graphs], [name for name in seen if name not in graphs]
    return [[_panel(name, compared) for name in row] for row in rows if row] + [on_small]


def _panel(graph: str, compared: Sequence[Mapping[str, Any]]) -> Panel:
    bars = [
        Bar(
            f"{entry['op']}{' + gradient' if _direction(entry) == 'both' else ''}",
            1e3 * case["median_seconds"],
            side,
        )
        for entry in compared
        if entry["graph"] == graph
        for side, case in entry["sides"].items()
        if "median_seconds" in case
    ]
    return Panel(graph, bars, "milliseconds (median)", form="", log=True)


def _complaint(args: argparse.Namespace) -> str | None:
    if args.channels % args.heads:
        return f"--channels {args.channels} must be a multiple of --heads {args.heads}"
    if args.small_channels % 4:
        return f"--small-channels {args.small_channels} must be a multiple of 4"
    return None


BENCHMARK = Benchmark(
    "conv",
    __doc__,
    {
        "what is measured": {
            "nodes": Option(100_000),
            "edges": Option(1_500_000, "directed"),
            "channels": Option(128, "of all heads together, fp32", least=1),
            "heads": Option(4, least=1),
            "batch_size": Option(1024, least=1),
            "num_neighbors": Option([15, 10], "of each hop, as 15,10"),
            "blocks": Option(1, "how many layers' blocks, the largest"),
            **{
                name: Option(among, f"none, or of: {', '.join(among)}", names_of(among, True))
                for name, among in {
                    "ops": [*OPS],
                    "layers": [*LAYERS],
                    "steps": [*STEPS, *FIRST],
                    "small": small.NAMES,
                }.items()
            },
            "all": Option(False, "every layer of PyG instead, on the whole graph"),
            "own": Option(False, "layers as users write them instead, on the whole graph"),
            "hidden": Option(256, "channels between layers of a step", least=1),
            "sizes": Option([10, 60, 300, 580, 2300], "nodes of small graphs"),
            "small_channels": Option(64, "on small graphs", least=4),
            "small_seconds": Option(0.6, "for each layer on each small graph", least=0),
            "rounds": Option(7, least=1),
            "threads": Option(0, "torch's own number if 0"),
        }
    },
    measure,
    report,
    {"nodes": 3000, "edges": 30_000, "rounds": 2, "batch_size": 64, "hidden": 32, "sizes": [60]},
    _complaint,
)
