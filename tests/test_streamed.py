"""The graph that is computed piece by piece."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pyg_scale.datasets import StreamedCommunities, streamed

GRAPH = StreamedCommunities(200_001, 5_000_000, num_classes=10, num_features=16, seed=3)


def edges(graph: StreamedCommunities) -> np.ndarray:
    return np.concatenate([np.stack(graph.edges(c)) for c in range(graph.num_chunks)], axis=1)


def test_every_link_is_there_in_both_directions_and_none_is_a_loop() -> None:
    found = edges(GRAPH)
    assert found.shape == (2, GRAPH.num_edges) and found.dtype == np.int32
    assert found.min() >= 0 and found.max() < GRAPH.num_nodes
    assert np.array_equal(found[:, 0::2], found[::-1, 1::2])
    assert (found[0] != found[1]).all()


def test_degrees_are_a_power_law() -> None:
    degree = np.sort(np.bincount(edges(GRAPH)[0], minlength=GRAPH.num_nodes))[::-1]
    assert 0.5 * GRAPH.num_edges**0.5 < degree[0] < 1.5 * GRAPH.num_edges**0.5
    # above the cap, the degree of rank r falls as r ** -(1 / (exponent - 1))
    rank = np.array([1_000, 100_000])
    slope = np.diff(np.log(degree[rank]))[0] / np.diff(np.log(rank))[0]
    assert abs(slope + 1 / (GRAPH.exponent - 1)) < 0.05


def test_communities_tie_and_labels_and_features_follow_them() -> None:
    community = GRAPH.community(0, GRAPH.num_nodes)
    counts = np.bincount(community)
    assert counts.size == 10 and counts.max() - counts.min() <= 1
    found = community[edges(GRAPH)]
    inside = (found[0] == found[1]).mean()
    assert abs(inside - (GRAPH.homophily + (1 - GRAPH.homophily) / 10)) < 0.01
    label = GRAPH.labels(0, GRAPH.num_nodes)
    assert abs((label != community).mean() - 0.9 * GRAPH.label_noise) < 0.003
    x = GRAPH.features(0, GRAPH.num_nodes, torch.float64)
    mean = torch.stack([x[torch.from_numpy(community == c)].mean(0) for c in range(10)])
    assert torch.allclose(mean.abs(), torch.full_like(mean, GRAPH.signal), atol=0.05)
    assert abs(float((x - mean[community]).std()) - 1) < 0.01


def test_any_range_is_the_same_as_the_whole() -> None:
    half = streamed.NODES
    assert torch.equal(
        GRAPH.features(0, GRAPH.num_nodes)[half : 2 * half], GRAPH.features(half, 2 * half)
    )
    assert np.array_equal(
        GRAPH.labels(0, GRAPH.num_nodes)[half : half + 99], GRAPH.labels(half, half + 99)
    )
    parts = [GRAPH.splits(b, min(b + half, GRAPH.num_nodes)) for b in range(0, 200_001, half)]
    whole = GRAPH.splits(0, GRAPH.num_nodes)
    for name, share in zip(("train", "val", "test"), GRAPH.split, strict=True):
        assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])
        assert abs(whole[name].size / GRAPH.num_nodes - share) < 0.002
    assert not set(whole["train"]) & set(whole["val"]) & set(whole["test"])


def test_the_seed_is_all_that_matters() -> None:
    first, second = GRAPH.edges(1), replace(GRAPH).edges(1)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0], replace(GRAPH, seed=4).edges(1)[0])


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5])
def test_tiny_graphs_have_no_loops(num_nodes: int) -> None:
    graph = StreamedCommunities(num_nodes, 2_000, num_classes=min(3, num_nodes))
    source, destination = graph.edges(0)
    assert (source != destination).all() and destination.max() < num_nodes


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_nodes": 1},
        {"num_nodes": 2**31},
        {"num_edges": 3},
        {"num_classes": 0},
        {"num_communities": 5},
        {"exponent": 2.0},
        {"homophily": 1.5},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="num_|exponent"):
        StreamedCommunities(**{"num_nodes": 1000, "num_edges": 10} | wrong)
