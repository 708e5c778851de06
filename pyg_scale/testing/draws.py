"""Conformance of the draws of a sampler: determined by keys, uniform and independent."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.sampler import NodeSamplerInput

from pyg_scale.sampler.base import NeighborSampler, Sample
from pyg_scale.testing import graphs, statistics
from pyg_scale.testing.ask import bind, draw
from pyg_scale.testing.generators import assert_leaves_generators_alone

HUB = 40_000
"""A degree at which 16 random bits, reduced by modulo, are far from uniform."""


class DrawTests:
    """The tests of :class:`~pyg_scale.testing.SamplerTests` for random choices."""

    # The key of the batch decides ##########################################################

    @pytest.mark.parametrize(
        "options", [{}, {"replace": True}, {"disjoint": True}, {"weight_attr": "weight"}], ids=str
    )
    def test_same_key_same_batch(self, unbound: NeighborSampler, options: dict[str, Any]) -> None:
        bound = bind(unbound, graphs.hostile(), [4, 3], **options)
        seeds = [0, 7, 8, 3, 99]
        first = draw(bound, seeds, 5)
        draw(bound, [1, 0], 6)  # other batches and torch's generator must not matter
        torch.rand(3)
        assert_equal(draw(bound, seeds, 5), first)

    def test_batches_do_not_depend_on_threads(self, unbound: NeighborSampler) -> None:
        bound = bind(unbound, graphs.hostile(), [4, 3])
        seeds = [[i, (7 * i) % 100, 0] for i in range(64)]
        serial = [draw(bound, s, key) for key, s in enumerate(seeds)]
        with ThreadPoolExecutor(8) as pool:
            parallel = list(pool.map(lambda key: draw(bound, seeds[key], key), range(64)))
        for one, other in zip(serial, parallel):
            assert_equal(other, one)

    def test_a_key_leaves_global_generators_alone(self, unbound: NeighborSampler) -> None:
        bound = bind(unbound, graphs.hostile(), [4, 3])
        assert_leaves_generators_alone(lambda: draw(bound, [0, 1], 5))

    def test_without_a_key_the_seed_of_torch_decides(self, unbound: NeighborSampler) -> None:
        bound = bind(unbound, graphs.hostile(), [4, 3])
        inputs = NodeSamplerInput(None, torch.tensor([0, 1, 2]))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(12)
            first, second = bound.sample_from_nodes(inputs), bound.sample_from_nodes(inputs)
            torch.manual_seed(12)
            again = bound.sample_from_nodes(inputs)
        assert torch.equal(first.edge, again.edge)
        if unbound.uniform:
            assert not torch.equal(first.edge, second.edge), "every call must draw a new key"

    def test_another_key_another_batch(self, unbound: NeighborSampler) -> None:
        _only_if_uniform(unbound)
        bound = bind(unbound, graphs.hostile(), [4])
        keys = [0, 1, 1 << 32, 1 << 63, (1 << 64) - 1]
        batches = {tuple(_edge(draw(bound, [0, 1, 2, 3], key)).tolist()) for key in keys}
        assert len(batches) == len(keys), "different keys give the same batch"

    def test_draws_do_not_depend_on_other_seeds(self, unbound: NeighborSampler) -> None:
        _only_if_uniform(unbound)
        bound = bind(unbound, graphs.hostile(), [4])
        alone = {v: _edge(draw(bound, [v], 9)).tolist() for v in range(10)}
        seeds = [3, 9, 0, 5, 1, 7, 8, 2]
        together = draw(bound, seeds, 9)
        for place, v in enumerate(seeds):
            mine = _edge(together)[together.col[None] == place]
            assert mine.tolist() == alone[v], (
                f"node {v} draws other neighbours alone than at place {place} of a batch"
            )

    def test_indices_of_32_bits_give_the_same_batches(self, unbound: NeighborSampler) -> None:
        wide, narrow = (
            draw(bind(unbound, graphs.hostile(dtype), [4, 3]), [0, 7, 8], 5)
            for dtype in (torch.int64, torch.int32)
        )
        assert torch.equal(wide.node[None], narrow.node[None].long())
        assert torch.equal(_edge(wide), _edge(narrow))

    # Uniform ###############################################################################

    @pytest.mark.parametrize(("degree", "k"), [(2, 1), (3, 2), (11, 3), (16, 10), (100, 25)])
    def test_every_neighbor_is_as_likely(
        self, unbound: NeighborSampler, degree: int, k: int
    ) -> None:
        picks = self.picks(unbound, degree, k)
        count = torch.bincount(picks.view(-1), minlength=degree)
        statistics.require(
            statistics.inclusion(count, k),
            f"neighbours of nodes of degree {degree} were drawn {_some(count)} times (k={k})",
        )

    @pytest.mark.parametrize(("degree", "k"), [(3, 2), (4, 2), (6, 3), (12, 2), (7, 5), (66, 2)])
    def test_every_combination_is_as_likely(
        self, unbound: NeighborSampler, degree: int, k: int
    ) -> None:
        picks = self.picks(unbound, degree, k, 4 * math.comb(degree, k) + 2000)
        statistics.require(
            statistics.combinations(picks, degree),
            f"some sets of {k} out of {degree} neighbours are drawn too often or too rarely",
        )

    def test_hubs_are_sampled_without_bias(self, unbound: NeighborSampler) -> None:
        picks = self.picks(unbound, HUB, 100, 200, num_copies=20)
        count = torch.bincount(picks.view(-1) // (HUB // 50), minlength=50)
        statistics.require(
            statistics.inclusion(count, 100, torch.full((50,), HUB // 50)),
            f"fiftieths of the neighbours of nodes of degree {HUB} were drawn {_some(count)} times",
        )

    @pytest.mark.parametrize("degree", [2, 10, 100])
    def test_with_replacement(self, unbound: NeighborSampler, degree: int) -> None:
        picks = self.picks(unbound, degree, 4, replace=True)
        count = torch.bincount(picks.view(-1), minlength=degree)
        statistics.require(
            statistics.multinomial(count),
            f"with replacement, {degree} neighbours were drawn {_some(count)} times",
        )
        statistics.require(
            statistics.independent(picks[:, :2] % 5, (min(degree, 5),) * 2),
            "with replacement, the second draw depends on the first",
        )

    @pytest.mark.parametrize("replace", [False, True])
    def test_weights(self, unbound: NeighborSampler, replace: bool) -> None:
        weight = torch.tensor([1.0, 0.0, 2.5, 0.5, 4.0, 0.0, 1.0])
        picks = self.picks(unbound, 7, 1, weight=weight, replace=replace, weight_attr="weight")
        count = torch.bincount(picks.view(-1), minlength=7)
        statistics.require(
            statistics.multinomial(count, weight),
            f"neighbours of weights {weight.tolist()} were drawn {count.tolist()} times",
        )

    def test_weights_without_replacement(self, unbound: NeighborSampler) -> None:
        weight = torch.tensor([1.0, 2.5, 0.0, 0.5, 4.0])
        picks = self.picks(unbound, 5, 2, weight=weight, weight_attr="weight")
        statistics.require(
            statistics.combinations(picks, 5, statistics.successive(weight, 2)),
            f"pairs of neighbours of weights {weight.tolist()} must be drawn one after the other, "
            f"in proportion to the remaining weights",
        )

    @pytest.mark.parametrize("last", [False, True])
    def test_uniform_among_what_is_early_enough(self, unbound: NeighborSampler, last: bool) -> None:
        _only_if_uniform(unbound)
        data = graphs.copies(500, 10)
        data.when = torch.tensor([5, 1, 9, 3, 1, 7, 1, 9, 2, 5]).repeat(500)
        early = [0, 1, 3, 4, 6, 8, 9]  # not later than 6
        strategy = "last" if last else "uniform"
        bound = bind(unbound, data, [2], time_attr="when", temporal_strategy=strategy)
        sample = draw(bound, range(500), 3, [6] * 500)
        picks = sample.node[None][sample.row[None].long()].view(500, 2) - 500
        late = set(picks.view(-1).tolist()) - set(early)
        assert not late, f"neighbour {min(late)} is later than the seed"
        if last:
            assert set(picks.view(-1).tolist()) == {0, 9}, "the last two of time <= 6 are 0 and 9"
            return
        place = torch.full((10,), -1)
        place[early] = torch.arange(len(early))
        statistics.require(
            statistics.combinations(place[picks], len(early)),
            "some neighbours within the time limit are drawn too often or too rarely",
        )

    # Independent ###########################################################################

    def test_nodes_draw_independently(self, unbound: NeighborSampler) -> None:
        picks = self.picks(unbound, 4, 1).view(-1, 2)
        _require_independent(picks, "nodes 2i and 2i + 1 of one batch")

    @pytest.mark.parametrize("other", [1, 1 << 32, 1 << 63])
    def test_keys_draw_independently(self, unbound: NeighborSampler, other: int) -> None:
        _only_if_uniform(unbound)
        bound = bind(unbound, graphs.copies(3000, 4), [1])
        one, two = (_picks(draw(bound, range(3000), key), 3000, 1) for key in (0, other))
        pair = torch.cat([one, two], dim=1)
        _require_independent(pair, f"the same nodes with keys 0 and {other}")

    def test_hops_draw_independently(self, unbound: NeighborSampler) -> None:
        _only_if_uniform(unbound)
        n, data = 3000, graphs.copies(3000, 4)
        # Node n + 4 + i has the only in-neighbour i.
        more = torch.stack([torch.arange(n), torch.arange(n) + n + 4])
        data.edge_index = torch.cat([data.edge_index, more], dim=1)
        data.num_nodes = 2 * n + 4
        first = draw(bind(unbound, data, [1]), range(n))
        second = draw(bind(unbound, data, [1, 1]), range(n + 4, 2 * n + 4))
        assert second.num_sampled_edges == {None: [n, n]}
        neighbor = second.node[None][second.row[None][n:].long()] - n
        pair = torch.stack([_picks(first, n, 1).view(-1), neighbor], dim=1)
        _require_independent(pair, "the same nodes, expanded in the first and in the second hop")

    def test_edge_types_draw_independently(self, unbound: NeighborSampler) -> None:
        _only_if_uniform(unbound)
        copies, data = graphs.copies(3000, 4), HeteroData()
        data["a"].num_nodes = copies.num_nodes
        data["a", "x", "a"].edge_index = data["a", "y", "a"].edge_index = copies.edge_index
        sample = draw(bind(unbound, data, [1]), {"a": range(3000)})
        picks = [sample.node["a"][row.long()] - 3000 for row in sample.row.values()]
        _require_independent(torch.stack(picks, dim=1), "the same nodes along two edge types")

    def test_components_draw_independently(self, unbound: NeighborSampler) -> None:
        _only_if_uniform(unbound)
        bound = bind(unbound, graphs.copies(1, 4), [1], disjoint=True)
        picks = _picks(draw(bound, [0] * 6000), 1, 1)
        _require_independent(picks.view(-1, 2), "the same node in two components")

    def picks(
        self,
        unbound: NeighborSampler,
        degree: int,
        k: int,
        draws: int = 6000,
        *,
        num_copies: int = 500,
        weight: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The draws of at least ``draws`` nodes of a degree: neighbour numbers ``[draws, k]``."""
        _only_if_uniform(unbound)
        bound = bind(unbound, graphs.copies(num_copies, degree, weight), [k], **options)
        keys = range(math.ceil(draws / num_copies))
        return torch.cat(
            [_picks(draw(bound, range(num_copies), key), num_copies, k) for key in keys]
        )


def _picks(sample: Sample, num_copies: int, k: int) -> Tensor:
    """The neighbours that each copy drew, ``[seeds, k]``."""
    seeds = sample.num_sampled_nodes[None][0] if sample.num_sampled_nodes else num_copies
    count = torch.bincount(sample.col[None], minlength=seeds)
    assert bool((count == k).all()), f"a node drew {count[count != k][:1].tolist()} edges, not {k}"
    return sample.node[None][sample.row[None].long()].view(-1, k).long() - num_copies


def _edge(sample: Sample) -> Tensor:
    edge = sample.edge[None]
    assert edge is not None
    return edge


def _only_if_uniform(sampler: NeighborSampler) -> None:
    if not sampler.uniform:
        pytest.skip(f"{type(sampler).__name__} declares uniform = False")


def _require_independent(pair: Tensor, what: str) -> None:
    statistics.require(statistics.independent(pair, (4, 4)), f"draws depend on each other: {what}")


def _some(count: Tensor) -> str:
    listed = count.tolist()
    return str(listed) if len(listed) <= 20 else f"{listed[:10]} ... {listed[-10:]}"


def assert_equal(one: Sample, other: Sample) -> None:
    """Fail unless two samples are equal to the bit."""
    for name in ("node", "row", "col", "edge", "batch", "colptr"):
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None), f"only one sample has {name}"
        for of_type in left or ():
            mine, theirs = left[of_type], right[of_type]
            assert (mine is None) == (theirs is None), f"only one sample has {name}"
            assert mine is None or torch.equal(mine, theirs), f"{name} differs"
    for name in ("node_attrs", "edge_attrs"):
        left, right = getattr(one, name), getattr(other, name)
        assert left.keys() == right.keys(), f"{name} has other names"
        for attr, of_types in left.items():
            assert of_types.keys() == right[attr].keys(), f"{name}[{attr!r}] has other types"
            for of_type, value in of_types.items():
                assert torch.equal(value, right[attr][of_type]), f"{name}[{attr!r}] differs"
    assert one.num_sampled_nodes == other.num_sampled_nodes
    assert one.num_sampled_edges == other.num_sampled_edges
