"""The header sent before a tensor: the call that it belongs to, its dtype and shape."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_scale.comm.base import MAX_DIMS
from pyg_scale.errors import CommError

_MAGIC = 0x70796753_63616C65
SIZE = 4 + MAX_DIMS
"""Numbers in a header: mark, collective, dtype, dimensions, shape."""

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
"""The dtypes that can be sent; a message has the index in this list."""
_MOST = 1 << 62
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def header(name: str, tensor: Tensor) -> Tensor:
    """The header of a tensor, ``int64`` ``[SIZE]`` on the CPU.

    Raises:
        TypeError: If its dtype cannot be sent.
    """
    shape = [*tensor.shape, *[0] * (MAX_DIMS - tensor.dim())]
    return torch.tensor([_MAGIC, _code(name), dtype_code(tensor.dtype), tensor.dim(), *shape])


def empty_for(found: Tensor, name: str, source: int, device: torch.device) -> Tensor:
    """An empty tensor of the dtype and shape that a header announces.

    Args:
        found: The received header.
        name: The collective that this rank is in.
        source: The rank that sent it.
        device: Device of the result.

    Raises:
        CommError: If it is of another collective, or not a header.
    """
    mark, code, dtype, dims, *shape = found.tolist()
    if mark != _MAGIC or not 0 <= dtype < len(DTYPES) or not 0 <= dims <= MAX_DIMS:
        raise CommError(f"{name}: rank {source} sent something that is not a message of pyg_scale")
    if code != _code(name):
        raise CommError(
            f"this rank is in {name}, rank {source} in another collective: all ranks must call the "
            "same ones in the same order, or give them tags"
        )
    return torch.empty(shape[:dims], dtype=DTYPES[dtype], device=device)


def dtype_code(dtype: torch.dtype) -> int:
    """The index of a dtype in :data:`DTYPES`.

    Raises:
        TypeError: If it cannot be sent.
    """
    if dtype not in _CODES:
        raise TypeError(f"tensors of {dtype} cannot be sent")
    return _CODES[dtype]


def announced_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Size in bytes of a tensor whose dtype and shape were received.

    Raises:
        CommError: If no tensor can have them.
    """
    span = dtype.itemsize
    for extent in shape:
        span *= max(extent, 1)  # strides are products of the others where one is 0
    if span >= _MOST:
        raise CommError(f"a tensor of shape {list(shape)} was announced, which none can have")
    return 0 if 0 in shape else span


def _code(name: str) -> int:
    return zlib.crc32(name.encode())
