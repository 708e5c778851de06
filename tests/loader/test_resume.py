"""Interrupted and resumed, an epoch and all after it are as if nothing had happened."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch_geometric.loader import ImbalancedSampler

from pyg_scale.loader import NeighborLoader
from pyg_scale.testing import graphs
from tests.loader.batches import assert_same_batches

pytestmark = pytest.mark.matrix(3)

DATA = graphs.hostile()
WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "worker_type": "process"},
    {"num_workers": 2, "persistent_workers": True},
]


def loader(**kwargs: Any) -> NeighborLoader:
    kwargs = {"num_neighbors": [4, 3], "batch_size": 9} | kwargs
    return NeighborLoader(DATA, **kwargs)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Stateful(Sampler[int]):
    """Draws from a generator that nobody else sees, and can say where it is."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(3)
        self.left = 0

    def __iter__(self) -> Iterator[int]:
        self.left = self.left or 40
        while self.left:
            self.left -= 1
            yield int(torch.randint(100, (), generator=self.random))

    def __len__(self) -> int:
        return 40

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.get_state(), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.set_state(state["random"])
        self.left = state["left"]


class OwnGenerator(Sampler[list[int]]):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[list[int]]:
        for size in (3, 1, 4, 1, 5, 9, 2, 6):
            yield torch.randint(100, (size,), generator=self.generator).tolist()

    def __len__(self) -> int:
        return 8


ORDERS: dict[str, Any] = {
    "in order": lambda: {"seed": 1},
    "shuffled": lambda: {"seed": 1, "shuffle": True},
    "drop_last": lambda: {"seed": 1, "shuffle": True, "drop_last": True},
    "no seed": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": generator(5)},
    "one by one": lambda: {"seed": 1, "shuffle": True, "batch_size": None},
    "RandomSampler": lambda: {"seed": 1, "sampler": RandomSampler(range(100))},
    "with its generator": lambda: {
        "sampler": RandomSampler(range(100), generator=generator(3)),
    },
    "with that of the loader": lambda: (
        lambda g: {"sampler": RandomSampler(range(100), generator=g), "generator": g}
    )(generator(3)),
    "with replacement": lambda: {
        "seed": 1,
        "sampler": RandomSampler(range(100), replacement=True, num_samples=80),
    },
    "WeightedRandomSampler": lambda: {
        "sampler": WeightedRandomSampler(torch.arange(100.0), 70),
    },
    "ImbalancedSampler": lambda: {"sampler": ImbalancedSampler(DATA)},
    "SubsetRandomSampler": lambda: {"sampler": SubsetRandomSampler(range(5, 60))},
    "DistributedSampler": lambda: {
        "seed": 1,
        "sampler": DistributedSampler(range(100), num_replicas=2, rank=1),
    },
    "batch_sampler": lambda: {
        "batch_size": 1,
        "batch_sampler": BatchSampler(RandomSampler(range(100)), 7, True),
    },
    "list": lambda: {"batch_size": 1, "batch_sampler": [[1, 2], [3], [3, 3], [50], [4]]},
    "SequentialSampler": lambda: {"sampler": SequentialSampler(range(100))},
    "state_dict": lambda: {"sampler": Stateful()},
    "own generator": lambda: {"batch_size": 1, "batch_sampler": OwnGenerator()},
}


def take(source: Any, count: int) -> tuple[list[Any], Iterator[Any]]:
    iterator = iter(source)
    return list(itertools.islice(iterator, count)), iterator


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("delivered", [0, 1, 3])
def test_resumed_in_the_middle(order: str, delivered: int) -> None:
    torch.manual_seed(11)
    original = loader(**ORDERS[order](), num_workers=2)
    list(original)  # an epoch before
    first, iterator = take(original, delivered)
    state = pickle.loads(pickle.dumps(original.state_dict()))
    random_state = torch.get_rng_state()  # what a training script saves besides
    expected = [*iterator, *original]

    torch.manual_seed(99)
    resumed = loader(**ORDERS[order]())
    resumed.load_state_dict(state)
    torch.set_rng_state(random_state)
    assert_same_batches(expected, [*resumed, *resumed])
    assert len(first) == delivered


@pytest.mark.parametrize("before", WORKERS, ids=str)
@pytest.mark.parametrize("after", WORKERS, ids=str)
def test_with_other_workers(before: dict[str, Any], after: dict[str, Any]) -> None:
    kwargs: dict[str, Any] = {"seed": 1, "shuffle": True}
    original = loader(**kwargs, **before)
    _, iterator = take(original, 2)
    state = original.state_dict()
    assert state["delivered"] == 2  # though workers are ahead
    expected = list(iterator)
    resumed = loader(**kwargs, **after)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert_same_batches(expected, resumed)


def test_a_state_is_a_few_integers_that_torch_can_store() -> None:
    original = loader(seed=1, shuffle=True, num_workers=2)
    take(original, 2)
    state = original.state_dict()
    assert all(isinstance(value, int) for value in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


def test_between_epochs_the_next_one_is_next() -> None:
    original = loader(seed=1, shuffle=True)
    list(original)
    state = original.state_dict()
    assert (state["epoch"], state["delivered"]) == (1, 0)
    resumed = loader(seed=1, shuffle=True)
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    assert_same_batches(original, resumed)


def test_after_the_last_batch_the_rest_of_the_epoch_is_empty() -> None:
    original = loader(seed=1)
    got, _ = take(original, len(original))  # without seeing the end
    resumed = loader(seed=1)
    resumed.load_state_dict(original.state_dict())
    assert list(resumed) == []
    assert resumed.epoch == 1
    assert len(list(resumed)) == len(got)


def test_a_failed_batch_was_not_delivered() -> None:
    def fail(data: Any) -> Any:
        if data.input_id[0] == 27:
            raise LookupError("broken on purpose")
        return data

    original = loader(seed=1, transform=fail, num_workers=2)
    with pytest.raises(LookupError):
        list(original)
    state = original.state_dict()
    assert state["delivered"] == 3
    resumed = loader(seed=1)
    resumed.load_state_dict(state)
    assert_same_batches(list(loader(seed=1))[3:], resumed)


def test_set_epoch_as_training_scripts_call_it() -> None:
    def epoch(source: NeighborLoader, number: int) -> Iterator[Any]:
        source.set_epoch(number)
        return iter(source)

    original = loader(seed=1, shuffle=True)
    list(epoch(original, 0))
    iterator = epoch(original, 1)
    next(iterator)
    state = original.state_dict()
    expected = [*iterator, *epoch(original, 2)]
    resumed = loader(seed=1, shuffle=True)
    resumed.load_state_dict(state)
    assert_same_batches(expected, [*epoch(resumed, 1), *epoch(resumed, 2)])
    resumed.load_state_dict(state)  # another epoch than the interrupted one begins at its start
    assert_same_batches(epoch(resumed, 0), epoch(original, 0))


def test_an_unseeded_loader_takes_on_the_seed_of_the_state() -> None:
    original = loader(seed=8, shuffle=True)
    _, iterator = take(original, 1)
    resumed = loader(shuffle=True)
    resumed.load_state_dict(original.state_dict())
    assert_same_batches([*iterator, *original], [*resumed, *resumed])
    assert resumed.seed == 8


class Unknown(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(100).tolist())

    def __len__(self) -> int:
        return 100


def test_an_order_that_nobody_knows_raises_and_says_what_to_do() -> None:
    original = loader(sampler=Unknown())
    take(original, 1)
    with pytest.raises(TypeError, match=r"Unknown, .*give it state_dict\(\) and load_state_dict"):
        original.state_dict()


def test_out_of_order_cannot_be_resumed() -> None:
    with pytest.raises(ValueError, match="in_order=False"):
        loader(num_workers=1, in_order=False).state_dict()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"seed": 1, "batch_size": 10}, "batch_size=9, this one has batch_size=10"),
        ({"seed": 1, "input_nodes": [1, 2]}, "num_seeds=100, this one has num_seeds=2"),
        ({"seed": 1, "drop_last": True}, "drop_last=False"),
        ({"seed": 1, "shuffle": True}, "shuffle=False"),
        ({"seed": 2}, "seed=1, this loader has seed=2"),
        ({"seed": 1, "sampler": [1, 2]}, "without a sampler="),
    ],
)
def test_a_state_of_another_loader_is_refused(kwargs: dict[str, Any], message: str) -> None:
    original = loader(seed=1)
    take(original, 1)
    with pytest.raises(ValueError, match=message):
        loader(**kwargs).load_state_dict(original.state_dict())


def test_a_state_of_another_version_or_sampler_is_refused() -> None:
    with pytest.raises(ValueError, match="version 99, this is version 1"):
        loader().load_state_dict({"version": 99})
    with pytest.raises(TypeError, match="what state_dict.. returned .got None"):
        loader().load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it lacks batch_size, delivered"):
        loader().load_state_dict({"version": 1})
    original = loader(sampler=RandomSampler(range(100)))
    take(original, 1)
    resumed = loader(sampler=Stateful())
    resumed.load_state_dict(original.state_dict())
    with pytest.raises(ValueError, match="kind 'default_generator', but BatchSampler is of kind"):
        iter(resumed)
