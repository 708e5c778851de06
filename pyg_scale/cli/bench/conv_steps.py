"""A training step of two SAGE layers on a loader's batches: ours beside PyG's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import trim_to_layer

import pyg_scale.nn
from pyg_scale.cli.bench.conv_cases import OURS, PYG, Case, Graph
from pyg_scale.loader import NeighborLoader

FEATURES, CLASSES = 100, 47
"""As ogbn-products has them."""
STEPS = {"sage": False, "sage-trimmed": True}
"""Every step by name, and whether each layer gets only what the seeds still need."""
GRAPH = "batches"
"""What the report calls the graph of a step."""
_BATCHES = 4


class _GraphSAGE(nn.Module):
    def __init__(self, conv: type[nn.Module], hidden: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([conv(FEATURES, hidden), conv(hidden, CLASSES)])

    def forward(self, x: Tensor, batch: Data, edge_index: Tensor, trim: bool) -> Tensor:
        for number, conv in enumerate(self.convs):
            if trim:
                nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
                x, edge_index, _ = trim_to_layer(number, nodes, edges, x, edge_index)
            x = conv(x, edge_index)
            if number == 0:
                x = x.relu()
        return x[: batch.batch_size]


def batches(data: Data, num_neighbors: Sequence[int], batch_size: int) -> list[Data]:
    """A few batches of two hops with features and labels, as our loader gives them.

    Args:
        data: ``edge_index`` is used.
        num_neighbors: The first two numbers are used.
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
    return [batch for _, batch in zip(range(_BATCHES), loader)]


def step_cases(data: list[Data], hidden: int, names: Sequence[str]) -> list[Case]:
    """One step of either model: forward, loss, gradients, Adam.

    Args:
        data: The batches, which take turns; each turn hands out new edges, as a loader does.
        hidden: Channels between the layers.
        names: Of :data:`STEPS`.
    """
    found = []
    edges = sum(batch.num_edges for batch in data) // len(data)
    graphs = [
        Graph(GRAPH, batch.edge_index, batch.num_nodes, batch.num_nodes, is_block=True)
        for batch in data
    ]
    for name in names:
        theirs = _GraphSAGE(torch_geometric.nn.SAGEConv, hidden)
        ours = _GraphSAGE(pyg_scale.nn.SAGEConv, hidden)
        ours.load_state_dict(theirs.state_dict())
        for side, model in ((OURS, ours), (PYG, theirs)):
            once = _step(model, data, graphs, STEPS[name])
            found.append(Case(name, GRAPH, True, side, 0, 4 * hidden, edges, once))
    return found


def _step(
    model: nn.Module, data: list[Data], graphs: list[Graph], trim: bool
) -> Callable[[], Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    turns = cycle(zip(data, graphs))

    def once() -> Tensor:
        batch, graph = next(turns)
        optimizer.zero_grad()
        out = model(batch.x, batch, graph.fresh_edge_index(), trim)
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return once
