"""Rows of ``.npy`` files, read and written in pieces, so that memory does not grow with a file.

Files are read and not mapped, as pages of a mapping count as memory of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyg_scale.errors import GraphDirectoryError
from pyg_scale.files.npy import as_array, as_tensor, check_header, numpy_dtype
from pyg_scale.store.directory import DirectoryWriter, GraphDirectory


class FileRows:
    """Reads rows of a file of a graph directory.

    Args:
        directory: The directory.
        name: The file, as ``META.json`` lists it.
        dtype: The dtype of the file, such as ``"float32"``.
        shape: The shape of the array.

    Raises:
        GraphDirectoryError: If it is missing or has other content.
    """

    def __init__(
        self, directory: GraphDirectory, name: str, dtype: str, shape: tuple[int, ...]
    ) -> None:
        if name not in directory.meta.files:
            raise GraphDirectoryError(f"{directory.path / 'META.json'} does not list {name}")
        self.path, self.dtype, self.shape = directory.path / name, dtype, shape
        self._open = partial(directory.file, name)
        self._offset = check_header(self.path, dtype, shape, open_file=self._open)
        self.row_bytes = numpy_dtype(dtype).itemsize * int(np.prod(shape[1:], dtype=np.int64))

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, begin: int, end: int) -> Tensor:
        """Read the rows ``begin`` to ``end - 1`` into new memory.

        Raises:
            GraphDirectoryError: If the file has become shorter.
        """
        array = np.empty((end - begin, *self.shape[1:]), numpy_dtype(self.dtype))
        with self._open() as file:
            file.seek(self._offset + begin * self.row_bytes)
            view, done = array.reshape(-1).view(np.uint8).data, 0
            while done < len(view):
                count = file.readinto(view[done:])  # type: ignore[attr-defined]
                if not count:
                    raise GraphDirectoryError(f"{self.path} became shorter while it was read")
                done += count
        return as_tensor(array, self.dtype)

    def chunks(
        self, rows: int, begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """``(first row, rows)`` of consecutive pieces of the file."""
        end = len(self) if end is None else end
        for start in range(begin, end, rows):
            yield start, self.read(start, min(end, start + rows))


class RowWriter:
    """Fills a new file of a graph directory from its beginning to its end.

    Args:
        writer: The directory that is written.
        name: The file.
        dtype: The dtype of the file.
        shape: The shape of the array.

    Raises:
        GraphDirectoryError: If the disk is full, before anything is written.
    """

    def __init__(
        self, writer: DirectoryWriter, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        writer.create(name, dtype, shape)  # the header, and room on the disk
        self.path: Path = writer.staging / name
        self._end = self.path.stat().st_size
        width = dtype.itemsize * int(np.prod(shape, dtype=object))
        self.dtype, self._row, self._at = dtype, shape[1:], self._end - width

    def append(self, rows: Tensor) -> None:
        """Write the next rows ``[n, ...]``; integers may be of another width."""
        assert rows.shape[1:] == self._row, f"{self.path}: {rows.shape[1:]} for {self._row}"
        if not rows.numel():
            return
        data = np.ascontiguousarray(as_array(rows.to(self.dtype))).reshape(-1).view(np.uint8)
        assert self._at + data.size <= self._end, f"more rows than {self.path} holds"
        with self.path.open("r+b", buffering=0) as file:  # opened again: parts may be thousands
            file.seek(self._at)
            view, done = data.data, 0
            while done < len(view):
                done += file.write(view[done:])
        self._at += data.size

    def finish(self) -> None:
        """Check that the file is full."""
        assert self._at == self._end, f"{self.path} lacks {self._end - self._at} bytes"


def pieces(pointers: Tensor, edges: int) -> Iterator[tuple[int, Tensor, int, int]]:
    """Divide the positions of pointers into ranges of at most ``edges``.

    A node with many positions may be in several ranges.

    Args:
        pointers: ``int64`` ``[num_nodes + 1]``.
        edges: The size of a range.

    Yields:
        ``(first node, number of positions in the range of it and each later node, begin, end)``.
    """
    values = pointers.numpy()
    for begin in range(int(values[0]), int(values[-1]), edges):
        end = min(int(values[-1]), begin + edges)
        low = int(np.searchsorted(values, begin, side="right")) - 1
        high = int(np.searchsorted(values, end, side="left"))
        counts = np.diff(np.clip(values[low : high + 1], begin, end))
        yield low, torch.from_numpy(counts), begin, end


class RowsByPart:
    """Rows sorted by their part, in their order within a part.

    Args:
        part: The part of each row, unsigned integers or ``int32`` ``[n]``.
        num_parts: Number of parts.
    """

    def __init__(self, part: Tensor, num_parts: int) -> None:
        values = part.numpy()
        self.order = torch.from_numpy(np.argsort(values, kind="stable"))  # radix for 8 and 16 bits
        self.counts = np.bincount(values, minlength=num_parts)
        self.bounds = np.concatenate([[0], self.counts.cumsum()])

    def append(self, rows: Tensor, writers: list[RowWriter]) -> None:
        """Write rows ``[n, ...]`` to the file of each part."""
        rows = rows[self.order] if rows.dtype.itemsize > 1 else _bytes(rows, self.order)
        for part, writer in enumerate(writers):
            writer.append(rows[self.bounds[part] : self.bounds[part + 1]])


def ranks(part: Tensor, num_parts: int, rows: int) -> Iterator[tuple[int, RowsByPart, Tensor]]:
    """``(first row, rows by part, rank of each row within its part)`` of consecutive pieces.

    Args:
        part: The part of each row ``[n]``.
        num_parts: Number of parts.
        rows: Rows at a time.
    """
    seen = np.zeros(num_parts, dtype=np.int64)
    for begin in range(0, part.numel(), rows):
        split = RowsByPart(part[begin : begin + rows], num_parts)
        rank = torch.empty(split.order.numel(), dtype=torch.int64)
        starts = np.repeat(seen - split.bounds[:-1], split.counts)
        rank[split.order] = torch.from_numpy(np.arange(rank.numel()) + starts)
        yield begin, split, rank
        seen += split.counts


def _bytes(rows: Tensor, order: Tensor) -> Tensor:
    return rows.view(torch.uint8)[order].view(rows.dtype)  # not every 8-bit type can be indexed
