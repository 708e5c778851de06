"""Messages that compute each number from the numbers at the same place of their inputs.

A :class:`~pyg_scale.nn.lifted.Lifted` message stays a product. Other functions of single numbers,
such as ``relu(x_j + edge_attr)``, make an :class:`Elementwise` of it: it remembers the steps, and
one compiled op computes and reduces them (:mod:`pyg_scale.ops.edge_formula`). The functions are
those of :mod:`pyg_scale.nn.by_number`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_scale.nn.edges import DESTINATION, SOURCE, Edges, gather, sum_edges
from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.lifted import Lifted
from pyg_scale.nn.shapes import Slice, leading
from pyg_scale.ops import fused
from pyg_scale.ops.edge_formula import (
    Formula,
    Reduction,
    reduce_formula,
    why_not_on_cuda,
)
from pyg_scale.ops.edge_formula_source import EDGE, NEIGHBOR, OWN

CONSTANT = 3
"""The end of a tensor that is the same for all edges."""
_END = {SOURCE: NEIGHBOR, DESTINATION: OWN}


class Leaf(NamedTuple):
    """An input of a message: features of sources or destinations, a row per edge, or a constant."""

    tensor: Tensor
    end: int


class Node(NamedTuple):
    """A step of a message; ``code`` is one of :data:`~pyg_scale.ops.edge_formula.CODES`."""

    code: str
    parts: tuple[Node | Leaf, ...]
    number: float = 0.0


class Elementwise(Lifted):
    """A row per edge that is not computed: steps on rows of features.

    It is made by :func:`~pyg_scale.nn.by_number.by_number`. Edges are in the first dimension.
    """

    tree: Node | Leaf
    parts: list[Lifted | Tensor] | None
    """The tensors put side by side in the last dimension, if that is the last step."""
    _sums: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        edges: Edges,
        row: Sequence[int],
        like: Tensor,
        tree: Any,
        parts: list[Lifted | Tensor] | None = None,
    ) -> Elementwise:
        """Rows of a shape, of the type of another tensor."""
        shape = [edges.num_edges, *row]
        made: Elementwise = Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device
        )
        made.edges, made.dim_of_edges, made.ends, made.weight = edges, 0, [None, None], None
        made.row, made.viewed, made.summed, made._value = None, None, None, None
        made.tree, made.parts = tree, parts
        made._sums = {}
        return made

    @property
    def is_product(self) -> bool:
        """False."""
        return False

    @property
    def is_narrow(self) -> bool:
        """True if there are few numbers beside those of features, such as one for each head.

        They become a factor of these, so it is best to compute them once.
        """
        few = self.numel() <= _HEADS * self.edges.num_edges
        return few and 2 * self.numel() <= self.edges.asked.widest

    def computed(self) -> Tensor:
        """The rows, computed in torch, in memory of their own."""
        if self.parts is not None:
            return torch.cat([p.gathered() if isinstance(p, Lifted) else p for p in self.parts], -1)
        return _computed(self.edges, self.tree, {}).expand(self.shape)

    def reads(self) -> list[Tensor]:
        """The tensors that the rows are computed from."""
        if self.parts is None:
            return [leaf.tensor for leaf in _leaves(self.tree)]
        parts = [p.reads() if isinstance(p, Lifted) else [p] for p in self.parts]
        return [each for part in parts for each in part]

    def reduced(self, how: str, scale: float | Tensor = 1.0) -> Tensor | None:
        """The rows reduced at the destinations of edges; ``None`` if the compiled op cannot.

        Args:
            how: See :class:`~pyg_scale.ops.edge_formula.Reduction`, or ``"mean"``.
            scale: The factor in the exponents of ``"softmax"``.
        """
        if self.is_changed or not fused.usable(self.edges.graph.indices):
            return None
        if self.parts is not None:
            outs = [self._reduced_part(each, how, scale) for each in self.parts]
            found = [out for out in outs if out is not None]
            return torch.cat(found, -1) if len(found) == len(outs) else None
        if self.is_narrow:
            return None
        graph, row = self.edges.graph, self.shape[1:]
        if how == "mean":
            total = self.reduced("sum")
            if total is None:
                return None
            counts = graph.indptr.diff().clamp(min=1).to(total.dtype)
            return total / counts.view(-1, *[1] * len(row))
        if how in self._sums:
            return self._sums[how]
        out = self._by_formula(how, scale)
        if out is None:
            return None if how == "softmax" else self._by_place(lambda x: x.reduced(how))
        out = out.view(graph.num_dst, *row)
        if how != "softmax":  # which has a scale
            self._sums[how] = out  # an aggregation may ask for it again
        return out

    def _reduced_part(self, part: Any, how: str, scale: float | Tensor) -> Tensor | None:
        """Some of the columns, reduced."""
        if how == "softmax":
            tree = tree_of(self.edges, part) if isinstance(part, Lifted) else Leaf(part, EDGE)
            if tree is None or isinstance(scale, Tensor):
                return None
            return Elementwise.of(self.edges, part.shape[1:], part, tree).reduced(how, scale)
        if isinstance(part, Lifted):
            out = part.reduced(how)
            if out is not None or not (isinstance(part, Elementwise) and part.is_narrow):
                return out
            part = part.gathered()
        return sum_edges(self.edges.graph, part, 0, DESTINATION, how)

    def summed_rows(self) -> Tensor | None:
        """``[num_edges, ...]``, the sums over the last dimension; ``None`` if the op cannot.

        Gradients need the inputs as they are now, which is noted.
        """
        if self.parts is not None or self.value is not None or self.is_narrow:
            return None
        if not fused.usable(self.edges.graph.indices):
            return None
        out = self._by_formula("edge")
        if out is None:
            return self._by_place(lambda x: x.summed_rows())
        return out.view(self.shape[:-1])

    def _by_formula(self, how: str, scale: float | Tensor = 1.0) -> Tensor | None:
        """The rows reduced by one run of the compiled op; ``None`` if their inputs do not fit."""
        graph, row = self.edges.graph, self.shape[1:]
        made = _Inputs(self.edges, row)
        factor: float | int = scale if isinstance(scale, float) else made.constant(scale)
        width = math.prod(row)
        if width == 0 or not graph.num_edges or not made.fits(self.tree) or not made.inputs:
            return None
        formula = Formula(made.ends)
        slot = made.add_to(formula, self.tree, {})
        if not graph.indices.is_cpu and (why := why_not_on_cuda(formula, graph.device)):
            self.edges.asked.not_fused = why
            return None
        reduction = Reduction(formula, slot, how, width, factor, math.prod(row[:-1]))
        out = reduce_formula(graph, reduction, made.inputs)
        if how == "edge" and out.requires_grad:
            self.edges.asked.saved += made.inputs
        return out

    def _by_place(self, reduced: Callable[[Elementwise], Tensor | None]) -> Tensor | None:
        """The same for each place in the second dimension, such as a head, by itself."""
        if self.dim() < 3 or self.size(1) > _PLACES:
            return None
        outs = [reduced(self.part(Slice(1, place))) for place in range(self.size(1))]
        found = [out for out in outs if out is not None]
        return torch.stack(found, 1) if len(found) == len(outs) else None

    def apart(self) -> list[Lifted | Tensor]:
        """The parts, to be used one by one.

        Of a tensor of edges ``torch.cat`` has a copy, so that it may change; without, it may not.
        """
        parts = self.parts or []
        if self.edges.grad_mode:
            self.edges.asked.saved += [each for each in parts if not isinstance(each, Lifted)]
        return parts

    def part(self, taken: Slice) -> Elementwise:
        """The same part of every row."""
        row, last = taken.shape_of(self.shape)[1:], self.dim() - 1
        if self.parts is None:
            tree = _part_of_tree(self.tree, self.dim(), taken)
            return Elementwise.of(self.edges, row, self, tree)
        if taken.at < last:
            parts = [part_of(each, taken) for each in self.apart()]
            return Elementwise.of(self.edges, row, self, None, parts)
        found, begin, end = [], taken.first, taken.first + row[-1]
        for each in self.apart():
            here = slice(max(begin, 0), min(end, each.size(-1)))
            if here.start < here.stop:
                found.append(part_of(each, Slice(last, here.start, here.stop - here.start)))
            begin, end = begin - each.size(-1), end - each.size(-1)
        only: Any = found[0] if len(found) == 1 else None
        steps = tree_of(self.edges, only) if isinstance(only, Lifted) else None
        steps = Leaf(only, EDGE) if only is not None and not isinstance(only, Lifted) else steps
        return Elementwise.of(self.edges, row, self, steps, None if steps else found)


_HEADS = 16
"""Numbers of an edge up to which they are taken to be one for each head."""
_PLACES = 8
"""Number of places for which steps are computed one after another at most."""


def part_of(rows: Lifted | Tensor, taken: Slice) -> Lifted | Tensor:
    """A part of a tensor with a row per edge, or of rows that are not gathered."""
    dims = rows.dim()
    if not isinstance(rows, Lifted):
        return taken.of(rows, dims)
    if not rows.is_product:
        steps = steps_of(rows)
        if steps is None:
            raise NotFused("a part of rows that are no steps")
        return steps.part(taken)
    *ends, weight = (None if x is None else taken.of(x, dims) for x in (*rows.ends, rows.weight))
    return Lifted(rows.edges, 0, ends, weight)


def _part_of_tree(tree: Node | Leaf, dims: int, taken: Slice) -> Node | Leaf:
    if isinstance(tree, Leaf):
        return Leaf(taken.of(tree.tensor, dims), tree.end)
    parts = tuple(_part_of_tree(part, dims, taken) for part in tree.parts)
    return Node(tree.code, parts, tree.number)


class _Inputs:
    """The inputs of a formula as matrices, each once."""

    def __init__(self, edges: Edges, row: Sequence[int]) -> None:
        self.edges, self.row = edges, row
        self.inputs: list[Tensor] = []
        self.ends: list[int] = []
        self._known: dict[tuple[int, int], int] = {}

    def fits(self, tree: Node | Leaf) -> bool:
        """Add the inputs of a tree; return False if the shape of one is another."""
        return all(self.slot(leaf) is not None for leaf in _leaves(tree))

    def add_to(self, formula: Formula, tree: Node | Leaf, made: dict[int, int]) -> int:
        """Add the steps of a tree to a formula, but those already made; the slot of the last."""
        if isinstance(tree, Leaf):
            slot = self.slot(tree)
            assert slot is not None
            return slot
        if id(tree) not in made:
            slots = [self.add_to(formula, part, made) for part in tree.parts]
            second = slots[1] if len(slots) > 1 else None
            made[id(tree)] = formula.add(tree.code, slots[0], second, tree.number)
        return made[id(tree)]

    def slot(self, leaf: Leaf) -> int | None:
        """The slot of an input; ``None`` if its rows are of another shape."""
        key = id(leaf.tensor), leaf.end
        if key not in self._known:
            shape = [*leaf.tensor.shape[1:]]
            if leaf.end == CONSTANT:
                shape = [*leaf.tensor.shape]
            shape = [1] * (len(self.row) - len(shape)) + shape
            columns = leading(shape, self.row)
            if columns is None:
                return None
            if leaf.end == CONSTANT:  # so that torch adds up the gradients of destinations
                matrix = leaf.tensor.reshape(1, columns).expand(self.edges.graph.num_dst, columns)
            else:
                matrix = leaf.tensor.reshape(leaf.tensor.size(0), columns)
            self._known[key] = len(self.inputs)
            self.inputs.append(matrix)
            self.ends.append(OWN if leaf.end == CONSTANT else leaf.end)
        return self._known[key]

    def constant(self, tensor: Tensor) -> int:
        """Minus one less the slot of a tensor that is the same for all edges, of a row or one."""
        slot = self.slot(Leaf(tensor, CONSTANT))
        return 0 if slot is None else -1 - slot


# Trees ####################################################################################


def _leaves(tree: Any) -> list[Leaf]:
    if isinstance(tree, Leaf):
        return [tree]
    return [leaf for part in tree.parts for leaf in _leaves(part)]


def steps_of(rows: Lifted) -> Elementwise | None:
    """The same rows as steps; ``None`` if they cannot be."""
    if isinstance(rows, Elementwise):
        return rows
    tree = tree_of(rows.edges, rows)
    return None if tree is None else Elementwise.of(rows.edges, rows.shape[1:], rows, tree)


def tree_of(edges: Edges, value: Any) -> Node | Leaf | None:
    """The steps behind an operand; ``None`` if it is not one of rows of these edges."""
    if isinstance(value, Elementwise):
        if value.edges is not edges or value.is_changed:
            return None
        if value.value is not None:  # computed once
            return Leaf(value.value, EDGE)
        return value.tree if value.parts is None else None
    if isinstance(value, Lifted):
        if value.edges is not edges or value.is_changed or value.dim_of_edges != 0:
            return None
        if value.row is not None and value.viewed is not None:
            viewed = tree_of(edges, value.viewed)
            return viewed and of_shape(viewed, value.viewed.shape[1:], value.row)
        if not value.is_product:
            return None
        factors = [Leaf(x, _END[k]) for k, x in enumerate(value.ends) if x is not None]
        if value.weight is not None:
            end = EDGE if value.weight.size(0) == edges.num_edges else CONSTANT
            factors.append(Leaf(value.weight, end))
        tree: Node | Leaf = factors[0]
        for each in factors[1:]:
            tree = Node("mul", (tree, each))
        return tree
    return None


def of_shape(tree: Node | Leaf, before: Sequence[int], row: Sequence[int]) -> Node | Leaf | None:
    """The steps of rows of another shape; ``None`` if an input has a part of a row only.

    Args:
        tree: The steps.
        before: The shape of a row.
        row: The other shape, of as many numbers.
    """
    if isinstance(tree, Node):
        parts = [of_shape(part, before, row) for part in tree.parts]
        found = tuple(part for part in parts if part is not None)
        return Node(tree.code, found, tree.number) if len(found) == len(parts) else None
    tensor, end = tree
    if end == CONSTANT:
        return Leaf(tensor.expand(before).reshape(row) if tensor.numel() > 1 else tensor, end)
    size = tensor.numel() // max(tensor.size(0), 1)
    if tensor.shape[1:] == before:
        return Leaf(tensor.reshape(-1, *row), end)
    return Leaf(tensor.reshape(-1, *[1] * len(row)), end) if size == 1 else None


def _computed(edges: Edges, tree: Node | Leaf, known: dict[int, Tensor]) -> Tensor:
    """The rows of a tree, in torch."""
    if id(tree) not in known:
        if isinstance(tree, Leaf):
            end = {NEIGHBOR: SOURCE, OWN: DESTINATION}.get(tree.end)
            value = tree.tensor if end is None else gather(edges, tree.tensor, 0, end)
        else:
            parts = [_computed(edges, part, known) for part in tree.parts]
            value = IN_TORCH[tree.code](*parts, *([tree.number] if tree.number else []))
        known[id(tree)] = value
    return known[id(tree)]


IN_TORCH: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "reciprocal": lambda x: x.reciprocal() * 1,  # as 1 / x does, so that it may be changed
    "add_number": lambda x, n=0.0: x + n,
    "mul_number": lambda x, n=0.0: x * n,
    "leaky": lambda x, n=0.0: F.leaky_relu(x, n) if n else F.relu(x),
}
