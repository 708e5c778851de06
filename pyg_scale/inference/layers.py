"""A model as steps over all nodes: degrees where a layer needs them, layers, jumping knowledge."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv import GCNConv, MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import add_remaining_self_loops, scatter

from pyg_scale.inference.exact import check_modules


def layers_of(model: Any, edge_weight: str | None, edge_attr: str | None) -> Layers:
    """The steps of a model.

    Raises:
        TypeError: If the model has no layers that are known here.
        ValueError: If its layers do not take an attribute.
        NotImplementedError: If a module is known to need more than in-neighbours.
    """
    name = type(model).__name__
    if isinstance(model, torch.fx.GraphModule) or _is_hetero(model):
        raise NotImplementedError(
            f"{name} is a model for several node types, which layerwise_inference does not "
            "support: use the homogeneous model"
        )
    own = getattr(type(model), "inference_per_layer", None)
    if isinstance(model, BasicGNN) and own is BasicGNN.inference_per_layer:
        if type(model).forward is not BasicGNN.forward:
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
    if own is None or type(getattr(model, "num_layers", None)) is not int:
        raise TypeError(
            f"{name} must be a BasicGNN, or have num_layers and inference_per_layer(layer, x, "
            "edge_index, batch_size) -> [batch_size, channels]"
        )
    if edge_weight is not None or edge_attr is not None:
        raise ValueError(f"inference_per_layer of {name} takes no attributes of edges")
    check_modules(model, normalised=set())
    return Layers(model)


def _is_hetero(model: Any) -> bool:
    return any("Hetero" in type(each).__name__ for each in model.modules())


class Layers:
    """The layers of a model with ``inference_per_layer``."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.num_layers = int(model.num_layers)
        floating = itertools.chain(model.parameters(), model.buffers())
        dtypes = [p.dtype for p in floating if p.is_floating_point()]
        self.real = dtypes[0] if dtypes else torch.get_default_dtype()

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
        if self.is_degree(step):
            return self._degrees(block, weight)
        layer, size = step - self._first, block.batch_size
        conv, edge_index = self._convs[layer], block.edge_index
        if degrees is not None and _normalises(self.model.convs[layer]):
            edge_index, weight = self._normalised(layer, block, weight, degrees)
        options = {}
        if self.model.supports_edge_weight:
            options["edge_weight"] = weight
        if self.model.supports_edge_attr:
            options["edge_attr"] = attr
        x = conv(block.x, edge_index, **options)[:size]
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

    def _degrees(self, block: Any, weight: Tensor | None) -> Tensor:
        conv = next(conv for conv in self.model.convs if _normalises(conv))
        edge_index, weight = self._with_loops(conv, block, weight)
        degree = scatter(weight, edge_index[1], 0, dim_size=block.num_nodes, reduce="sum")
        inverse = degree[: block.batch_size].pow(-0.5)
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
            fill = 2.0 if conv.improved else 1.0
            edge_index, weight = add_remaining_self_loops(edge_index, weight, fill, block.x.size(0))
        if weight is None:
            weight = torch.ones(edge_index.size(1), dtype=block.x.dtype, device=block.x.device)
        return edge_index, weight


def _normalises(conv: MessagePassing) -> bool:
    return type(conv) is GCNConv and conv.normalize


def _without_norm(conv: Any) -> Any:
    """The same layer, with the same parameters, for edges that are normalised already."""
    if not _normalises(conv):
        return conv
    conv = copy.copy(conv)
    conv.normalize = False
    return conv
