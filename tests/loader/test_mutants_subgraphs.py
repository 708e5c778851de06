"""Loaders of subgraphs that draw or cut wrongly: their tests see each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyg_scale.loader import (
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    RandomNodeLoader,
    cluster,
    graph_saint,
    random_node,
    shadow,
)
from pyg_scale.ops import keys
from pyg_scale.ops.induced_edges import Induced
from tests.loader import test_cluster, test_graph_saint, test_random_node, test_shadow

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: list[tuple[Patch, Callable[[], None]]] = []


def caught_by(*tests: Callable[[], None]) -> Callable[[Patch], Patch]:
    """Say which tests must fail on a mutant."""

    def register(mutant: Patch) -> Patch:
        MUTANTS.extend((mutant, test) for test in tests)
        return mutant

    return register


def named(value: Any) -> str:
    return getattr(value, "__name__", "test")


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=named)
def test_is_caught(
    mutant: Patch, test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test()


@caught_by(test_graph_saint.test_draws_have_the_probabilities_of_pyg)
def nodes_are_equally_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(self: Any, key: int) -> torch.Tensor:
        return keys.draws_each(key, self._batch_size, self.N)

    monkeypatch.setattr(GraphSAINTNodeSampler, "_draw", draw)


@caught_by(
    lambda: test_graph_saint.test_means_and_variances_with_and_without_norms(GraphSAINTNodeSampler),
    lambda: test_graph_saint.test_exact_norms_are_those_of_all_draws_that_there_are(
        GraphSAINTEdgeSampler, 2
    ),
)
def norms_are_of_a_single_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_saint, "_in_any", lambda chance, draws: chance)


@caught_by(
    lambda: test_graph_saint.test_means_and_variances_with_and_without_norms(GraphSAINTEdgeSampler)
)
def all_batches_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    induced = graph_saint._Saint._induced
    monkeypatch.setattr(
        graph_saint._Saint, "_induced", lambda self, key, ids=True: induced(self, 1)
    )


@caught_by(
    lambda: test_shadow.test_with_all_neighbors_equals_k_hop_subgraph(2, False),
    lambda: test_shadow.test_sampled_subgraphs_are_induced_and_within_the_neighborhood(False),
)
def an_edge_of_a_neighborhood_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = shadow._EgoSampler.sample

    def without_last(self: Any, *given: Any) -> Any:
        out = sample(self, *given)
        for each in (out.row, out.col, out.edge):
            each[None] = each[None][:-1]
        return out

    monkeypatch.setattr(shadow._EgoSampler, "sample", without_last)


@caught_by(lambda: test_shadow.test_draws_are_unbiased(False))
def the_first_neighbors_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """All roots draw with the numbers of one node."""
    sample = shadow.NativeSampler.sample

    def alike(self: Any, seed: Any, seed_time: Any, key: int) -> Any:
        self._disjoint, self.redraw = True, False
        return sample(self, seed, seed_time, key)

    monkeypatch.setattr(shadow.NativeSampler, "sample", alike)


@caught_by(
    lambda: test_cluster.test_a_batch_is_the_subgraph_of_its_clusters("csr"),
    lambda: test_cluster.test_batches_equal_those_of_pyg("csr", False),
)
def edges_between_clusters_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    join = cluster.join_clusters

    def apart(partptr: Any, indptr: Any, index: Any, wanted: Any, **options: Any) -> Any:
        node, edge_index, edge = join(partptr, indptr, index, wanted, **options)
        sizes = partptr.diff()[wanted]
        of = torch.arange(sizes.numel()).repeat_interleave(sizes)
        first, second = of[edge_index]
        kept = first == second
        return Induced(node, edge_index[:, kept], edge[kept])

    monkeypatch.setattr(cluster, "join_clusters", apart)


@caught_by(
    test_random_node.test_shuffled_sets_are_all_nodes_with_their_edges,
)
def edges_among_nodes_come_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_node._AmongSeeds, "sample", random_node.NativeSampler.sample)


@caught_by(test_random_node.test_every_pair_of_nodes_is_together_equally_often)
def neighbors_in_the_list_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = RandomNodeLoader._sample

    def shifted(self: Any, batch: Any) -> Any:
        begin = int(batch.index[0])
        batch.index = (begin + torch.arange(batch.index.numel())) % len(self.dataset)
        return sample(self, batch)

    monkeypatch.setattr(RandomNodeLoader, "_sample", shifted)
