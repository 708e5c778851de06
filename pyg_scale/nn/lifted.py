"""Features of nodes as edges see them, not gathered: PyG's ``x_j`` and ``x_i``, without their rows.

PyG gathers a row per edge before it calls a layer's ``message``. :class:`Lifted` stands for these
rows: it is a tensor of their shape that knows the nodes' features instead. The layer's own code
runs on it. Steps that keep the form ``weight of the edge * features of its source * features of its
destination`` change the nodes' features or the weights alone, and one fused op reduces the result,
which reads the features of neighbours as it goes. Any other step gathers the rows, as PyG would.

The layer sees the ends of its edges as :class:`EdgeIndices`: what it gathers and scatters with them
runs on grouped edges too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_scale.nn.edges import (
    DESTINATION,
    SOURCE,
    Edges,
    dot_at_ends,
    gather,
)
from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.linear import apply_weight
from pyg_scale.nn.shapes import Slice, aligned_with, leading, product_shape
from pyg_scale.ops import fused
from pyg_scale.ops.aggregate import FLOATS, aggregate_exactly
from pyg_scale.ops.lazy_rows import METADATA, LazyRows

INDEX_SELECT = (torch._C._VariableFunctions.index_select, Tensor.index_select)
"""``torch.index_select``, in whose place PyG has put its own, which calls the first of these."""


class Lifted(Tensor):
    """A row per edge, not gathered: a product of nodes' features and of a weight per edge.

    Args:
        edges: The edges.
        dim: The dimension of edges.
        ends: Features of sources and of destinations, each with nodes where the result has edges,
            and of as many dimensions; ``None`` is 1.
        weight: A factor of as many dimensions, which has edges in ``dim``; ``None`` is 1.
        row: The shape of each row at the end, if it is another view of the product; edges are then
            in the first dimension.
        viewed: The rows that these are a view of: gathered, both share their memory.
        summed: A dimension of the product, if the rows are sums over it.
    """

    edges: Edges
    dim_of_edges: int
    ends: list[Tensor | None]
    weight: Tensor | None
    row: tuple[int, ...] | None
    viewed: Lifted | None
    summed: int | None
    taken: Slice | None = None
    """The part of the rows that is viewed, if these are not a view of all."""
    _value: Tensor | None
    _made_at: int

    @staticmethod
    def __new__(
        cls,
        edges: Edges,
        dim: int,
        ends: Sequence[Tensor | None],
        weight: Tensor | None,
        row: tuple[int, ...] | None = None,
        viewed: Lifted | None = None,
        summed: int | None = None,
    ) -> Lifted:
        """See :class:`Lifted`."""
        features = next(end for end in ends if end is not None)
        if row is None:
            shape = product_shape(edges.num_edges, dim, ends, weight)
            if summed is not None:
                del shape[summed]
        else:
            shape = [edges.num_edges, *row]
        made: Lifted = Tensor._make_wrapper_subclass(
            cls, shape, dtype=features.dtype, device=features.device
        )
        made.edges, made.dim_of_edges, made.ends, made.weight = edges, dim, list(ends), weight
        made.row, made.viewed, made.summed, made._value = row, viewed, summed, None
        return made

    def gathered(self) -> Tensor:
        """The rows, gathered once."""
        if self._value is None:
            if self.viewed is not None:
                whole, part = self.viewed.gathered(), self.taken
                value = whole.view(self.shape) if part is None else part.of(whole, whole.dim())
            else:
                self.edges.asked.gathered = max(self.edges.asked.gathered, self.numel())
                value = self.computed().contiguous()  # of which every view is one of its memory
            self._value, self._made_at = value, _version(value)
        return self._value

    def computed(self) -> Tensor:
        """The rows, in memory of their own."""
        value: Tensor | None = None
        for end, features in enumerate(self.ends):
            if features is not None:
                rows = gather(self.edges, features, self.dim_of_edges, end)
                value = rows if value is None else value * rows
        assert value is not None
        value = value if self.weight is None else value * self.weight
        return value if self.summed is None else value.sum(self.summed)

    def reduced(self, how: str) -> Tensor | None:
        """The rows reduced at their destinations by one fused op; ``None`` if it cannot.

        Args:
            how: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        """
        source, destination = self.ends
        if self.is_changed or source is None:
            return None
        if how not in ("sum", "mean") and (destination is not None or self.summed is not None):
            return None
        dim, weight, graph = self.dim_of_edges, self.weight, self.edges.graph
        shape = product_shape(self.edges.num_edges, dim, self.ends, weight)
        row = shape[:dim] + shape[dim + 1 :]
        x = source.movedim(dim, 0).expand(-1, *row)
        if weight is None:
            x = x.reshape(x.size(0), math.prod(row))
        else:
            weight = weight.movedim(dim, 0)
            heads = leading(weight.shape[1:], row)
            if heads is None:
                return None
            weight = weight.reshape(-1, heads)
            x = x.reshape(x.size(0), heads, math.prod(row) // max(heads, 1))
            if heads == 1:
                x, weight = x.squeeze(1), weight.squeeze(1)
        out = aggregate_exactly(graph, x, weight, how)
        out = out.reshape(graph.num_dst, *row).movedim(0, dim)
        if destination is not None:
            out = out * destination
        if self.summed is not None:
            return out.sum(self.summed)
        return out if self.row is None else out.reshape(out.size(0), *self.row)

    def can_be_viewed(self, row: tuple[int, ...]) -> bool:
        """Return True if rows of another shape share the memory of these, as in torch.

        Of a part of every row they may not.
        """
        try:
            self._layout().view(self.shape[0], *row)
        except RuntimeError:
            return False
        return True

    def _layout(self) -> Tensor:
        """The shape and the strides of these rows, gathered."""
        if self.viewed is None:
            return torch.empty(self.shape, device="meta")
        whole = self.viewed._layout()
        return whole.view(self.shape) if self.taken is None else self.taken.of(whole, whole.dim())

    def settle(self) -> None:
        """Gather the rows now, for good: what they are computed from is about to change."""
        with torch.set_grad_enabled(self.edges.grad_mode):
            self.gathered()
        self.whole()._made_at = -1

    @property
    def value(self) -> Tensor | None:
        """The rows, if they are gathered."""
        return self._value

    def whole(self) -> Lifted:
        """The rows that these are a view of; themselves if they are no view."""
        return self if self.viewed is None else self.viewed.whole()

    def reads(self) -> list[Tensor]:
        """The tensors that the rows are computed from."""
        return [each for each in (*self.ends, self.weight) if each is not None]

    @property
    def is_changed(self) -> bool:
        """True if the rows are only what was gathered, such as those changed in place since."""
        whole = self.whole()
        return whole._value is not None and _version(whole._value) != whole._made_at

    @property
    def is_product(self) -> bool:
        """True if the rows are the product, neither changed, summed nor of another shape."""
        return self.row is None and self.summed is None and not self.is_changed

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch on the nodes' features if that is the same, else on the rows."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {})) if func in METADATA else _run(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse what did not come by way of a function of torch: there are no rows."""
        raise NotFused(f"features of edges are read by {func}")


def _version(rows: Tensor) -> int:
    return 0 if rows.is_inference() else rows._version  # those have none


class EdgeIndices(Tensor):
    """``edge_index`` of a call or one end of its edges, which knows the grouped edges."""

    edges: Edges
    row: int | None

    @classmethod
    def of(cls, plain: Tensor, edges: Edges, row: int | None = None) -> EdgeIndices:
        """The edge list, or a view of one row of it."""
        made = plain.as_subclass(cls)
        made.edges, made.row = edges, row
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch on grouped edges if there is a rule, else on the plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return _run(func, args, kwargs)


def lift(edges: Edges, features: Tensor, row: int) -> Tensor:
    """The features at those ends of edges that are a row of ``edge_index``.

    Args:
        edges: The edges.
        features: Nodes are in dimension ``edges.node_dim``.
        row: 0 or 1.

    Raises:
        NotFused: If there are no kernels for the device.
    """
    features = features.rows() if isinstance(features, LazyRows) else features
    dim = edges.node_dim + features.dim() if edges.node_dim < 0 else edges.node_dim
    if not features.is_cpu and not (features.is_cuda and fused.usable(features)):
        raise NotFused(f"there are no kernels for device {features.device}")
    if type(features) not in (Tensor, torch.nn.Parameter) or features.dtype not in FLOATS:
        return gather(edges, features, dim, edges.end(row))
    ends: list[Tensor | None] = [None, None]
    ends[edges.end(row)] = features
    made = Lifted(edges, dim, ends, None)
    edges.asked.widest = max(edges.asked.widest, made.numel())
    return made


def rows(message: Tensor) -> Tensor:
    """The rows of a message, gathered now if they are not yet."""
    if isinstance(message, Lifted):
        message.edges.asked.needed_by = message.edges.asked.needed_by or "aggregation"
        return message.gathered()
    return message


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run a function of torch by its rule, or else on plain tensors."""
    kwargs = kwargs or {}
    operands = args[0] if args and isinstance(args[0], (list, tuple)) else args
    for each in (*operands, *kwargs.values()) if kwargs else operands:
        if isinstance(each, Lifted) and each.edges.grad_mode != torch.is_grad_enabled():
            # Such as an autograd.Function, whose backward would not reach the nodes.
            raise NotFused("features of edges are read with gradients disabled")
    rule = _RULES.get(func)
    if rule is not None:
        found = by_rule(rule, args, kwargs)
        if found is not None:
            return found
    edges = next((x.edges for x in operands if isinstance(x, (Lifted, EdgeIndices))), None)
    for other in () if edges is None else edges.other_rules:
        found = other(func, args, kwargs)
        if found is not None:
            return found

    def plain(each: Any) -> Any:
        if isinstance(each, Lifted):
            asked = each.edges.asked
            asked.needed_by = asked.needed_by or getattr(func, "__name__", str(func))
            return each.gathered()
        if isinstance(each, EdgeIndices):
            return each.as_subclass(Tensor)
        return tree_map(plain, each) if isinstance(each, _NESTED) else each

    return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


_NESTED = (list, tuple, dict)


def by_rule(rule: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a rule; ``None`` also if it lacks an argument, such as ``out``."""
    try:
        return rule(*args, **kwargs)
    except TypeError as error:
        trace = error.__traceback__
        if trace is None or trace.tb_next is not None:  # raised in the rule
            raise
        return None


# Rules of functions of features ###########################################################
#
# A rule returns the result of a function of torch, or None if the function needs plain tensors.


def _multiply(a: Any, b: Any) -> Any:
    if not isinstance(a, Lifted):
        a, b = b, a
    if not isinstance(a, Lifted) or not a.is_product:
        return None
    if isinstance(b, Lifted):
        return _product(a, b) if b.is_product else None
    if isinstance(b, (int, float)):
        return _scaled(a, b)
    if not isinstance(b, Tensor) or torch.result_type(a.reads()[0], b) != a.dtype:
        return None
    factor = b if b.is_floating_point() else b.to(a.dtype)
    if factor.dim() == 0:
        return _scaled(a, factor)
    aligned = aligned_with(factor, a.shape)
    if aligned is None:
        return None
    if aligned.size(a.dim_of_edges) == 1:
        return _on_nodes(a, lambda x: x * aligned)
    weight = aligned if a.weight is None else a.weight * aligned
    return Lifted(a.edges, a.dim_of_edges, a.ends, weight)


def _divide(a: Any, b: Any) -> Any:
    if not isinstance(a, Lifted) or isinstance(b, Lifted):
        return None
    if isinstance(b, (int, float)):
        return None if b == 0 else _multiply(a, 1 / b)
    if not isinstance(b, Tensor) or not b.is_floating_point():
        return None
    return _multiply(a, b.reciprocal())


def _add(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    """The sum with a number: other terms need rows."""
    if not isinstance(a, Lifted):
        a, b = b, a
    return None if not isinstance(b, (int, float)) or alpha != 1 else _by_node(torch.add)(a, b)


def _negate(a: Lifted) -> Any:
    return _scaled(a, -1) if isinstance(a, Lifted) and a.is_product else None


def _product(a: Lifted, b: Lifted) -> Lifted | None:
    same = a.edges is b.edges and a.dim() == b.dim() and a.dim_of_edges == b.dim_of_edges
    if not same or a.dtype != b.dtype:
        return None
    ends = [_times(x, y) for x, y in zip(a.ends, b.ends, strict=True)]
    return Lifted(a.edges, a.dim_of_edges, ends, _times(a.weight, b.weight))


def _times(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x * y


def _scaled(a: Lifted, factor: Any) -> Lifted:
    if a.weight is not None:
        return Lifted(a.edges, a.dim_of_edges, a.ends, a.weight * factor)
    return _on_nodes(a, lambda x: x * factor)


def _on_nodes(a: Lifted, function: Callable[[Tensor], Tensor]) -> Lifted:
    """Apply a function to the features of nodes, of sources if there are any."""
    end = SOURCE if a.ends[SOURCE] is not None else DESTINATION
    ends = list(a.ends)
    features = ends[end]
    assert features is not None
    ends[end] = function(features)
    return Lifted(a.edges, a.dim_of_edges, ends, a.weight)


def features_of(a: Any) -> Tensor | None:
    """The features of nodes of one end, if the rows are these and nothing else."""
    if not isinstance(a, Lifted) or not a.is_product or a.weight is not None:
        return None
    source, destination = a.ends
    if source is not None and destination is not None:
        return None
    return source if destination is None else destination


def _by_node(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a function of every row by itself: it is computed for nodes, once."""

    def rule(a: Any, *args: Any, **kwargs: Any) -> Any:
        features = features_of(a)
        if features is None or features.size(a.dim_of_edges) > a.edges.of_call:
            return None
        if any(isinstance(each, (Lifted, EdgeIndices)) for each in (*args, *kwargs.values())):
            return None
        return _on_nodes(a, lambda x: function(x, *args, **kwargs))

    return rule


def _linear(a: Any, weight: Any, bias: Any = None) -> Any:
    return None if _is_last(a) else _by_node(apply_weight)(a, weight, bias)


def _matmul(a: Any, matrix: Any) -> Any:
    """The product of each row with a matrix or a vector that all share."""
    if not isinstance(matrix, Tensor) or matrix.dim() > 2 or _is_last(a):
        return None
    return _by_node(torch.matmul)(a, matrix)


def _is_last(a: Any) -> bool:
    """Return True if there are edges in the last dimension."""
    return isinstance(a, Lifted) and a.dim_of_edges == a.dim() - 1


def _view(a: Any, *shape: Any) -> Any:
    if not isinstance(a, Lifted) or a.is_changed or a.summed is not None:
        return None
    row = row_of_view(a, shape) if any(end is not None for end in a.ends) else None
    if row is None or not a.can_be_viewed(row):
        return None
    if features_of(a) is not None:
        ends = [None if end is None else end.reshape(end.size(0), *row) for end in a.ends]
        return Lifted(a.edges, 0, ends, None, viewed=a)
    return Lifted(a.edges, 0, a.ends, a.weight, row, a)


def row_of_view(a: Lifted, shape: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The shape of each row of a view of rows; ``None`` if edges are not in its first dimension.

    Args:
        a: The rows.
        shape: The arguments of ``view``.
    """
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else [*shape]
    row, size = a.numel() // max(a.edges.num_edges, 1), a.edges.num_edges
    if not size or not sizes or a.dim_of_edges != 0:
        return None
    if not all(isinstance(each, int) for each in sizes) or sizes[0] not in (-1, size):
        return None
    rest = sizes[1:]
    if -1 in rest and sizes[0] != -1:
        known = -math.prod(rest)
        rest = [row // known if each == -1 and known > 0 else each for each in rest]
    return None if math.prod(rest) != row or min(rest, default=1) < 1 else tuple(rest)


def _unsqueeze(a: Any, dim: int) -> Any:
    if not isinstance(a, Lifted) or not a.is_product:
        return None
    at = dim + a.dim() + 1 if dim < 0 else dim
    if not a.dim_of_edges < at <= a.dim():
        return None
    ends = [None if end is None else end.unsqueeze(at) for end in a.ends]
    weight = None if a.weight is None else a.weight.unsqueeze(at)
    return Lifted(a.edges, a.dim_of_edges, ends, weight, viewed=a)


def _contiguous(a: Any) -> Any:
    return a if isinstance(a, Lifted) and a.is_product else None  # gathered, it is


def _squeeze(a: Any, dim: Any) -> Any:
    if not isinstance(a, Lifted) or not a.is_product or not isinstance(dim, int):
        return None
    at = dim + a.dim() if dim < 0 else dim
    if not 0 < at < a.dim() or at == a.dim_of_edges or a.size(at) != 1:
        return None
    ends = [None if end is None else end.squeeze(at) for end in a.ends]
    weight = None if a.weight is None else a.weight.squeeze(at)
    return Lifted(a.edges, a.dim_of_edges - (at < a.dim_of_edges), ends, weight, viewed=a)


def _sum(a: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum of a product over channels or over one of its other dimensions."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(a, Lifted) or not a.is_product or dtype is not None:
        return None
    if not isinstance(dim, int):
        return None
    source, destination = a.ends
    last = dim + a.dim() if dim < 0 else dim
    if a.dim_of_edges != 0 or not 0 < last < a.dim():
        return None
    if last < a.dim() - 1:
        return None if keepdim else Lifted(a.edges, 0, a.ends, a.weight, summed=last)
    if source is None or destination is None:
        return _by_node(torch.sum)(a, -1, keepdim)
    if a.weight is not None and a.weight.size(-1) != 1:
        return None
    row = a.shape[1:]
    out = dot_at_ends(a.edges.graph, source.expand(-1, *row), destination.expand(-1, *row))
    out = out.unsqueeze(-1)
    if a.weight is not None:
        out = out * a.weight
    return out if keepdim else out.squeeze(-1)


def _new(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a function that makes a tensor of the type and device of another."""

    def rule(a: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(a, Lifted):
            return None
        return function(a.reads()[0], *args, **kwargs)

    return rule


def _requires_grad(a: Any) -> bool | None:
    if not isinstance(a, Lifted) or a.is_changed:
        return None
    return any(each.requires_grad for each in a.reads())


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply), _multiply),
    **dict.fromkeys((torch.div, torch.divide, Tensor.div, Tensor.divide), _divide),
    **dict.fromkeys((torch.add, Tensor.add), _add),
    **dict.fromkeys((torch.neg, Tensor.neg), _negate),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
    Tensor.contiguous: _contiguous,
    **dict.fromkeys((torch.squeeze, Tensor.squeeze), _squeeze),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm), _matmul),
    **dict.fromkeys((torch.unsqueeze, Tensor.unsqueeze), _unsqueeze),
    **dict.fromkeys((torch.reshape, Tensor.reshape, Tensor.view), _view),
    **{f: _new(f) for f in (Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full)},
    F.linear: _linear,
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
}
