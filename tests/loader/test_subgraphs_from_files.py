"""Clusters and GraphSAINT on graph directories: features stay in their files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

import pyg_scale
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import (
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    IBMBNodeLoader,
)
from tests.loader.batches import assert_same_batches

COLUMNS = 768


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = planted_communities(16_000, 64_000, 4, COLUMNS, seed=1)
    data.edge_attr = torch.arange(64_000 * 2).view(-1, 2)
    path = tmp_path_factory.mktemp("graphs") / "graph"
    pyg_scale.save(data, path)
    return path


def clusters(data: Data, **kwargs: Any) -> ClusterLoader:
    own = ClusterData(data, 80, log=False, method="fennel", **kwargs)
    return ClusterLoader(own, batch_size=2, shuffle=True, seed=1)


def saint(kind: Any, **options: Any) -> Any:
    return lambda data: kind(data, 100, num_steps=3, log=False, seed=1, **options)


MAKE = {
    "clusters": clusters,
    "clusters by destination": lambda data: clusters(data, sparse_format="csc"),
    "walks": saint(GraphSAINTRandomWalkSampler, walk_length=2),
    "nodes": saint(GraphSAINTNodeSampler),
    "edges": saint(GraphSAINTEdgeSampler),
    "IBMB": lambda data: IBMBNodeLoader(data, "rand", torch.arange(40), 8, 10, seed=1),
}


def anonymous() -> int:
    """Bytes in memory of this process that are of no file."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc/self/status, of Linux")
    found = re.search(r"RssAnon:\s+(\d+)", status.read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def in_memory(data: Data) -> Data:
    kept = {key: value.clone() for key, value in data.items() if isinstance(value, torch.Tensor)}
    return Data(**kept, num_nodes=data.num_nodes)


@pytest.mark.parametrize("name", MAKE)
def test_features_are_not_loaded(name: str, folder: Path) -> None:
    """Making a loader and reading from it takes much less than the features have."""
    size = 16_000 * COLUMNS * 4
    data = pyg_scale.open(folder)
    warm = MAKE[name](pyg_scale.open(folder))  # what is made once, of code and of threads
    next(iter(warm))
    before = anonymous()
    loader = MAKE[name](data)
    batch = next(iter(loader))
    assert batch.x.size(1) == COLUMNS and batch.num_nodes < 1500
    assert anonymous() - before < size // 2
    assert loader.stats()["total"]["fetch"]["bytes"] > batch.num_nodes * COLUMNS * 4 - 1


@pytest.mark.parametrize("name", MAKE)
def test_batches_are_those_of_the_graph_in_memory(name: str, folder: Path) -> None:
    """With attributes of nodes and of edges."""
    opened = pyg_scale.open(folder)
    memory = in_memory(opened)
    expected, found = (list(MAKE[name](data)) for data in (memory, opened))
    assert len(found) > 1
    assert found[0].edge_attr.size(0) == found[0].num_edges
    assert_same_batches(expected[:3], found[:3])


@pytest.mark.parametrize("keep", [False, True])
def test_single_clusters_are_those_of_the_graph_in_memory(keep: bool, folder: Path) -> None:
    opened = pyg_scale.open(folder)
    memory = in_memory(opened)
    options: dict[str, Any] = {"log": False, "keep_inter_cluster_edges": keep, "method": "fennel"}
    own, expected = (ClusterData(data, 80, **options) for data in (opened, memory))
    for number in (0, 17, 79):
        assert_same_batches([expected[number]], [own[number]])
