"""Graphs, and servers of them in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

import pyg_scale
from pyg_scale.distributed.server.graph_server import GraphServer
from pyg_scale.distributed.server.served_graph import connect_graph
from tests.distributed.network import Network

TOKEN = "a token of sixteen or more"


def graph(num_nodes: int = 300, num_edges: int = 3000) -> Data:
    """A graph with everything that a batch can have."""
    torch.manual_seed(5)
    data = Data(
        x=torch.randn(num_nodes, 7),
        edge_index=torch.randint(num_nodes, (2, num_edges)),
        y=torch.randint(4, (num_nodes,)),
        edge_attr=torch.randn(num_edges, 3).to(torch.bfloat16),
        time=torch.randint(50, (num_nodes,)),
        weight=torch.rand(num_edges),
    )
    data.train_mask = torch.rand(num_nodes) < 0.5
    data.name, data.levels, data.odd = "some", [1, 2], torch.arange(5.0)
    return data


def hetero() -> HeteroData:
    """A graph with types."""
    torch.manual_seed(6)
    data = HeteroData()
    data["paper"].x = torch.randn(200, 5)
    data["paper"].y = torch.randint(3, (200,))
    data["author"].x = torch.randn(90, 4, dtype=torch.float64)
    data["venue"].num_nodes = 10
    for source, relation, destination, count in (
        ("author", "writes", "paper", 700),
        ("paper", "cites", "paper", 900),
        ("paper", "in", "venue", 200),
        ("venue", "of", "paper", 200),
        ("paper", "by", "author", 700),
    ):
        ends = [torch.randint(data[t].num_nodes, (count,)) for t in (source, destination)]
        data[source, relation, destination].edge_index = torch.stack(ends)
    data["paper", "cites", "paper"].edge_attr = torch.randn(900, 2)
    return data


class Served:
    """Servers of one graph, and who asks them."""

    def __init__(self, path: Path, num_servers: int, **options: Any) -> None:
        self.path, self.network = path, Network()
        self.addresses = [f"tcp://server{i}:5555" for i in range(num_servers)]
        self.servers = [
            GraphServer(pyg_scale.open(path), parallel=False, **options) for _ in self.addresses
        ]
        self.listeners = [self.listen(i) for i in range(num_servers)]
        self.opened: list[Any] = []

    def listen(self, number: int, num_threads: int = 2) -> Any:
        return self.network.listen(
            self.addresses[number],
            self.servers[number].handlers,
            token=TOKEN,
            num_threads=num_threads,
        )

    def open(self, timeout: float = 10.0, token: str = TOKEN) -> Any:
        found = connect_graph(
            ",".join(self.addresses), token=token, timeout=timeout, transport=self.network
        )
        self.opened.append(found)
        return found

    def counts(self, name: str = "batches") -> list[int]:
        return [server.counts()[name] for server in self.servers]

    def close(self) -> None:
        for each in [*self.opened, *self.listeners]:
            each.close()
