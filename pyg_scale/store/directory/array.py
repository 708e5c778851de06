"""Plain ``.npy`` files as tensors, mapped and never copied.

NumPy has no bfloat16 and no float8: their bits are stored as unsigned integers of the same size,
and ``META.json`` has the dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError

_BITS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2")}
_WITHOUT_NUMPY = {
    name: getattr(torch, name)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
}
_NUMPY = {
    "bool": "|b1",
    "uint8": "|u1",
    "int8": "|i1",
    "uint16": "<u2",
    "int16": "<i2",
    "uint32": "<u4",
    "int32": "<i4",
    "uint64": "<u8",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
DTYPES = frozenset([*_NUMPY, *_WITHOUT_NUMPY])
"""The names of the dtypes that a graph directory can hold, as in ``torch.float32``."""


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``.

    Raises:
        TypeError: If a graph directory cannot hold the dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"a graph directory cannot hold {dtype}: convert it to a plain dtype")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """``torch.float32`` for ``"float32"``; the name is one of :data:`DTYPES`."""
    return getattr(torch, name)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """What a file holds for a dtype: itself, or its bits."""
    if name in _NUMPY:
        return np.dtype(_NUMPY[name])
    size: int = _WITHOUT_NUMPY[name].itemsize
    return _BITS[size]


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor on the CPU as an array to write, its bits where NumPy lacks the dtype. No copy."""
    name = dtype_name(tensor.dtype)
    tensor = tensor.detach()
    if name in _NUMPY:
        return tensor.numpy()
    return tensor.view(torch.uint16 if tensor.element_size() == 2 else torch.uint8).numpy()


def as_tensor(array: np.ndarray[Any, Any], name: str) -> Tensor:
    """The tensor of dtype ``name`` on the memory of an array that was read."""
    tensor = torch.from_numpy(array)
    return tensor if name in _NUMPY else tensor.view(_WITHOUT_NUMPY[name])


def map_array(path: Path, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor in a ``.npy`` file, mapped copy-on-write: writes stay in this process.

    Args:
        path: The file.
        dtype: What ``META.json`` says it holds.
        shape: What ``META.json`` says it holds.

    Raises:
        GraphDirectoryError: If it is missing, no ``.npy`` file, or holds something else.
    """
    offset = check_header(path, dtype, shape)
    if 0 in shape:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    array = np.memmap(path, numpy_dtype(dtype), mode="c", offset=offset, shape=shape)
    return as_tensor(np.asarray(array), dtype)


def check_header(path: Path, dtype: str, shape: tuple[int, ...]) -> int:
    """Compare a file's header and length with what it should hold; where its data begins.

    Raises:
        GraphDirectoryError: If they differ.
    """
    try:
        with path.open("rb") as file:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            found, fortran, stored = read(file)
            offset = file.tell()
            length = file.seek(0, 2)
    except FileNotFoundError:
        raise GraphDirectoryError(f"{path} is missing") from None
    except (ValueError, EOFError, OSError) as error:
        raise GraphDirectoryError(f"{path} cannot be read as .npy: {error}") from None
    wanted = numpy_dtype(dtype)
    if fortran or tuple(found) != tuple(shape) or stored != wanted:
        raise GraphDirectoryError(
            f"{path} holds {stored} of shape {list(found)}, META.json says {wanted} of shape "
            f"{list(shape)}: the file was replaced; write the directory again"
        )
    expected = offset + wanted.itemsize * int(np.prod(shape, dtype=object))
    if length != expected:
        raise GraphDirectoryError(
            f"{path} has {length} bytes, expected {expected}: it is truncated or was changed"
        )
    return offset
