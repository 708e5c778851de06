"""Bad input raises a typed error that names the argument, or gives the right empty result."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.testing import MyFeatureStore

from pyg_scale.errors import UnknownPluginError
from pyg_scale.loader import LinkNeighborLoader, NeighborLoader, NodeLoader, ZipLoader
from pyg_scale.loader import node_loader as module
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.store import Mmap
from pyg_scale.testing import graphs

DATA = graphs.hostile()
WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "worker_type": "process"},
]


def loader(data: Any = DATA, **kwargs: Any) -> NeighborLoader:
    return NeighborLoader(data, **({"num_neighbors": [3, 2], "batch_size": 10} | kwargs))


# Arguments #################################################################################

TIME = torch.zeros(100, dtype=torch.int64)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input_nodes": [100]}, IndexError, "input_nodes has node 100, but there are 100 nodes"),
    ({"input_nodes": [-1]}, IndexError, "input_nodes has node -1"),
    ({"input_nodes": torch.tensor([1.0])}, TypeError, "input_nodes must be integer ids.*float32"),
    ({"input_nodes": [0.5]}, TypeError, "input_nodes must be integer ids"),
    ({"input_nodes": {1, 2}}, TypeError, "input_nodes must be ids, a bool mask.*got set"),
    ({"input_nodes": (None, [1])}, TypeError, "input_nodes must be ids, a bool mask.*got tuple"),
    ({"input_nodes": torch.ones(99, dtype=torch.bool)}, ValueError, "mask of 99 .* 100 nodes"),
    ({"input_nodes": np.ones(101, dtype=bool)}, ValueError, "mask of 101 .* 100 nodes"),
    ({"input_nodes": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, "one-dimensional"),
    ({"input_nodes": ("paper", None)}, ValueError, "the graph has no types"),
    ({"input_nodes": [1, 2], "input_id": torch.tensor([1])}, ValueError, "input_id has 1 entries"),
    ({"input_time": TIME}, ValueError, "input_time is given, but time_attr= is not"),
    ({"input_time": TIME[:5], "time_attr": "time"}, ValueError, "input_time .* one time per seed"),
    (
        {"input_time": TIME.double() * torch.nan, "time_attr": "time"},
        ValueError,
        "input_time has NaN",
    ),
    ({"input_time": TIME.bool(), "time_attr": "time"}, TypeError, "input_time must be"),
    ({"time_attr": "when"}, ValueError, "input_time"),
    ({"time_attr": "nothing"}, (KeyError, ValueError, AttributeError), "nothing"),
    ({"weight_attr": "nothing"}, (KeyError, ValueError, AttributeError), "nothing"),
    ({"num_neighbors": {("a", "b", "c"): [1]}}, ValueError, "num_neighbors"),
    ({"num_neighbors": None}, ValueError, "num_neighbors is missing"),
    ({"num_neighbors": 5}, TypeError, "num_neighbors must be one integer per hop"),
    ({"num_neighbors": "ab"}, TypeError, "num_neighbors must be one integer per hop"),
    ({"num_neighbors": [5, 1.5]}, TypeError, "num_neighbors must be integers"),
    ({"subgraph_type": "triangular"}, ValueError, "triangular"),
    ({"num_neighbors": [5, -2]}, ValueError, "num_neighbors must be -1 .all., 0 .none. or more"),
    ({"num_neighbors": [2**31]}, ValueError, r"num_neighbors must be less than 2\*\*31"),
    ({"disjoint": "x"}, TypeError, "disjoint must be True or False"),
    ({"replace": 2}, TypeError, "replace must be True or False"),
    ({"temporal_strategy": "first"}, ValueError, "temporal_strategy must be"),
    ({"neighbor_sampler": "nativ"}, UnknownPluginError, "did you mean 'native'"),
    ({"neighbor_sampler": 3}, TypeError, "neighbor_sampler must be a name"),
    ({"sampler": "native"}, TypeError, "sampler= is torch's"),
    ({"feature_store": "memori"}, UnknownPluginError, "memory"),
    ({"feature_store": 3}, TypeError, "feature_store must be a name or a FeatureStore"),
    ({"feature_store": MyFeatureStore()}, ValueError, "holds no features"),
    ({"feature_store": Mmap("no-such-directory")}, ValueError, "no-such-directory.*no features"),
    ({"seed": "7"}, TypeError, "seed must be an integer"),
    ({"seed": 0.5}, TypeError, "seed must be an integer"),
    ({"worker_type": "fibre"}, ValueError, "worker_type must be 'thread', 'process', 'ring' or"),
    ({"num_workers": -1}, ValueError, "num_workers"),
    ({"num_workers": 1.5}, TypeError, "num_workers must be an integer"),
    ({"batch_size": 0}, ValueError, "batch_size"),
    ({"prefetch_factor": 2}, ValueError, "prefetch_factor"),
    ({"prefetch_factor": 0, "num_workers": 1}, ValueError, "prefetch_factor must be at least 1"),
    ({"timeout": 3}, ValueError, "timeout=3 is how long to wait for workers"),
    ({"timeout": -1, "num_workers": 1}, ValueError, "timeout"),
    ({"persistent_workers": True}, ValueError, "persistent_workers"),
    ({"num_wokers": 2}, TypeError, "num_wokers"),
    ({"multiprocessing_context": "spoon", "num_workers": 1}, ValueError, "spoon"),
]


@pytest.mark.parametrize(("kwargs", "error", "message"), WRONG, ids=lambda v: str(v)[:60])
def test_wrong_arguments(kwargs: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        loader(**kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        k
        for k, _, _ in WRONG
        if not {
            "time_attr",
            "weight_attr",
            "num_neighbors",
            "subgraph_type",
            "temporal_strategy",
            "feature_store",
        }
        & k.keys()
    ],
    ids=str,
)
def test_are_refused_before_the_graph_is_touched(
    kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("built the topology first")

    monkeypatch.setattr("pyg_scale.sampler.base.topology_of", touched)
    with pytest.raises(Exception, match=r"^(?!built the topology)"):
        loader(**kwargs)


@pytest.mark.parametrize(
    ("data", "kwargs", "error", "message"),
    [
        (graphs.hetero(), {}, ValueError, "input_nodes must say of which type"),
        (graphs.hetero(), {"input_nodes": torch.tensor([1])}, ValueError, "of which type"),
        (graphs.hetero(), {"input_nodes": "papers"}, ValueError, "'papers'; the graph has 'user'"),
        (graphs.hetero(), {"input_nodes": ("item", [12])}, IndexError, "node 12, but there are 12"),
        (graphs.stores(graphs.hetero()), {"input_nodes": [0]}, ValueError, "of which type"),
        (graphs.stores(graphs.hostile()), {"input_nodes": "item"}, ValueError, "no types"),
        (3, {}, TypeError, "data must be Data, HeteroData"),
        (
            (Mmap("no-such-directory"), graphs.stores(graphs.hostile())[1]),
            {},
            ValueError,
            "there is nothing at .*no-such-directory",
        ),
        ((1, 2), {}, TypeError, "data must be .* tuple of int and int"),
        (
            graphs.stores(graphs.hostile()),
            {"feature_store": "memory"},
            ValueError,
            "is a pair of stores and has one",
        ),
    ],
    ids=lambda v: str(v)[:40],
)
def test_wrong_for_the_data(data: Any, kwargs: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        loader(data, **kwargs)


def test_wrong_weights() -> None:
    for value in (-1.0, float("nan"), float("inf")):
        data = graphs.hostile()
        data.weight[3] = value
        with pytest.raises(ValueError, match="weight"):
            loader(data, weight_attr="weight")


@pytest.mark.parametrize("links", [False, True])
def test_seed_times_that_would_be_rounded(links: bool) -> None:
    data = graphs.hostile()
    data.when = torch.zeros(data.num_nodes, dtype=torch.float64)
    beyond = 2**53 + 1

    def make(time: int) -> Any:
        if links:
            times = torch.tensor([0, time])
            ends = torch.zeros(2, 2, dtype=torch.int64)
            return LinkNeighborLoader(
                data, [2], edge_label_index=ends, edge_label_time=times, time_attr="when"
            )
        seeds = torch.tensor([0, 1])
        return NeighborLoader(data, [2], seeds, torch.tensor([0, time]), time_attr="when")

    name = "edge_label_time" if links else "input_time"
    with pytest.raises(ValueError, match=f"{name}: the integer {beyond} would be rounded"):
        make(beyond)
    next(iter(make(beyond - 1)))


def test_unsorted_data_declared_sorted() -> None:
    with pytest.raises(ValueError, match="is_sorted"):
        loader(is_sorted=True)


def test_node_loader_wants_a_sampler_with_a_graph() -> None:
    with pytest.raises(TypeError, match=r"a name is for NeighborLoader"):
        NodeLoader(DATA, "native")
    with pytest.raises(ValueError, match="node_sampler is a NativeSampler without a graph"):
        NodeLoader(DATA, NativeSampler())


def test_a_bound_sampler_that_differs_from_the_arguments() -> None:
    bound = loader().node_sampler
    assert loader(neighbor_sampler=bound).node_sampler is bound
    with pytest.raises(ValueError, match="built with num_neighbors"):
        loader(neighbor_sampler=bound, num_neighbors=[9, 9])
    with pytest.raises(ValueError, match="built with replace=False"):
        loader(neighbor_sampler=bound, replace=True)


def test_features_that_fit_neither_nodes_nor_edges() -> None:
    store = MyFeatureStore()
    store.put_tensor(torch.ones(7, 2), group_name=None, attr_name="x", index=None)
    with pytest.raises(ValueError, match="'x' of group None has 7 rows.*100 nodes"):
        loader(feature_store=store)
    store = MyFeatureStore()
    store.put_tensor(torch.ones(7, 2), group_name="item", attr_name="x", index=None)
    with pytest.raises(ValueError, match="'x' of group 'item' has 7 rows"):
        loader(graphs.hetero(), input_nodes="item", feature_store=store)


def test_features_of_more_nodes_than_the_graph_has_are_those_of_its_nodes() -> None:
    for data, group, options in (
        (graphs.hostile(), None, {}),
        (graphs.hetero(), "item", {"input_nodes": "item"}),
    ):
        store, rows = MyFeatureStore(), torch.arange(9_000)
        store.put_tensor(rows, group_name=group, attr_name="row", index=None)
        for batch in loader(data, feature_store=store, **options):
            nodes = batch if group is None else batch[group]
            assert torch.equal(nodes.row, nodes.n_id)


@pytest.mark.parametrize("position", [100, -101])
@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_an_index_sampler_that_is_out_of_range(position: int, workers: dict[str, Any]) -> None:
    found = loader(sampler=[0, 1, position], batch_size=1, **workers)
    iterator = iter(found)
    assert [next(iterator).input_id.tolist() for _ in range(2)] == [[0], [1]]
    with pytest.raises(IndexError, match=f"sampler gives position {position}, .* has 100 seeds"):
        next(iterator)
    with pytest.raises(IndexError, match=f"index gives position {position}"):
        found([position])


def test_an_index_sampler_of_something_else() -> None:
    with pytest.raises(TypeError, match="integer positions"):
        list(loader(sampler=[0.5], batch_size=1))
    with pytest.raises(TypeError, match="integer positions"):
        loader()(torch.tensor([True, False]))
    with pytest.raises(ValueError, match="one dimension"):
        loader()([[0, 1], [2, 3]])


# Failures on the way #######################################################################


class Failing(MyFeatureStore):
    """Raises at the fourth request."""

    def __init__(self) -> None:
        super().__init__()
        self.put_tensor(DATA.x, group_name=None, attr_name="x", index=None)
        self.requests = 0

    def _multi_get_tensor(self, attrs: Any) -> Any:
        self.requests += 1
        if self.requests == 4:
            raise ConnectionError("the store is gone")
        return super()._multi_get_tensor(attrs)


@pytest.mark.parametrize(
    "workers", [*WORKERS[:2], {"num_workers": 1, "worker_type": "process"}], ids=str
)
def test_a_feature_store_that_raises(workers: dict[str, Any]) -> None:
    iterator = iter(loader(feature_store=Failing(), **workers))
    got: list[int] = []
    with pytest.raises(ConnectionError, match="the store is gone"):
        got.extend(int(batch.input_id[0]) for batch in iterator)
    rest = [int(batch.input_id[0]) for batch in iterator]
    assert len(got) + len(rest) == 9 and sorted(got + rest) == got + rest  # one was lost: no other
    if workers.get("num_workers", 0) < 2:
        assert got == [0, 10, 20]


def test_a_feature_store_that_returns_too_little() -> None:
    class Short(MyFeatureStore):
        def _multi_get_tensor(self, attrs: Any) -> Any:
            return [t[:-1] for t in super()._multi_get_tensor(attrs)]

    store = Short()
    store.put_tensor(DATA.x, group_name=None, attr_name="x", index=None)
    with pytest.raises(ValueError, match="rows of 'x' of group None when asked for"):
        next(iter(loader(feature_store=store)))


def fail_at_30(data: Any) -> Any:
    if int(data.input_id[0]) == 30:
        raise ZeroDivisionError("broken on purpose")
    return data


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_transform_that_raises(workers: dict[str, Any]) -> None:
    iterator = iter(loader(transform=fail_at_30, **workers))
    assert [int(next(iterator).input_id[0]) for _ in range(3)] == [0, 10, 20]
    with pytest.raises(ZeroDivisionError, match="broken on purpose"):
        next(iterator)
    assert [int(batch.input_id[0]) for batch in iterator] == [40, 50, 60, 70, 80, 90]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_transform_of_the_sampler_output_that_raises(workers: dict[str, Any]) -> None:
    def fail(out: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")

    with pytest.raises(ZeroDivisionError, match="broken on purpose"):
        next(iter(loader(transform_sampler_output=fail, **workers)))


def test_a_transform_of_the_sampler_output_that_returns_nothing() -> None:
    with pytest.raises(TypeError, match="a sampler must return a SamplerOutput"):
        next(iter(loader(transform_sampler_output=lambda out: None)))


def test_an_error_with_a_held_traceback_holds_no_thread() -> None:
    iterator = iter(loader(transform=fail_at_30, num_workers=2))
    held = None
    try:
        list(iterator)
    except ZeroDivisionError as error:
        held = error
    for thread in threading.enumerate():
        if thread.name.startswith("pyg_scale-loader"):
            thread.join(5)
    assert not [t for t in threading.enumerate() if t.name.startswith("pyg_scale-loader")]
    assert held is not None and held.__traceback__ is not None


# Empty and tiny ############################################################################


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_no_seeds(workers: dict[str, Any], shuffle: bool) -> None:
    for nodes in ([], torch.zeros(100, dtype=torch.bool), torch.empty(0, dtype=torch.int64)):
        none = loader(input_nodes=nodes, shuffle=shuffle, **workers)
        assert len(none) == 0 and list(none) == []
    batch = none([])
    assert (batch.num_nodes, batch.num_edges, batch.batch_size) == (0, 0, 0)
    assert batch.x.shape == (0, 6) and batch.num_sampled_nodes == [0, 0, 0]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_one_seed(workers: dict[str, Any]) -> None:
    (batch,) = loader(input_nodes=[7], **workers)
    assert batch.n_id[0] == 7 and batch.batch_size == 1


@pytest.mark.parametrize("num_nodes", [0, 1, 5])
@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_graph_without_edges(num_nodes: int, workers: dict[str, Any]) -> None:
    data = graphs.nothing(num_nodes)
    batches = list(loader(data, batch_size=2, **workers))
    assert [i for b in batches for i in b.n_id.tolist()] == list(range(num_nodes))
    for batch in batches:
        assert batch.edge_index.shape == (2, 0) and batch.e_id.shape == (0,)
        assert batch.x.tolist() == [[float(i)] for i in batch.n_id]
        assert batch.num_sampled_edges == [0, 0]


def test_a_graph_without_an_edge_index() -> None:
    (batch,) = loader(Data(x=torch.ones(4, 2)))
    assert batch.n_id.tolist() == [0, 1, 2, 3]


def test_many_seeds() -> None:
    seeds = torch.arange(100).repeat(1000)
    (batch,) = loader(input_nodes=seeds, batch_size=100_000, num_neighbors=[2])
    assert torch.equal(batch.n_id[:100_000], seeds)
    pairs = DATA.edge_index[:, batch.e_id]
    assert torch.equal(batch.n_id[batch.edge_index], pairs)


def test_no_hops() -> None:
    (batch,) = loader(num_neighbors=[], input_nodes=[3, 4])
    assert batch.n_id.tolist() == [3, 4] and batch.num_sampled_nodes == [2]


def test_the_module_checks_only_what_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds may be given in any integer form, and mean the same."""
    assert module.NodeLoader is NodeLoader
    expected = loader(input_nodes=torch.tensor([3, 5]), seed=1)([0, 1]).n_id
    mask = torch.zeros(100, dtype=torch.bool)
    mask[[3, 5]] = True
    for nodes in (
        [3, 5],
        (3, 5),
        range(3, 6, 2),
        np.array([3, 5]),
        mask,
        mask.numpy(),
        torch.tensor([3, 5], dtype=torch.int32),
        torch.tensor([3, 5], dtype=torch.int8),
    ):
        assert loader(input_nodes=nodes, seed=1)([0, 1]).n_id.tolist() == expected.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_graph_that_is_changed_after_the_loader_was_made(workers: int) -> None:
    """The old edges and the new features, as in PyG; where sizes do not fit, an error."""
    data = graphs.hostile()
    loader = NeighborLoader(data, [-1], batch_size=10, num_workers=workers)
    before = [batch.e_id for batch in loader]
    old, x = data.edge_index, data.x
    data.edge_index, data.x = old.flip(0), x + 1
    for batch, edges in zip(loader, before, strict=True):
        assert torch.equal(batch.e_id, edges)
        assert torch.equal(batch.n_id[batch.edge_index], old[:, edges])
        assert torch.equal(batch.x, x[batch.n_id] + 1)
    data.edge_index = old[:, :-1]
    for ask in (lambda: iter(loader), lambda: loader([0])):
        with pytest.raises(ValueError, match=r"data\.edge_index of the graph had .* new loader"):
            ask()
    data.edge_index, data.x = old, x[:-1]
    for ask in (lambda: iter(loader), lambda: loader([0])):
        with pytest.raises(ValueError, match=r"data\.x of the graph had .* new loader"):
            ask()
    data.x = x
    assert len(list(loader)) == len(before)


def test_a_graph_of_types_that_is_changed_after_the_loader_was_made() -> None:
    data = graphs.hetero()
    loader = NeighborLoader(data, [2], input_nodes="item", batch_size=10)
    pair = ZipLoader([loader, NeighborLoader(data, [2], input_nodes="item")])
    kind = data.edge_types[0]
    data[kind].edge_index = data[kind].edge_index[:, 1:]
    for ask in (loader, pair):
        with pytest.raises(ValueError, match=f"{kind[1]}.*edge_index of the graph had"):
            next(iter(ask))
