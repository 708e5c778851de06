"""Features, labels, masks and index sets, streamed to their files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from pyg_scale.convert.array_file import ArrayReader, ArrayWriter, read_header
from pyg_scale.convert.journal import ConversionWorkspace
from pyg_scale.files.npy import dtype_name, numpy_dtype, torch_dtype
from pyg_scale.files.plain_pickle import load_plain
from pyg_scale.graph.topology import sortable_time
from pyg_scale.store.directory.meta import Attribute

_CHECKPOINT = 1 << 28  # bytes between two entries in the journal


class RowStream:
    """A stream of rows and where it goes on: what one attribute is copied from.

    Args:
        what: What errors and the progress bar call it.
        attribute: Dtype and row shape that were described.
        size: How many rows there must be.
        read: Called with the first row and the most rows of a chunk.
        dtype: Convert floating point numbers to this one; ``None`` to keep them.
    """

    def __init__(
        self, what: str, attribute: Attribute, size: int, read: object, dtype: str | None = None
    ) -> None:
        self.what = what
        self.size = size
        self.given = attribute
        self.attribute = Attribute(dtype or attribute.dtype, attribute.row)
        self._read = read

    def chunks(self, begin: int, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Checked and converted rows with the number of the first.

        Raises:
            ValueError: If they are not as described, or a number does not fit the dtype.
        """
        at = begin
        for chunk in self._read(begin, rows):  # type: ignore[operator]
            if dtype_name(chunk.dtype) != self.given.dtype or tuple(chunk.shape[1:]) != tuple(
                self.given.row
            ):
                raise ValueError(
                    f"{self.what} has rows of {chunk.dtype} and shape {list(chunk.shape[1:])}, "
                    f"expected {self.given.dtype} and {list(self.given.row)}"
                )
            if at + chunk.size(0) > self.size:
                raise ValueError(f"{self.what} has more than the {self.size} rows expected")
            yield at, self._converted(chunk, at)
            at += chunk.size(0)
        if at < self.size:
            raise ValueError(f"{self.what} has {at} rows, expected {self.size}")

    def _converted(self, chunk: Tensor, at: int) -> Tensor:
        if self.attribute.dtype == self.given.dtype:
            return chunk
        out = chunk.to(torch_dtype(self.attribute.dtype))
        lost = torch.isfinite(chunk) & ~torch.isfinite(out)
        if bool(lost.any()):
            row = int(lost.view(len(lost), -1).any(1).nonzero()[0])
            raise ValueError(
                f"{self.what}, row {at + row}, has {float(chunk[lost][0])}, which is too large "
                f"for {self.attribute.dtype}: choose bfloat16, or leave feature_dtype out"
            )
        return out


def copy_rows(rows: RowStream, file: Path, work: ConversionWorkspace, step: str) -> None:
    """Copy an attribute to its file, in pieces."""
    row_bytes = max(1, _row_bytes(rows.given), _row_bytes(rows.attribute))
    count = max(1, min(work.memory // (6 * row_bytes), (1 << 25) // row_bytes))
    begin = work.journal.reached(step)
    shape = (rows.size, *rows.attribute.row)
    with (
        ArrayWriter(file, rows.attribute.dtype, shape, fresh=begin is None) as writer,
        work.progress(f"Copying {rows.what}", rows.size, "rows", begin or 0) as bar,
    ):
        unsaved = 0
        for at, chunk in rows.chunks(begin or 0, count):
            writer.write(at, chunk)
            bar.update(chunk.size(0))
            unsaved += chunk.size(0) * row_bytes
            if unsaved >= _CHECKPOINT:
                writer.sync()
                work.journal.reach(step, at + chunk.size(0))
                unsaved = 0
        writer.sync()


def link_rows(rows: RowStream, source: Path, file: Path) -> None:
    """Make ``file`` a second name of ``source``, which holds exactly these rows.

    Raises:
        ValueError: If it does not.
        OSError: If the file system has no hard links, or the two are on different ones.
    """
    shape, fortran, dtype, _ = read_header(source)
    wanted = (rows.size, *rows.attribute.row)
    if tuple(shape) != wanted or fortran or dtype != numpy_dtype(rows.attribute.dtype):
        raise ValueError(
            f"link_features=True: {source} holds {dtype} of shape {list(shape)}, the graph "
            f"directory needs {rows.attribute.dtype} of shape {list(wanted)}: leave it out, to copy"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    try:
        os.link(source, file)
    except OSError as error:
        raise OSError(
            error.errno,
            f"link_features=True: {source} cannot be linked into {file.parent} "
            f"({error.strerror}); both must be on one file system that has hard links, else leave "
            "it out, to copy",
        ) from None


def copy_index_set(
    what: str, chunks: Iterator[Tensor], size: int, num_nodes: int, file: Path
) -> None:
    """Copy a named set of nodes.

    Raises:
        TypeError: If it does not hold integers.
        IndexError: If a node does not exist.
        ValueError: If it has another length than was described.
    """
    at = 0
    with ArrayWriter(file, "int64", (size,), fresh=True) as writer:
        for chunk in chunks:
            if chunk.dim() != 1 or chunk.is_floating_point() or chunk.dtype == torch.bool:
                raise TypeError(
                    f"{what} must hold node ids, one-dimensional integers (got {chunk.dtype} of "
                    f"shape {list(chunk.shape)})"
                )
            wrong = (chunk < 0) | (chunk >= num_nodes)
            if bool(wrong.any()):
                first = int(wrong.nonzero()[0])
                raise IndexError(
                    f"{what}, entry {at + first}, is node {int(chunk[first])}, but there are "
                    f"{num_nodes}"
                )
            if at + chunk.numel() > size:
                raise ValueError(f"{what} has more than {size} entries")
            writer.write(at, chunk.to(torch.int64))
            at += chunk.numel()
        writer.sync()
    if at != size:
        raise ValueError(f"{what} has {at} entries, expected {size}")


def copy_times(rows: RowStream, file: Path, float_time: bool) -> None:
    """Copy the times of nodes, as integers in the same order.

    Raises:
        ValueError: If one is NaN, which names the row, or an integer that ``float64`` rounds.
    """
    with ArrayWriter(file, "int64", (rows.size,), fresh=True) as writer:
        for at, chunk in rows.chunks(0, 1 << 17):
            time = chunk.reshape(-1)
            if time.is_floating_point() and bool(time.isnan().any()):
                first = at + int(time.isnan().nonzero()[0])
                raise ValueError(f"{rows.what}, row {first}, is NaN: give every node a time")
            writer.write(at, sortable_time(time, float_time, rows.what))
        writer.sync()


def _row_bytes(attribute: Attribute) -> int:
    size = numpy_dtype(attribute.dtype).itemsize
    for each in attribute.row:
        size *= each
    return size


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
