"""Sampling across parts gives the batches of the whole graph, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.sampler import NodeSamplerInput

import pyg_scale
from pyg_scale.datasets import hetero_communities, planted_communities
from pyg_scale.ops import library
from pyg_scale.ops.expand import number_nodes
from pyg_scale.partitioner.base import Partition
from pyg_scale.partitioner.write import write_partition
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.sampler.parts import parts_topology
from pyg_scale.sampler.reference import ReferenceSampler
from pyg_scale.store.directory import GraphDirectory

NODES, EDGES = 300, 4_000


def homogeneous() -> Any:
    return planted_communities(
        NODES, EDGES, 4, 3, node_time=True, edge_time=True, edge_weight=True, progress=False
    )


def parts(data: Any, path: Path, num_parts: int, **options: Any) -> GraphDirectory:
    whole = path / "whole"
    pyg_scale.save(data, whole, **options)
    directory = GraphDirectory(whole)
    generator = torch.Generator().manual_seed(num_parts)
    assignment = {
        t: torch.randint(num_parts, (node.num_nodes,), generator=generator).int()
        for t, node in directory.meta.nodes.items()
    }
    write_partition(whole, Partition(assignment, num_parts, "random"), path / "parts")
    return GraphDirectory(path / "parts")


def same(a: Any, b: Any, what: str) -> None:
    if isinstance(a, dict):
        assert list(a) == list(b), what
        for key in a:
            same(a[key], b[key], f"{what} of {key}")
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), what
    else:
        assert a == b, what


def compare(one: Any, two: Any, seed: Any, node_type: Any = None, time: Any = None) -> None:
    for key in range(2):
        given = NodeSamplerInput(None, seed, time, node_type)
        a, b = one.sample_from_nodes(given, key=key), two.sample_from_nodes(given, key=key)
        for name in ("node", "row", "col", "edge", "batch"):
            same(getattr(a, name), getattr(b, name), name)
        for name in ("num_sampled_nodes", "num_sampled_edges"):
            same(getattr(a, name), getattr(b, name), name)


@pytest.mark.parametrize("kind", [NativeSampler, ReferenceSampler])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_every_option_on_a_homogeneous_graph(tmp_path: Path, num_parts: int, kind: type) -> None:
    data = homogeneous()
    topology = parts_topology(parts(data, tmp_path, num_parts))
    seed = torch.tensor([5, 7, 5, NODES - 1, 0, 100])
    for options in (
        {},
        {"replace": True},
        {"disjoint": True},
        {"subgraph_type": "bidirectional"},
        {"subgraph_type": "induced"},
        {"subgraph_type": "induced", "disjoint": True},
    ):
        for num_neighbors in ([5, 4, 3], [-1, 0, 2]):
            one, two = kind(data, num_neighbors, **options), kind(data, num_neighbors, **options)
            two.topology = topology
            compare(one, two, seed)
            compare(one, two, seed[:0])


@pytest.mark.parametrize("kind", [NativeSampler, ReferenceSampler])
@pytest.mark.parametrize(
    "attrs",
    [
        {"time_attr": "time"},
        {"time_attr": "edge_time"},
        {"weight_attr": "edge_weight"},
        {"time_attr": "edge_time", "weight_attr": "edge_weight"},
    ],
    ids=lambda attrs: "+".join(attrs.values()),
)
def test_times_and_weights(tmp_path: Path, attrs: dict[str, str], kind: type) -> None:
    data = homogeneous()
    topology = parts_topology(parts(data, tmp_path, 3, **attrs), **attrs)
    seed = torch.arange(0, NODES, 37)
    time = torch.full((seed.numel(),), 1 << 29) if "edge_time" in attrs.values() else None
    for options in ({}, {"replace": True}, {"temporal_strategy": "last"}, {"disjoint": True}):
        if "temporal_strategy" in options and "time_attr" not in attrs:
            continue
        one = kind(data, [4, 3], **attrs, **options)
        two = kind(data, [4, 3], **attrs, **options)
        two.topology = topology
        compare(one, two, seed, time=time)


@pytest.mark.parametrize("kind", [NativeSampler, ReferenceSampler])
def test_a_heterogeneous_graph(tmp_path: Path, kind: type) -> None:
    data = hetero_communities(150, 80, 1_500, 600, 4, 3, progress=False)
    topology = parts_topology(parts(data, tmp_path, 3))
    for node_type in data.node_types:
        seed = torch.arange(0, data[node_type].num_nodes, 9)
        for options in ({}, {"disjoint": True}, {"subgraph_type": "induced"}):
            one, two = kind(data, [4, 3], **options), kind(data, [4, 3], **options)
            two.topology = topology
            compare(one, two, seed, node_type)


def test_what_the_parts_were_not_written_for_is_refused(tmp_path: Path) -> None:
    directory = parts(homogeneous(), tmp_path, 2)
    for wrong, message in (
        ({"direction": "backward"}, "needs 'by_src'"),
        ({"time_attr": "time"}, "written with time_attr=None"),
        ({"weight_attr": "edge_weight"}, "written with weight_attr=None"),
    ):
        with pytest.raises(ValueError, match=message):
            parts_topology(directory, **wrong)


@pytest.fixture(params=["never", "require"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)
    return str(request.param)


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_numbers_are_those_of_plain_torch(kernels: str, disjoint: bool, append: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    known = torch.randint(50, (40,), generator=generator)
    node = torch.randint(50, (300,), generator=generator)
    known_seed = torch.randint(4, (40,), generator=generator) if disjoint else None
    seed = torch.randint(4, (300,), generator=generator) if disjoint else None
    nodes, seeds, row = number_nodes(known, known_seed, node, seed, 50, 4, append=append)
    place: dict[Any, int] = {}
    batch = []
    for i, v in enumerate(known.tolist()):
        place.setdefault((v, known_seed[i].item() if known_seed is not None else 0), i)
        batch.append(v)
    expected = []
    for i, v in enumerate(node.tolist()):
        key = (v, seed[i].item() if seed is not None else 0)
        if key not in place and append:
            place[key] = len(batch)
            batch.append(v)
        expected.append(place.get(key, -1))
    assert nodes.tolist() == batch and row.tolist() == expected
    assert (seeds is None) != disjoint
