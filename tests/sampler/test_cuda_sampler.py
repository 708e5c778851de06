"""The sampler for CUDA: how often it waits for the device, and how many kernels it launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_scale.sampler import CudaSampler, NativeSampler, cuda, device_graph
from pyg_scale.sampler.device_nodes import NodesByHash
from tests.nn.on_cuda import on_cuda

SIZES = {"paper": 300, "author": 400, "institution": 20, "field": 60}
EDGE_TYPES = (
    ("author", "writes", "paper"),
    ("paper", "rev_writes", "author"),
    ("paper", "cites", "paper"),
    ("paper", "has_topic", "field"),
    ("field", "rev_has_topic", "paper"),
    ("author", "affiliated_with", "institution"),
    ("institution", "rev_affiliated_with", "author"),
)


def academic() -> HeteroData:
    """The schema of ogbn-mag with edges in both directions."""
    generator, data = torch.Generator().manual_seed(0), HeteroData()
    for node_type, size in SIZES.items():
        data[node_type].num_nodes = size
    for edge_type in EDGE_TYPES:
        ends = [torch.randint(SIZES[t], (1500,), generator=generator) for t in edge_type[::2]]
        data[edge_type].edge_index = torch.stack(ends)
        data[edge_type].when = torch.randint(0, 50, (1500,), generator=generator)
        data[edge_type].weight = torch.randint(0, 3, (1500,), generator=generator).float()
    for node_type in ("paper", "author"):  # along other edge types nothing is too late
        data[node_type].time = torch.randint(0, 50, (SIZES[node_type],), generator=generator)
    return data


def assert_same(found: Any, wanted: Any) -> None:
    for field in ("node", "row", "col", "edge", "colptr"):
        ours, theirs = getattr(found, field), getattr(wanted, field)
        assert ours.keys() == theirs.keys()
        for each in ours:
            assert torch.equal(ours[each], theirs[each]), (field, each)
    assert found.num_sampled_nodes == wanted.num_sampled_nodes
    assert found.num_sampled_edges == wanted.num_sampled_edges


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disjoint": True},
        {"weight_attr": "weight"},
        {"time_attr": "time"},
        {"time_attr": "when", "temporal_strategy": "last", "weight_attr": "weight"},
    ],
    ids=str,
)
@pytest.mark.parametrize("hops", [[3], [4, 3], [3, 2, 2]], ids=len)
def test_a_hop_waits_once_for_all_edge_types(
    hops: list[int], options: dict[str, Any], monkeypatch: Any
) -> None:
    data = academic()
    native = NativeSampler(data, hops, **options)
    here = CudaSampler(data, hops, **options, device="cpu")
    seed: dict[Any, Tensor] = {"paper": torch.arange(0, 300, 17)}
    time = None
    if "time_attr" in options:
        time = {"paper": torch.arange(18) * 3}
    wanted = native.sample(seed, time, 5)
    count = cuda._edges_of_seeds

    def count_on_the_cpu(*args: Any) -> Any:
        before = launched.waits, len(launched.names)
        found = count(*args)
        launched.waits = before[0]
        del launched.names[before[1] :]
        return found

    monkeypatch.setattr(cuda, "_edges_of_seeds", count_on_the_cpu)
    monkeypatch.setattr(device_graph, "read_here", lambda *tensors: None)  # there are no streams
    with on_cuda(monkeypatch) as launched:
        found = here.sample(seed, time, 5)
    assert launched.waits == len(hops)
    assert launched.names.count("pyg_scale::draw_neighbors") == len(hops)
    special = bool(time or here.weight_attr)
    assert launched.names.count("pyg_scale::candidates") == special * len(hops)
    assert len(launched.names) <= (195 if here.disjoint else 145) * len(hops)
    assert_same(found, wanted)


@pytest.mark.parametrize("options", [{}, {"disjoint": True}], ids=str)
def test_rows_are_found_by_hashing(options: dict[str, Any]) -> None:
    """Also where batches are not disjoint; and a wrong number of seeds is refused."""
    data = academic()
    native = NativeSampler(data, [3, 2], **options)
    here = CudaSampler(data, [3, 2], **options, device="cpu")
    seed = {"paper": torch.tensor([5, 9, 5, 0]), "field": torch.tensor([2, 2])}
    assert here._graph is not None
    here._graph.row_of = {}
    for key in range(4):
        assert_same(here.sample(seed, None, key), native.sample(seed, None, key))
    seeds = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="disjoint: 2 seeds times .* exceed 63 bits; use smaller"):
        NodesByHash(seeds, torch.arange(2), 2**62, 2)


@pytest.mark.parametrize("number", [2**31, 2**62])
def test_more_neighbors_than_can_be_numbered(number: int) -> None:
    """Before memory is asked for."""
    data = academic()
    for kind, more in ((NativeSampler, {}), (CudaSampler, {"device": "cpu"})):
        with pytest.raises(ValueError, match=r"num_neighbors must be less than 2\*\*31"):
            kind(data, [number], replace=True, **more).sample({"paper": torch.arange(1)}, None, 1)


def test_nodes_without_edges_and_no_seeds_of_a_type() -> None:
    data = academic()
    for edge_type in EDGE_TYPES[2:]:
        data[edge_type].edge_index = torch.empty(2, 0, dtype=torch.int64)
    hops = [2, 0, -1, 3]
    native, here = NativeSampler(data, hops), CudaSampler(data, hops, device="cpu")
    for seed in (
        {"field": torch.tensor([3, 3])},
        {"paper": torch.empty(0, dtype=torch.int64)},
        {"author": torch.tensor([1, 2, 1]), "paper": torch.tensor([7])},
    ):
        for key in range(3):
            assert_same(here.sample(seed, None, key), native.sample(seed, None, key))
