"""Zipped loaders: each batch is the one that its loader gives alone, whatever the workers."""

import pickle

import pytest
import torch
import torch_geometric.loader
import torch_geometric.sampler as pyg
from torch_geometric.data import Data, HeteroData, TemporalData

from pyg_scale.loader import (
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    TemporalDataLoader,
    ZipLoader,
)
from tests.loader.batches import assert_same


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.arange(80)[:, None].float(),
        edge_index=torch.randint(80, (2, 600), generator=generator),
    )


@pytest.fixture
def hetero(data):
    hetero = HeteroData()
    hetero["a"].x = data.x
    hetero["a", "to", "a"].edge_index = data.edge_index
    return hetero


def add_noise(batch):
    batch.noise = torch.rand(3)
    return batch


def loaders_of(data, hetero, seeds=(1, 2, 3), **options):
    return [
        NeighborLoader(data, [4, 2], torch.arange(70), seed=seeds[0], **options),
        LinkNeighborLoader(
            data, [3], neg_sampling="binary", transform=add_noise, seed=seeds[1], **options
        ),
        HGTLoader(hetero, [5], ("a", torch.arange(75).flip(0)), seed=seeds[2], **options),
    ]


def assert_same_tuples(left, right):
    left, right = list(left), list(right)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert type(a) is type(b) is tuple
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "filter_per_worker": False},
        {"num_workers": 2, "worker_type": "process"},
        {"num_workers": 2, "worker_type": "process", "filter_per_worker": False},
    ],
)
def test_batches_are_those_of_the_loaders_alone(data, hetero, options):
    zipped = ZipLoader(loaders_of(data, hetero), batch_size=16, **options)
    assert len(zipped) == 5
    alone = loaders_of(data, hetero, batch_size=16)
    for _ in range(2):
        batches = list(zipped)
        assert len(batches) == 5
        first_four = zip(*alone)  # the last tuple is cut to the shortest input
        for ours, single, _ in zip(batches, first_four, range(4)):
            assert type(ours) is tuple
            for a, b in zip(ours, single, strict=True):
                assert_same(a, b)
        zipped.set_epoch(1)
        for loader in alone:
            loader.set_epoch(1)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 3},
        {"num_workers": 1, "filter_per_worker": False},
        {"num_workers": 2, "worker_type": "process"},
    ],
)
def test_shuffled_and_without_seeds_of_the_loaders(data, hetero, options):
    def build(**options):
        loaders = loaders_of(data, hetero, seeds=(None, None, None))
        return ZipLoader(loaders, batch_size=16, shuffle=True, seed=9, **options)

    assert_same_tuples(build(), build(**options))


def test_loaders_without_a_seed_draw_differently(data):
    pair = [NeighborLoader(data, [2], seed=None) for _ in range(2)]
    a, b = next(iter(ZipLoader(pair, batch_size=80, seed=0)))
    assert torch.equal(a.input_id, b.input_id)
    assert a.e_id.tolist() != b.e_id.tolist()


def test_manual_seed(data, hetero):
    zipped = ZipLoader(loaders_of(data, hetero, (None, None, None)), batch_size=16, shuffle=True)
    torch.manual_seed(5)
    first = list(zipped)
    torch.manual_seed(5)
    assert_same_tuples(first, zipped)


def test_resumes_in_the_middle_of_an_epoch(data, hetero):
    def build(seeds=(1, None, 3), **options):
        return ZipLoader(
            loaders_of(data, hetero, seeds), batch_size=16, shuffle=True, seed=2, **options
        )

    first = build()
    iterator = iter(first)
    next(iterator)
    next(iterator)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = build(num_workers=2)
    second.load_state_dict(state)
    assert_same_tuples(iterator, second)
    with pytest.raises(ValueError, match="loader_seeds"):
        build(seeds=(1, None, 4)).load_state_dict(state)


def test_call_is_that_of_the_loaders(data, hetero):
    loaders = loaders_of(data, hetero)
    zipped = ZipLoader(loaders)
    index = [3, 1, 3]
    assert_same_tuples([zipped(index)], [tuple(loader(index) for loader in loaders)])
    zipped = ZipLoader(loaders, filter_per_worker=False)
    assert_same_tuples([zipped(index)], [tuple(loader(index) for loader in loaders)])


def test_is_what_pygs_loader_is(data, hetero):
    loaders = loaders_of(data, hetero)
    zipped = ZipLoader(loaders, filter_per_worker=False, batch_size=4)
    assert isinstance(zipped, torch_geometric.loader.ZipLoader)
    assert repr(zipped) == f"ZipLoader(loaders={loaders})"
    assert zipped.loaders is loaders
    assert [loader.filter_per_worker for loader in loaders] == [False] * 3
    assert zipped.dataset == range(70)
    assert_same_tuples(zipped, pickle.loads(pickle.dumps(zipped)))


def test_stats_count_every_loader(data, hetero):
    for options in ({}, {"num_workers": 2}, {"num_workers": 1, "worker_type": "process"}):
        zipped = ZipLoader(loaders_of(data, hetero), batch_size=16, seed=0, **options)
        edges = sum(
            sum(store.edge_index.size(1) for store in batch.edge_stores)
            for batches in zipped
            for batch in batches
        )
        assert zipped.stats()["epoch"]["sample"]["rows"] == edges
        assert zipped.stats()["epoch"]["batches"] == 5
        assert zipped.stats()["epoch"]["transform"]["rows"] == 5


def test_own_methods_of_a_subclass_are_called(data, hetero):
    class Named(ZipLoader):
        def collate_fn(self, index):
            return super().collate_fn(index)

        def filter_fn(self, outs):
            return dict(zip("abc", super().filter_fn(outs), strict=True))

    for num_workers in (0, 2):
        zipped = Named(
            loaders_of(data, hetero),
            filter_per_worker=False,
            batch_size=16,
            num_workers=num_workers,
        )
        plain = ZipLoader(loaders_of(data, hetero), batch_size=16)
        found = list(zipped)
        assert all(list(batch) == ["a", "b", "c"] for batch in found)
        assert_same_tuples([tuple(batch.values()) for batch in found], plain)


class SeedsOnly(pyg.BaseSampler):
    """A sampler of somebody else, with a draw that can be seen."""

    def sample_from_nodes(self, index, **kwargs):
        none = torch.empty(0, dtype=torch.int64)
        out = pyg.SamplerOutput(torch.randint(80, (5,)), none, none, none)
        out.metadata = (index.input_id, None)
        return out

    def sample_from_edges(self, index, neg_sampling=None):
        raise NotImplementedError


@pytest.mark.parametrize("filter_per_worker", [False, True])
def test_a_loader_of_pyg_beside_ours(data, filter_per_worker):
    def build(**options):
        theirs = torch_geometric.loader.NodeLoader(data, SeedsOnly())
        ours = NeighborLoader(data, [2], seed=1)
        return ZipLoader(
            [theirs, ours], batch_size=20, seed=3, filter_per_worker=filter_per_worker, **options
        )

    plain = list(build())
    assert plain[0][0].n_id.tolist() != plain[1][0].n_id.tolist()
    assert_same_tuples(plain, build())
    assert_same_tuples(plain, build(num_workers=2))
    assert build(num_workers=2).worker_type == "process"
    with pytest.raises(ValueError, match="threads would share|which threads"):
        build(num_workers=2, worker_type="thread")


def test_refuses(data):
    with pytest.raises(ValueError, match="loaders is empty"):
        ZipLoader([])
    with pytest.raises(ValueError, match="which has no collate_fn"):
        ZipLoader([NeighborLoader(data, [2]), [1, 2]])
    ids = torch.arange(5)
    events = TemporalDataLoader(TemporalData(src=ids, dst=ids, t=ids))
    with pytest.raises(ValueError, match="a TemporalDataLoader, whose positions are batches"):
        ZipLoader([NeighborLoader(data, [2]), events])


def test_an_error_names_the_batch(data):
    def fail(batch):
        raise RuntimeError("on purpose")

    zipped = ZipLoader([NeighborLoader(data, [2], transform=fail)], batch_size=8, num_workers=2)
    with pytest.raises(RuntimeError, match="on purpose"):
        next(iter(zipped))
