"""States as JSON and named tensors: nothing that is read back can run code.

Dictionaries, lists, tuples, tensors, arrays, numbers, strings, bytes, ``None``: everything that
``state_dict()`` of torch's modules, optimizers and schedulers consists of comes back as it was.
What JSON has not is an object with one key that says what it is.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def flatten(tree: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Take a state apart.

    Args:
        tree: The state.
        name: With which the names of its tensors begin.

    Returns:
        What is to be JSON, and copies of the tensors on the CPU, contiguous.

    Raises:
        NotImplementedError: If a tensor is sharded or sparse.
        TypeError: If something else is in it; says where.
    """
    tensors: dict[str, Tensor] = {}
    return _flatten(tree, name, tensors), tensors


def _flatten(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        return {"tensor": _keep(value, where, tensors)}
    if isinstance(value, np.ndarray):
        return {"array": _keep(_from_numpy(value, where), where, tensors)}
    if isinstance(value, np.generic):
        return {"number": _keep(_from_numpy(np.asarray(value), where), where, tensors)}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        pairs = []
        for key, item in value.items():
            if not isinstance(key, (str, int, float, bool, tuple, type(None))):
                raise TypeError(f"{where} has the key {key!r}: it must be a number or a string")
            pairs.append([_flatten(key, where, {}), _flatten(item, f"{where}.{key}", tensors)])
        return {kind: pairs}
    if isinstance(value, (list, tuple)):
        items = [_flatten(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: it holds tensors, "
        f"arrays, numbers, strings, bytes, lists, tuples and dictionaries"
    )


def _from_numpy(array: Any, where: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError:
        raise TypeError(f"{where} is an array of {array.dtype}, which torch has not") from None


def _keep(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    if hasattr(tensor, "device_mesh") or tensor.layout != torch.strided or tensor.is_meta:
        what = "sharded (a DTensor)" if hasattr(tensor, "device_mesh") else "not dense"
        raise NotImplementedError(f"{where} is {what}: a checkpoint holds whole dense tensors")
    name, count = where, 2
    while name in tensors:  # such as the keys 1 and "1"
        name, count = f"{where}#{count}", count + 1
    tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return name


def unflatten(found: Any, tensors: Callable[[str], Tensor]) -> Any:
    """Put a state together again.

    Args:
        found: What :func:`flatten` made JSON of.
        tensors: Gives the tensor of a name.

    Raises:
        ValueError: If it is not what :func:`flatten` makes.
    """
    if isinstance(found, list):
        return [unflatten(item, tensors) for item in found]
    if not isinstance(found, dict):
        return found
    if len(found) != 1:
        raise ValueError("not the state of a checkpoint")
    ((kind, value),) = found.items()
    if kind == "float":
        return float(value)
    if kind == "tensor":
        return tensors(value)
    if kind == "array":
        return tensors(value).numpy()
    if kind == "number":
        return tensors(value).numpy()[()]
    if kind in ("dict", "counter"):
        pairs = {unflatten(key, tensors): unflatten(item, tensors) for key, item in value}
        return Counter(pairs) if kind == "counter" else pairs
    if kind == "tuple":
        return tuple(unflatten(item, tensors) for item in value)
    if kind == "bytes":
        return base64.b64decode(value)
    raise ValueError(f"not the state of a checkpoint: {kind!r}")


def names_of(found: Any) -> list[str]:
    """The names of all tensors of a state that was taken apart."""
    if isinstance(found, list):
        return [name for item in found for name in names_of(item)]
    if not isinstance(found, dict):
        return []
    ((kind, value),) = found.items()
    if kind in ("tensor", "array", "number"):
        return [value]
    return names_of(value) if kind in ("dict", "counter", "tuple") else []
