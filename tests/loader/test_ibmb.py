"""Influence-based batches: PyG's functions give the same groups, and batches are PyG's."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import ibmb_loader as theirs
from torch_geometric.utils import to_dense_adj

from pyg_scale.comm.base import Communicator
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import IBMBBatchLoader, IBMBNodeLoader, ibmb
from pyg_scale.loader.induced import Grouped
from pyg_scale.partitioner import partition
from pyg_scale.sampler import ppr
from tests.loader.batches import assert_same_batches
from tests.loader.ranks import on_ranks

DATA = planted_communities(300, 2400, 4, 5, seed=3)
NODES = DATA.train_mask.nonzero().view(-1)[:80]


class Dense:
    """What PyG's functions ask of a SparseTensor, of a dense matrix."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix

    def __matmul__(self, other: torch.Tensor) -> torch.Tensor:
        return self.matrix @ other.to(self.matrix.dtype)

    def size(self, dim: int) -> int:
        return self.matrix.size(dim)

    def device(self) -> torch.device:
        return self.matrix.device

    def to(self, device: torch.device) -> Dense:
        return self


def by_batch(**kwargs: Any) -> IBMBBatchLoader:
    options = {"batch_order": "rand", "num_partitions": 6, "input_nodes": NODES}
    return IBMBBatchLoader(DATA, **{**options, "method": "multilevel", "seed": 1, **kwargs})


def by_node(**kwargs: Any) -> IBMBNodeLoader:
    options = {"batch_order": "rand", "input_nodes": NODES, "num_auxiliary_nodes": 8}
    return IBMBNodeLoader(DATA, **{**options, "num_nodes_per_batch": 12, "seed": 1, **kwargs})


MAKE = pytest.mark.parametrize("make", [by_batch, by_node])


@pytest.mark.filterwarnings("error")
def test_making_groups_warns_of_nothing() -> None:
    by_batch()
    by_node()


def test_groups_of_parts_are_pygs() -> None:
    cluster = partition(Data(edge_index=DATA.edge_index, num_nodes=300), 6, "multilevel")
    parts = [(cluster == number).nonzero().view(-1) for number in range(6)]
    adj = to_dense_adj(DATA.edge_index, max_num_nodes=300)[0].double()
    adj = Dense(adj / adj.sum(0).clamp(min=1e-12)[:, None])
    expected = theirs.create_batchwise_out_aux_pairs(adj, parts, NODES, math.ceil(1.5 * 300 / 6))
    own = by_batch(batch_expand_ratio=1.5)._pairs
    assert len(own) == len(expected)
    for (out, around), (their_out, their_around) in zip(own, expected, strict=True):
        assert out.tolist() == their_out.tolist()
        assert around.tolist() == their_around.tolist()


def test_groups_of_near_nodes_are_pygs() -> None:
    found = ppr(DATA.edge_index, NODES, 300, 0.2, 1e-7, num_nodes=300)
    matrix = torch.zeros(80, 300, dtype=torch.float64)
    rows = torch.arange(80)[:, None].expand_as(found.node)
    matrix[rows[found.node >= 0], found.node[found.node >= 0]] = found.score[found.node >= 0]
    among = matrix[:, NODES]
    together = torch.tril(among + among.t(), -1)
    row, col = together.nonzero().unbind(1)
    order = together[row, col].argsort(descending=True, stable=True)
    pairs = torch.stack([row, col], 1)[order].numpy()
    merged = theirs._prime_orient_merge(pairs, 12, 80)
    expected = theirs.prime_post_process([[int(n) for n in each] for each in merged], 12)
    own = ibmb.near_each_other(found, NODES, 12)
    assert [sorted(each) for each in own] == [sorted(each) for each in expected]
    assert sorted(itertools.chain(*own)) == list(range(80))
    assert max(map(len, own)) <= 12


def test_a_node_has_its_best_others() -> None:
    found = ppr(DATA.edge_index, NODES, 12, 0.2, 1e-5, num_nodes=300)
    best = dict(zip(NODES.tolist(), found.node[:, :8].tolist(), strict=True))
    for out, around in by_node()._pairs:
        expected = {node for each in out.tolist() for node in [each, *best[each]]} - {-1}
        assert around.tolist() == sorted(expected)


@MAKE
@pytest.mark.parametrize("batch_size", [1, 2])
def test_batches_are_pygs(make: Any, batch_size: int) -> None:
    """Of the same groups: nodes, edges in their order, features, labels, and the mask."""
    own = make(batch_size=batch_size, batch_order="order")
    pairs, order = own._pairs, own._order(0, 0)
    for number, batch in enumerate(own):
        mine = [pairs[i] for i in order[number * batch_size :][:batch_size].tolist()]
        nodes = torch.cat([around for _, around in mine]).unique()
        outputs = torch.cat([out for out, _ in mine])
        expected = theirs.get_subgraph(nodes, DATA, "edge_index", None)
        for name in ("x", "y", "edge_index"):
            assert torch.equal(batch[name], expected[name]), name
        assert nodes[batch.output_node_mask].tolist() == outputs.sort().values.tolist()
        assert batch.num_nodes == nodes.numel()
    assert number + 1 == len(own)


@MAKE
@pytest.mark.parametrize("batch_order", ["rand", "sample", "order"])
def test_every_output_node_comes_once(make: Any, batch_order: str) -> None:
    own = make(batch_order=batch_order, batch_size=2, num_workers=2)
    epochs = [list(own) for _ in range(2)]
    for epoch in epochs:
        seen = torch.cat([batch.community[batch.output_node_mask] for batch in epoch])
        assert sum(int(batch.output_node_mask.sum()) for batch in epoch) == 80
        assert torch.equal(seen.bincount(), DATA.community[NODES].bincount())
    same = [batch.num_nodes for batch in epochs[0]] == [batch.num_nodes for batch in epochs[1]]
    assert same == (batch_order == "order")
    assert_same_batches(epochs[0], make(batch_order=batch_order, batch_size=2))


@MAKE
def test_ranks_share_the_groups_of_a_step(make: Any) -> None:
    """A rank without a group in a step has an empty batch in it."""

    def work(comm: Communicator) -> list[Data]:
        return list(make(batch_size=2, split_batches=True, comm=comm))

    found, alone = on_ranks(3, work), list(make(batch_size=2))
    assert [len(each) for each in found] == [len(alone)] * 3
    for step, (whole, *pieces) in enumerate(zip(alone, *found, strict=True)):
        outputs = [batch.community[batch.output_node_mask] for batch in pieces]
        expected = whole.community[whole.output_node_mask]
        assert torch.equal(torch.cat(outputs).bincount(), expected.bincount()), step
        assert pieces[2].num_nodes == pieces[2].num_edges == 0
        assert pieces[2].x.shape == (0, DATA.x.size(1))


@MAKE
@pytest.mark.parametrize("batch_order", ["rand", "sample", "order"])
def test_resumes(make: Any, batch_order: str) -> None:
    own, resumed = (make(batch_order=batch_order) for _ in range(2))
    batches = list(own)
    own.load_state_dict(resumed.state_dict())
    for number, _ in enumerate(itertools.islice(own, 3), start=1):
        resumed.load_state_dict(own.state_dict())
        assert_same_batches(batches[number:], resumed)
    other = make(batch_order="rand" if batch_order != "rand" else "order")
    with pytest.raises(ValueError, match="batch_order"):
        other.load_state_dict(own.state_dict())


def test_distances_are_pygs() -> None:
    labels = [DATA.y[out] for out, _ in by_node()._pairs]
    expected = theirs.get_pair_wise_distance([y.numpy() for y in labels], int(DATA.y.max()) + 1)
    found = ibmb.label_distances(labels)
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-9, atol=1e-12)


def test_a_short_tour_is_the_shortest_on_a_line() -> None:
    place = torch.randperm(40, generator=torch.Generator().manual_seed(0)).double()
    distance = (place[:, None] - place[None, :]).abs()
    tour = ibmb.short_tour(distance)
    assert tour.sort().values.tolist() == list(range(40))
    assert float(distance[tour, tour.roll(-1)].sum()) == 2 * 39  # there and back
    random = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert float(distance[random, random.roll(-1)].sum()) > 4 * 39


def test_the_next_batch_is_drawn_by_its_distance() -> None:
    weight = torch.tensor([[0, 3, 1], [3, 0, 1], [1, 1, 0]])
    counts = torch.zeros(3, 3)
    for key in range(1000):
        tour = ibmb.drawn_tour(weight, key).tolist()
        assert sorted(tour) == [0, 1, 2]
        counts[tour[0], tour[1]] += 1
    first = counts.sum(1)
    assert ((first - 1000 / 3).abs() < 4 * (1000 * 2 / 9) ** 0.5).all()
    for start, following, p in ((0, 1, 3 / 4), (1, 0, 3 / 4), (2, 0, 1 / 2)):
        n = first[start]
        assert abs(counts[start, following] - n * p) < 4 * (n * p * (1 - p)) ** 0.5


def test_equal_scores_prefer_smaller_ids() -> None:
    star = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 0, 0, 0, 0]])
    (found,) = ibmb.most_influential(Grouped.of(star, 5), [torch.tensor([0])], 3, 0.2, 50)
    assert found.tolist() == [0, 1, 2]
    lonely = Grouped.of(star, 6)
    assert ibmb.most_influential(lonely, [torch.tensor([5])], 3, 0.2, 9)[0].tolist() == [5]


def test_parts_without_output_nodes_give_no_batch() -> None:
    assert len(by_batch(num_partitions=150, batch_size=1)) < 150
    assert len(by_batch(input_nodes=NODES[:1])) == 1


HETERO = HeteroData()
DIRECTED = Data(edge_index=torch.tensor([[0], [1]]), y=torch.zeros(2, dtype=torch.int64))
NO_LABELS = Data(edge_index=DATA.edge_index, num_nodes=300)


@MAKE
@pytest.mark.parametrize(
    ("data", "changes", "error", "message"),
    [
        (HETERO, {}, NotImplementedError, "HeteroData"),
        (DIRECTED, {"input_nodes": torch.tensor([0])}, ValueError, "both directions"),
        (NO_LABELS, {"batch_order": "order"}, ValueError, "no y"),
        (DATA, {"batch_order": "random"}, ValueError, "batch_order"),
        (DATA, {"return_edge_index_type": "adj"}, NotImplementedError, "ToSparseTensor"),
        (DATA, {"shuffle": True}, ValueError, "shuffle"),
        (DATA, {"input_nodes": torch.tensor([300])}, IndexError, "300"),
        (DATA, {"input_nodes": NODES[:0]}, ValueError, "no nodes"),
        (DATA, {"transform": print}, NotImplementedError, "transform"),
        (DATA, {"alpha": 1.5}, ValueError, "alpha"),
    ],
    ids=lambda value: "" if isinstance(value, Data | HeteroData) else None,
)
def test_what_is_refused(
    make: Any, data: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    kind = IBMBBatchLoader if make is by_batch else IBMBNodeLoader
    options: dict[str, Any] = {"batch_order": "rand", "input_nodes": NODES}
    extra = {"num_partitions": 2} if make is by_batch else {}
    if make is by_node:
        extra = {"num_auxiliary_nodes": 4, "num_nodes_per_batch": 4}
    with pytest.raises(error, match=message):
        kind(data, **{**options, **extra, **changes})


def test_numbers_that_are_refused() -> None:
    for name in ("num_auxiliary_nodes", "num_nodes_per_batch"):
        with pytest.raises(ValueError, match=name):
            by_node(**{name: 0})
    with pytest.raises(ValueError, match="approximate_ppr_iterations"):
        by_batch(approximate_ppr_iterations=0)
    with pytest.raises(NotImplementedError, match="metis_input_node_weight"):
        by_batch(metis_input_node_weight=2.0)
    with pytest.raises(ValueError, match="batch_expand_ratio"):
        by_batch(batch_expand_ratio=0)


@pytest.mark.parametrize("order", ["rand", "order", "sample"])
def test_loaders_can_be_pickled(order: str) -> None:
    """As processes that are spawned need."""
    whole = IBMBNodeLoader(DATA, order, NODES, 6, 10, seed=3)
    assert_same_batches(whole, pickle.loads(pickle.dumps(whole)))
