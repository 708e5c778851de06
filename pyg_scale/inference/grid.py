"""The in-edges of a range of nodes on disk, by blocks of destinations and chunks of sources."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pyg_scale.convert.array_file import ArrayReader, ArrayWriter
from pyg_scale.files.npy import as_tensor, dtype_name
from pyg_scale.ops.edge_buckets import Ranges, edge_buckets

_EDGE_BYTES = 80
"""Memory of an edge while it is grouped."""
_NAMES = ("src", "dst")


@dataclass(frozen=True)
class Layout:
    """A cut of the edges into cells.

    Attributes:
        begin: The first destination.
        end: The one after the last destination.
        num_src: Number of sources.
        block: Number of destinations of a block; the last one has the rest.
        chunk: Number of sources of a chunk, counted from source 0 on.
    """

    begin: int
    end: int
    num_src: int
    block: int
    chunk: int

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """First destination of each block, and the one after its last."""
        firsts = range(self.begin, self.end, self.block)
        return [(first, min(first + self.block, self.end)) for first in firsts]

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """First source of each chunk, and the one after its last."""
        firsts = range(0, self.num_src, self.chunk)
        return [(first, min(first + self.chunk, self.num_src)) for first in firsts]


class Piece(NamedTuple):
    """Some edges of a cell, ordered by destination.

    Attributes:
        src: ``int64`` ``[n]``, counted from the first source of the chunk.
        dst: ``int64`` ``[n]``, counted from the first destination of the block.
        attr: Their attribute, ``[n, ...]``, if the edges have one.
    """

    src: Tensor
    dst: Tensor
    attr: Tensor | None


class EdgeSource(Protocol):
    """Edges by destination.

    Attributes:
        num_src: Number of nodes that may be sources.
    """

    @property
    def num_src(self) -> int: ...

    def in_edges(
        self, begin: int, end: int, limit: int, with_ids: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """The in-edges of nodes ``begin`` to ``end - 1``, destination after destination.

        Args:
            begin: The first destination.
            end: The one after the last.
            limit: Number of edges at a time, if all edges are in this process.
            with_ids: True if the ids of edges are asked for.

        Yields:
            Sources, destinations and ids of edges, each ``int64`` ``[n]``.
        """
        ...

    def edge_values(self, name: str, ids: Tensor) -> Tensor:
        """An attribute of edges by their ids, ``[n, ...]``."""
        ...


class EdgeGrid:
    """Edges in cells, one for each block of destinations and chunk of sources.

    A layer that holds one block and one chunk at a time reads each edge once, in the order of the
    files (a grid of edges as in GridGraph: Zhu et al., USENIX ATC 2015).

    Args:
        edges: The edges.
        layout: The cells.
        attr: The attribute of edges to keep with them.
        loop_value: The attribute of the edge from a node to itself, where there is none; edges from
            nodes to themselves are then left out. ``None`` keeps them as they are.
        memory: Bytes to use.
        folder: The folder of the files, made anew.
        beat: Called every now and then.

    Attributes:
        loop_attr: The attribute of the edge of each destination to itself, ``[end - begin, ...]``,
            if ``attr`` and ``loop_value`` are given.
    """

    def __init__(
        self,
        edges: EdgeSource,
        layout: Layout,
        attr: str | None,
        loop_value: float | None,
        memory: int,
        folder: Path,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._beat = beat
        self.layout, self._attr, self._loop_value = layout, attr, loop_value
        self._source, self._folder = edges, folder
        self._limit = max(1 << 10, memory // _EDGE_BYTES)
        self.loop_attr: Tensor | None = None
        ends = [0, *(end for _, end in layout.chunks)]
        self._ranges = Ranges.of(torch.tensor(ends), max(0, layout.chunk.bit_length() - 3))
        counts = torch.zeros(len(layout.blocks) * len(layout.chunks), dtype=torch.int64)
        for src, dst, _ in self._edges(False):
            counts += torch.bincount(self._cell(src, dst), minlength=counts.numel())
        self._ends = [0, *counts.cumsum(0).tolist()]
        self._write()
        self._readers = [ArrayReader(folder / f"{name}.npy") for name in self._names]

    @property
    def _names(self) -> tuple[str, ...]:
        return _NAMES if self._attr is None else (*_NAMES, "attr")

    def remove(self) -> None:
        """Close and remove the files."""
        for reader in self._readers:
            reader.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def num_edges(self, block: int, chunk: int) -> int:
        """Number of edges of a cell."""
        cell = block * len(self.layout.chunks) + chunk
        return self._ends[cell + 1] - self._ends[cell]

    def pieces(self, block: int, chunk: int, limit: int) -> Iterator[Piece]:
        """The edges of a cell in pieces of at most ``limit``."""
        cell = block * len(self.layout.chunks) + chunk
        first, last = self._ends[cell : cell + 2]
        for at in range(first, last, limit):
            read = [r.rows(at, min(at + limit, last)) for r in self._readers]
            src, dst = (torch.from_numpy(each).to(torch.int64) for each in read[:2])
            attr = None if self._attr is None else as_tensor(read[2], self._attr_dtype)
            yield Piece(src, dst, attr)

    # Making it #############################################################################

    def _write(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        num_edges = self._ends[-1]
        writers = [
            ArrayWriter(self._folder / f"{name}.npy", "int32", (num_edges,), fresh=True)
            for name in _NAMES
        ]
        if self._attr is not None:
            kind = self._source.edge_values(self._attr, torch.empty(0, dtype=torch.int64))
            shape = (num_edges, *kind.shape[1:])
            file = self._folder / "attr.npy"
            self._attr_dtype = dtype_name(kind.dtype)
            writers.append(ArrayWriter(file, self._attr_dtype, shape, fresh=True))
            if self._loop_value is not None:
                size = self.layout.end - self.layout.begin
                self.loop_attr = kind.new_full((size, *kind.shape[1:]), self._loop_value)
        place = list(self._ends)
        try:
            for src, dst, ids in self._edges(self._attr is not None):
                self._write_piece(writers, place, src, dst, ids)
        finally:
            for writer in writers:
                writer.close()

    def _write_piece(
        self,
        writers: list[ArrayWriter],
        place: list[int],
        src: Tensor,
        dst: Tensor,
        ids: Tensor | None,
    ) -> None:
        """Write edges, which are ordered by destination, to their cells."""
        layout, first = self.layout, 0
        block_of = (dst - layout.begin) // layout.block
        for block, count in enumerate(torch.bincount(block_of).tolist()):
            if not count:
                continue
            rows = slice(first, first + count)
            near = dst[rows] - layout.blocks[block][0]
            found = edge_buckets(src[rows], near, self._ranges, count, wide=False)
            values = [found.dst, found.src]  # "destinations" of the op are what it groups by
            if ids is not None:
                order = found.order.to(torch.int64)
                values.append(self._source.edge_values(str(self._attr), ids[rows][order]))
            at = 0
            for chunk, size in enumerate(found.counts[0].tolist()):
                cell = block * len(layout.chunks) + chunk
                for writer, value in zip(writers, values, strict=True):
                    if size:
                        writer.write(place[cell], value[at : at + size])
                place[cell] += size
                at += size
            first += count

    def _edges(self, with_ids: bool) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        layout = self.layout
        for src, dst, ids in self._source.in_edges(layout.begin, layout.end, self._limit, with_ids):
            self._beat()
            if self._loop_value is None:
                yield src, dst, ids
                continue
            loop = src == dst
            if self.loop_attr is not None and ids is not None:
                values = self._source.edge_values(str(self._attr), ids[loop])
                self.loop_attr[dst[loop] - layout.begin] = values
            kept = ~loop
            yield src[kept], dst[kept], None if ids is None else ids[kept]

    def _cell(self, src: Tensor, dst: Tensor) -> Tensor:
        block = (dst - self.layout.begin) // self.layout.block
        return block * len(self.layout.chunks) + src // self.layout.chunk


def make_layout(begin: int, end: int, num_src: int, block: int, chunk: int) -> Layout:
    """Cells of about a size.

    Args:
        begin: The first destination.
        end: The one after the last destination.
        num_src: Number of sources.
        block: The most destinations of a block.
        chunk: The most sources of a chunk.
    """
    size, most = max(1, end - begin), np.iinfo(np.int32).max
    block = max(1, min(size, block, most))
    chunk = max(1, min(num_src, chunk, most))
    block = -(-size // -(-size // block))  # blocks of one size
    per_block = -(-block // chunk)
    chunk = -(-block // per_block)  # so that a chunk is in one block, whose rows are there already
    return Layout(begin, end, num_src, chunk * per_block, chunk)
