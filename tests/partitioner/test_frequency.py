"""Placement by need, cache lists, and what is kept of the partitioner."""

from __future__ import annotations

import itertools

import pytest
import torch

from pyg_scale import save
from pyg_scale.datasets import load
from pyg_scale.partitioner import partition, quality, write_partition
from pyg_scale.partitioner.cut import assign
from pyg_scale.partitioner.frequency import FrequencyPartitioner, place
from pyg_scale.partitioner.hotness import sample_prob


def test_everyone_gets_the_part_that_needs_it_most_if_there_is_room():
    g = torch.Generator().manual_seed(0)
    need = torch.rand(3, 50, generator=g)
    ones = torch.ones(50, 1, dtype=torch.int64)
    found = place(need, ones, torch.full((3, 1), 50), torch.zeros(50, dtype=torch.int64))
    assert torch.equal(found.long(), need.argmax(0))


def test_little_room_goes_to_those_who_lose_most():
    need = torch.tensor([[0.9, 0.8, 0.7, 0.1], [0.1, 0.7, 0.0, 0.0]])
    capacity = torch.tensor([[2], [2]])
    found = place(need, torch.ones(4, 1).long(), capacity, torch.zeros(4, dtype=torch.int64))
    assert found.tolist() == [0, 1, 0, 1]
    best = max(  # of all ways
        sum(float(need[p, v]) for v, p in enumerate(way))
        for way in itertools.product((0, 1), repeat=4)
        if sum(way) == 2
    )
    assert sum(float(need[p, v]) for v, p in enumerate(found.tolist())) == pytest.approx(best)


def test_equal_needs_leave_nodes_where_they_were():
    initial = torch.arange(40) % 4
    need = torch.zeros(4, 40)
    found = place(need, torch.ones(40, 1).long(), torch.full((4, 1), 10), initial)
    assert torch.equal(found.long(), initial)


def test_room_holds_in_every_column():
    g = torch.Generator().manual_seed(1)
    weights = torch.stack([torch.ones(200).long(), torch.randint(0, 9, (200,), generator=g)], 1)
    capacity = (weights.sum(0) * 1.2 / 4).ceil().long().expand(4, 2)
    found = place(torch.rand(4, 200, generator=g), weights, capacity, torch.zeros(200).long())
    held = torch.zeros(4, 2, dtype=torch.int64).index_add_(0, found.long(), weights)
    assert (held <= capacity).all()


def test_what_fits_nowhere_is_placed_all_the_same():
    weights = torch.tensor([[5], [5], [5]])
    found = place(torch.zeros(2, 3), weights, torch.tensor([[6], [6]]), torch.zeros(3).long())
    assert sorted(torch.bincount(found).tolist()) == [1, 2]


def test_features_are_nearer_than_with_the_parts_it_began_with(data_dir):
    data = load(data_dir / "dblp.npz")
    options = {"num_neighbors": [10, 5], "batch_size": 64, "num_batches": 30}
    before, _ = assign(data, 4, "random")
    after, _ = assign(data, 4, "frequency", options={"initial": "random", "num_neighbors": [10, 5]})
    found = [quality(data, each, **options) for each in (before, after)]
    assert found[1].remote.per_batch < 0.7 * found[0].remote.per_batch
    assert found[1].node_balance <= 1.1


def test_cache_lists_hold_the_hottest_nodes_of_others(data_dir, tmp_path):
    data = load(data_dir / "facebook_pages.npz")
    del data.x
    save(data, tmp_path / "g")
    found, _ = assign(data, 3, "frequency", options={"cache_ratio": 0.05, "num_neighbors": [5, 5]})
    part, size = found.assignment[None], int(0.05 * data.num_nodes)
    for number, ids in enumerate(found.cache[None]):
        assert ids.numel() == ids.unique().numel() == size
        assert (part[ids] != number).all()
    numbers = {"num_neighbors": [5, 5], "batch_size": 256, "num_batches": 12}
    hot = quality(data, found, cache=found.cache, **numbers).remote
    g = torch.Generator().manual_seed(0)
    lists = [torch.randperm(data.num_nodes, generator=g)[:size] for _ in range(3)]
    any_ = quality(data, found, cache={None: lists}, **numbers).remote
    assert hot.cached > 4 * any_.cached
    written = write_partition(tmp_path / "g", found, tmp_path / "p")
    for number in range(3):
        assert torch.equal(written.part(number).cache(None), found.cache[None][number])
    assert written.meta.partition.extra["num_neighbors"] == [5, 5]
    assert written.meta.partition.options["cache_ratio"] == 0.05


def test_the_hottest_are_those_of_sample_prob(data_dir):
    data = load(data_dir / "cora.npz")
    options = {"cache_ratio": 0.02, "num_neighbors": [4], "initial": "range"}
    found, _ = assign(data, 2, "frequency", options=options)
    train = data.train_mask.nonzero().view(-1)
    half = train[train < data.num_nodes / 2]  # of part 0, to begin with
    need = sample_prob(data, half, [4], batch_size=1024, method="propagate")[None].float()
    need[found.assignment[None] == 0] = 0
    listed = found.cache[None][0]
    assert torch.equal(need[listed], need.sort(descending=True).values[: listed.numel()])
    assert listed.numel() <= int(0.02 * data.num_nodes)


def test_partition_writes_the_lists(tmp_path, data_dir):
    data = load(data_dir / "cora.npz")
    save(data, tmp_path / "g")
    part = partition(
        tmp_path / "g", 2, "frequency", tmp_path / "p", cache_ratio=0.1, num_neighbors=[3]
    )
    again = partition(data, 2, FrequencyPartitioner(cache_ratio=0.1, num_neighbors=[3]))
    assert torch.equal(part, again)
    assert sorted(p.name for p in (tmp_path / "p" / "part-1" / "nodes").iterdir()) == [
        "attributes",
        "cache.npy",
        "halo.npy",
        "orig_id.npy",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_ratio": 1.5}, "cache_ratio"),
        ({"probabilities": "guess"}, "'propagate'"),
        ({"batch_size": 0}, "batch_size"),
        ({"num_neighbors": [5, -2]}, "num_neighbors"),
        ({"num_neighbors": [5.0]}, "num_neighbors"),
        ({"max_imbalance": 0.9}, "max_imbalance"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        FrequencyPartitioner(**options)
