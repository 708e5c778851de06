"""The kits find what seeds or uses a global generator, whichever it is."""

import random

import numpy as np
import pytest
import torch

from pyg_scale.partitioner import Partitioner
from pyg_scale.sampler.reference import ReferenceSampler
from pyg_scale.testing import PartitionerTests, SamplerTests
from pyg_scale.testing.run import failures

SEEDS = {"torch": torch.manual_seed, "NumPy": np.random.seed, "Python": random.seed}
DRAWS = {"torch": lambda: torch.rand(1), "NumPy": np.random.rand, "Python": random.random}


class AtRandom(Partitioner):
    balances = ()
    use = staticmethod(lambda: None)

    def assign(self, graph, num_parts, *, seed, shares):
        self.use()
        return torch.arange(graph.num_nodes) % num_parts


class AtRandomSampler(ReferenceSampler):
    use = staticmethod(lambda: None)

    def pick(self, frontier, k):
        self.use()
        return super().pick(frontier, k)


@pytest.mark.parametrize(
    ("kit", "kind", "test", "base"),
    [
        (PartitionerTests, "partitioner", "test_leaves_global_generators_alone", AtRandom),
        (SamplerTests, "sampler", "test_a_key_leaves_global_generators_alone", AtRandomSampler),
    ],
)
@pytest.mark.parametrize("name", SEEDS)
def test_is_found(kit, kind, test, base, name):
    assert not list(failures(kit, test, **{kind: base()}))
    for use in (lambda: SEEDS[name](7), DRAWS[name]):
        wrong = type(base.__name__, (base,), {"use": staticmethod(use)})
        with torch.random.fork_rng(devices=[]):
            ((_, error),) = failures(kit, test, **{kind: wrong()})
        assert f"the global generator of {name} was used or seeded" in str(error)
