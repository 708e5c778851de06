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

from pyg_scale.parallel.base import GraphParallel
from pyg_scale.parallel.exchange import HaloExchange
from pyg_scale.parallel.graph_module import GraphModule, tensors_of
from pyg_scale.parallel.layers import HaloLayers, check_module
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.shard import share


class HaloParallel(GraphParallel):
    """Trains on the full graph, each rank on the parts that it owns."""

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
                raise TypeError("'halo' divides one dimension: give it group=, or use 'mesh'")
            check_module(module)
        return HaloModule(module, share(graph, peers), peers, inputs)


class HaloModule(GraphModule):
    """A module whose layers exchange halo rows."""

    def __init__(self, module: nn.Module, shard: Any, peers: Peers, inputs: Any) -> None:
        super().__init__(module, shard, peers, inputs)
        constant = [tensor for value in self.inputs.values() for tensor in tensors_of(value)]
        self._layers = HaloLayers(module, shard, HaloExchange(shard.halos, peers), peers, constant)

    def attached(self) -> AbstractContextManager[Any]:
        """The context in which the layers of the module are those of the whole graph."""
        return self._layers.attached()
