"""Formulas of numbers along edges, reduced at their destinations without a row for every edge.

A message such as ``relu(x_j + e)`` or ``sigmoid(k_i + q_j) * v_j`` computes each number from the
numbers at the same place of its inputs. PyG makes a tensor ``[num_edges, channels]`` in every step.
Here a compiled op runs all steps on a row or some, which stay in the first cache, and reduces the
result at once. The formula is a list of instructions that the op interprets, as numexpr does, so
nothing is compiled at run time. On a CUDA device steps are expressions of registers: a kernel is
generated of every formula (:mod:`pyg_scale.ops.edge_formula_source`), and NVRTC compiles it once.

A gradient is a formula too. :func:`reduce_formula` derives it instruction by instruction, and runs
it twice: by destination, for inputs of destinations and of edges, and by source, for those of
sources. If a source's gradient along an edge is that of the edge itself, as in ``x_j + edge_attr``,
the second run is a sum of the gradients that the first kept. Nothing is scattered, so all bits are
the same for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_scale.ops import cuda_modules, fused, library
from pyg_scale.ops.adjacency import Adjacency, rows_of
from pyg_scale.ops.aggregate import aggregate_exactly
from pyg_scale.ops.aggregate_rules import differentiable
from pyg_scale.ops.edge_formula_source import (
    EDGE,
    MOST_INPUTS,
    MOST_NUMBERS,
    MOST_OUTS,
    NEIGHBOR,
    OWN,
    Shape,
    Source,
    source_of,
)

CODES = (
    *("add", "sub", "mul", "div", "max", "min", "equal", "gate"),
    *("neg", "abs", "sign", "exp", "log", "sqrt", "tanh", "sigmoid", "softplus", "reciprocal"),
    *("add_number", "mul_number", "leaky", "leaky_gate"),
)
"""The instructions, in the order of the compiled op: of two operands, of one, and with a number.

``equal`` is 1 or 0, ``gate`` the second operand where the first is above 0, ``leaky`` times the
number where not above 0, and ``leaky_gate`` the second, times the number where the first is not.
"""
_CODE = {name: k for k, name in enumerate(CODES)}
REDUCTIONS = ("sum", "max", "min")
DTYPES = (torch.float32, torch.float64)


class Step(NamedTuple):
    """One instruction; its result is the slot after those of all inputs and steps before it."""

    code: str
    first: int
    second: int
    number: float = 0.0


class Formula:
    """A formula in the making: inputs, and steps that compute new slots from slots.

    The slots ``0`` to ``len(ends) - 1`` are the inputs. Equal steps are made once.

    Args:
        ends: :data:`NEIGHBOR`, :data:`OWN` or :data:`EDGE` of every input.
    """

    def __init__(self, ends: Iterable[int]) -> None:
        self.ends = tuple(ends)
        self.steps: list[Step] = []
        self._known: dict[Step, int] = {}

    def add(self, code: str, first: int, second: int | None = None, number: float = 0.0) -> int:
        """The slot of a step, see :data:`CODES`."""
        step = Step(code, first, first if second is None else second, number)
        if step not in self._known:
            self._known[step] = len(self.ends) + len(self.steps)
            self.steps.append(step)
        return self._known[step]

    def extended(self, ends: Iterable[int]) -> tuple[Formula, Callable[[int], int], list[int]]:
        """A copy with more inputs, the new place of each slot, and the slots of the new inputs."""
        old, more = len(self.ends), tuple(ends)
        made = Formula(self.ends + more)
        move = lambda slot: slot if slot < old else slot + len(more)  # noqa: E731
        for code, first, second, number in self.steps:
            made.steps.append(Step(code, move(first), move(second), number))
        made._known = {step: old + len(more) + k for k, step in enumerate(made.steps)}
        return made, move, [*range(old, old + len(more))]

    def gradients(self, seeds: dict[int, int]) -> dict[int, int]:
        """Add the steps of the chain rule, backwards.

        Args:
            seeds: The slot of the gradient of a slot, for each that has one.

        Returns:
            The slot of the gradient of every input that a seed depends on.
        """
        found = dict(seeds)
        inputs = len(self.ends)
        for at in range(max(found, default=-1), inputs - 1, -1):
            if at in found:
                for slot, of_slot in _chain(self, self.steps[at - inputs], at, found[at]):
                    known = found.get(slot)
                    found[slot] = of_slot if known is None else self.add("add", known, of_slot)
        return {slot: of_slot for slot, of_slot in found.items() if slot < inputs}


def _chain(f: Formula, step: Step, out: int, grad: int) -> list[tuple[int, int]]:
    """The gradients of the operands of a step, as new steps."""
    code, a, b, n = step
    if code in ("add", "sub"):
        return [(a, grad), (b, grad if code == "add" else f.add("neg", grad))]
    if code == "mul":
        return [(a, f.add("mul", grad, b)), (b, f.add("mul", grad, a))]
    if code == "div":
        of_a = f.add("div", grad, b)
        return [(a, of_a), (b, f.add("neg", f.add("mul", of_a, out)))]
    if code in ("max", "min"):  # where both are equal, each gets half, as in torch
        difference = f.add("sub", a, b) if code == "max" else f.add("sub", b, a)
        half = f.add("mul_number", f.add("mul", f.add("equal", a, b), grad), number=0.5)
        first = f.add("gate", difference, grad)
        second = f.add("gate", f.add("neg", difference), grad)
        return [(a, f.add("add", first, half)), (b, f.add("add", second, half))]
    if code == "neg":
        return [(a, f.add("neg", grad))]
    if code == "add_number":
        return [(a, grad)]
    if code == "mul_number":
        return [(a, f.add("mul_number", grad, number=n))]
    if code == "leaky":
        return [(a, f.add("leaky_gate", a, grad, n))]
    if code in ("abs", "exp", "sqrt", "tanh", "sigmoid", "softplus", "log", "reciprocal"):
        return [(a, _of_one(f, code, a, out, grad))]
    if code in ("equal", "sign"):
        return []
    if code == "gate":
        return [(b, f.add("gate", a, grad))]
    assert code == "leaky_gate"
    return [(b, f.add("leaky_gate", a, grad, n))]


def _of_one(f: Formula, code: str, a: int, out: int, grad: int) -> int:
    """The gradient of the operand of a function of one number."""
    if code == "abs":
        return f.add("mul", grad, f.add("sign", a))
    if code == "exp":
        return f.add("mul", grad, out)
    if code == "sqrt":
        return f.add("div", f.add("mul_number", grad, number=0.5), out)
    if code == "log":
        return f.add("div", grad, a)
    if code == "softplus":
        return f.add("mul", grad, f.add("sigmoid", a))
    if code == "reciprocal":
        return f.add("neg", f.add("mul", grad, f.add("mul", out, out)))
    if code == "tanh":
        rest = f.add("add_number", f.add("neg", f.add("mul", out, out)), number=1.0)
    else:  # sigmoid
        rest = f.add("mul", out, f.add("add_number", f.add("neg", out), number=1.0))
    return f.add("mul", grad, rest)


# Running a formula ########################################################################


def run_formula(
    graph: Adjacency,
    formula: Formula,
    inputs: Sequence[Tensor],
    width: int,
    reduced: Sequence[int],
    reduce: str = "sum",
    kept: Sequence[tuple[int, int]] = (),
) -> list[Tensor]:
    """Compute slots for every edge; reduce some at destinations, and keep others.

    Args:
        graph: The edges.
        formula: The formula.
        inputs: A matrix for each of its inputs, ``float32`` or ``float64``. Its columns divide
            ``width``: each is that of as many places of a row.
        width: Number of places of a row.
        reduced: The slots to reduce.
        reduce: ``"sum"``, ``"max"`` or ``"min"``; of no edges: 0.
        kept: Slots to keep and their numbers of columns, into each of which as many places are
            added up.

    Returns:
        ``[num_dst, width]`` for each of ``reduced``, then ``[num_edges, columns]`` by edge id for
        each of ``kept``.
    """
    if not fused.usable(graph.indices):
        return run_formula_plain(graph, formula, inputs, width, reduced, reduce, kept)
    run = _run_interpreted if inputs[0].device.type == "cpu" else _run_generated
    return run(graph, formula, inputs, width, reduced, reduce, kept)


def _run_interpreted(
    graph: Adjacency,
    formula: Formula,
    inputs: Sequence[Tensor],
    width: int,
    reduced: Sequence[int],
    reduce: str,
    kept: Sequence[tuple[int, int]],
) -> list[Tensor]:
    """:func:`run_formula` by the op for the CPU."""
    used, program, numbers, place = _program(formula, [*reduced, *(slot for slot, _ in kept)])
    out: list[Tensor] = torch.ops.pyg_scale.edge_formula(
        graph.indptr,
        graph.indices,
        graph.edge_id,
        [inputs[k] for k in used],
        [formula.ends[k] for k in used],
        program,
        torch.tensor(numbers, dtype=inputs[0].dtype),
        width,
        [place[slot] for slot in reduced],
        REDUCTIONS.index(reduce),
        [place[slot] for slot, _ in kept],
        [columns for _, columns in kept],
    )
    return out


MOST_OF_CALL = 12, 30
"""Inputs and steps of a formula that runs on a CUDA device, as do its gradients: these have three
inputs more, and at most two numbers for every step."""


def why_not_on_cuda(formula: Formula, device: torch.device) -> str:
    """The reason why a formula does not run on a device other than the CPU; else empty."""
    inputs, steps = MOST_OF_CALL
    if len(formula.ends) > inputs or len(formula.steps) > steps:
        return (
            f"{len(formula.steps)} steps on {len(formula.ends)} inputs, where a kernel takes "
            f"{steps} on {inputs}"
        )
    return fused.why_not_generated(device)


def _run_generated(
    graph: Adjacency,
    formula: Formula,
    inputs: Sequence[Tensor],
    width: int,
    reduced: Sequence[int],
    reduce: str,
    kept: Sequence[tuple[int, int]],
) -> list[Tensor]:
    """:func:`run_formula` by a kernel that is generated."""
    shape = _shape(formula, inputs, width, reduced, reduce, kept)
    source = source_of(shape)
    reason = _too_large(source, shape) or fused.why_not_generated(inputs[0].device)
    if reason:
        library.warn_plain_path("edge_formula", reason)
        return run_formula_plain(graph, formula, inputs, width, reduced, reduce, kept)
    cuda_modules.keep_source(source.name, source.text)
    out: list[Tensor] = torch.ops.pyg_scale.edge_formula_compiled(
        graph.indptr,
        graph.indices,
        graph.edge_id,
        [inputs[k] for k in source.used],
        [formula.ends[k] for k in source.used],
        source.name,
        [formula.steps[k].number for k in source.numbered],
        width,
        len(reduced),
        [columns for _, columns in kept],
    )
    return out


def _shape(
    formula: Formula,
    inputs: Sequence[Tensor],
    width: int,
    reduced: Sequence[int],
    reduce: str,
    kept: Sequence[tuple[int, int]],
) -> Shape:
    kind = "float" if inputs[0].dtype is torch.float32 else "double"
    return Shape(
        kind,
        formula.ends,
        tuple(x.size(1) for x in inputs),
        tuple(step[:3] for step in formula.steps),
        width,
        tuple(reduced),
        REDUCTIONS.index(reduce),
        tuple(kept),
    )


def _too_large(source: Source, shape: Shape) -> str:
    sizes = len(source.used), len(source.numbered), len(shape.reduced), len(shape.kept)
    most = MOST_INPUTS, MOST_NUMBERS, MOST_OUTS, MOST_OUTS
    if all(size <= limit for size, limit in zip(sizes, most, strict=True)):
        return ""
    return "a formula has more inputs, numbers or results than a kernel takes"


def _program(
    formula: Formula, wanted: Sequence[int]
) -> tuple[list[int], list[int], list[float], dict[int, int]]:
    """The steps that some slots need, with places in memory that are used again.

    Returns:
        The inputs that are used, the instructions, their numbers, and the place of each slot.
    """
    inputs = len(formula.ends)
    last = dict.fromkeys(wanted, len(formula.steps) + inputs)  # the last step that reads a slot
    for at in range(inputs + len(formula.steps) - 1, inputs - 1, -1):
        if at in last:
            step = formula.steps[at - inputs]
            last.setdefault(step.first, at)
            last.setdefault(step.second, at)
    used = [k for k in range(inputs) if k in last] or [0]
    place = {slot: k for k, slot in enumerate(used)}
    numbers, program = [0.0], []
    free: list[int] = []
    size = len(used)
    for at, step in enumerate(formula.steps, inputs):
        if at not in last:
            continue
        for slot in {step.first, step.second}:
            if last[slot] == at and slot >= inputs:  # the result may replace an operand
                free.append(place[slot])
        if free:
            place[at] = free.pop()
        else:
            place[at], size = size, size + 1
        if step.number not in numbers:
            numbers.append(step.number)
        program += [_CODE[step.code], place[step.first], place[step.second]]
        program += [numbers.index(step.number), place[at]]
    return used, program, numbers, place


def run_formula_plain(
    graph: Adjacency,
    formula: Formula,
    inputs: Sequence[Tensor],
    width: int,
    reduced: Sequence[int],
    reduce: str = "sum",
    kept: Sequence[tuple[int, int]] = (),
) -> list[Tensor]:
    """The meaning of :func:`run_formula`, up to rounding, with a row for every edge.

    It can be differentiated any number of times.
    """
    size = graph.num_edges
    device = graph.indices.device
    ids = torch.arange(size, device=device) if graph.edge_id is None else graph.edge_id
    dst = rows_of(graph.indptr, size)
    rows = {NEIGHBOR: graph.indices, OWN: dst, EDGE: ids}
    slots: list[Tensor] = []
    for x, end in zip(inputs, formula.ends, strict=True):
        row = x.index_select(0, rows[end])
        slots.append(row.repeat_interleave(width // x.size(1), 1))
    for step in formula.steps:
        slots.append(_PLAIN[step.code](slots[step.first], slots[step.second], step.number))
    outs = [_reduced_plain(slots[slot], dst, graph.num_dst, reduce) for slot in reduced]
    for slot, columns in kept:
        values = slots[slot].view(size, columns, -1).sum(-1)
        outs.append(values.new_zeros(size, columns).index_copy(0, ids.to(torch.int64), values))
    return outs


def _reduced_plain(values: Tensor, dst: Tensor, num_dst: int, reduce: str) -> Tensor:
    out = values.new_zeros(num_dst, values.size(1))
    if reduce == "sum":
        return out.index_add(0, dst, values)
    at = dst.view(-1, 1).expand_as(values)
    return out.scatter_reduce(0, at, values, f"a{reduce}", include_self=False)


_PLAIN: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "add": lambda a, b, n: a + b,
    "sub": lambda a, b, n: a - b,
    "mul": lambda a, b, n: a * b,
    "div": lambda a, b, n: a / b,
    "max": lambda a, b, n: torch.maximum(a, b),
    "min": lambda a, b, n: torch.minimum(a, b),
    "equal": lambda a, b, n: (a == b).to(a.dtype),
    "gate": lambda a, b, n: torch.where(a > 0, b, 0),
    "neg": lambda a, b, n: -a,
    "abs": lambda a, b, n: a.abs(),
    "sign": lambda a, b, n: a.sign(),
    "exp": lambda a, b, n: a.exp(),
    "log": lambda a, b, n: a.log(),
    "sqrt": lambda a, b, n: a.sqrt(),
    "tanh": lambda a, b, n: a.tanh(),
    "sigmoid": lambda a, b, n: a.sigmoid(),
    "softplus": lambda a, b, n: torch.nn.functional.softplus(a),
    "reciprocal": lambda a, b, n: a.reciprocal(),
    "add_number": lambda a, b, n: a + n,
    "mul_number": lambda a, b, n: a * n,
    "leaky": lambda a, b, n: torch.where(a > 0, a, a * n),
    "leaky_gate": lambda a, b, n: torch.where(a > 0, b, b * n),
}


# Reductions with gradients ################################################################


class Reduction(NamedTuple):
    """The number computed for every edge, and its reduction at the destination."""

    formula: Formula
    slot: int
    """The slot that is reduced."""
    how: str
    """``"sum"``, ``"max"``, ``"min"``, or ``"softmax"``: the sum of the numbers, each weighted by
    the exponential of itself (Li et al., DeeperGCN, 2020). ``"edge"`` reduces the row of each edge
    instead: places side by side are added up."""
    width: int
    scale: float | int = 1.0
    """Of ``"softmax"``: the factor in the exponent, or minus one less the slot of it."""
    columns: int = 1
    """Of ``"edge"``: the number of sums of an edge, such as one for each head."""


def reduce_formula(graph: Adjacency, reduction: Reduction, inputs: Sequence[Tensor]) -> Tensor:
    """Reduce a formula at the destinations of edges, or along the row of each edge.

    Gradients can be differentiated again, in plain torch, with a row for every edge. Where several
    edges are the extreme, they share its gradient, as in PyG.

    Args:
        graph: The edges.
        reduction: The formula, and how it is reduced.
        inputs: See :func:`run_formula`.

    Returns:
        ``[num_dst, width]``; ``[num_edges, columns]`` by edge id for ``"edge"``.
    """
    out: Tensor = _Reduced.apply(graph, reduction, *inputs)
    return out


def _forward(graph: Adjacency, reduction: Reduction, inputs: Sequence[Tensor], run: Any) -> Any:
    """The result, and for a softmax the logarithms of its sums."""
    formula, slot, how, width, scale, columns = reduction
    if how == "edge":
        return *run(graph, formula, inputs, width, [], "sum", [(slot, columns)]), None
    if how != "softmax":
        return *run(graph, formula, inputs, width, [slot], how), None
    scaled, move, (shift,) = formula.extended([OWN])
    value = move(slot)
    logit = _scaled(scaled, value, scale)
    blank = inputs[0].new_zeros(1, 1).expand(graph.num_dst, 1)
    (most,) = run(graph, scaled, [*inputs, blank], width, [logit], "max")
    most = most.detach()
    weight = scaled.add("exp", scaled.add("sub", logit, shift))
    parts = [weight, scaled.add("mul", weight, value)]
    total, weighted = run(graph, scaled, [*inputs, most], width, parts)
    return weighted / total.clamp(min=1e-16), most + total.clamp(min=1e-38).log()


def _scaled(formula: Formula, value: int, scale: float | int) -> int:
    """The slot of a value times the scale of a softmax."""
    if isinstance(scale, int):
        return formula.add("mul", value, -1 - scale)
    return value if scale == 1.0 else formula.add("mul_number", value, number=scale)


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Adjacency, reduction: Reduction, *inputs: Tensor) -> Tensor:
        out, log = _forward(graph, reduction, inputs, run_formula)
        ctx.graph, ctx.reduction = graph, reduction
        is_sum = reduction.how in ("sum", "edge")
        ctx.save_for_backward(
            *inputs, *(() if is_sum else (out,)), *(() if log is None else (log,))
        )
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        graph, reduction = ctx.graph, ctx.reduction
        count = len(reduction.formula.ends)
        inputs, kept = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or fused.in_batches(grad):
            run = lambda *given: [_forward(graph, reduction, given, run_formula_plain)[0]]  # noqa: E731
            return None, None, *differentiable(run, inputs, needed, [grad])
        return None, None, *_gradients(graph, reduction, inputs, needed, grad, kept)


def _gradients(
    graph: Adjacency,
    reduction: Reduction,
    inputs: Sequence[Tensor],
    needed: Sequence[bool],
    grad: Tensor,
    kept: Sequence[Tensor],
) -> list[Tensor | None]:
    own = [grad, *kept]
    end = EDGE if reduction.how == "edge" else OWN
    formula, move, slots = reduction.formula.extended([end] * len(own))
    value, width = move(reduction.slot), reduction.width
    seeds = {value: slots[0]}
    if reduction.how in ("max", "min"):
        is_extreme = formula.add("equal", value, slots[1])
        given = [*inputs, *own]
        (ties,) = run_formula(graph, formula, given, width, [is_extreme])
        own[0] = grad / ties.clamp(min=1)
        seeds = {value: formula.add("mul", is_extreme, slots[0])}
    elif reduction.how == "softmax":
        seeds = _of_softmax(formula, value, slots, reduction.scale)
    found = formula.gradients(seeds)
    outs: list[Tensor | None] = [None] * len(inputs)
    given = [*inputs, *own]

    def wanted(end: int) -> list[int]:
        return [k for k, n in enumerate(needed) if n and formula.ends[k] == end and k in found]

    here, edges, there = wanted(OWN), wanted(EDGE), wanted(NEIGHBOR)
    if here or edges:
        columns = [(found[k], inputs[k].size(1)) for k in edges]
        made = run_formula(graph, formula, given, width, [found[k] for k in here], "sum", columns)
        for k, each in zip(here + edges, made, strict=True):
            outs[k] = _narrowed(each, inputs[k].size(1))
    # Of x_j + edge_attr both terms have the same gradient: it is there for every edge already.
    known = {found[k]: outs[k] for k in edges if inputs[k].size(1) == width}
    shared = [k for k in there if found[k] in known]
    if shared:
        by_source = _edges_by_source(graph)
        for k in shared:
            of_edges = known[found[k]]
            assert of_edges is not None
            outs[k] = _narrowed(
                aggregate_exactly(by_source, of_edges, None, "sum"), inputs[k].size(1)
            )
        there = [k for k in there if k not in shared]
    if there:
        made = run_formula(*_turned(graph, formula), given, width, [found[k] for k in there])
        for k, each in zip(there, made, strict=True):
            outs[k] = _narrowed(each, inputs[k].size(1))
    for k, (n, x) in enumerate(zip(needed, inputs, strict=True)):
        if n and outs[k] is None:
            outs[k] = torch.zeros_like(x)
    return outs


def _of_softmax(
    formula: Formula, value: int, slots: Sequence[int], scale: float | int
) -> dict[int, int]:
    """The gradients of the value and of the scale: ``w (1 + scale (value - out)) grad`` and
    ``w value (value - out) grad``, where ``w`` is the weight."""
    grad, out, log = slots
    weight = formula.add("exp", formula.add("sub", _scaled(formula, value, scale), log))
    flow = formula.add("mul", weight, grad)
    apart = formula.add("sub", value, out)
    bent = formula.add("add_number", _scaled(formula, apart, scale), number=1.0)
    seeds = {value: formula.add("mul", flow, bent)}
    if isinstance(scale, int):
        seeds[-1 - scale] = formula.add("mul", formula.add("mul", flow, apart), value)
    return seeds


def _turned(graph: Adjacency, formula: Formula) -> tuple[Adjacency, Formula]:
    """The edges by source, and the formula from where they stand."""
    indptr, indices, position = graph.transpose()
    edge_id = position if graph.edge_id is None else graph.edge_id.index_select(0, position)
    there = Adjacency.of_checked(indptr, indices, graph.num_dst, edge_id)
    swap = {NEIGHBOR: OWN, OWN: NEIGHBOR, EDGE: EDGE}
    turned = Formula(swap[end] for end in formula.ends)
    turned.steps = formula.steps
    return there, turned


def _edges_by_source(graph: Adjacency) -> Adjacency:
    """The edges themselves, by id, at their sources."""
    there, _ = _turned(graph, Formula(()))
    edge_id = there.edge_id
    assert edge_id is not None
    return Adjacency.of_checked(there.indptr, edge_id, graph.num_edges)


def _narrowed(grad: Tensor, columns: int) -> Tensor:
    """The sums of the places that a column of an input is the number of."""
    return grad if grad.size(1) == columns else grad.view(grad.size(0), columns, -1).sum(-1)
