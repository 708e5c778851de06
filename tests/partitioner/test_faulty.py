"""Partitioners with one thing wrong: the conformance kit sees each, by the test meant for it."""

import pytest
import torch

from pyg_scale.partitioner import Partitioner
from pyg_scale.partitioner.random import HashPartitioner, RandomPartitioner
from pyg_scale.partitioner.range import RangePartitioner
from pyg_scale.partitioner.stream import Fennel
from pyg_scale.testing import PartitionerTests
from pyg_scale.testing.run import failures

FAULTY: list[tuple[type[Partitioner], str]] = []


def caught_by(*tests):
    """Say which tests must fail on a faulty partitioner."""

    def register(faulty):
        FAULTY.extend((faulty, test) for test in tests)
        return faulty

    return register


@pytest.mark.parametrize(("faulty", "test"), FAULTY, ids=lambda v: getattr(v, "__name__", v))
def test_is_caught(faulty, test):
    failure = next(failures(PartitionerTests, test, partitioner=faulty()), None)
    assert failure is not None, f"{faulty.__name__} ({faulty.__doc__}) passes {test}"
    assert isinstance(failure[1], (AssertionError, pytest.fail.Exception)), failure


def test_all_are_there():
    assert len({faulty for faulty, _ in FAULTY}) == 17
    assert all(hasattr(PartitionerTests, test) for _, test in FAULTY)


@pytest.mark.parametrize("sound", [RandomPartitioner, RangePartitioner, Fennel])
def test_sound_ones_are_not(sound):
    assert list(failures(PartitionerTests, partitioner=sound)) == []


# What comes back ###############################################################################


@caught_by("test_every_graph")
class OneTooMany(RandomPartitioner):
    """Counts parts from 1."""

    def assign(self, graph, num_parts, *, seed, shares):
        return super().assign(graph, num_parts, seed=seed, shares=shares) + 1


@caught_by("test_every_graph")
class ForgetsIsolated(RandomPartitioner):
    """Gives nodes without edges no part."""

    def assign(self, graph, num_parts, *, seed, shares):
        part = super().assign(graph, num_parts, seed=seed, shares=shares)
        part[graph.indptr.diff() == 0] = -1
        return part


@caught_by("test_every_graph")
class OfFirstType(RandomPartitioner):
    """Knows the first node type alone."""

    def assign(self, graph, num_parts, *, seed, shares):
        _, end = next(iter(graph.offsets.values()))
        return super().assign(graph, num_parts, seed=seed, shares=shares)[:end]


@caught_by("test_every_graph")
class Floats(RandomPartitioner):
    """Gives floating point numbers."""

    def assign(self, graph, num_parts, *, seed, shares):
        return super().assign(graph, num_parts, seed=seed, shares=shares).float()


@caught_by("test_no_part_is_empty")
class NeverTheLast(HashPartitioner):
    """Leaves the last part empty."""

    def assign(self, graph, num_parts, *, seed, shares):
        return super().assign(graph, num_parts, seed=seed, shares=shares).clamp(max=num_parts - 2)


# What is declared ##############################################################################


@caught_by("test_balance")
class SaysThatItBalances(HashPartitioner):
    """Declares a balance that draws do not keep."""

    balances = ("nodes",)


@caught_by("test_balance")
class WidensItsBounds(Fennel):
    """Keeps to bounds of its own."""

    def capacity(self, graph, shares):
        return super().capacity(graph, shares) * 2


@caught_by("test_balance")
class NodesForEdges(RangePartitioner):
    """Balances nodes whatever it is asked for."""

    def assign(self, graph, num_parts, *, seed, shares):
        return torch.arange(graph.num_nodes) * num_parts // graph.num_nodes


@caught_by("test_shares")
class IgnoresShares(RandomPartitioner):
    """Makes all parts equal."""

    def assign(self, graph, num_parts, *, seed, shares):
        return super().assign(graph, num_parts, seed=seed, shares=torch.full_like(shares, 1 / 3))


@caught_by("test_two_cliques", "test_planted_blocks")
class SaysThatItMinimises(RandomPartitioner):
    """Declares a cut that it does not look for."""

    minimises_cut = True


# A function of its arguments ###################################################################


@caught_by("test_leaves_global_generators_alone")
class GlobalGenerator(RandomPartitioner):
    """Draws from torch's generator."""

    def assign(self, graph, num_parts, *, seed, shares):
        part = super().assign(graph, num_parts, seed=seed, shares=shares)
        return part[torch.randperm(part.numel())]


@caught_by("test_the_same_again")
class Remembers(RandomPartitioner):
    """Goes on from the seed of the call before."""

    calls = 0

    def assign(self, graph, num_parts, *, seed, shares):
        self.calls += 1
        return super().assign(graph, num_parts, seed=seed + self.calls, shares=shares)


@caught_by("test_leaves_the_graph_alone")
class SortsInPlace(Partitioner):
    """Changes the neighbours that it was given."""

    balances = ()

    def assign(self, graph, num_parts, *, seed, shares):
        graph.indices.copy_(graph.indices.sort(descending=True).values)
        return torch.arange(graph.num_nodes) % num_parts


@caught_by("test_the_order_of_edges_is_nothing")
class OrderOfEdges(RandomPartitioner):
    """Depends on the order in which the user gave the edges."""

    def assign(self, graph, num_parts, *, seed, shares):
        first = int(graph.topology.csc[None].indices[:50].long().sum())
        return super().assign(graph, num_parts, seed=seed + first, shares=shares)


@caught_by("test_the_number_of_threads_is_nothing")
class Threads(RandomPartitioner):
    """Depends on the number of threads."""

    def assign(self, graph, num_parts, *, seed, shares):
        threads = torch.get_num_threads()
        return super().assign(graph, num_parts, seed=seed + threads, shares=shares)


@caught_by("test_the_size_of_chunks_is_nothing")
class Chunks(Fennel):
    """Begins anew in every chunk."""

    def __init__(self, chunk_size: int = 50) -> None:
        super().__init__(chunk_size=chunk_size)

    def assign(self, graph, num_parts, *, seed, shares):
        return torch.arange(graph.num_nodes) % self.chunk_size % num_parts


@caught_by("test_options_make_it_again")
class LosesAnOption(RandomPartitioner):
    """Keeps another value than it was given."""

    def __init__(self, shift: int = 1) -> None:
        self.shift = shift + 1

    def assign(self, graph, num_parts, *, seed, shares):
        return super().assign(graph, num_parts, seed=seed + self.shift, shares=shares)
