"""The edges of the result, made of the reader's while they pass: reverse edges, no self-loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_scale.convert.base import Description, EdgeList, Reader
from pyg_scale.graph.source import of
from pyg_scale.graph.topology import EdgeType


class EdgeSource(NamedTuple):
    """A list of the reader that edges are made of."""

    edge_type: EdgeType
    reverse: bool
    """True if source and destination are exchanged."""
    drop_loops: bool
    """True if edges from a node to itself are left out."""


class StreamPosition(NamedTuple):
    """The position in a stream: the source, its row, and the edges so far."""

    source: int = 0
    row: int = 0
    edges: int = 0


START = StreamPosition()


class Chunk(NamedTuple):
    """Consecutive edges of a stream."""

    src: Tensor
    """``[n]``, ``int64`` or ``int32``."""
    dst: Tensor
    extra: tuple[Tensor, ...]
    """A row of each attribute that was asked for, for each edge."""
    first: int
    """The id of the first edge."""
    before: StreamPosition
    after: StreamPosition
    kept: Tensor | None
    """A mask of the source's rows, ``bool`` ``[rows]``; ``None`` for all of them."""


@dataclass
class EdgeStream:
    """The edges of one type of the result.

    Attributes:
        reader: Where they come from.
        edge_type: Their type.
        sources: The lists that follow one another.
        edges: What is known of them; the number of edges only after they were read once, where
            some are left out.
    """

    reader: Reader
    edge_type: EdgeType
    sources: tuple[EdgeSource, ...]
    edges: EdgeList

    def chunks(
        self, rows: int, names: Sequence[str] = (), begin: StreamPosition = START
    ) -> Iterator[Chunk]:
        """Read the edges from a position on.

        Args:
            rows: The most that a chunk may have.
            names: Attributes to read with them.
            begin: Where to begin.

        Raises:
            TypeError: If node ids are not ``int64`` or ``int32``.
            ValueError: If an attribute has more or fewer rows than there are edges.
        """
        position = begin
        for number in range(begin.source, len(self.sources)):
            position = StreamPosition(number, position.row, position.edges)
            for chunk in self._of_source(position, rows, names):
                yield chunk
                position = chunk.after
            position = StreamPosition(number + 1, 0, position.edges)

    def _of_source(self, begin: StreamPosition, rows: int, names: Sequence[str]) -> Iterator[Chunk]:
        edge_type, reverse, drop_loops = self.sources[begin.source]
        reader, position = self.reader, begin
        streams: list[Iterator[tuple[Tensor, ...]]] = [reader.edges(edge_type, begin.row, rows)]
        streams += [
            _single(reader.edge_attribute(edge_type, name, begin.row, rows)) for name in names
        ]
        what = ["edges", *(f"rows of attribute {name!r}" for name in names)]
        for src, dst, *extra in side_by_side(streams, [f"{each}{of(edge_type)}" for each in what]):
            if {src.dtype, dst.dtype} - {torch.int64, torch.int32}:
                raise TypeError(
                    f"node ids must be int64 or int32 (got {src.dtype} and {dst.dtype}), in the "
                    f"edges{of(edge_type)}"
                )
            read = src.numel()
            if reverse:
                src, dst = dst, src
            kept = src != dst if drop_loops else None
            if kept is not None and bool(kept.all()):
                kept = None
            if kept is not None:
                src, dst = src[kept], dst[kept]
                extra = [each[kept] for each in extra]
            after = StreamPosition(begin.source, position.row + read, position.edges + src.numel())
            yield Chunk(src, dst, tuple(extra), position.edges, position, after, kept)
            position = after

    def attribute(self, name: str, begin: int, rows: int) -> Iterator[Tensor]:
        """Rows of an attribute, from the row of edge ``begin`` on."""
        if len(self.sources) == 1 and not self.sources[0].drop_loops:
            yield from self.reader.edge_attribute(self.sources[0].edge_type, name, begin, rows)
            return
        for chunk in self.chunks(rows, [name]):
            values = chunk.extra[0][max(0, begin - chunk.first) :]
            if values.size(0):
                yield values

    def name_of(self, chunk: Chunk, number: int) -> str:
        """The name of an edge of a chunk in errors: the file and row that it comes from."""
        row = number if chunk.kept is None else int(chunk.kept.nonzero()[number])
        return self.reader.edge_name(
            self.sources[chunk.before.source].edge_type, chunk.before.row + row
        )


def edge_streams(
    reader: Reader, description: Description, *, undirected: bool, remove_self_loops: bool
) -> dict[EdgeType, EdgeStream]:
    """The edge types of the result.

    Args:
        reader: Where the edges come from.
        description: What it describes.
        undirected: Add the reverse of every edge but self-loops: behind the edges of the same type
            where both ends are of one type, else as a type ``(dst, "rev_" + relation, src)``.
        remove_self_loops: Leave out edges from a node to itself.

    Raises:
        ValueError: If there is a type of the name of a reverse type already.
    """
    streams = {}
    for edge_type, edges in description.edges.items():
        loops = edge_type is None or edge_type[0] == edge_type[2]
        drop = remove_self_loops and loops
        sources = [EdgeSource(edge_type, False, drop)]
        if undirected and loops:
            sources.append(EdgeSource(edge_type, True, True))
        unknown = drop or len(sources) > 1
        known = EdgeList(None if unknown else edges.num_edges, edges.index_dtype, edges.attributes)
        streams[edge_type] = EdgeStream(reader, edge_type, tuple(sources), known)
    if undirected:
        for edge_type, edges in description.edges.items():
            if edge_type is None or edge_type[0] == edge_type[2]:
                continue
            src, relation, dst = edge_type
            reverse = (dst, f"rev_{relation}", src)
            if reverse in streams:
                raise ValueError(f"undirected=True would make a second edge type {reverse!r}")
            streams[reverse] = EdgeStream(
                reader, reverse, (EdgeSource(edge_type, True, False),), edges
            )
    return streams


def side_by_side(
    streams: Sequence[Iterator[tuple[Tensor, ...]]], names: Sequence[str]
) -> Iterator[tuple[Tensor, ...]]:
    """The tensors of several streams together, cut so that all chunks are of the same length.

    Raises:
        ValueError: If one of them ends before another; names both.
    """
    pending: list[tuple[Tensor, ...] | None] = [None] * len(streams)
    while True:
        for i, stream in enumerate(streams):
            if pending[i] is None:
                pending[i] = next(stream, None)
        ended = [i for i, each in enumerate(pending) if each is None]
        if len(ended) == len(streams):
            return
        if ended:
            longer = next(i for i in range(len(streams)) if i not in ended)
            raise ValueError(f"there are fewer {names[ended[0]]} than {names[longer]}")
        together = [each for each in pending if each is not None]
        size = min(each[0].size(0) for each in together)
        yield tuple(tensor[:size] for each in together for tensor in each)
        pending = [
            tuple(tensor[size:] for tensor in each) if each[0].size(0) > size else None
            for each in together
        ]


def _single(stream: Iterator[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    for each in stream:
        yield (each,)
