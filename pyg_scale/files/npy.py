"""Plain ``.npy`` files as tensors, mapped and never copied.

NumPy has no bfloat16 and no float8: their bits are stored as unsigned integers of the same size,
and ``META.json`` has the dtype.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.file_view import FileView

LONGEST_HEADER = 12 + 65536
"""Largest size of the header of a file in bytes."""

_PAGE = 4096
_LARGE = 1 << 20
_USUAL_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00.."
    rb"\{'descr': '([<|][a-z]\d+)', 'fortran_order': (True|False), "
    rb"'shape': \((|NUMBER,|NUMBER(?:, NUMBER)+)\), \} *\n".replace(b"NUMBER", rb"(?:0|[1-9]\d*)"),
    re.DOTALL,
)
_parsing = threading.Lock()
"""Held while a header is parsed as Python: CPython 3.11 counts the depth of that in one place for
all threads, and the counts may then disagree (see its issue 106905)."""

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
"""The names of the dtypes that a graph directory supports, as in ``torch.float32``."""


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``.

    Raises:
        TypeError: If graph directories do not support the dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"a graph directory cannot hold {dtype}: convert it to a plain dtype")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """``torch.float32`` for ``"float32"``; the name is one of :data:`DTYPES`."""
    return getattr(torch, name)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a file for a dtype: itself, or one for its bits."""
    if name in _NUMPY:
        return np.dtype(_NUMPY[name])
    size: int = _WITHOUT_NUMPY[name].itemsize
    return _BITS[size]


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor on the CPU as an array to write, as bits if NumPy lacks the dtype. Not copied."""
    name = dtype_name(tensor.dtype)
    tensor = tensor.detach()
    if name in _NUMPY:
        return tensor.numpy()
    return tensor.view(torch.uint16 if tensor.element_size() == 2 else torch.uint8).numpy()


def as_tensor(array: np.ndarray[Any, Any], name: str) -> Tensor:
    """A tensor of dtype ``name`` that shares the memory of an array that was read."""
    tensor = torch.from_numpy(array)  # keeps the array alive, and so its mapping
    return tensor if name in _NUMPY else tensor.view(_WITHOUT_NUMPY[name])


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor in a file in bytes, without the header."""
    return numpy_dtype(dtype).itemsize * math.prod(shape)


def check_regular(name: str, root: Path, dir_fd: int | None = None) -> os.stat_result:
    """The ``stat`` result of a file in an untrusted directory, after checking its kind.

    Links within the directory are followed, and the directory itself may be reached by a link.

    Args:
        name: Its path in the directory, with ``/``.
        root: The path of the directory, for errors and if there is no ``dir_fd``.
        dir_fd: The directory, opened.

    Raises:
        GraphDirectoryError: If it is not a regular file (a FIFO would block its reader for ever),
            or a link leads out of the directory.
        OSError: If it does not exist.
    """
    base, step = Path("" if dir_fd is not None else root), ""
    found = os.stat(base / name, dir_fd=dir_fd)
    if not stat.S_ISREG(found.st_mode):
        raise GraphDirectoryError(f"{root / name} is not a regular file, and is not read")
    for each in name.split("/"):
        step = f"{step}/{each}" if step else each
        if stat.S_ISLNK(os.lstat(base / step, dir_fd=dir_fd).st_mode):
            top = os.path.realpath(root if dir_fd is None else f"/proc/self/fd/{dir_fd}")
            led = os.path.realpath(os.path.join(top, name))
            if not Path(led).is_relative_to(top):
                raise GraphDirectoryError(
                    f"{root / step} is a link that leads out of the directory, to {led}: put the "
                    "file there itself (the whole directory may be reached by a link)"
                )
            break
    return found


def open_regular(name: str, root: Path, dir_fd: int | None = None, flags: int = 0) -> int:
    """Open a file of a directory for reading, see :func:`check_regular`; the caller closes it.

    Args:
        name: Its path in the directory, with ``/``.
        root: The path of the directory, for errors and if there is no ``dir_fd``.
        dir_fd: The directory, opened.
        flags: Flags of ``os.open``, such as ``O_DIRECT``.

    Raises:
        GraphDirectoryError: If it is not a regular file, or a link leads out of the directory.
        OSError: If it does not exist, or cannot be opened with the flags.
    """
    check_regular(name, root, dir_fd)
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # it may be another file by now
    handle = os.open(root / name if dir_fd is None else name, flags, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise GraphDirectoryError(f"{root / name} is not a regular file, and is not read")
    return handle


Open = Callable[[], BinaryIO]
"""Opens a file for reading."""


def map_array(
    path: Path, dtype: str, shape: tuple[int, ...], *, open_file: Open | None = None
) -> Tensor:
    """The tensor in a ``.npy`` file, mapped copy-on-write: writes stay in this process.

    Args:
        path: The file.
        dtype: Its dtype according to ``META.json``.
        shape: Its shape according to ``META.json``.
        open_file: Opens the file if its path does not suffice, such as in a directory that was
            renamed after it was opened; ``path`` is then only for errors.

    Raises:
        GraphDirectoryError: If it is missing, is not a ``.npy`` file, or has another shape or
            dtype.
    """
    with _opened(path, open_file) as file:
        offset = _data_offset(path, file, dtype, shape)
        if 0 in shape:
            return torch.empty(shape, dtype=torch_dtype(dtype))
        try:
            view = FileView(file.fileno(), offset, numpy_dtype(dtype), shape)
        except OSError as error:
            raise GraphDirectoryError(f"{path} cannot be mapped: {error}") from None
    array = np.asarray(view)
    with torch.inference_mode(False):  # tensors of inference mode have no version counter
        return as_tensor(array, dtype)


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The first bytes of a ``.npy`` file.

    The data of a file of 1 MiB or more begins at a page boundary: a row with the size of a page is
    then in one page, and so are shorter rows whose size divides it.

    Args:
        dtype: One of :data:`DTYPES`.
        shape: Shape of the tensor.
    """
    out = io.BytesIO()
    stored = npy.dtype_to_descr(numpy_dtype(dtype))
    npy.write_array_header_1_0(out, {"descr": stored, "fortran_order": False, "shape": shape})
    found = out.getvalue()
    if num_bytes(dtype, shape) < _LARGE or len(found) > _PAGE:
        return found
    padded = found[:-1].ljust(_PAGE - 1) + b"\n"  # NumPy pads with spaces, too
    return padded[:8] + (_PAGE - 10).to_bytes(2, "little") + padded[10:]


def check_header(
    path: Path, dtype: str, shape: tuple[int, ...], *, open_file: Open | None = None
) -> int:
    """Check a file's header and length; return the offset of its data.

    Raises:
        GraphDirectoryError: If they differ.
    """
    with _opened(path, open_file) as file:
        return _data_offset(path, file, dtype, shape)


@contextlib.contextmanager
def _opened(path: Path, open_file: Open | None) -> Iterator[BinaryIO]:
    try:
        if open_file is None:
            file: BinaryIO = os.fdopen(open_regular(path.name, path.parent), "rb")
        else:
            file = open_file()
    except FileNotFoundError:
        raise GraphDirectoryError(f"{path} is missing") from None
    except OSError as error:
        raise GraphDirectoryError(f"{path} cannot be opened: {error}") from None
    with file:
        yield file


def _data_offset(path: Path, file: BinaryIO, dtype: str, shape: tuple[int, ...]) -> int:
    try:
        found, fortran, stored = read_npy_header(file)
        offset = file.tell()
        length = os.fstat(file.fileno()).st_size
    except Exception as error:  # the header is parsed as Python, which can fail in many ways
        raise GraphDirectoryError(f"{path} cannot be read as .npy: {error}") from None
    wanted = numpy_dtype(dtype)
    # a single row or column is in both orders
    if (fortran and len(shape) > 1) or tuple(found) != tuple(shape) or stored != wanted:
        raise GraphDirectoryError(
            f"{path} holds {stored} of shape {list(found)}, META.json says {wanted} of shape "
            f"{list(shape)}: the file was replaced; write the directory again"
        )
    expected = offset + num_bytes(dtype, shape)
    if length != expected:
        raise GraphDirectoryError(
            f"{path} has {length} bytes, expected {expected}: it is truncated or was changed"
        )
    return offset


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, True if in Fortran order, and dtype of a NumPy array; its data follows.

    Raises:
        ValueError: If it is damaged.
    """
    try:
        header = _header(file)
        usual = _USUAL_HEADER.fullmatch(header)
        if usual is not None:  # NumPy takes ten times as long
            descr, fortran, sizes = usual.groups()
            found = tuple(int(size) for size in sizes.split(b",") if size)
            return found, fortran == b"True", np.dtype(descr.decode())
        stream = io.BytesIO(header)
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        with _parsing:
            shape, fortran, dtype = read(stream)
    except Exception as error:  # it is parsed as Python, which can fail in many ways
        first = str(error).partition("\n")[0]
        raise ValueError(f"its header is damaged: {type(error).__name__}: {first}") from None
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"its header is damaged: it has the shape {shape}")
    return shape, fortran, dtype


def _header(file: IO[bytes]) -> bytes:
    """The bytes before the data of an array; fewer if the file ends, or is none of NumPy's."""
    start = file.read(10)  # up to a length of two bytes
    if not start.startswith(npy.MAGIC_PREFIX):
        return start
    if start[6:7] != b"\x01":
        start += file.read(2)  # of four
    size = int.from_bytes(start[8:], "little")
    if size > LONGEST_HEADER:
        raise ValueError(f"it says that it has {size} bytes")
    return start + file.read(size)
