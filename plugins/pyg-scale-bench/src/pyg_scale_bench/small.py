"""Two layers of every kind on small graphs, where Python's time counts, beside PyG's.

Each round makes both models and their input anew, as times differ by some percent with the places
of tensors in memory. It runs some steps of ours, twice as many of PyG's and some of ours again, or
the other way round, so that a drift of the machine favours nobody. A step that is not timed begins
each of them: a program that runs one of both finds its own code and tensors in the caches, not what
the other left there. The result of a round is the ratio of both times. Reported are the median of
the ratios and the interval in which the true median lies with a probability of 95 %, whatever the
distribution (by order statistics of independent rounds).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import pyg_scale.nn
from pyg_scale.testing.layers import LAYERS, MATRIX_PER_EDGE
from pyg_scale_bench import memory
from pyg_scale_bench.chart import Bar, Panel
from pyg_scale_bench.report import Table

DEGREE = 8
"""Edges of a node of a small graph."""
FEW_CHANNELS = 8
"""Number of channels of layers with a matrix for every edge, of which PyG makes a tensor."""
LEARNED = " +weights"
"""The end of the names of layers whose edge weights get gradients too."""
NAMES = [*LAYERS, f"GCNConv{LEARNED}", f"GraphConv{LEARNED}"]
AGAIN = 5
"""Times as long as others, a layer is measured once more that seems to be slower than PyG's."""
_LEAST_ROUNDS, _MOST_ROUNDS = 7, 400
_BLOCK_SECONDS = 1e-3  # of the steps that are timed together: much longer than reading the clock

Step = Callable[[], Any]


def steps(name: str, size: int, channels: int) -> tuple[Step, Step]:
    """Functions that run two layers forward and backward: accelerated ones, and PyG's.

    Each call has a new ``edge_index``, as from a loader, with edges in any order, and returns the
    result and its gradients: of the parameters, or of the features where there are none.

    Args:
        name: One of :data:`NAMES`.
        size: Number of nodes, which have :data:`DEGREE` edges each.
        channels: Number of channels everywhere, a multiple of 4.
    """
    kind = name.removesuffix(LEARNED)
    width = min(channels, FEW_CHANNELS) if kind in MATRIX_PER_EDGE else channels
    example = LAYERS[kind]
    theirs = nn.ModuleList(example.make(width) for _ in "12")
    ours = nn.ModuleList(example.make(width) for _ in "12")
    ours.load_state_dict(theirs.state_dict())
    pyg_scale.nn.accelerate(ours)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, width, generator=generator)
    edges = torch.randint(size, (2, DEGREE * size), generator=generator)
    inputs = list(example.inputs(x, edges))
    leaves: list[Tensor] = []
    for k, each in enumerate(inputs):
        is_weight = name != kind and each.is_floating_point() and each.dim() == 1
        if is_weight or (k == 0 and not any(True for _ in theirs.parameters())):
            inputs[k] = each.clone().requires_grad_()
            leaves.append(inputs[k])
    gradient: list[Tensor] = []  # the same for both sides
    made = _step(ours, inputs, leaves, gradient), _step(theirs, inputs, leaves, gradient)
    for draws in made:
        torch.manual_seed(0)
        draws()
    return made


def _step(
    layers: nn.ModuleList, inputs: Sequence[Any], leaves: list[Tensor], gradient: list[Tensor]
) -> Step:
    of_edges = [k for k, each in enumerate(inputs) if _is_edge_index(each)]

    def forward() -> Tensor:
        given = [*inputs]
        for k in of_edges:
            given[k] = inputs[k].clone()
        hidden = _first(layers[0](*given)).relu()
        x = given[0]
        if x.dim() == 3:  # a layer that reads the results of all layers before
            hidden = torch.stack([x[:, 0], hidden], 1)
        given[0] = hidden if hidden.shape == x.shape else hidden[..., : x.size(-1)]
        return _first(layers[1](*given))

    wanted = [*leaves, *(each for each in layers.parameters() if each.requires_grad)]
    out = forward()
    grads = torch.autograd.grad(out.sum(), wanted, allow_unused=True)
    used = [each for each, grad in zip(wanted, grads) if grad is not None]
    if not gradient:
        gradient.append(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))

    def step() -> tuple[Tensor, ...]:
        out = forward()
        return out, *torch.autograd.grad(out, used, gradient)

    return step


def _is_edge_index(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.int64 and value.dim() == 2


def _first(out: Any) -> Tensor:
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


# Measuring ################################################################################


def measure(
    names: Sequence[str], sizes: Sequence[int], channels: int, seconds: float
) -> list[dict[str, Any]]:
    """Measure layers on graphs of all sizes: one entry for each, see :func:`compare`.

    As one interval in 40 lies wholly below the true value by chance, those that lie below 1 are
    measured :data:`AGAIN` times as long after all others: ``"again"`` of their entries.

    Args:
        names: Some of :data:`NAMES`.
        sizes: Numbers of nodes.
        channels: See :func:`steps`.
        seconds: See :func:`compare`.
    """
    found = []
    for name in names:
        print(f"measuring {name} on small graphs", file=sys.stderr)
        for size in sizes:
            torch.manual_seed(0)
            found.append(compare(name, size, channels, seconds))
    for each in found:
        if each["high"] < 1:
            print(f"measuring {each['layer']} once more", file=sys.stderr)
            each["again"] = compare(each["layer"], each["nodes"], channels, AGAIN * seconds)
    return found


def compare(name: str, size: int, channels: int, seconds: float) -> dict[str, Any]:
    """Measure both sides of a layer: one entry of the results.

    Args:
        name: See :func:`steps`, as for the rest.
        size: See there.
        channels: See there.
        seconds: Time for the rounds, of which there are at least 7.
    """
    of_ours: list[float] = []
    of_theirs: list[float] = []
    repeat = 0
    begin = time.perf_counter()
    with memory.kept():
        while len(of_ours) < _MOST_ROUNDS:
            if len(of_ours) >= _LEAST_ROUNDS and time.perf_counter() - begin >= seconds:
                break
            ours, theirs = steps(name, size, channels)
            if not repeat:
                once = min(_cpu_seconds(theirs, 1) for _ in range(3))
                repeat = max(1, math.ceil(_BLOCK_SECONDS / max(once, 1e-6)))
            outer, inner = (ours, theirs) if len(of_ours) % 2 else (theirs, ours)
            first = _cpu_seconds(outer, repeat)
            both = _cpu_seconds(inner, repeat) + _cpu_seconds(inner, repeat)
            around = first + _cpu_seconds(outer, repeat)
            mine, other = (around, both) if outer is ours else (both, around)
            of_ours.append(mine / 2 / repeat)
            of_theirs.append(other / 2 / repeat)
            del ours, theirs, outer, inner  # before the next ones are made
    ratios = [other / mine for mine, other in zip(of_ours, of_theirs)]
    low, high = interval(ratios)
    return {
        "layer": name,
        "nodes": size,
        "rounds": len(ratios),
        "seconds": median(of_ours),
        "PyG seconds": median(of_theirs),
        "times": median(ratios),
        "low": low,
        "high": high,
    }


def _cpu_seconds(step: Step, times: int) -> float:
    step()  # for the caches
    start = time.process_time()
    for _ in range(times):
        step()
    return time.process_time() - start


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval in which the median of a distribution lies with a probability of 95 %.

    Args:
        values: Independent samples. Of fewer than 6 it is their whole range, which is less sure.
    """
    ordered, count = sorted(values), len(values)
    below, probability = 0, 0.5**count  # of having at most `below` samples under the median
    total = probability
    while below + 1 <= count // 2:
        probability *= (count - below) / (below + 1)
        if total + probability > 0.025:
            break
        total, below = total + probability, below + 1
    return ordered[below], ordered[count - 1 - below]


# Report ###################################################################################


def lines(found: Sequence[Mapping[str, Any]], channels: int) -> list[str]:
    """Sentences about the results."""
    if not found:
        return []
    low = [each for each in found if each["high"] < 1]
    below = [f"intervals below 1: {len(low)} of {len(found)}, of which one in 40 is so by chance"]
    if any("again" not in each for each in low):  # reports of earlier versions
        below[0] += f": {', '.join(map(_named, low))}"
    else:
        again = [f"{_named(each)} {_cell(each['again'])}" for each in low]
        slower = [_named(each) for each in low if each["again"]["high"] < 1]
        below[0] += f"; measured once more, {AGAIN} times as long: {', '.join(again) or 'none'}"
        below.append(f"below 1 both times: {', '.join(slower) or 'none'}")
    return [
        (
            f"N nodes: two layers, forward and gradients of parameters, {channels} channels "
            f"({FEW_CHANNELS} of {', '.join(MATRIX_PER_EDGE)}), {DEGREE} edges a node, not sorted, "
            "new in every step; CPU time, as an interruption is longer than a step; medians of the "
            "ratios of at least 7 rounds, up to 400, each with new models and inputs and a step "
            "before what is timed, and their 95 % intervals; malloc keeps what is freed; "
            "above 1: ours is faster;"
            f"{LEARNED}: with gradients of edge weights"
        ),
        *below,
    ]


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    """The ratios of all layers, a column for each size."""
    sizes = list(dict.fromkeys(each["nodes"] for each in found))
    cells = {(each["layer"], each["nodes"]): _cell(each) for each in found}
    names = list(dict.fromkeys(each["layer"] for each in found))
    rows = [[name, *(cells.get((name, size), "") for size in sizes)] for name in names]
    header = ["two layers", *(f"{size:,} nodes" for size in sizes)]
    return Table(header, rows, title="Small graphs, times PyG's speed", align="lr")


def _named(each: Mapping[str, Any]) -> str:
    return f"{each['layer']} ({each['nodes']})"


def _cell(each: Mapping[str, Any]) -> str:
    return f"{each['times']:.2f} ({each['low']:.2f} to {each['high']:.2f})"


def panels(found: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """A panel for each size."""
    sizes = dict.fromkeys(each["nodes"] for each in found)
    return [
        Panel(
            f"{size:,} nodes",
            [
                Bar(each["layer"], each["times"], spread=(each["low"], each["high"]))
                for each in found
                if each["nodes"] == size
            ],
            "times PyG's speed (median, 95 % interval)",
            mark=(1.0, "PyG"),
        )
        for size in sizes
    ]
