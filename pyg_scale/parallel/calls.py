"""The arguments of a call of a model, as other ranks are told of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def bound_to(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, with defaults.

    Args:
        module: The model.
        args: Positional arguments.
        kwargs: Named ones.

    Raises:
        TypeError: If the forward has no such arguments, or one is neither a tensor, a number, a
            text nor ``None``.
    """
    found = inspect.signature(module.forward).bind(*args, **kwargs)
    found.apply_defaults()
    for name, value in found.arguments.items():
        if value is not None and not isinstance(value, Tensor | bool | int | float | str):
            raise TypeError(
                f"{name} must be a tensor, a number, a text or None (got {type(value).__name__}): "
                "'ddp' takes anything"
            )
    return dict(found.arguments)


def described_by(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of :func:`bound_to`, as JSON knows them; of tensors their dtypes and shapes."""
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)}
    return {
        "fixed": {name: value for name, value in call.items() if name not in tensors},
        "tensors": {name: [str(t.dtype)[6:], list(t.shape)] for name, t in tensors.items()},
    }


def smallest_like(described: Any, device: torch.device) -> dict[str, Any]:
    """Arguments like those that another rank described, of two nodes without edges.

    Tensors of two rows, such as ``edge_index``, have no columns; others have two rows of zeros.
    """
    tensors = {}
    for name, (dtype, shape) in described["tensors"].items():
        edges = len(shape) == 2 and shape[0] == 2 and dtype.startswith("int")
        made = [2, 0] if edges else [min(2, n) if not place else n for place, n in enumerate(shape)]
        tensors[name] = torch.zeros(made, dtype=dtype_of(dtype), device=device)
    return {**described["fixed"], **tensors}


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name such as ``"float32"``.

    Raises:
        ValueError: If there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return found
