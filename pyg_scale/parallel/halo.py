"""Partition parallelism: every rank computes the whole of its own nodes, and sends halo rows.

Before every ``propagate`` of a layer, ranks send each other the rows of own nodes that are sources
of edges elsewhere, and in the backward pass the gradients of these rows the other way. So the model
computes on the full graph without sampling, exactly, with features and activations of a rank's
part alone. The idea is that of CAGNET (Tripathy et al., SC 2020) and of full-graph training in
BNS-GCN and PipeGCN; the exchange before every propagate makes it exact for any layer of PyG.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch_geometric.nn.conv import MessagePassing

from pyg_scale.parallel.base import GraphParallel
from pyg_scale.parallel.exchange import HaloExchange, Wire
from pyg_scale.parallel.graph_module import GraphModule, tensors_of
from pyg_scale.parallel.inexact import (
    BITS,
    LINEAR,
    Quantized,
    QuantizedExchange,
    SampledExchange,
    StaleExchange,
)
from pyg_scale.parallel.layers import HaloLayers, check_module
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.shard import Shard, share


class HaloParallel(GraphParallel):
    """Trains on the full graph, each rank on the parts that it owns.

    Without options it is exact. Each option trades that for fewer bytes or for time in training;
    evaluations (``model.eval()``) are exact. ``boundary_sample`` goes with no other option.

    Args:
        boundary_sample: The share of halo rows that are exchanged in a step, above 0 and at most 1,
            see :class:`~pyg_scale.parallel.inexact.SampledExchange`. For layers that add up or
            average neighbours.
        stale: Whether to use the rows and gradients of the step before, so that they are sent while
            ranks compute; see :class:`~pyg_scale.parallel.inexact.StaleExchange`.
        smoothing: For ``stale``: what is kept of older ones, at least 0 and below 1.
        quantize: ``"int8"`` or ``"bf16"``: fewer bits for each number, rounded at random; see
            :class:`~pyg_scale.parallel.inexact.Quantized`.
        seed: Seed of samples and of rounding.

    Raises:
        ValueError: If an option is out of range, or does not go with another.
    """

    def __init__(
        self,
        boundary_sample: float = 1.0,
        stale: bool = False,
        smoothing: float = 0.0,
        quantize: str | None = None,
        seed: int = 0,
    ) -> None:
        if not 0 < boundary_sample <= 1:
            raise ValueError(
                f"boundary_sample must be above 0 and at most 1 (got {boundary_sample!r})"
            )
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing must be at least 0 and below 1 (got {smoothing!r})")
        if smoothing and not stale:
            raise ValueError("smoothing= is for stale=True")
        if quantize is not None and quantize not in BITS:
            raise ValueError(f"quantize must be one of {', '.join(BITS)} (got {quantize!r})")
        if boundary_sample < 1 and (stale or quantize):
            raise ValueError("boundary_sample= goes neither with stale= nor with quantize=")
        self.boundary_sample, self.stale, self.smoothing = boundary_sample, stale, smoothing
        self.quantize, self.seed = quantize, seed
        self.exact = boundary_sample == 1 and not stale and quantize is None

    def wrap(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        graph: Any = None,
        inputs: Sequence[str] | None = None,
        mesh: Any = None,
    ) -> HaloModule:
        """Wrap a module; see :meth:`GraphParallel.wrap`.

        Raises:
            RuntimeError: If ``torch.distributed`` was not initialised.
            TypeError: If ``graph`` is not an opened graph, or a mesh is given.
            ValueError: If the module has layers that look at all nodes, or the graph does not suit
                it or the ranks. The same on all ranks.
            CommError: If a rank is gone or late; names it.
        """
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        peers = Peers(group, device)
        with peers.together():
            if mesh is not None:
                raise TypeError("'halo' divides one dimension: give it group= and not mesh=")
            check_module(module)
            if self.boundary_sample < 1:
                _check_linear(module)
        options = [self.boundary_sample, self.stale, self.smoothing, self.quantize, self.seed]
        said = peers.gather(options)
        if any(each != said[0] for each in said):
            raise ValueError(f"ranks have different options: {said}")
        shard = share(graph, peers)
        return HaloModule(module, shard, peers, inputs, self._exchange(shard, peers))

    def _exchange(self, shard: Shard, peers: Peers) -> HaloExchange:
        if self.boundary_sample < 1:
            return SampledExchange(shard.halos, peers, self.boundary_sample, self.seed)
        wire = Wire(peers) if self.quantize is None else Quantized(peers, self.quantize, self.seed)
        if self.stale:
            return StaleExchange(shard.halos, peers, self.smoothing, wire)
        if self.quantize is not None:
            return QuantizedExchange(shard.halos, peers, wire)
        return HaloExchange(shard.halos, peers)


class HaloModule(GraphModule):
    """A module whose layers exchange halo rows."""

    def __init__(
        self, module: nn.Module, shard: Shard, peers: Peers, inputs: Any, exchange: HaloExchange
    ) -> None:
        super().__init__(module, shard, peers, inputs)
        constant = [tensor for value in self.inputs.values() for tensor in tensors_of(value)]
        self._exchange = exchange
        self._layers = HaloLayers(module, shard, exchange, peers, constant)

    def forward(self, **replaced: Any) -> Any:
        """See :meth:`GraphModule.forward`."""
        self._exchange.begin(self.training)
        return super().forward(**replaced)

    def attached(self) -> AbstractContextManager[Any]:
        """The context in which the layers of the module are those of the whole graph."""
        return self._layers.attached()


def _check_linear(module: nn.Module) -> None:
    """Refuse layers for which a sample of neighbours is not right in the mean.

    Raises:
        ValueError: If there is one; names it.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, MessagePassing):
            continue
        sums = layer.aggr in ("add", "sum", "mean")
        if not sums or not isinstance(layer, LINEAR):
            raise ValueError(
                f"{type(layer).__name__} ({name or 'the model itself'}) does not add up or average "
                f"neighbours alone, so a sample is not right in the mean: leave boundary_sample out"
            )
