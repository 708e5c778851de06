"""Keyed draws of in-edges: compiled, in plain torch and in the emulator, the bits of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_scale.ops import keys
from pyg_scale.ops.candidates import counts_of
from pyg_scale.ops.draw_neighbors import (
    Counted,
    Drawn,
    Wanted,
    draw_along_types,
    draw_neighbors,
    offsets_of,
)
from pyg_scale.ops.expand import ExpandedNodes, InEdges, expand_neighbors
from pyg_scale.ops.sample import Choice
from pyg_scale.sampler import CudaSampler, NativeSampler
from pyg_scale.testing import graphs
from tests.ops import emulated

NUM_NODES = 300
DEGREES = [0, 1, 2, 3, 10, 11, 12, 63, 64, 65, 66, 100, 257, 1000, 0, 5]
KS = [-1, 0, 1, 2, 10, 11, 64, 65, 70]


def in_edges(index_dtype: torch.dtype, with_ids: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    indptr = torch.tensor([0, *DEGREES]).cumsum(0)
    size = int(indptr[-1])
    indices = torch.randint(0, NUM_NODES, (size,), generator=generator).to(index_dtype)
    ids = torch.randperm(size, generator=generator).to(index_dtype) if with_ids else None
    return indptr, indices, ids


def weight_sums() -> Tensor:
    """The running sums of weights within each node; many are 0, and some are large."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(0, 2**32, (sum(DEGREES),), generator=generator)
    weight >>= torch.randint(0, 33, weight.shape, generator=generator)
    weight[::3] = 0
    weight[sum(DEGREES[:6]) : sum(DEGREES[:7])] = 0  # all of a node
    return torch.cat([each.cumsum(0) for each in weight.split(DEGREES)])


def expected(
    graph: Any,
    node: Tensor,
    key: int,
    k: int,
    replace: bool,
    seed: Tensor | None = None,
    prefix: Tensor | None = None,
) -> tuple[Tensor, ...]:
    nodes, in_edges = ExpandedNodes(node, node, seed), InEdges(*graph, None, prefix, NUM_NODES)
    return expand_neighbors(in_edges, nodes, key, k, Choice(replace))


def assert_drawn(found: Drawn, wanted: tuple[Tensor, ...]) -> None:
    counts, neighbor, edge, _ = wanted
    assert torch.equal(found.counts, counts)
    assert torch.equal(found.row, torch.arange(counts.numel()).repeat_interleave(counts))
    assert torch.equal(found.neighbor, neighbor)
    assert torch.equal(found.edge, edge)


@pytest.fixture(params=["compiled", "plain", "emulated", "emulated backward"])
def way(request, monkeypatch):
    """The ways in which draws are made; what they are compared with is compiled."""
    if "emulated" in request.param:
        order = "backward" if "backward" in request.param else "forward"
        monkeypatch.setenv("PYG_SCALE_EMULATOR_ORDER", order)
        with emulated.instead_of():
            yield draw_neighbors
        return

    def draw(*args: Any, **kwargs: Any) -> Drawn:
        if request.param == "plain":
            monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
        found = draw_neighbors(*args, **kwargs)
        monkeypatch.delenv("PYG_SCALE_KERNELS", raising=False)
        return found

    yield draw


@pytest.mark.parametrize("by_seed", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("with_ids", [False, True])
def test_the_draws_are_those_of_the_sampler(way, replace, index_dtype, with_ids, by_seed):
    graph = in_edges(index_dtype, with_ids)
    generator = torch.Generator().manual_seed(1)
    for k in KS:
        node = torch.randint(0, len(DEGREES), (40,), generator=generator)
        key = keys.fold(k, 5)
        seed = torch.randint(0, 9, (40,), generator=generator) if by_seed else None
        found = way(*graph, node, NUM_NODES, key, k, replace=replace, seed=seed)
        assert_drawn(found, expected(graph, node, key, k, replace, seed))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_the_draws_by_weight_are_those_of_the_sampler(way, replace, index_dtype):
    graph, prefix = in_edges(index_dtype, True), weight_sums()
    generator = torch.Generator().manual_seed(1)
    for k in KS:
        node = torch.randint(0, len(DEGREES), (40,), generator=generator)
        seed = torch.randint(0, 9, (40,), generator=generator)
        key = keys.fold(k, 5)
        found = way(
            *(*graph, node, NUM_NODES, key, k), replace=replace, seed=seed, weight_prefix=prefix
        )
        assert_drawn(found, expected(graph, node, key, k, replace, seed, prefix))


def test_sums_that_do_not_rise_end_the_kernel():
    graph, prefix = in_edges(torch.int64, True), weight_sums()
    node = torch.tensor([DEGREES.index(1000)])
    counted = Counted(torch.tensor([3]), torch.tensor([0, 3]), 3)
    with emulated.instead_of():
        for replace in (False, True):
            for damaged in (-prefix, prefix - 2**62):
                wanted = Wanted(*graph, node, NUM_NODES, 1, 3, counted, None, damaged)
                with pytest.raises(RuntimeError, match="draw_neighbors failed: the kernel trapped"):
                    draw_along_types([wanted], replace)


def test_many_edge_types_are_one_kernel_or_a_few(way):
    """One kernel for up to 16 of them; types without nodes are among them."""
    generator = torch.Generator().manual_seed(2)
    kinds = [(torch.int64, True), (torch.int32, False), (torch.int32, True)]
    made = [in_edges(*kinds[t % 3]) for t in range(20)]
    wanted = []
    for t, graph in enumerate(made):
        node = torch.randint(0, len(DEGREES), (0 if t in (3, 19) else 9,), generator=generator)
        k = KS[t % len(KS)]
        counts = counts_of(graph[0], node, k, False)
        offset = offsets_of(counts)
        counted = Counted(counts, offset, int(offset[-1]))
        wanted.append(Wanted(*graph, node, NUM_NODES, keys.fold(t, 5), k, counted))
    for size, kernels in ((1, 1), (16, 1), (20, 2)):
        if way is draw_neighbors:
            emulated.launches()
        found = draw_along_types(wanted[:size], False)
        if way is draw_neighbors:
            assert emulated.launches() == kernels
        assert len(found) == size
        for each, of in zip(found, wanted, strict=False):
            graph = of[:3]
            assert_drawn(each, expected(graph, of.node, of.key, of.num_neighbors, False))


def test_nobody_and_more_than_a_block(way):
    graph = in_edges(torch.int64, True)
    none = torch.empty(0, dtype=torch.int64)
    assert_drawn(way(*graph, none, NUM_NODES, 7, 3), (none, none, none, none))
    node = torch.arange(700) % len(DEGREES)
    assert_drawn(way(*graph, node, NUM_NODES, 7, 3), expected(graph, node, 7, 3, False))


def test_a_graph_that_is_damaged_ends_the_kernel():
    indptr, indices, _ = in_edges(torch.int64, False)
    emulated.load()
    with emulated.instead_of():
        for wrong in (NUM_NODES, -1):
            bad = indices.clone()
            bad[3] = wrong
            with pytest.raises(RuntimeError, match="draw_neighbors failed: the kernel trapped"):
                draw_neighbors(indptr, bad, None, torch.tensor([3]), NUM_NODES, 1, -1)
        last = torch.tensor([DEGREES.index(1000)])
        for k in (-1, 2):  # pointers that lead beyond the edges
            with pytest.raises(RuntimeError, match="draw_neighbors failed: the kernel trapped"):
                draw_neighbors(indptr, indices[:20], None, last, NUM_NODES, 1, k)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"replace": True},
        {"disjoint": True},
        {"disjoint": True, "replace": True, "redraw": False},
        {"sample_direction": "backward"},
        {"weight_attr": "weight"},
        {"weight_attr": "weight", "replace": True},
        {"weight_attr": "weight", "disjoint": True, "sample_direction": "backward"},
        {"time_attr": "time"},
        {"time_attr": "when"},
        {"time_attr": "when", "temporal_strategy": "last"},
        {"time_attr": "time", "temporal_strategy": "last", "sample_direction": "backward"},
        {"time_attr": "when", "replace": True, "redraw": False},
        {"time_attr": "time", "weight_attr": "weight"},
        {"time_attr": "when", "weight_attr": "weight", "replace": True},
        {"time_attr": "when", "weight_attr": "weight", "temporal_strategy": "last"},
        {"time_attr": "when", "time_window": 3, "weight_attr": "weight"},
        {"time_attr": "time", "time_window": 2, "strictly_earlier": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["homogeneous", "heterogeneous"])
def test_batches_of_the_whole_sampler_in_the_emulator(name, more):
    data = graphs.hostile() if name == "homogeneous" else graphs.hetero()
    options: dict[str, Any] = {"num_neighbors": [4, 3, -1], **more}
    native, here = NativeSampler(data, **options), CudaSampler(data, **options, device="cpu")
    kind = None if name == "homogeneous" else "item"
    count = native.topology.num_nodes[kind]
    for key in range(8):
        generator = torch.Generator().manual_seed(key)
        seed = {kind: torch.randint(0, count, (12,), generator=generator)}  # some more than once
        time = None
        if native.topology.is_temporal:  # some see nothing, some all
            time = {kind: torch.randint(-1, 9, (12,), generator=generator)}
        with emulated.instead_of():
            found = here.sample(seed, time, key)
        wanted = native.sample(seed, time, key)
        for field in ("node", "row", "col", "edge", "batch", "colptr"):
            ours, theirs = getattr(found, field), getattr(wanted, field)
            assert (ours is None) == (theirs is None), field
            assert ours is None or ours.keys() == theirs.keys()
            for each in ours or ():
                assert ours[each].dtype == theirs[each].dtype, (field, each)
                assert torch.equal(ours[each], theirs[each]), (field, each)
        assert found.num_sampled_nodes == wanted.num_sampled_nodes
        assert found.num_sampled_edges == wanted.num_sampled_edges


FAULTS = {
    "PYG_SCALE_FAULT_SHORT_FLOYD": "the draws of a node differ",
    "PYG_SCALE_FAULT_NO_SCAN": "the draws of a node differ",
    "PYG_SCALE_FAULT_NO_EARLIER_ROUNDS": "the draws of a node differ",
    "PYG_SCALE_FAULT_SAME_FOR_ALL_SEEDS": "the draws of a node differ",
    "PYG_SCALE_FAULT_NO_BASE": "the draws of a node differ",
    "PYG_SCALE_FAULT_ONCE_LEFT": "the draws of a node differ",
    "PYG_SCALE_FAULT_PICKS_STAY": "the kernel trapped",
    "PYG_SCALE_FAULT_NO_CHECKS": "AddressSanitizer: heap-buffer-overflow",
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_alone_under_sanitizers_and_with_faults(fault):
    program = emulated.program(
        "check_draws.cpp", ["draw_neighbors"], fault=fault, of="draw_neighbors"
    )
    done = emulated.run(program)
    if fault:
        assert done.returncode != 0
        assert FAULTS[fault] in done.stdout + done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "0 failures\n"), done.stdout + done.stderr
