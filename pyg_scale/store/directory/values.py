"""Values of a graph other than tensors with a row per node or edge, as JSON.

Numbers, strings, booleans, ``null``, lists and objects stand for themselves. A tensor is
``{"$tensor": {"file": ..., "dtype": ..., "shape": ...}}``, a tuple ``{"$tuple": [...]}``, and a
dictionary that looks like one of these ``{"$dict": {...}}``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.files.npy import DTYPES, dtype_name
from pyg_scale.store.directory.paths import quoted
from pyg_scale.store.directory.reader import GraphDirectory
from pyg_scale.store.directory.writer import DirectoryWriter

_TAGS = ("$tensor", "$tuple", "$dict")
_LARGEST = 2**62


def encode(value: Any, file: str, name: str, writer: DirectoryWriter) -> Any:
    """Return a value as JSON; tensors and arrays in it are written.

    Args:
        value: A number, string, boolean, ``None``, tensor or array, or lists, tuples and
            dictionaries (by strings) of these.
        file: The path for tensors, without a suffix.
        name: The name of the value in errors.
        writer: Writes them.

    Raises:
        TypeError: If it is, or contains, anything else.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value if type(value) in (bool, int, float, str, type(None)) else _plain(value)
    if isinstance(value, np.ndarray):
        value = as_plain_tensor(value, name)
    if isinstance(value, Tensor):
        value = as_plain_tensor(value, name)
        writer.write(f"{file}.npy", value)
        return tensor_in(f"{file}.npy", dtype_name(value.dtype), value.shape)
    if type(value) in (list, tuple):
        items = [encode(v, f"{file}-{i}", f"{name}[{i}]", writer) for i, v in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        found = {
            k: encode(v, f"{file}-{quoted(k)}", f"{name}[{k!r}]", writer) for k, v in value.items()
        }
        return {"$dict": found} if found.keys() & set(_TAGS) else found
    if type(value) is dict:
        key = next(key for key in value if not isinstance(key, str))
        raise TypeError(
            f"{name} is a dictionary with the key {key!r}, but a graph directory can "
            "hold only those with strings as keys: use str(key), or delete it"
        )
    raise TypeError(
        f"{name} is a {type(value).__name__}, which a graph directory cannot hold: make it a "
        "tensor, a number or a string, or delete it"
    )


def tensor_in(file: str, dtype: str, shape: Iterable[int]) -> Any:
    """The JSON of a tensor in a file.

    Args:
        file: The path in the directory.
        dtype: As in ``torch.float32``.
        shape: Its shape.
    """
    return {"$tensor": {"file": file, "dtype": dtype, "shape": list(shape)}}


def _plain(value: Any) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise AssertionError("one of the kinds that are looked for")


def as_plain_tensor(value: Any, name: str) -> Tensor:
    """A dense tensor on the CPU, of a dtype that a file can hold.

    Raises:
        TypeError: If it cannot be converted to one.
    """
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(np.ascontiguousarray(value, value.dtype.newbyteorder("=")))
        except TypeError:
            raise TypeError(
                f"{name} is an array of {value.dtype}, which a graph directory cannot hold"
            ) from None
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise TypeError(
            f"{name} is a tensor of layout {value.layout}, which a graph directory cannot hold: "
            "make it dense, or delete it"
        )
    value = value.detach().cpu().resolve_conj().resolve_neg()
    if type(value) is not Tensor:
        value = value.as_subclass(Tensor)
    dtype_name(value.dtype)
    return value


def decode(value: Any, directory: GraphDirectory) -> Any:
    """The value that JSON describes; tensors are mapped.

    Raises:
        GraphDirectoryError: If a file of a tensor has wrong content.
    """
    if isinstance(value, list):
        return [decode(each, directory) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "$tensor":
            shape = tuple(content["shape"])
            return directory.array(content["file"], content["dtype"], shape)
        if tag == "$tuple":
            return tuple(decode(each, directory) for each in content)
        if tag == "$dict":
            value = content
    return {name: decode(each, directory) for name, each in value.items()}


def check(value: Any, files: Container[str], what: str) -> None:
    """Refuse values that :func:`decode` cannot read.

    Args:
        value: The value in ``META.json``.
        files: The files of the directory.
        what: Its name in errors.

    Raises:
        ValueError: If it cannot be read; names it.
    """
    if isinstance(value, list):
        for each in value:
            check(each, files, what)
    elif isinstance(value, dict):
        if not value.keys() & set(_TAGS):
            check(list(value.values()), files, what)
        elif len(value) != 1:
            raise ValueError(f"{what} has {min(value)!r} next to another entry")
        else:
            ((tag, content),) = value.items()
            _check_tagged(tag, content, files, what)


def _check_tagged(tag: str, content: Any, files: Container[str], what: str) -> None:
    if tag == "$tensor":
        right = (
            isinstance(content, dict)
            and content.keys() == {"file", "dtype", "shape"}
            and isinstance(content["file"], str)
            and content["file"] in files
            and content["dtype"] in DTYPES
            and isinstance(content["shape"], list)
            and all(type(size) is int and 0 <= size < _LARGEST for size in content["shape"])
        )
    elif tag == "$tuple":
        right = isinstance(content, list)
        check(content, files, what)
    else:
        right = isinstance(content, dict)
        check(list(content.values()) if right else None, files, what)
    if not right:
        raise ValueError(f"{what} has an invalid {tag}")
