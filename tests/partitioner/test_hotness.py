"""Sampling probabilities: closed forms on trees, enumeration, and how often batches have a node."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale.datasets import load
from pyg_scale.partitioner.hotness import sample_prob
from pyg_scale.sampler.native import NativeSampler


def tree(fanout: int, depth: int, both: bool = False) -> tuple[Data, torch.Tensor]:
    """A tree whose in-edges lead away from node 0, and the depth of every node."""
    parent, level, depths = [], [0], [0]
    for d in range(depth):
        nxt = []
        for node in level:
            for _ in range(fanout):
                parent.append(node)
                nxt.append(len(parent))
                depths.append(d + 1)
        level = nxt
    edges = torch.stack([torch.arange(1, len(parent) + 1), torch.tensor(parent)])
    if both:
        edges = torch.cat([edges, edges.flip(0)], dim=1)
    return Data(edge_index=edges, num_nodes=len(parent) + 1), torch.tensor(depths)


def test_on_a_tree_it_is_the_product_along_the_path():
    data, depth = tree(fanout=4, depth=3)
    found = sample_prob(data, torch.tensor([0]), [3, 2, -1])[None]
    want = torch.tensor([1, 3 / 4, 3 / 4 * 2 / 4, 3 / 4 * 2 / 4])[depth]
    assert torch.allclose(found, want.double(), atol=1e-12)


def test_on_a_tree_with_random_batches_of_leaves():
    # Four nodes in a chain each, 0 <- 4 <- 8, ...: a batch has one chain's head with 1/2.
    head = torch.arange(4)
    edges = torch.cat([torch.stack([head + 4, head]), torch.stack([head + 8, head + 4])], 1)
    data = Data(edge_index=edges, num_nodes=12)
    found = sample_prob(data, head, [1, 1], batch_size=2)[None]
    assert torch.equal(found, torch.full((12,), 0.5).double())


def test_two_levels_of_an_undirected_tree_are_exact():
    data, depth = tree(fanout=4, depth=2, both=True)
    found = sample_prob(data, torch.tensor([0]), [2, 3], num_batches=1)[None]
    # A child has five neighbours, its parent among them.
    want = torch.tensor([1, 2 / 4, 2 / 4 * 3 / 5])[depth]
    assert torch.allclose(found, want.double(), atol=1e-12)


def test_types_with_the_closed_form():
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 2, 6
    data["b", "to", "a"].edge_index = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 0, 1]])
    found = sample_prob(data, {"a": torch.tensor([0, 1])}, [3])
    assert found["a"].tolist() == [1, 1]
    assert found["b"].tolist() == [0.75] * 4 + [1, 0]


def diamond() -> Data:
    """Node 0 reaches node 3 by 1 or by 2; each has another neighbour."""
    pairs = [(1, 0), (2, 0), (3, 1), (4, 1), (3, 2), (5, 2)]
    return Data(edge_index=torch.tensor(pairs).t(), num_nodes=6)


def enumerated(data: Data, seed: int, hops: list[int]) -> torch.Tensor:
    """Over all choices of edges, exactly; each node is expanded once, with equal chances."""
    src, dst = data.edge_index.tolist()
    chance = torch.zeros(data.num_nodes, dtype=torch.float64)

    def go(seen: set[int], frontier: list[int], hop: int, p: float) -> None:
        if hop == len(hops) or not frontier:
            chance[list(seen)] += p
            return
        choices = []
        for node in frontier:
            near = [s for s, d in zip(src, dst) if d == node]
            choices.append(list(itertools.combinations(near, min(hops[hop], len(near)))))
        for chosen in itertools.product(*choices):
            new = {node for nodes in chosen for node in nodes} - seen
            share = p / torch.tensor([len(c) for c in choices]).prod().item()
            go(seen | new, sorted(new), hop + 1, share)

    go({seed}, [seed], 0, 1.0)
    return chance


def within(found: torch.Tensor, want: torch.Tensor, n: int) -> torch.Tensor:
    """Which frequencies of n draws are within four standard deviations."""
    sigma = (want * (1 - want) / n).sqrt()
    return (found - want).abs() <= 4 * sigma + 1e-12


def test_where_paths_meet_it_is_what_enumeration_gives():
    want = enumerated(diamond(), 0, [1, 1])
    assert want[3] == 0.5  # not 1 - (1 - 1/4)^2: either 1 or 2 is taken, never both
    found = sample_prob(diamond(), torch.tensor([0]), [1, 1], num_batches=2000)[None]
    assert within(found, want, 2000).all()
    spread = sample_prob(diamond(), torch.tensor([0]), [1, 1], method="propagate")[None]
    assert spread[3] == 1 - (1 - 1 / 4) ** 2


def test_random_graphs_against_enumeration():
    g = torch.Generator().manual_seed(3)
    for number in range(3):
        data = Data(edge_index=torch.randint(0, 7, (2, 14), generator=g), num_nodes=7)
        want = enumerated(data, 0, [2, 1])
        found = sample_prob(data, torch.tensor([0]), [2, 1], num_batches=1500, seed=number)[None]
        assert within(found, want, 1500).all()


def test_all_neighbours_are_reached_surely(data_dir):
    data = load(data_dir / "cora.npz")
    seeds = torch.tensor([0, 5])
    found = sample_prob(data, seeds, [-1, -1], num_batches=1)[None]
    reached = set(seeds.tolist())
    for _ in range(2):
        src, dst = data.edge_index
        mask = torch.zeros(data.num_nodes, dtype=torch.bool)
        mask[list(reached)] = True
        reached |= set(src[mask[dst]].tolist())
    assert found.nonzero().view(-1).tolist() == sorted(reached)
    assert set(found.tolist()) == {0.0, 1.0}


def test_a_real_graph_against_other_batches(data_dir):
    """Means of many batches made another way are within four standard deviations."""
    data = load(data_dir / "facebook_pages.npz")
    seeds = data.train_mask.nonzero().view(-1)
    n = 400
    found = sample_prob(data, seeds, [5, 5], batch_size=64, num_batches=n, seed=1)[None]
    sampler, other = NativeSampler(data, [5, 5]), torch.zeros(data.num_nodes)
    g = torch.Generator().manual_seed(5)
    for key in range(n):
        batch = seeds[torch.randperm(seeds.numel(), generator=g)[:64]]
        other[sampler.sample({None: batch}, None, 1000 + key).node[None]] += 1 / n
    sigma = (found * (1 - found) / n + other * (1 - other) / n).sqrt()
    off = (found - other).abs() > 4 * sigma + 1.5 / n
    assert off.sum() <= 3  # of 22,470 nodes; 4 sigma are passed by 1 of 16,000
    spread = sample_prob(data, seeds, [5, 5], batch_size=64, method="propagate")[None]
    both = torch.stack([spread, other.double()])
    assert torch.corrcoef(both)[0, 1] > 0.9


def test_the_size_of_pieces_changes_nothing(data_dir, monkeypatch):
    data = load(data_dir / "cora.npz")
    seeds = data.train_mask.nonzero().view(-1)
    before = sample_prob(data, seeds, [5, 5], batch_size=10, method="propagate")[None]
    monkeypatch.setattr("pyg_scale.partitioner.hotness._EDGES", 97)
    after = sample_prob(data, seeds, [5, 5], batch_size=10, method="propagate")[None]
    assert torch.equal(before, after)


def test_without_seeds_nothing_is_sampled():
    none = torch.empty(0, dtype=torch.int64)
    for method in ("auto", "propagate", "sample"):
        assert sample_prob(diamond(), none, [2], method=method)[None].sum() == 0


@pytest.mark.parametrize(
    ("seeds", "options", "error", "message"),
    [
        (torch.tensor([6]), {}, IndexError, "seed 6"),
        (torch.tensor([1, 1]), {}, ValueError, "distinct"),
        (torch.tensor([1.0]), {}, TypeError, "int64"),
        ({"a": torch.tensor([1])}, {}, ValueError, "unknown node type 'a'"),
        (torch.tensor([1]), {"method": "guess"}, ValueError, "'propagate'"),
        (torch.tensor([1]), {"batch_size": 0}, ValueError, "batch_size"),
        (torch.tensor([1]), {"num_neighbors": [-2]}, ValueError, "num_neighbors"),
    ],
)
def test_bad_input(seeds, options, error, message):
    hops = options.pop("num_neighbors", [2])
    with pytest.raises(error, match=message):
        sample_prob(diamond(), seeds, hops, **options)
