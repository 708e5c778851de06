"""CUDA source of a formula along edges, for :mod:`pyg_scale.ops.edge_formula`.

A formula becomes a struct: what is read for a destination and for an edge, and its steps as
expressions of registers. ``csrc/cuda/edge_formula.cuh`` makes kernels of it. The text holds the
widths of rows but no numbers of instructions, which are arguments of the kernel, so that a number
that changes in training compiles nothing.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

MOST_INPUTS, MOST_OUTS, MOST_NUMBERS = 16, 16, 64
"""The limits of ``csrc/cuda/abi.h``: inputs, slots that are reduced or kept, and numbers."""

NEIGHBOR, OWN, EDGE = 0, 1, 2
"""The row that an edge reads of an input: that of its source, of its destination, or its own."""

_STEPS = {
    "add": "{a} + {b}",
    "sub": "{a} - {b}",
    "mul": "{a} * {b}",
    "div": "{a} / {b}",
    "max": "larger({a}, {b})",
    "min": "smaller({a}, {b})",
    "equal": "{a} == {b} ? T{{1}} : T{{0}}",
    "gate": "{a} > T{{0}} ? {b} : T{{0}}",
    "neg": "-{a}",
    "abs": "absolute({a})",
    "sign": "sign_of({a})",
    "exp": "exponential({a})",
    "log": "logarithm({a})",
    "sqrt": "root({a})",
    "tanh": "hyperbolic_tangent({a})",
    "sigmoid": "sigmoid({a})",
    "softplus": "softplus({a})",
    "reciprocal": "T{{1}} / {a}",
    "add_number": "{a} + {n}",
    "mul_number": "{a} * {n}",
    "leaky": "{a} > T{{0}} ? {a} : {a} * {n}",
    "leaky_gate": "{a} > T{{0}} ? {b} : {b} * {n}",
}


class Shape(NamedTuple):
    """All that the source of a formula depends on.

    Attributes:
        kind: ``"float"`` or ``"double"``.
        ends: Of every input, see :mod:`pyg_scale.ops.edge_formula`.
        columns: Numbers of a row of every input.
        steps: The code and the operands of every step.
        width: Places of a row.
        reduced: The slots to reduce.
        reduce: 0 (sum), 1 (max) or 2 (min).
        kept: The slots to keep, and their columns.
    """

    kind: str
    ends: tuple[int, ...]
    columns: tuple[int, ...]
    steps: tuple[tuple[str, int, int], ...]
    width: int
    reduced: tuple[int, ...]
    reduce: int
    kept: tuple[tuple[int, int], ...]


class Source(NamedTuple):
    """The source of a formula.

    Attributes:
        name: Name of the module and, with the bytes of a load, of its kernel.
        text: The source; ``PYG_SCALE_BYTES`` is the bytes of a load.
        used: The inputs that are read, in the order of the op's arguments.
        numbered: The steps that have a number, in that order.
    """

    name: str
    text: str
    used: tuple[int, ...]
    numbered: tuple[int, ...]


def takes_number(code: str) -> bool:
    """Return True if an instruction has a number."""
    return "{n}" in _STEPS[code]


@functools.lru_cache(maxsize=4096)
def source_of(shape: Shape) -> Source:
    """The source of a formula."""
    inputs = len(shape.ends)
    needed = {*shape.reduced, *(slot for slot, _ in shape.kept)}
    for at in range(inputs + len(shape.steps) - 1, inputs - 1, -1):
        if at in needed:
            needed |= {*shape.steps[at - inputs][1:]}
    # A kernel needs an input, and a step that is not needed is not run.
    used = tuple(k for k in range(inputs) if k in needed) or (0,)
    run = [at for at in range(inputs, inputs + len(shape.steps)) if at in needed]
    numbered = tuple(at - inputs for at in run if takes_number(shape.steps[at - inputs][0]))
    body = _body(shape, used, run, numbered)
    name = f"edge_formula_{hashlib.sha256(body.encode()).hexdigest()[:20]}"
    text = "\n".join([
        '#include "edge_formula.cuh"',
        "",
        "namespace pyg_scale::cuda {",
        "",
        body.replace("FORMULA", f"F_{name}"),
        "",
        f"PYG_SCALE_FORMULA({name}, F_{name}, PYG_SCALE_BYTES)",
        "",
        "}  // namespace pyg_scale::cuda",
        "",
    ])  # fmt: skip
    return Source(name, text, used, numbered)


def _body(shape: Shape, used: Sequence[int], run: Sequence[int], numbered: Sequence[int]) -> str:
    inputs, width = len(shape.ends), shape.width
    own = [k for k in used if shape.ends[k] == OWN]
    of_edge = [k for k in used if shape.ends[k] != OWN]
    outs = [*shape.reduced, *(slot for slot, _ in shape.kept)]
    reads_sources = any(shape.ends[k] == NEIGHBOR for k in used)
    reads_ids = bool(shape.kept) or any(shape.ends[k] == EDGE for k in used)
    narrow = any(columns != width for _, columns in shape.kept)
    lines = [
        "struct FORMULA {",
        f"  using Number = {shape.kind};",
        "  using T = Number;",
        f"  static constexpr int64_t kWidth = {width};",
        f"  static constexpr int kReduced = {len(shape.reduced)}, kOuts = {len(outs)};",
        f"  static constexpr int kReduce = {shape.reduce}, kPacks = {len(of_edge)};",
        f"  static constexpr bool kReadsSources = {_bool(reads_sources)};",
        f"  static constexpr bool kReadsIds = {_bool(reads_ids)}, kCollective = {_bool(narrow)};",
    ]
    lines += _rows("Own", "int64_t row", own, used, shape, {OWN: "row"})
    places = {NEIGHBOR: "source", EDGE: "id"}
    lines += _rows("Edge", "int64_t source, int64_t id", of_edge, used, shape, places)
    lines += [
        "  template <int kCount>",
        "  static PYG_SCALE_DEVICE void run([[maybe_unused]] const EdgeFormula& args,",
        "                                   [[maybe_unused]] const Own<kCount>& own,",
        "                                   [[maybe_unused]] const Edge<kCount>& edge, int i,",
        "                                   T (&out)[kOuts][kCount]) {",
    ]
    for k in used:
        row = "own" if shape.ends[k] == OWN else "edge"
        lines.append(f"    const T v{k} = {row}.x{k}.values[i];")
    for at in run:
        code, first, second = shape.steps[at - inputs]
        number = ""
        if takes_number(code):
            number = f"number<T>(args, {numbered.index(at - inputs)})"
        made = _STEPS[code].format(a=f"v{first}", b=f"v{second}", n=number)
        lines.append(f"    const T v{at} = {made};")
    lines += [f"    out[{k}][i] = v{slot};" for k, slot in enumerate(outs)]
    lines += [
        "  }",
        "  template <int kCount>",
        "  static PYG_SCALE_DEVICE void keep([[maybe_unused]] const EdgeFormula& args,",
        "                                    [[maybe_unused]] const Lanes& group,",
        "                                    [[maybe_unused]] int64_t id,",
        "                                    [[maybe_unused]] const Columns& mine,",
        "                                    [[maybe_unused]] bool there,",
        "                                    [[maybe_unused]] const T (&out)[kOuts][kCount]) {",
    ]
    for k, (_, columns) in enumerate(shape.kept):
        out = f"out[{len(shape.reduced) + k}]"
        if columns == width:
            lines.append(f"    keep_places<{width}>(args.kept[{k}], id, mine, there, {out});")
        else:
            to = f"args, group, args.kept[{k}], id, mine, there, {out}"
            lines.append(f"    keep_sums<{width}, {width // columns}>({to});")
    return "\n".join([*lines, "  }", "};"])


def _rows(
    name: str, arguments: str, slots: Sequence[int], used: Sequence[int], shape: Shape,
    places: dict[int, str],
) -> list[str]:  # fmt: skip
    """A struct with the places of a lane in rows of some inputs."""
    rows = [f"[[maybe_unused]] {each}" for each in (*arguments.split(", "), "int64_t column")]
    lines = [
        "  template <int kCount>",
        f"  struct {name} {{",
        *(f"    Pack<T, kCount> x{k};" for k in slots),
        "    PYG_SCALE_DEVICE void read([[maybe_unused]] const EdgeFormula& args,",
        f"                               {', '.join(rows)}) {{",
    ]
    for k in slots:
        each = shape.width // shape.columns[k]
        given = f"args.inputs[{used.index(k)}], {places[shape.ends[k]]}, column"
        lines.append(f"      x{k} = places<kCount, {each}, T>({given});")
    return [*lines, "    }", "  };"]


def _bool(value: bool) -> str:
    return "true" if value else "false"
