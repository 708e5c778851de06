"""What both libraries are here for: batches of real edges, by name, the same for any workers."""

import importlib.util

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale.loader import LinkNeighborLoader, NeighborLoader
from pyg_scale_pyglib.sampler import PygLibSampler, TorchSparseSampler

HERE = {
    "pyg-lib": importlib.util.find_spec("pyg_lib") is not None,
    "torch-sparse": importlib.util.find_spec("torch_sparse") is not None,
}
needs_torch_sparse = pytest.mark.skipif(
    not HERE["torch-sparse"], reason="torch-sparse is not installed"
)


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


@pytest.mark.skipif(not HERE["pyg-lib"], reason="pyg-lib is not installed")
def test_what_pyg_lib_cannot_raises(data):
    with pytest.raises(NotImplementedError, match="pyg-lib does not support"):
        NeighborLoader(data, [3], neighbor_sampler="pyg-lib", subgraph_type="induced")


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
