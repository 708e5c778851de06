"""One layer over a range of nodes: rows of sources are read one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pyg_scale.inference.grid import EdgeGrid, EdgeSource, Layout, make_layout
from pyg_scale.inference.partial import NotStreamed, StreamedConv

_EDGE_BYTES = 96
"""Memory of an edge in a piece, without a row of channels."""
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
    ) -> None:
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
        if src is not None and dst is not None:
            weight = src[edge_index[0]]
            attr = (weight if attr is None else weight * attr) * dst[edge_index[1]]
        return {} if attr is None else {self._argument: attr}


class Cut(NamedTuple):
    """The edges that a layer is given at a time.

    Attributes:
        layout: The cells.
        edges: The most edges of a piece.
        dst: The most destinations of a piece.
    """

    layout: Layout
    edges: int
    dst: int


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

    Destinations are taken block by block. A block keeps its own rows and what was aggregated for
    them in memory, while the rows of all sources pass chunk by chunk: each is read once for a
    block, and not at all if it is one of the block's own or has no edge into it.

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
    ) -> None:
        self._edges, self._layer, self._src, self._dst, self._nodes = edges, layer, src, dst, nodes
        self._memory, self._folder, self._device, self._cut = memory, folder, device, cut
        self._grid: EdgeGrid | None = None

    def _cells(self) -> Cut:
        """The cells and pieces for the memory that there is."""
        real, layer = self._src.real, self._layer
        one_src = torch.zeros(1, *self._src.width(), dtype=real, device=self._device)
        one_dst = torch.zeros(1, *self._dst.width(), dtype=real, device=self._device)
        edge = torch.zeros(2, 1, dtype=torch.int64, device=self._device)
        unit = None if layer.factors(0, 0) is None else one_src.new_ones(1)
        attr = None
        if layer.attr is not None:
            attr = self._edges.edge_values(layer.attr, torch.empty(0, dtype=torch.int64))
            attr = attr.new_zeros(1, *attr.shape[1:]).to(self._device)
        options = layer.options(edge, attr, unit, unit)
        out, _, log = layer.conv.piece(one_src, one_dst, edge, options)
        size, made = real.itemsize, out.numel() + (0 if log is None else log.numel())
        per_edge = _EDGE_BYTES + (0 if layer.conv.is_narrow else 4 * size * made)
        layout = make_layout(
            self._nodes.start,
            self._nodes.stop,
            self._edges.num_src,
            dst_bytes=size * (one_dst.numel() + made) + 8,
            src_bytes=size * (one_src.numel() + made),
            memory=self._memory,
        )
        most = max(1, self._memory // 10 // (size * made + 8))
        return Cut(layout, max(1, min(self._memory // 10 // per_edge, _MOST_EDGES)), most)

    def rows(self, begin: int, num_workers: int) -> Iterator[Tensor]:
        """The rows of the layer, from that of the node ``begin`` on.

        Args:
            begin: The node.
            num_workers: Threads that read ahead; more than one are as one.
        """
        cut = self._cut or self._cells()
        layout, layer, memory = cut.layout, self._layer, self._memory // 4
        self._grid = EdgeGrid(
            self._edges, layout, layer.attr, layer.loop_value, memory, self._folder
        )
        try:
            with ThreadPoolExecutor(1) as pool:
                for number, (first, last) in enumerate(layout.blocks):
                    if last > begin:
                        ahead = pool if num_workers else None
                        yield from self._block(number, max(begin, first), cut, ahead)
        finally:
            self._grid.remove()

    def _block(self, number: int, begin: int, cut: Cut, pool: Any) -> Iterator[Tensor]:
        assert self._grid is not None
        layer, layout, grid = self._layer, self._grid.layout, self._grid
        first, last = layout.blocks[number]
        own = self._dst.read(first, last)
        factors = layer.factors(first, last)
        whole = layer.conv.accumulator(last - first)
        for chunk, src in self._chunks(number, own, pool):
            low, high = layout.chunks[chunk]
            src_factors = layer.factors(low, high)
            src = src.to(self._device)
            for piece in grid.pieces(number, chunk, cut.edges, cut.dst):
                self._add(whole, src, src_factors, own, factors, piece)
        step = max(1, min(layout.chunk, cut.dst, cut.edges))
        if layer.loop_value is not None:
            for low in range(0, last - first, step):
                self._add_loops(whole, own, factors, first, low, min(low + step, last - first))
        if whole.is_empty:
            self._add_nothing(whole, own)
        for low in range(begin - first, last - first, step):
            high = min(low + step, last - first)
            rows = whole.rows(low, high).to(self._device)
            yield layer.after(layer.conv.finish(rows, own[low:high].to(self._device)))

    def _chunks(self, block: int, own: Tensor, pool: Any) -> Iterator[tuple[int, Tensor]]:
        """The chunks with edges into a block, and their rows; one is read ahead."""
        assert self._grid is not None
        layout = self._grid.layout
        first, last = layout.blocks[block]
        wanted = [c for c in range(len(layout.chunks)) if self._grid.num_edges(block, c)]

        def rows(chunk: int) -> Tensor:
            low, high = layout.chunks[chunk]
            if self._src is self._dst and first <= low and high <= last:
                return own[low - first : high - first]
            return self._src.read(low, high)

        ahead: Future[Tensor] | None = None
        for at, chunk in enumerate(wanted):
            found = rows(chunk) if ahead is None else ahead.result()
            more = pool is not None and at + 1 < len(wanted)
            ahead = pool.submit(rows, wanted[at + 1]) if more else None
            yield chunk, found

    def _add(
        self, whole: Any, src: Tensor, src_factors: Any, own: Tensor, factors: Any, piece: Any
    ) -> None:
        low, high = int(piece.dst[0]), int(piece.dst[-1]) + 1
        edge_index = torch.stack([piece.src, piece.dst - low])
        dst_factors = None if factors is None else factors[low:high]
        options = self._layer.options(edge_index, piece.attr, src_factors, dst_factors)
        self._merge(whole, low, src, own[low:high], edge_index, options)

    def _add_loops(
        self, whole: Any, own: Tensor, factors: Any, first: int, low: int, high: int
    ) -> None:
        """Add the edges of nodes to themselves."""
        assert self._grid is not None
        edge_index = torch.arange(high - low).expand(2, -1).contiguous()
        attr = self._grid.loop_attr
        if attr is not None:
            offset = first - self._nodes.start
            attr = attr[offset + low : offset + high]
        some = None if factors is None else factors[low:high]
        options = self._layer.options(edge_index, attr, some, some)
        self._merge(whole, low, own[low:high].to(self._device), own[low:high], edge_index, options)

    def _add_nothing(self, whole: Any, own: Tensor) -> None:
        """Give the accumulator its shape, if there is no edge at all."""
        none = torch.empty(2, 0, dtype=torch.int64)
        attr = self._layer.attr
        value = None if attr is None else self._edges.edge_values(attr, none[0])
        unit = None if self._layer.factors(0, 0) is None else own.new_ones(1)
        options = self._layer.options(none, value, unit, unit)
        src = own.new_zeros(1, *self._src.width()).to(self._device)
        self._merge(whole, 0, src, own[:1], none, options)

    def _merge(
        self,
        whole: Any,
        low: int,
        src: Tensor,
        dst: Tensor,
        edge_index: Tensor,
        options: dict[str, Any],
    ) -> None:
        """Compute a piece where the layer is, and add it where memory is counted."""
        options = {name: value.to(self._device) for name, value in options.items()}
        edge_index = edge_index.to(self._device)
        found = self._layer.conv.piece(src, dst.to(self._device), edge_index, options)
        out, counts, log = (None if each is None else each.cpu() for each in found)
        whole.add(low, out, counts, log)
