"""The compiled sampler against the plain-torch one: the same bits, whatever is asked for."""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pyg_scale.errors import KernelsError
from pyg_scale.graph.topology import Topology
from pyg_scale.ops import library
from pyg_scale.sampler import native
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.sampler.reference import ReferenceSampler
from tests.sampler.graphs import (
    bound,
    csc,
    difference,
    random_options,
    random_seeds,
    random_topology,
)

pytestmark = [
    pytest.mark.matrix(3),
    pytest.mark.filterwarnings("ignore:subgraph_type='bidirectional'"),
]


@pytest.fixture(autouse=True)
def kernels():
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("block", range(40))
def test_equals_the_reference_bit_for_bit(block):
    for i in range(25):
        rng = random.Random(1000 * block + i)
        topology = random_topology(rng)
        options = random_options(rng, topology)
        seed, time = random_seeds(rng, topology)
        key = rng.getrandbits(64)
        native = bound(NativeSampler, topology, **options).sample(seed, time, key)
        plain = bound(ReferenceSampler, topology, **options).sample(seed, time, key)
        assert not difference(native, plain), (block, i, options, difference(native, plain))


def graph(rng: random.Random, num_nodes: int, num_edges: int, **options: Any) -> Topology:
    """Random edges, a fifth of them to node 0."""
    edges = [
        (rng.randrange(num_nodes), 0 if rng.random() < 0.2 else rng.randrange(num_nodes))
        for _ in range(num_edges)
    ]
    return homogeneous(num_nodes, edges, **options)


def homogeneous(num_nodes: int, edges: list[tuple[int, int]], **options: Any) -> Topology:
    return Topology((None,), (None,), {None: num_nodes}, {None: csc(num_nodes, edges, **options)})


def assert_equals_reference(topology: Topology, seed: list[int], key: int, **options: Any) -> None:
    seeds = {None: torch.tensor(seed)}
    native = bound(NativeSampler, topology, **options).sample(seeds, None, key)
    plain = bound(ReferenceSampler, topology, **options).sample(seeds, None, key)
    assert not difference(native, plain)


@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"replace": True}])
@pytest.mark.parametrize("weighted", [False, True])
def test_threads_do_not_matter(options, weighted, monkeypatch):
    rng = random.Random(7)
    weight = [rng.random() for _ in range(100_000)] if weighted else None
    topology = graph(rng, 20_000, 100_000, weight=weight)
    seeds = {None: torch.tensor([rng.randrange(20_000) for _ in range(9_000)])}
    sampler = bound(NativeSampler, topology, num_neighbors=[3, 2], **options)
    expected = bound(ReferenceSampler, topology, num_neighbors=[3, 2], **options)
    expected = expected.sample(seeds, None, 5)
    for threads in (1, 2, 4, 64):
        monkeypatch.setattr(library, "num_threads", lambda n=threads: n)
        assert not difference(sampler.sample(seeds, None, 5), expected), threads
    sampler = bound(NativeSampler, waiting(topology), num_neighbors=[3, 2], **options)
    assert not difference(sampler.sample(seeds, None, 5), expected), "threads of its own"


def waiting(topology: Topology) -> Topology:
    """The same graph, as if memory did not hold it."""
    csc = {name: dataclasses.replace(each, waits=True) for name, each in topology.csc.items()}
    return dataclasses.replace(topology, csc=csc)


def test_an_error_of_another_thread_arrives_as_it_is(monkeypatch):
    topology = homogeneous(9_000, [(i, i) for i in range(8_999)])
    csc_of = {None: dataclasses.replace(topology.csc[None], indices=torch.arange(8_999) + 7)}
    sampler = bound(NativeSampler, dataclasses.replace(topology, csc=csc_of), num_neighbors=[1])
    monkeypatch.setattr(library, "num_threads", lambda: 2)
    with pytest.raises(ValueError, match="neighbour 900[0-5] is not a node; there are 9000"):
        sampler.sample({None: torch.arange(9_000)}, None, 0)
    sampler = bound(NativeSampler, waiting(sampler.topology), num_neighbors=[1])
    with pytest.raises(ValueError, match="neighbour 900[0-5] is not a node; there are 9000"):
        sampler.sample({None: torch.arange(9_000)}, None, 0)


def test_many_batches_at_once():
    rng = random.Random(3)
    topology = graph(rng, 3_000, 30_000)
    sampler = bound(NativeSampler, topology, num_neighbors=[10, 5])
    seeds = [{None: torch.tensor([rng.randrange(3_000) for _ in range(200)])} for _ in range(60)]
    alone = [sampler.sample(seed, None, key) for key, seed in enumerate(seeds)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: sampler.sample(seeds[i], None, i), range(60)))
    assert not any(difference(a, b) for a, b in zip(alone, together))


def test_storage_does_not_matter():
    rng = random.Random(1)
    edges = [(rng.randrange(50), rng.randrange(50)) for _ in range(600)]
    samples = [
        bound(NativeSampler, homogeneous(50, edges, **storage), num_neighbors=[3, -1]).sample(
            {None: torch.arange(9)}, None, 4
        )
        for storage in (
            {"dtype": torch.int64},
            {"dtype": torch.int32},
            {"dtype": torch.int64, "interleaved": True},
            {"dtype": torch.int32, "interleaved": True},
        )
    ]
    assert samples[0].edge[None].numel() > 100
    assert not any(difference(samples[0], other) for other in samples[1:])


@pytest.mark.matrix(3)
@pytest.mark.parametrize("k", [1, 63, 64, 65, 300, 4999, 5000, -1])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_hubs(k, replace, weighted):
    if weighted and not replace and 300 < k < 5000:
        pytest.skip("minutes in the reference")
    rng = random.Random(k)
    edges = [(i % 700, 0) for i in range(5000)] + [(0, 1), (1, 1)]
    weight = [rng.choice([0.0, 0.1, 3.0]) for _ in edges] if weighted else None
    topology = homogeneous(700, edges, weight=weight)
    assert_equals_reference(topology, [0, 1, 0], k, num_neighbors=[k], replace=replace)


def test_the_table_grows_within_a_batch_and_between_batches():
    rng = random.Random(2)
    small, large = graph(rng, 30, 200), graph(rng, 30_000, 90_000)
    for topology, count in ((small, 3), (large, 4_000), (small, 3), (large, 3), (small, 30)):
        seed = [rng.randrange(topology.num_nodes[None]) for _ in range(count)]
        assert_equals_reference(topology, seed, count, num_neighbors=[-1, 4], disjoint=count == 3)


def huge(bits: int) -> Topology:
    """Nodes of a type of ``2**bits``, which nothing expands, point at three nodes."""
    nodes = [(2**bits - 1 - (i * 7919) ** 3 % 2**bits, i % 3) for i in range(60)]
    edge_type = ("huge", "to", "few")
    return Topology(
        ("few", "huge"), (edge_type,), {"few": 3, "huge": 2**bits}, {edge_type: csc(3, nodes)}
    )


@pytest.mark.parametrize("bits", [30, 44, 45, 46, 47, 60])
def test_ids_of_many_bits(bits):
    # From 47 bits on an identity and its row do not fit into a word with the batch's number.
    topology, seed = huge(bits), {"few": torch.tensor([0, 2, 0])}
    for disjoint in (False, True):
        options = {"num_neighbors": [5], "disjoint": disjoint}
        native, plain = (bound(c, topology, **options) for c in (NativeSampler, ReferenceSampler))
        for key in range(3):
            a, b = native.sample(seed, None, key), plain.sample(seed, None, key)
            assert not difference(a, b)
            assert int(a.node["huge"].max()) > 2 ** (bits - 4)


def test_the_table_is_cleared_before_the_number_of_the_batch_repeats():
    # 46 bits of identity and 10 of the row leave 8 bits for the number of the batch.
    topology, edge_type = huge(46), ("huge", "to", "few")
    edges = topology.csc[edge_type]
    source = dict(zip(edges.edge_id.tolist(), edges.indices.tolist()))
    sampler = bound(NativeSampler, topology, num_neighbors=[-1])

    def check(*seed: int) -> None:
        out = sampler.sample({"few": torch.tensor(seed)}, None, 0)
        node, row, edge = out.node["huge"], out.row[edge_type], out.edge[edge_type]
        assert node.unique().numel() == node.numel() == 20 * len(set(seed))
        assert node[row].tolist() == [source[e] for e in edge.tolist()]

    for between in range(250, 260):
        check(0, 0)
        for _ in range(between):
            check(1, 1)
        check(2, 0)  # the neighbours of 0 have other rows than last time


def test_refuses_identities_beyond_63_bits():
    sampler = bound(NativeSampler, huge(61), num_neighbors=[1], disjoint=True)
    with pytest.raises(ValueError, match="disjoint: 5 seeds times .* nodes exceed 63 bits"):
        sampler.sample({"few": torch.tensor([0, 1, 2, 0, 1])}, None, 0)


def test_refuses_what_would_read_out_of_bounds():
    topology = homogeneous(4, [(1, 0), (2, 0), (3, 1)])
    good = topology.csc[None]
    sampler = bound(NativeSampler, topology, num_neighbors=[-1, -1])
    for seed in (-1, 4):
        with pytest.raises(ValueError, match=f"seed {seed} is out of range: there are 4 nodes"):
            sampler.sample({None: torch.tensor([0, seed])}, None, 0)
    for change, message in (
        ({"indices": torch.tensor([1, 4, 3])}, "neighbour 4 is not a node; there are 4"),
        ({"indices": torch.tensor([1, -1, 3])}, "neighbour -1 is not a node"),
        ({"indices": torch.tensor([1.0, 2, 3])}, "indices must be int32 or int64"),
        ({"indices": torch.tensor([1, 2])}, "indptr must go from 0 to the number of edges, 2"),
        ({"indptr": good.indptr[:-1]}, "indptr has 4 entries, expected 5"),
        ({"edge_id": torch.tensor([0, 1])}, "edge_id has 2 entries, expected 3"),
        ({"weight_prefix": torch.tensor([1, 2])}, "weight_prefix has 2 entries, expected 3"),
    ):
        csc_of = {None: dataclasses.replace(good, **change)}
        sampler.topology = dataclasses.replace(topology, csc=csc_of)
        with pytest.raises(ValueError, match=message):
            sampler.sample({None: torch.tensor([0])}, None, 0)
    sampler.topology = topology  # and nothing of that is left behind
    assert sampler.sample({None: torch.tensor([0])}, None, 0).node[None].tolist() == [0, 1, 2, 3]


def test_an_error_after_many_blocks_leaves_nothing_behind():
    topology, good = graph(random.Random(2), 3_000, 30_000), [5, 2]
    indices = topology.csc[None].indices.clone()
    indices[-1] = 3_000
    csc_of = {None: dataclasses.replace(topology.csc[None], indices=indices)}
    bad = bound(NativeSampler, dataclasses.replace(topology, csc=csc_of), num_neighbors=[-1])
    for key in range(3):
        with pytest.raises(ValueError, match="neighbour 3000 is not a node; there are 3000"):
            bad.sample({None: torch.arange(3_000)}, None, key)
        assert_equals_reference(topology, list(range(0, 3_000, 7)), key, num_neighbors=good)


def test_without_kernels_it_is_the_reference_and_says_so(monkeypatch):
    rng = random.Random(5)
    topology, said = graph(rng, 40, 300), []
    options = {"num_neighbors": [3, 2], "disjoint": True}
    compiled = bound(NativeSampler, topology, **options).sample({None: torch.arange(5)}, None, 1)
    monkeypatch.setattr(library, "compiled", lambda: False)
    monkeypatch.setattr(library, "warn_plain_path", said.append)
    monkeypatch.setattr(native, "neighbor_sample", None)
    plain = bound(NativeSampler, topology, **options).sample({None: torch.arange(5)}, None, 1)
    assert not difference(compiled, plain)
    assert said == ["NativeSampler"]


def test_without_kernels_that_are_required(monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    monkeypatch.setattr(library._library, "load", lambda: False)
    monkeypatch.setattr(library._library, "reason", "the kernels are not compiled")
    sampler = bound(NativeSampler, homogeneous(2, [(0, 1)]), num_neighbors=[1])
    with pytest.raises(KernelsError, match="PYG_SCALE_KERNELS=require.*pyg-scale build"):
        sampler.sample({None: torch.tensor([0])}, None, 0)
