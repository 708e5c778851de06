"""Neighbours that are the same in all batches: ``redraw=False``."""

import pytest
import torch

import pyg_scale
from pyg_scale.loader import NeighborLoader
from pyg_scale.ops import keys
from pyg_scale.sampler import NativeSampler, ReferenceSampler
from pyg_scale.testing import graphs
from pyg_scale.testing.ask import bind, draw
from pyg_scale.testing.draws import assert_equal

SEEDS = [0, 7, 5, 99, 98, 4, 8, 6]


@pytest.mark.parametrize(
    "options",
    [
        {"disjoint": True},
        {"disjoint": True, "weight_attr": "weight"},
        {"disjoint": True, "replace": True},
        {"time_attr": "when"},
        {"time_attr": "time", "temporal_strategy": "last"},
        {},
    ],
    ids=str,
)
def test_the_compiled_sampler_has_the_bits_of_the_reference(options, monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    time = [4, 0, 7, 3, 3, 5, 1, 4] if "time_attr" in options else None
    found, expected = (
        draw(bind(kind(), graphs.hostile(), [3, 2], redraw=False, **options), SEEDS, 3, time)
        for kind in (NativeSampler, ReferenceSampler)
    )
    assert_equal(found, expected)


def test_types(monkeypatch):
    monkeypatch.setenv("PYG_SCALE_KERNELS", "require")
    seeds = {"user": [2, 2, 3], "item": [1, 1]}
    options = {"disjoint": True, "redraw": False}
    found, expected = (
        draw(bind(kind(), graphs.hetero(), [3, 2], **options), seeds, 3)
        for kind in (NativeSampler, ReferenceSampler)
    )
    assert_equal(found, expected)
    first, second = (found.edge["user", "follows", "user"], found.batch["user"])
    assert first.numel() and second.numel()


class Keys(ReferenceSampler):
    """Remembers the keys of the nodes that it expands."""

    def pick(self, frontier, k):
        self.found = dict(zip(frontier.node.tolist(), frontier.key.tolist()))
        return super().pick(frontier, k)


def test_the_key_of_a_node_is_that_of_the_page_on_draws():
    sampler = bind(Keys(), graphs.hostile(), [3], disjoint=True, redraw=False)
    key = keys.fold(0, 5, keys.FIXED)
    draw(sampler, [7, 0], key)
    assert sampler.found == {v: keys.to_signed(keys.fold(key, 1, 0, 0, v)) for v in (7, 0)}


def loader(data=None, **options):
    options = {"num_neighbors": [3, 2], "batch_size": 8, "seed": 4, "shuffle": True} | options
    return NeighborLoader(graphs.hostile() if data is None else data, **options)


def neighborhoods(batches):
    """The edges of every seed, by seed."""
    out = {}
    for batch in batches:
        source, target = batch.n_id[batch.edge_index]
        for place, seed in enumerate(batch.n_id[: batch.batch_size].tolist()):
            mine = batch.batch[batch.edge_index[1]] == place
            out[seed] = (source[mine].tolist(), target[mine].tolist(), batch.e_id[mine].tolist())
    return out


def test_a_seed_has_one_neighborhood_in_all_epochs_and_with_any_others():
    fixed = loader(disjoint=True, redraw=False)
    first, second = neighborhoods(fixed), neighborhoods(fixed)
    assert len(first) == graphs.hostile().num_nodes
    assert first == second
    assert first == neighborhoods(loader(disjoint=True, redraw=False, batch_size=1, num_workers=2))
    assert first != neighborhoods(loader(disjoint=True, redraw=False, seed=5))
    redrawn = loader(disjoint=True)
    assert neighborhoods(redrawn) != neighborhoods(redrawn)


@pytest.mark.parametrize("worker_type", ["process", "ring"])
def test_worker_processes_draw_the_same(worker_type):
    expected = neighborhoods(loader(disjoint=True, redraw=False))
    others = loader(disjoint=True, redraw=False, num_workers=2, worker_type=worker_type)
    assert neighborhoods(others) == expected


def test_parts_draw_the_same(tmp_path):
    data = graphs.hostile()
    expected = neighborhoods(loader(data, disjoint=True, redraw=False))
    pyg_scale.save(data, tmp_path / "whole")
    pyg_scale.partition(tmp_path / "whole", 3, method="random", path=tmp_path / "parts")
    opened = pyg_scale.open(tmp_path / "parts")
    assert neighborhoods(loader(opened, disjoint=True, redraw=False)) == expected


def test_draws_are_kept_only_with_a_seed():
    with pytest.raises(ValueError, match="redraw=False needs seed="):
        NeighborLoader(graphs.hostile(), [2], redraw=False)


def test_a_sampler_that_cannot_keep_its_draws_says_so():
    with pytest.raises(NotImplementedError, match="redraw=False"):
        loader(neighbor_sampler="labor", redraw=False)
    with pytest.raises(TypeError, match="redraw"):
        loader(redraw="no")


def test_chosen_edges_are_uniform_over_seeds():
    """Draws of a node are kept, but over seeds of the loader all its edges are equally likely."""
    data = graphs.hostile()
    node = int(data.edge_index[1].bincount().argmax())
    edges = (data.edge_index[1] == node).nonzero().view(-1)
    counts = torch.zeros(data.num_edges)
    rounds = 400
    for seed in range(rounds):
        batch = next(iter(loader(data, num_neighbors=[2], input_nodes=torch.tensor([node]),
                                 disjoint=True, redraw=False, seed=seed)))  # fmt: skip
        counts[batch.e_id] += 1
    expected = 2 * rounds / edges.numel()
    # Sampling without replacement has less variance than the multinomial that chi-square assumes.
    variance = expected * (1 - 2 / edges.numel())
    statistic = float(((counts[edges] - expected) ** 2 / variance).sum())
    degrees = edges.numel() - 1
    assert abs(statistic - degrees) < 5 * (2 * degrees) ** 0.5 + 5
