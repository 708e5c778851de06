"""Parts of a graph, channels and batches, each divided by one dimension of a mesh of ranks.

Ranks with one place in the dimension ``partition`` share parts of the graph. Each owns a slice of
their nodes, and where edges are followed, a slice of channels of all of them (``feature``). Ranks
with the same channels exchange halo rows. In the dimension ``data`` everything is there again, for
other features, seeds or draws of dropout: the gradient is that of the mean over all of them.

Between the two it is what MixGCN (Wan et al., 2025) and the 2-D methods of CAGNET (Tripathy et al.,
SC 2020) are between their ends. A ``propagate`` of ``d`` channels sends ``(rho + 2 (F - 1) / F) d``
numbers per node: ``rho`` halo nodes for each node, ``F`` ranks that divide channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pyg_scale.parallel.compression import Compression, compression_of
from pyg_scale.parallel.feature import FeatureModule, check_channels
from pyg_scale.parallel.graph_module import GraphModule, SharedGraph
from pyg_scale.parallel.halo import HaloModule, HaloParallel
from pyg_scale.parallel.peers import Alone, Peers
from pyg_scale.parallel.shard import share

DIMENSIONS = ("partition", "feature", "data")
"""The names of dimensions of a mesh; those that are not there have one rank."""


class MeshParallel(HaloParallel):
    """Trains on the full graph on a mesh of ranks: ``partition`` × ``feature`` × ``data``.

    Without options it is exact. Without a mesh all ranks are in the dimension ``partition``.

    Args:
        compress: Sends gradients in fewer bytes, see :class:`~pyg_scale.parallel.ddp.DDP`.
        ratio: The share of gradients that ``compress="topk"`` sends, 0.01 if ``None``.
        **halo: Options of :class:`~pyg_scale.parallel.halo.HaloParallel`, for halo rows.

    Raises:
        TypeError: If ``compress`` is neither a name nor an instance, or there is no such option.
        ValueError: If there is no such compression, ``ratio`` is not for it, or an option of
            ``halo`` cannot be.
    """

    def __init__(
        self, compress: str | Compression | None = None, ratio: float | None = None, **halo: Any
    ) -> None:
        super().__init__(**halo)
        if compress is None and ratio is not None:
            raise ValueError("ratio is for compress='topk' (got no compress)")
        self.compression = None if compress is None else compression_of(compress, ratio)
        self.exact = self.exact and compress is None

    def check(self, module: nn.Module, peers: Peers, mesh: Any) -> None:
        sizes = sizes_of_mesh(mesh, peers)
        SharedGraph.check(self, module, peers, None)
        self.check_layers(module, sizes["partition"])
        if sizes["feature"] > 1:
            check_channels(module, sizes["feature"])
            if self.remat:
                raise ValueError("remat=True needs a dimension 'feature' of one rank")

    def options(self) -> list[Any]:
        compression = self.compression
        said = [] if compression is None else [type(compression).__name__, repr(vars(compression))]
        return [*super().options(), *said]

    def divided(
        self,
        module: nn.Module,
        peers: Peers,
        graph: Any,
        inputs: Sequence[str] | None,
        mesh: Any,
    ) -> GraphModule:
        sizes = sizes_of_mesh(mesh, peers)
        rows, columns = (_along(mesh, name, sizes, peers) for name in ("partition", "feature"))
        with peers.together():  # ranks of a column fail together
            shard = share(graph, rows)
        exchange = self.exchange(shard, rows)
        compressor = None if self.compression is None else self.compression.compressor(peers.group)
        if columns.size == 1:
            return HaloModule(module, shard, peers, inputs, exchange, compressor, self.remat)
        return FeatureModule(module, shard, peers, inputs, exchange, columns, compressor)


def sizes_of_mesh(mesh: Any, peers: Peers) -> dict[str, int]:
    """The number of ranks in each of :data:`DIMENSIONS`.

    Args:
        mesh: A ``DeviceMesh``, or ``None``.
        peers: All ranks.

    Raises:
        TypeError: If it is something else.
        ValueError: If a dimension has another name, or the mesh has not every rank once.
    """
    if mesh is None:
        return {"partition": peers.size, "feature": 1, "data": 1}
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh (got {type(mesh).__name__}): make it with torch's "
            "init_device_mesh('cpu', (2, 2, 1), mesh_dim_names=('partition', 'feature', 'data'))"
        )
    if peers.size != dist.get_world_size():
        raise ValueError("mesh= is of all ranks: leave out group=")
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(DIMENSIONS):
        raise ValueError(
            f"mesh_dim_names must be some of {', '.join(DIMENSIONS)} (got {', '.join(names)})"
        )
    shape = tuple(mesh.shape)
    if math.prod(shape) != peers.size:
        product = " x ".join(map(str, shape))
        raise ValueError(
            f"the mesh has {product} = {math.prod(shape)} ranks, and there are {peers.size}: make "
            "one of all ranks"
        )
    return {name: dict(zip(names, shape, strict=True)).get(name, 1) for name in DIMENSIONS}


def _along(mesh: Any, name: str, sizes: dict[str, int], peers: Peers) -> Peers:
    """The ranks that differ from this one in one dimension only."""
    if sizes[name] == peers.size:
        return peers
    if sizes[name] == 1:
        return Alone(peers.device)
    return Peers(mesh.get_group(name), peers.device, peers)
