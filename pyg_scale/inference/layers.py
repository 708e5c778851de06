"""A model as steps over all nodes: degrees where a layer needs them, layers, jumping knowledge."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.conv import GCNConv, MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import add_remaining_self_loops

from pyg_scale.inference.exact import check_modules
from pyg_scale.inference.inputs import Graph
from pyg_scale.inference.partial import NotStreamed
from pyg_scale.inference.streaming import StreamedLayer
from pyg_scale.nn.trim import class_of
from pyg_scale.store.directory.opening import open_graph

_EDGES = 1 << 20
"""Edges whose weights are added up at a time."""


@runtime_checkable
class HasLayers(Protocol):
    """A model that says what its layers are, as PyG's ``BasicGNN`` does.

    Attributes:
        num_layers: Number of layers.
    """

    num_layers: int

    def inference_per_layer(
        self, layer: int, x: Tensor, edge_index: Tensor, batch_size: int
    ) -> Tensor:
        """The rows ``[batch_size, channels]`` of a layer for the first nodes of a block."""
        ...


def layers_of(model: Any, edge_weight: str | None, edge_attr: str | None) -> Layers:
    """The steps of a model.

    Raises:
        TypeError: If the model has no layers that are known here.
        ValueError: If its layers do not take an attribute.
        NotImplementedError: If a module is known to need more than in-neighbours.
    """
    name = type(model).__name__
    own = isinstance(model, BasicGNN)
    if own and type(model).inference_per_layer is BasicGNN.inference_per_layer:
        if class_of(model).forward is not BasicGNN.forward:
            raise NotImplementedError(
                f"{name} overrides BasicGNN.forward, whose layers are no longer those of "
                "inference_per_layer: override that too"
            )
        check_modules(model, normalised={id(conv) for conv in model.convs})
        for given, supported in (
            (edge_weight, model.supports_edge_weight),
            (edge_attr, model.supports_edge_attr),
        ):
            if given is not None and not supported:
                raise ValueError(f"the layers of {name} take no {given!r}: leave it out")
        return BasicLayers(model, edge_weight, edge_attr)
    if not isinstance(model, HasLayers) or type(model.num_layers) is not int:
        raise TypeError(
            f"{name} must be a BasicGNN, or have num_layers and inference_per_layer(layer, x, "
            "edge_index, batch_size) -> [batch_size, channels]"
        )
    if edge_weight is not None or edge_attr is not None:
        raise ValueError(f"inference_per_layer of {name} takes no attributes of edges")
    check_modules(model, normalised=set())
    return Layers(model)


def is_recorded(model: Any, graph: Any) -> bool:
    """Return True if a model is recorded: for a graph with types, or without methods for layers."""
    if isinstance(graph, str | Path):
        graph = open_graph(graph)
    if isinstance(graph, HeteroData):
        return True
    if not isinstance(graph, Data) or isinstance(model, HasLayers):
        return False
    return any(isinstance(module, MessagePassing) for module in model.modules())


def real_of(model: Any) -> torch.dtype:
    """The dtype of a model's parameters and buffers."""
    floating = itertools.chain(model.parameters(), model.buffers())
    dtypes = [p.dtype for p in floating if p.is_floating_point()]
    return dtypes[0] if dtypes else torch.get_default_dtype()


class Layers:
    """The layers of a model with ``inference_per_layer``."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.num_layers = int(model.num_layers)
        self.real = real_of(model)

    @property
    def num_steps(self) -> int:
        """Passes over all nodes."""
        return self.num_layers

    def samples(self, step: int) -> bool:
        """Return True if the step needs in-edges."""
        return True

    def inputs(self, step: int) -> list[int]:
        """The steps whose results it reads; none for the features."""
        return [step - 1] if step else []

    def kept(self, step: int) -> set[int]:
        """The steps before whose results are still needed after it."""
        return {step}

    def degree_step(self, step: int) -> int | None:
        """The step whose result normalises the edges."""
        return None

    def is_degree(self, step: int) -> bool:
        """Return True if the step computes degrees, which are never rounded."""
        return False

    def describe(self, step: int) -> str:
        """The name of the step in errors."""
        return f"layer {step} of {type(self.model).__name__}"

    def run(self, step: int, block: Any, degrees: Any) -> Tensor:
        """The rows ``[batch_size, channels]`` of a block.

        Raises:
            ValueError: If the model returns another number of rows.
        """
        rows = self.model.inference_per_layer(step, block.x, block.edge_index, block.batch_size)
        if not isinstance(rows, Tensor) or rows.dim() < 1 or rows.size(0) != block.batch_size:
            got = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"{self.describe(step)}: inference_per_layer must return the first batch_size = "
                f"{block.batch_size} rows (got {got})"
            )
        return rows

    def streamed(self, step: int, degrees: Any) -> StreamedLayer:
        """The convolution of a step, if it can be computed from some of its edges at a time.

        Raises:
            NotStreamed: If it cannot.
        """
        raise NotStreamed("inference_per_layer needs all in-edges of a node at once")

    def degrees(self, graph: Graph, begin: int, end: int) -> Tensor:
        """The result of a step that computes degrees, ``[end - begin]``."""
        raise NotImplementedError(type(self.model).__name__)

    def combine(self, step: int, xs: list[Tensor]) -> Tensor:
        """Rows of a step that needs no edges."""
        raise NotImplementedError(self.describe(step))

    def empty(self, step: int, width: tuple[int, ...], device: torch.device) -> Tensor:
        """The result for a graph without nodes."""
        none = torch.empty(2, 0, dtype=torch.int64, device=device)
        x = torch.zeros(1, *width, dtype=self.real, device=device)
        block = Data(x=x, edge_index=none, n_id=torch.zeros(1, dtype=torch.int64), batch_size=1)
        return self.run(step, block, torch.ones(1, dtype=self.real))[:0]


class BasicLayers(Layers):
    """The layers of PyG's ``BasicGNN``, as its ``forward`` calls them.

    The steps are: degrees, if the convolution is a normalising ``GCNConv``; the layers; and what
    puts the outputs of all layers together, if ``jk`` is ``"cat"``, ``"max"`` or ``"lstm"``.
    """

    def __init__(self, model: BasicGNN, edge_weight: str | None, edge_attr: str | None) -> None:
        super().__init__(model)
        self._edge_weight, self._edge_attr = edge_weight, edge_attr
        norms = {(conv.improved, conv.add_self_loops) for conv in model.convs if _normalises(conv)}
        if len(norms) > 1:
            raise NotImplementedError(
                "the GCNConv layers differ in improved or add_self_loops, and so in the degrees "
                "that normalise them: give all the same"
            )
        self._first = len(norms)
        self._combines = hasattr(model, "jk")
        self._convs = [_without_norm(conv) for conv in model.convs]

    @property
    def num_steps(self) -> int:
        return self._first + self.num_layers + int(self._combines)

    def samples(self, step: int) -> bool:
        return step < self._first + self.num_layers

    def inputs(self, step: int) -> list[int]:
        if not self.samples(step):
            return list(range(self._first, self._first + self.num_layers))
        return [step - 1] if step > self._first else []

    def kept(self, step: int) -> set[int]:
        kept = {step}
        if step + 1 < self._first + self.num_layers:
            kept |= set(range(self._first))
        if self._combines and self.samples(step):
            kept |= set(range(self._first, step))
        return kept

    def degree_step(self, step: int) -> int | None:
        return 0 if self._first and step else None

    def is_degree(self, step: int) -> bool:
        return bool(self._first) and step == 0

    def describe(self, step: int) -> str:
        layer = step - self._first
        conv = self.model.convs[layer]
        return f"layer {layer} ({type(conv).__name__}) of {type(self.model).__name__}"

    def run(self, step: int, block: Any, degrees: Any) -> Tensor:
        weight = None if self._edge_weight is None else block[self._edge_weight]
        attr = None if self._edge_attr is None else block[self._edge_attr]
        layer, size = step - self._first, block.batch_size
        conv, edge_index = self._convs[layer], block.edge_index
        if degrees is not None and _normalises(self.model.convs[layer]):
            edge_index, weight = self._normalised(layer, block, weight, degrees)
        options = {}
        if self.model.supports_edge_weight:
            options["edge_weight"] = weight
        if self.model.supports_edge_attr:
            options["edge_attr"] = attr
        return self._after(layer, conv(block.x, edge_index, **options)[:size])

    def streamed(self, step: int, degrees: Any) -> StreamedLayer:
        layer = step - self._first
        given, conv = self.model.convs[layer], self._convs[layer]
        weight = self._edge_weight if self.model.supports_edge_weight else None
        attr = self._edge_attr if self.model.supports_edge_attr else None
        if weight is not None and attr is not None:
            raise NotStreamed("it takes two attributes of edges")
        after = functools.partial(self._after, layer)
        if degrees is not None and _normalises(given):
            return StreamedLayer(
                conv, after, weight, inverse=degrees, loop_value=_loop_weight(given)
            )
        if attr is not None:
            return StreamedLayer(conv, after, attr, "edge_attr")
        return StreamedLayer(conv, after, weight)

    def _after(self, layer: int, x: Tensor) -> Tensor:
        """The rows of a layer, from those of its convolution."""
        if layer < self.num_layers - 1 or self.model.jk_mode is not None:
            x = self._between(layer, x)
        if layer == self.num_layers - 1 and not self._combines and hasattr(self.model, "lin"):
            x = self.model.lin(x)
        return x

    def _between(self, layer: int, x: Tensor) -> Tensor:
        """Activation and norm, in the order of the model; dropout does nothing."""
        model = self.model
        if model.act is not None and model.act_first:
            x = model.act(x)
        x = model.norms[layer](x)
        if model.act is not None and not model.act_first:
            x = model.act(x)
        return x

    def combine(self, step: int, xs: list[Tensor]) -> Tensor:
        return self.model.lin(self.model.jk(xs))

    # GCNConv: as gcn_norm, with the degrees of the whole graph #############################

    def degrees(self, graph: Graph, begin: int, end: int) -> Tensor:
        conv = next(conv for conv in self.model.convs if _normalises(conv))
        degree = torch.zeros(end - begin, dtype=self.real)
        fill, name = _loop_weight(conv), self._edge_weight
        loop = None if fill is None else torch.full_like(degree, 1.0 if name is None else fill)
        for src, dst, ids in graph.in_edges(begin, end, _EDGES, name is not None):
            weight, row = torch.ones(dst.numel(), dtype=self.real), dst - begin
            if name is not None and ids is not None:
                weight = graph.edge_values(name, ids).to(self.real)
            if loop is not None:
                own = src == dst
                loop[row[own]] = weight[own]
                weight[own] = 0
            degree.index_add_(0, row, weight)
        degree = degree if loop is None else degree + loop
        inverse = degree.pow(-0.5)
        return inverse.masked_fill(inverse == float("inf"), 0)

    def _normalised(
        self, layer: int, block: Any, weight: Tensor | None, degrees: Any
    ) -> tuple[Tensor, Tensor]:
        edge_index, weight = self._with_loops(self.model.convs[layer], block, weight)
        inverse = degrees[block.n_id.cpu()].to(weight.device)
        return edge_index, inverse[edge_index[0]] * weight * inverse[edge_index[1]]

    def _with_loops(self, conv: Any, block: Any, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        edge_index = block.edge_index
        if conv.add_self_loops:
            fill = _loop_weight(conv)
            edge_index, weight = add_remaining_self_loops(edge_index, weight, fill, block.x.size(0))
        if weight is None:
            weight = torch.ones(edge_index.size(1), dtype=block.x.dtype, device=block.x.device)
        return edge_index, weight


def _normalises(conv: MessagePassing) -> bool:
    return type(conv) is GCNConv and conv.normalize


def _loop_weight(conv: Any) -> float | None:
    """The weight of the edge that a layer adds from a node to itself, if it adds one."""
    if not conv.add_self_loops:
        return None
    return 2.0 if conv.improved else 1.0


def _without_norm(conv: Any) -> Any:
    """The same layer, with the same parameters, for edges that are normalised already."""
    if not _normalises(conv):
        return conv
    conv = copy.copy(conv)
    conv.normalize = False
    return conv
