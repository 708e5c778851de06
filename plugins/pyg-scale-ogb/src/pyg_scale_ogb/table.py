"""Conversion of OGB's compressed tables of numbers to ``.npy`` files, piece by piece."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.lib import format as npy

from pyg_scale.files.place import naming
from pyg_scale_ogb.arrays import Items

_MOST_ROWS = 1 << 19
_BYTES_PER_NUMBER = 64  # as text, in pandas, and as the result
_HEADER = 128


def read_small(file: Path) -> list[list[str]]:
    """The cells of a small table, such as sizes or types.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged.
    """
    try:
        with gzip.open(file, "rt", encoding="utf-8") as opened:
            return [line.rstrip("\r\n").split(",") for line in opened if line.strip()]
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(file)!r}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def to_npy(file: Path, out: Path, memory: int, bar: Any) -> dict[str, Any]:
    """Write a table as an array ``[rows, columns]``, parsed as in OGB: ``int64`` if all numbers are
    integers, else ``float32``.

    Args:
        file: A ``.csv.gz`` without a header.
        out: The ``.npy`` file; complete on the disk on return.
        memory: Approximate number of bytes to use.
        bar: A progress bar, whose ``update`` gets the number of rows read.

    Returns:
        ``{"nan": True if a number is missing}``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or has anything but numbers.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_suffix(".tmp")
    # It is known only at the end if all numbers are integers, but most tables show it at once.
    for dtype in (np.dtype(np.int64), np.dtype(np.float32)):
        found = _write(file, fresh, dtype, memory, bar)
        if found is not None:
            fresh.replace(out)
            return found
    raise AssertionError("float32 takes everything")


def _write(
    file: Path, out: Path, dtype: np.dtype[Any], memory: int, bar: Any
) -> dict[str, Any] | None:
    """Write the table; ``None`` if it has fractions and ``dtype`` is an integer type."""
    rows, columns, nan = 0, _columns(file), False
    with naming(out), out.open("wb") as opened:
        opened.write(bytes(_HEADER))
        for values in pieces(file, columns, memory):
            if values.dtype.kind not in "iuf":
                raise ValueError(
                    f"{file} holds something else than numbers in the rows after row {rows}"
                )
            if values.dtype.kind == "f":
                if dtype.kind == "i":
                    return None
                nan = nan or bool(np.isnan(values).any())
            opened.write(np.ascontiguousarray(values, dtype).data)
            rows += len(values)
            bar.update(len(values))
        opened.seek(0)
        _write_header(opened, dtype, (rows, columns))
        opened.flush()
        os.fsync(opened.fileno())
    return {"nan": nan}


def pieces(file: Path, columns: int, memory: int) -> Iterator[Items]:
    """The rows, in arrays that take about ``memory`` bytes including parsing.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged.
    """
    step = min(_MOST_ROWS, max(1, memory // (_BYTES_PER_NUMBER * columns)))
    try:
        with pd.read_csv(file, compression="gzip", header=None, chunksize=step) as table:
            for piece in table:
                yield piece.to_numpy()
    except pd.errors.EmptyDataError:
        return
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(file)!r}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pd.errors.ParserError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def _columns(file: Path) -> int:
    """Number of columns of the first row; 1 if there is none."""
    try:
        with gzip.open(file, "rb") as opened:
            return opened.readline().count(b",") + 1
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(file)!r}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def _write_header(opened: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(opened, header)
    if opened.tell() != _HEADER:
        raise AssertionError(f"NumPy's header has {opened.tell()} bytes instead of {_HEADER}")
