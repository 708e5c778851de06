"""One layer over a range of nodes: rows of sources are read one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pyg_scale.inference.grid import EdgeGrid, EdgeSource, Layout, Piece, make_layout
from pyg_scale.inference.partial import Aggregates, NotStreamed, Side, StreamedConv
from pyg_scale.ops.memory import give_back


class _Shares(NamedTuple):
    """Shares of memory.

    Attributes:
        blocks: Of blocks.
        chunks: Of each of two chunks of sources.
        edges: Of a piece of edges, and of rows completed.
    """

    blocks: float
    chunks: float
    edges: float


_USUAL, _TIGHT = _Shares(0.77, 0.05, 0.06), _Shares(0.96, 0.0075, 0.02)
"""The tight ones take smaller pieces, which is slower, so only fewer reads of rows pay for them."""
_EDGE_BYTES = 96
"""Memory of an edge in a piece, without a row of channels."""
_SAMPLE = 3
_MOST_EDGES = 1 << 22
"""Number of edges from which on a larger piece is no faster."""


class StreamedLayer:
    """A convolution of a model, the weights of its edges, and what follows it row by row.

    Args:
        conv: The convolution.
        after: From rows ``[n, channels]`` of the convolution to those of the layer.
        attr: The attribute of edges that it is given, or ``None``.
        argument: The name of the argument that takes it.
        inverse: ``[num_nodes]``, the factor of every node by which weights are multiplied at both
            ends of an edge; ``None`` leaves them as they are.
        loop_value: The attribute of the edge that every node gets to itself, unless it has one;
            ``None`` adds no edges.
        of_attr: From the attribute of edges to what the layer is given; ``None``: as it is.

    Raises:
        NotStreamed: If it needs all in-edges of a node at once.
    """

    def __init__(
        self,
        conv: Any,
        after: Callable[[Tensor], Tensor],
        attr: str | None = None,
        argument: str = "edge_weight",
        inverse: Any = None,
        loop_value: float | None = None,
        of_attr: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._of_attr = of_attr
        self.conv, self.after, self.attr = StreamedConv(conv), after, attr
        self.loop_value = 1.0 if self.conv.adds_loops else loop_value
        if self.conv.adds_loops and attr is not None:
            raise NotStreamed("it makes features of the edges of nodes to themselves from others'")
        self._argument, self._inverse = argument, inverse

    def factors(self, begin: int, end: int) -> Tensor | None:
        """The factors of nodes ``begin`` to ``end - 1``."""
        if self._inverse is None:
            return None
        if isinstance(self._inverse, Tensor):
            return self._inverse[begin:end].clone()
        rows: Tensor = self._inverse[torch.arange(begin, end)]
        return rows

    def options(
        self, edge_index: Tensor, attr: Tensor | None, src: Tensor | None, dst: Tensor | None
    ) -> dict[str, Any]:
        """Further arguments of the convolution.

        Args:
            edge_index: ``[2, num_edges]``.
            attr: The attribute of these edges.
            src: The factors of sources, ``[num_src]``.
            dst: The factors of destinations, ``[num_dst]``.
        """
        if attr is not None and self._of_attr is not None:
            attr = self._of_attr(attr)
        if src is not None and dst is not None:
            weight = src[edge_index[0]]
            attr = (weight if attr is None else weight * attr) * dst[edge_index[1]]
        return {} if attr is None else {self._argument: attr}


class Cut(NamedTuple):
    """The edges and rows that a layer is given at a time.

    Attributes:
        layout: The cells.
        edges: The most edges of a piece.
        rows: The most destinations whose rows are completed at a time.
        keeps: True if a block keeps its own rows in memory.
        keeps_read: True if it keeps what messages read of its rows; otherwise that is computed from
            its rows for each piece of edges.
    """

    layout: Layout
    edges: int
    rows: int
    keeps: bool = True
    keeps_read: bool = True


class RowSource(Protocol):
    """The rows of all nodes, or of all nodes of a type, in the dtype of the model.

    Attributes:
        real: This dtype.
    """

    real: torch.dtype

    def width(self) -> tuple[int, ...]:
        """The shape of a row."""
        ...

    def read(self, begin: int, end: int) -> Tensor:
        """Rows ``begin`` to ``end - 1`` in memory, ``[end - begin, ...]``."""
        ...


class Streaming:
    """A layer over a range of nodes.

    Destinations are taken block by block. A block keeps what was aggregated for them in memory,
    while the rows of all sources pass chunk by chunk: each is read once for a block, and not at all
    if it has no edge into it. A block also keeps its own rows, what messages read of these, or
    both, whichever makes it fewer reads. Its own rows are otherwise read once more where a layer
    needs them.

    Args:
        edges: The edges.
        layer: The layer.
        src: The rows of sources.
        dst: The rows of destinations; the same object if both are one.
        nodes: The destinations, one after the other.
        memory: Bytes to use.
        folder: The folder of the files of edges.
        device: Where the layer computes.
        cut: The cells and pieces of edges, in place of those that ``memory`` allows.
        beat: Called every now and then while there are no rows yet.
    """

    def __init__(
        self,
        edges: EdgeSource,
        layer: StreamedLayer,
        src: RowSource,
        dst: RowSource,
        nodes: range,
        memory: int,
        folder: Path,
        device: torch.device,
        cut: Cut | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._beat = beat
        self._edges, self._layer, self._src, self._dst, self._nodes = edges, layer, src, dst, nodes
        self._memory, self._folder, self._device = memory, folder, device
        self._grid: EdgeGrid | None = None
        self._like, bytes_of = self._fitted()
        self._cut = cut or self._cells(bytes_of)

    def _fitted(self) -> tuple[Aggregates, _Bytes]:
        """Aggregates of the layer for a few rows of ones, and the memory that rows take."""
        real, layer, device = self._src.real, self._layer, self._device
        src = torch.ones(_SAMPLE, *self._src.width(), dtype=real, device=device)
        dst = torch.ones(_SAMPLE, *self._dst.width(), dtype=real, device=device)
        edge_index = torch.arange(_SAMPLE, device=device).expand(2, -1).contiguous()
        ones = None if layer.factors(0, 0) is None else torch.ones(_SAMPLE, dtype=real)
        attr = None
        if layer.attr is not None:
            kind = self._edges.edge_values(layer.attr, torch.empty(0, dtype=torch.int64))
            attr = kind.new_ones(_SAMPLE, *kind.shape[1:])
        options = layer.options(edge_index.cpu(), attr, ones, ones)
        options = {name: value.to(device) for name, value in options.items()}
        like = layer.conv.fit(src, dst, edge_index, options)
        kept = (0 if ones is None else ones.itemsize) + layer.conv.count_bytes
        bytes_of = _Bytes(
            src=_row_bytes(src),
            dst=_row_bytes(dst),
            of_src=sum(map(_row_bytes, layer.conv.sources(src).values())),
            of_dst=sum(map(_row_bytes, layer.conv.destinations(dst).values())),
            out=_row_bytes(like.out) + (0 if like.log is None else _row_bytes(like.log)),
            kept=kept,
        )
        return like, bytes_of

    def _cells(self, of: _Bytes) -> Cut:
        """The cells and pieces for the memory that there is."""
        conv, memory = self._layer.conv, self._memory
        size = max(1, len(self._nodes))
        again = int(conv.reads_dst) + int(conv.finishes_dst)
        ways = [(True, True), (False, True)]
        if conv.reads_dst:
            ways.append((True, False))
        found = []
        for shares in (_USUAL, _TIGHT):
            for keeps, keeps_read in ways:
                row = of.out + of.kept
                row += (of.dst if keeps else 0) + (of.of_dst if keeps_read else 0)
                block = max(1, min(size, int(memory * shares.blocks) // row))
                reads = -(-size // block) + (0 if keeps else again)
                found.append((reads, block, row, shares, keeps, keeps_read))
        _, block, row, shares, keeps, keeps_read = min(found, key=lambda each: each[0])
        spare = int(memory * shares.blocks) - block * row
        for_chunk = int(memory * shares.chunks) + spare // 4
        for_edges = int(memory * shares.edges) + spare // 4
        chunk = for_chunk // (of.src + of.of_src)
        layout = make_layout(self._nodes.start, self._nodes.stop, self._edges.num_src, block, chunk)
        per_edge = _EDGE_BYTES + 3 * of.out + of.of_dst
        per_edge += 0 if conv.is_narrow else 4 * of.out
        per_edge += 0 if keeps_read else of.dst
        edges = max(1, min(for_edges // per_edge, _MOST_EDGES))
        rows = max(1, for_edges // (of.dst + 4 * of.out))
        return Cut(layout, edges, rows, keeps, keeps_read)

    def rows(self, begin: int, num_workers: int) -> Iterator[Tensor]:
        """The rows of the layer, from that of the node ``begin`` on.

        Args:
            begin: The node.
            num_workers: Threads that read ahead; more than one are as one.
        """
        layout, layer, memory = self._cut.layout, self._layer, self._memory // 2
        if not self._nodes:
            own = self._dst.read(0, 0).to(self._device)
            none = layer.conv.accumulator(0, self._like).rows(0, 0).to(self._device)
            yield layer.after(layer.conv.finish(none, own))
            return
        self._grid = EdgeGrid(
            self._edges, layout, layer.attr, layer.loop_value, memory, self._folder, self._beat
        )
        give_back()
        try:
            with ThreadPoolExecutor(1) as pool:
                for number, (first, last) in enumerate(layout.blocks):
                    if last > begin:
                        ahead = pool if num_workers else None
                        yield from self._block(number, max(begin, first), ahead)
                        give_back()
        finally:
            self._grid.remove()

    def _block(self, number: int, begin: int, pool: Any) -> Iterator[Tensor]:
        assert self._grid is not None
        conv, grid, step = self._layer.conv, self._grid, self._cut.rows
        block = _Block(*grid.layout.blocks[number], self._layer, self._like)
        first, last = block.first, block.last
        if self._cut.keeps:
            block.own = self._dst.read(first, last)
        if conv.reads_dst and self._cut.keeps_read:
            for low in range(first, last, step):
                high = min(low + step, last)
                rows = self._own(block, low, high).to(self._device)
                block.keep(low, conv.destinations(rows))
        for chunk, rows in self._chunks(number, block, pool):
            self._beat()
            low, high = grid.layout.chunks[chunk]
            factors, src = self._layer.factors(low, high), conv.sources(rows.to(self._device))
            ends = src, factors, high - low
            for piece in grid.pieces(number, chunk, self._cut.edges):
                self._add(block, ends, piece)
            if self._layer.loop_value is not None:
                for at in range(max(low, first), min(high, last), self._cut.edges):
                    to = min(at + self._cut.edges, high, last)
                    self._add(block, ends, self._loops(block, low, at, to))
        for low in range(begin, last, step):
            high = min(low + step, last)
            whole = block.whole.rows(low - first, high - first).to(self._device)
            own = self._own(block, low, high) if conv.finishes_dst else self._no_rows()
            yield self._layer.after(conv.finish(whole, own.to(self._device)))

    def _own(self, block: _Block, low: int, high: int) -> Tensor:
        """Rows of destinations of a block."""
        if block.own is None:
            return self._dst.read(low, high)
        return block.own[low - block.first : high - block.first]

    def _no_rows(self) -> Tensor:
        return torch.empty(0, *self._dst.width(), dtype=self._dst.real)

    def _chunks(self, number: int, block: _Block, pool: Any) -> Iterator[tuple[int, Tensor]]:
        """The chunks with edges into a block, and their rows; one is read ahead."""
        assert self._grid is not None
        layout, first, last = self._grid.layout, block.first, block.last
        loops = self._layer.loop_value is not None
        wanted = [
            chunk
            for chunk, (low, high) in enumerate(layout.chunks)
            if self._grid.num_edges(number, chunk) or (loops and low < last and first < high)
        ]

        def rows(chunk: int) -> Tensor:
            low, high = layout.chunks[chunk]
            if self._src is self._dst and first <= low and high <= last:
                return self._own(block, low, high)
            return self._src.read(low, high)

        ahead: Future[Tensor] | None = None
        for at, chunk in enumerate(wanted):
            found = rows(chunk) if ahead is None else ahead.result()
            more = pool is not None and at + 1 < len(wanted)
            ahead = pool.submit(rows, wanted[at + 1]) if more else None
            yield chunk, found

    def _loops(self, block: _Block, begin: int, low: int, high: int) -> Piece:
        """The edges of nodes ``low`` to ``high - 1`` to themselves, in the chunk of ``begin``."""
        assert self._grid is not None
        attr = self._grid.loop_attr
        if attr is not None:
            attr = attr[low - self._nodes.start : high - self._nodes.start]
        return Piece(
            torch.arange(low - begin, high - begin),
            torch.arange(low - block.first, high - block.first),
            attr,
        )

    def _add(self, block: _Block, ends: tuple[Side, Tensor | None, int], piece: Piece) -> None:
        """Compute a piece where the layer is, and add it where memory is counted."""
        src, src_factors, num_src = ends
        index, dst = torch.unique_consecutive(piece.dst, return_inverse=True)
        edge_index = torch.stack([piece.src, dst])
        factors = None if block.factors is None else block.factors[index]
        options = self._layer.options(edge_index, piece.attr, src_factors, factors)
        options = {name: value.to(self._device) for name, value in options.items()}
        into = self._read_of(block, index)
        sizes = num_src, index.numel()
        found = self._layer.conv.piece(src, into, sizes, edge_index.to(self._device), options)
        log = None if found.log is None else found.log.cpu()
        block.whole.add(index, Aggregates(found.out.cpu(), found.counts.cpu(), log))

    def _read_of(self, block: _Block, index: Tensor) -> Side:
        """The rows that messages read of destinations of a block."""
        if self._cut.keeps_read or not self._layer.conv.reads_dst:
            return {key: rows[index].to(self._device) for key, rows in block.sides.items()}
        assert block.own is not None
        return self._layer.conv.destinations(block.own[index].to(self._device))


class _Bytes(NamedTuple):
    """Memory of a row.

    Attributes:
        src: Of sources.
        dst: Of destinations.
        of_src: What messages read of a source.
        of_dst: What messages read of a destination.
        out: What is aggregated.
        kept: Further memory of a destination.
    """

    src: int
    dst: int
    of_src: int
    of_dst: int
    out: int
    kept: int


class _Block:
    """A block of destinations.

    Attributes:
        first: The first one.
        last: The one after the last.
        whole: What is aggregated for them.
        factors: Those of their edges, ``[last - first]``.
        own: Their rows, if they are kept.
        sides: What messages read of them.
    """

    def __init__(self, first: int, last: int, layer: StreamedLayer, like: Aggregates) -> None:
        self.first, self.last = first, last
        self.whole = layer.conv.accumulator(last - first, like)
        self.factors = layer.factors(first, last)
        self.own: Tensor | None = None
        self.sides: Side = {}

    def keep(self, begin: int, side: Side) -> None:
        """Keep what messages read of destinations from ``begin`` on."""
        for key, rows in side.items():
            if key not in self.sides:
                shape = (self.last - self.first, *rows.shape[1:])
                self.sides[key] = rows.new_empty(shape, device="cpu")
            at = begin - self.first
            self.sides[key][at : at + rows.size(0)] = rows


def _row_bytes(rows: Tensor) -> int:
    return rows.itemsize * rows.numel() // rows.size(0)
