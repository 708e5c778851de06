"""Partition parallelism: every rank computes the whole of its own nodes, and sends halo rows.

Before every ``propagate`` of a layer, ranks send each other the rows of own nodes that are sources
of edges elsewhere, and in the backward pass the gradients of these rows the other way. So the model
computes on the full graph without sampling, exactly, with features and activations of a rank's
part alone. The idea is that of CAGNET (Tripathy et al., SC 2020) and of full-graph training in
BNS-GCN and PipeGCN; the exchange before every propagate makes it exact for any layer of PyG.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pyg_scale.parallel.compression import Compressor
from pyg_scale.parallel.exchange import HaloExchange, Wire
from pyg_scale.parallel.graph_module import GraphModule, SharedGraph
from pyg_scale.parallel.halo_layers import HaloLayers
from pyg_scale.parallel.inexact import (
    BITS,
    LINEAR,
    Quantized,
    QuantizedExchange,
    SampledExchange,
    StaleExchange,
)
from pyg_scale.parallel.layers import check_convs, check_directions
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.remat import RematLayers, is_sequential
from pyg_scale.parallel.shard import Shard, share


class HaloParallel(SharedGraph):
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
        remat: Whether to get the halo in blocks, one rank after the other, and again in the
            backward pass: less memory, more messages, and exact. For layers that add up messages,
            take their extremes or attend to them; goes with no other option. See
            :mod:`~pyg_scale.parallel.remat`.

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
        remat: bool = False,
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
        if remat and (boundary_sample < 1 or stale or quantize):
            raise ValueError("remat=True goes with no other option")
        self.remat = remat
        self.boundary_sample, self.stale, self.smoothing = boundary_sample, stale, smoothing
        self.quantize, self.seed = quantize, seed
        self.exact = boundary_sample == 1 and not stale and quantize is None

    def check(self, module: nn.Module, peers: Peers, mesh: Any) -> None:
        super().check(module, peers, mesh)
        self.check_layers(module, peers.size)

    def check_layers(self, module: nn.Module, size: int) -> None:
        """Refuse layers that do not suit the options, or a graph that ``size`` ranks divide.

        Raises:
            ValueError: If there is one; names it.
        """
        if size > 1:
            check_directions(module)
        if self.boundary_sample < 1:
            check_convs(
                module,
                _is_linear,
                "does not add up or average neighbours alone, so a sample is not right in the "
                "mean: leave boundary_sample out",
            )
        if self.remat:
            check_convs(
                module,
                is_sequential,
                "needs all neighbours at once, not rank by rank: leave remat out",
            )

    def options(self) -> list[Any]:
        inexact = [self.boundary_sample, self.stale, self.smoothing, self.quantize, self.seed]
        return [*inexact, self.remat]

    def divided(
        self,
        module: nn.Module,
        peers: Peers,
        graph: Any,
        inputs: Sequence[str] | None,
        mesh: Any,
    ) -> GraphModule:
        shard = share(graph, peers)
        exchange = self.exchange(shard, peers)
        return HaloModule(module, shard, peers, inputs, exchange, remat=self.remat)

    def exchange(self, shard: Shard, peers: Peers) -> HaloExchange:
        """The exchange of halo rows that the options say, among ranks that share a graph."""
        if self.boundary_sample < 1:
            return SampledExchange(shard.halos, peers, self.boundary_sample, self.seed)
        wire = Wire(peers) if self.quantize is None else Quantized(peers, self.quantize, self.seed)
        if self.stale:
            return StaleExchange(shard.halos, peers, self.smoothing, wire)
        if self.quantize is not None:
            return QuantizedExchange(shard.halos, peers, wire)
        return HaloExchange(shard.halos, peers)


class HaloModule(GraphModule):
    """A module whose layers exchange halo rows.

    Args:
        module: See :class:`GraphModule`.
        shard: The share of this rank.
        peers: All ranks.
        inputs: See :class:`GraphModule`.
        exchange: The exchange of halo rows.
        compressor: See :class:`GraphModule`.
        remat: Whether layers get the halo in blocks.
    """

    def __init__(
        self,
        module: nn.Module,
        shard: Shard,
        peers: Peers,
        inputs: Sequence[str] | None,
        exchange: HaloExchange,
        compressor: Compressor | None = None,
        remat: bool = False,
    ) -> None:
        super().__init__(module, shard, peers, inputs, exchange, compressor)
        constant = self.constant()
        layers = RematLayers if remat else HaloLayers
        self.layers = layers(module, shard.edges, exchange, peers, constant)


def _is_linear(layer: Any) -> bool:
    """True if a sample of neighbours is right in the mean."""
    return layer.aggr in ("add", "sum", "mean") and isinstance(layer, LINEAR)
