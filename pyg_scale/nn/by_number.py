"""Functions of single numbers of rows that are not gathered, remembered as steps.

``relu(x_j + edge_attr)`` makes an :class:`~pyg_scale.nn.elementwise.Elementwise` of features. A
linear map of sums of features, or of several put side by side by ``torch.cat``, is one of nodes'
features for each of them, as it distributes over sums. A sum over channels is a number for each
edge, which the op computes at once. Parts of rows, and rows side by side, are steps as the whole
is. Any other function gathers the rows, and computes the steps on them in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_scale.nn.elementwise import (
    CONSTANT,
    IN_TORCH,
    Elementwise,
    Leaf,
    Node,
    of_shape,
    part_of,
    steps_of,
    tree_of,
)
from pyg_scale.nn.lifted import EdgeIndices, Lifted, by_rule, row_of_view
from pyg_scale.nn.linear import apply_weight
from pyg_scale.nn.shapes import Slice, broadcast
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
    return value if isinstance(value, Elementwise) else steps_of(value) if _usable(value) else None


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
    if isinstance(x, Elementwise) and x.parts is not None:
        return _side_by_side(x, [_of_part(code, (part,), number) for part in x.apart()])
    tree = tree_of(x.edges, x)
    return (
        None
        if tree is None
        else Elementwise.of(x.edges, x.shape[1:], x, Node(code, (tree,), number))
    )


def _side_by_side(x: Elementwise, parts: list[Any]) -> Elementwise | None:
    """Rows of the shape of others, with other parts."""
    found = not any(part is None for part in parts)
    return Elementwise.of(x.edges, x.shape[1:], x, None, parts) if found else None


def _of_part(code: str, operands: Sequence[Any], number: float = 0.0) -> Any:
    """A step on parts of rows, or on tensors with a row per edge."""
    if not any(isinstance(each, Lifted) for each in operands):
        return IN_TORCH[code](*operands, *([number] if number else []))
    return _of_two(code, *operands) if len(operands) > 1 else _unary(code, operands[0], number)


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
    whole = next((x for x in (a, b) if isinstance(x, Elementwise) and x.parts is not None), None)
    if whole is not None:
        return _of_two_by_part(code, a, b, whole)
    first, second = _operand(rows, a), _operand(rows, b)
    if first is None or second is None:
        return None
    sizes = [[1] * (rows.dim() - x.dim()) + [*x.shape] for x in (a, b)]
    try:
        row = broadcast(sizes, 0)[1:]
    except RuntimeError:
        return None
    return Elementwise.of(edges, row, rows, Node(code, (first, second)))


def _of_two_by_part(code: str, a: Any, b: Any, whole: Elementwise) -> Any:
    """A step on the parts of ``whole`` and on those of the other operand at the same places."""
    parts, at = [], 0
    for each in whole.apart():
        size = each.size(-1)
        mine = [_columns(x, whole, at, size) for x in (a, b)]
        if any(x is None for x in mine):
            return None
        parts.append(_of_part(code, mine))
        at += size
    return _side_by_side(whole, parts)


def _columns(x: Any, whole: Elementwise, at: int, size: int) -> Any:
    """Columns of an operand; ``None`` if it does not fit ``whole``, or only other rows do."""
    if not isinstance(x, Tensor) or x.dim() > whole.dim():
        return None
    missing = whole.dim() - x.dim()
    if isinstance(x, Lifted) and (missing or not _usable(x)):
        return None
    if not isinstance(x, Lifted) and _operand(whole, x) is None:
        return None
    if any(n not in (1, m) for n, m in zip(x.shape, whole.shape[missing:], strict=True)):
        return None
    if not x.dim() or x.size(-1) == 1:
        return x
    return _narrow(x, -1, at, size) if isinstance(x, Lifted) else x.narrow(-1, at, size)


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
    tensors = [part for each in tensors for part in _parts(each)]
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


def _parts(rows: Any) -> list[Any]:
    """The parts of rows that are several side by side; else the rows."""
    is_several = isinstance(rows, Elementwise) and rows.parts is not None
    return rows.parts if is_several and not rows.is_changed else [rows]


def _get(rows: Any, key: Any) -> Any:
    """``rows[:, place]``, ``rows[:, first:last]`` and ``rows[..., first:last]``."""
    keys = [*key] if type(key) is tuple else [key]
    if not isinstance(rows, Lifted) or not all(k is ... or type(k) in (int, slice) for k in keys):
        return None
    if keys.count(...) == 1:
        at = keys.index(...)
        keys[at : at + 1] = [slice(None)] * (rows.dim() - len(keys) + 1)
    chosen = [at for at, each in enumerate(keys) if each != slice(None)]
    if len(chosen) != 1 or len(keys) > rows.dim():
        return None
    at = chosen[0]
    if type(keys[at]) is int:
        return _select(rows, at, keys[at])
    first, last, step = keys[at].indices(rows.size(at))
    return _narrow(rows, at, first, last - first) if step == 1 else None


def _select(rows: Any, dim: Any, place: Any) -> Any:
    at = _dimension(rows, dim)
    if not at or at == rows.dim() - 1 or type(place) is not int:
        return None
    size = rows.size(at)
    return _part(rows, Slice(at, place % size)) if -size <= place < size else None


def _narrow(rows: Any, dim: Any, start: Any, length: Any) -> Any:
    at = _dimension(rows, dim)
    if not at or type(start) is not int or type(length) is not int:
        return None
    first = start + rows.size(at) if start < 0 else start
    if length < 1 or not 0 <= first <= rows.size(at) - length:
        return None  # torch says what is wrong
    return _part(rows, Slice(at, first, length))


def _split(rows: Any, sizes: Any, dim: Any = 0) -> Any:
    at = _dimension(rows, dim)
    if not at:
        return None
    size = rows.size(at)
    if type(sizes) is int:
        sizes = [min(sizes, size - first) for first in range(0, size, sizes)] if sizes > 0 else []
    if not all(type(each) is int and each > 0 for each in sizes) or sum(sizes) != size or not size:
        return None
    firsts = [sum(sizes[:k]) for k in range(len(sizes))]
    return tuple(_part(rows, Slice(at, *each)) for each in zip(firsts, sizes, strict=True))


def _chunk(rows: Any, chunks: Any, dim: Any = 0) -> Any:
    at = _dimension(rows, dim)
    return _split(rows, -(-rows.size(at) // chunks), at) if at and chunks > 0 else None


def _glu(rows: Any, dim: Any = -1) -> Any:
    at = _dimension(rows, dim)
    if not at or rows.size(at) % 2:
        return None
    on_nodes = _on_nodes(rows, lambda features: F.glu(features, at))
    if on_nodes is not None:
        return on_nodes
    halves = _split(rows, rows.size(at) // 2, at)
    return None if halves is None else _of_two("mul", halves[0], _unary("sigmoid", halves[1]))


def _dimension(rows: Any, dim: Any) -> int:
    """The dimension, not negative, of rows that can be cut there; else 0."""
    if not _usable(rows) or type(dim) is not int or not -rows.dim() <= dim < rows.dim():
        return 0
    return 0 if stepwise(rows) is None else dim % rows.dim()


def _part(rows: Any, taken: Slice) -> Any:
    """A view of a part of every row."""
    made: Any = part_of(rows, taken)
    made.viewed, made.taken = rows, taken
    return made


def _view(x: Any, *shape: Any) -> Any:
    if not isinstance(x, Elementwise) or not _usable(x) or x.is_narrow:
        return None
    row = row_of_view(x, shape)
    if row is None or not x.can_be_viewed(row):
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
    tree = of_shape(x.tree, x.shape[1:], row)
    return None if tree is None else Elementwise.of(x.edges, row, x, tree)


def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum over channels: of sums of inputs it is one of each input, else one of each edge."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(x, Lifted) or x.dim() < 2 or dim not in (-1, x.dim() - 1):
        return None
    steps = stepwise(x) if dtype is None and _usable(x) else None
    if steps is None or steps.parts is not None:
        return None
    row = steps.shape[1:]
    tree = _summed(steps.tree, row, steps.reads()[0].new_ones(row), x.edges.of_call)
    if tree is not None:
        made = Elementwise.of(x.edges, (*row[:-1], 1), x, tree)
        if keepdim:
            return made
        return _reshaped(made, row[:-1]) if len(row) > 1 else made.gathered().squeeze(-1)
    sums = steps.summed_rows()
    return sums.unsqueeze(-1) if sums is not None and keepdim else sums


def _mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    sums = _sum(x, dim, keepdim, dtype=dtype)
    if sums is None:
        return None
    factor = 1 / x.size(-1)
    return _unary("mul_number", sums, factor) if isinstance(sums, Lifted) else sums * factor


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
    Tensor.__getitem__: _get,
    **dict.fromkeys((torch.select, Tensor.select), _select),
    **dict.fromkeys((torch.narrow, Tensor.narrow), _narrow),
    **dict.fromkeys((torch.split, Tensor.split), _split),
    **dict.fromkeys((torch.chunk, Tensor.chunk), _chunk),
    F.glu: _glu,
    **dict.fromkeys((torch.reshape, Tensor.reshape, Tensor.view), _view),
    **dict.fromkeys((torch.unsqueeze, Tensor.unsqueeze), _unsqueeze),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
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
