"""Our sampler behind PyG's own loaders: right batches, and nothing left when it is taken back."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch_geometric
import torch_geometric.loader as pyg_loader
import torch_geometric.nn.models.node2vec as pyg_node2vec
import torch_geometric.sampler.neighbor_sampler as pyg_module
import torch_geometric.typing
import torch_geometric.utils.dropout as pyg_dropout
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import MetaPath2Vec, Node2Vec
from torch_geometric.transforms import RootedRWSubgraph
from torch_geometric.utils import coalesce, dropout_path, to_undirected

import pyg_scale.loader
from pyg_scale import compat
from pyg_scale.datasets import read_npz
from pyg_scale.graph import pyg_tensors

pytestmark = pytest.mark.matrix(2)

if torch_geometric.typing.WITH_PYG_LIB:
    pytest.skip("pyg-lib is installed: there is nothing to stand in for", allow_module_level=True)

FLAGS = ("WITH_PYG_LIB", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE")


def state():
    """Everything that may be patched."""
    return (
        vars(torch.ops.pyg).get("neighbor_sample"),
        vars(torch.ops.pyg).get("hetero_neighbor_sample"),
        vars(torch.ops.pyg).get("random_walk"),
        pyg_module.torch_geometric,
        pyg_dropout.torch_geometric,
        pyg_node2vec.WITH_PYG_LIB,
        vars(pyg_module.NeighborSampler).get("__reduce_ex__"),
        *(getattr(torch_geometric.typing, flag) for flag in FLAGS),
    )


@pytest.fixture(autouse=True)
def taken_back():
    before = state()
    yield
    compat.uninstall()
    assert state() == before


@pytest.fixture
def installed():
    compat.install()


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.arange(60)[:, None].float(),
        edge_index=torch.randint(60, (2, 500), generator=generator),
        edge_attr=torch.arange(500),
        time=torch.randint(20, (60,), generator=generator),
        edge_time=torch.randint(20, (500,), generator=generator),
        weight=torch.rand(500, generator=generator),
    )


@pytest.fixture
def hetero():
    generator = torch.Generator().manual_seed(1)
    data = HeteroData()
    data["user"].x = torch.arange(40)[:, None].float()
    data["item"].x = torch.arange(25)[:, None].float()
    data["tag"].x = torch.arange(9)[:, None].float()  # no edge leads to a tag
    for a, name, b, count in (
        ("user", "rates", "item", 200),
        ("item", "rev_rates", "user", 150),
        ("tag", "of", "item", 60),
        ("user", "knows", "user", 100),
    ):
        sizes = data[a].num_nodes, data[b].num_nodes
        data[a, name, b].edge_index = torch.stack(
            [torch.randint(size, (count,), generator=generator) for size in sizes]
        )
        data[a, name, b].weight = torch.rand(count, generator=generator)
        data[a, name, b].when = torch.randint(20, (count,), generator=generator)
    return data


def check(batch, data):
    """Every edge is one of the graph, with the features of its nodes."""
    if isinstance(data, Data):
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert torch.equal(batch.x, data.x[batch.n_id])
        return
    for a, name, b in data.edge_types:
        store = batch[a, name, b]
        found = torch.stack(
            [batch[a].n_id[store.edge_index[0]], batch[b].n_id[store.edge_index[1]]]
        )
        assert torch.equal(found, data[a, name, b].edge_index[:, store.e_id])


OPTIONS = [
    {},
    {"replace": True},
    {"disjoint": True},
    {"time_attr": "time"},
    {"time_attr": "time", "temporal_strategy": "last"},
    {"time_attr": "edge_time", "input_time": torch.full((60,), 9)},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "replace": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_node_loader(data, installed, options, dtype):
    data.edge_index = data.edge_index.to(dtype)
    loader = pyg_loader.NeighborLoader(data, [4, 3], batch_size=8, **options)
    for batch in loader:
        check(batch, data)
        assert batch.edge_index.dtype == batch.n_id.dtype == dtype
        assert len(batch.num_sampled_nodes) == 3
        assert sum(batch.num_sampled_edges) == batch.edge_index.size(1)
        assert torch.bincount(batch.edge_index[1]).max() <= 4
        if options.get("time_attr") == "time":
            latest = data.time[batch.n_id[: batch.batch_size]]
            assert bool((batch.time <= latest[batch.batch]).all())
        if options.get("time_attr") == "edge_time":
            assert bool((batch.edge_time <= 9).all())
        assert ("batch" in batch) == ("disjoint" in options or "time_attr" in options)


def test_all_neighbours_are_those_of_our_own_loader(data, installed):
    for options in ({}, {"disjoint": True}, {"time_attr": "time"}):
        common = {"num_neighbors": [-1, -1], "batch_size": 8, **options}
        theirs = pyg_loader.NeighborLoader(data, **common)
        ours = pyg_scale.loader.NeighborLoader(data, **common)
        for a, b in zip(theirs, ours, strict=True):
            # In another order: PyG's sorting of edges is not stable.
            assert torch.equal(a.n_id.sort().values, b.n_id.sort().values)
            assert torch.equal(a.e_id.sort().values, b.e_id.sort().values)
            assert a.num_sampled_nodes == b.num_sampled_nodes
            assert a.num_sampled_edges == b.num_sampled_edges


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disjoint": True},
        {"weight_attr": "weight"},
        {"time_attr": "when", "input_time": torch.full((40,), 9)},
    ],
)
def test_heterogeneous(hetero, installed, options):
    loader = pyg_loader.NeighborLoader(hetero, [4, 3], ("user", None), batch_size=8, **options)
    for batch in loader:
        check(batch, hetero)
        for node_type in hetero.node_types:
            assert len(batch[node_type].num_sampled_nodes) == 3
        if "time_attr" in options:
            assert all(bool((store.when <= 9).all()) for store in batch.edge_stores)


def test_heterogeneous_seeds_without_in_edges(hetero, installed):
    for disjoint in (False, True):
        loader = pyg_loader.NeighborLoader(hetero, [2], ("tag", None), disjoint=disjoint)
        assert sum(batch["tag"].num_nodes for batch in loader) == 9


@pytest.mark.parametrize("neg_sampling", [None, "binary", "triplet"])
def test_link_loader(data, hetero, installed, neg_sampling):
    loader = pyg_loader.LinkNeighborLoader(
        data, [4, 2], neg_sampling=neg_sampling, batch_size=32, disjoint=neg_sampling == "binary"
    )
    for batch in loader:
        check(batch, data)
    edge_type = ("user", "rates", "item")
    loader = pyg_loader.LinkNeighborLoader(
        hetero, [4, 2], edge_type, neg_sampling=neg_sampling, batch_size=32
    )
    for batch in loader:
        check(batch, hetero)


def test_a_real_graph(data_dir, installed):
    data = read_npz(data_dir / "facebook_pages.npz")
    data.x = data.x[:, :4].contiguous()
    torch.manual_seed(0)
    seeds = torch.randint(data.num_nodes, (4096,))  # with repeats
    loader = pyg_loader.NeighborLoader(data, [10, 5], seeds, batch_size=1024)
    for batch in loader:
        check(batch, data)
        assert torch.equal(batch.n_id[:1024], seeds[batch.input_id])
    loader = pyg_loader.LinkNeighborLoader(
        data, [10, 5], data.edge_index[:, :5000], neg_sampling="binary", batch_size=1024
    )
    for batch in loader:
        check(batch, data)
        assert batch.edge_label.numel() == 2 * batch.input_id.numel()


def test_backward(data, installed):
    sampler = pyg_module.NeighborSampler(data, [-1], sample_direction="backward")
    out = sampler.sample_from_nodes(
        torch_geometric.sampler.NodeSamplerInput(None, torch.tensor([3, 5]))
    )
    found = set(sampler.edge_permutation[out.edge].tolist())
    assert found == set(
        torch.isin(data.edge_index[0], torch.tensor([3, 5])).nonzero().view(-1).tolist()
    )


def test_bidirectional(data, installed):
    batch = next(
        iter(pyg_loader.NeighborLoader(data, [3, 2], subgraph_type="bidirectional", batch_size=8))
    )
    pairs = set(map(tuple, batch.edge_index.t().tolist()))
    assert pairs == {(b, a) for a, b in pairs}


def test_times_that_are_not_in_order_are_put_in_order(data, installed):
    order = data.edge_index[1].argsort(stable=True)
    data.edge_index, data.edge_time = data.edge_index[:, order], data.edge_time[order]
    loader = pyg_loader.NeighborLoader(
        data,
        [-1],
        time_attr="edge_time",
        input_time=torch.full((60,), 9),
        is_sorted=True,
        batch_size=60,
    )
    batch = next(iter(loader))
    assert set(batch.e_id.tolist()) == set((data.edge_time <= 9).nonzero().view(-1).tolist())


def test_manual_seed(data, installed):
    loader = pyg_loader.NeighborLoader(data, [3, 3], batch_size=20)
    epochs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        epochs.append([batch.e_id.tolist() for batch in loader])
    assert epochs[0] == epochs[1]
    assert epochs[0] != epochs[2]
    again = [batch.e_id.tolist() for batch in loader]
    assert again != epochs[2]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes(data, installed, method):
    loader = pyg_loader.NeighborLoader(
        data, [3], batch_size=30, num_workers=1, multiprocessing_context=method
    )
    batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        check(batch, data)


def test_copies_of_a_sampler_work(data, installed):
    sampler = pyg_module.NeighborSampler(data, [-1])
    inputs = torch_geometric.sampler.NodeSamplerInput(None, torch.tensor([3, 5]))
    expected = sampler.sample_from_nodes(inputs)
    for again in (copy.copy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert type(again) is pyg_module.NeighborSampler
        assert torch.equal(again.sample_from_nodes(inputs).node, expected.node)


def test_unpickling_does_not_install_in_a_main_process(data):
    with compat.install():
        text = pickle.dumps(pyg_module.NeighborSampler(data, [2]))
    pickle.loads(text)
    assert not compat.is_installed()


def test_the_graph_is_made_once_and_goes_with_the_sampler(data, installed, monkeypatch):
    built = []
    build = pyg_tensors._build
    monkeypatch.setattr(
        pyg_tensors, "_build", lambda *args: built.append(build(*args)) or built[-1]
    )
    loader = pyg_loader.NeighborLoader(data, [3], batch_size=8)
    assert len(list(loader)) == 8
    assert len(built) == 1
    weighted = pyg_loader.NeighborLoader(data, [3], batch_size=8, weight_attr="weight")
    list(weighted)
    assert len(built) == 2
    gone = [weakref.ref(graph) for graph in built]
    del loader, weighted
    built.clear()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_weight_that_changed_is_seen(data, installed):
    data.weight = torch.zeros(500)
    data.weight[::5] = 1
    loader = pyg_loader.NeighborLoader(data, [1], weight_attr="weight", batch_size=60)
    assert bool((next(iter(loader)).weight == 1).all())
    loader.node_sampler.edge_weight.neg_().add_(1)
    found = data.weight[next(iter(loader)).e_id]
    assert bool((found == 0).all())


@pytest.mark.parametrize("options", [{}, {"time_attr": "time"}, {"weight_attr": "weight"}])
def test_a_loader_made_under_inference_mode(data, installed, monkeypatch, options):
    # As Lightning makes those of `predict`: PyG's sampler then holds tensors without a version.
    made = []
    build = pyg_tensors._build
    monkeypatch.setattr(pyg_tensors, "_build", lambda given: made.append(1) or build(given))
    with torch.inference_mode():
        loader = pyg_loader.NeighborLoader(data, [-1, -1], batch_size=10, **options)
        assert len(list(loader)) == 6
    batch = next(iter(loader))
    assert torch.equal(batch.x, data.x[batch.n_id])
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    assert len(made) == 1


@pytest.mark.skipif(torch_geometric.typing.WITH_TORCH_SPARSE, reason="torch-sparse is installed")
def test_what_is_not_supported_raises(data, installed):
    with pytest.raises(ImportError, match="requires either"):
        next(iter(pyg_loader.NeighborLoader(data, [2], subgraph_type="induced")))
    compat.uninstall()
    with pytest.raises(ImportError, match="requires either"):
        next(iter(pyg_loader.NeighborLoader(data, [2])))


def test_ops_refuse_induced(data, installed):
    with pytest.raises(NotImplementedError, match="directed=False"):
        torch.ops.pyg.neighbor_sample(
            torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0]), [1], directed=False
        )


def test_bad_seeds_and_weights(data, installed):
    with pytest.raises(IndexError, match="seed 60 is out of range"):
        next(iter(pyg_loader.NeighborLoader(data, [2], torch.tensor([60]))))
    data.weight[3] = -1
    with pytest.raises(ValueError, match="weights must be finite and not negative"):
        next(iter(pyg_loader.NeighborLoader(data, [2], weight_attr="weight")))


def test_nothing_else_in_pyg_thinks_that_pyg_lib_is_there(installed):
    assert not torch_geometric.typing.WITH_PYG_LIB
    with pytest.raises(ImportError, match="pyg-lib"):
        torch_geometric.nn.fps(torch.rand(3, 2))


# Installing #################################################################################


def test_twice_is_once():
    before = state()
    compat.install()
    after = state()
    compat.install()
    assert state() == after
    assert compat.is_installed()
    compat.uninstall()
    assert state() == before
    compat.uninstall()
    assert not compat.is_installed()


def test_as_a_context_manager():
    with compat.install():
        assert compat.is_installed()
        with compat.install():
            pass
        assert compat.is_installed()  # the outer one still holds
    assert not compat.is_installed()
    with pytest.raises(KeyError), compat.install():
        raise KeyError
    assert not compat.is_installed()


@pytest.mark.parametrize("sign", ["flag", "op"])
def test_a_real_pyg_lib_is_replaced_only_when_asked(data, monkeypatch, sign):
    def real(*args):
        raise AssertionError("pyg-lib was called")

    if sign == "flag":
        monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", True)
    monkeypatch.setattr(torch.ops.pyg, "neighbor_sample", real, raising=False)
    with pytest.raises(RuntimeError, match="pyg-lib is installed"):
        compat.install()
    assert torch.ops.pyg.neighbor_sample is real
    with compat.install(force=True):
        check(next(iter(pyg_loader.NeighborLoader(data, [2], batch_size=5))), data)
    assert torch.ops.pyg.neighbor_sample is real


def test_node2vec_walks_along_edges_and_is_reproducible(data, installed):
    model = Node2Vec(data.edge_index, 8, 6, 4, walks_per_node=2, p=0.5, q=2.0, num_nodes=63)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(model.sample(list(range(63))))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    positive = runs[0][0]
    assert positive.shape == (63 * 2 * 3, 4)
    joined = torch.zeros(63, 63, dtype=torch.bool)
    joined[data.edge_index[0], data.edge_index[1]] = True
    joined |= torch.diag(~joined.any(1))  # a walk stays at a node without edges
    assert bool(joined[positive[:, :-1], positive[:, 1:]].all())
    assert not torch.equal(model.pos_sample(torch.arange(63)), model.pos_sample(torch.arange(63)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_node2vec_loaders_and_copies(data, installed, num_workers):
    model = Node2Vec(data.edge_index, 8, 6, 4)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(1)
        loader = each.loader(batch_size=20, shuffle=True, num_workers=num_workers)
        found = [each.loss(*batch).item() for batch in loader]
        assert len(found) == 3 and all(value > 0 for value in found)


def test_node2vec_needs_pyg_lib_where_nothing_is_installed(data):
    with pytest.raises(ImportError, match="pyg-lib"):
        Node2Vec(data.edge_index, 8, 6, 4)


def test_metapath2vec_runs_and_is_reproducible(hetero, installed):
    path = [("user", "rates", "item"), ("item", "rev_rates", "user")]
    edges = {edge_type: hetero[edge_type].edge_index for edge_type in path}
    sizes = {"user": 40, "item": 25}
    model = MetaPath2Vec(edges, 8, path, 4, 3, walks_per_node=2, num_nodes_dict=sizes)
    runs = []
    for _ in range(2):
        torch.manual_seed(2)
        runs.append([batch[0] for batch in model.loader(batch_size=10, shuffle=True)])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    assert model.loss(*model._sample(list(range(40)))).item() > 0


def test_other_users_of_walks(data, installed):
    edges = to_undirected(data.edge_index, num_nodes=60)
    kept, mask = dropout_path(edges, p=0.2, num_nodes=60)
    assert torch.equal(kept, edges[:, mask]) and 0 < kept.size(1) < edges.size(1)
    rooted = RootedRWSubgraph(3)(Data(edge_index=edges, num_nodes=60))
    assert rooted.n_id.numel() > 60


def test_walks_do_not_need_sorted_neighbours(data, installed):
    """The op finds edges by bisection, whatever the order of its input."""
    row, col = coalesce(data.edge_index, num_nodes=60)
    rowptr = torch_geometric.index.index2ptr(row, 60)
    backwards = torch.cat([part.flip(0) for part in col.split(rowptr.diff().tolist())])
    found = []
    for neighbors in (col, backwards):
        torch.manual_seed(4)
        found.append(torch.ops.pyg.random_walk(rowptr, neighbors, torch.arange(60), 5, 0.3, 3.0))
    assert torch.equal(*found)


def test_node2vec_tells_classes_apart(data_dir, installed):
    torch.manual_seed(0)
    real = read_npz(data_dir / "cora.npz")
    model = Node2Vec(
        real.edge_index, 32, 10, 5, walks_per_node=4, num_nodes=real.num_nodes, sparse=True
    )
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.05)
    for _ in range(8):
        for positive, negative in model.loader(batch_size=256, shuffle=True):
            optimizer.zero_grad()
            model.loss(positive, negative).backward()
            optimizer.step()
    z = torch.nn.functional.normalize(model().detach(), dim=1)
    train = torch.rand(real.num_nodes) < 0.5
    # the class of the most similar training nodes
    near = (z[~train] @ z[train].t()).topk(5, dim=1).indices
    right = real.y[train][near].mode(dim=1).values == real.y[~train]
    chance = torch.bincount(real.y).max() / real.num_nodes
    accuracy = float(right.float().mean())
    assert chance < 0.35 and accuracy > 0.6


def test_integer_times_are_not_rounded(hetero, installed):
    hetero["item"].time = torch.rand(25)
    seeds, late = ("item", torch.tensor([0])), torch.tensor([2**53 + 1])
    hetero["user"].time = late.expand(40)
    loader = pyg_loader.NeighborLoader(hetero, [2], seeds, time_attr="time")
    with pytest.raises(ValueError, match="times of nodes of 'user': the integer"):
        next(iter(loader))
    hetero["user"].time = torch.rand(40)
    loader = pyg_loader.NeighborLoader(hetero, [2], seeds, late, time_attr="time")
    with pytest.raises(ValueError, match="input_time .*: the integer"):
        next(iter(loader))
