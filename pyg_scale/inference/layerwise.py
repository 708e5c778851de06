"""Full-graph inference layer by layer, for graphs whose hidden states do not fit in memory."""

from __future__ import annotations

import contextlib
import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyg_scale.files.byte_size import byte_size
from pyg_scale.files.npy import dtype_name
from pyg_scale.inference.exact import check_modules, check_one_hop, check_pieces
from pyg_scale.inference.inputs import Graph, LayerInputs
from pyg_scale.inference.layers import Layers, is_recorded, layers_of, real_of
from pyg_scale.inference.partial import NotStreamed
from pyg_scale.inference.progress import RESULT, InferenceProgress, fingerprint
from pyg_scale.inference.ranks import InferenceRanks, RankRows, together_of
from pyg_scale.inference.recorded import (
    RecordedPass,
    TypedGraph,
    arguments_of,
    check_recorded,
    opened,
    record,
    results_of,
)
from pyg_scale.inference.streaming import StreamedLayer, Streaming
from pyg_scale.loader.node_loader import NodeLoader
from pyg_scale.store.directory.page_faults import exceeds_memory, random_reads

__all__ = ["layerwise_inference"]

_log = logging.getLogger("pyg_scale")
_DEGREES = 1 << 18
"""Nodes whose degrees are computed at a time."""


@torch.no_grad()
def layerwise_inference(
    model: torch.nn.Module,
    graph: Any,
    out: str | Path,
    *,
    batch_size: int = 4096,
    memory: int | str = "4GB",
    device: Any = None,
    num_workers: int = 0,
    dtype: torch.dtype | None = None,
    resume: bool = True,
    progress: bool = True,
    edge_weight: str | None = None,
    edge_attr: str | None = None,
    comm: Any = None,
) -> Any:
    """Compute ``model(x, edge_index)`` for every node, one layer after the other.

    Each layer is one pass over all nodes with all of their in-edges. It reads the output of the
    layer before from a mapped file and writes its own into the directory ``out``. A run that was
    killed goes on where it was; what is complete is returned at once. (Layer-wise inference as in
    PyG's ``BasicGNN.inference``, which keeps hidden states in memory and is inexact for ``GCN``.)

    Layers that add up or compare messages, or weigh them by a softmax over in-edges, are streamed:
    ``memory`` holds the aggregates of a block of nodes while the rows of all nodes are read one
    after the other. If it holds all nodes, each row is read once in a layer, else once for each
    block. Edges are written to ``out`` in the order in which they are needed. Other layers gather
    the in-neighbours of ``batch_size`` nodes at a time; the log says which and why. (Streaming
    instead of gathering as in ATLAS, arXiv 2605.09402.)

    The result is exact: the full-batch forward of the model up to the rounding of sums. Models of
    PyG's ``BasicGNN`` family (``GraphSAGE``, ``GCN``, ``GIN``, ``GAT``, ``PNA``, ``EdgeCNN``) work
    with any ``act``, ``jk`` and ``dropout``. ``GCNConv`` gets its normalisation from the degrees in
    the whole graph. Any other model works that has ``num_layers`` and
    ``inference_per_layer(layer, x, edge_index, batch_size)``, as PyG's have: from ``x``
    ``[num_block_nodes, channels]``, whose first ``batch_size`` rows are the nodes that are asked
    for, to ``[batch_size, channels]``.

    A model with node types, and one without a method for its layers, is recorded: its ``forward``
    runs once on stand-ins for ``x`` and ``edge_index`` (``model(x_dict, edge_index_dict)`` for
    ``HeteroData``), which notes its layers and what it does with rows between them. Models by
    ``to_hetero``, of ``HeteroConv`` and of your own layers work, if all of these can be streamed.

    Several ranks that have the graph open together (or share ``comm``) divide the nodes among them.
    All of them call this, and see the same directory ``out``: on one machine, or on a shared file
    system.

    A layer that needs more than a node and its in-neighbours is refused: known ones by name (norms
    over the whole graph, convolutions of several hops), any other because its output for a few
    nodes changes with what else is in the batch.

    Args:
        model: The model, in evaluation mode.
        graph: ``Data``, ``HeteroData``, the path of a graph directory, or ``(FeatureStore,
            GraphStore)`` without types; features ``x`` ``[num_nodes, channels]``.
        out: The directory of hidden states and of the result, made if it is not there.
        batch_size: Nodes at a time in layers that are not streamed.
        memory: Bytes that a streamed layer uses, or text such as ``"16GB"``.
        device: Where the model computes; ``None``: where its parameters are. Elsewhere a copy of
            it does.
        num_workers: Threads that sample and read ahead.
        dtype: In which hidden states and the result are kept; ``None``: as computed. A shorter one
            saves space and rounds what the next layer reads.
        resume: Go on with what is in ``out``; ``False`` begins anew. What one process left is
            refused by several ranks, and what these left by one process, either way.
        progress: Whether to show progress (on a terminal).
        edge_weight: The attribute of edges to pass as ``edge_weight=`` to the layers; a recorded
            model gets it as ``edge_weight`` or ``edge_weight_dict``, whichever its ``forward`` has.
        edge_attr: The attribute of edges to pass as ``edge_attr=`` to the layers; a recorded model
            gets it as ``edge_attr`` or ``edge_attr_dict``.
        comm: A communicator whose ranks do this together, each with the graph; by default that of
            the graph, if ranks opened it together. ``"local"``: this process alone.

    Returns:
        ``[num_nodes, out_channels]``, mapped from ``out/output.npy``; for a model that returns a
        dictionary, one of each of its tensors, mapped from ``out/output-TYPE.npy``.

    Raises:
        TypeError: If the model or the graph is of a kind that is not known here.
        ValueError: If the model is in training mode or not initialised, an argument does not fit,
            or ``out`` holds what another model, graph or ``batch_size`` left; if ranks do not
            compute the same, or see another ``out``.
        CommTimeoutError: If a rank stops; names it.
        CommError: If a rank fails; names it and its error.
        NotImplementedError: If a layer cannot be computed exactly from in-neighbours, or a recorded
            model cannot be cut into steps; names the layer or the function.
    """
    _check(model, batch_size, num_workers, dtype)
    limit = byte_size(memory, "memory")
    model, target = _placed(model, device)
    if is_recorded(model, graph):
        return _recorded(
            model,
            graph,
            Path(out),
            memory=limit,
            device=target,
            num_workers=num_workers,
            dtype=dtype,
            resume=resume,
            progress=progress,
            attrs={
                what: name
                for what, name in (("edge_weight", edge_weight), ("edge_attr", edge_attr))
                if name is not None
            },
            comm=comm,
        )
    given = Graph(graph, [name for name in (edge_weight, edge_attr) if name is not None])
    layers = layers_of(model, edge_weight, edge_attr)
    made_by = fingerprint(
        model,
        given.content(),
        num_nodes=given.num_nodes,
        num_edges=given.num_edges,
        batch_size=batch_size,
        dtype=None if dtype is None else dtype_name(dtype),
        **{"attributes of edges": [edge_weight, edge_attr]},
    )
    ranks = together_of(graph, comm, Path(out))
    if ranks is None:
        state = InferenceProgress(Path(out), made_by)
    else:
        if ranks.meet(made_by, resume, [RESULT]):
            return ranks.opened(RESULT)
        size = len(ranks.share(given.num_nodes))
        state = InferenceProgress(ranks.folder(), made_by | {"num_nodes": size})
    with _together(ranks), state.opened(resume):
        if state.is_done:
            return state.result()
        if ranks is not None:
            ranks.agree_on_files(state, layers.num_steps, layers.kept)
        work = _Pass(given, layers, state, batch_size, limit, target, num_workers, dtype, ranks)
        total = work.size * layers.num_steps
        done = sum(state.rows(step) for step in range(layers.num_steps))
        with _bar(total, done, progress and (ranks is None or ranks.rank == 0)) as bar:
            for step in range(layers.num_steps):
                work.run(step, bar)
        if ranks is None:
            state.finish(layers.num_steps)
            return state.result()
        ranks.finish(state, {RESULT: (layers.num_steps - 1, given.num_nodes)})
    ranks.clear()
    return ranks.opened(RESULT)


def _recorded(
    model: torch.nn.Module,
    graph: Any,
    out: Path,
    *,
    memory: int,
    device: torch.device,
    num_workers: int,
    dtype: torch.dtype | None,
    resume: bool,
    progress: bool,
    attrs: dict[str, str],
    comm: Any,
) -> Any:
    """The rows that a recorded model returns."""
    given = TypedGraph(graph, list(attrs.values()))
    arguments = arguments_of(model, attrs)
    check_modules(model, normalised=set())
    real = real_of(model)
    check_recorded(model, given, real, device, arguments, memory)
    program = record(model, given, real, device, arguments, memory)
    sizes = [given.num_nodes[value.node_type] for value in program.steps]
    results = results_of(program)
    made_by = fingerprint(
        model,
        given.content(),
        num_nodes={str(t): size for t, size in given.num_nodes.items()},
        num_edges=given.num_edges,
        dtype=None if dtype is None else dtype_name(dtype),
        **{"attributes of edges": attrs, "number of steps (memory= decides it)": len(sizes)},
    )
    ranks = together_of(graph, comm, out)
    if ranks is None:
        state = InferenceProgress(out, made_by, sizes, results)
    else:
        if ranks.meet(made_by, resume, list(results.values())):
            return opened(program, lambda step: ranks.opened(results[step]))
        own = [len(ranks.share(size)) for size in sizes]
        state = InferenceProgress(ranks.folder(), made_by, own, results)
    with _together(ranks), state.opened(resume):
        if not state.is_done:
            work = RecordedPass(
                program, given, state, memory, real, device, dtype, num_workers, ranks
            )
            if ranks is not None:
                ranks.agree_on_files(state, len(sizes), work.kept)
            total = sum(sizes) if ranks is None else sum(own)
            done = sum(state.rows(step) for step in range(len(sizes)))
            with _bar(total, done, progress and (ranks is None or ranks.rank == 0)) as bar:
                for step in range(len(sizes)):
                    work.run(step, bar)
            if ranks is None:
                state.finish(len(sizes))
        if ranks is None:
            return opened(program, state.result)
        ranks.finish(state, {name: (step, sizes[step]) for step, name in results.items()})
    ranks.clear()
    return opened(program, lambda step: ranks.opened(results[step]))


def _together(ranks: InferenceRanks | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if ranks is None else ranks.at_work()


def _bar(total: int, done: int, shown: bool) -> Any:
    return tqdm(
        total=total,
        initial=done,
        desc="Inference",
        unit=" nodes",
        unit_scale=True,
        disable=None if shown else True,
        delay=1,
    )


class _Pass:
    """One step over all nodes."""

    def __init__(
        self,
        graph: Graph,
        layers: Layers,
        state: InferenceProgress,
        batch_size: int,
        memory: int,
        device: torch.device,
        num_workers: int,
        dtype: torch.dtype | None,
        ranks: InferenceRanks | None,
    ) -> None:
        self._ranks = ranks
        nodes = range(graph.num_nodes) if ranks is None else ranks.share(graph.num_nodes)
        self.begin, self.size = nodes.start, len(nodes)
        self._graph, self._layers, self._state = graph, layers, state
        self._batch_size, self._device, self._dtype = batch_size, device, dtype
        self._num_workers, self._memory = num_workers, memory

    def run(self, step: int, bar: Any) -> None:
        """Complete a step, from where it was."""
        state, size = self._state, self.size
        begin = state.rows(step)
        if begin < size or not (size or state.has(step)):
            if self._layers.is_degree(step):
                self._counted(step, begin, bar)
            elif self._layers.samples(step):
                self._convolved(step, begin, bar)
            else:
                self._by_rows(step, begin, bar)
            state.flush(step)
        elif self._ranks is None:
            return
        if self._ranks is not None:
            self._ranks.wait(f"step {step}")
        state.remove_before(step, keep=self._layers.kept(step))

    def _counted(self, step: int, begin: int, bar: Any) -> None:
        for first in range(begin, max(self.size, 1), _DEGREES):
            last = min(first + _DEGREES, self.size)
            rows = self._layers.degrees(self._graph, self.begin + first, self.begin + last)
            self._write(step, first, rows, bar)

    def _convolved(self, step: int, begin: int, bar: Any) -> None:
        inputs = LayerInputs(self._graph, self._input_of(step), self._layers.real)
        if self.size == 0:  # no node, but a shape
            self._write(step, 0, self._layers.empty(step, inputs.width(), self._device), bar)
            return
        data, degrees = self._graph.for_loader(inputs), self._globals(step)
        probe = self._graph, self._layers, step, data, inputs, self._block_of, degrees
        try:
            with random_reads(inputs.tensors):
                if begin == 0:
                    check_one_hop(*probe)
                layer = self._layers.streamed(step, degrees)
                check_pieces(*probe)
        except NotStreamed as reason:
            _log.info("%s is not streamed: %s", self._layers.describe(step), reason)
            self._gathered(step, begin, bar, inputs, data)
        else:
            self._streamed(step, begin, bar, inputs, layer)

    def _streamed(
        self, step: int, begin: int, bar: Any, inputs: LayerInputs, layer: StreamedLayer
    ) -> None:
        nodes, folder = range(self.begin, self.begin + self.size), self._state.path / ".edges"
        stream = Streaming(
            self._graph,
            layer,
            inputs,
            inputs,
            nodes,
            self._memory,
            folder,
            self._device,
            beat=self._beat,
        )
        for rows in stream.rows(self.begin + begin, self._num_workers):
            self._write(step, begin, rows, bar)
            begin += rows.size(0)

    def _gathered(self, step: int, begin: int, bar: Any, inputs: LayerInputs, data: Any) -> None:
        nodes = torch.arange(self.begin + begin, self.begin + self.size)
        loader = NodeLoader(
            data,
            self._graph.sampler(),
            nodes,
            batch_size=self._batch_size,
            seed=0,
            feature_store=inputs,
            num_workers=self._num_workers,
            sampler=range(nodes.numel()),  # nobody else's, and not to be shared
        )
        tensors = inputs.tensors
        too_large = exceeds_memory(sum(each.nbytes for each in tensors))
        with random_reads(tensors if too_large else []):
            for batch in loader:
                rows = self._layers.run(step, self._block_of(batch), self._globals(step))
                self._write(step, begin, rows, bar)
                begin += rows.size(0)

    def _by_rows(self, step: int, begin: int, bar: Any) -> None:
        sources = [self._state.array(s) for s in self._layers.inputs(step)]
        for first in range(begin, max(self.size, 1), self._batch_size):
            rows = slice(first, first + self._batch_size)
            xs = [s[rows].to(self._device, self._layers.real) for s in sources]
            self._write(step, first, self._layers.combine(step, xs), bar)

    def _block_of(self, batch: Any) -> Any:
        return batch.to(self._device)

    def _globals(self, step: int) -> Tensor | RankRows | None:
        number = self._layers.degree_step(step)
        return None if number is None else self._of_all(number)

    def _input_of(self, step: int) -> Tensor | RankRows | None:
        before = self._layers.inputs(step)
        return self._of_all(before[0]) if before else None

    def _of_all(self, step: int) -> Tensor | RankRows:
        """The result of a step for all nodes of the graph."""
        if self._ranks is None:
            return self._state.array(step)
        return self._ranks.rows(self._state, step, self._graph.num_nodes)

    def _write(self, step: int, begin: int, rows: Tensor, bar: Any) -> None:
        if self._dtype is not None and not self._layers.is_degree(step):
            rows = rows.to(self._dtype)
        self._state.write(step, begin, rows.cpu(), self.size)
        self._beat()
        bar.update(rows.size(0))

    def _beat(self) -> None:
        if self._ranks is not None:
            self._ranks.beat()


def _check(model: Any, batch_size: int, num_workers: int, dtype: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module (got {type(model).__name__})")
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size must be a number >= 1 (got {batch_size!r})")
    if type(num_workers) is not int or num_workers < 0:
        raise ValueError(f"num_workers must be a number >= 0 (got {num_workers!r})")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating point torch.dtype (got {dtype!r})")
    training = [name or "the model" for name, each in model.named_modules() if each.training]
    if training:
        raise ValueError(f"{training[0]} is in training mode: call model.eval()")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} is not initialised: call the model once on a batch")


def _placed(model: torch.nn.Module, device: Any) -> tuple[torch.nn.Module, torch.device]:
    here = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device is None or torch.device(device) == here:
        return model, here
    return copy.deepcopy(model).to(device), torch.device(device)
