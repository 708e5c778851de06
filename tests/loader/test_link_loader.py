"""Link loaders: what is on a batch, equal batches for any workers, and what they refuse."""

import pickle

import pytest
import torch
import torch_geometric
import torch_geometric.loader
import torch_geometric.sampler as pyg
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore
from torch_geometric.transforms import RandomLinkSplit

from pyg_scale.loader import LinkLoader, LinkNeighborLoader
from pyg_scale.sampler import NativeSampler, NegativeSampling
from tests.loader.batches import assert_same, assert_same_batches

RATES = ("user", "rates", "item")


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.arange(60)[:, None].float(),
        edge_index=torch.randint(60, (2, 400), generator=generator),
        edge_attr=torch.arange(400),
        time=torch.cat([torch.zeros(5).long(), torch.randint(20, (55,), generator=generator)]),
    )


@pytest.fixture
def hetero():
    generator = torch.Generator().manual_seed(1)
    data = HeteroData()
    data["user"].x = torch.arange(40)[:, None].float()
    data["item"].x = torch.arange(25)[:, None].float()
    pairs = torch.stack(
        [
            torch.randint(40, (200,), generator=generator),
            torch.randint(25, (200,), generator=generator),
        ]
    )
    data[RATES].edge_index = pairs
    data[RATES].edge_attr = torch.arange(200)
    data["item", "rev_rates", "user"].edge_index = pairs.flip(0)
    return data


def stores_of(data):
    features, graph = MyFeatureStore(), MyGraphStore()
    hetero = isinstance(data, HeteroData)
    for store in data.node_stores:
        group = store._key if hetero else None
        features.put_tensor(store.x, group_name=group, attr_name="x", index=None)
    for store in data.edge_stores:
        edge_type = store._key if hetero else None
        size = store.size() if hetero else (data.num_nodes, data.num_nodes)
        graph.put_edge_index(store.edge_index, edge_type=edge_type, layout="coo", size=size)
    return features, graph


def check_edges(batch, data):
    """Rows, edge features and node features are those of the original ids."""
    assert torch.equal(batch.x, data.x[batch.n_id])
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])


@pytest.mark.parametrize("neg_sampling", [None, "binary", ("binary", 1.5)])
def test_homogeneous(data, neg_sampling):
    loader = LinkNeighborLoader(
        data, [4, 2], neg_sampling=neg_sampling, batch_size=32, shuffle=True, seed=1
    )
    assert len(loader) == 13
    assert repr(loader) == "LinkNeighborLoader()"
    seen = []
    for batch in loader:
        check_edges(batch, data)
        num_links = batch.input_id.numel()
        links = batch.n_id[batch.edge_label_index]
        assert torch.equal(links[:, :num_links], data.edge_index[:, batch.input_id])
        num_negatives = (
            0
            if neg_sampling is None
            else (num_links if neg_sampling == "binary" else -int(-num_links * 1.5 // 1))
        )
        assert links.size(1) == num_links + num_negatives
        if neg_sampling is None:
            assert "edge_label" not in batch
        else:
            assert batch.edge_label.tolist() == [1.0] * num_links + [0.0] * num_negatives
        assert "edge_label_time" not in batch
        assert "batch_size" not in batch
        assert len(batch.num_sampled_nodes) == 3
        assert len(batch.num_sampled_edges) == 2
        seen.append(batch.input_id)
    assert torch.cat(seen).sort().values.tolist() == list(range(400))


@pytest.mark.parametrize("amount", [1, 3])
def test_triplets(data, amount):
    loader = LinkNeighborLoader(
        data, [4], neg_sampling=NegativeSampling("triplet", amount), batch_size=16, seed=1
    )
    for batch in loader:
        links = data.edge_index[:, batch.input_id]
        assert torch.equal(batch.n_id[batch.src_index], links[0])
        assert torch.equal(batch.n_id[batch.dst_pos_index], links[1])
        assert batch.dst_neg_index.shape == ((16,) if amount == 1 else (16, amount))
        assert batch.dst_neg_index.is_contiguous()
        assert "edge_label_index" not in batch
        assert "seed_time" not in batch


def test_attributes_named_as_ours_do_not_survive(data):
    data.edge_label_index = data.edge_index[:, :7]
    data.edge_label_time = torch.arange(7)
    batch = next(iter(LinkNeighborLoader(data, [2], neg_sampling="triplet", batch_size=3)))
    assert "edge_label_index" not in batch
    assert "edge_label_time" not in batch
    batch = next(iter(LinkNeighborLoader(data, [2], data.edge_index[:, :9], batch_size=3)))
    assert batch.edge_label_index.shape == (2, 3)
    assert "edge_label_time" not in batch


@pytest.mark.parametrize("source", ["memory", "stores"])
@pytest.mark.parametrize("neg_sampling", ["binary", "triplet"])
def test_heterogeneous(hetero, source, neg_sampling):
    given = hetero if source == "memory" else stores_of(hetero)
    loader = LinkNeighborLoader(
        given, [3, 3], RATES, neg_sampling=neg_sampling, batch_size=32, seed=5
    )
    for batch in loader:
        assert isinstance(batch, HeteroData)
        for node_type in ("user", "item"):
            assert torch.equal(batch[node_type].x, hetero[node_type].x[batch[node_type].n_id])
        links = hetero[RATES].edge_index[:, batch[RATES].input_id]
        user, item = batch["user"].n_id, batch["item"].n_id
        if neg_sampling == "binary":
            index = batch[RATES].edge_label_index
            assert torch.equal(user[index[0, : links.size(1)]], links[0])
            assert torch.equal(item[index[1, : links.size(1)]], links[1])
            assert batch[RATES].edge_label.shape == (2 * links.size(1),)
        else:
            assert torch.equal(user[batch["user"].src_index], links[0])
            assert torch.equal(item[batch["item"].dst_pos_index], links[1])
            assert batch["item"].dst_neg_index.shape == (links.size(1),)
            assert "edge_label_index" not in batch[RATES]
        if source == "memory":
            ids = batch[RATES].e_id
            assert torch.equal(batch[RATES].edge_attr, hetero[RATES].edge_attr[ids])


def test_homogeneous_stores_give_the_same_as_data(data):
    del data.edge_attr, data.time
    options = {"num_neighbors": [3, 2], "neg_sampling": "binary", "batch_size": 50, "seed": 2}
    ours = LinkNeighborLoader(stores_of(data), edge_label_index=(None, None), **options)
    for a, b in zip(ours, LinkNeighborLoader(data, **options), strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.edge_label_index, b.edge_label_index)
        assert torch.equal(a.edge_index, b.edge_index)


def test_links_of_a_type_that_is_no_edge_type(hetero):
    links = torch.tensor([[1, 2], [3, 4]])
    edge_type = ("user", "likes", "user")
    loader = LinkNeighborLoader(
        hetero,
        [2],
        (edge_type, links),
        neg_sampling=NegativeSampling("binary", 200, exclude_positives=True),
        batch_size=2,
        seed=0,
    )
    batch = next(iter(loader))
    found = batch["user"].n_id[batch[edge_type].edge_label_index]
    assert torch.equal(found[:, :2], links)
    negatives = set(map(tuple, found[:, 2:].t().tolist()))
    assert len(negatives) > 300
    assert not negatives & {(1, 3), (2, 4)}


@pytest.mark.parametrize(
    "neg_sampling",
    [
        NegativeSampling("binary", 20, exclude_positives=True),
        NegativeSampling("triplet", 20, exclude_positives=True),
    ],
)
def test_neither_edges_nor_held_out_links_come_as_negatives(neg_sampling):
    generator = torch.Generator().manual_seed(0)
    whole = Data(edge_index=torch.randint(25, (2, 250), generator=generator), num_nodes=25)
    train, _, test = RandomLinkSplit(0.0, 0.4, add_negative_train_samples=False)(whole)
    held_out = test.edge_label_index[:, test.edge_label == 1]
    loader = LinkNeighborLoader(
        train, [2], held_out, neg_sampling=neg_sampling, batch_size=64, seed=0
    )
    present = set(map(tuple, torch.cat([train.edge_index, held_out], 1).t().tolist()))
    for batch in loader:
        if neg_sampling.is_binary():
            pairs = batch.n_id[batch.edge_label_index[:, batch.edge_label == 0]]
        else:
            shape = batch.dst_neg_index.shape
            pairs = torch.stack(
                [
                    batch.n_id[batch.src_index][:, None].expand(shape).flatten(),
                    batch.n_id[batch.dst_neg_index].flatten(),
                ]
            )
        assert not present & set(map(tuple, pairs.t().tolist()))
    assert loader.neg_sampling is neg_sampling


def test_labels_are_shifted_so_that_0_is_negative(data):
    label = torch.arange(400) % 3
    loader = LinkNeighborLoader(
        data, [2], edge_label=label, neg_sampling="binary", batch_size=10, seed=0
    )
    batch = next(iter(loader))
    assert batch.edge_label.tolist() == [*(label[:10] + 1).tolist(), *[0] * 10]
    assert loader.edge_label is label
    loader = LinkNeighborLoader(data, [2], edge_label=label, batch_size=10, seed=0)
    assert next(iter(loader)).edge_label.tolist() == label[:10].tolist()
    loader = LinkNeighborLoader(
        data, [2], edge_label=label + 1, neg_sampling_ratio=1.0, batch_size=10, seed=0
    )
    assert next(iter(loader)).edge_label.tolist() == [*(label[:10] + 1).tolist(), *[0] * 10]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
@pytest.mark.parametrize("neg_sampling", ["binary", "triplet"])
def test_times(data, dtype, neg_sampling):
    data.time = data.time.to(dtype)
    time = torch.arange(400).to(dtype) / 40 if dtype.is_floating_point else torch.arange(400) // 40
    loader = LinkNeighborLoader(
        data,
        [3, 3],
        edge_label_time=time,
        time_attr="time",
        neg_sampling=neg_sampling,
        batch_size=20,
        seed=0,
    )
    for batch in loader:
        when = time[batch.input_id]
        if neg_sampling == "binary":
            assert torch.equal(batch.edge_label_time, when.repeat(2))
            negatives = batch.edge_label_index[:, 20:]
            assert bool((batch.time[negatives] <= when).all())
        else:
            assert torch.equal(batch.seed_time, when)
            assert bool((batch.time[batch.dst_neg_index] <= when).all())
        seeds = torch.zeros(batch.num_nodes, dtype=torch.bool)
        num_seeds = batch.num_sampled_nodes[0]
        seeds[:num_seeds] = True
        assert bool((batch.time <= when[batch.batch])[~seeds].all())


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 3},
        {"num_workers": 2, "worker_type": "process"},
        {"num_workers": 2, "filter_per_worker": False},
    ],
)
def test_same_batches_for_any_workers(data, options):
    common = {
        "num_neighbors": [4, 2],
        "batch_size": 64,
        "shuffle": True,
        "seed": 11,
        "neg_sampling": NegativeSampling("binary", 2, exclude_positives=True),
    }
    one = LinkNeighborLoader(data, **common)
    many = LinkNeighborLoader(data, **common, **options)
    for _ in range(2):
        assert_same_batches(one, many)


def test_resumes_in_the_middle_of_an_epoch(data):
    def build(**options):
        return LinkNeighborLoader(
            data, [4, 2], neg_sampling="binary", batch_size=64, shuffle=True, **options
        )

    torch.manual_seed(3)
    first = build()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = first.state_dict()
    rest = list(iterator)
    second = build(num_workers=2)
    second.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert_same_batches(rest, second)


def test_manual_seed_repeats_an_epoch(data):
    loader = LinkNeighborLoader(data, [4], neg_sampling="binary", batch_size=100, shuffle=True)
    epochs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        epochs.append(list(loader))
    assert_same_batches(epochs[0], epochs[1])
    assert epochs[0][0].input_id.tolist() != epochs[2][0].input_id.tolist()


def test_call(data):
    loader = LinkNeighborLoader(data, [4], neg_sampling="binary", seed=4)
    batch = loader([3, 5, 3])
    assert batch.input_id.tolist() == [3, 5, 3]
    assert_same(batch, loader(torch.tensor([3, 5, 3])))


def test_is_what_pygs_loader_is(data):
    loader = LinkNeighborLoader(data, [4], batch_size=8)
    assert isinstance(loader, torch_geometric.loader.LinkNeighborLoader)
    assert isinstance(loader, torch_geometric.loader.LinkLoader)
    assert isinstance(loader, LinkLoader)
    again = pickle.loads(pickle.dumps(loader))
    torch.manual_seed(0)
    ours = list(loader)
    torch.manual_seed(0)
    assert_same_batches(ours, again)


def test_link_loader_with_a_sampler(data):
    sampler = NativeSampler(data, [3])
    batch = next(iter(LinkLoader(data, sampler, batch_size=5, seed=0)))
    check_edges(batch, data)
    with pytest.raises(ValueError, match="without a graph"):
        LinkLoader(data, NativeSampler())
    with pytest.raises(TypeError, match="sample_from_edges"):
        LinkLoader(data, "native")


def test_a_sampler_of_pyg_is_seeded(data):
    class Foreign(pyg.BaseSampler):
        def sample_from_nodes(self, index, **kwargs):
            raise NotImplementedError

        def sample_from_edges(self, index, neg_sampling=None):
            node, inverse = torch.cat([index.row, index.col]).unique(return_inverse=True)
            none = torch.empty(0, dtype=torch.int64)
            out = pyg.SamplerOutput(node, none, none, none)
            out.metadata = (index.input_id, inverse.view(2, -1), torch.rand(len(index.row)), None)
            return out

    first, second = (LinkLoader(data, Foreign(), batch_size=7, seed=3) for _ in range(2))
    assert_same_batches(first, second)
    with pytest.raises(NotImplementedError, match="Foreign draws negatives itself"):
        LinkLoader(data, Foreign(), neg_sampling=NegativeSampling("binary", exclude_positives=True))


def test_transforms(data):
    def relabel(out):
        out.metadata = (out.metadata[0] + 1000, *out.metadata[1:])
        return out

    def add(batch):
        batch.extra = torch.rand(1)
        return batch

    for num_workers in (0, 2):
        loader = LinkNeighborLoader(
            data,
            [2],
            batch_size=100,
            seed=0,
            transform=add,
            transform_sampler_output=relabel,
            num_workers=num_workers,
        )
        batches = list(loader)
        assert batches[0].input_id[0] == 1000
        assert len({float(batch.extra) for batch in batches}) == 4


def test_links_as_two_tensors(data):
    links = data.edge_index[:, :40]
    whole = LinkNeighborLoader(data, [2], links, batch_size=16, seed=1)
    assert_same_batches(whole, LinkNeighborLoader(data, [2], tuple(links), batch_size=16, seed=1))
    with pytest.raises(TypeError, match="edge_label_index must be"):
        LinkNeighborLoader(data, [2], (links[0], links[1, 1:]))


def test_no_links(data):
    none = torch.empty(2, 0, dtype=torch.int64)
    assert list(LinkNeighborLoader(data, [2], none, neg_sampling="binary")) == []


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"edge_label_time": torch.zeros(400)}, ValueError, "'time_attr' is not set"),
        ({"time_attr": "time"}, ValueError, "'edge_label_time' is not set"),
        ({"edge_label_index": torch.zeros(3, 2).long()}, ValueError, r"integer tensor \[2"),
        ({"edge_label_index": torch.zeros(2, 2)}, TypeError, "use .long"),
        ({"edge_label_index": torch.tensor([[0], [60]])}, IndexError, "60 as a destination"),
        ({"edge_label_index": torch.tensor([[-1], [0]])}, IndexError, "-1 as a source"),
        ({"edge_label_index": RATES}, ValueError, "graph has no types"),
        ({"edge_label": torch.zeros(3)}, ValueError, "edge_label must have one entry"),
        ({"input_id": torch.zeros(3)}, ValueError, "input_id must have one entry"),
        ({"edge_label": torch.zeros(400), "neg_sampling": "triplet"}, ValueError, "must be None"),
        ({"neg_sampling": "binary", "neg_sampling_ratio": 2}, ValueError, "not both"),
        ({"neg_sampling": "other"}, ValueError, "other"),
        ({"neighbor_sampler": 3}, TypeError, "neighbor_sampler must be a name"),
    ],
)
def test_bad_arguments(data, options, error, match):
    with pytest.raises(error, match=match):
        LinkNeighborLoader(data, [2], **options)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (None, "of which type"),
        (torch.tensor([[0], [1]]), "of which type"),
        (("user", "buys", "item"), "is no edge type"),
        ((("user", "rates", "shop"), torch.tensor([[0], [1]])), "'shop' is no node type"),
    ],
)
def test_bad_types(hetero, given, match):
    with pytest.raises(ValueError, match=match):
        LinkNeighborLoader(hetero, [2], given)


def test_two_names_are_a_type_where_that_says_enough(hetero):
    loader = LinkNeighborLoader(hetero, [2], ("user", "item"), batch_size=4)
    assert loader.input_data.input_type == RATES


def test_none_early_enough_says_so(data):
    data.time += 10
    with pytest.raises(ValueError, match=r"negative number 0"):
        next(
            iter(
                LinkNeighborLoader(
                    data,
                    [2],
                    edge_label_time=torch.full((400,), 3),
                    time_attr="time",
                    neg_sampling="binary",
                    batch_size=4,
                )
            )
        )


def test_adj_t_gives_its_edges_as_seeds(data):
    transform = torch_geometric.transforms.ToSparseTensor()
    sparse = transform(Data(edge_index=data.edge_index.unique(dim=1), num_nodes=60))
    loader = LinkNeighborLoader(sparse, [2], batch_size=50, seed=0)
    links = torch.cat([b.n_id[b.edge_label_index] for b in loader], dim=1)
    assert set(map(tuple, links.t().tolist())) == set(map(tuple, data.edge_index.t().tolist()))
