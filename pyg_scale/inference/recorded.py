"""Full-graph inference of a recorded model: node types, and models without methods for layers."""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, HeteroData, TensorAttr
from tqdm.auto import tqdm

from pyg_scale.graph.base import SuppliesFeatures
from pyg_scale.inference.grid import make_layout
from pyg_scale.inference.inputs import StoredRows, Table, edges_of, some
from pyg_scale.inference.program import Convolved, EdgesOf, Input, Program, Recorder, Value
from pyg_scale.inference.progress import RESULT, InferenceProgress
from pyg_scale.inference.ranks import InferenceRanks
from pyg_scale.inference.streaming import Cut, RowSource, StreamedLayer, Streaming
from pyg_scale.loader.batch.features import HOMOGENEOUS_EDGES
from pyg_scale.loader.seeds.nodes import num_nodes_of
from pyg_scale.ops.gather import gather
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.store.directory.opening import open_graph
from pyg_scale.store.directory.page_faults import random_reads

_ROWS = 1 << 16
"""Rows at a time in steps without edges."""
_PROBE_NODES, _PROBE_EDGES = 7, 20


class TypedGraph:
    """Features by node type and edges by edge type; the type is ``None`` in a graph without types.

    Args:
        given: ``HeteroData``, ``Data``, or the path of a graph directory; several ranks may have
            it open.
        attrs: The attributes of edges that the model gets; each belongs to one edge type or more.

    Raises:
        TypeError: If it is something else.
        ValueError: If no node type has features, or no edge type has an attribute.
    """

    def __init__(self, given: Any, attrs: Sequence[str] = ()) -> None:
        data = open_graph(given) if isinstance(given, str | Path) else given
        if not isinstance(data, HeteroData | Data):
            raise TypeError(
                "this model is computed from Data, HeteroData or the path of a graph directory "
                f"(got {type(data).__name__})"
            )
        self.is_typed, self._data = isinstance(data, HeteroData), data
        supplied = isinstance(data, SuppliesFeatures)
        self._features: FeatureStore | None = data.supply_features() if supplied else None
        types = data.node_types if self.is_typed else [None]
        self.num_nodes: dict[Any, int] = {t: num_nodes_of(data, t) for t in types}
        self.width: dict[Any, tuple[int, ...]] = {}
        for t in types:
            width = self._width(t)
            if width:
                self.width[t] = width
        if not self.width:
            raise ValueError("the graph has no features x [num_nodes, channels]")
        self._sampler = NativeSampler().bind(data, num_neighbors=[-1])
        topology: Any = self._sampler.topology
        self.edge_types: list[Any] = list(topology.edge_types)
        self.num_edges = sum(
            int(data[t].num_edges if t is not None else data.num_edges) for t in self.edge_types
        )
        self.attrs = {
            name: [t for t in self.edge_types if name in self._store(t)] for name in attrs
        }
        for name, found in self.attrs.items():
            if not found:
                raise ValueError(f"the graph has no attribute {name!r} of edges")

    def _store(self, name: Any) -> Any:
        return self._data if name is None else self._data[name]

    def _width(self, node_type: Any) -> tuple[int, ...]:
        """The shape of a row of features; empty if the type has none."""
        store = self._store(node_type)
        if "x" not in store:
            return ()
        if self._features is not None:
            size = self._features.get_tensor_size(group_name=node_type, attr_name="x")
            return () if size is None else tuple(size[1:])
        return tuple(store["x"].shape[1:]) if isinstance(store["x"], Tensor) else ()

    def x(self, node_type: Any, real: torch.dtype) -> RowSource:
        """The features of a type."""
        if self._features is not None:
            return StoredRows(self._features, node_type, real)
        return Table(self._store(node_type)["x"], real)

    def edge_values(self, edge_type: Any, name: str, ids: Tensor) -> Tensor:
        """An attribute of edges of a type by their ids, ``[n, ...]``."""
        if self._features is None:
            return gather(self._store(edge_type)[name], ids)
        group = HOMOGENEOUS_EDGES if edge_type is None else edge_type
        return self._features.get_tensor(TensorAttr(group, name, ids))

    def edges(self, edge_type: Any) -> Any:
        """The edges of a type."""
        source = None if edge_type is None else edge_type[0]
        values = functools.partial(self.edge_values, edge_type)
        return edges_of(self._sampler, edge_type, self.num_nodes[source], values)

    def content(self) -> Iterator[Tensor]:
        """Some of the features and of what the edges are, to tell graphs apart."""
        for t in self.width:
            index = some(self.num_nodes[t])
            if self._features is not None:
                yield self._features.get_tensor(TensorAttr(t, "x", index))
            else:
                x = self._store(t)["x"]
                with random_reads([x]):
                    yield gather(x, index)
        if self._features is not None:
            yield torch.tensor([self._data.graph_directory.checksum])
            return
        for edge_type in self.edge_types:
            size = self.num_nodes[None if edge_type is None else edge_type[2]]
            for src, dst, _ in self.edges(edge_type).in_edges(0, min(size, 1024), 1 << 16, False):
                yield src
                yield dst
                break
        for name, found in self.attrs.items():
            for edge_type in found:
                count = len(self._store(edge_type)[name])
                yield self.edge_values(edge_type, name, some(count))

    def small(self, real: torch.dtype) -> Any:
        """A few nodes of each type with random edges, to compute a model in two ways."""
        generator = torch.Generator().manual_seed(0)

        def random(count: int, row: Sequence[int], dtype: torch.dtype) -> Tensor:
            drawn = torch.randn(count, *row, generator=generator, dtype=torch.float64)
            return drawn.to(dtype)

        made = HeteroData() if self.is_typed else Data()
        for t in self.num_nodes:
            store = made if t is None else made[t]
            store.num_nodes = _PROBE_NODES
            if t in self.width:
                store.x = random(_PROBE_NODES, self.width[t], real)
        for edge_type in self.edge_types:
            store = made if edge_type is None else made[edge_type]
            store.edge_index = torch.randint(_PROBE_NODES, (2, _PROBE_EDGES), generator=generator)
            for name, found in self.attrs.items():
                if edge_type in found:  # its own, which a model may take a root of
                    size = int(self._store(edge_type).num_edges)
                    ids = torch.arange(_PROBE_EDGES if size else 0) % max(size, 1)
                    rows = self.edge_values(edge_type, name, ids)
                    store[name] = rows if size else random(_PROBE_EDGES, rows.shape[1:], rows.dtype)
        return made


def arguments_of(model: Any, attrs: Mapping[str, str]) -> dict[str, str]:
    """The arguments of ``forward`` that take attributes of edges.

    Args:
        model: The model.
        attrs: The attribute by what it is: ``"edge_weight"`` or ``"edge_attr"``.

    Returns:
        The attribute by the name of the argument: ``edge_attr``, or ``edge_attr_dict``.

    Raises:
        ValueError: If ``forward`` has no such argument.
    """
    known = inspect.signature(type(model).forward).parameters
    found = {}
    for what, name in attrs.items():
        names = [what, f"{what}_dict"]
        given = [each for each in names if each in known]
        if not given:
            raise ValueError(
                f"{type(model).__name__}.forward has no argument {' or '.join(names)}: leave "
                f"{what}={name!r} out, or add it"
            )
        found[given[0]] = name
    return found


def record(
    model: Any,
    graph: TypedGraph,
    real: torch.dtype,
    device: torch.device,
    arguments: Mapping[str, str],
    memory: int,
) -> Program:
    """Record a model on the types of a graph.

    Args:
        model: The model.
        graph: The graph.
        real: The dtype of the model.
        device: Where it is.
        arguments: The attributes of edges that it gets, see :func:`arguments_of`.
        memory: Bytes to use.

    Raises:
        NotImplementedError: If it cannot be computed from some rows and edges at a time.
        TypeError: If it returns something else than rows of nodes.
    """
    recorder = Recorder(model, real, device)
    none = torch.empty(0, dtype=torch.int64)
    x = {t: recorder.input(t, width) for t, width in graph.width.items()}
    edges = {edge_type: EdgesOf(edge_type) for edge_type in graph.edge_types}
    attrs: dict[str, Any] = {}
    for argument, name in arguments.items():
        made = {
            t: recorder.edge_input(t, name, graph.edge_values(t, name, none))
            for t in graph.attrs[name]
        }
        attrs[argument] = made if graph.is_typed else made[None]

    def fits(layers: Sequence[Convolved]) -> bool:
        sizes = [graph.num_nodes[each.node_type] * each.width for each in layers]
        return sum(sizes) * real.itemsize <= memory // 2

    if graph.is_typed:
        return Program(recorder.record(x, edges, attrs), fits)
    return Program(recorder.record(x[None], edges[None], attrs), fits)


def results_of(program: Program) -> dict[int, str]:
    """The names of the files of results, by the number of the step."""
    if not isinstance(program.output, dict):
        return {program.step_of(program.output): RESULT}
    return {
        program.step_of(value): f"output-{quote(str(name), safe='')}.npy"
        for name, value in program.output.items()
    }


def opened(program: Program, result: Callable[[int], Tensor]) -> Any:
    """The output of the model, mapped.

    Args:
        program: The steps.
        result: From the number of a step to its rows.
    """
    if not isinstance(program.output, dict):
        return result(program.step_of(program.output))
    return {name: result(program.step_of(value)) for name, value in program.output.items()}


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
        ranks: The ranks that compute them together, if there are several.
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
        ranks: InferenceRanks | None = None,
    ) -> None:
        self._ranks = ranks
        self._program, self._graph, self._state = program, graph, state
        self._memory, self._real, self._device = memory, real, device
        self._dtype, self._num_workers = dtype, num_workers
        self._in_pieces = False
        self._layers: dict[int, StreamedLayer] = {}
        for step in range(len(program.steps)):
            for leaf in program.leaves(step):
                if isinstance(leaf, Convolved) and program.is_computed(leaf, step):
                    self._layers[leaf.number] = self._layer(leaf)

    def in_pieces(self) -> RecordedPass:
        """The same with many small cells of edges, whatever the memory."""
        self._in_pieces = True
        return self

    def _layer(self, leaf: Convolved) -> StreamedLayer:
        given, device = leaf.attr_input, self._device
        if given is None:
            return StreamedLayer(leaf.conv, lambda rows: rows)
        return StreamedLayer(
            leaf.conv,
            lambda rows: rows,
            given.name,
            leaf.argument,
            of_attr=lambda rows: leaf.attr_of(rows.to(device)),
        )

    def _nodes(self, step: int) -> range:
        """The nodes whose rows this process computes."""
        size = self._graph.num_nodes[self._program.steps[step].node_type]
        return range(size) if self._ranks is None else self._ranks.share(size)

    def run(self, step: int, bar: Any) -> None:
        """Complete a step, from where it was."""
        program, state, nodes = self._program, self._state, self._nodes(step)
        begin, size = state.rows(step), len(nodes)
        if begin < size or not (size or state.has(step)):
            streams = {
                leaf.number: self._stream(leaf, step, begin, nodes) for leaf in program.leaves(step)
            }
            for rows in _aligned(streams):
                out = program.rows(step, rows)
                out = (out if self._dtype is None else out.to(self._dtype)).cpu()
                state.write(step, begin, out, size)
                begin += out.size(0)
                self._beat()
                bar.update(out.size(0))
            state.flush(step)
        if self._ranks is not None:
            self._ranks.wait(f"step {step}")
        state.remove_before(step + 1, self.kept(step))

    def kept(self, step: int) -> set[int]:
        """The steps whose rows are still needed after a step."""
        later = range(step + 1, len(self._program.steps))
        reads = (self._program.reads(each) for each in later)
        return set(results_of(self._program)).union(*reads)

    def _beat(self) -> None:
        if self._ranks is not None:
            self._ranks.beat()

    def _stream(self, leaf: Value, step: int, begin: int, nodes: range) -> Iterator[Tensor]:
        """The rows of a leaf of a step, from the one at ``begin`` of these nodes on."""
        if not self._program.is_computed(leaf, step):
            table = self._table(leaf)
            first = nodes.start + begin
            for low in range(first, max(nodes.stop, first + 1), _ROWS):
                yield table.read(low, min(low + _ROWS, nodes.stop)).to(self._device)
            return
        conv: Any = leaf
        layer, edges = self._layers[leaf.number], self._graph.edges(conv.edge_type)
        dst = self._table(conv.dst)
        src = dst if conv.src is conv.dst else self._table(conv.src)
        together = sum(self._program.is_computed(each, step) for each in self._program.leaves(step))
        folder = self._state.path / ".edges" / str(leaf.number)
        cut = None
        if self._in_pieces:
            layout = make_layout(nodes.start, nodes.stop, edges.num_src, 3, 2)
            cut = Cut(layout, 3, 2, keeps=False)
        stream = Streaming(
            edges,
            layer,
            src,
            dst,
            nodes,
            self._memory // together,
            folder,
            self._device,
            cut,
            self._beat,
        )
        yield from stream.rows(nodes.start + begin, self._num_workers)

    def _table(self, value: Value) -> RowSource:
        if isinstance(value, Input):
            return self._graph.x(value.node_type, self._real)
        step = self._program.step_of(value)
        if self._ranks is None:
            return Table(self._state.array(step), self._real)
        size = self._graph.num_nodes[value.node_type]
        return Table(self._ranks.rows(self._state, step, size), self._real)


def check_recorded(
    model: Any,
    graph: TypedGraph,
    real: torch.dtype,
    device: torch.device,
    arguments: Mapping[str, str],
    memory: int,
) -> None:
    """Refuse a model whose recorded steps give other numbers than the model itself.

    Both compute a small random graph of the same types, in as much memory for a node.

    Raises:
        NotImplementedError: Says so.
    """
    data = graph.small(real)
    moved = data.clone().to(device)
    whole = TypedGraph(data, list(graph.attrs))
    memory = memory * sum(whole.num_nodes.values()) // max(1, sum(graph.num_nodes.values()))
    program = record(model, whole, real, device, arguments, memory)
    given: dict[str, Any] = {}
    for argument, name in arguments.items():
        found = {t: moved[t][name] for t in graph.attrs[name] if t is not None}
        given[argument] = found if graph.is_typed else moved[name]
    edges = moved.edge_index_dict if graph.is_typed else moved.edge_index
    expected = model(moved.x_dict if graph.is_typed else moved.x, edges, **given)
    sizes = [whole.num_nodes[value.node_type] for value in program.steps]
    with tempfile.TemporaryDirectory() as folder:
        state = InferenceProgress(Path(folder), {}, sizes, results_of(program))
        with state.opened(False):
            steps = RecordedPass(program, whole, state, 1 << 20, real, device).in_pieces()
            try:
                for step in range(len(sizes)):
                    steps.run(step, tqdm(disable=True))
            except (NotImplementedError, torch.cuda.OutOfMemoryError, MemoryError, OSError):
                raise
            except Exception as error:
                raise NotImplementedError(
                    f"{type(model).__name__} cannot be computed from some rows and edges at a "
                    f"time: {error!r}"
                ) from error
            state.finish(len(sizes))
            found = opened(program, state.result)
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
