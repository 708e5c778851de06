"""LABOR: compiled and plain alike, few sources, weights that are exact, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, GraphConv, TAGConv

from pyg_scale.loader import NeighborLoader
from pyg_scale.nn import accelerate, fallbacks
from pyg_scale.ops import keys, library, sample
from pyg_scale.ops.expand import ExpandedNodes, InEdges, expand_neighbors
from pyg_scale.sampler import Labor, NativeSampler, edges_by_layer
from pyg_scale.sampler.parts import parts_topology
from pyg_scale.testing import graphs
from pyg_scale.testing.ask import draw
from pyg_scale.testing.sampler import _in_parts
from tests.sampler.graphs import (
    bound,
    difference,
    random_options,
    random_seeds,
    random_topology,
)

pytestmark = pytest.mark.matrix(3)

OPTIONS = [
    {},
    {"weights": "sum", "layer_dependency": True},
    {"weights": None, "hops": "layers"},
    {"hops": "layers", "layer_dependency": True},
    {"iterations": "*", "layer_dependency": True},
    {"iterations": 1, "hops": "layers", "weights": "sum"},
]


def need_kernels():
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")


def both_ways(sampler, seed, key, monkeypatch):
    """The sample by compiled ops, after it was compared with that in plain torch."""
    need_kernels()
    compiled = sampler.sample(seed, None, key)
    with monkeypatch.context() as patch:
        patch.setenv("PYG_SCALE_KERNELS", "never")
        plain = sampler.sample(seed, None, key)
    assert not difference(compiled, plain), difference(compiled, plain)
    return compiled


@pytest.mark.parametrize("block", range(8))
def test_compiled_and_plain_are_equal_to_the_bit(block, monkeypatch):
    for i in range(25):
        rng = random.Random(1000 * block + i)
        topology = random_topology(rng, temporal=None)
        options = {"num_neighbors": random_options(rng, topology)["num_neighbors"]}
        options["weights"] = rng.choice(
            [None, "sum", "mean", "mean" if topology.is_hetero else "gcn"]
        )
        options["layer_dependency"] = rng.random() < 0.5
        options["hops"] = rng.choice(["once", "layers"])
        options["iterations"] = rng.choice([0, 0, 1, "*"])
        seed, _ = random_seeds(rng, topology)
        both_ways(bound(Labor, topology, **options), seed, rng.getrandbits(64), monkeypatch)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_threads_do_not_matter(options, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(9000, (2, 60_000), generator=generator)
    data = Data(edge_index=edge_index, num_nodes=9000)
    sampler = Labor(**options).bind(data, num_neighbors=[3, 2])
    seed = {None: torch.arange(9000)}
    alone = both_ways(sampler, seed, 5, monkeypatch)
    monkeypatch.setattr(library, "num_threads", lambda: 4)
    assert not difference(sampler.sample(seed, None, 5), alone)


@pytest.mark.parametrize("kernels", ["auto", "never"])
@pytest.mark.parametrize("options", [*OPTIONS, {"weights": "gcn"}], ids=str)
def test_parts_are_sampled_as_the_whole(options, kernels, tmp_path, monkeypatch):
    data = graphs.hostile()
    sampler = Labor(**options).bind(data, num_neighbors=[3, 2])
    in_parts = Labor(**options).bind(data, num_neighbors=[3, 2])
    in_parts.topology = parts_topology(_in_parts(data, tmp_path))
    monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)
    for key in range(5):
        seeds = [0, 7, 5, 99, 8]
        assert not difference(draw(in_parts, seeds, key), draw(sampler, seeds, key))
        monkeypatch.setattr(type(in_parts.topology.router), "parts_here", lambda self: None)
        if sampler.weights != "gcn":  # as when other ranks have parts: part by part
            assert not difference(draw(in_parts, seeds, key), draw(sampler, seeds, key))
        monkeypatch.undo()
        monkeypatch.setenv("PYG_SCALE_KERNELS", kernels)


def number(key, v):
    """``source_number``, written again."""
    x = v ^ (key % 2**32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32 ^ (key >> 32)
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def test_nodes_take_the_sources_whose_numbers_are_small():
    """A closed form: node by node, straight from the definition."""
    data = graphs.copies(7, 20)
    found = draw(Labor().bind(data, num_neighbors=[6]), range(7), 3)
    key = keys.fold(3, keys.SOURCE, 0, 0)
    share = -(-(6 << 32) // 20)
    small = [v for v in range(7, 27) if number(key, v) < share]
    assert found.node[None].tolist()[7:] == small, "all nodes must take the same sources"
    assert found.num_sampled_edges == {None: [7 * len(small)]}
    weight = found.edge_attrs["edge_weight"][None]
    assert torch.equal(weight, torch.full_like(weight, 2.0**32 / share / 20))


def test_layers_that_depend_on_each_other_share_numbers():
    """Two hops over the same in-edges take the same ones only with ``layer_dependency``."""
    data = graphs.copies(1, 400)
    more = torch.stack([torch.arange(1, 401), torch.full((400,), 401)])
    back = torch.tensor([[0], [401]])  # 401 has the sources of 0, and 0 itself
    data.edge_index = torch.cat([data.edge_index, more, back], dim=1)
    data.num_nodes = 402
    for dependent in (False, True):
        sampler = Labor(layer_dependency=dependent).bind(data, num_neighbors=[100, 100])
        first = draw(sampler, [0], 4)
        both = draw(
            Labor(layer_dependency=dependent, hops="layers").bind(data, num_neighbors=[100, 100]),
            [0],
            4,
        )
        size = first.num_sampled_edges[None][0]
        again = both.edge[None][both.num_sampled_edges[None][0] :]
        assert (again.tolist() == first.edge[None][:size].tolist()) == dependent


def test_there_are_fewer_nodes_and_as_many_edges():
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.rand(2, 90_000, generator=generator)
    edge_index = (3000 * edge_index ** torch.tensor([[1.5], [1.0]])).long()
    data = Data(edge_index=edge_index, num_nodes=3000)
    found = {}
    for name, made in {
        "neighbours": NativeSampler(),
        "labor": Labor(),
        "dependent": Labor(layer_dependency=True),
        "once": Labor(iterations=1),
        "converged": Labor(iterations="*"),
        "both": Labor(iterations="*", layer_dependency=True),
    }.items():
        sampler = made.bind(data, num_neighbors=[5, 5])
        drawn = [draw(sampler, range(200), key) for key in range(10)]
        found[name] = [
            sum(len(each.node[None]) for each in drawn) / 10,
            sum(each.num_sampled_edges[None][0] for each in drawn) / 10,
        ]
    assert found["dependent"][0] < found["labor"][0] < 0.9 * found["neighbours"][0]
    assert found["converged"][0] <= found["once"][0] < 0.95 * found["labor"][0]
    assert found["both"][0] < min(found["converged"][0], found["dependent"][0])
    assert found["converged"][1] >= found["labor"][1], "a node gets as many or a few more"
    assert abs(found["labor"][1] - found["neighbours"][1]) < 0.05 * found["neighbours"][1]


def test_weights_are_multiplied_with_those_of_the_data():
    data = graphs.hostile()
    own = torch.rand(data.num_edges)
    plain = NeighborLoader(data, [3, 2], batch_size=20, neighbor_sampler="labor", seed=1)
    batches = [batch.edge_weight for batch in plain]
    data.edge_weight = own
    weighted = NeighborLoader(data, [3, 2], batch_size=20, neighbor_sampler="labor", seed=1)
    for batch, weight in zip(weighted, batches, strict=True):
        torch.testing.assert_close(batch.edge_weight, own[batch.e_id] * weight)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("iterations", [0, "*"])
def test_workers_do_not_matter_and_epochs_resume(iterations, num_workers):
    def loader(workers):
        return NeighborLoader(
            graphs.hostile(), [4, 3], batch_size=16, shuffle=True, seed=3,
            neighbor_sampler=Labor(layer_dependency=True, iterations=iterations),
            num_workers=workers,
        )  # fmt: skip

    expected = [(b.n_id.tolist(), b.edge_weight.tolist()) for b in loader(0)]
    made = loader(num_workers)
    iterator = iter(made)
    for _ in range(3):
        next(iterator)
    resumed = loader(num_workers)
    resumed.load_state_dict(made.state_dict())
    assert [(b.n_id.tolist(), b.edge_weight.tolist()) for b in resumed] == expected[3:]


@pytest.mark.parametrize("iterations", [0, "*"])
def test_hetero_graphs_have_weights_along_each_edge_type(iterations):
    batch = next(iter(NeighborLoader(
        graphs.hetero(), [3, 2], ("user", None), batch_size=8, seed=1,
        neighbor_sampler=Labor(iterations=iterations),
    )))  # fmt: skip
    for store in batch.edge_stores:
        assert store.edge_weight.numel() == store.edge_index.size(1)


def test_layers_have_edges_of_their_own():
    data = graphs.hostile()
    sampler = Labor(hops="layers", weights="sum")
    batch = next(iter(NeighborLoader(data, [-1, -1], torch.tensor([0, 7]), neighbor_sampler=sampler,
                                     batch_size=2)))  # fmt: skip
    x = data.x.double()
    whole = x
    for _ in range(2):
        whole = torch.zeros_like(x).index_add_(0, data.edge_index[1], whole[data.edge_index[0]])
    out = batch.x.double()
    for edge_index, weight in edges_by_layer(batch):
        message = weight.double().unsqueeze(1) * out[edge_index[0]]
        out = torch.zeros_like(out).index_add_(0, edge_index[1], message)
    torch.testing.assert_close(out[:2], whole[[0, 7]])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Labor(weights="avg"), ValueError, "weights must be one of 'sum', 'mean', 'gcn'"),
        (lambda: Labor(hops="twice"), ValueError, "hops must be one of 'once', 'layers'"),
        (lambda: Labor(iterations=-1), ValueError, r"iterations must be '\*' .* at least 0"),
        (lambda: Labor(iterations=101), ValueError, "and at most 100"),
        (lambda: Labor(iterations="+"), TypeError, "iterations must be an integer"),
        (
            lambda: Labor(graphs.hostile(), [2], iterations=1, weight_attr="weight"),
            NotImplementedError,
            "weight",
        ),
        (lambda: Labor(layer_dependency=3), TypeError, "layer_dependency must be True or False"),
        (lambda: Labor(graphs.hostile(), [-2]), ValueError, "num_neighbors must be -1"),
        (lambda: Labor(graphs.hostile(), [2], disjoint=True), NotImplementedError, "disjoint"),
        (lambda: Labor(graphs.hostile(), [2], time_attr="when"), NotImplementedError, "edge_time"),
        (lambda: Labor(graphs.hostile(), [2], replace=True), NotImplementedError, "replace"),
        (
            lambda: Labor(graphs.hostile(), [2], subgraph_type="induced"),
            NotImplementedError,
            "induced",
        ),
        (
            lambda: Labor(graphs.hetero(), [2], weights="gcn"),
            NotImplementedError,
            "weights='gcn' needs one type",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none_are_refused(value):
    data = graphs.hostile()
    data.weight[3] = value
    with pytest.raises(ValueError, match="weight"):
        Labor(data, [2], weight_attr="weight")


def test_where_all_weights_are_zero_nothing_is_taken_unless_all_is():
    data = graphs.hostile()
    data.weight = torch.zeros_like(data.weight)
    sampler = Labor(data, [2], weight_attr="weight")
    assert draw(sampler, [0], 1).num_sampled_edges == {None: [0]}
    assert draw(Labor(data, [-1], weight_attr="weight"), [6], 1).num_sampled_edges == {None: [1]}


# Batches that depend on each other #############################################################


def dependent(batches: int, **options):
    return NeighborLoader(
        graphs.hostile(), [4, 3], batch_size=10, shuffle=True, seed=3,
        neighbor_sampler=Labor(batch_dependency=batches), **options,
    )  # fmt: skip


def test_numbers_change_once_in_so_many_batches(monkeypatch):
    """Every source keeps its number over 8 batches on average, and each number is uniform."""
    data = graphs.copies(1, 2000)
    sampler = Labor(batch_dependency=8).bind(data, num_neighbors=[500])
    taken = []
    for step in range(24):
        found = both_ways(sampler.at_step(5, step), {None: torch.tensor([0])}, 0, monkeypatch)
        taken.append(
            torch.zeros(2000, dtype=torch.bool).index_fill_(0, found.node[None][1:] - 1, 1)
        )
    counts = torch.stack(taken).sum(dim=1)
    assert int(counts.min()) > 420 and int(counts.max()) < 580  # 500, standard deviation 19.4
    changed = torch.stack([(one != other).sum() for one, other in itertools.pairwise(taken)])
    # an eighth of the nodes gets a new number, which changes 2 * 1/4 * 3/4 of these
    assert int(changed.min()) > 60 and int(changed.max()) < 130  # 93.75
    far = (taken[0] != taken[16]).sum()
    assert 650 < int(far) < 850, "after two times 8 batches all numbers are new: 750"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dependent_batches_resume_over_epochs(num_workers):
    made, expected = dependent(7), []
    for _ in range(2):
        expected += [b.n_id.tolist() for b in made]
    first = dependent(7, num_workers=num_workers)
    list(first)
    iterator = iter(first)
    found = [next(iterator).n_id.tolist() for _ in range(4)]
    resumed = dependent(7, num_workers=num_workers)
    resumed.load_state_dict(first.state_dict())
    found += [b.n_id.tolist() for b in resumed]
    assert found == expected[10:]
    assert made(torch.tensor([1, 2])).n_id.tolist() == first(torch.tensor([1, 2])).n_id.tolist()


def test_dependent_batches_need_a_seed_and_an_order():
    def loader(**options):
        return NeighborLoader(
            graphs.hostile(), [2], neighbor_sampler=Labor(batch_dependency=4), **options
        )

    for options in ({}, {"seed": 1, "batch_sampler": [[0]]}):
        with pytest.raises(ValueError, match="batch_dependency= needs seed="):
            loader(**options)
    with pytest.raises(ValueError, match="batch_dependency must be at least 1"):
        Labor(batch_dependency=0)
    with pytest.raises(TypeError, match="batch_dependency must be an integer"):
        Labor(batch_dependency=0.5)
    with pytest.raises(ValueError, match="needs to know where a batch stands"):
        draw(Labor(graphs.hostile(), [2], batch_dependency=4), [0], 1)
    assert "links" not in Labor(batch_dependency=4).supports


@pytest.mark.parametrize("renewed", [0, 1 << 31])
@pytest.mark.parametrize(
    "column",
    ["alone", "beside ids", "in pairs with ids", "first of pairs", "second of pairs", "int64"],
)
def test_rows_of_every_length_are_scanned_to_their_end(column, renewed):
    """Eight or sixteen sources at a time, in blocks of 64: of each row of 0 to 150 in-edges."""
    need_kernels()
    degree = torch.arange(151)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    size, key, later, k = int(indptr[-1]), 11, 12, 3
    ids = torch.randint(2**31 - 1, (size,), generator=torch.Generator().manual_seed(0))
    pairs = torch.stack([ids, ids.flip(0)], dim=1).to(torch.int32)
    indices = {
        "in pairs with ids": pairs[:, 0],
        "first of pairs": pairs[:, 0],
        "second of pairs": pairs[:, 1],
        "int64": ids,
    }.get(column, ids.to(torch.int32))
    edge_id = {
        "beside ids": pairs[:, 1].contiguous(),
        "in pairs with ids": pairs[:, 1],
    }.get(column)
    node = torch.arange(151)
    found = expand_neighbors(
        InEdges(indptr, indices, edge_id, None, None, 2**31),
        ExpandedNodes(node, node),
        key,
        k,
        sample.Choice(by_source=sample.SourceDraws(next_key=later, renewed=renewed)),
    )
    source = indices.to(torch.int64)
    number = keys.source_number(key, source)
    late = keys.source_number(keys.fold(key, 1), source) < renewed
    number = torch.where(late, keys.source_number(later, source), number)
    of_row = degree[torch.arange(151).repeat_interleave(degree)]
    share = ((k << 32) + of_row - 1) // of_row
    taken = (number < share) | (of_row <= k)
    edge = torch.arange(size) if edge_id is None else edge_id.to(torch.int64)
    assert torch.equal(found.edge, edge[taken])
    assert torch.equal(found.neighbor, source[taken])
    assert found.counts.sum() == taken.sum()


@pytest.mark.parametrize("in_pairs", [True, False])
@pytest.mark.parametrize(("neighbor", "num_nodes"), [(9, 9), (-1, 9), (-1, 2**33)])
def test_a_neighbour_that_does_not_exist_is_refused(neighbor, num_nodes, in_pairs):
    need_kernels()
    pairs = torch.zeros(40, 2, dtype=torch.int32)
    pairs[37, 0] = neighbor
    if not in_pairs:
        pairs = pairs.t().contiguous().t()
    indptr, node = torch.tensor([0, 10, 40]), torch.arange(2)
    edges = InEdges(indptr, pairs[:, 0], pairs[:, 1], None, None, num_nodes)
    choice = sample.Choice(by_source=sample.SourceDraws())
    with pytest.raises(
        ValueError, match=f"neighbour {neighbor} is not a node; there are {num_nodes}"
    ):
        expand_neighbors(edges, ExpandedNodes(node, node), 1, -1, choice)


@pytest.mark.parametrize(
    ("weights", "make"),
    [
        ("gcn", lambda: GCNConv(7, 5, normalize=False)),
        ("sum", lambda: GraphConv(7, 5)),
        ("sum", lambda: TAGConv(7, 5, K=2, normalize=False)),
    ],
    ids=["gcn", "graph", "tag"],
)
def test_accelerated_layers_take_the_weights(weights, make):
    torch.manual_seed(0)
    data = Data(
        x=torch.randn(300, 7, dtype=torch.float64),
        edge_index=torch.randint(300, (2, 4_000)),
        num_nodes=300,
    )
    sampler = Labor(weights=weights)
    loader = NeighborLoader(data, [5, 5], batch_size=50, neighbor_sampler=sampler, seed=1)
    batch = next(iter(loader))
    assert batch.edge_weight.unique().numel() > 3
    theirs = make().double()
    ours = copy.deepcopy(theirs)
    accelerate(ours, min_work=0)
    given = batch.x, batch.edge_index, batch.edge_weight.double()
    found = [layer(*given) for layer in (ours, theirs)]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    for parameters in zip(ours.parameters(), theirs.parameters(), strict=True):
        grads = [
            torch.autograd.grad(out.square().sum(), each, retain_graph=True)
            for out, each in zip(found, parameters, strict=True)
        ]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)
    assert not fallbacks(ours)
    unweighted = ours(*given[:2])
    assert not torch.allclose(unweighted, found[0])
