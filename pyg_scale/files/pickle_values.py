"""All names that a pickle may use: those that rebuild dense tensors and arrays of plain numbers.

Each function replaces one of torch, NumPy or Python, and checks its arguments, which may be any
value that a pickle can build.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pickle import UnpicklingError
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype))
_KEYS = SCALARS | {np.dtype(code).type for code in "?bhilqBHILQefd"}
"""The types of keys: they are hashed by their value."""
_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")


@dataclass(frozen=True)
class Storage:
    """The storage of which a tensor is a view.

    Attributes:
        dtype: Its dtype; ``None`` if only its tensors have one.
        content: ``uint8`` ``[bytes]``.
    """

    dtype: torch.dtype | None
    content: Tensor

    @property
    def itemsize(self) -> int:
        """Size of a value in bytes."""
        return 1 if self.dtype is None else self.dtype.itemsize

    def of(self, dtype: torch.dtype | None, size: int) -> Storage:
        """Return itself, after checking its dtype and number of values."""
        if dtype != self.dtype or size * self.itemsize != self.content.numel():
            raise UnpicklingError(f"a storage of {size} values has another number of bytes")
        return self

    def part(self, begin: int, size: int) -> Storage:
        """Consecutive values."""
        checked_sizes((begin, size))
        if (begin + size) * self.itemsize > self.content.numel():
            raise UnpicklingError("a view leads out of its storage")
        within = self.content[begin * self.itemsize : (begin + size) * self.itemsize]
        return Storage(self.dtype, within)

    def check(self, dtype: torch.dtype | None) -> None:
        """Refuse bytes that are not a value of a dtype."""
        if dtype is torch.bool and bool((self.content > 1).any()):
            raise UnpicklingError("a bool is neither true nor false")


@dataclass(frozen=True)
class Call:
    """Stands for a function or class that a pickle may call."""

    function: Callable[..., Any]


@dataclass(frozen=True)
class Class:
    """Stands for a class that a pickle may make instances of."""

    kind: type


@dataclass(frozen=True)
class StorageType:
    dtype: torch.dtype | None


@dataclass
class Numbers:
    """A NumPy dtype whose state follows."""

    code: str
    order: Literal["<", ">", "|", "="] = "="

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.code).newbyteorder(self.order)


@dataclass
class Array:
    """An array whose content follows.

    Attributes:
        memo: The memo entries in which the pickle has it.
    """

    memo: list[int] = field(default_factory=list)


NDARRAY = Class(np.ndarray)
TENSOR = Class(Tensor)
FILE = object()
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}


@cache
def allowed() -> dict[tuple[str, str], Any]:
    allowed: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): Call(_ordered),
        ("_codecs", "encode"): Call(_encode),
        ("torch", "Size"): Call(lambda size: torch.Size(checked_sizes(size))),
        ("torch", "Tensor"): TENSOR,
        ("torch._utils", "_rebuild_tensor_v2"): Call(_rebuild),
        ("torch._utils", "_rebuild_tensor_v3"): Call(_rebuild_typed),
        ("torch._utils", "_rebuild_parameter"): Call(_parameter),
        ("torch._tensor", "_rebuild_from_type_v2"): Call(_without_type),
        ("torch.storage", "_load_from_bytes"): FILE,
        ("torch.storage", "UntypedStorage"): StorageType(None),
        ("numpy", "ndarray"): NDARRAY,
        ("numpy", "dtype"): Call(_numbers),
    }
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            allowed["torch", name] = value
    for name, dtype in _STORAGES.items():
        allowed["torch", f"{name}Storage"] = StorageType(dtype)
    for core in ("numpy.core", "numpy._core"):  # before and after NumPy 2
        allowed[f"{core}.multiarray", "_reconstruct"] = Call(_no_array_yet)
        allowed[f"{core}.multiarray", "scalar"] = Call(_scalar)
        allowed[f"{core}.numeric", "_frombuffer"] = Call(_array_of_buffer)
    for module in ("builtins", "__builtin__"):  # its name in protocol 2
        allowed[module, "set"] = Call(lambda items=(): set(checked_keys(items)))
        allowed[module, "frozenset"] = Call(lambda items=(): frozenset(checked_keys(items)))
        allowed[module, "bytearray"] = Call(lambda content=b"": bytearray(checked_bytes(content)))
        allowed[module, "complex"] = Call(_complex)
    return allowed


def checked_keys(items: Any) -> Sequence[Any]:
    """Values that can be hashed without following references."""
    if type(items) not in (list, tuple):
        raise UnpicklingError(f"it makes keys of a {type(items).__name__}")
    for each in items:
        if type(each) not in _KEYS and (
            type(each) is not tuple or any(type(one) not in _KEYS for one in each)
        ):
            raise UnpicklingError(f"it has a key of the type {type(each).__name__}")
    return items


def checked_bytes(content: Any) -> bytes:
    if type(content) not in (bytes, bytearray):
        raise UnpicklingError(f"it takes a {type(content).__name__} for bytes")
    return bytes(content)


def checked_sizes(sizes: Any) -> tuple[int, ...]:
    if type(sizes) not in (tuple, torch.Size, list) or len(sizes) > 64:
        raise UnpicklingError(f"it takes a {type(sizes).__name__} for sizes")
    if any(type(each) is not int or not 0 <= each < 1 << 62 for each in sizes):
        raise UnpicklingError("a size is not an integer, negative or too large")
    if math.prod(each for each in sizes if each) >= 1 << 62:
        raise UnpicklingError("sizes are too large")
    return tuple(sizes)


def _ordered(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    if type(items) not in (list, tuple):
        raise UnpicklingError(f"it makes an OrderedDict of a {type(items).__name__}")
    if any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in items):
        raise UnpicklingError("it makes an OrderedDict of other than pairs")
    keys = checked_keys([key for key, _ in items])
    return collections.OrderedDict(zip(keys, (value for _, value in items), strict=True))


def _encode(text: Any, encoding: Any) -> bytes:
    """Bytes in the form of old protocols."""
    if type(text) is not str or encoding != "latin1":
        raise UnpicklingError("it asks for an encoding other than latin1")
    return text.encode("latin1")


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise UnpicklingError("it makes a complex number of other than floats")
    return complex(real, imaginary)


def _rebuild(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Tensor:
    if type(storage) is not Storage or (storage.dtype is None):
        raise UnpicklingError(f"it makes a tensor of a {type(storage).__name__}")
    size, stride = checked_sizes(size), checked_sizes(stride)
    checked_sizes((offset,))
    if len(size) != len(stride):
        raise UnpicklingError(f"a tensor has {len(size)} sizes and {len(stride)} strides")
    if metadata:
        raise UnpicklingError("a tensor is a lazy conjugate or negative: save a clone of it")
    count = math.prod(size)
    if not count:
        return torch.empty(size, dtype=storage.dtype)
    each = storage.itemsize
    have = storage.content.numel() // each
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= have:
        raise UnpicklingError(f"a tensor of {list(size)} leads out of its storage of {have} values")
    if count > have:
        raise UnpicklingError("a tensor has values several times (expand): save a clone of it")
    storage.check(storage.dtype)
    content = storage.content[: have * each]
    return content.view(storage.dtype).as_strided(size, stride, offset)


def _rebuild_typed(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Tensor:
    """A tensor that gives its dtype itself, as one without a storage class does."""
    if type(storage) is not Storage or storage.dtype is not None or type(dtype) is not torch.dtype:
        raise UnpicklingError(f"it makes a tensor of a {type(storage).__name__}")
    typed = Storage(dtype, storage.content)
    return _rebuild(typed, offset, size, stride, requires_grad, hooks, metadata)


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> Tensor:
    if type(data) is not Tensor:
        raise UnpicklingError(f"it makes a parameter of a {type(data).__name__}")
    return data


def _without_type(call: Any, kind: Any, arguments: Any, state: Any) -> Tensor:
    """The tensor of a subclass, as a plain tensor."""
    if type(call) is not Call or type(kind) is not Class or type(arguments) is not tuple:
        raise UnpicklingError("it rebuilds a tensor in an unknown way")
    if call.function not in (_rebuild, _rebuild_typed) or kind != TENSOR:
        raise UnpicklingError("it rebuilds a tensor in an unknown way")
    tensor: Tensor = call.function(*arguments)
    return tensor


def _numbers(code: Any, align: Any = False, copy: Any = True) -> Numbers:
    if type(code) is not str or align not in (False, 0):
        raise UnpicklingError("it has an array of other than plain numbers")
    plain = code.lstrip("<>|=")
    if _NUMBERS.fullmatch(plain) is None:
        raise UnpicklingError(f"it has an array of {code[:20]!r}, not of plain numbers")
    return Numbers(plain)


def set_order(numbers: Numbers, state: Any) -> None:
    """Take the byte order from a dtype's state; refuse anything else in it."""
    if type(state) is not tuple or len(state) != 8 or state[1] not in ("<", ">", "|", "="):
        raise UnpicklingError("a dtype has a state of its own")
    if (state[0], *state[2:]) != (3, None, None, None, -1, -1, 0):
        raise UnpicklingError("a dtype has a state of its own")
    numbers.order = state[1]


def _no_array_yet(kind: Any, shape: Any, code: Any) -> Array:
    if kind != NDARRAY or shape != (0,) or code not in (b"b", "b"):
        raise UnpicklingError("it begins an array in an unknown way")
    return Array()


def array_of_state(state: Any) -> NDArray[Any]:
    if type(state) is not tuple or len(state) != 5 or type(state[3]) is not bool:
        raise UnpicklingError("an array has a state of its own")
    _, shape, numbers, fortran, content = state
    return _array_of_buffer(content, numbers, shape, "F" if fortran else "C")


def _array_of_buffer(content: Any, numbers: Any, shape: Any, order: Any) -> NDArray[Any]:
    if type(numbers) is not Numbers or type(shape) is not tuple or order not in ("C", "F"):
        raise UnpicklingError("an array is not of plain numbers, or has no shape")
    dtype, shape = numbers.dtype, checked_sizes(shape)
    content = bytearray(checked_bytes(content))
    if len(shape) > 32 or math.prod(shape) * dtype.itemsize != len(content):
        raise UnpicklingError(f"an array of {list(shape)} has {len(content)} bytes")
    if dtype == np.bool_ and content and max(content) > 1:
        raise UnpicklingError("a bool is neither true nor false")
    found = np.frombuffer(content, dtype).reshape(shape, order=order)
    return found.astype(dtype.newbyteorder("="), order="K", copy=False)


def _scalar(numbers: Any, content: Any) -> Any:
    return _array_of_buffer(content, numbers, (), "C")[()]
