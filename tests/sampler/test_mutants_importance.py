"""Importance samplers that weigh or draw wrongly: the conformance kit sees each.

Each mutant is LABOR, LADIES or FastGCN in plain torch with one thing wrong. That these pass all
tests is checked in ``tests/conformance``.
"""

from __future__ import annotations

import pytest
import torch

from pyg_scale.ops.keys import fold_tensor, source_number
from pyg_scale.sampler import Chosen, FastGCN, Labor, Ladies
from pyg_scale.sampler import labor as module
from pyg_scale.sampler.hop import HopSampler
from pyg_scale.testing import ImportanceTests
from pyg_scale.testing.run import failures

pytestmark = pytest.mark.matrix(3)


class ByHop(ImportanceTests):
    """The kit for samplers that choose for a hop as a whole."""

    by_node = False


class ByLayer(ImportanceTests):
    """The kit for samplers whose numbers count nodes of a hop."""

    num_wanted = 12
    by_node = False


MUTANTS: list[tuple[type[Labor], str]] = []


def caught_by(*tests):
    """Say which tests must fail on a mutant."""

    def register(mutant):
        MUTANTS.extend((mutant, test) for test in tests)
        return mutant

    return register


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=lambda v: getattr(v, "__name__", v))
def test_is_caught(mutant, test, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "never")
    sampler = mutant()
    kit = ByLayer if issubclass(mutant, Ladies) else ByHop if sampler.by_hop else ImportanceTests
    failure = next(failures(kit, test, sampler=sampler), None)
    assert failure is not None, f"{mutant.__name__} ({mutant.__doc__}) passes {test}"
    assert isinstance(failure[1], (AssertionError, pytest.fail.Exception)), failure


@caught_by("test_sums_are_unbiased", "test_sums_in_the_second_hop_are_unbiased")
class SelfNormalised(Labor):
    """Weighs each edge by one over how many were taken: a biased mean where weights differ."""

    def __init__(self):
        super().__init__(weights="sum")

    def chosen(self, frontier, row, position, share):
        taken = torch.bincount(row, minlength=frontier.node.numel()).clamp(min=1)
        weight = 1 / taken[row].float()
        return Chosen(row, position, {"edge_weight": weight})


@caught_by("test_sums_are_unbiased", "test_every_edge_has_a_weight")
class Unweighted(Labor):
    """Has no weights."""

    def chosen(self, frontier, row, position, share):
        return Chosen(row, position)

    def sample(self, seed, seed_time, key):
        out = super().sample(seed, seed_time, key)
        out.edge_attrs.clear()
        return out


@caught_by("test_all_in_edges_weigh_what_layers_give_them")
class ForgetsTheDegree(Labor):
    """Says that its weights are those of means, and gives those of sums."""

    def chosen(self, frontier, row, position, share):
        weight = (2.0**32 / share).float()
        return Chosen(row, position, {"edge_weight": weight})


@caught_by("test_edges_are_taken_as_often_as_weights_say", "test_sums_are_unbiased")
class AlmostTheProbability(Labor):
    """Weighs by a probability that is a tenth too large."""

    def chosen(self, frontier, row, position, share):
        return super().chosen(frontier, row, position, (share * 1.1).clamp(max=2.0**32))


@caught_by("test_edges_are_taken_as_often_as_weights_say", "test_numbers_on_a_tree")
class LeavesOneOut(Labor):
    """Never takes the last in-edge of a node that chooses."""

    def pick(self, frontier, k):
        out = super().pick(frontier, k)
        last = (out.position == frontier.end[out.row] - 1) & (frontier.num_candidates > k)[out.row]
        attrs = {name: value[~last] for name, value in (out.edge_attrs or {}).items()}
        return Chosen(out.row[~last], out.position[~last], attrs)


@caught_by("test_batches_do_not_depend_on_threads", "test_same_key_same_batch")
class DrawsFromTorch(Labor):
    """Draws from torch's generator."""

    def pick(self, frontier, k):
        row, position = frontier.candidates()
        share = module.shares(frontier, row, position, k)
        key = torch.randint(2**62, (1,))
        taken = (fold_tensor(key, frontier.csc.indices[position]) >> 1) % 2**32 < share
        return self.chosen(frontier, row[taken], position[taken], share[taken])


@caught_by("test_nodes_with_common_neighbours_take_the_same")
class DrawsForEveryEdge(Labor):
    """Draws for each edge by itself: probabilities are right, and nodes share nothing."""

    def pick(self, frontier, k):
        row, position = frontier.candidates()
        share = module.shares(frontier, row, position, k)
        key = fold_tensor(frontier.key[row], frontier.csc.indices[position])
        taken = (key & 0xFFFFFFFF).double() < share
        return self.chosen(frontier, row[taken], position[taken], share[taken])


@caught_by("test_parts_give_the_batches_of_the_whole_graph")
class DrawsByPosition(Labor):
    """The number is that of a place in memory, not of the source."""

    def pick(self, frontier, k):
        row, position = frontier.candidates()
        share = module.shares(frontier, row, position, k)
        key = self.source_key(frontier.batch_key, frontier.hop, frontier.edge_type)
        taken = source_number(key, position).double() < share
        return self.chosen(frontier, row[taken], position[taken], share[taken])


@caught_by("test_sums_are_unbiased", "test_edges_are_taken_as_often_as_weights_say")
class ForgetsTheLimit(Ladies):
    """Weighs by probabilities of which some exceed 1."""

    def weights_of(self, row, degree, share):
        return super().weights_of(row, degree, torch.where(share < 2.0**32, share, share * 2))


@caught_by("test_parts_give_the_batches_of_the_whole_graph")
class EachPartByItself(Ladies):
    """Has every part choose among its own edges, instead of the hop as a whole."""

    def expand(self, asks):
        return HopSampler.expand(self, asks)

    def choose(self, csc, ask, *rest):
        return self.take(ask, super().choose(csc, ask._replace(num_neighbors=-1), *rest))


@caught_by("test_sums_in_the_second_hop_are_unbiased", "test_sums_are_unbiased")
class WeighsByTheHop(FastGCN):
    """Draws by the norms of the whole graph, and weighs by those of the hop."""

    def weights_of(self, row, degree, share):
        return super().weights_of(row, degree, (share * 1.3).clamp(max=2.0**32))


class Converges(Labor):
    """LABOR-*, from which the next ones differ in one thing."""

    def __init__(self):
        super().__init__(iterations="*")


@caught_by("test_sums_are_unbiased", "test_edges_are_taken_as_often_as_weights_say")
class WeighsAsBeforeItConverged(Converges):
    """Weighs by the probabilities of LABOR-0."""

    def picked(self, every, taken, share):
        degree = every.counts.repeat_interleave(every.counts)[taken]
        return super().picked(every, taken, (4 * 2.0**32 / degree).clamp(max=2.0**32))


@caught_by("test_parts_give_the_batches_of_the_whole_graph")
class ConvergesInEachPart(Converges):
    """Has every part refine the probabilities of its own in-edges."""

    def expand(self, asks):
        return HopSampler.expand(self, asks)

    def choose(self, csc, ask, *rest):
        return self.take(ask, super().choose(csc, ask._replace(num_neighbors=-1), *rest))


@caught_by("test_sums_in_the_second_hop_are_unbiased", "test_sums_are_unbiased")
class RefinesByItsOwnNumbers(Converges):
    """Has the number of wanted in-edges follow from the random numbers."""

    def take(self, ask, every):
        k = 2 + 6 * (source_number(ask.key, every.neighbor[:1]) % 2) if every.edge.numel() else 1
        more = super().take(ask._replace(num_neighbors=int(k)), every)
        degree = every.counts.repeat_interleave(more.counts).float()
        return more._replace(attrs={"edge_weight": (1 / degree) * (degree / 4).clamp(min=1)})
