"""A model over embeddings, trained on several ranks and, by plain torch, on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.data import Data

import pyg_scale
from pyg_scale import parallel
from pyg_scale.comm import Communicator, connect
from pyg_scale.train import NodeEmbedding, RowAdagrad

NODES, CHANNELS, NEIGHBORS = 41, 5, 3
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sparse_adam": (torch.optim.SparseAdam, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.3, "lr_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.5}),
    "row_adagrad": (RowAdagrad, {"lr": 0.2}),
}


def table() -> Tensor:
    """The first values."""
    return torch.randn(
        NODES, CHANNELS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def step_of(number: int) -> tuple[Tensor, Tensor]:
    """The nodes that each seed of a step reads, some more than once, and what is to be learned.

    Ranks have unequal numbers of seeds, and in some steps one of three has none.
    """
    generator = torch.Generator().manual_seed(100 + number)
    seeds = [7, 2, 5, 1, 6][number % 5]
    nodes = torch.randint(NODES // (1 + number % 2), (seeds, NEIGHBORS), generator=generator)
    return nodes, torch.randn(seeds, generator=generator, dtype=torch.float64)


def head() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(CHANNELS, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    found = model(x.view(-1, NEIGHBORS, CHANNELS).mean(dim=1)).squeeze(1)
    loss = (found - target).square()
    return loss.mean() if target.numel() else loss.sum()


def comm_for(name: str) -> Communicator:
    """Ranks have made unequal numbers of connections, so each needs a name."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    return connect("local" if alone else "gloo", timeout=30, name=name)


def dense(kind: str, steps: range) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain torch on one process: the rows and the parameters after some steps."""
    embedding = nn.Embedding.from_pretrained(table(), freeze=False, sparse=True)
    model, (optimizer, options) = head(), OPTIMIZERS[kind]
    of_rows = optimizer(embedding.parameters(), **options)
    of_model = torch.optim.Adam(model.parameters(), lr=0.02)
    for number in steps:
        nodes, target = step_of(number)
        loss_of(model, embedding(nodes.view(-1)), target).backward()
        for each in (of_rows, of_model):
            each.step()
            each.zero_grad()
    return embedding.weight.detach(), dict(model.state_dict())


class Run:
    """Everything of a run on this rank."""

    def __init__(
        self,
        kind: str,
        name: str,
        graph: Any = NODES,
        init: bool = True,
        wrapper: str = "ddp",
    ) -> None:
        self.comm = comm_for(name)
        first = table()
        self.embedding = NodeEmbedding(
            graph,
            CHANNELS,
            dtype=torch.float64,
            init=(lambda ids: first[ids]) if init else (lambda ids: first[ids] * 0),
            comm=self.comm,
        )
        alone = not dist.is_initialized()
        self.model: Any = head() if alone else parallel.wrap(head(), wrapper)
        optimizer, options = OPTIMIZERS[kind]
        self.of_rows = self.embedding.optimizer(optimizer, **options)
        self.of_model = torch.optim.Adam(self.model.parameters(), lr=0.02)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.of_model,
            "embedding": self.embedding,
            "embedding_optimizer": self.of_rows,
        }

    def train(self, steps: range, distinct: bool = False) -> None:
        rank, size = self.comm.rank, self.comm.world_size
        for number in steps:
            nodes, target = step_of(number)
            nodes, target = nodes[rank::size], target[rank::size]
            if distinct:
                asked, place = nodes.unique(return_inverse=True)
                x = self.embedding(asked)[place.view(-1)]
            else:
                x = self.embedding(nodes.reshape(-1))
            loss = loss_of(self.model, x, target)
            if isinstance(self.model, nn.Sequential):
                loss.backward()
            else:
                self.model.backward(loss, target.numel())
            for each in (self.of_rows, self.of_model):
                each.step()
                each.zero_grad()

    def rows(self) -> Tensor:
        """All rows, as this rank reads them."""
        with torch.no_grad():
            return self.embedding(torch.arange(NODES))

    def parameters(self) -> dict[str, Tensor]:
        return dict(getattr(self.model, "module", self.model).state_dict())

    def close(self) -> None:
        self.embedding.close()
        self.comm.close()


def cut(folder: Path, parts: int) -> Path:
    """A graph without features in parts, in a directory."""
    generator = torch.Generator().manual_seed(0)
    data = Data(
        edge_index=torch.randint(NODES, (2, 150), generator=generator),
        y=torch.arange(NODES) % 2,
        num_nodes=NODES,
    )
    pyg_scale.save(data, folder / "graph")
    pyg_scale.partition(folder / "graph", parts, "hash", folder / f"parts-{parts}")
    return folder / f"parts-{parts}"
