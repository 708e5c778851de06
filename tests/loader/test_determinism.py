"""The same batches whoever makes them, and others where they should be others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Sampler, WeightedRandomSampler
from torch_geometric.data import Data
from torch_geometric.loader import ImbalancedSampler
from torch_geometric.sampler import BaseSampler, SamplerOutput

from pyg_scale.loader import NeighborLoader
from pyg_scale.loader.seeds.epoch import (
    BatchIndex,
    EqualNumbers,
    batches,
    call_key,
    listed_order,
    order,
)
from pyg_scale.ops import keys
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same, assert_same_batches

pytestmark = pytest.mark.matrix(2)

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 3, "prefetch_factor": 1},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "filter_per_worker": False},
    {"num_workers": 2, "worker_type": "process"},
    {"num_workers": 2, "worker_type": "process", "filter_per_worker": False},
]


def noisy(data: Data) -> Data:
    """A transform that draws from every generator there is."""
    data.noise = torch.rand(3)
    data.numpy_noise = float(np.random.rand())
    data.python_noise = random.random()
    return data


def loader(data: Any = None, **kwargs: Any) -> NeighborLoader:
    kwargs = {"num_neighbors": [4, 3], "batch_size": 9, "shuffle": True, "seed": 5} | kwargs
    return NeighborLoader(graphs.hostile() if data is None else data, **kwargs)


class OneRandomNeighbor(BaseSampler):
    """Seeds and one random node, without edges; knows nothing of keys."""

    def sample_from_nodes(self, index: Any, **kwargs: Any) -> SamplerOutput:
        node = torch.cat([index.node, torch.randint(100, (1,))])
        none = torch.empty(0, dtype=torch.int64)
        return SamplerOutput(node, none, none, none, metadata=(index.input_id, index.time))

    def sample_from_edges(self, index: Any, **kwargs: Any) -> SamplerOutput:
        raise NotImplementedError


# Whoever makes them ########################################################################


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("transform", [None, noisy])
def test_any_number_and_type_of_workers(workers: dict[str, Any], transform: Any) -> None:
    if transform is not None and workers.get("prefetch_factor"):
        pytest.skip("covered without a transform")
    expected, found = loader(transform=transform), loader(transform=transform, **workers)
    for _ in range(2):  # two epochs, which differ
        assert_same_batches(expected, found)


def test_the_seed_of_torch_decides_for_any_number_and_type_of_workers() -> None:
    runs, following = [], []
    for workers in [{}, *WORKERS]:
        unseeded = loader(seed=None, **workers)
        torch.manual_seed(3)
        runs.append([batch for _ in range(2) for batch in unseeded])
        following.append(int(torch.randint(10**9, ())))
    for run in runs[1:]:
        assert_same_batches(runs[0], run)
    assert len(set(following)) == 1  # and as much was taken from the generator


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads_in_the_ops(threads: int) -> None:
    before = torch.get_num_threads()
    expected = list(loader(batch_size=50))
    torch.set_num_threads(threads)
    try:
        assert_same_batches(expected, loader(batch_size=50))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["native", "reference"])
def test_any_implementation_of_the_sampler(name: str) -> None:
    assert_same_batches(loader(), loader(neighbor_sampler=name))


def test_two_iterators_at_once() -> None:
    for workers in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        expected = loader()
        epochs = [list(expected), list(expected)]
        both = loader(**workers)
        left, right = iter(both), iter(both)
        pairs = list(zip(left, right))
        assert_same_batches(epochs[0], [a for a, _ in pairs])
        assert_same_batches(epochs[1], [b for _, b in pairs])


def test_users_own_samplers_decide_which_seeds_and_the_position_which_draws() -> None:
    own = [[3, 3, 7], [0], [99, 5]]
    expected = list(loader(batch_size=1, shuffle=False, batch_sampler=own))
    for workers in WORKERS:
        found = loader(batch_size=1, shuffle=False, batch_sampler=own, **workers)
        assert_same_batches(expected, found)
    assert [b.input_id.tolist() for b in expected] == own


def test_a_foreign_sampler_gets_torch_seeded_from_the_key() -> None:
    data = graphs.hostile()
    runs = [
        loader(data, neighbor_sampler=OneRandomNeighbor(), **workers)
        for workers in ({}, {"num_workers": 2})
    ]
    assert [run.worker_type for run in runs] == ["process", "process"]
    state = torch.get_rng_state()
    batches_ = list(runs[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_batches(batches_, runs[1])
    assert len({int(b.n_id[-1]) for b in batches_}) > 1


# Where they should be others ###############################################################


def test_epochs_differ_and_count_up() -> None:
    counting = loader()
    assert counting.epoch == 0
    first, second = list(counting), list(counting)
    assert counting.epoch == 2
    assert first[0].input_id.tolist() != second[0].input_id.tolist()
    fresh = loader()
    fresh.set_epoch(1)
    assert_same_batches(fresh, second)


def test_a_pinned_epoch_repeats_until_another_one_is_said() -> None:
    validation = loader()
    validation.set_epoch(0)
    first = list(validation)
    assert_same_batches(first, validation)
    assert_same_batches(first, validation)
    validation.set_epoch(1)
    assert next(iter(validation)).input_id.tolist() != first[0].input_id.tolist()


def test_unseeded_epochs_differ_and_do_not_depend_on_earlier_use() -> None:
    used, fresh = loader(seed=None), loader(seed=None)
    list(used)
    torch.manual_seed(0)
    a = list(used)
    b = list(used)
    torch.manual_seed(0)
    assert_same_batches(fresh, a)
    assert a[0].input_id.tolist() != b[0].input_id.tolist()


def test_a_generator_takes_the_place_of_torchs_default_one() -> None:
    state = torch.get_rng_state()
    a = list(loader(seed=None, generator=torch.Generator().manual_seed(1)))
    b = list(loader(seed=None, generator=torch.Generator().manual_seed(1), num_workers=2))
    c = list(loader(seed=None, generator=torch.Generator().manual_seed(2)))
    assert_same_batches(a, b)
    assert a[0].input_id.tolist() != c[0].input_id.tolist()
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_differ() -> None:
    a, b = loader(seed=1, shuffle=False), loader(seed=2, shuffle=False)
    assert any(p.n_id.tolist() != q.n_id.tolist() for p, q in zip(a, b))


def test_batches_of_an_epoch_have_keys_of_their_own() -> None:
    same_seeds = [[0]] * 6  # a hub with 60 in-edges
    drawn = [
        tuple(b.n_id.tolist())
        for b in loader(batch_size=1, shuffle=False, batch_sampler=same_seeds)
    ]
    assert len(set(drawn)) > 1


# The parts #################################################################################


def cut(num_seeds: int, batch_size: int | None, drop_last: bool = False) -> EqualNumbers:
    return EqualNumbers(num_seeds, batch_size, drop_last=drop_last, shuffle=True)


def test_the_formulas_of_the_documentation() -> None:
    n, seed, epoch = 50, 9, 4
    hashes = [keys.fold(keys.fold(0, seed, epoch, keys.SHUFFLE), i) >> 1 for i in range(n)]
    expected = sorted(range(n), key=lambda i: (hashes[i], i))
    assert listed_order(n, seed, epoch).tolist() == expected
    made = list(batches(cut(n, 8), seed=seed, epoch=epoch))
    assert [i for b in made for i in b.index.tolist()] == expected
    assert [b.key for b in made] == [keys.fold(0, seed, epoch, b) for b in range(7)]
    index = torch.tensor([4, 4, 1])
    base = keys.fold(0, seed, keys.CALL)
    total = sum(keys.fold(base, p, i) for p, i in enumerate([4, 4, 1])) % 2**64
    assert call_key(seed, index) == keys.fold(base, 3, total)


def test_batches_are_a_pure_function_of_the_position() -> None:
    arguments: dict[str, Any] = {"seed": 1, "epoch": 2}
    everything = list(batches(cut(23, 4), **arguments))
    for start in range(8):
        rest = list(batches(cut(23, 4), start=start, **arguments))
        assert [(b.position, b.key) for b in rest] == [
            (b.position, b.key) for b in everything[start:]
        ]
        assert [b.index.tolist() for b in rest] == [b.index.tolist() for b in everything[start:]]
    assert len(list(batches(cut(23, 4, drop_last=True), **arguments))) == 5
    assert len(list(batches(cut(3, None), **arguments))) == 3
    assert list(batches(cut(0, 4), **arguments)) == []


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("num_seeds", "size"), [(1, 1), (64, 1), (65, 1), (321, 5), (1_000, 20_000), (40_000, 16_385)]
)
def test_batches_are_slices_of_the_order(num_seeds, size, drop_last, listed, monkeypatch) -> None:
    monkeypatch.setattr("pyg_scale.loader.seeds.epoch.LISTED", num_seeds if listed else 0)
    key = keys.fold(0, 7, 3, keys.SHUFFLE)
    if listed:
        wanted = keys.permutation(key, num_seeds)
    else:
        wanted = keys.permuted(key, num_seeds, torch.arange(num_seeds))
    numbers = cut(num_seeds, size, drop_last)
    assert numbers.count == (num_seeds // size if drop_last else -(-num_seeds // size))
    seeds = numbers.of_epoch(7, 3) if numbers.count else None
    for number in random.Random(1).choices(range(numbers.count), k=200) if seeds else ():
        assert torch.equal(seeds(number), wanted[number * size : (number + 1) * size])


def test_every_order_is_about_as_likely() -> None:
    from scipy.stats import chisquare

    count = [0] * 24
    for seed in range(2400):
        a, b, c, _ = order(4, seed, 0).between(0, 4).tolist()
        rest = sorted({0, 1, 2, 3} - {a})
        count[a * 6 + rest.index(b) * 2 + int(c > min(set(rest) - {b}))] += 1
    assert chisquare(count).pvalue > 1e-4


def test_a_call_is_a_function_of_the_seed_and_its_seeds() -> None:
    seeded = loader()
    assert_same(seeded([1, 2]), seeded(torch.tensor([1, 2])))
    assert_same(seeded([1, 2]), loader()([1, 2]))
    assert seeded([2, 1]).input_id.tolist() == [2, 1]
    keyed = {seeded._keyed(i).key for i in ([1, 2], [2, 1], [1], [1, 2, 2], [])}
    assert len(keyed) == 5
    unseeded = loader(seed=None)
    torch.manual_seed(0)
    a, b = unseeded([0, 7]), unseeded([0, 7])
    torch.manual_seed(0)
    assert_same(unseeded([0, 7]), a)
    assert a.n_id.tolist() != b.n_id.tolist()


def test_transforms_leave_the_generators_as_they_were() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    list(loader(transform=noisy))
    list(loader(transform=noisy, num_workers=2))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_batches_have_noise_of_their_own() -> None:
    noise = [b.noise[0].item() for b in loader(transform=noisy)]
    assert len(set(noise)) == len(noise)


def test_torchs_samplers_give_the_seeds_that_they_give_in_pygs_loader() -> None:
    data = graphs.hostile()
    torch.manual_seed(7)
    torch.empty((), dtype=torch.int64).random_()  # torch's loader draws the seed of its workers
    expected = [i for batch in BatchSampler(ImbalancedSampler(data), 9, False) for i in batch]
    torch.manual_seed(7)
    found = loader(data, seed=None, shuffle=False, sampler=ImbalancedSampler(data))
    assert [i for b in found for i in b.input_id.tolist()] == expected


def test_an_index_travels_without_its_storage() -> None:
    import pickle

    whole = torch.arange(100_000)
    index = BatchIndex(whole[5:8], 2**64 - 1, 3, 4)
    sent = pickle.dumps(index)
    again = pickle.loads(sent)
    assert len(sent) < 1000
    assert (again.index.tolist(), again.key, again.position, again.epoch) == (
        [5, 6, 7],
        2**64 - 1,
        3,
        4,
    )


def test_samplers_with_repeats() -> None:
    weights = [1.0] * 5 + [0.0] * 95
    drawn = list(loader(shuffle=False, sampler=WeightedRandomSampler(weights, 60)))
    assert sum(b.batch_size for b in drawn) == 60
    assert {i for b in drawn for i in b.input_id.tolist()} <= set(range(5))
    for b in drawn:
        assert b.n_id[: b.batch_size].tolist() == b.input_id.tolist()


class Counting(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([-1, 0, 99])

    def __len__(self) -> int:
        return 3


def test_negative_positions_count_from_the_end_as_in_torch() -> None:
    batch = next(iter(loader(shuffle=False, sampler=Counting())))
    assert batch.input_id.tolist() == [99, 0, 99]
