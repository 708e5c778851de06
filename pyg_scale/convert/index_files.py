"""Named sets of nodes from files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from pyg_scale.convert.array_file import ArrayReader
from pyg_scale.files.plain_pickle import load_plain

_ROWS = 1 << 16


class IndexFile:
    """Node ids in a ``.npy`` or ``.pt`` file.

    Args:
        path: The file. Of a ``.pt`` file only plain tensors are read, never code.

    Raises:
        ValueError: If it is neither, or does not hold one row of integers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensor: Tensor | None = None
        self._file: ArrayReader | None = None
        if path.suffix == ".npy":
            self._file = ArrayReader(path)
            name, shape = str(self._file.dtype), tuple(self._file.shape)
            integers = self._file.dtype.kind in "iu"
        elif path.suffix == ".pt":
            self._tensor = _load(path)
            kind = self._tensor.dtype
            integers = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
            name, shape = str(kind).removeprefix("torch."), tuple(self._tensor.shape)
        else:
            raise ValueError(f"{path}: an index set is a .npy or a .pt file")
        if len(shape) != 1 or not integers:
            raise ValueError(
                f"{path} holds {name}, shape {list(shape)}: an index set is node ids, integers "
                "[n]; of a mask give mask.nonzero()[0] of NumPy"
            )
        self.size = shape[0]

    def chunks(self) -> Iterator[Tensor]:
        """Its ids ``int64``, in order."""
        for begin in range(0, self.size, _ROWS):
            end = min(self.size, begin + _ROWS)
            if self._tensor is not None:
                yield self._tensor[begin:end].to(torch.int64)
            elif self._file is not None:
                yield torch.from_numpy(self._file.rows(begin, end).astype("i8"))
        if self._file is not None:
            self._file.close()


def _load(path: Path) -> Tensor:
    value = load_plain(path, mmap=True)
    if not isinstance(value, Tensor):
        raise ValueError(f"{path} must hold a tensor (it holds {type(value).__name__})")
    return value
