"""The models of the benchmarks, and their training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor, nn
from torch_geometric.data import Data, FeatureStore
from torch_geometric.nn import SAGEConv

import pyg_scale.nn
from pyg_scale.loader import NeighborLoader
from pyg_scale.store import Cached, MemoryFeatureStore, Quantized


class GraphSAGE(nn.Module):
    """Layers of mean aggregation.

    Args:
        in_channels: Number of columns of the features.
        hidden: Number of channels between layers.
        num_classes: Number of columns of the result.
        layers: Number of layers.
    """

    def __init__(self, in_channels: int, hidden: int, num_classes: int, layers: int) -> None:
        super().__init__()
        sizes = [in_channels, *[hidden] * (layers - 1), num_classes]
        self.convs = nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(sizes))

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        num_sampled_nodes: Sequence[int] | None = None,
        num_sampled_edges: Sequence[int] | None = None,
    ) -> Tensor:
        """Class scores ``[num_nodes, num_classes]``.

        Given the numbers of nodes and edges added by each hop of a batch, a layer works only on
        those that are still needed, and the scores are those of the seeds.
        """
        for number, conv in enumerate(self.convs):
            if num_sampled_nodes is not None and num_sampled_edges is not None:
                hops = len(num_sampled_edges) - number
                edge_index = edge_index[:, : sum(num_sampled_edges[:hops])]
                x = x[: sum(num_sampled_nodes[: hops + 1])]
                x = conv((x, x[: sum(num_sampled_nodes[:hops])]), edge_index)
            else:
                x = conv(x, edge_index)
            if number < len(self.convs) - 1:
                x = F.relu(x)
        return x


class Trainer:
    """A :class:`GraphSAGE` and its optimizer.

    Args:
        features: Number of columns of the features.
        hidden: Number of channels between layers.
        classes: Number of classes.
        layers: Number of layers.
        trim: If True, layers work only on the nodes and edges that are still needed; there must be
            one for each hop.
        seed: Seed of the parameters.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        classes: int,
        *,
        layers: int = 3,
        trim: bool = False,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.model, self.trim = GraphSAGE(features, hidden, classes, layers), trim
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)

    def step(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Train on a batch; returns the loss and class scores of its seeds before the update."""
        size = batch.batch_size
        hops = (batch.num_sampled_nodes, batch.num_sampled_edges) if self.trim else ()
        out = self.model(batch.x.float(), batch.edge_index, *hops)[:size]
        loss = F.cross_entropy(out, batch.y[:size])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach(), out.detach()


# Two layers ###############################################################################

FEATURES, CLASSES = 100, 47
"""Numbers of features and classes of the batches for two layers, as in ogbn-products."""
MODELS = "PyG's GraphSAGE of two layers, accelerated for ours"
TRIMS = (
    "the model gets the numbers of nodes and edges of each hop; PyG's layers also compute rows "
    "that are then cut off, ours do not; pairs: layers of both sides get (x, x[:n]) by our "
    "trim_to_layer and compute the same rows"
)
"""In words for reports: the models of both sides, and the rows that their layers compute."""


class TwoLayers(nn.Module):
    """PyG's ``GraphSAGE`` of two layers, called for a batch as its user would.

    Args:
        hidden: Number of channels between the layers.
        how: ``"whole"``: each layer computes all rows. ``"trimmed"``: the model gets the numbers of
            nodes and edges of each hop, and trims. ``"pairs"``: each layer gets the features of all
            nodes that it needs, and of those of which it makes a row.
    """

    def __init__(self, hidden: int, how: str) -> None:
        super().__init__()
        self.model, self.how = torch_geometric.nn.GraphSAGE(FEATURES, hidden, 2, CLASSES), how

    def forward(self, x: Tensor, batch: Data, edge_index: Tensor) -> Tensor:
        """Class scores of the seeds of a batch."""
        hops = batch.num_sampled_nodes, batch.num_sampled_edges
        if self.how == "pairs":
            for number, conv in enumerate(self.model.convs):
                x, edge_index, _ = pyg_scale.nn.trim_to_layer(number, *hops, x, edge_index)
                x = conv(x, edge_index)
                if number == 0:
                    x = x.relu()
        elif self.how == "trimmed":
            names = ("num_sampled_nodes_per_hop", "num_sampled_edges_per_hop")
            x = self.model(x, edge_index, **dict(zip(names, hops)))
        else:
            x = self.model(x, edge_index)
        return x[: batch.batch_size]


def batches(data: Data, num_neighbors: Sequence[int], batch_size: int) -> list[Data]:
    """A few batches of two hops with features and labels, from our loader.

    Args:
        data: The graph, of which ``edge_index`` is used.
        num_neighbors: Neighbours per hop, of which the first two are used.
        batch_size: Seeds of a batch.
    """
    size = int(data.num_nodes or 0)
    generator = torch.Generator().manual_seed(0)
    full = Data(
        edge_index=data.edge_index,
        x=torch.randn(size, FEATURES, generator=generator),
        y=torch.randint(CLASSES, (size,), generator=generator),
    )
    hops = list(num_neighbors[:2]) + [num_neighbors[-1]] * (2 - len(num_neighbors))
    loader = NeighborLoader(full, hops, batch_size=batch_size, shuffle=True, seed=1)
    return [batch for _, batch in zip(range(4), loader)]


def _int8(x: Tensor) -> FeatureStore:
    return _filled(Quantized("memory", "int8"), x)


def _fp16(x: Tensor) -> FeatureStore:
    return _filled(Quantized("memory", "fp16"), x)


def _cached(x: Tensor) -> FeatureStore:
    return Cached(_filled(MemoryFeatureStore(), x), x.nbytes // 2, "sieve")


def _filled(store: FeatureStore, x: Tensor) -> FeatureStore:
    store.put_tensor(x, group_name=None, attr_name="x", index=None)
    return store


FEATURE_STORES: dict[str, Callable[[Tensor], FeatureStore | None]] = {
    "memory": lambda _: None,
    "int8": _int8,
    "fp16": _fp16,
    "cached": _cached,
}
"""The stores of a first layer's features by name; ``None`` if the graph has them."""

FIRST = {
    f"first{'' if store == 'memory' else '-' + store}{'-lazy' if lazy else ''}": (store, lazy)
    for store in FEATURE_STORES
    for lazy in (False, True)
}
"""Every step of a loader and a first layer by name, with the name of the store of features, and
True if the ``x`` of ours is lazy."""


@lru_cache(maxsize=1)  # all steps that are measured in turns share them
def _features(num_nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_nodes, FEATURES, generator=generator)


def first_layer_step(
    layer: nn.Module,
    data: Data,
    num_neighbors: Sequence[int],
    batch_size: int,
    store: str,
    lazy_x: bool,
) -> Callable[[], float]:
    """A batch of our loader, and a first layer on it with gradients of its parameters.

    Args:
        layer: Takes sources and destinations, :data:`FEATURES` channels.
        data: The graph, of which ``edge_index`` is used.
        num_neighbors: Neighbours per hop.
        batch_size: Seeds of a batch.
        store: A name of :data:`FEATURE_STORES`.
        lazy_x: See :class:`~pyg_scale.loader.NodeLoader`.
    """
    size = int(data.num_nodes or 0)
    x = _features(size)
    features = FEATURE_STORES[store](x)
    full = Data(edge_index=data.edge_index, num_nodes=size)
    if features is None:
        full.x = x
    options: dict[str, Any] = {"feature_store": features, "lazy_x": lazy_x, "seed": 0}
    loader = NeighborLoader(full, list(num_neighbors), **options)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    seeds = cycle(order.split(batch_size))

    def step() -> float:
        batch = loader(next(seeds))
        inner = sum(batch.num_sampled_nodes[:-1])
        out = layer((batch.x, batch.x[:inner]), batch.edge_index)
        torch.autograd.grad(out.sum(), list(layer.parameters()))
        return float(out.detach().sum())

    return step


def two_layer_step(
    model: TwoLayers, data: list[Data], edges: list[Callable[[], Tensor]]
) -> Callable[[], Tensor]:
    """A step that trains on the next batch, cyclically, and returns the loss.

    Args:
        model: The model.
        data: The batches.
        edges: A function that returns the edges of a batch for a step.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    turns = cycle(zip(data, edges))

    def step() -> Tensor:
        batch, edge_index = next(turns)
        optimizer.zero_grad()
        out = model(batch.x, batch, edge_index())
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
