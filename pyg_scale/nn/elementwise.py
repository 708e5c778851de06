"""Messages that compute each number from the numbers at the same place of their inputs.

A :class:`~pyg_scale.nn.lifted.Lifted` message stays a product. Other functions of single numbers,
such as ``relu(x_j + edge_attr)``, make an :class:`Elementwise` of it: it remembers the steps, and
one compiled op computes and reduces them (:mod:`pyg_scale.ops.edge_formula`). A linear map of sums
of features, or of several put side by side by ``torch.cat``, is one of nodes' features for each of
them, as it distributes over sums. Any other function gathers the rows, and computes the steps on
them in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_scale.nn.edges import DESTINATION, SOURCE, Edges, gather
from pyg_scale.nn.lifted import EdgeIndices, Lifted, by_rule
from pyg_scale.nn.shapes import broadcast, leading
from pyg_scale.ops import fused
from pyg_scale.ops.edge_formula import (
    DTYPES,
    Formula,
    Reduction,
    reduce_formula,
    why_not_on_cuda,
)
from pyg_scale.ops.edge_formula_source import EDGE, NEIGHBOR, OWN

_CONSTANT = 3
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

    It is made by :func:`elementwise`. Edges are in the first dimension.
    """

    tree: Node | Leaf
    parts: list[Lifted | Tensor] | None
    """The tensors put side by side in the last dimension, if that is the last step."""

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
        made.row, made.viewed, made._value, made.tree, made.parts = None, None, None, tree, parts
        return made

    @property
    def is_product(self) -> bool:
        """False."""
        return False

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
        if self.parts is not None or self.is_changed or not fused.usable(self.edges.graph.indices):
            return None
        graph, row = self.edges.graph, self.shape[1:]
        width = math.prod(row)
        made = _Inputs(self.edges, row)
        factor: float | int = scale if isinstance(scale, float) else made.constant(scale)
        found = made.slots(self.tree)
        if found is None or width == 0 or not made.inputs or not graph.num_edges:
            return None
        formula = Formula(made.ends)
        slot = found(formula)
        if not graph.indices.is_cpu and (why := why_not_on_cuda(formula, graph.device)):
            self.edges.not_fused = why
            return None
        reduction = Reduction(formula, slot, "sum" if how == "mean" else how, width, factor)
        out = reduce_formula(graph, reduction, made.inputs)
        if how == "mean":
            out = out / graph.indptr.diff().clamp(min=1).to(out.dtype).view(-1, 1)
        return out.view(graph.num_dst, *row)


class _Inputs:
    """The inputs of a formula as matrices, each once."""

    def __init__(self, edges: Edges, row: Sequence[int]) -> None:
        self.edges, self.row = edges, row
        self.inputs: list[Tensor] = []
        self.ends: list[int] = []
        self._known: dict[tuple[int, int], int] = {}

    def slots(self, tree: Node | Leaf) -> Callable[[Formula], int] | None:
        """A function that adds the steps of a tree to a formula; ``None`` if a shape is another."""
        for leaf in _leaves(tree):
            if self.slot(leaf) is None:
                return None

        def build(formula: Formula) -> int:
            made: dict[int, int] = {}

            def add(node: Node | Leaf) -> int:
                if isinstance(node, Leaf):
                    slot = self.slot(node)
                    assert slot is not None
                    return slot
                if id(node) not in made:
                    slots = [add(part) for part in node.parts]
                    second = slots[1] if len(slots) > 1 else None
                    made[id(node)] = formula.add(node.code, slots[0], second, node.number)
                return made[id(node)]

            return add(tree)

        return build

    def slot(self, leaf: Leaf) -> int | None:
        """The slot of an input; ``None`` if its rows are of another shape."""
        key = id(leaf.tensor), leaf.end
        if key not in self._known:
            shape = [*leaf.tensor.shape[1:]]
            if leaf.end == _CONSTANT:
                shape = [*leaf.tensor.shape]
            shape = [1] * (len(self.row) - len(shape)) + shape
            columns = leading(shape, self.row)
            if columns is None:
                return None
            if leaf.end == _CONSTANT:  # so that torch adds up the gradients of destinations
                matrix = leaf.tensor.reshape(1, columns).expand(self.edges.graph.num_dst, columns)
            else:
                matrix = leaf.tensor.reshape(leaf.tensor.size(0), columns)
            self._known[key] = len(self.inputs)
            self.inputs.append(matrix)
            self.ends.append(OWN if leaf.end == _CONSTANT else leaf.end)
        return self._known[key]

    def constant(self, tensor: Tensor) -> int:
        """Minus one less the slot of a tensor that is the same for all edges, of a row or one."""
        slot = self.slot(Leaf(tensor, _CONSTANT))
        return 0 if slot is None else -1 - slot


# Trees ####################################################################################


def _leaves(tree: Any) -> list[Leaf]:
    if isinstance(tree, Leaf):
        return [tree]
    return [leaf for part in tree.parts for leaf in _leaves(part)]


def _tree(edges: Edges, value: Any) -> Node | Leaf | None:
    """The steps behind an operand; ``None`` if it is not one of rows of these edges."""
    if isinstance(value, Elementwise):
        same = value.edges is edges and value.parts is None and not value.is_changed
        return value.tree if same else None
    if isinstance(value, Lifted):
        if value.edges is not edges or not value.is_product or value.dim_of_edges != 0:
            return None
        factors = [Leaf(x, _END[k]) for k, x in enumerate(value.ends) if x is not None]
        if value.weight is not None:
            end = EDGE if value.weight.size(0) == edges.num_edges else _CONSTANT
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
            value = _IN_TORCH[tree.code](*parts, *([tree.number] if tree.number else []))
        known[id(tree)] = value
    return known[id(tree)]


_IN_TORCH: dict[str, Callable[..., Tensor]] = {
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


# Rules ####################################################################################


def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of torch on rows, not computed; ``None`` if it needs them.

    It is the rule for functions that :mod:`pyg_scale.nn.lifted` has none for.
    """
    if torch.is_autocast_enabled(_device_type(args)):
        return None
    if func is torch.cat or func is torch.concat:
        return by_rule(_cat, args, kwargs)
    if func is F.linear:
        return by_rule(_linear, args, kwargs)
    if func in _ONE:
        return by_rule(_of_one, (_ONE[func], *args), kwargs)
    if func in _TWO and len(args) == 2 and not kwargs:
        code, is_turned = _TWO[func]
        return _of_two(code, *(reversed(args) if is_turned else args))
    if func is F.leaky_relu:
        slope = kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01)
        return None if kwargs.get("inplace") or len(args) > 2 else _unary("leaky", args[0], slope)
    if func is F.dropout and not kwargs.get("inplace"):
        is_off = kwargs.get("training") is False or kwargs.get("p") == 0
        return args[0] if is_off and _usable(args[0]) else None
    if func in _VIEWS and isinstance(args[0], Elementwise) and not args[0].is_changed:
        return (
            _same(args[0], args[0]) if [*args[1:]] in ([args[0].shape], [*args[0].shape]) else None
        )
    return None


def stepwise(value: Lifted) -> Elementwise | None:
    """A product of features as steps; ``None`` if it cannot be."""
    if isinstance(value, Elementwise):
        return value
    tree = _tree(value.edges, value) if _usable(value) else None
    return None if tree is None else Elementwise.of(value.edges, value.shape[1:], value, tree)


def _device_type(args: tuple[Any, ...]) -> str:
    """The device of the rows among operands, of which there are some."""
    operands = args[0] if args and isinstance(args[0], (tuple, list)) else args
    return next((each.device.type for each in operands if isinstance(each, Lifted)), "cpu")


def _usable(value: Any) -> bool:
    if (
        not isinstance(value, Lifted)
        or value.dtype not in DTYPES
        or value.dim_of_edges != 0
        or value.edges.num_edges == 0
        or value.is_changed
    ):
        return False
    if value.device.type != "cpu" and (why := fused.why_not_generated(value.device)):
        value.edges.not_fused = why
        return False
    return True


def _of_one(code: str, x: Any, *args: Any, **kwargs: Any) -> Any:
    if code == "square":
        return None if args or kwargs else _of_two("mul", x, x)
    if code == "silu":
        inner = None if args or kwargs.get("inplace") else _unary("sigmoid", x)
        return None if inner is None else _of_two("mul", x, inner)
    if code == "pow":
        is_square = len(args) == 1 and isinstance(args[0], (int, float)) and args[0] == 2
        return _of_two("mul", x, x) if is_square and not kwargs else None
    plain = {"inplace": False} if code == "leaky" else {"beta": 1, "threshold": 20}
    if code in ("leaky", "softplus"):
        names = [*plain]
        given = {**plain, **dict(zip(names, args)), **kwargs}
        return _unary(code, x) if given == plain else None
    return None if args or kwargs else _unary(code, x)


def _unary(code: str, x: Any, number: float = 0.0) -> Any:
    if not _usable(x):
        return None
    on_nodes = _on_nodes(
        x, lambda features: _IN_TORCH[code](features, *([number] if number else []))
    )
    if on_nodes is not None:
        return on_nodes
    tree = _tree(x.edges, x)
    return (
        None
        if tree is None
        else Elementwise.of(x.edges, x.shape[1:], x, Node(code, (tree,), number))
    )


def _on_nodes(x: Lifted, function: Callable[[Tensor], Tensor]) -> Lifted | None:
    """The rows of a function of nodes' features, if ``x`` are nothing else and nodes are fewer."""
    if isinstance(x, Elementwise) or not x.is_product or x.weight is not None:
        return None
    ends = [k for k, each in enumerate(x.ends) if each is not None]
    if len(ends) != 1:
        return None
    features = x.ends[ends[0]]
    if features is None or features.size(0) > x.edges.of_call:
        return None
    made: list[Tensor | None] = [None, None]
    made[ends[0]] = function(features)
    return Lifted(x.edges, 0, made, None)


def _of_two(code: str, a: Any, b: Any) -> Any:
    rows = a if isinstance(a, Lifted) else b
    if not _usable(rows):
        return None
    edges = rows.edges
    if isinstance(b, (int, float)) and not isinstance(b, bool):
        if code == "div":
            return _unary("mul_number", a, 1 / b) if b else None
        codes = {"add": ("add_number", b), "sub": ("add_number", -b), "mul": ("mul_number", b)}
        return _numbered(a, *codes[code]) if code in codes else None
    if isinstance(a, (int, float)) and not isinstance(a, bool):
        if code in ("add", "mul"):
            return _numbered(b, f"{code}_number", a)
        turned = (
            _unary("neg" if code == "sub" else "reciprocal", b) if code in ("sub", "div") else None
        )
        if turned is None:
            return None
        return _of_two("add" if code == "sub" else "mul", turned, a)
    first, second = _operand(rows, a), _operand(rows, b)
    if first is None or second is None:
        return None
    sizes = [[1] * (rows.dim() - x.dim()) + [*x.shape] for x in (a, b)]
    try:
        row = broadcast(sizes, 0)[1:]
    except RuntimeError:
        return None
    return Elementwise.of(edges, row, rows, Node(code, (first, second)))


def _numbered(x: Any, code: str, number: float) -> Any:
    if not _usable(x):
        return None
    if number != (0 if code == "add_number" else 1):
        return _unary(code, x, float(number))
    # The same numbers, but rows of their own: either may be changed in place.
    if isinstance(x, Elementwise):
        return _same(x)
    return Lifted(x.edges, x.dim_of_edges, x.ends, x.weight) if x.is_product else None


def _same(x: Elementwise, viewed: Lifted | None = None) -> Elementwise:
    """The same steps again."""
    made = Elementwise.of(x.edges, x.shape[1:], x, x.tree, x.parts)
    made.viewed = viewed
    return made


def _operand(rows: Lifted, value: Any) -> Node | Leaf | None:
    if isinstance(value, Lifted):
        return _tree(rows.edges, value) if value.dim() == rows.dim() else None
    if not isinstance(value, Tensor) or isinstance(value, EdgeIndices) or value.dtype != rows.dtype:
        return None
    if value.layout != torch.strided or _is_elsewhere(value, rows):
        return None
    if value.dim() == rows.dim() and value.size(0) == rows.edges.num_edges:
        return Leaf(value, EDGE)
    if value.dim() == rows.dim() and value.size(0) == 1:
        return Leaf(value.squeeze(0), _CONSTANT)
    return Leaf(value, _CONSTANT) if value.dim() < rows.dim() else None


def _is_elsewhere(value: Tensor, rows: Lifted) -> bool:
    return value.device != rows.device


# Linear maps ##############################################################################


def _cat(tensors: Any, dim: int = 0) -> Any:
    if not isinstance(tensors, (list, tuple)):
        return None
    rows = next((each for each in tensors if isinstance(each, Lifted)), None)
    if rows is None or not _usable(rows) or rows.dim() != 2 or dim not in (-1, 1):
        return None
    for each in tensors:
        if isinstance(each, Lifted):
            if _tree(rows.edges, each) is None:
                return None
        elif _operand(rows, each) is None or each.dim() != 2 or each.size(0) != rows.size(0):
            return None
    width = sum(each.size(1) for each in tensors)
    return Elementwise.of(rows.edges, [width], rows, None, [*tensors])


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """A map of rows that are sums of inputs, as a map of each input."""
    if not isinstance(x, Elementwise) or not _usable(x) or x.dim() != 2:
        return None
    if not isinstance(weight, Tensor) or isinstance(weight, Lifted) or weight.dtype != x.dtype:
        return None
    if weight.dim() != 2 or weight.size(1) != x.size(1):
        return None
    maps: dict[tuple[int, int], tuple[Leaf, Tensor]] = {}
    at = 0
    for part in [x] if x.parts is None else x.parts:
        columns = weight[:, at : at + part.size(1)]
        at += part.size(1)
        tree = _tree(x.edges, part) if isinstance(part, Lifted) else Leaf(part, EDGE)
        terms = None if tree is None else _terms(tree)
        if terms is None:
            return None
        for leaf, factor in terms:
            size = leaf.tensor.size(0)
            if leaf.end == _CONSTANT or leaf.tensor.shape[1:] != (part.size(1),):
                return None
            if size > x.edges.of_call:
                return None  # a map of each edge is cheaper
            scaled = columns if factor == 1.0 else columns * factor
            key = id(leaf.tensor), leaf.end
            known = maps.get(key)
            maps[key] = leaf, scaled if known is None else known[1] + scaled
    tree = None
    for leaf, matrix in maps.values():
        mapped = Leaf(F.linear(leaf.tensor, matrix, bias if tree is None else None), leaf.end)
        tree = mapped if tree is None else Node("add", (tree, mapped))
    return Elementwise.of(x.edges, [weight.size(0)], x, tree)


def _terms(tree: Node | Leaf) -> list[tuple[Leaf, float]] | None:
    """The inputs of which a tree is the sum, each with a factor; ``None`` if it is no such sum."""
    if isinstance(tree, Leaf):
        return [(tree, 1.0)]
    if tree.code in ("add", "sub"):
        first, second = map(_terms, tree.parts)
        if first is None or second is None:
            return None
        sign = 1.0 if tree.code == "add" else -1.0
        return [*first, *((leaf, sign * factor) for leaf, factor in second)]
    if tree.code in ("neg", "mul_number"):
        inner = _terms(tree.parts[0])
        sign = -1.0 if tree.code == "neg" else tree.number
        return None if inner is None else [(leaf, sign * factor) for leaf, factor in inner]
    return None


# Functions of torch #######################################################################


def _named(*names: str) -> list[Any]:
    spaces = (torch, Tensor, F)
    return [getattr(space, name) for space in spaces for name in names if hasattr(space, name)]


_VIEWS = {torch.reshape, Tensor.reshape, Tensor.view}
_ONE: dict[Any, str] = {
    **{
        func: name
        for name in ("neg", "abs", "exp", "log", "sqrt", "tanh", "sigmoid", "softplus")
        for func in _named(name)
    },
    **{func: name for name in ("reciprocal", "square", "silu", "pow") for func in _named(name)},
    **dict.fromkeys(_named("negative"), "neg"),
    **dict.fromkeys(_named("relu"), "leaky"),
}
_TWO: dict[Any, tuple[str, bool]] = {
    **dict.fromkeys(_named("add"), ("add", False)),
    **dict.fromkeys(_named("sub", "subtract"), ("sub", False)),
    **dict.fromkeys(_named("mul", "multiply"), ("mul", False)),
    **dict.fromkeys(_named("div", "divide", "true_divide"), ("div", False)),
    **dict.fromkeys(_named("maximum"), ("max", False)),
    **dict.fromkeys(_named("minimum"), ("min", False)),
    **dict.fromkeys(_named("rsub", "__rsub__"), ("sub", True)),
    **dict.fromkeys(_named("__rdiv__"), ("div", True)),
}
