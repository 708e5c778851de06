"""Proof that a layer computes each message from its own edge, and each sum from its own messages.

Only then may its edges be cut into chunks. The layer's code runs once on a few edges, and every
function of torch that touches them is looked at: functions of each row by itself are known here,
and what edges of one destination do with each other goes through the index of destinations. Any
other function, such as a batch norm, is the reason why a layer is not cut. No number that depends
on an edge reaches Python without a function, so what was seen holds for all edges. How many edges
there are does reach it: a layer that asks for that has to give the same messages for fewer of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyg_scale.nn.lifted import INDEX_SELECT, EdgeIndices, Lifted
from pyg_scale.nn.writes import memory_of

ROW, NODE, CONSTANT, NEW = "row", "node", "constant", "new"


class NotByRow(Exception):
    """Raised for a function that is not known to keep edges apart. The message is its name."""


class Watch(TorchFunctionMode):
    """Let functions of torch run on rows of edges only if they keep the rows apart.

    Args:
        rows: Tensors with edges in their first dimension, the arguments of a message.
        constants: Tensors without edges that may have gradients: parameters.

    Attributes:
        draws: True if rows had random numbers of their own.
        counts: True if the number of edges was asked for.
        read: The tensors that were used without being given: what the message reads of its layer.
        width: The largest number of elements of a row that was made.
    """

    def __init__(self, rows: Iterable[Tensor], constants: Iterable[Tensor]) -> None:
        super().__init__()
        self._kinds: dict[int, tuple[str, Tensor]] = {}
        self.draws = self.counts = False
        self.width = 1
        self.read: list[Tensor] = []
        self._constants = {id(tensor): tensor for tensor in constants}
        self._drawn = torch.get_rng_state()
        for tensor in rows:
            self._mark(tensor, ROW)
        self._given = [*rows]

    def kind(self, tensor: Any) -> str | None:
        """``ROW``, ``NODE`` (of destinations), ``CONSTANT``, ``NEW``, or ``None`` if not known."""
        known = self._kinds.get(id(tensor))
        return None if known is None else known[0]

    def _mark(self, tensor: Tensor, kind: str) -> None:
        self._kinds[id(tensor)] = kind, tensor  # kept, as an id is used again

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function and remember what its results are."""
        kwargs = kwargs or {}
        if func in _ASKED:
            asked = args[0] if args else kwargs.get("input")
            of_edges = isinstance(asked, EdgeIndices) or self.kind(asked) == ROW
            self.counts = self.counts or (func in _COUNTING and of_edges)
            return func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._read(tensors)
        if any(isinstance(each, EdgeIndices) for each in tensors):
            kind = self._kind_by_index(func, args, kwargs)
            out = func(*args, **kwargs)
        else:
            sizes = [each.size(0) for each in tensors if self.kind(each) in (ROW, NODE)]
            kind = self._kind_of_result(func, tensors, args, kwargs)
            draws = func in _DRAWING and kind in (ROW, NODE)
            if draws:
                self.check_draws()
            out = func(*args, **kwargs)
            if draws:
                self.draws, self._drawn = True, torch.get_rng_state()
            for each in tree_leaves(out) if kind in (ROW, NODE) else ():
                if not isinstance(each, Tensor) or [*each.shape[:1]] != sizes[:1]:
                    raise NotByRow(_name(func))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and not isinstance(each, EdgeIndices):
                self._mark(each, kind)
                if kind == ROW and not isinstance(each, Lifted):
                    self.width = max(self.width, each.numel() // max(each.size(0), 1))
        return out

    def _read(self, tensors: list[Tensor]) -> None:
        """Look at tensors that no function made and nobody gave."""
        for each in tensors:
            if self.kind(each) is None and not isinstance(each, EdgeIndices):
                if each.requires_grad and id(each) not in self._constants:
                    raise NotByRow("a tensor that is neither an argument nor a parameter")
                self._mark(each, CONSTANT)
                self.read.append(each)

    def check_draws(self) -> None:
        """Refuse random numbers of torch that were drawn for anything but rows.

        Raises:
            NotByRow: If there are any.
        """
        if not torch.equal(torch.get_rng_state(), self._drawn):
            raise NotByRow("random numbers that edges share")

    def _kind_of_result(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> str:
        kinds = {self.kind(each) for each in tensors} - {CONSTANT, NEW, None}
        if _is_in_place(_name(func)) or kwargs.get("out") is not None:
            raise NotByRow(_name(func))  # what it changes may outlive the message
        if func in _MAKING:
            return NEW
        if kwargs.get("generator") is not None:
            raise NotByRow("random numbers of a generator")
        if not kinds:
            if kwargs.get("inplace"):
                raise NotByRow(_name(func))
            return CONSTANT
        if len(kinds) > 1:
            raise NotByRow(_name(func))
        if func in _EACH_ELEMENT or func in _DRAWING:
            if kwargs.get("inplace") and self._is_given(args[0]):
                raise NotByRow(_name(func))
            most = max(each.dim() for each in tensors)
            for each in tensors:
                rows = self.kind(each) in (ROW, NODE)
                # Rows must be in the first dimension of the result, other operands must not.
                if each.dim() == most if not rows else each.dim() < most:
                    if not rows and each.size(0) == 1:
                        continue
                    raise NotByRow(_name(func))
        elif not _is_by_row(self, func, args, kwargs):
            raise NotByRow(_name(func))
        return ROW if ROW in kinds else NODE

    def _is_given(self, tensor: Tensor) -> bool:
        """Return True if a tensor is an argument, or shares memory with one."""
        if isinstance(tensor, Lifted):
            return any(tensor.whole() is each for each in self._given)
        plain = (each.value if isinstance(each, Lifted) else each for each in self._given)
        memory = memory_of(tensor)
        return any(memory_of(each) == memory for each in plain if each is not None)

    def _kind_by_index(self, func: Any, args: Any, kwargs: Any) -> str:
        """The kind of the result of a function of the destinations' index."""
        if func in (Tensor.view, Tensor.expand, Tensor.expand_as, Tensor.unsqueeze):
            return CONSTANT
        if func in INDEX_SELECT and len(args) == 3:
            if self.kind(args[0]) == NODE and args[1] in (0, -args[0].dim()):
                return ROW
        elif func in (Tensor.scatter_add_, Tensor.scatter_reduce_, Tensor.index_add_):
            out, dim, _, src = args[:4]
            if self.kind(out) == NEW and self.kind(src) == ROW and dim in (0, -out.dim()):
                return NODE
        raise NotByRow(_name(func))


def _is_by_row(watch: Watch, func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if a function with rows among its arguments treats every row by itself."""
    first: Any = args[0] if args else None
    if func in _OVER_DIMS or func in _OVER_NAMED_DIMS:
        dim = kwargs.get("dim")
        if dim is None and func in _OVER_DIMS and len(args) > 1:
            dim = args[1]
        dims = dim if isinstance(dim, (tuple, list)) else [dim]
        if isinstance(first, (tuple, list)):
            if any(watch.kind(each) not in (ROW, NODE) for each in first):
                return False
            first = first[0]
        return all(isinstance(d, int) and d not in (0, -first.dim()) for d in dims)
    if watch.kind(first) not in (ROW, NODE):
        # A table of constants, of which every edge reads a row.
        if func is F.embedding:
            return watch.kind(kwargs.get("weight", args[1])) == CONSTANT
        if func in INDEX_SELECT:
            return len(args) == 3 and args[1] == 0 and watch.kind(args[2]) == ROW
        return (
            func is Tensor.__getitem__
            and isinstance(args[1], Tensor)
            and not (args[1].is_floating_point() or args[1].dtype == torch.bool)
        )
    if func is F.embedding:
        return watch.kind(kwargs.get("weight", args[1])) in (CONSTANT, None)
    if func in (Tensor.view, torch.reshape, Tensor.reshape, torch.flatten, Tensor.flatten):
        return True  # the first dimension keeps its size, which is looked at later
    if func in (Tensor.unsqueeze, torch.unsqueeze, Tensor.expand, Tensor.repeat):
        at = args[1][0] if isinstance(args[1], (tuple, list)) else args[1]
        if func in (Tensor.unsqueeze, torch.unsqueeze):
            return at not in (0, -first.dim() - 1)
        sizes = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
        kept = (1,) if func is Tensor.repeat else (-1, first.size(0))
        return len(sizes) == first.dim() and at in kept
    if func in _PARTS:
        dim = kwargs.get("dim", args[_PARTS[func]] if len(args) > _PARTS[func] else 0)
        return isinstance(dim, int) and dim not in (0, -first.dim())
    if func in (torch.transpose, Tensor.transpose):
        return all(d not in (0, -first.dim()) for d in args[1:])
    if func is Tensor.__getitem__:
        key = args[1] if isinstance(args[1], tuple) else (args[1],)
        plain = all(k is None or k is Ellipsis or isinstance(k, (int, slice)) for k in key)
        return plain and key[0] == slice(None)
    if func is F.linear:
        return first.dim() > 1
    if func in (torch.matmul, Tensor.matmul):
        other = args[1]
        if watch.kind(other) in (ROW, NODE):
            return first.dim() > 2 and other.dim() == first.dim()
        return first.dim() > 1 and other.dim() in (1, 2)
    if func in (torch.bmm, Tensor.bmm):
        return watch.kind(args[1]) == watch.kind(first)
    if func is F.layer_norm:
        return len(args[1]) < first.dim()
    return False


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _is_in_place(name: str) -> bool:
    """Return True for names as ``add_``, ``__iadd__`` and ``__setitem__``."""
    if name.endswith("__"):
        return name.startswith(("__i", "__set")) and name not in ("__invert__", "__index__")
    return name.endswith("_")


def _named(*names: str) -> frozenset[Any]:
    """The functions and methods of torch of these names."""
    spaces = (torch, Tensor, F)
    return frozenset(getattr(s, name) for s in spaces for name in names if hasattr(s, name))


_ASKED = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu")
        ),
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        *_named("dim", "size", "numel", "is_floating_point", "is_complex", "__len__"),
    ]
)
_COUNTING = frozenset([Tensor.shape.__get__, *_named("size", "numel", "__len__")])  # type: ignore[attr-defined]
_MAKING = _named("new_zeros", "new_ones", "new_empty", "new_full", "zeros", "ones")
_EACH_ELEMENT = _named(
    *("abs", "neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "erf"),
    *("sin", "cos", "tan", "atan", "atan2", "tanh", "sigmoid", "sign", "floor", "ceil", "round"),
    *("add", "sub", "mul", "div", "pow", "rsub", "maximum", "minimum", "clamp", "where", "lerp"),
    *("multiply", "subtract", "divide", "addcmul", "__rsub__", "__rdiv__", "__rpow__"),
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus"),
    *("softsign", "logsigmoid", "hardtanh", "hardsigmoid", "hardswish", "threshold"),
    *("gt", "ge", "lt", "le", "eq", "ne", "logical_and", "logical_or", "logical_not"),
    *("masked_fill", "nan_to_num", "to", "float", "double", "type_as", "contiguous", "clone"),
    *("detach", "zeros_like", "ones_like", "full_like"),
)
_DRAWING = _named("dropout", "rand_like", "randn_like")
_OVER_DIMS = _named(
    *("sum", "mean", "prod", "amax", "amin", "var", "std", "norm", "softmax", "log_softmax"),
    *("max", "min", "argmax", "argmin"),
    *("cat", "stack", "squeeze", "logsumexp", "cumsum"),
)
_OVER_NAMED_DIMS = _named("norm", "normalize", "cross", "glu")
_PARTS = {
    func: place
    for name, place in (("chunk", 2), ("split", 2), ("select", 1), ("narrow", 1), ("unbind", 1))
    for func in _named(name)
}
"""Functions of parts of rows, and the place of the dimension among their arguments."""
