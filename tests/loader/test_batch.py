"""What a batch contains: PyG's attributes, each with the values of the right nodes and edges."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.loader as pyg
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_scale.loader import NeighborLoader, NodeLoader
from pyg_scale.loader.batch.build import adjacency_like, build, edge_index_of
from pyg_scale.ops import colptr
from pyg_scale.sampler.base import HeteroSamplerOutput, SamplerOutput
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same, assert_same_batches

BUYS = ("user", "buys", "item")


def everything() -> Data:
    """Attributes of all kinds on one graph."""
    data = graphs.hostile()
    n, e = data.num_nodes, data.num_edges
    data.mask = torch.arange(n) % 3 == 0
    data.half = torch.randn(n, 2).half()
    data.quarter = torch.randn(n, 3).to(torch.float8_e4m3fn)
    data.array = np.arange(2.0 * n).reshape(n, 2)
    data.edge_weight = torch.rand(e)
    data.edge_array = np.arange(e)
    data.name = "a graph"
    data.number = 5
    data.graph_level = torch.tensor([1.0, 2.0, 3.0])
    return data


def assert_right(batch: Data, data: Data) -> None:
    """Nodes and edges of the batch are those of the graph that their ids say."""
    n_id, e_id = batch.n_id.long(), batch.e_id
    assert torch.equal(n_id[batch.edge_index.long()], data.edge_index.long()[:, e_id])
    for name, value in data:
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if data.is_node_attr(name):
            assert torch.equal(batch[name].to(torch.float64), value[n_id].to(torch.float64)), name
        elif data.is_edge_attr(name) and name != "edge_index":
            assert torch.equal(batch[name], value[e_id]), name


# Homogeneous ###############################################################################


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_every_attribute(index_dtype: torch.dtype) -> None:
    data = everything()
    data.edge_index = data.edge_index.to(index_dtype)
    for batch in NeighborLoader(data, [4, 3], batch_size=30, shuffle=True, num_workers=2):
        assert_right(batch, data)
        assert type(batch) is Data and type(batch.edge_index) is Tensor
        assert batch.edge_index.dtype == batch.n_id.dtype == index_dtype
        assert batch.e_id.dtype == batch.input_id.dtype == torch.int64
        assert batch.num_nodes == batch.n_id.numel()
        assert isinstance(batch.batch_size, int) and batch.batch_size == batch.input_id.numel()
        assert torch.equal(batch.n_id[: batch.batch_size].long(), batch.input_id)
        nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
        assert type(nodes) is list and len(nodes) == 3 and sum(nodes) == batch.num_nodes
        assert type(edges) is list and len(edges) == 2 and sum(edges) == batch.num_edges
        assert (batch.edge_index[1].diff() >= 0).all()
        assert (batch.name, batch.number) == ("a graph", 5)
        assert batch.graph_level is data.graph_level
        assert isinstance(batch.array, Tensor) and batch.half.dtype == torch.float16
        assert batch.quarter.dtype == torch.float8_e4m3fn
        assert "batch" not in batch and "seed_time" not in batch


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disjoint": True},
        {"subgraph_type": "bidirectional"},
        {"subgraph_type": "induced"},
        {"time_attr": "time"},
        {"time_attr": "when", "input_time": torch.full((100,), 5)},
        {"weight_attr": "weight"},
        {"input_nodes": torch.arange(100) % 2 == 0},
        {"input_nodes": [5, 5, 0, 7], "input_id": torch.tensor([50, 51, 52, 53])},
    ],
    ids=str,
)
def test_the_same_as_pygs_loader_makes_of_the_same_sample(options: dict[str, Any]) -> None:
    data = everything()
    del data.quarter  # which PyG cannot select from
    ours = NeighborLoader(data, [-1, -1], batch_size=17, **options)
    kwargs = {k: v for k, v in options.items() if k.startswith("input")}
    theirs = pyg.NodeLoader(data, ours.node_sampler, batch_size=17, **kwargs)
    assert_same_batches(theirs, ours)


@pytest.mark.parametrize(
    "options",
    [{}, {"disjoint": True}, {"time_attr": "time"}, {"subgraph_type": "bidirectional"}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:subgraph_type='bidirectional'")
def test_the_same_as_pygs_loader_makes_of_the_same_heterogeneous_sample(
    options: dict[str, Any],
) -> None:
    data = graphs.hetero()
    ours = NeighborLoader(data, [-1, -1], input_nodes="item", batch_size=5, **options)
    theirs = pyg.NodeLoader(data, ours.node_sampler, input_nodes="item", batch_size=5)
    assert_same_batches(theirs, ours)


def test_disjoint_and_temporal_batches_say_whose_seed_a_node_belongs_to() -> None:
    data = graphs.hostile()
    batch = next(iter(NeighborLoader(data, [3], batch_size=10, disjoint=True)))
    assert batch.batch[:10].tolist() == list(range(10))
    timed = NeighborLoader(
        data,
        [3],
        batch_size=10,
        time_attr="time",
        input_nodes=[4, 9],
        input_time=torch.tensor([3, 1]),
    )
    batch = next(iter(timed))
    assert batch.seed_time.tolist() == [3, 1]
    limit = batch.seed_time[batch.batch][2:]
    assert (batch.time[2:] <= limit).all()


def test_a_users_own_ids_are_kept() -> None:
    data = graphs.hostile()
    data.n_id = torch.arange(100) + 1000
    data.e_id = torch.arange(data.num_edges) + 1000
    batch = next(iter(NeighborLoader(data, [3], batch_size=10)))
    assert batch.n_id[:10].tolist() == list(range(1000, 1010))
    pairs = data.edge_index[:, batch.e_id - 1000]
    assert torch.equal(pairs, batch.n_id[batch.edge_index] - 1000)


def test_repeated_seeds_keep_their_rows() -> None:
    data = graphs.hostile()
    batch = NeighborLoader(data, [-1], batch_size=4, input_nodes=[8, 0, 8, 8])([0, 1, 2, 3])
    assert batch.n_id[:4].tolist() == [8, 0, 8, 8]
    assert batch.input_id.tolist() == [0, 1, 2, 3]
    assert_right(batch, data)
    degree = torch.bincount(batch.edge_index[1], minlength=4)[:4]
    assert degree[0] == degree[2] == degree[3] == (data.edge_index[1] == 8).sum()


def test_features_that_require_grad_stay_in_the_graph_of_autograd() -> None:
    data = graphs.hostile()
    data.x = data.x.clone().requires_grad_()
    next(iter(NeighborLoader(data, [2], batch_size=5))).x.sum().backward()
    assert data.x.grad is not None and data.x.grad.sum() > 0


def test_a_memory_mapped_array_is_read_in_place(tmp_path: Any) -> None:
    data = graphs.hostile()
    np.save(tmp_path / "x.npy", np.random.rand(100, 7))
    data.x = np.load(tmp_path / "x.npy", mmap_mode="r")
    for batch in NeighborLoader(data, [3], batch_size=50, num_workers=1):
        assert torch.equal(batch.x, torch.from_numpy(data.x[batch.n_id.numpy()]))


def test_batches_share_no_memory_with_the_data() -> None:
    data = graphs.hostile()
    before = data.clone()
    for batch in NeighborLoader(data, [-1], batch_size=100):
        for name in ("x", "y", "edge_attr", "edge_index", "n_id", "e_id"):
            batch[name].fill_(0)
    assert_same(data, before)


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
@pytest.mark.parametrize("valued", [False, True])
def test_adj_t_in_torchs_formats_stays_in_its_format(layout: str, valued: bool) -> None:
    data = graphs.hostile()
    row, col = data.edge_index
    value = torch.arange(1.0, data.num_edges + 1) if valued else torch.ones(data.num_edges)
    dense = torch.zeros(100, 100).index_put_((col, row), value, accumulate=True)
    adjacency = torch.sparse_coo_tensor(torch.stack([col, row]), value, (100, 100)).coalesce()
    if layout != "coo":
        adjacency = getattr(adjacency, f"to_sparse_{layout}")()
    sparse = Data(x=data.x, adj_t=adjacency, num_nodes=100)
    for batch in NeighborLoader(sparse, [-1], batch_size=30):
        n = batch.num_nodes
        assert batch.adj_t.layout == getattr(torch, f"sparse_{layout}")
        assert batch.adj_t.shape == (n, n)
        expected = dense[batch.n_id][:, batch.n_id]
        expected[batch.batch_size :] = 0  # one hop: only seeds have in-edges
        assert torch.equal(batch.adj_t.to_dense(), expected)
        assert "edge_index" not in batch


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_adj_t_in_torchs_formats_is_made_without_a_word_about_checks(
    layout: str, recwarn: pytest.WarningsRecorder
) -> None:
    """Parallel edges stay apart, where torch's own check is on as well."""
    col = torch.tensor([0, 0, 0, 1])
    adjacency = torch.sparse_coo_tensor(torch.stack([col, 1 - col]), torch.ones(4), (2, 2))
    if layout != "coo":
        adjacency = getattr(adjacency.coalesce(), f"to_sparse_{layout}")()
    data = Data(x=torch.zeros(2, 1), adj_t=adjacency, num_nodes=2)
    assert not torch.is_warn_always_enabled()
    try:
        torch.set_warn_always(True)
        recwarn.clear()
        batch = next(iter(NeighborLoader(data, [-1], batch_size=2)))
        said = [str(each.message) for each in recwarn]
    finally:
        torch.set_warn_always(False)
    assert not [each for each in said if "invariant" in each], said
    assert torch.equal(batch.adj_t.to_dense(), adjacency.to_dense())
    twice = torch.tensor([0, 0])
    with torch.sparse.check_sparse_tensor_invariants():
        made = adjacency_like(adjacency, 1 - twice, twice, None, (2, 2))
    assert made._nnz() == 2 and made.to_dense()[0, 1] == 2


def test_destination_pointers_are_found_by_the_edge_index() -> None:
    for workers in ({}, {"num_workers": 1}):
        for batch in NeighborLoader(graphs.hostile(), [4, 3], batch_size=20, **workers):
            known = colptr.recall(batch.edge_index)
            assert known is not None
            count = torch.bincount(batch.edge_index[1], minlength=known.numel() - 1)
            assert torch.equal(known.diff(), count)
            assert not any("ptr" in name for name, _ in batch)
    turned = NeighborLoader(graphs.hetero(), [3], input_nodes="item", batch_size=6)
    for batch in turned:
        for edge_type in batch.edge_types:
            assert colptr.recall(batch[edge_type].edge_index) is not None


def test_rows_that_lie_one_after_the_other_are_not_copied() -> None:
    whole = torch.arange(20)
    assert edge_index_of(whole[:5], whole[5:10]).data_ptr() == whole.data_ptr()
    assert edge_index_of(whole[:5], whole[5:10]).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    for row, col in (
        (whole[:5], whole[6:11]),
        (whole[5:10], whole[:5]),
        (whole[:5], torch.arange(5, 10)),
        (whole[0:10:2], whole[5:10]),
        (whole[:0], whole[:0]),
    ):
        assert torch.equal(edge_index_of(row, col), torch.stack([row, col]))


def test_what_a_sampler_adds_is_on_the_batch() -> None:
    data = graphs.hostile()
    out = SamplerOutput(
        node=torch.tensor([3, 4]),
        row=torch.tensor([0]),
        col=torch.tensor([1]),
        edge=torch.tensor([7]),
        node_attrs={"probability": torch.tensor([0.5, 1.0])},
        edge_attrs={"edge_weight": torch.tensor([2.0])},
    )
    batch = build(data, out)
    assert batch.probability.tolist() == [0.5, 1.0] and batch.edge_weight.tolist() == [2.0]
    pair = graphs.hetero()
    hetero = HeteroSamplerOutput(
        node={"user": torch.tensor([1]), "item": torch.tensor([2])},
        row={BUYS: torch.tensor([0])},
        col={BUYS: torch.tensor([0])},
        edge={BUYS: None},
        node_attrs={"probability": {"user": torch.tensor([0.5])}},
        edge_attrs={"edge_weight": {BUYS: torch.tensor([2.0])}},
    )
    made = build(pair, hetero)
    assert made["user"].probability.tolist() == [0.5]
    assert made[BUYS].edge_weight.tolist() == [2.0]
    assert "e_id" not in made[BUYS] and "weight" not in made[BUYS]
    assert made["ghost"].x.shape == (0, 4) and made["ghost"].num_nodes == 0


def test_a_samplers_original_edges_are_on_the_batch() -> None:
    out = SamplerOutput(
        node=torch.tensor([3, 4]),
        row=torch.tensor([0, 1]),
        col=torch.tensor([1, 0]),
        edge=None,
        orig_row=torch.tensor([0]),
        orig_col=torch.tensor([1]),
    )
    assert build(graphs.hostile(), out)._orig_edge_index.tolist() == [[0], [1]]


def test_a_samplers_permutation_is_applied() -> None:
    data = graphs.hostile()
    out = SamplerOutput(
        node=torch.tensor([3]),
        row=torch.tensor([0]),
        col=torch.tensor([0]),
        edge=torch.tensor([1], dtype=torch.int32),
    )
    batch = build(data, out, permutation=torch.tensor([5, 9]))
    assert batch.e_id.tolist() == [9] and batch.edge_attr.tolist() == [9]


def test_output_that_does_not_fit_the_data_is_refused() -> None:
    out = SamplerOutput(torch.tensor([0]), torch.tensor([]), torch.tensor([]), None)
    with pytest.raises(TypeError, match="SamplerOutput for a HeteroData"):
        build(graphs.hetero(), out)
    with pytest.raises(TypeError, match="HeteroSamplerOutput for a Data"):
        build(graphs.hostile(), HeteroSamplerOutput({}, {}, {}, None))
    with pytest.raises(TypeError, match="got dict"):
        build(graphs.hostile(), {})  # type: ignore[arg-type]


# Heterogeneous #############################################################################


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_every_attribute_of_every_type(index_dtype: torch.dtype) -> None:
    data = graphs.hetero(index_dtype)
    loader = NeighborLoader(
        data, [3, 2], input_nodes=("item", torch.arange(11)), batch_size=4, num_workers=2
    )
    for batch in loader:
        assert isinstance(batch, HeteroData)
        assert (batch.node_types, batch.edge_types) == (data.node_types, data.edge_types)
        for name, store in batch.node_items():
            assert torch.equal(store.x, data[name].x[store.n_id.long()])
            assert store.num_nodes == store.n_id.numel() == sum(store.num_sampled_nodes)
            assert len(store.num_sampled_nodes) == 3
        for name, store in batch.edge_items():
            source, _, destination = name
            pairs = data[name].edge_index.long()[:, store.e_id]
            assert torch.equal(batch[source].n_id.long()[store.edge_index[0].long()], pairs[0])
            assert torch.equal(batch[destination].n_id.long()[store.edge_index[1].long()], pairs[1])
            assert torch.equal(store.weight, data[name].weight[store.e_id])
            assert store.edge_index.dtype == index_dtype and len(store.num_sampled_edges) == 2
        item = batch["item"]
        assert item.batch_size == item.input_id.numel()
        assert torch.equal(item.n_id[: item.batch_size].long(), item.input_id)
        assert "batch_size" not in batch["user"] and "input_id" not in batch["user"]
        assert batch["ghost"].num_nodes == 0
        assert batch["item", "has", "tag"].edge_index.shape == (2, 0)


def test_node_loader_with_a_bound_sampler() -> None:
    data = graphs.hostile()
    sampler = NeighborLoader(data, [4]).node_sampler
    loader = NodeLoader(data, sampler, batch_size=10, seed=3)
    assert_same_batches(NeighborLoader(data, [4], batch_size=10, seed=3), loader)


@pytest.mark.parametrize("name", ["homogeneous", "heterogeneous"])
def test_pointers_go_with_a_batch_that_is_moved_or_copied(name):
    data = graphs.hostile() if name == "homogeneous" else graphs.hetero()
    kind = None if name == "homogeneous" else "item"
    loader = NeighborLoader(data, [3, 2], input_nodes=kind, batch_size=8)
    batch = next(iter(loader))
    wanted = [colptr.recall(store.edge_index) for store in batch.edge_stores]
    assert all(pointers is not None for pointers in wanted)
    for moved in (
        copy.copy(batch).to("meta"),
        batch.clone(),
        batch.clone().to("cpu"),
        batch.clone().contiguous(),
        copy.copy(batch).detach(),
        copy.copy(batch).to("meta", "edge_index"),
    ):
        for store, pointers in zip(moved.edge_stores, wanted, strict=True):
            known = colptr.recall(store.edge_index)
            assert known is not None and known.device == store.edge_index.device
            assert known.is_meta or torch.equal(known, pointers)
    # Another function may change the edges.
    other = batch.clone().apply(lambda each: each.flip(-1))
    for store in other.edge_stores:
        assert colptr.recall(store.edge_index) is None
    pickled = pickle.dumps(batch)
    assert b"pyg_scale" not in pickled  # it is read by whoever has PyG alone
    again = pickle.loads(pickled)
    assert [type(store).__name__ for store in again.edge_stores] == [
        "GlobalStorage" if kind is None else "EdgeStorage"
    ] * len(wanted)
    assert again.to_dict().keys() == batch.to_dict().keys()
    assert repr(again) == repr(batch)
