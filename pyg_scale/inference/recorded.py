"""Full-graph inference of a recorded model: node types, and models without methods for layers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from tqdm.auto import tqdm

from pyg_scale.inference.grid import make_layout
from pyg_scale.inference.inputs import Table, edges_of, some
from pyg_scale.inference.program import Convolved, EdgesOf, Input, Program, Recorder, Value
from pyg_scale.inference.progress import RESULT, InferenceProgress
from pyg_scale.inference.streaming import Cut, StreamedLayer, Streaming
from pyg_scale.loader.seeds.nodes import num_nodes_of
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.store.directory.opening import open_graph

_ROWS = 1 << 16
"""Rows at a time in steps without edges."""
_PROBE_NODES, _PROBE_EDGES = 7, 20


class TypedGraph:
    """Features by node type and edges by edge type; the type is ``None`` in a graph without types.

    Args:
        given: ``HeteroData``, ``Data``, or the path of a graph directory.

    Raises:
        TypeError: If it is something else.
        NotImplementedError: If several ranks have it open.
        ValueError: If no node type has features.
    """

    def __init__(self, given: Any) -> None:
        data = open_graph(given) if isinstance(given, str | Path) else given
        if not isinstance(data, HeteroData | Data):
            raise TypeError(
                "this model is computed from Data, HeteroData or the path of a graph directory "
                f"(got {type(data).__name__})"
            )
        self.is_typed = isinstance(data, HeteroData)
        types = data.node_types if self.is_typed else [None]
        stores = {t: data[t] if t is not None else data for t in types}
        self.num_nodes: dict[Any, int] = {t: num_nodes_of(data, t) for t in types}
        self.x: dict[Any, Tensor] = {
            t: store["x"]
            for t, store in stores.items()
            if "x" in store and isinstance(store["x"], Tensor) and store["x"].dim() > 1
        }
        if not self.x:
            raise ValueError("the graph has no features x [num_nodes, channels]")
        self._sampler = NativeSampler().bind(data, num_neighbors=[-1])
        topology: Any = self._sampler.topology
        self.edge_types: list[Any] = list(topology.edge_types)
        self.num_edges = sum(
            int(data[t].num_edges if t is not None else data.num_edges) for t in self.edge_types
        )

    def edges(self, edge_type: Any) -> Any:
        """The edges of a type."""
        source = None if edge_type is None else edge_type[0]
        return edges_of(self._sampler, edge_type, self.num_nodes[source])

    def content(self) -> Iterator[Tensor]:
        """Some of the features and of what the edges are, to tell graphs apart."""
        for x in self.x.values():
            yield x[some(x.size(0))]
        for edge_type in self.edge_types:
            size = self.num_nodes[None if edge_type is None else edge_type[2]]
            for src, dst, _ in self.edges(edge_type).in_edges(0, min(size, 1024), 1 << 16, False):
                yield src
                yield dst
                break

    def small(self, real: torch.dtype) -> Any:
        """A few nodes of each type with random edges, to compute a model in two ways."""
        generator = torch.Generator().manual_seed(0)
        made = HeteroData() if self.is_typed else Data()
        for t in self.num_nodes:
            store = made if t is None else made[t]
            store.num_nodes = _PROBE_NODES
            if t in self.x:
                shape = (_PROBE_NODES, *self.x[t].shape[1:])
                store.x = torch.randn(shape, generator=generator, dtype=torch.float64).to(real)
        for edge_type in self.edge_types:
            store = made if edge_type is None else made[edge_type]
            store.edge_index = torch.randint(_PROBE_NODES, (2, _PROBE_EDGES), generator=generator)
        return made


def record(model: Any, graph: TypedGraph, real: torch.dtype, device: torch.device) -> Program:
    """Record a model on the types of a graph.

    Raises:
        NotImplementedError: If it cannot be computed from some rows and edges at a time.
        TypeError: If it returns something else than rows of nodes.
    """
    recorder = Recorder(model, real, device)
    x = {t: recorder.input(t, each.shape[1:]) for t, each in graph.x.items()}
    edges = {edge_type: EdgesOf(edge_type) for edge_type in graph.edge_types}
    output = recorder.record(x, edges) if graph.is_typed else recorder.record(x[None], edges[None])
    return Program(output)


def results_of(program: Program) -> dict[int, str]:
    """The names of the files of results, by the number of the step."""
    if not isinstance(program.output, dict):
        return {program.step_of(program.output): RESULT}
    return {
        program.step_of(value): f"output-{quote(str(name), safe='')}.npy"
        for name, value in program.output.items()
    }


def opened(program: Program, state: InferenceProgress) -> Any:
    """The output of the model, mapped."""
    if not isinstance(program.output, dict):
        return state.result(program.step_of(program.output))
    return {name: state.result(program.step_of(v)) for name, v in program.output.items()}


class RecordedPass:
    """The steps of a recorded model over all nodes.

    Args:
        program: The steps.
        graph: The graph.
        state: The files.
        memory: Bytes to use.
        real: The dtype of the model.
        device: Where it computes.
        dtype: In which rows are kept, or ``None``.
        num_workers: Threads that read ahead.
    """

    def __init__(
        self,
        program: Program,
        graph: TypedGraph,
        state: InferenceProgress,
        memory: int,
        real: torch.dtype,
        device: torch.device,
        dtype: torch.dtype | None = None,
        num_workers: int = 0,
    ) -> None:
        self._program, self._graph, self._state = program, graph, state
        self._memory, self._real, self._device = memory, real, device
        self._dtype, self._num_workers = dtype, num_workers
        self._in_pieces = False
        self._layers: dict[int, StreamedLayer] = {}
        for step in range(len(program.steps)):
            for leaf in program.leaves(step):
                if isinstance(leaf, Convolved) and program.is_computed(leaf, step):
                    layer = StreamedLayer(leaf.conv, lambda rows: rows)
                    self._layers[leaf.number] = layer

    def in_pieces(self) -> RecordedPass:
        """The same with many small cells of edges, whatever the memory."""
        self._in_pieces = True
        return self

    def run(self, step: int, bar: Any) -> None:
        """Complete a step, from where it was."""
        program, state = self._program, self._state
        size = self._graph.num_nodes[program.steps[step].node_type]
        begin = state.rows(step)
        if begin < size or not (size or state.has(step)):
            streams = {
                leaf.number: self._stream(leaf, step, begin, size) for leaf in program.leaves(step)
            }
            for rows in _aligned(streams):
                out = program.rows(step, rows)
                out = (out if self._dtype is None else out.to(self._dtype)).cpu()
                state.write(step, begin, out, size)
                begin += out.size(0)
                bar.update(out.size(0))
            state.flush(step)
        later = range(step + 1, len(program.steps))
        keep = set(results_of(program)).union(*(program.reads(each) for each in later))
        state.remove_before(step + 1, keep)

    def _stream(self, leaf: Value, step: int, begin: int, size: int) -> Iterator[Tensor]:
        """The rows of a leaf of a step, from ``begin`` on."""
        if not self._program.is_computed(leaf, step):
            table = self._table(leaf)
            for first in range(begin, max(size, 1), _ROWS):
                yield table.read(first, min(first + _ROWS, size)).to(self._device)
            return
        conv: Any = leaf
        layer, edges = self._layers[leaf.number], self._graph.edges(conv.edge_type)
        dst = self._table(conv.dst)
        src = dst if conv.src is conv.dst else self._table(conv.src)
        together = sum(self._program.is_computed(each, step) for each in self._program.leaves(step))
        folder = self._state.path / ".edges" / str(leaf.number)
        cut = None
        if self._in_pieces:
            cut = Cut(make_layout(0, size, edges.num_src, 3, 2), 3, 2, keeps=False)
        stream = Streaming(
            edges,
            layer,
            src,
            dst,
            range(size),
            self._memory // together,
            folder,
            self._device,
            cut,
        )
        yield from stream.rows(begin, self._num_workers)

    def _table(self, value: Value) -> Table:
        if isinstance(value, Input):
            return Table(self._graph.x[value.node_type], self._real)
        return Table(self._state.array(self._program.step_of(value)), self._real)


def check_recorded(model: Any, graph: TypedGraph, real: torch.dtype, device: torch.device) -> None:
    """Refuse a model whose recorded steps give other numbers than the model itself.

    Both compute a small random graph of the same types.

    Raises:
        NotImplementedError: Says so.
    """
    data = graph.small(real)
    moved = data.clone().to(device)
    whole = TypedGraph(data)
    program = record(model, whole, real, device)
    edges = moved.edge_index_dict if graph.is_typed else moved.edge_index
    expected = model(moved.x_dict if graph.is_typed else moved.x, edges)
    sizes = [whole.num_nodes[value.node_type] for value in program.steps]
    with tempfile.TemporaryDirectory() as folder:
        state = InferenceProgress(Path(folder), {}, sizes, results_of(program))
        with state.opened(False):
            steps = RecordedPass(program, whole, state, 1 << 20, real, device).in_pieces()
            for step in range(len(sizes)):
                steps.run(step, tqdm(disable=True))
            state.finish(len(sizes))
            found = opened(program, state)
            pairs = (
                [(found, expected)]
                if isinstance(found, Tensor)
                else [(each, expected[name]) for name, each in found.items()]
            )
            for got, wanted in pairs:
                tolerance = torch.finfo(real).eps ** 0.5
                close = got.shape == wanted.shape and torch.allclose(
                    got.to(torch.float64), wanted.cpu().to(torch.float64), tolerance, tolerance
                )
                if not close:
                    raise NotImplementedError(
                        f"{type(model).__name__} gives other numbers layer by layer than at once: "
                        "it looks at more than the rows of a node and its in-edges"
                    )


def _aligned(streams: Mapping[int, Iterator[Tensor]]) -> Iterator[dict[int, Tensor]]:
    """The same rows of several streams, as many at a time as all have."""
    rest: dict[int, Tensor] = {}
    while True:
        for name, stream in streams.items():
            if name not in rest:
                found = next(stream, None)
                if found is None:
                    return
                rest[name] = found
        count = min(rows.size(0) for rows in rest.values())
        yield {name: rows[:count] for name, rows in rest.items()}
        rest = {name: rows[count:] for name, rows in rest.items() if rows.size(0) > count}
