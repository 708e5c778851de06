"""Faults of well-known samplers, imitated: the kit finds each of them, and not in ours.

What was observed, with the versions, is in the docstrings; the imitations are our own.
"""

from __future__ import annotations

import pytest
import torch

from pyg_scale.ops import library
from pyg_scale.ops.keys import draw
from pyg_scale.sampler import reference
from pyg_scale.sampler.frontier import Chosen
from pyg_scale.sampler.reference import ReferenceSampler
from pyg_scale.testing import SamplerTests
from pyg_scale.testing.run import failures


class RepeatedSeedsShiftRows(ReferenceSampler):
    """pyg-lib 0.9: new nodes are numbered as if repeated seeds had no rows of their own.

    With ``ImbalancedSampler`` most of the edges that come out do not exist.
    """

    def sample(self, seed, seed_time, key):
        out = super().sample(seed, seed_time, key)
        if out.batch is None and out.num_sampled_nodes is not None:
            for edge_type, row in out.row.items():
                node = out.node[self.topology.neighbor_type(edge_type)].tolist()
                first = torch.tensor([v not in node[:i] for i, v in enumerate(node)])
                out.row[edge_type] = (first.cumsum(0) - 1)[row.long()].to(row.dtype)
        return out


class Floyd(ReferenceSampler):
    """Floyd's method with another way to draw a number that is at most ``j``."""

    def number(self, key, i, j):
        raise NotImplementedError

    def pick(self, frontier, k):
        if self.replace or frontier.csc.weight_prefix is not None:
            return super().pick(frontier, k)
        few = frontier.num_candidates <= k
        row, position = super().pick(frontier, k)[:2]
        row, position = row[few[row]], position[few[row]]
        many = (~few).nonzero().view(-1)
        choice = frontier.at(many)
        picks = torch.full((many.numel(), k if many.numel() else 0), -1)
        for i in range(picks.size(1)):
            j = choice.num_candidates - k + i
            t = self.number(choice.key, i, j)
            picks[:, i] = torch.where((picks[:, :i] == t.unsqueeze(1)).any(dim=1), j, t)
        more = choice.begin.unsqueeze(1) + picks
        return Chosen(
            torch.cat([row, many.repeat_interleave(picks.size(1))]),
            torch.cat([position, more.view(-1)]),
        )


class NeverTheLast(Floyd):
    """torch-sparse 0.6.18: a number below ``j`` instead of at most ``j``.

    Of ten neighbours, one of which is wanted, the last never comes; nor do some combinations.
    """

    def number(self, key, i, j):
        return reference.bounded(key, i, j)


class RandModulo(Floyd):
    """SALIENT++: ``rand() % j``; of two neighbours it is always the first."""

    def number(self, key, i, j):
        return (draw(key, i) & 0x7FFFFFFF) % j


class SixteenBits(Floyd):
    """pyg-lib 0.9: 16 random bits modulo the range if that is below 65,536.

    At a node of degree 40,000 the first 25,536 neighbours come twice as often as the others.
    """

    def number(self, key, i, j):
        return (draw(key, i) & 0xFFFF) % (j + 1)


FAULTS = [
    (RepeatedSeedsShiftRows, "test_repeated_seeds"),
    (NeverTheLast, "test_every_neighbor_is_as_likely"),
    (NeverTheLast, "test_every_combination_is_as_likely"),
    (RandModulo, "test_every_neighbor_is_as_likely"),
    (RandModulo, "test_every_combination_is_as_likely"),
    (SixteenBits, "test_hubs_are_sampled_without_bias"),
]


@pytest.mark.parametrize(("sampler", "test"), FAULTS, ids=lambda v: getattr(v, "__name__", v))
def test_is_found(sampler, test):
    failure = next(failures(SamplerTests, test, sampler=sampler()), None)
    assert failure is not None, f"{sampler.__name__} passes {test}"
    assert isinstance(failure[1], AssertionError), failure


@pytest.mark.parametrize("sampler", ["reference", "native"])
@pytest.mark.parametrize("test", sorted({test for _, test in FAULTS}))
def test_ours_has_none_of_them(sampler, test):
    if sampler == "native" and not library.compiled():
        pytest.skip("the kernels are not compiled: run pyg-scale build")
    assert list(failures(SamplerTests, test, sampler=sampler)) == []


def test_the_bias_of_16_bits_shows_only_at_hubs():
    """Which is why a test at small degrees does not find it."""
    for test in ("test_every_neighbor_is_as_likely", "test_every_combination_is_as_likely"):
        assert list(failures(SamplerTests, test, sampler=SixteenBits())) == []


def test_the_imitations_are_right_otherwise():
    """What makes them fail is the fault, not the imitation."""
    for sampler in (NeverTheLast, RandModulo, SixteenBits, RepeatedSeedsShiftRows):
        assert list(failures(SamplerTests, "test_every_graph", sampler=sampler())) == []
