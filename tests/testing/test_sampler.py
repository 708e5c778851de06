"""The kit for samplers, on samplers that promise less than the built-in ones."""

import re

import numpy as np
import pytest
import torch

from pyg_scale.ops.keys import bounded, fold_tensor
from pyg_scale.sampler.frontier import Chosen
from pyg_scale.sampler.hop import HopSampler
from pyg_scale.sampler.reference import ReferenceSampler
from pyg_scale.testing import SamplerTests, graphs
from pyg_scale.testing.ask import ask
from pyg_scale.testing.run import failures

pytestmark = pytest.mark.matrix(2)


class Bernoulli(HopSampler):
    """Keeps each of ``d`` in-edges by itself with probability ``k / d``."""

    exact_count = uniform = False

    def pick(self, frontier, k):
        row, position = frontier.candidates()
        d = frontier.num_candidates[row]
        number = position - frontier.begin[row]
        keep = bounded(fold_tensor(frontier.key[row], number), 0, d) < k
        return Chosen(row[keep], position[keep])


class TestBernoulli(SamplerTests):
    @pytest.fixture
    def sampler(self):
        return Bernoulli()


class Modest(ReferenceSampler):
    """Supports nothing but a homogeneous graph and a number per hop."""

    supports = frozenset()


class TestModest(SamplerTests):
    @pytest.fixture
    def sampler(self):
        return Modest()


def test_a_modest_sampler_is_still_tested():
    class FirstK(Modest):
        def pick(self, frontier, k):
            row, position = frontier.candidates()
            keep = position - frontier.begin[row] < k
            return Chosen(row[keep], position[keep])

    found = {name.partition("[")[0] for name, _ in failures(SamplerTests, sampler=FirstK())}
    assert {
        "test_every_neighbor_is_as_likely",
        "test_every_combination_is_as_likely",
        "test_another_key_another_batch",
        "test_hubs_are_sampled_without_bias",
    } <= found


def test_what_a_sampler_that_is_not_exact_must_not_do():
    class TakesTwice(Bernoulli):
        def pick(self, frontier, k):
            row, position, _ = super().pick(frontier, k)
            return Chosen(row.repeat(2), position.repeat(2))

    assert "more than once" in str(next(failures(SamplerTests, sampler=TakesTwice()))[1])
    assert "more than once" in str(next(failures(SamplerTests, sampler=TakesTwice))[1])


class ByPlaceOfTheEdge(Bernoulli):
    """Draws by where an edge lies, which differs from part to part."""

    def pick(self, frontier, k):
        row, position = frontier.candidates()
        d = frontier.num_candidates[row]
        keep = bounded(fold_tensor(frontier.key[row], position), 0, d) < k
        return Chosen(row[keep], position[keep])


class ByPlaceOfTheNode(Bernoulli):
    """Draws by the place in the frontier, which differs from part to part."""

    def pick(self, frontier, k):
        row, position = frontier.candidates()
        key = fold_tensor(frontier.batch_key, row)
        number = fold_tensor(key, position - frontier.begin[row])
        keep = bounded(number, 0, frontier.num_candidates[row]) < k
        return Chosen(row[keep], position[keep])


@pytest.mark.parametrize(
    ("wrong", "others"),
    [
        (ByPlaceOfTheEdge, set()),
        (ByPlaceOfTheNode, {"test_kept_draws_are_those_of_a_seed_alone"}),
    ],
)
def test_what_parts_would_draw_differently_is_found(wrong, others):
    test = "test_parts_give_the_batches_of_the_whole_graph"
    found = dict(failures(SamplerTests, sampler=wrong()))
    assert {name.partition("[")[0] for name in found} == {test, *others}
    said = next(str(error) for name, error in found.items() if name.startswith(test))
    assert "across_parts = False" in said

    class ForOnePartOnly(wrong):
        across_parts = False

    assert not list(failures(SamplerTests, test, sampler=ForOnePartOnly()))


class Weighs(ReferenceSampler):
    """Gives every edge a number; subclasses give it wrongly."""

    supports = ReferenceSampler.supports - {"bidirectional", "induced"}

    def number(self, chosen):
        return {"edge_weight": torch.ones(chosen.row.numel())}

    def pick(self, frontier, k):
        chosen = super().pick(frontier, k)
        return chosen._replace(edge_attrs=self.number(chosen))

    def pick_all(self, frontier):
        chosen = super().pick_all(frontier)
        return chosen._replace(edge_attrs=self.number(chosen))


class OfAllCandidates(Weighs):
    def number(self, chosen):
        return {"edge_weight": torch.ones(chosen.row.numel() + 3)}


class NotATensor(Weighs):
    def number(self, chosen):
        return {"edge_weight": 1.0}


class OfPickAlone(Weighs):
    def pick_all(self, frontier):
        return ReferenceSampler.pick_all(self, frontier)


class ByChance(Weighs):
    def number(self, chosen):
        drawn = np.random.default_rng().random(chosen.row.numel())
        return {"edge_weight": torch.from_numpy(drawn)}


class GivesNone(ReferenceSampler):
    def pick(self, frontier, k):
        return None


class GivesTwo(ReferenceSampler):
    def pick(self, frontier, k):
        return tuple(super().pick(frontier, k)[:2])


class Floats(ReferenceSampler):
    def pick(self, frontier, k):
        chosen = super().pick(frontier, k)
        return Chosen(chosen.row, chosen.position.double())


class PositionsOfAll(ReferenceSampler):
    def pick(self, frontier, k):
        return Chosen(super().pick(frontier, k).row, frontier.candidates()[1])


class OtherRows(ReferenceSampler):
    def pick(self, frontier, k):
        row, position, _ = super().pick(frontier, k)
        return Chosen(row.flip(0), position)


class NextPosition(ReferenceSampler):
    def pick(self, frontier, k):
        row, position, _ = super().pick(frontier, k)
        return Chosen(row, position + 1)


class RowsBefore(ReferenceSampler):
    def pick(self, frontier, k):
        row, position, _ = super().pick(frontier, k)
        return Chosen(row - 1, position)


class RowsBeyond(ReferenceSampler):
    def pick_all(self, frontier):
        row, position, _ = super().pick_all(frontier)
        return Chosen(row + frontier.node.numel(), position)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (OfAllCandidates, r"edge_attrs\['edge_weight'\] must have a row for each of the"),
        (NotATensor, r"edge_attrs\['edge_weight'\] must be a tensor \(got float"),
        (OfPickAlone, r"gives edge_attrs \[\] along .* override pick_all"),
        (ByChance, r"edge_attrs\['edge_weight'\] differs"),
        (GivesNone, r"GivesNone.pick must return Chosen\(row, position\) \(got NoneType"),
        (GivesTwo, r"GivesTwo.pick must return Chosen\(row, position\) \(got tuple"),
        (Floats, r"position must be int64 \[m\] \(got torch.float64"),
        (PositionsOfAll, "position must have a row for each of the"),
        (OtherRows, "OtherRows.pick: position must be that of a candidate of its row"),
        (NextPosition, "NextPosition.pick: position must be that of a candidate of its row"),
        (RowsBefore, r"RowsBefore.pick: row must be 0 or more, .* \(got -1\)"),
        (RowsBeyond, r"RowsBeyond.pick_all: row must be .* less than the \d+ rows"),
    ],
)
def test_wrong_choices_are_explained(wrong, message):
    for sampler, explained in ((Weighs(), False), (wrong(), True)):
        found = [
            str(error)
            for test in ("test_options", "test_same_key_same_batch")
            for _, error in failures(SamplerTests, test, sampler=sampler)
        ]
        assert bool(found) is any(re.search(message, each) for each in found) is explained


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (object(), "return an instance of your subclass"),
        (ReferenceSampler(graphs.written_out(), num_neighbors=[1]), "leave out data="),
    ],
    ids=["not a sampler", "bound"],
)
def test_wrong_fixtures_are_explained(sampler, message):
    with pytest.raises(AssertionError, match=message):
        next(failures(SamplerTests, sampler=sampler))


def test_hostile_graphs_are_hostile():
    data = graphs.hostile()
    source, destination = data.edge_index
    degree = torch.bincount(destination, minlength=data.num_nodes)
    pairs = list(zip(source.tolist(), destination.tolist()))
    assert int(degree[0]) > 40, "a hub"
    assert pairs.count((5, 5)) >= 2, "self-loops"
    assert pairs.count((3, 4)) >= 3, "parallel edges"
    assert degree[-2:].tolist() == [0, 0]
    assert (source == 99).sum() == 0, "an isolated node"
    assert (source == 98).sum() > 0, "a node with out-edges only"
    assert degree[6] == 1
    assert not data.is_undirected()
    assert not bool((destination.diff() >= 0).all()), "in no order"
    assert not data.x.is_contiguous()
    for time, most in ((data.time, 8), (data.when, 8)):
        assert time.unique().numel() <= most < time.numel(), "ties"
    assert bool((data.weight[destination == 7] == 0).all())
    assert int((data.weight[destination == 8] > 0).sum()) == 1
    hetero = graphs.hetero()
    reached = {edge_type[0] for edge_type in hetero.edge_types if edge_type[2] != "ghost"}
    assert "ghost" not in reached
    assert "time" not in hetero["tag"]


def test_messages_say_what_is_wrong():
    class OneTooFew(ReferenceSampler):
        def pick(self, frontier, k):
            return super().pick(frontier, max(k - 1, 0))

    with pytest.raises(
        AssertionError,
        match=(
            r"hop 0, node 0: 2 in-edges were taken instead of 3 \(num_neighbors=3, \d+ candidates\)"
        ),
    ):
        ask(OneTooFew(), graphs.hostile(), [0], [3])
