"""Samplers that draw the wrong edges: the conformance kit sees each, by the test meant for it.

Each mutant is the reference sampler with one thing wrong. That the reference itself passes all
tests is checked in ``tests/conformance``.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pyg_scale.ops.keys import NEIGHBOR, bounded, edge_type_hash, fold, fold_tensor
from pyg_scale.sampler.base import NeighborSampler
from pyg_scale.sampler.frontier import Chosen
from pyg_scale.sampler.reference import ReferenceSampler
from pyg_scale.testing import SamplerTests
from pyg_scale.testing.run import failures

MUTANTS: list[tuple[type[NeighborSampler], str]] = []


def caught_by(*tests):
    """Say which tests must fail on a mutant."""

    def register(mutant):
        MUTANTS.extend((mutant, test) for test in tests)
        return mutant

    return register


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=lambda v: getattr(v, "__name__", v))
def test_is_caught(mutant, test):
    failure = next(failures(SamplerTests, test, sampler=mutant()), None)
    assert failure is not None, f"{mutant.__name__} ({mutant.__doc__}) passes {test}"
    if not str(failure[1]).startswith(f"{mutant.__name__}.pick: "):  # refused already as it draws
        assert isinstance(failure[1], (AssertionError, pytest.fail.Exception)), failure


def test_all_are_there():
    assert len({mutant for mutant, _ in MUTANTS}) == 27
    assert all(hasattr(SamplerTests, test) for _, test in MUTANTS)


# Which edges ###################################################################################


@caught_by("test_every_neighbor_is_as_likely", "test_another_key_another_batch")
class FirstK(ReferenceSampler):
    """Takes the first edges."""

    def pick(self, frontier, k):
        row, position = frontier.candidates()
        keep = position - frontier.begin[row] < k
        return Chosen(row[keep], position[keep])


@caught_by("test_every_neighbor_is_as_likely")
class Biased(ReferenceSampler):
    """Prefers the first neighbour by a tenth."""

    def pick(self, frontier, k):
        chosen = super().pick(frontier, k)
        first = frontier.begin[chosen.row]
        one = torch.bincount(chosen.row, minlength=frontier.node.numel())[chosen.row] == 1
        luck = bounded(frontier.key[chosen.row], 10**6, torch.full_like(first, 10)) == 0
        return Chosen(chosen.row, torch.where(one & luck, first, chosen.position))


@caught_by("test_every_combination_is_as_likely")
class Systematic(ReferenceSampler):
    """Takes neighbours that follow each other: each is as likely, few combinations occur."""

    def pick(self, frontier, k):
        d = frontier.num_candidates
        row, position = frontier.candidates()
        begin = bounded(frontier.key, 0, d.clamp(min=1))[row]
        keep = (position - frontier.begin[row] - begin) % d[row] < k
        return Chosen(row[keep], position[keep])


@caught_by("test_options", "test_every_graph")
class WithReplacement(ReferenceSampler):
    """Draws with replacement where it should not."""

    def pick(self, frontier, k):
        was, self.replace = self.replace, True
        try:
            return super().pick(frontier, k)
        finally:
            self.replace = was


@caught_by("test_options")
class IgnoresReplace(ReferenceSampler):
    """Draws without replacement always."""

    def pick(self, frontier, k):
        was, self.replace = self.replace, False
        try:
            return super().pick(frontier, k)
        finally:
            self.replace = was


@caught_by("test_with_replacement")
class DrawsFollow(ReferenceSampler):
    """With replacement, the second draw is always the neighbour after the first."""

    def pick(self, frontier, k):
        row, position = super().pick(frontier, k)[:2]
        if not self.replace or k < 2:
            return Chosen(row, position)
        place = position[torch.arange(row.numel()) // k * k] - frontier.begin[row]
        place = (place + torch.arange(row.numel()) % k) % frontier.num_candidates[row]
        return Chosen(row, frontier.begin[row] + place)


@caught_by("test_options", "test_every_graph", "test_types")
class FanOutPlusOne(ReferenceSampler):
    """Takes one more than was asked for."""

    def pick(self, frontier, k):
        return super().pick(frontier, k + 1)


@caught_by("test_every_graph", "test_options")
class DropsOnSmallDegree(ReferenceSampler):
    """Forgets the last edge of nodes that have fewer than were asked for."""

    def pick(self, frontier, k):
        chosen = super().pick(frontier, k)
        small = (frontier.num_candidates < k)[chosen.row]
        keep = ~(small & (chosen.position == frontier.end[chosen.row] - 1))
        return Chosen(chosen.row[keep], chosen.position[keep])


@caught_by("test_the_whole_neighborhood", "test_every_graph")
class AllButOne(ReferenceSampler):
    """Takes -1 for "all but the last"."""

    def pick_all(self, frontier):
        row, position = frontier.candidates()
        keep = position < frontier.end[row] - 1
        return Chosen(row[keep], position[keep])


@caught_by("test_every_graph")
class ParallelEdgesOnce(ReferenceSampler):
    """Takes one of several edges between the same nodes."""

    def pick_all(self, frontier):
        row, position = frontier.candidates()
        pair = row * 1000 + frontier.csc.indices[position]
        keep = torch.tensor([int(p) not in pair[:i].tolist() for i, p in enumerate(pair)])
        return Chosen(row[keep.bool()], position[keep.bool()])


# Weights #######################################################################################


@caught_by("test_options", "test_weights")
class IgnoresWeights(ReferenceSampler):
    """Draws uniformly, zero weights included."""

    def pick(self, frontier, k):
        csc = dataclasses.replace(frontier.csc, weight_prefix=None)
        return super().pick(dataclasses.replace(frontier, csc=csc), k)


@caught_by("test_weights", "test_weights_without_replacement")
class NearlyUniformWeights(ReferenceSampler):
    """Respects zero weights and takes all others for one."""

    def pick(self, frontier, k):
        prefix = frontier.csc.weight_prefix
        if prefix is None:
            return super().pick(frontier, k)
        first = torch.zeros(prefix.numel(), dtype=torch.bool)
        first[frontier.csc.indptr[:-1][frontier.csc.indptr.diff() > 0]] = True
        before = torch.where(first, 0, torch.cat([prefix.new_zeros(1), prefix])[:-1])
        total = (prefix > before).long().cumsum(0)
        start = torch.cat([total.new_zeros(1), total])[frontier.csc.indptr]
        group = torch.repeat_interleave(frontier.csc.indptr.diff())
        csc = dataclasses.replace(frontier.csc, weight_prefix=total - start[group])
        return super().pick(dataclasses.replace(frontier, csc=csc), k)


@caught_by("test_weights_without_replacement")
class FirstByWeightThenUniform(NearlyUniformWeights):
    """Draws the first edge by weight and the others uniformly among those that have one."""

    def pick(self, frontier, k):
        one, more = ReferenceSampler.pick(self, frontier, 1), super().pick(frontier, k)
        taken = set(zip(one.row.tolist(), one.position.tolist()))
        free = torch.ones(frontier.node.numel(), dtype=torch.int64) * (k - 1)
        keep = []
        for row, position in zip(more.row.tolist(), more.position.tolist()):
            keep.append((row, position) not in taken and int(free[row]) > 0)
            free[row] -= int(keep[-1])
        kept = torch.tensor(keep, dtype=torch.bool)
        return Chosen(
            torch.cat([one.row, more.row[kept]]), torch.cat([one.position, more.position[kept]])
        )


# Time ##########################################################################################


@caught_by("test_options", "test_types", "test_uniform_among_what_is_early_enough")
class IgnoresTime(ReferenceSampler):
    """Takes edges that are later than the seed."""

    def pick(self, frontier, k):
        return super().pick(
            dataclasses.replace(
                frontier,
                begin=frontier.csc.indptr[frontier.node],
                end=frontier.csc.indptr[frontier.node + 1],
            ),
            k,
        )


@caught_by("test_options")
class TimeMustBeLess(ReferenceSampler):
    """Leaves out edges of the very time of the seed."""

    def sample(self, seed, seed_time, key):
        if seed_time is not None:
            seed_time = {t: time - 1 for t, time in seed_time.items()}
        return super().sample(seed, seed_time, key)


@caught_by("test_options", "test_uniform_among_what_is_early_enough")
class LastIsFirst(ReferenceSampler):
    """Takes the oldest edges for ``temporal_strategy="last"``."""

    def pick(self, frontier, k):
        if self.temporal_strategy == "last":
            begin = frontier.csc.indptr[frontier.node]
            frontier = dataclasses.replace(
                frontier, begin=begin, end=begin + frontier.num_candidates
            )
        return super().pick(frontier, k)


@caught_by("test_options")
class LastIsUniform(ReferenceSampler):
    """Ignores ``temporal_strategy="last"``."""

    def sample(self, seed, seed_time, key):
        self.temporal_strategy = "uniform"
        return super().sample(seed, seed_time, key)


@caught_by("test_repeated_seeds", "test_options")
class TimeOfTheFirstSeed(ReferenceSampler):
    """Takes the time of the first seed for all."""

    def sample(self, seed, seed_time, key):
        if seed_time is not None:
            seed_time = {t: time[:1].expand_as(time) for t, time in seed_time.items()}
        return super().sample(seed, seed_time, key)


# Keys ##########################################################################################


class OtherKeys(ReferenceSampler):
    """Makes the keys of nodes out of less than it should."""

    def pick(self, frontier, k):
        f = frontier
        component = getattr(self, "components", None)
        return super().pick(dataclasses.replace(f, key=self.key(f, component)), k)

    def key(self, f, component):
        raise NotImplementedError


@caught_by("test_nodes_draw_independently", "test_every_neighbor_is_as_likely")
class KeyIgnoresNode(OtherKeys):
    """All nodes of a hop draw the same."""

    def key(self, f, component):
        base = fold(f.batch_key, NEIGHBOR, f.hop, edge_type_hash(f.edge_type))
        return fold_tensor(base, torch.zeros_like(f.node))


@caught_by("test_hops_draw_independently")
class KeyIgnoresHop(OtherKeys):
    """A node draws the same in every hop."""

    def key(self, f, component):
        base = fold(f.batch_key, NEIGHBOR, 0, edge_type_hash(f.edge_type))
        return fold_tensor(base, f.node)


@caught_by("test_components_draw_independently")
class KeyIgnoresComponent(OtherKeys):
    """A node draws the same for every seed."""

    def key(self, f, component):
        base = fold(f.batch_key, NEIGHBOR, f.hop, edge_type_hash(f.edge_type))
        return fold_tensor(base, f.node)


@caught_by("test_edge_types_draw_independently")
class KeyIgnoresEdgeType(OtherKeys):
    """A node draws the same along every edge type."""

    def key(self, f, component):
        return fold_tensor(fold(f.batch_key, NEIGHBOR, f.hop, 0), f.node)


@caught_by("test_keys_draw_independently", "test_another_key_another_batch")
class KeyIgnoresBatch(ReferenceSampler):
    """Every batch draws the same."""

    def sample(self, seed, seed_time, key):
        return super().sample(seed, seed_time, 0)


@caught_by("test_keys_draw_independently", "test_another_key_another_batch")
class KeyOf32Bits(ReferenceSampler):
    """Forgets the upper half of the key."""

    def sample(self, seed, seed_time, key):
        return super().sample(seed, seed_time, key & 0xFFFFFFFF)


@caught_by("test_draws_do_not_depend_on_other_seeds")
class KeyIsThePlace(OtherKeys):
    """The place in the batch decides, not the node."""

    def key(self, f, component):
        base = fold(f.batch_key, NEIGHBOR, f.hop, edge_type_hash(f.edge_type))
        return fold_tensor(base, torch.arange(f.node.numel()))


@caught_by("test_same_key_same_batch", "test_batches_do_not_depend_on_threads")
class CountsCalls(ReferenceSampler):
    """Batches depend on how many there have been before."""

    calls = 0

    def sample(self, seed, seed_time, key):
        self.calls += 1
        return super().sample(seed, seed_time, key + self.calls)


@caught_by("test_a_key_leaves_global_generators_alone", "test_same_key_same_batch")
class GlobalGenerator(ReferenceSampler):
    """Draws from torch's generator."""

    def sample(self, seed, seed_time, key):
        return super().sample(seed, seed_time, int(torch.randint(2**60, ())))
