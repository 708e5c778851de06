"""The checks of ``pyg-scale bench gpu`` before it measures: results, bits, streams, CUDA graphs.

Every op runs on small adversarial graphs, forward and backward, and is compared with its
plain-torch meaning in ``float64`` on the same device, without a test runner or downloads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_scale import nn
from pyg_scale.ops import attention_plain, fused
from pyg_scale.ops.adjacency import Adjacency, grouped_plain, rows_of
from pyg_scale.ops.aggregate import REDUCTIONS, aggregate, aggregate_plain
from pyg_scale.ops.attention import dot_product_attention, gat_attention, gatv2_attention
from pyg_scale.ops.edge_formula import Formula, Reduction, reduce_formula
from pyg_scale.ops.edge_formula_source import EDGE, NEIGHBOR, OWN

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""The largest relative difference from ``float64``, in the Euclidean norm."""

WIDTHS = ((1, 1), (1, 17), (3, 4), (4, 32), (1, 132), (2, 150))
"""Numbers of heads and channels."""

QUICK_WIDTHS = ((1, 17), (4, 32))
QUICK_TYPES = (torch.float32, torch.bfloat16)

UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""The environment variable that makes torch allocate every tensor from the driver."""

LAYERS: dict[str, dict[str, Any]] = {
    "GCNConv": {},
    "SAGEConv": {"aggr": "max"},
    "GATConv": {"heads": 2},
    "GraphConv": {},
}
"""Layers whose path from an edge list is checked too, with functions that make them."""

STEPPED: dict[str, tuple[dict[str, Any], int]] = {
    "GINEConv": ({"nn": torch.nn.Identity()}, 16),
    "ResGatedGraphConv": ({"in_channels": 16, "out_channels": 8}, 0),
    "GENConv": ({"in_channels": 16, "out_channels": 8, "learn_t": True}, 0),
    "FiLMConv": ({"in_channels": 16, "out_channels": 8}, 0),
    "CGConv": ({"channels": 16, "dim": 3}, 3),
}
"""Layers of PyG whose messages are steps on single numbers: their options, and edge features."""

FORMULA_WIDTHS = (17, 64, 260)
"""Numbers of columns: of loads of a number, of wide ones, and of more than lanes of a warp have."""


class Found(NamedTuple):
    """The result of one check; ``ok`` is ``None`` if it could not run."""

    name: str
    ok: bool | None
    detail: str


Checks = dict[str, Callable[[], str]]
"""Checks by name: each returns what it found, and raises if something is wrong."""


class CannotRunError(Exception):
    """A check cannot run here, which is no fault."""


def checks(device: torch.device, quick: bool = False) -> Checks:
    """The checks of ops and layers.

    Args:
        device: The device to check.
        quick: If True, use fewer widths and types of features.
    """
    types, widths = (QUICK_TYPES, QUICK_WIDTHS) if quick else (tuple(TOLERANCE), WIDTHS)
    found: Checks = {}
    for op in (*REDUCTIONS, "gat", "gatv2", "transformer"):
        for dtype in types:
            name = f"{op} {str(dtype).removeprefix('torch.')}"
            found[name] = partial(_op, op, dtype, widths, device)
    found["edges grouped by both ends"] = partial(_grouped, device)
    found |= {name: partial(_layer, name, device) for name in LAYERS}
    found["formulas"] = partial(_formulas, FORMULA_WIDTHS[: 1 if quick else None], device)
    found |= {name: partial(_stepped, name, device) for name in STEPPED}
    found["the same bits every time"] = partial(_bits, device)
    if device.type == "cuda":
        found["another stream"] = partial(_stream, device)
        found["CUDA graph"] = partial(_graph, device)
    return found


def attempt(name: str, run: Callable[[], str]) -> Found:
    """Run a check, which raises on failure, and return its result."""
    try:
        return Found(name, True, run())
    except CannotRunError as error:
        return Found(name, None, str(error))
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return Found(name, False, f"{type(error).__name__}: {first}")


def hostile(device: torch.device, index: torch.dtype = torch.int64) -> Adjacency:
    """A graph of rows with no edges, a piece, one more or less, and a hub; shuffled."""
    degree = torch.tensor([0, 1, 255, 256, 257, 0, 3, 30_000, 511, 512, 513, 2, 0])
    indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    generator = torch.Generator().manual_seed(0)
    size = int(indptr[-1])
    indices = (torch.rand(size, generator=generator).pow(3) * 500).to(index)
    edge_id = torch.randperm(size, generator=generator).to(index)
    return Adjacency(indptr.to(device), indices.to(device), 500, edge_id.to(device))


def inputs(
    op: str, graph: Adjacency, heads: int, channels: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Random features for an op, in the order of its arguments; the last one is by edge."""
    generator = torch.Generator().manual_seed(heads * 1000 + channels)
    src, dst, edges, row = graph.num_src, graph.num_dst, graph.num_edges, (heads, channels)
    shapes: tuple[tuple[int, ...], ...] = {
        "gat": ((src, *row), (src, heads), (dst, heads), (edges, heads)),
        "gatv2": ((src, *row), (dst, *row), row, (edges, *row)),
        "transformer": ((dst, *row), (src, *row), (src, *row), (edges, *row)),
    }.get(op, ((src, *row), (edges, heads)))
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [tensor.to(device, dtype).requires_grad_() for tensor in made]


def run(op: str, graph: Adjacency, given: list[Tensor], **options: Any) -> Tensor:
    """Run an op on the features from :func:`inputs`."""
    if op in REDUCTIONS:
        return aggregate(graph, given[0], given[1] if len(given) > 1 else None, op)
    made: dict[str, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
        "gat": gat_attention,
        "gatv2": gatv2_attention,
        "transformer": dot_product_attention,
    }
    out = made[op](graph, *given, **options)
    assert isinstance(out, Tensor)
    return out


def exact(op: str, graph: Adjacency, given: list[Tensor], dropout: float, seed: int) -> Tensor:
    """The plain-torch meaning of :func:`run` in ``float64``."""
    wide = [tensor.double() for tensor in given]
    if op in REDUCTIONS:
        x, weight = wide
        csr = (graph.indptr, graph.indices.long(), graph.edge_id)
        rows = x.reshape(x.size(0), -1)
        return aggregate_plain(*csr, rows, weight, op).view(-1, *x.shape[1:])
    number = given[0].size(2) ** -0.5 if op == "transformer" else 0.2
    mask = torch.tensor(seed, device=wide[0].device) if dropout else None
    rest = (number, dropout, mask, False)
    names = {"gat": "gat", "gatv2": "gatv2", "transformer": "dot_product"}
    out: Tensor = getattr(attention_plain, names[op])(graph, *wide, *rest)
    return out


def _op(
    op: str, dtype: torch.dtype, widths: tuple[tuple[int, int], ...], device: torch.device
) -> str:
    worst = 0.0
    for number, (heads, channels) in enumerate(widths):
        graph = hostile(device, torch.int32 if number % 2 else torch.int64)
        given = inputs(op, graph, heads, channels, dtype, device)
        dropout, seed = (0.3, 11) if number % 2 and op not in REDUCTIONS else (0.0, 0)
        options = {"dropout": dropout, "seed": seed} if dropout else {}
        found = run(op, graph, given, **options)
        wanted = exact(op, graph, given, dropout, seed)
        gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
        gradient = gradient.to(device, dtype)
        ours = torch.autograd.grad(found, given, gradient)
        theirs = torch.autograd.grad(wanted, given, gradient.double())
        compared = zip((found.detach(), *ours), (wanted.detach(), *theirs))
        for what, (a, b) in enumerate(compared):
            error = float((a.double() - b).norm() / b.double().norm().clamp(min=1e-30))
            # Gradients of logits are small differences of numbers rounded to the short type.
            limit = TOLERANCE[dtype] * (6 if what and dtype != torch.float32 else 1)
            if not error <= limit:
                which = "the result" if what == 0 else f"gradient {what}"
                raise AssertionError(
                    f"{which} differs by {error:.1e} with {heads} heads of {channels} channels"
                )
            worst = max(worst, error)
    return f"largest relative difference {worst:.1e}"


def _grouped(device: torch.device) -> str:
    generator = torch.Generator().manual_seed(3)
    sizes = ((300, 5_000), (20_000, 30_000))
    for nodes, edges in sizes:
        ends = torch.randint(nodes, (2, edges), generator=generator)
        ends[0, ::50], ends[1, ::70] = 1, 2  # hubs
        for num_loops in (-1, nodes):
            given = nodes, nodes, num_loops, True
            wanted = grouped_plain(ends, *given, padded=True)
            found = torch.ops.pyg_scale.csr_group_padded(ends.to(device), *given)
            if not all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True)):
                raise AssertionError(f"{edges} edges are in another order, num_loops={num_loops}")
            by_row = found[0], found[1], nodes
            again = torch.ops.pyg_scale.csr_transpose_few(*by_row)
            if not all(torch.equal(a.cpu(), b) for a, b in zip(again, wanted[3:], strict=True)):
                raise AssertionError(f"{edges} edges by source are in another order")
    return f"up to {sizes[-1][1]} edges in the order of a stable sort"


def _layer(name: str, device: torch.device) -> str:
    generator = torch.Generator().manual_seed(2)
    layer = getattr(nn, name)(16, 8, **LAYERS[name]).double()
    layer.min_work = 0  # checks the fused path on a graph of any size
    x = torch.randn(300, 16, generator=generator, dtype=torch.float64)
    edge_index = torch.randint(300, (2, 5000), generator=generator)
    return _same_as_on_cpu(layer, [x], edge_index, device)


def _same_as_on_cpu(
    layer: torch.nn.Module, features: list[Tensor], edge_index: Tensor, device: torch.device
) -> str:
    seen = []
    for place in (torch.device("cpu"), device):
        layer = layer.to(place)
        given = [each.to(place).requires_grad_() for each in features]
        out = layer(given[0], edge_index.to(place), *given[1:])
        wanted = [*given, *layer.parameters()]
        seen.append((out, *torch.autograd.grad(out.square().sum(), wanted)))
    if found := nn.fallbacks(layer):
        raise AssertionError(f"took PyG's path: {found}")
    for a, b in zip(*seen):
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-8, atol=1e-9)
    return "fused; the same as on the CPU"


def _formula(graph: Adjacency, width: int, dtype: torch.dtype) -> tuple[Formula, int, list[Tensor]]:
    """``sigmoid(k_i + q_j) * v_j * w``, and its inputs."""
    formula = Formula([OWN, NEIGHBOR, NEIGHBOR, EDGE])
    gate = formula.add("sigmoid", formula.add("add", 0, 1))
    slot = formula.add("mul", formula.add("mul", gate, 2), 3)
    generator = torch.Generator().manual_seed(width)
    sizes = (graph.num_dst, width), (graph.num_src, width), (graph.num_src, width)
    made = [torch.randn(size, generator=generator) for size in (*sizes, (graph.num_edges, 1))]
    given = [each.to(graph.device, dtype).requires_grad_() for each in made]
    return formula, slot, given


def _formula_exactly(graph: Adjacency, given: list[Tensor], how: str) -> Tensor:
    """The same in plain torch and ``float64``, with a row for every edge."""
    k, q, v, w = (each.double() for each in given)
    row, source = rows_of(graph.indptr, graph.num_edges), graph.indices.long()
    assert graph.edge_id is not None
    ids = graph.edge_id.long()
    rows = torch.sigmoid(k[row] + q[source]) * v[source] * w[ids]
    at, out = row.view(-1, 1).expand_as(rows), k.new_zeros(graph.num_dst, k.size(1))
    if how == "softmax":
        most = out.scatter_reduce(0, at, rows.detach(), "amax", include_self=False)
        weight = (rows - most[row]).exp()
        total = out.index_add(0, row, weight).clamp(min=1e-16)
        return out.index_add(0, row, weight * rows) / total
    if how == "max":
        return out.scatter_reduce(0, at, rows, "amax", include_self=False)
    if how == "edge":
        return rows.new_empty(graph.num_edges, 1).index_copy(0, ids, rows.sum(1, keepdim=True))
    return out.index_add(0, row, rows)


def _formulas(widths: tuple[int, ...], device: torch.device) -> str:
    _need_formulas(device)
    worst = 0.0
    for number, width in enumerate(widths):
        graph = hostile(device, torch.int32 if number % 2 else torch.int64)
        # The largest of numbers that float32 rounds to one may be that of another edge.
        for how, dtype in (
            ("sum", torch.float32),
            ("edge", torch.float32),
            ("softmax", torch.float32),
            ("max", torch.float64),
        ):
            formula, slot, given = _formula(graph, width, dtype)
            found = reduce_formula(graph, Reduction(formula, slot, how, width), given)
            wanted = _formula_exactly(graph, given, how)
            gradient = torch.linspace(-1, 1, wanted.numel(), device=device).view_as(wanted)
            ours = torch.autograd.grad(found, given, gradient.to(dtype))
            theirs = torch.autograd.grad(wanted, given, gradient.double())
            for what, (a, b) in enumerate(zip((found.detach(), *ours), (wanted.detach(), *theirs))):
                error = float((a.double() - b).norm() / b.double().norm().clamp(min=1e-30))
                limit = 1e-11 if dtype == torch.float64 else TOLERANCE[dtype]
                if not error <= limit:
                    which = "the result" if what == 0 else f"gradient {what}"
                    raise AssertionError(f"{which} of {how} differs by {error:.1e} at {width}")
                worst = max(worst, error)
    return f"largest relative difference {worst:.1e}"


def _need_formulas(device: torch.device) -> None:
    if device.type != "cpu" and (reason := fused.why_not_generated(device)):
        raise CannotRunError(reason)


def _stepped(name: str, device: torch.device) -> str:
    _need_formulas(device)
    options, columns = STEPPED[name]
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(2)
    layer = getattr(torch_geometric.nn, name)(**options).double()
    nn.accelerate(layer, min_work=0)
    x = torch.randn(300, 16, generator=generator, dtype=torch.float64)
    edge_index = torch.randint(300, (2, 5000), generator=generator)
    edge_index[1, :2000] = 7  # a hub
    more = [torch.randn(5000, columns, generator=generator, dtype=torch.float64)]
    return _same_as_on_cpu(layer, [x, *more[: columns > 0]], edge_index, device)


def _bits(device: torch.device) -> str:
    graph, number = hostile(device), 0
    for op in (*REDUCTIONS, "gat", "gatv2", "transformer"):
        given = inputs(op, graph, 2, 20, torch.float32, device)
        seen: list[tuple[Tensor, ...]] = []
        for _ in range(5):
            out = run(op, graph, given)
            seen.append((out, *torch.autograd.grad(out, given, torch.ones_like(out))))
        for other in seen[1:]:
            for a, b in zip(seen[0], other):
                if not torch.equal(a, b):
                    raise AssertionError(f"{op} has other bits in another run")
        number += len(seen)
    if device.type == "cpu" or not fused.why_not_generated(device):
        formula, slot, features = _formula(graph, 20, torch.float32)
        runs = []
        for _ in range(5):
            out = reduce_formula(graph, Reduction(formula, slot, "softmax", 20), features)
            runs.append((out, *torch.autograd.grad(out, features, torch.ones_like(out))))
        if not all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other)):
            raise AssertionError("a formula has other bits in another run")
        number += len(runs)
    return f"{number} runs"


def _stream(device: torch.device) -> str:
    graph = hostile(device)
    given = inputs("gatv2", graph, 2, 20, torch.float32, device)
    wanted = run("gatv2", graph, given)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        found = run("gatv2", graph, given)
    torch.cuda.current_stream(device).wait_stream(stream)
    if not torch.equal(found, wanted):
        raise AssertionError("the result on another stream differs")
    return "the same bits"


def _graph(device: torch.device) -> str:
    if UNCACHED in os.environ:
        raise CannotRunError(f"{UNCACHED} is set: a graph cannot hold allocations")
    graph = hostile(device)
    for op in ("sum", "max", "gat"):
        given = [tensor.detach() for tensor in inputs(op, graph, 2, 20, torch.float32, device)]
        with torch.no_grad():
            run(op, graph, given)  # loads what is loaded once
            torch.cuda.synchronize(device)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                found = run(op, graph, given)
            given[0].normal_()
            captured.replay()
            torch.cuda.synchronize(device)
            if not torch.equal(found, run(op, graph, given)):
                raise AssertionError(f"{op} replayed differs from {op}")
    if fused.why_not_generated(device):
        return "sum, max and gat replay"
    formula, slot, features = _formula(graph, 20, torch.float32)
    reduction = Reduction(formula, slot, "sum", 20)
    with torch.no_grad():
        reduce_formula(graph, reduction, features)
        torch.cuda.synchronize(device)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = reduce_formula(graph, reduction, features)
        features[1].normal_()
        captured.replay()
        torch.cuda.synchronize(device)
        if not torch.equal(found, reduce_formula(graph, reduction, features)):
            raise AssertionError("a formula replayed differs from the formula")
    return "sum, max, gat and a formula replay"
