"""Functions of single numbers of rows that are not gathered, remembered as steps.

``relu(x_j + edge_attr)`` makes an :class:`~pyg_scale.nn.elementwise.Elementwise` of features. A
linear map of sums of features, or of several put side by side by ``torch.cat``, is one of nodes'
features for each of them, as it distributes over sums. Any other function gathers the rows, and
computes the steps on them in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_scale.nn.elementwise import CONSTANT, IN_TORCH, Elementwise, Leaf, Node, at_place, tree_of
from pyg_scale.nn.lifted import EdgeIndices, Lifted, by_rule, row_of_view
from pyg_scale.nn.linear import apply_weight
from pyg_scale.nn.shapes import broadcast
from pyg_scale.ops import fused
from pyg_scale.ops.edge_formula import DTYPES
from pyg_scale.ops.edge_formula_source import EDGE


def by_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of torch on rows, not computed; ``None`` if it needs them.

    It is the rule for functions that :mod:`pyg_scale.nn.lifted` has none for.
    """
    if torch.is_autocast_enabled(_device_type(args)):
        return None
    if func in _SHAPING:
        return by_rule(_SHAPING[func], args, kwargs)
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
    return None


def stepwise(value: Lifted) -> Elementwise | None:
    """A product of features as steps; ``None`` if it cannot be."""
    if isinstance(value, Elementwise):
        return value
    tree = tree_of(value.edges, value) if _usable(value) else None
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
        value.edges.asked.not_fused = why
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
        x, lambda features: IN_TORCH[code](features, *([number] if number else []))
    )
    if on_nodes is not None:
        return on_nodes
    tree = tree_of(x.edges, x)
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


def _same(x: Elementwise) -> Elementwise:
    """The same steps again."""
    return Elementwise.of(x.edges, x.shape[1:], x, x.tree, x.parts)


def _operand(rows: Lifted, value: Any) -> Node | Leaf | None:
    if isinstance(value, Lifted):
        return tree_of(rows.edges, value) if value.dim() == rows.dim() else None
    if not isinstance(value, Tensor) or isinstance(value, EdgeIndices) or value.dtype != rows.dtype:
        return None
    if value.layout != torch.strided or _is_elsewhere(value, rows):
        return None
    if value.dim() == rows.dim() and value.size(0) == rows.edges.num_edges:
        return Leaf(value, EDGE)
    if value.dim() == rows.dim() and value.size(0) == 1:
        return Leaf(value.squeeze(0), CONSTANT)
    return Leaf(value, CONSTANT) if value.dim() < rows.dim() else None


def _is_elsewhere(value: Tensor, rows: Lifted) -> bool:
    return value.device != rows.device


# Linear maps ##############################################################################


def _cat(tensors: Any, dim: int = 0) -> Any:
    if not isinstance(tensors, (list, tuple)):
        return None
    rows = next((each for each in tensors if isinstance(each, Lifted)), None)
    if rows is None or not _usable(rows) or dim not in (-1, rows.dim() - 1):
        return None
    if rows.dim() < 2:
        return None
    for each in tensors:
        if isinstance(each, Lifted):
            if tree_of(rows.edges, each) is None:
                return None
        elif _operand(rows, each) is None:
            return None
        if each.shape[:-1] != rows.shape[:-1]:
            return None
    width = sum(each.size(-1) for each in tensors)
    return Elementwise.of(rows.edges, [*rows.shape[1:-1], width], rows, None, [*tensors])


def _select(rows: Any, key: Any) -> Any:
    """``rows[:, place]``."""
    if not _usable(rows) or rows.dim() < 3 or type(key) is not tuple:
        return None
    if not isinstance(rows, Elementwise) and not rows.is_product:
        return None
    if len(key) != 2 or key[0] != slice(None) or type(key[1]) is not int:
        return None
    if not -rows.size(1) <= key[1] < rows.size(1):
        return None
    place = key[1] % rows.size(1)
    made: Any = at_place(rows, place)
    made.viewed, made.column = rows, place
    return made


def _view(x: Any, *shape: Any) -> Any:
    if not isinstance(x, Elementwise) or not _usable(x) or x.is_narrow:
        return None
    row = row_of_view(x, shape)
    if row is None:
        return None
    made = _same(x) if row == x.shape[1:] else _reshaped(x, row)
    if made is not None:
        made.viewed = x
    return made


def _unsqueeze(x: Any, dim: int) -> Any:
    if not isinstance(x, Elementwise) or not _usable(x) or x.is_narrow:
        return None
    at = dim + x.dim() + 1 if dim < 0 else dim
    if not 0 < at <= x.dim():
        return None
    made = _reshaped(x, (*x.shape[1:at], 1, *x.shape[at:]))
    if made is not None:
        made.viewed = x
    return made


def _reshaped(x: Elementwise, row: tuple[int, ...]) -> Elementwise | None:
    """Rows of another shape; ``None`` if an input has a part of a row only."""
    if x.parts is not None:
        return None
    tree = _of_shape(x.tree, x.shape[1:], row)
    return None if tree is None else Elementwise.of(x.edges, row, x, tree)


def _of_shape(tree: Node | Leaf, before: Sequence[int], row: Sequence[int]) -> Node | Leaf | None:
    if isinstance(tree, Node):
        parts = [_of_shape(part, before, row) for part in tree.parts]
        found = tuple(part for part in parts if part is not None)
        return Node(tree.code, found, tree.number) if len(found) == len(parts) else None
    tensor, end = tree
    if end == CONSTANT:
        return Leaf(tensor.expand(before).reshape(row) if tensor.numel() > 1 else tensor, end)
    size = tensor.numel() // max(tensor.size(0), 1)
    if tensor.shape[1:] == before:
        return Leaf(tensor.reshape(-1, *row), end)
    return Leaf(tensor.reshape(-1, *[1] * len(row)), end) if size == 1 else None


def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum over channels of rows that are sums of inputs: one of each input, where it is."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(x, Elementwise) or not _usable(x) or x.parts is not None or dtype is not None:
        return None
    if dim not in (-1, x.dim() - 1) or x.dim() < (2 if keepdim else 3):
        return None
    row = x.shape[1:]
    tree = _summed(x.tree, row, torch.ones(row, dtype=x.dtype, device=x.device), x.edges.of_call)
    if tree is None:
        return None
    made = Elementwise.of(x.edges, (*row[:-1], 1), x, tree)
    return made if keepdim else _reshaped(made, tuple(row[:-1]))


def _summed(tree: Node | Leaf, row: Sequence[int], factor: Tensor, most: int) -> Any:
    """The sum over the last dimension of a tree times a factor that is the same for all edges.

    Args:
        tree: The steps.
        row: The shape of a row.
        factor: Of that shape.
        most: The number of edges: of more nodes nothing is computed.
    """
    if isinstance(tree, Leaf):
        tensor, end = tree
        if end == CONSTANT:
            return Leaf((tensor * factor).sum(-1, keepdim=True), end)
        if tensor.shape[1:] != row or tensor.size(0) > most:
            return None
        matrices = tensor.reshape(tensor.size(0), -1, row[-1])
        sums = torch.einsum("ehc,hc->eh", matrices, factor.reshape(-1, row[-1]))
        return Leaf(sums.view(-1, *row[:-1], 1), end)
    if tree.code == "mul":
        first, second = tree.parts
        if isinstance(first, Leaf) and first.end == CONSTANT:
            first, second = second, first
        if isinstance(second, Leaf) and second.end == CONSTANT:
            return _summed(first, row, factor * second.tensor, most)
        return None
    if tree.code == "add_number":
        inner = _summed(tree.parts[0], row, factor, most)
        numbers = Leaf(tree.number * factor.sum(-1, keepdim=True), CONSTANT)
        return None if inner is None else Node("add", (inner, numbers))
    if tree.code not in ("add", "sub", "neg", "mul_number"):
        return None
    parts = [_summed(part, row, factor, most) for part in tree.parts]
    return None if None in parts else Node(tree.code, tuple(parts), tree.number)


def _stack(tensors: Any, dim: int = 0) -> Any:
    """Rows of the same steps side by side in a new second dimension."""
    if not isinstance(tensors, (list, tuple)) or dim != 1:
        return None
    if not all(isinstance(each, Lifted) and _usable(each) for each in tensors):
        return None
    first = tensors[0]
    if any(each.shape != first.shape for each in tensors):
        return None
    trees = [tree_of(first.edges, each) for each in tensors]
    tree = None if None in trees else _stacked(trees)
    row = [len(tensors), *first.shape[1:]]
    return None if tree is None else Elementwise.of(first.edges, row, first, tree)


def _stacked(trees: list[Any]) -> Node | Leaf | None:
    first = trees[0]
    if any(type(each) is not type(first) for each in trees):
        return None
    if isinstance(first, Leaf):
        if any(t.end != first.end or t.tensor.shape != first.tensor.shape for t in trees):
            return None
        at = 0 if first.end == CONSTANT else 1
        return Leaf(torch.stack([each.tensor for each in trees], at), first.end)
    if any((each.code, each.number) != (first.code, first.number) for each in trees):
        return None
    parts: list[Any] = [
        _stacked([*part]) for part in zip(*(each.parts for each in trees), strict=True)
    ]
    return None if None in parts else Node(first.code, tuple(parts), first.number)


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
        tree = tree_of(x.edges, part) if isinstance(part, Lifted) else Leaf(part, EDGE)
        terms = None if tree is None else _terms(tree)
        if terms is None:
            return None
        for leaf, factor in terms:
            size = leaf.tensor.size(0)
            if leaf.end == CONSTANT or leaf.tensor.shape[1:] != (part.size(1),):
                return None
            if size > x.edges.of_call:
                return None  # a map of each edge is cheaper
            scaled = columns if factor == 1.0 else columns * factor
            key = id(leaf.tensor), leaf.end
            known = maps.get(key)
            maps[key] = leaf, scaled if known is None else known[1] + scaled
    tree = None
    for leaf, matrix in maps.values():
        mapped = Leaf(apply_weight(leaf.tensor, matrix, bias if tree is None else None), leaf.end)
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


_SHAPING: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.cat, torch.concat), _cat),
    torch.stack: _stack,
    Tensor.__getitem__: _select,
    **dict.fromkeys((torch.reshape, Tensor.reshape, Tensor.view), _view),
    **dict.fromkeys((torch.unsqueeze, Tensor.unsqueeze), _unsqueeze),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
}
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
