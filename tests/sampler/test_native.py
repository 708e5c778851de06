"""The compiled sampler against the plain-torch one: the same bits, whatever is asked for."""

from __future__ import annotations

import random

import pytest

from pyg_scale.ops import library
from pyg_scale.sampler.native import NativeSampler
from pyg_scale.sampler.reference import ReferenceSampler
from tests.sampler.graphs import (
    bound,
    difference,
    random_options,
    random_seeds,
    random_topology,
)

pytestmark = pytest.mark.filterwarnings("ignore:subgraph_type='bidirectional'")


@pytest.fixture(autouse=True)
def kernels():
    if not library.compiled():
        pytest.skip(f"needs the compiled kernels: {library.status()['command']}")


@pytest.mark.parametrize("block", range(40))
def test_equals_the_reference_bit_for_bit(block):
    for i in range(25):
        rng = random.Random(1000 * block + i)
        topology = random_topology(rng)
        options = random_options(rng, topology)
        seed, time = random_seeds(rng, topology)
        key = rng.getrandbits(64)
        native = bound(NativeSampler, topology, **options).sample(seed, time, key)
        plain = bound(ReferenceSampler, topology, **options).sample(seed, time, key)
        assert not difference(native, plain), (block, i, options, difference(native, plain))
