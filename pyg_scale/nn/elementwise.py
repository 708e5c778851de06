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

from pyg_scale.nn.edges import DESTINATION, SOURCE, Edges, gather
from pyg_scale.nn.lifted import Lifted
from pyg_scale.nn.shapes import leading
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
        if self.parts is not None or self.is_changed or self.is_narrow:
            return None
        if not fused.usable(self.edges.graph.indices):
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
        width = math.prod(row)
        made = _Inputs(self.edges, row)
        factor: float | int = scale if isinstance(scale, float) else made.constant(scale)
        if width == 0 or not graph.num_edges:
            return None
        if not made.fits(self.tree):
            return None if how == "softmax" else self._reduced_by_place(how)
        if not made.inputs:
            return None
        formula = Formula(made.ends)
        slot = made.add_to(formula, self.tree, {})
        if not graph.indices.is_cpu and (why := why_not_on_cuda(formula, graph.device)):
            self.edges.asked.not_fused = why
            return None
        out = reduce_formula(graph, Reduction(formula, slot, how, width, factor), made.inputs)
        out = out.view(graph.num_dst, *row)
        if how != "softmax":  # which has a scale
            self._sums[how] = out  # an aggregation may ask for it again
        return out

    def _reduced_by_place(self, how: str) -> Tensor | None:
        """The same for each place in the second dimension, such as a head, by itself."""
        if self.dim() < 3 or self.size(1) > _PLACES:
            return None
        outs = [self.at(place).reduced(how) for place in range(self.size(1))]
        found = [out for out in outs if out is not None]
        return torch.stack(found, 1) if len(found) == len(outs) else None

    def at(self, place: int) -> Elementwise:
        """The rows ``self[:, place]``."""
        row = self.shape[2:]
        if self.parts is None:
            tree = _at_place(self.tree, self.dim(), place)
            return Elementwise.of(self.edges, row, self, tree)
        parts = [at_place(part, place) for part in self.parts]
        return Elementwise.of(self.edges, row, self, None, parts)


_HEADS = 16
"""Numbers of an edge up to which they are taken to be one for each head."""
_PLACES = 8
"""Number of places for which steps are computed one after another at most."""


def at_place(rows: Lifted | Tensor, place: int) -> Lifted | Tensor:
    """``rows[:, place]``, of a tensor with a row per edge or of rows that are not gathered."""
    if isinstance(rows, Elementwise):
        return rows.at(place)
    if not isinstance(rows, Lifted):
        return rows[:, place]
    dims = rows.dim()
    factors = (None if x is None else _factor(x, dims, place) for x in (*rows.ends, rows.weight))
    *ends, weight = factors
    return Lifted(rows.edges, 0, ends, weight)


def _at_place(tree: Node | Leaf, dims: int, place: int) -> Node | Leaf:
    if isinstance(tree, Leaf):
        return Leaf(_factor(tree.tensor, dims, place), tree.end)
    parts = tuple(_at_place(part, dims, place) for part in tree.parts)
    return Node(tree.code, parts, tree.number)


def _factor(tensor: Tensor, dims: int, place: int) -> Tensor:
    """A factor of the rows ``[:, place]``; it may have size 1 there, or fewer dimensions."""
    at = 1 - dims + tensor.dim()
    return tensor if at < 0 else tensor.select(at, 0 if tensor.size(at) == 1 else place)


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


def tree_of(edges: Edges, value: Any) -> Node | Leaf | None:
    """The steps behind an operand; ``None`` if it is not one of rows of these edges."""
    if isinstance(value, Elementwise):
        if value.edges is not edges or value.is_changed:
            return None
        if value.value is not None:  # computed once
            return Leaf(value.value, EDGE)
        return value.tree if value.parts is None else None
    if isinstance(value, Lifted):
        if value.edges is not edges or not value.is_product or value.dim_of_edges != 0:
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
    "reciprocal": torch.reciprocal,
    "add_number": lambda x, n=0.0: x + n,
    "mul_number": lambda x, n=0.0: x * n,
    "leaky": lambda x, n=0.0: F.leaky_relu(x, n) if n else F.relu(x),
}
