"""The arguments of a call of a model, as other ranks are told of them."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Key = str | tuple[str, ...]
"""A type of nodes, or of edges."""


class Call(NamedTuple):
    """The arguments of a call by name, with defaults.

    Of ``*args`` each has a name such as ``"args[0]"``; of ``**kwargs`` its own.

    Attributes:
        fixed: Those that are no tensors.
        tensors: Those that are, and those in dictionaries; see :func:`named`.
        keys: The keys of each argument that is a dictionary.
    """

    fixed: dict[str, Any]
    tensors: dict[str, Tensor]
    keys: dict[str, list[Key]]


def named(name: str, key: Key | int) -> str:
    """The name of a value in a dictionary, such as ``"x_dict['paper']"``, or of one of several."""
    return f"{name}[{key!r}]"


def bound_to(module: nn.Module, args: Any, kwargs: Any) -> Call:
    """The arguments of a call.

    Args:
        module: The model.
        args: Positional arguments.
        kwargs: Named ones.

    Raises:
        TypeError: If the forward has no such arguments, or one is neither a tensor, a dictionary of
            tensors by the type of nodes or edges, a number, a text nor ``None``.
    """
    found = inspect.signature(module.forward).bind(*args, **kwargs)
    found.apply_defaults()
    call = Call({}, {}, {})
    for name, value in _each(found):
        if isinstance(value, Tensor):
            call.tensors[name] = value
        elif isinstance(value, dict) and all(
            _is_type(key) and isinstance(each, Tensor) for key, each in value.items()
        ):
            call.keys[name] = list(value)
            call.tensors.update({named(name, key): each for key, each in value.items()})
        elif value is None or isinstance(value, bool | int | float | str):
            call.fixed[name] = value
        else:
            raise TypeError(
                f"{name} must be a tensor, a dictionary of tensors by type, a number, a text or "
                f"None (got {type(value).__name__}): 'ddp' takes anything"
            )
    return call


def _each(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    """The arguments of a call, those of variadic parameters one by one."""
    parameters = bound.signature.parameters
    for name, value in bound.arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((named(name, place), each) for place, each in enumerate(value))
        elif parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def by_parameter(
    module: nn.Module, names: Iterable[str], value: Callable[[str], Any]
) -> inspect.BoundArguments:
    """The arguments of a call of a module, of those of a :class:`Call`.

    Args:
        module: The model.
        names: Their names.
        value: Gives the value of one.
    """
    signature = inspect.signature(module.forward)
    left = dict.fromkeys(names)
    found: OrderedDict[str, Any] = OrderedDict()
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            values: list[Any] = []
            while (each := named(name, len(values))) in left:
                del left[each]
                values.append(value(each))
            found[name] = tuple(values)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found[name] = {each: value(each) for each in left}  # it is the last one
        else:
            del left[name]
            found[name] = value(name)
    return inspect.BoundArguments(signature, found)


def names_of(described: Any) -> list[str]:
    """The names of the arguments of :func:`described_by`."""
    keys = keys_of(described)
    inside = {named(name, key) for name, each in keys.items() for key in each}
    tensors = [name for name in described["tensors"] if name not in inside]
    return [*described["fixed"], *tensors, *keys]


def _is_type(key: Any) -> bool:
    """True for a type of nodes or of edges."""
    return isinstance(key, str) or (
        isinstance(key, tuple) and len(key) == 3 and all(isinstance(each, str) for each in key)
    )


def described_by(call: Call) -> dict[str, Any]:
    """The arguments of :func:`bound_to`, as JSON knows them; of tensors their dtypes and shapes."""
    tensors = call.tensors.items()
    return {
        "fixed": call.fixed,
        "tensors": {name: [str(t.dtype)[6:], list(t.shape)] for name, t in tensors},
        "sparse": {name: str(t.layout)[6:] for name, t in tensors if t.layout != torch.strided},
        "keys": call.keys,
    }


def keys_of(described: Any) -> dict[str, list[Key]]:
    """The keys of dictionaries, as JSON has brought them."""
    return {
        name: [key if isinstance(key, str) else tuple(key) for key in keys]
        for name, keys in described["keys"].items()
    }


def smallest_like(described: Any, device: torch.device) -> dict[str, Any]:
    """Arguments like those that another rank described, of two nodes and edges of each type.

    Of what the other rank has less of, there is as much. All edges go from the first node to the
    first, as that one there is wherever there are edges. All values are 0.
    """
    found: dict[str, Any] = {}
    for name, (dtype, shape) in described["tensors"].items():
        layout = described["sparse"].get(name)
        edges = len(shape) == 2 and shape[0] == 2 and dtype.startswith("int")
        all_sides = edges or layout is not None
        made = [min(2, n) if all_sides or not place else n for place, n in enumerate(shape)]
        found[name] = torch.zeros(made, dtype=dtype_of(dtype), device=device)
        if layout is not None:  # a matrix of edges
            found[name][:1, :1] = 1
            found[name] = found[name].to_sparse(layout=getattr(torch, layout))
    for name, keys in keys_of(described).items():
        found[name] = {key: found.pop(named(name, key)) for key in keys}
    return {**described["fixed"], **found}


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name such as ``"float32"``.

    Raises:
        ValueError: If there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return found
