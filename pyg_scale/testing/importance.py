"""Conformance of samplers that weigh edges: weights are there, and sums with them are unbiased."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_scale.sampler.base import NeighborSampler, Sample
from pyg_scale.sampler.capabilities import WeighsEdges
from pyg_scale.testing import graphs, statistics
from pyg_scale.testing.ask import bind, draw
from pyg_scale.testing.sampler import SamplerTests

KEYS = 200
"""Number of batches over which sums are averaged."""

DRAWS = 400
"""Number of batches whose edges are counted, enough to see a tenth more of them."""

SOURCES, SEEDS = 40, 12


class ImportanceTests(SamplerTests):
    """Tests of an unbound sampler that :class:`weighs edges <.WeighsEdges>`.

    Example::

        class TestMySampler(ImportanceTests):
            @pytest.fixture
            def sampler(self):
                return MySampler(weights="mean")
    """

    num_wanted = 4
    """The ``num_neighbors`` of a hop in these tests."""

    by_node = True
    """True if ``num_neighbors`` is how many in-edges a node takes, on average, by itself."""

    share_sources = True
    """True if nodes of a hop take the same sources where they can: a source is drawn once."""

    def test_says_what_the_weights_estimate(self, unbound: NeighborSampler) -> None:
        assert isinstance(unbound, WeighsEdges) and unbound.weights in ("sum", "mean", "gcn"), (
            "give the sampler an attribute weights that is 'sum', 'mean' or 'gcn'"
        )

    def test_every_edge_has_a_weight(self, unbound: NeighborSampler) -> None:
        bound = bind(unbound, graphs.hostile(), [self.num_wanted, self.num_wanted, 0])
        for key in range(5):
            sample = draw(bound, [0, 7, 5, 0, 99], key)
            weight = weight_of(sample)
            assert weight.dtype == torch.float32, f"edge_weight is {weight.dtype}, not float32"
            assert bool(weight.isfinite().all()) and bool((weight >= 0).all())

    def test_all_in_edges_weigh_what_layers_give_them(self, unbound: NeighborSampler) -> None:
        data = graphs.hostile()
        bound = bind(unbound, data, [-1, -1])
        sample = draw(bound, [0, 7, 5, 99], 1)
        edge = sample.edge[None]
        assert edge is not None
        expected = exact_weights(data, _weights_of(unbound))[edge]
        torch.testing.assert_close(weight_of(sample).double(), expected, rtol=1e-6, atol=0)

    def test_sums_are_unbiased(self, unbound: NeighborSampler) -> None:
        data = overlapping()
        z, control = self.deviations(unbound, data, [self.num_wanted], 0)
        assert z <= 4, (
            f"weighted sums over sampled in-edges are off by {z:.1f} standard errors on average "
            f"over {KEYS} keys"
        )
        assert control > 10, "the control without weights must fail here: the test has no power"

    def test_sums_in_the_second_hop_are_unbiased(self, unbound: NeighborSampler) -> None:
        z, _ = self.deviations(unbound, overlapping(), [-1, self.num_wanted], 1)
        assert z <= 4, (
            f"weighted sums in the second hop are off by {z:.1f} standard errors on average"
        )

    def test_edges_are_taken_as_often_as_weights_say(self, unbound: NeighborSampler) -> None:
        data, what = overlapping(), _weights_of(unbound)
        bound = bind(unbound, data, [self.num_wanted])
        exact = exact_weights(data, what)
        count = torch.zeros_like(exact)
        said = torch.zeros_like(exact)
        for key in range(DRAWS):
            sample = draw(bound, range(SEEDS), key)
            edge, weight = sample.edge[None], weight_of(sample).double()
            assert edge is not None
            count[edge] += 1
            known = said[edge]
            assert bool(((known == 0) | ((known - weight).abs() <= 1e-6 * weight)).all()), (
                "an edge of the first hop has another weight with another key, though its "
                "probability follows from the seeds"
            )
            said[edge] = weight
        assert bool((said > 0)[data.edge_index[1] < SEEDS].all()), "an edge was never taken"
        mine = data.edge_index[1] < SEEDS
        p = torch.where(mine, exact / said, 0)
        assert bool((p <= 1 + 1e-5).all()), "an edge weighs less than one that is always taken"
        found = {}
        for seed in range(SEEDS):
            mine = (data.edge_index[1] == seed).nonzero().view(-1)
            found[f"seed {seed}"] = statistics.bernoulli(count[mine], DRAWS, p[mine])
        statistics.require(found, "in-edges are not taken as often as their weights say")

    def test_nodes_with_common_neighbours_take_the_same(self, unbound: NeighborSampler) -> None:
        if not self.share_sources:
            pytest.skip("nodes draw by themselves")
        bound, different = bind(unbound, twins(), [self.num_wanted]), set()
        for key in range(20):
            sample = draw(bound, [0, 1], key)
            source, seed = sample.node[None][sample.row[None]], sample.col[None]
            taken = [tuple(source[seed == place].sort().values.tolist()) for place in (0, 1)]
            assert taken[0] == taken[1], (
                "two nodes with the same neighbours took different ones: numbers are drawn for "
                "edges, not for sources"
            )
            different.add(taken[0])
        assert len(different) > 10, "nodes take the same neighbours whatever the key"

    def deviations(
        self, unbound: NeighborSampler, data: Data, num_neighbors: list[int], hop: int
    ) -> tuple[float, float]:
        """The largest deviation of sums from the exact ones, in standard errors.

        Returns:
            With weights, and without.
        """
        x = torch.linspace(0.5, 3, data.num_nodes, dtype=torch.float64)
        source, destination = data.edge_index
        weight = exact_weights(data, _weights_of(unbound))
        exact = torch.zeros(data.num_nodes, dtype=torch.float64)
        exact.index_add_(0, destination, weight * x[source])
        bound = bind(unbound, data, num_neighbors)
        runs: list[list[Tensor]] = [[], []]
        for key in range(KEYS):
            sample = draw(bound, range(SEEDS), key)
            part = edges_of_hop(sample, hop)
            edge, weights = sample.edge[None], weight_of(sample).double()
            assert edge is not None
            edge = edge[part]
            for run, factor in zip(runs, (weights[part], torch.ones_like(weights[part]))):
                total = torch.zeros_like(exact)
                run.append(total.index_add_(0, destination[edge], factor * x[source[edge]]))
        expanded = destination.unique()
        expanded = expanded[expanded < SEEDS] if hop == 0 else expanded[expanded >= SEEDS]
        return tuple(_largest(torch.stack(run)[:, expanded], exact[expanded]) for run in runs)  # type: ignore[return-value]

    def test_numbers_on_a_tree(self, unbound: NeighborSampler) -> None:
        data, degrees, k = *tree(), self.num_wanted
        if not self.by_node:
            pytest.skip("nodes do not take in-edges each by itself")
        bound = bind(unbound, data, [k, k])
        found = torch.tensor(
            [draw(bound, [0], key).num_sampled_edges[None] for key in range(KEYS)],  # type: ignore[index]
            dtype=torch.float64,
        )
        first = min(k, degrees[0])
        taken = [min(1.0, k / degrees[0]) * min(k, d) for d in degrees[1:]]
        z = _largest(found, torch.tensor([float(first), sum(taken)], dtype=torch.float64))
        assert z <= 4, f"numbers of edges on a tree are off by {z:.1f} standard errors"


def overlapping() -> Data:
    """Seeds of degrees 2 to 24 that share sources, each of which has in-edges of its own."""
    generator = torch.Generator().manual_seed(4)
    edges = []
    for seed in range(SEEDS):
        for source in torch.randperm(SOURCES, generator=generator)[: 2 + 2 * seed].tolist():
            edges.append((SEEDS + source, seed))
    for source in range(SOURCES):
        for other in torch.randperm(SOURCES, generator=generator)[: 3 + source % 8].tolist():
            edges.append((SEEDS + other, SEEDS + source))
    order = torch.randperm(len(edges), generator=generator)
    return Data(edge_index=torch.tensor(edges)[order].t().contiguous(), num_nodes=SEEDS + SOURCES)


def twins() -> Data:
    """Nodes 0 and 1, which have in-edges from the same 40 nodes."""
    source = torch.arange(2, 2 + SOURCES)
    both = torch.cat([torch.stack([source, torch.full_like(source, seed)]) for seed in (0, 1)], 1)
    return Data(edge_index=both, num_nodes=2 + SOURCES)


def tree() -> tuple[Data, list[int]]:
    """A root with nine children, which have 1 to 9 leaves; the degrees of these ten nodes."""
    edges, leaf = [(1 + child, 0) for child in range(9)], 10
    for child in range(9):
        for _ in range(1 + child):
            edges.append((leaf, 1 + child))
            leaf += 1
    return Data(edge_index=torch.tensor(edges).t().contiguous(), num_nodes=leaf), [9, *range(1, 10)]


def exact_weights(data: Data, what: str) -> Tensor:
    """The weights of all edges in the sum, mean or GCN sum over all in-edges, ``float64``."""
    source, destination = data.edge_index.long()
    degree = torch.bincount(destination, minlength=int(data.num_nodes or 0)).double()
    if what == "sum":
        return torch.ones(source.numel(), dtype=torch.float64)
    if what == "mean":
        return 1 / degree[destination]
    root = (degree[source] * degree[destination]).sqrt()
    return torch.where(root > 0, 1 / root, 0)


def weight_of(sample: Sample) -> Tensor:
    """The ``edge_weight`` of a sample, ``[num_edges]``."""
    assert "edge_weight" in sample.edge_attrs, "the sample has no edge_attrs['edge_weight']"
    return sample.edge_attrs["edge_weight"][None]


def edges_of_hop(sample: Sample, hop: int) -> slice:
    """The edges of a hop."""
    assert sample.num_sampled_edges is not None
    number = sample.num_sampled_edges[None]
    return slice(sum(number[:hop]), sum(number[: hop + 1]))


def _weights_of(sampler: Any) -> str:
    assert isinstance(sampler, WeighsEdges) and sampler.weights is not None
    return sampler.weights


def _largest(values: Tensor, expected: Tensor) -> float:
    """The largest deviation of columns' means, in their standard errors."""
    error = values.std(dim=0) / math.sqrt(values.size(0))
    off = (values.mean(dim=0) - expected).abs()
    return float(torch.where(off < 1e-6 * expected.abs(), 0.0, off / error.clamp(min=1e-12)).max())
