"""Linear maps by the faster product, and in a batch, where only the first rows have gradients.

Products are those of :mod:`pyg_scale.ops.dense_product`. Nodes of a batch are numbered hop by hop,
and the loss depends on the seeds, which come first. The gradients that reach a layer therefore end
in rows of zeros: all rows but those of the seeds in the last layer, all but those of the seeds and
their neighbours in the one before. Products with these rows are skipped.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch_geometric.nn.dense.linear import Linear

from pyg_scale.nn.conv.base import untouched
from pyg_scale.ops import fused, library, memory
from pyg_scale.ops.aggregate import FLOATS
from pyg_scale.ops.dense_product import is_transformed, mm
from pyg_scale.ops.nonzero_rows import nonzero_rows

_PLAIN = (Tensor, torch.nn.Parameter)
_MIN_MACS = 1 << 22
"""Number of multiply-adds of a product from which on our own function for autograd is cheap."""
_MIN_MACS_ALONE = 1 << 24
"""The same of a layer that is called by itself. Among functions of torch that go through more
memory than a cache holds, our code is read anew in every step: a third of a millisecond."""


def is_linear(layer: Any) -> bool:
    """Return True for a plain linear layer of torch or PyG, or ours, without hooks."""
    kind = type(layer)
    return kind in _LINEAR and untouched(layer, kind)


def apply_linear(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """``layer(x)``, by :func:`apply_weight` if it is a plain linear layer without hooks.

    The same holds for the layers of a ``torch.nn.Sequential`` without hooks.

    Args:
        layer: A layer of ``torch.nn`` or of PyG.
        x: ``[num_rows, in_channels]``.
    """
    if is_linear(layer):
        parameters: Any = layer
        return apply_weight(x, parameters.weight, parameters.bias)
    if isinstance(layer, torch.nn.Sequential) and untouched(layer, torch.nn.Sequential):
        for each in layer:
            x = apply_linear(each, x)
        return x
    return layer(x)


def apply_weight(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, alone: bool = False
) -> Tensor:
    """``x @ weight.T + bias``, as :func:`torch.nn.functional.linear`.

    Gradients are those of torch, except that rows of ``x`` after the last one with a gradient are
    skipped, finite or not; torch multiplies them by zero. Small products are left to torch.

    Args:
        x: ``[num_rows, in_channels]``.
        weight: ``[out_channels, in_channels]``.
        bias: ``[out_channels]``, or ``None``.
        alone: True for a layer among functions of torch, for which more products are small.

    Returns:
        ``[num_rows, out_channels]``.
    """
    least = _MIN_MACS_ALONE if alone else _MIN_MACS
    mine = (
        not torch.compiler.is_compiling()
        and x.numel() * weight.size(0) >= least
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and x.device.type == weight.device.type == "cpu"
        and x.layout is weight.layout is torch.strided
        and not x.is_nested
        and x.dim() == 2
        and x.dtype == weight.dtype
        and x.dtype in FLOATS
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._get_tracing_state()
        and not is_transformed(x, weight)
        and library.compiled()
    )
    if not mine:
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return mm(x, weight.t(), bias=bias)
    return _Linear.apply(x, weight, bias)


class LinearMap:
    """A linear layer that maps matrices by :func:`apply_weight`; everything else is its base's."""

    replaces: type[torch.nn.Module]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name of torch
        """See the class that is replaced."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            out = F.linear(input, self.weight, self.bias)  # type: ignore[attr-defined]
        else:
            # Where they are, without a look at every other attribute of a module before.
            kept: Any = self._parameters  # type: ignore[attr-defined]
            weight, bias = kept.get("weight"), kept.get("bias")
            if weight is None or (bias is None and "bias" not in kept):  # not parameters any more
                weight, bias = self.weight, self.bias  # type: ignore[attr-defined]
            out = apply_weight(input, weight, bias, alone=True)
        return out


class _TorchLinear(LinearMap, torch.nn.Linear):
    replaces = torch.nn.Linear


class _PyGLinear(LinearMap, Linear):
    replaces = Linear


_LINEAR = {torch.nn.Linear, Linear, _TorchLinear, _PyGLinear}
LINEAR_MAPS: dict[type, type[torch.nn.Module]] = {
    torch.nn.Linear: _TorchLinear,
    Linear: _PyGLinear,
}
"""The linear layer for each of torch's and PyG's, with the same name."""
for _theirs, _ours in LINEAR_MAPS.items():
    _ours.__name__ = _theirs.__name__


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return mm(x, weight.t(), bias=bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        if torch.is_grad_enabled() or fused.in_batches(grad):  # to be differentiated again
            return (
                grad @ weight if of_x else None,
                grad.t() @ x if of_weight else None,
                grad.sum(dim=0) if of_bias else None,
            )
        rows = nonzero_rows(grad) if grad.is_contiguous() else grad.size(0)
        some = grad[:rows]
        before = None
        if of_x:
            before = memory.empty([grad.size(0), weight.size(1)], grad.dtype)
            mm(some, weight, out=before[:rows])
            before[rows:] = 0
        return (
            before,
            mm(some.t(), x[:rows]) if of_weight else None,
            some.sum(dim=0) if of_bias else None,
        )


def is_start_of(dst: Tensor, src: Tensor) -> bool:
    """Return True for ``src[:n]`` whose gradient, if it has one, may be added to that of ``src``.

    Not if somebody wants to see the gradient of the slice itself.
    """
    if dst._base is not src or dst.shape[1:] != src.shape[1:]:
        return False
    if dst.data_ptr() != src.data_ptr() or dst.stride() != src.stride():
        return False
    if not dst.requires_grad:
        return not src.requires_grad
    node = dst.grad_fn
    if node is None or node.name() != "SliceBackward0" or dst._backward_hooks or dst.retains_grad:
        return False
    return node.next_functions[0][0] is get_gradient_edge(src).node
