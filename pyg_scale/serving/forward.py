"""The call of a model on neighbourhoods, in which PyG's models compute only the rows that count."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, GATv2Conv, SAGEConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from pyg_scale.graph.topology import NodeType
from pyg_scale.nn.conv.base import FusedConv
from pyg_scale.nn.trim import class_of, is_act_by_row, is_by_row, is_trimmable

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PAIRS = (SAGEConv, GATConv, GATv2Conv)
"""Layers whose output for some nodes is the same if they get only these as destinations."""


class Block(NamedTuple):
    """The input of a model of PyG for a neighbourhood, without a ``Data`` around it.

    Attributes:
        x: Features, ``[num_nodes, channels]``; those of the seeds first, then hop by hop.
        edge_index: ``[2, num_edges]``, hop by hop.
        num_seeds: Number of seeds.
        nodes_per_hop: New nodes of each hop, the seeds first.
        edges_per_hop: Edges of each hop.
    """

    x: Tensor
    edge_index: Tensor
    num_seeds: int
    nodes_per_hop: list[int]
    edges_per_hop: list[int]

    def to(self, device: torch.device) -> Block:
        """The same on a device."""
        return self._replace(x=self.x.to(device), edge_index=self.edge_index.to(device))


def usual_forward(input_type: NodeType) -> Callable[[Any, Any], Tensor]:
    """The call of a model of PyG for the seeds of a batch, or of a :class:`Block`.

    Args:
        input_type: The type of the seeds.
    """

    layers: _Layers | None = None

    def forward(model: Any, batch: Any) -> Tensor:
        nonlocal layers
        if isinstance(batch, Block):
            if layers is None or not layers.are_those_of(model):
                layers = _Layers(model)
            return layers(batch)
        if isinstance(batch, HeteroData):
            out = model(batch.x_dict, batch.edge_index_dict)[input_type]
            return out[: batch[input_type].batch_size]
        return model(batch.x, batch.edge_index)[: batch.batch_size]

    return forward


def of_block(model: Any, block: Block) -> Tensor:
    """``model(x, edge_index)`` for the seeds: ``[num_seeds, ...]``.

    Each layer of a ``BasicGNN`` of PyG computes the rows that the layers after it read, and no
    others. The result is the same up to the rounding of matrix products of other sizes.
    """
    x, edge_index, num_seeds, nodes, edges = block
    if not _goes_by_hops(model):
        out: Tensor = model(x, edge_index)
        return out[:num_seeds]
    num_nodes = sum(nodes)
    for layer in range(model.num_layers):
        hops = model.num_layers - 1 - layer  # that the layers after this one go
        size = sum(nodes[: hops + 1])
        ends: Any = x
        if size < num_nodes:
            ends = x, x[:size]
            edge_index = edge_index[:, : sum(edges[: hops + 1])].contiguous()
        x = model.inference_per_layer(layer, ends, edge_index, size)
        num_nodes = size
    return x


class _Layers:
    """The layers of a model, with what depends on them alone looked at once.

    Args:
        model: A model of PyG.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = list(model.modules())
        self._types = [type(module) for module in self._layers]
        self._state: list[dict[str, Any]] = []
        self._hooks: list[Any] = []
        for module in self._layers:
            kept = module.__dict__
            self._state += kept, kept["_modules"], kept["_parameters"]
            self._hooks += (kept[name] for name in _HOOKS)
        self._values = [value for each in self._state for value in each.values()]
        self._sizes = [len(each) for each in self._state]
        convs = model.convs if _goes_by_hops(model) else []
        found = [conv.prepared() for conv in convs if isinstance(conv, FusedConv)]
        prepared = [compute for compute in found if compute is not None]
        self._prepared = prepared if len(prepared) == len(convs) else []

    def are_those_of(self, model: Any) -> bool:
        """Return True if nothing of a model was replaced since it was looked at."""
        return (
            model is self._model
            and not any(self._hooks)
            and [*map(type, self._layers)] == self._types
            and [*map(len, self._state)] == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self._state)), self._values))
        )

    def __call__(self, block: Block) -> Tensor:
        """See :func:`of_block`."""
        model, prepared = self._model, self._prepared
        if not prepared or torch.is_grad_enabled() or any(self._hooks):
            return of_block(model, block)
        x, edge_index, _, nodes, edges = block
        last = len(prepared) - 1
        for layer, compute in enumerate(prepared):
            size = sum(nodes[: last - layer + 1])
            if layer or size < x.size(0):
                edge_index = edge_index[:, : sum(edges[: last - layer + 1])].contiguous()
            x = compute(x, x[:size], edge_index)
            if layer == last:
                break
            if model.act is not None and model.act_first:
                x = model.act(x)
            if model.norms is not None:
                x = model.norms[layer](x)
            if model.act is not None and not model.act_first:
                x = model.act(x)
        return x


def _goes_by_hops(model: Any) -> bool:
    """True if a model is a ``BasicGNN`` as PyG made it, of layers that take such pairs."""
    return (
        is_trimmable(model)
        and type(model).inference_per_layer is BasicGNN.inference_per_layer
        and model.jk_mode is None
        and not (model._forward_hooks or model._forward_pre_hooks or model.dropout.training)
        and is_act_by_row(model.act)
        and all(map(_takes_pairs, model.convs))
        and all(map(is_by_row, model.norms))
    )


def _takes_pairs(conv: Any) -> bool:
    return class_of(conv) in _OF_PAIRS and conv.flow == "source_to_target"


def check_model(model: nn.Module) -> None:
    """Refuse a model that keeps something of its first batch.

    Raises:
        ValueError: If one of its layers has ``cached=True``.
    """
    for name, module in model.named_modules():
        if getattr(module, "cached", False) is True:
            raise ValueError(
                f"{name or 'the model'} has cached=True: it would keep the edges of the first "
                "batch; build it with cached=False"
            )
