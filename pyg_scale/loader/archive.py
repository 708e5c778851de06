"""Several small arrays in one ``.npz`` file, which says what it is and of which edges."""

from __future__ import annotations

import io
import os
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_scale.files.place import flush, naming
from pyg_scale.ops import keys

ADVICE = "remove the file, or choose another save_dir or filename"

# Errors of NumPy and zipfile for bytes that are damaged, or not theirs.
_DAMAGED = (
    KeyError,
    ValueError,
    EOFError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    MemoryError,
    OSError,
    RuntimeError,
)


def edges_hash(edge_index: Tensor, *, ordered: bool = False) -> int:
    """A hash of the edges ``[2, num_edges]``, whatever their order, or of their order too."""
    row, col = edge_index.cpu().to(torch.int64)
    hashed = keys.fold_tensor(keys.fold_tensor(0, row), col)
    if ordered:
        hashed = keys.fold_tensor(hashed, torch.arange(hashed.numel()))
    return int(hashed.sum())


def save_archive(file: Path, kind: str, edges: int, **arrays: Any) -> None:
    """Write arrays under a temporary name, flushed and renamed.

    Args:
        file: The file to write; its folder is made.
        kind: The content, and the version of the format.
        edges: The :func:`edges_hash` of the edges that the arrays are about; of their order, too,
            if there is an entry for each of them.
        arrays: NumPy arrays, numbers and strings, by name.

    Raises:
        OSError: If the disk is full.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    content: dict[str, Any] = {name: np.asarray(value) for name, value in arrays.items()}
    try:
        with naming(new), new.open("wb") as out:
            np.savez(out, format=np.array(kind), edges=np.array(edges), **content)
            flush(out)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def load_archive(file: Path, kind: str, edges: int, *names: str) -> list[Any]:
    """The arrays of :func:`save_archive`; nothing in the file is run.

    Raises:
        ValueError: If the file is of another kind, is damaged, or is of other edges.
    """
    stored = io.BytesIO(file.read_bytes())
    try:
        with np.load(stored, allow_pickle=False) as found:
            written, others = str(found["format"]), int(found["edges"])
            if written != kind:
                raise ValueError(f"its format is {written!r}")
            arrays = [found[name] for name in names]
    except _DAMAGED as error:
        raise ValueError(
            f"{file} is no file of {kind!r}, perhaps one of PyG ({error}): {ADVICE}"
        ) from None
    if others != edges:
        raise ValueError(f"{file} is of a graph with other edges: {ADVICE}")
    return arrays
