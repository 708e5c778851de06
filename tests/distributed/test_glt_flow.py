"""The way of GLT's tutorial: partition, each rank its part, sampler workers, then servers."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import torch

import pyg_scale
import pyg_scale.distributed
import pyg_scale.loader
from pyg_scale.datasets import planted_communities
from pyg_scale.distributed import SamplingOptions
from pyg_scale.distributed.server.graph_server import GraphServer
from pyg_scale.distributed.server.served_graph import connect_graph
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from tests.distributed.across import on_ranks, spread
from tests.distributed.network import Network
from tests.distributed.served import TOKEN
from tests.loader.batches import assert_same_batches

ROOT = Path(__file__).parents[2]


def test_partition_then_workers_then_servers(tmp_path: Path) -> None:
    data = planted_communities(300, 2400, seed=2)
    train = torch.arange(0, 300, 2)
    parts = tmp_path / "parts"
    pyg_scale.save(data, tmp_path / "graph", index_sets={"train": train})
    pyg_scale.partition(tmp_path / "graph", 2, "frequency", parts, num_neighbors=[4, 3])
    nodes: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 20, "shuffle": True, "seed": 9}
    links: dict[str, Any] = nodes | {"neg_sampling_ratio": 1.0}
    seeds = data.edge_index[:, ::12]
    expected = list(NeighborLoader(data, input_nodes=train, **nodes))
    expected_links = list(LinkNeighborLoader(data, edge_label_index=seeds, **links))

    def work(opened: Any) -> tuple[list[Any], list[Any]]:
        """Worker mode: two ranks, one part each, two sampler threads each."""
        of_nodes = NeighborLoader(
            opened, input_nodes=opened.index_set("train"), num_workers=2, **nodes
        )
        of_links = LinkNeighborLoader(opened, edge_label_index=seeds, **links)
        return list(of_nodes), list(of_links)

    found = on_ranks(spread(parts, [[0], [1]]), work)
    for rank, (of_nodes, of_links) in enumerate(found):
        assert_same_batches(of_nodes, expected[rank::2])
        assert_same_batches(of_links, expected_links[rank::2])

    # sampler processes with a ring of shared memory, where all parts are on this machine
    options = SamplingOptions(num_workers=2, worker_concurrency=2, channel_size="1MB")
    with pyg_scale.open(parts) as opened:
        loader = NeighborLoader(
            opened, input_nodes=opened.index_set("train"), sampling=options, **nodes
        )
        assert_same_batches(loader, expected)

    # server-client mode: two servers, the client has nothing of the graph
    network, addresses = Network(), ["tcp://server0:5555", "tcp://server1:5555"]
    servers = [GraphServer(pyg_scale.open(parts), parallel=False) for _ in addresses]
    listeners = [
        network.listen(address, server.handlers, token=TOKEN, num_threads=2)
        for address, server in zip(addresses, servers, strict=True)
    ]
    options = SamplingOptions(server_rank=[0, 1], prefetch_size=3, buffer_size="1MB")
    with connect_graph(",".join(addresses), token=TOKEN, timeout=10.0, transport=network) as client:
        loader = NeighborLoader(
            client, input_nodes=client.index_set("train"), sampling=options, **nodes
        )
        assert_same_batches(loader, expected)
        assert client.y.equal(data.y)
    for listener in listeners:
        listener.close()


def test_the_page_names_what_there_is() -> None:
    text = (ROOT / "docs" / "from-glt.md").read_text()
    for name in set(re.findall(r"pyg_scale((?:\.\w+)+)", text)):
        found: Any = pyg_scale
        for step in name.strip(".").split("."):
            found = (
                getattr(found, step)
                if hasattr(found, step)
                else importlib.import_module(f"{found.__name__}.{step}")
            )
    words = set(SamplingOptions.__dataclass_fields__)
    for row in re.findall(r"SamplingWorkerOptions\((.*?)\)", text):
        assert set(filter(None, row.split(", "))) <= words
