"""Headers of ``.npy`` files: the usual ones without NumPy's parser, and damaged ones."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from numpy.lib import format as npy

from pyg_scale.files.npy import read_npy_header

SHAPES = [(), (0,), (3,), (3, 4), (1, 2, 3), (10**18,)]
USUAL = ["<f4", "<f2", "|u1", "|b1", "<i8"]


def stream(dtype: str, shape: tuple[int, ...], *, fortran: bool = False, version: int = 1) -> Any:
    out = io.BytesIO()
    write = npy.write_array_header_1_0 if version == 1 else npy.write_array_header_2_0
    write(out, {"descr": dtype, "fortran_order": fortran, "shape": shape})
    end = out.tell()
    out.write(b"{'data': 1}\n")
    out.seek(0)
    return out, end


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*USUAL, ">i4", "<M8[s]", "|S3"])
@pytest.mark.parametrize("version", [1, 2])
def test_headers_of_numpy(dtype: str, shape: tuple[int, ...], version: int) -> None:
    for fortran in (False, True):
        file, end = stream(dtype, shape, fortran=fortran, version=version)
        assert read_npy_header(file) == (shape, fortran, np.dtype(dtype))
        assert file.tell() == end


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", USUAL)
def test_usual_headers_are_not_parsed_as_python(
    dtype: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads that parse at a time may fail in CPython 3.11."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(npy, "read_array_header_1_0", refuse)
    assert read_npy_header(stream(dtype, shape)[0])[0] == shape


DICTIONARY = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }"


@pytest.mark.parametrize("sizes", ["1,,2", "5", "1 2", "-1,", "01,", "1, 2, x", "9" * 5000 + ","])
def test_damaged_shapes(sizes: str) -> None:
    text = (DICTIONARY % sizes).encode().ljust(100) + b"\n"
    with pytest.raises(ValueError, match="its header is damaged"):
        read_npy_header(io.BytesIO(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text))


@pytest.mark.parametrize(
    "start",
    [b"", b"x", b"\x93NUMPY", b"\x93NUMPY\x09\x00ab", b"\x93NUMPY\x01\x00\x10\x00{'descr'"],
)
def test_files_that_end_or_are_others(start: bytes) -> None:
    with pytest.raises(ValueError, match="its header is damaged"):
        read_npy_header(io.BytesIO(start))


def test_a_long_header_is_refused_before_it_is_read() -> None:
    class Endless(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            assert size is not None and 0 <= size <= 1 << 17
            return super().read(size)

    file = Endless(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"x" * 1000)
    with pytest.raises(ValueError, match="says that it has 4294967295 bytes"):
        read_npy_header(file)
