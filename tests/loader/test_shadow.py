"""Each root's subgraph is that of PyG's definition, and draws are fair and repeatable."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import SAGEConv, global_mean_pool
from torch_geometric.utils import k_hop_subgraph

from pyg_scale.loader import ShaDowKHopSampler
from pyg_scale.testing import statistics
from tests.loader.batches import assert_same, assert_same_batches

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 2},
    {"num_workers": 2, "worker_type": "process"},
    {"num_workers": 1, "worker_type": "ring"},
]


def graph(num_nodes: int = 40, num_edges: int = 130) -> Data:
    """Directed, with self-loops, parallel edges and nodes without any."""
    edge_index = torch.randint(
        num_nodes - 3, (2, num_edges), generator=torch.Generator().manual_seed(1)
    )
    edge_index[:, -3:] = edge_index[:, :3]
    return Data(
        x=torch.arange(num_nodes).view(-1, 1).float(),
        edge_index=edge_index,
        edge_attr=torch.arange(num_edges),
        y=torch.arange(num_nodes) * 10,
        name="of all",
    )


DATA = graph()


def pieces(batch: Batch) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Nodes, edges, ids of edges, and the position of the root, of each graph of a batch."""
    found = []
    for begin, end, root in zip(batch.ptr[:-1], batch.ptr[1:], batch.root_n_id):
        mine = batch.batch[batch.edge_index[0]] == batch.batch[begin]
        assert ((batch.batch[begin:end] == batch.batch[begin]).all()) and begin <= root < end
        edges = batch.edge_index[:, mine] - begin
        node = batch.x[begin:end, 0].long()
        found.append((node, edges, batch.edge_attr[mine], root - begin))
    return found


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("replace", [False, True])
def test_with_all_neighbors_equals_k_hop_subgraph(depth: int, replace: bool) -> None:
    loader = ShaDowKHopSampler(DATA, depth, -1, replace=replace, batch_size=7)
    every = [each for batch in loader for each in pieces(batch)]
    assert len(every) == 40
    for v, (node, edges, ids, root) in enumerate(every):
        expected, _, at, mask = k_hop_subgraph(v, depth, DATA.edge_index, num_nodes=40)
        assert torch.equal(node, expected) and root == at
        assert torch.equal(ids.sort().values, mask.nonzero().view(-1))
        assert torch.equal(node[edges], DATA.edge_index[:, ids])
        order = [(*pair, i) for *pair, i in zip(*edges.tolist(), ids.tolist())]
        assert order == sorted(order)


def test_batches_have_what_those_of_pyg_have() -> None:
    loader = ShaDowKHopSampler(DATA, 2, 3, batch_size=8, seed=1)
    batch = next(iter(loader))
    assert isinstance(loader, torch_geometric.loader.ShaDowKHopSampler)
    assert isinstance(batch, Batch) and batch.num_graphs == 8
    own = ["batch", "ptr", "root_n_id", "edge_index"]
    assert list(batch.to_dict()) == [*own, "x", "edge_attr", "y", "name"]
    assert batch.num_nodes == batch.x.size(0) == batch.batch.numel() == batch.ptr[-1]
    assert torch.equal(batch.y, torch.arange(8) * 10) and batch.name == "of all"
    assert torch.equal(batch.x[batch.root_n_id, 0], torch.arange(8.0))
    assert torch.equal(batch.batch[batch.root_n_id], torch.arange(8))
    assert len(loader) == 5 and torch.equal(loader.node_idx, torch.arange(40))


@pytest.mark.parametrize("replace", [False, True])
def test_sampled_subgraphs_are_induced_and_within_the_neighborhood(replace: bool) -> None:
    loader = ShaDowKHopSampler(DATA, 2, 2, replace=replace, batch_size=9, seed=4)
    smaller = 0
    for v, (node, _, ids, root) in enumerate(e for b in loader for e in pieces(b)):
        near, *_ = k_hop_subgraph(v, 2, DATA.edge_index, num_nodes=40)
        assert node[root] == v and torch.isin(node, near).all()
        inside = torch.isin(DATA.edge_index, node).all(0).nonzero().view(-1)
        assert torch.equal(ids.sort().values, inside)
        assert node.numel() <= 1 + 2 + 4
        smaller += int(node.numel() < near.numel())
    assert smaller > 10


@pytest.mark.parametrize("replace", [False, True])
def test_draws_are_unbiased(replace: bool) -> None:
    star = Data(edge_index=torch.stack([torch.arange(1, 9), torch.zeros(8).long()]), num_nodes=9)
    star.number = torch.arange(9)
    roots = torch.zeros(3_000, dtype=torch.int64)
    batch = next(iter(ShaDowKHopSampler(star, 1, 3, roots, replace, batch_size=3_000, seed=5)))
    drawn = batch.number[batch.number > 0] - 1
    count = torch.bincount(drawn, minlength=8)
    if not replace:
        statistics.require(statistics.inclusion(count, 3), "neighbours of a root")
        statistics.require(statistics.combinations(drawn.view(-1, 3), 8), "sets of neighbours")
        return
    sizes = torch.bincount(batch.ptr.diff() - 1, minlength=4)[1:]
    probability = torch.tensor([8.0, 8 * 7 * 3, 8 * 7 * 6])
    statistics.require(statistics.multinomial(sizes, probability), "numbers of different ones")
    alone = drawn[(batch.ptr.diff() == 2)[batch.batch[batch.number > 0]]]
    statistics.require(statistics.multinomial(torch.bincount(alone, minlength=8)), "neighbours")


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_batches_do_not_depend_on_workers(workers: dict[str, Any]) -> None:
    options: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seed": 3}
    alone = ShaDowKHopSampler(DATA, 2, 2, **options)
    with_workers = ShaDowKHopSampler(DATA, 2, 2, **options, **workers)
    for _ in range(2):
        assert_same_batches(alone, with_workers)
    assert_same(alone([4, 5]), with_workers([4, 5]))


@pytest.mark.parametrize("workers", [{}, *WORKERS[:2]], ids=str)
def test_resumes_in_the_middle(workers: dict[str, Any]) -> None:
    options: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seed": 3}
    whole = ShaDowKHopSampler(DATA, 2, 2, **options)
    expected = [*whole, *whole]
    first = ShaDowKHopSampler(DATA, 2, 2, **options, **workers)
    begun = list(itertools.islice(first, 3))
    second = ShaDowKHopSampler(DATA, 2, 2, **options, **workers)
    second.load_state_dict(first.state_dict())
    assert_same_batches(expected, [*begun, *second, *second])


def test_a_batch_of_no_root() -> None:
    batch = ShaDowKHopSampler(DATA, 2, 2)([])
    assert batch.num_nodes == 0 and batch.ptr.tolist() == [0] and batch.y.numel() == 0


def test_a_batch_collated_of_several_does_not_lose_where_they_begin() -> None:
    def collated(batch: Batch) -> Batch:
        return Batch.from_data_list([Data(x=batch.x), Data(x=batch.x)])

    options: dict[str, Any] = {"transform": collated, "num_workers": 1, "worker_type": "ring"}
    with pytest.raises(TypeError, match="DataBatch, which worker_type='ring' cannot"):
        next(iter(ShaDowKHopSampler(DATA, 2, 2, **options)))


def test_every_root_once_an_epoch_in_another_order_with_other_draws() -> None:
    loader = ShaDowKHopSampler(DATA, 1, 2, batch_size=6, shuffle=True, seed=3)
    orders = [torch.cat([b.x[b.root_n_id, 0] for b in loader]) for _ in range(2)]
    assert all(torch.equal(each.sort().values, torch.arange(40.0)) for each in orders)
    assert not torch.equal(*orders)


def test_roots_are_ids_or_a_mask() -> None:
    mask = torch.zeros(40, dtype=torch.bool)
    mask[[3, 8, 20]] = True
    of_mask = ShaDowKHopSampler(DATA, 1, -1, mask, batch_size=3, seed=1)
    of_ids = ShaDowKHopSampler(DATA, 1, -1, torch.tensor([3, 8, 20]), batch_size=3, seed=1)
    assert_same_batches(of_mask, of_ids)
    twice = next(iter(ShaDowKHopSampler(DATA, 2, -1, [7, 7], batch_size=2)))
    a, b = pieces(twice)
    assert all(torch.equal(x, y) for x, y in zip(a, b)) and twice.y.tolist() == [70, 70]


def test_adj_t_instead_of_edge_index() -> None:
    simple = Data(x=DATA.x, edge_index=torch.unique(DATA.edge_index, dim=1))
    col, row = simple.edge_index
    dense = torch.zeros(40, 40)
    dense[row, col] = 1
    data = Data(x=DATA.x, adj_t=dense.to_sparse_csr())
    batch = next(iter(ShaDowKHopSampler(data, 2, -1, batch_size=4)))
    other = next(iter(ShaDowKHopSampler(simple, 2, -1, batch_size=4)))
    assert "edge_index" not in batch
    found = batch.adj_t.to_dense().nonzero().t().flip(0)
    assert torch.equal(found[:, found[0].argsort(stable=True)], other.edge_index)


def test_without_features_and_with_a_feature_store() -> None:
    bare = Data(edge_index=DATA.edge_index, num_nodes=40)
    batch = next(iter(ShaDowKHopSampler(bare, 2, 3, batch_size=4, seed=1)))
    assert list(batch.to_dict()) == ["batch", "ptr", "root_n_id", "edge_index"]
    assert batch.num_nodes == batch.batch.numel()
    plain = ShaDowKHopSampler(DATA, 2, 3, batch_size=4, seed=1)
    stored = ShaDowKHopSampler(DATA, 2, 3, batch_size=4, seed=1, feature_store="memory")
    for one, other in zip(plain, stored):
        assert sorted(one.keys()) == sorted(other.keys())
        assert torch.equal(one.x, other.x) and torch.equal(one.y, other.y)
        assert torch.equal(one.edge_attr, other.edge_attr)


def test_transform_and_device_are_those_of_a_node_loader() -> None:
    def marked(batch: Batch) -> Batch:
        batch.mark = torch.rand(1)
        return batch

    options: dict[str, Any] = {"batch_size": 8, "seed": 1, "transform": marked, "device": "cpu"}
    one, other = (ShaDowKHopSampler(DATA, 2, 3, num_workers=k, **options) for k in (0, 2))
    assert_same_batches(one, other)


def test_a_loop_of_pyg_trains() -> None:
    """The loop of PyG's examples/shadow.py, with another import."""
    torch.manual_seed(0)
    conv, head = SAGEConv(1, 8), torch.nn.Linear(16, 4)
    optimizer = torch.optim.Adam([*conv.parameters(), *head.parameters()])
    loader = ShaDowKHopSampler(
        DATA, depth=2, num_neighbors=5, node_idx=DATA.y < 300, batch_size=10, num_workers=2
    )
    for data in loader:
        x = conv(data.x, data.edge_index).relu()
        x = torch.cat([x[data.root_n_id], global_mean_pool(x, data.batch)], dim=-1)
        loss = torch.nn.functional.cross_entropy(head(x), data.y % 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert bool(loss.isfinite())


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"depth": -1}, ValueError, "depth must be 0 or more"),
        ({"depth": 1.5}, TypeError, "depth must be one integer"),
        ({"num_neighbors": [5, 5]}, TypeError, "num_neighbors must be one integer.*NeighborLoader"),
        ({"num_neighbors": True}, TypeError, "num_neighbors"),
        ({"num_neighbors": -2}, ValueError, "num_neighbors must be -1 or more"),
        ({"replace": "no"}, TypeError, "replace must be True or False"),
        ({"node_idx": torch.tensor([40])}, IndexError, "node 40"),
        ({"node_idx": torch.zeros(7, dtype=torch.bool)}, ValueError, "mask of 7"),
        ({"node_idx": torch.rand(3)}, TypeError, "node_idx must be integer"),
        ({"data": HeteroData()}, NotImplementedError, "HeteroData.*NeighborLoader"),
        ({"data": DATA.edge_index}, TypeError, "data must be a Data"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], says: str) -> None:
    arguments: dict[str, Any] = {"data": DATA, "depth": 2, "num_neighbors": 3} | change
    with pytest.raises(error, match=says):
        ShaDowKHopSampler(**arguments)


def test_lists_are_passed_on_as_pyg_does() -> None:
    data = graph()
    data.names = [f"n{i}" for i in range(40)]
    batch = next(iter(ShaDowKHopSampler(data, 1, 2, batch_size=3)))
    assert batch.names == data.names


def test_wrong_roots_are_named_as_the_argument_is() -> None:
    with pytest.raises(IndexError, match="node_idx"):
        ShaDowKHopSampler(graph(), 1, 2, node_idx=torch.tensor([40]))
    mine = type("Mine", (ShaDowKHopSampler,), {"__collate__": print, "__module__": "mine"})
    with pytest.raises(NotImplementedError, match=r"Mine\.__collate__ overrides a step"):
        mine(graph(), 1, 2)
