"""Pickles of other programs, read without running anything of them.

A pickle is a program that names functions to call. Here only those that rebuild dense tensors and
NumPy arrays can be named; plain containers need none. ``torch.load(weights_only=True)`` means the
same, but knows neither the newer pickle protocols nor tensors that :mod:`pickle` itself wrote.
"""

from __future__ import annotations

import collections
import io
import pickle
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import dtypes

StandIn = Callable[[str, str], Any]
"""From the module and name of a class to what is made instead of it; ``None`` to refuse it."""


def load_plain(
    file: str | PathLike[str], *, mmap: bool = False, stand_in: StandIn | None = None
) -> Any:
    """What ``torch.save`` wrote: dense tensors, NumPy arrays, numbers, text and containers.

    Args:
        file: The file.
        mmap: Map tensors instead of reading them, where the file is of torch 1.6 or later.
        stand_in: Says what to make of other classes.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or holds anything else; names it. Nothing of it was run.
    """
    path = Path(file)
    _require(path)
    with _named(path):
        return torch.load(
            path,
            map_location="cpu",
            pickle_module=_module(stand_in),
            mmap=mmap and zipfile.is_zipfile(path),
            weights_only=False,  # the module refuses more
        )


def load_pickle(file: str | PathLike[str], *, stand_in: StandIn | None = None) -> Any:
    """What ``pickle.dump`` wrote; otherwise as :func:`load_plain`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or holds anything else; names it.
    """
    path = Path(file)
    _require(path)
    with _named(path), path.open("rb") as opened:
        return _module(stand_in).Unpickler(opened).load()


def iterate_pickles(file: str | PathLike[str], *, stand_in: StandIn | None = None) -> Iterator[Any]:
    """What ``pickle.dump`` appended to a file, one after another.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or holds anything else; names it.
    """
    path = Path(file)
    _require(path)
    module = _module(stand_in)
    with path.open("rb") as opened:
        end = path.stat().st_size
        while opened.tell() < end:
            with _named(path):
                value = module.Unpickler(opened).load()
            yield value


class _named:
    """Errors of reading as one that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, MemoryError):
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"{self.path} is damaged, or holds more than tensors, arrays and plain "
                f"containers: {type(error).__name__}: {reason}"
            ) from None


def _require(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")


def _module(stand_in: StandIn | None) -> Any:
    """What ``torch.load`` takes for the module ``pickle``."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = _allowed().get((module, name))
            if found is None and module == "torch":
                dtype = getattr(torch, name, None)
                found = dtype if isinstance(dtype, torch.dtype) else None
            if found is None and module == "numpy.dtypes" and name in dtypes.__all__:
                found = getattr(dtypes, name)
            if found is None and stand_in is not None:
                found = stand_in(module, name)
            if found is None:
                raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")
            return found

    def load(opened: Any, **options: Any) -> Any:
        return Unpickler(opened, **options).load()

    return types.SimpleNamespace(Unpickler=Unpickler, load=load, __name__="plain pickle")


@cache
def _allowed() -> Mapping[tuple[str, str], Any]:
    array, scalar = np.empty(0).__reduce__()[0], np.int64(0).__reduce__()[0]
    buffer = np.empty(0).__reduce_ex__(5)[0]
    allowed: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("_codecs", "encode"): _encode,
        ("torch", "Size"): torch.Size,
        ("torch", "Tensor"): torch.Tensor,
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        ("torch._tensor", "_rebuild_from_type_v2"): _without_type,
        ("torch.storage", "_load_from_bytes"): _storage,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }
    for builtin in (set, frozenset, bytearray, complex):
        for module in ("builtins", "__builtin__"):  # its name in protocol 2
            allowed[module, builtin.__name__] = builtin
    for core in ("numpy.core", "numpy._core"):  # before and after NumPy 2
        allowed[f"{core}.multiarray", "_reconstruct"] = array
        allowed[f"{core}.multiarray", "scalar"] = scalar
        allowed[f"{core}.numeric", "_frombuffer"] = buffer
    return allowed


def _encode(text: str, encoding: str) -> bytes:
    """Bytes as old protocols write them."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


def _without_type(function: Any, _: Any, arguments: Any, __: Any) -> torch.Tensor:
    """The tensor of a subclass, as a plain one."""
    if function is not torch._utils._rebuild_tensor_v2:
        raise pickle.UnpicklingError("it rebuilds a tensor in an unknown way")
    return torch._utils._rebuild_tensor_v2(*arguments)


def _storage(content: bytes) -> Any:
    """The storage of a tensor that was pickled without torch's help."""
    return torch.load(
        io.BytesIO(content), map_location="cpu", pickle_module=_module(None), weights_only=False
    )
