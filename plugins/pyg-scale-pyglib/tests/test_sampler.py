"""What both libraries are here for: batches of real edges, by name, the same for any workers."""

import importlib.util

import pytest
import torch
import torch_geometric.typing
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale_pyglib.sampler import PygLibSampler, TorchSparseSampler

HERE = {
    "pyg-lib": importlib.util.find_spec("pyg_lib") is not None,
    "torch-sparse": importlib.util.find_spec("torch_sparse") is not None,
}
needs_torch_sparse = pytest.mark.skipif(
    not HERE["torch-sparse"], reason="torch-sparse is not installed"
)
needs_pyg_lib = pytest.mark.skipif(not HERE["pyg-lib"], reason="pyg-lib is not installed")


@pytest.fixture(params=HERE)
def name(request):
    if not HERE[request.param]:
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.arange(60)[:, None].float(),
        edge_index=torch.randint(60, (2, 500), generator=generator),
        edge_attr=torch.arange(500),
        time=torch.randint(9, (60,), generator=generator),
        weight=torch.rand(500, generator=generator),
    )


@pytest.fixture
def hetero(data):
    hetero = HeteroData()
    hetero["a"].x, hetero["b"].x = data.x, -data.x
    hetero["a", "to", "b"].edge_index = data.edge_index
    hetero["b", "rev_to", "a"].edge_index = data.edge_index.flip(0)
    return hetero


def check(batch, data):
    if isinstance(data, Data):
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
        return
    for a, relation, b in data.edge_types:
        store = batch[a, relation, b]
        found = torch.stack(
            [batch[a].n_id[store.edge_index[0]], batch[b].n_id[store.edge_index[1]]]
        )
        assert torch.equal(found, data[a, relation, b].edge_index[:, store.e_id])


def test_nodes(name, data, hetero):
    for options in ({}, {"replace": True}):
        loader = NeighborLoader(data, [4, 2], neighbor_sampler=name, batch_size=16, **options)
        for batch in loader:
            check(batch, data)
            assert torch.bincount(batch.edge_index[1]).max() <= 4
    loader = NeighborLoader(hetero, [4, 2], ("a", None), neighbor_sampler=name, batch_size=16)
    for batch in loader:
        check(batch, hetero)


def test_links(name, data, hetero):
    for graph, links in ((data, None), (hetero, ("a", "to", "b"))):
        loader = LinkNeighborLoader(
            graph, [3], links, neg_sampling="binary", neighbor_sampler=name, batch_size=64
        )
        for batch in loader:
            check(batch, graph)


def test_int32(name, data):
    data.edge_index = data.edge_index.int()
    batch = next(iter(NeighborLoader(data, [4], neighbor_sampler=name, batch_size=16)))
    assert batch.edge_index.dtype == batch.n_id.dtype == torch.int32
    assert torch.equal(batch.n_id[batch.edge_index.long()], data.edge_index[:, batch.e_id])


def test_all_neighbours_are_those_of_the_native_sampler(name, data, hetero):
    for graph, nodes in ((data, None), (hetero, ("a", None))):
        for subgraph_type in ("directional", "induced"):
            if name == "pyg-lib" and subgraph_type == "induced":
                continue
            ours, theirs = (
                next(
                    iter(
                        NeighborLoader(
                            graph,
                            [-1, -1],
                            nodes,
                            neighbor_sampler=sampler,
                            batch_size=5,
                            subgraph_type=subgraph_type,
                        )
                    )
                )
                for sampler in ("native", name)
            )
            for a, b in zip(ours.edge_stores, theirs.edge_stores, strict=True):
                assert torch.equal(a.e_id.sort().values, b.e_id.sort().values)


def test_backward(name, data, hetero):
    cls = {"pyg-lib": PygLibSampler, "torch-sparse": TorchSparseSampler}[name]
    for graph, nodes in ((data, None), (hetero, ("a", None))):
        sampler = cls(graph, [-1], sample_direction="backward")
        loader = NeighborLoader(graph, [-1], nodes, neighbor_sampler=sampler, batch_size=3)
        check(next(iter(loader)), graph)


def test_same_batches_for_any_workers_and_a_seed(name, data):
    def ids(**options):
        loader = NeighborLoader(
            data, [3, 2], neighbor_sampler=name, batch_size=16, shuffle=True, seed=5, **options
        )
        assert loader.worker_type == "process"
        return [batch.e_id.tolist() for batch in loader]

    assert ids() == ids() == ids(num_workers=2)
    state = torch.get_rng_state()
    ids()
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_are_refused(name, data):
    with pytest.raises(ValueError, match="which threads would share"):
        NeighborLoader(data, [3], neighbor_sampler=name, num_workers=1, worker_type="thread")


@needs_torch_sparse
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"disjoint": True}, "disjoint=True"),
        ({"weight_attr": "weight"}, "weight_attr="),
        ({"time_attr": "time"}, "time_attr="),
        ({"temporal_strategy": "last"}, "temporal_strategy='last'"),
    ],
)
def test_what_torch_sparse_cannot_raises(data, options, match):
    with pytest.raises(NotImplementedError, match=f"torch-sparse does not support {match}"):
        NeighborLoader(data, [3], neighbor_sampler="torch-sparse", **options)


@pytest.fixture
def anywhere(monkeypatch):
    """Samplers can be made, if not asked, where their libraries are not installed."""
    for cls in (PygLibSampler, TorchSparseSampler):
        monkeypatch.setattr(cls, "_require", lambda self: None)
    for ability in ("WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE"):
        monkeypatch.setattr(torch_geometric.typing, ability, True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"subgraph_type": "induced"}, "subgraph_type='induced'"),
        ({"time_attr": "time", "weight_attr": "weight"}, "time_attr= together with weight_attr="),
        ({"time_attr": "weight"}, "time_attr='weight' of torch.float32, which must be int64"),
        ({"time_attr": "when"}, "time_attr='when' of torch.float64, which must be int64"),
        ({"time_attr": "short"}, "time_attr='short' of torch.int32, which must be int64"),
        ({"weight_attr": "edge_attr"}, "weight_attr='edge_attr' of torch.int64, which must be fl"),
    ],
)
def test_what_pyg_lib_cannot_raises(anywhere, data, options, match):
    data.when, data.short = data.time.double(), data.time.int()
    with pytest.raises(NotImplementedError, match=f"pyg-lib does not support {match}") as error:
        NeighborLoader(data, [3], neighbor_sampler="pyg-lib", **options)
    assert "neighbor_sampler='native' does" in str(error.value)


def test_what_pyg_lib_cannot_of_types_and_stores_raises(anywhere, data, hetero):
    hetero["a"].time = hetero["b"].time = data.time
    for edge_type in hetero.edge_types:
        hetero[edge_type].edge_index = hetero[edge_type].edge_index.int()
    with pytest.raises(NotImplementedError, match="a graph with types and int32 edges"):
        NeighborLoader(hetero, [3], "a", neighbor_sampler="pyg-lib", time_attr="time")
    with pytest.raises(NotImplementedError, match=r"weight_attr= of a \(FeatureStore, GraphStore"):
        PygLibSampler((data, data), [3], weight_attr="weight")
    with pytest.raises(NotImplementedError, match="together with sample_direction='backward'"):
        PygLibSampler(data, [3], time_attr="time", sample_direction="backward")


@pytest.mark.parametrize("option", ["time_window", "strictly_earlier"])
def test_options_of_ours_alone_are_no_capabilities(anywhere, data, option):
    assert not {"window", "strict", "fixed"} & PygLibSampler.supports
    with pytest.raises(NotImplementedError, match=f"PygLibSampler knows no {option}="):
        NeighborLoader(data, [3], neighbor_sampler="pyg-lib", time_attr="time", **{option: True})


@pytest.mark.parametrize(
    "options",
    [
        {"weight_attr": "nope"},
        {"time_attr": "nope"},
        {"weight_attr": "negative"},
        {"weight_attr": "nan"},
        {"weight_attr": "few"},
        {"time_attr": "few"},
        {"temporal_strategy": "last"},
        {"temporal_strategy": "first", "time_attr": "time"},
        {"is_sorted": True},
    ],
    ids=str,
)
def test_what_is_wrong_raises_as_in_the_native_sampler(anywhere, data, options):
    data.negative, data.nan = data.weight - 0.5, data.weight.log().log()
    data.few = data.weight[:7]
    errors = []
    for sampler in ("native", "pyg-lib"):
        with pytest.raises(ValueError) as error:
            NeighborLoader(data, [3], neighbor_sampler=sampler, **options)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("cls", [PygLibSampler, TorchSparseSampler])
def test_edges_of_nodes_that_do_not_exist_raise(anywhere, data, cls):
    data.edge_index[0, 7] = 99
    with pytest.raises(IndexError, match="edge 7 has source 99"):
        cls(data, [3])


@pytest.mark.parametrize("cls", [PygLibSampler, TorchSparseSampler])
def test_is_sorted_is_checked(anywhere, data, hetero, cls):
    with pytest.raises(ValueError, match="is_sorted=True, but the edges .* edge 1 has"):
        cls(data, [3], is_sorted=True)
    with pytest.raises(ValueError, match=r"edge 1 of \('a', 'to', 'b'\) has"):
        cls(hetero, [3], is_sorted=True)
    assert cls(data, [3], is_sorted=True, sample_direction="backward").perm is not None
    data.edge_index = data.edge_index[:, data.edge_index[1].argsort(stable=True)]
    assert cls(data, [3], is_sorted=True).perm is None


@pytest.mark.parametrize("of_edges", [False, True])
def test_the_order_of_times_is_checked(anywhere, of_edges):
    edge_index = torch.tensor([[0, 1, 0, 1, 2], [0, 0, 2, 2, 2]])
    right = [5, 5, 1, 3, 4] if of_edges else [5, 6, 7]
    wrong, first = ([5, 5, 3, 1, 4], 3) if of_edges else ([7, 6, 5], 1)
    data = Data(edge_index=edge_index, num_nodes=3, time=torch.tensor(right))
    PygLibSampler(data, [2], time_attr="time", is_sorted=True)
    data.time = torch.tensor(wrong)
    with pytest.raises(ValueError, match=f"not sorted by time_attr='time': edge {first} is earli"):
        PygLibSampler(data, [2], time_attr="time", is_sorted=True)


def by_columns(tensor):
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("cls", [PygLibSampler, TorchSparseSampler])
def test_tensors_are_made_contiguous_and_those_of_the_user_kept(anywhere, data, hetero, cls):
    order = data.edge_index[1].argsort(stable=True)
    data.edge_index = given = by_columns(data.edge_index[:, order])
    sampler = cls(data, [3], is_sorted=True)
    assert sampler.row.is_contiguous() and torch.equal(sampler.row, given[0])
    assert data.edge_index is given and not given.is_contiguous()
    for edge_type in hetero.edge_types:
        hetero[edge_type].edge_index = by_columns(given)
    sampler = cls(hetero, [3], is_sorted=True)
    assert all(row.is_contiguous() for row in sampler.row_dict.values())
    store, features = MyGraphStore(), MyFeatureStore()
    features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    options = {"edge_type": None, "layout": "coo", "size": (60, 60), "is_sorted": True}
    store.put_edge_index((given[0], given[1]), **options)
    assert cls((features, store), [3]).row.is_contiguous()


def test_columns_of_times_and_weights_are_made_contiguous(anywhere, data):
    data.time = torch.stack([data.time, -data.time], dim=1)[:, :1]
    sampler = PygLibSampler(data, [3], time_attr="time")
    assert sampler.node_time.is_contiguous()
    assert torch.equal(sampler.node_time, data.time[:, 0])


def test_edges_in_any_layout_of_memory(name, data):
    data.edge_index = by_columns(data.edge_index)
    for batch in NeighborLoader(data, [4, 2], neighbor_sampler=name, batch_size=16):
        check(batch, data)


@needs_pyg_lib
def test_times_of_seeds_that_do_not_fit_raise(data):
    data.when = data.edge_attr
    for time, error, match in (
        (None, ValueError, "input_time is missing.*one of edges"),
        (torch.rand(60), NotImplementedError, "times of seeds .* of torch.float32"),
    ):
        loader = NeighborLoader(
            data, [3], neighbor_sampler="pyg-lib", time_attr="when", input_time=time
        )
        with pytest.raises(error, match=match):
            next(iter(loader))


@needs_pyg_lib
@pytest.mark.parametrize("where", ["nodes", "edges"])
def test_no_neighbour_is_of_the_future(data, where):
    time = torch.full((60,), 4, dtype=torch.int32)
    if where == "edges":
        data.when = torch.arange(500) % 9
    else:
        data.when = data.time
    loader = NeighborLoader(
        data, [4, 2], neighbor_sampler="pyg-lib", time_attr="when", input_time=time, batch_size=16
    )
    for batch in loader:
        check(batch, data)
        seen = data.when[batch.e_id if where == "edges" else batch.n_id[batch.edge_index[0]]]
        assert seen.max() <= 4


@needs_pyg_lib
def test_times_of_edges_of_stores_with_types(data):
    kinds = [("a", "to", "b"), ("b", "rev_to", "a")]
    order = data.edge_index[1].argsort(stable=True)
    row, col = data.edge_index[:, order]
    store, features = MyGraphStore(), MyFeatureStore()
    for kind in kinds:
        features.put_tensor(data.x, group_name=kind[0], attr_name="x", index=None)
        features.put_tensor(torch.arange(500), group_name=kind, attr_name="when", index=None)
        options = {"edge_type": kind, "layout": "coo", "size": (60, 60), "is_sorted": True}
        store.put_edge_index((row, col), **options)
    loader = NeighborLoader(
        (features, store),
        [4, 2],
        "a",
        neighbor_sampler="pyg-lib",
        time_attr="when",
        input_time=torch.full((60,), 250),
        batch_size=60,
    )
    batch = next(iter(loader))
    assert all(batch[kind].e_id.numel() > 0 and batch[kind].e_id.max() <= 250 for kind in kinds)


@needs_pyg_lib
def test_pyg_lib_takes_edges_of_weight_0():
    """The fault that the README names; when this fails, it is mended, and the README is wrong."""
    data = Data(edge_index=torch.tensor([[1, 2], [0, 0]]), num_nodes=3)
    data.weight = torch.tensor([1.0, 0.0])
    loader = NeighborLoader(
        data, [2], torch.zeros(1).long(), neighbor_sampler="pyg-lib", weight_attr="weight"
    )
    assert next(iter(loader)).e_id.tolist() == [0, 1]


@pytest.mark.parametrize("library", [name for name, here in HERE.items() if not here])
def test_a_library_that_is_not_there_says_so(data, library):
    with pytest.raises(ImportError, match=f"needs {library}, which cannot be imported"):
        NeighborLoader(data, [3], neighbor_sampler=library)


@needs_torch_sparse
def test_torch_sparse_never_takes_the_last_neighbour():
    """The fault that the README names; when this fails, it is mended, and the README is wrong."""
    data = Data(edge_index=torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]), num_nodes=5)
    loader = NeighborLoader(data, [1], torch.zeros(1).long(), neighbor_sampler="torch-sparse")
    taken = {int(next(iter(loader)).e_id) for _ in range(200)}
    assert taken == {0, 1, 2}
