"""Writes of a layer's own code to tensors, while rows of features are not gathered.

Rows that are computed later must be what PyG would have computed at once. So a function that writes
to a tensor first lets all rows be gathered that are computed from it. If the code cannot go on
without rows, the layer takes PyG's path, which runs it again: so what it changed is undone.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyg_scale.nn.edges import Asked
from pyg_scale.nn.elementwise import Elementwise
from pyg_scale.nn.fallback import NotFused
from pyg_scale.nn.lifted import Lifted
from pyg_scale.nn.linear import apply_weight
from pyg_scale.ops.adjacency import recording

_ALL, _FIRST = "all", "first"


class NotUndone(RuntimeError):
    """Raised if a layer cannot be run again."""


class Writes(TorchFunctionMode):
    """A context in which the code of a layer runs on rows that are not gathered.

    On an exception everything is undone that functions of torch changed in the layer and in its
    arguments, with the layer's attributes and the state of random numbers. Nothing else can be: a
    file or a list outside of the layer would be written to twice.

    Args:
        layer: The layer.
        arguments: The arguments of ``propagate``.
        rows: The arguments of ``message`` and the others, some of them not gathered.
    """

    def __init__(self, layer: nn.Module, arguments: Any, rows: Any) -> None:
        super().__init__()
        self._layer, self._arguments = layer, arguments
        # Weak, as gathered rows are freed where PyG frees them.
        self._lazy = [weakref.ref(each) for each in rows if isinstance(each, Lifted)]
        self._asked = next((each.edges.asked for each in rows if isinstance(each, Lifted)), Asked())
        self._before: list[tuple[Tensor, Any, Tensor]] = []

    def __enter__(self) -> Writes:
        own = vars(self._layer)
        self._attributes = dict(own)
        self._collections = [(v, v.copy()) for v in own.values() if type(v) in (list, dict, set)]
        self._random = None if recording() else _random_state()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception):
            self._undo(error)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function after the rows that must be gathered before it writes."""
        kwargs = kwargs or {}
        how = _how(func)
        if how is not None or "out" in kwargs:
            for tensor in _written(how, args, kwargs):
                self._prepare(tensor)
        if func is F.linear and not kwargs:
            func = apply_weight  # its own product, which is torch's under a mode such as this one
        out = func(*args, **kwargs)
        if isinstance(out, Lifted):
            self._lazy.append(weakref.ref(out))
        return out

    def finish(self) -> None:
        """Gather the rows that the layer's code has kept: they outlive what they are made of."""
        for each in self._living():
            each.settle()
        own = vars(self._layer)
        own.update({name: v.gathered() for name, v in own.items() if isinstance(v, Lifted)})

    def _living(self) -> Iterator[Lifted]:
        self._lazy = [ref for ref in self._lazy if ref() is not None]
        for ref in self._lazy:
            rows = ref()
            if rows is not None:
                yield rows

    def _prepare(self, tensor: Tensor) -> None:
        """Gather the rows that are computed from a tensor, and keep its values if it is not new."""
        if isinstance(tensor, Lifted):
            whole = tensor.whole()
            for rows in self._living():
                if isinstance(rows, Elementwise) and _has_part(rows, whole):
                    rows.settle()
            tensor.settle()
            tensor = tensor.gathered()
        memory = memory_of(tensor)
        if any(memory_of(each) == memory for each in self._asked.saved):
            raise NotFused("a tensor is changed that gradients need as it was")
        for rows in self._living():
            if not rows.is_changed and any(memory_of(each) == memory for each in _all_of(rows)):
                rows.settle()
        if memory in self._known:
            self._before.append((tensor, tensor.grad_fn, tensor.detach().clone()))

    @functools.cached_property
    def _known(self) -> set[int]:
        """The memory of tensors that there were before, looked up at the first write."""
        state = [*self._layer.parameters(), *self._layer.buffers()]
        return {
            memory_of(each)
            for each in (*state, *tree_leaves(self._arguments))
            if isinstance(each, Tensor)
        }

    def _undo(self, error: Exception) -> None:
        for tensor, history, values in reversed(self._before):
            if tensor.grad_fn is not history:
                raise NotUndone(
                    f"{type(self._layer).__name__} changes a tensor with a gradient in place, and "
                    f"then does what pyg_scale.nn does not cover: {error}. Give its model PyG's "
                    "layers back: pyg_scale.nn.restore(model)"
                ) from error
            with torch.no_grad():
                tensor.copy_(values)
        own = vars(self._layer)
        own.clear()
        own.update(self._attributes)
        for collection, content in self._collections:
            collection.clear()
            (collection.extend if isinstance(collection, list) else collection.update)(content)
        if self._random is not None:
            _set_random_state(self._random)


def _has_part(rows: Elementwise, whole: Lifted) -> bool:
    parts = rows.parts or ()
    return any(isinstance(each, Lifted) and each.whole() is whole for each in parts)


def _all_of(rows: Lifted) -> list[Tensor]:
    """The tensors behind rows: what they are computed from, and themselves."""
    return rows.reads() if rows.value is None else [*rows.reads(), rows.value]


def memory_of(tensor: Tensor) -> int:
    """A number that tensors have in common which share memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        memory: int = tensor.untyped_storage()._cdata
    return memory


def _random_state() -> tuple[Tensor, Tensor | None]:
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), on_device


def _set_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


# Functions that write #####################################################################


def _written(how: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a function writes to."""
    found: list[Any] = [kwargs.get("out")]
    if how == _ALL:
        found += [args, kwargs]
    elif how == _FIRST or (how is not None and _is_in_place(how, args, kwargs)):
        found.append(args[0] if args else kwargs.get("input"))
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


def _is_in_place(at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[at] if len(args) > at else kwargs.get("inplace"))


@functools.lru_cache(maxsize=4096)
def _how(func: Any) -> Any:
    """``"all"`` or ``"first"`` of the arguments are written to; or the place of ``inplace``."""
    if func in _WITH_STATISTICS:
        return _ALL
    if isinstance(func, OpOverload):
        return _ALL if func._schema.is_mutable else None
    if isinstance(func, OpOverloadPacket):
        overloads = [getattr(func, name) for name in func.overloads()]
        return _ALL if any(each._schema.is_mutable for each in overloads) else None
    name = getattr(func, "__name__", "")
    if name.endswith("_"):
        is_write = not name.endswith("__") or name.startswith(("__i", "__set", "__del"))
        return _FIRST if is_write and name not in _NO_WRITES else None
    if inspect.isfunction(func) and func.__module__ == F.__name__:
        names = [*inspect.signature(func).parameters]
        return names.index("inplace") if "inplace" in names else None
    return None


_WITH_STATISTICS = (F.batch_norm, F.instance_norm)
_NO_WRITES = ("__index__", "__int__", "__invert__", "requires_grad_")
