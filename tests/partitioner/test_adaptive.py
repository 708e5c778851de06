"""Moving nodes until every device holds its share: how many, which, and not back again."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_scale.datasets import load
from pyg_scale.partitioner import repartition


def path_graph(size: int = 100) -> Data:
    node = torch.arange(size - 1)
    edges = torch.stack([node, node + 1])
    return Data(edge_index=torch.cat([edges, edges.flip(0)], 1), num_nodes=size)


def blocks(sizes: list[int]) -> torch.Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def test_the_boundary_of_a_path_moves():
    found = repartition(path_graph(), blocks([50, 50]), [0.7, 0.3])
    assert found.assignment.tolist() == blocks([69, 31]).tolist()  # 31 is 5 % above 30
    assert (found.num_moved, found.lower_bound) == (19, 19)
    assert found.cut_before == found.cut_after == 1 / 99
    assert found.shares == [0.69, 0.31] and found.balanced


@pytest.mark.parametrize("name", ["facebook_pages", "tolokers"])
@pytest.mark.parametrize("shares", [[4, 2, 1, 1], [1, 1.2, 1, 0.9], [1, 1, 1, 1]])
def test_shares_hold_after_as_few_moves_as_can_be_and_stay(data_dir, name, shares):
    data = load(data_dir / f"{name}.npz")
    part = blocks([data.num_nodes * k // 10 for k in (4, 3, 2, 1)])
    part = torch.cat([part, part.new_full((data.num_nodes - part.numel(),), 3)])
    found = repartition(data, part, shares)
    held = torch.bincount(found.assignment, minlength=4) / data.num_nodes
    target = torch.tensor(shares) / sum(shares)
    assert ((held / target - 1).abs() <= 0.05).all()
    assert held.tolist() == pytest.approx(found.shares)
    assert found.num_moved == int((found.assignment != part).sum()) == found.lower_bound
    src, dst = data.edge_index
    cut = float((found.assignment[src] != found.assignment[dst]).float().mean())
    assert found.cut_after == pytest.approx(cut) and cut <= found.cut_before + 0.02
    again = repartition(data, found.assignment, shares)
    assert again.num_moved == again.lower_bound == 0
    assert torch.equal(again.assignment, found.assignment)


def test_nothing_moves_while_all_are_within_the_tolerance():
    part = blocks([52, 48])
    assert repartition(path_graph(), part, [1, 1]).num_moved == 0
    assert repartition(path_graph(), part, [1, 1], tolerance=0.01).num_moved == 2


def test_measured_loads_and_capabilities():
    # The nodes of part 0 cost three times as much; device 1 is twice as fast.
    part = blocks([50, 50])
    found = repartition(path_graph(), part, loads=[75.0, 25.0], capabilities=[1.0, 2.0])
    work = torch.tensor([1.5, 0.5])[part]
    share = [float(work[found.assignment == p].sum() / work.sum()) for p in (0, 1)]
    assert share == pytest.approx(found.shares, abs=1e-4)
    assert share[0] == pytest.approx(1 / 3, rel=0.05) and share[1] == pytest.approx(2 / 3, rel=0.05)
    assert found.num_moved == found.lower_bound and found.target == pytest.approx([1 / 3, 2 / 3])
    even = repartition(path_graph(), part, loads=[1, 1], capabilities=[7, 7])
    assert even.num_moved == 0


def test_weights_of_nodes():
    weights = torch.ones(100, dtype=torch.int64)
    weights[:10] = 3
    found = repartition(path_graph(), blocks([50, 50]), [1, 1], weights=weights)
    assert found.balanced and found.shares == pytest.approx([0.5, 0.5], rel=0.051)
    assert found.num_moved >= found.lower_bound > 0


def test_a_node_that_outweighs_the_tolerance_is_said():
    weights = torch.tensor([100, 1, 1, 1])
    found = repartition(path_graph(4), torch.tensor([0, 0, 1, 1]), [1, 1], weights=weights)
    assert not found.balanced
    again = repartition(path_graph(4), found.assignment, [1, 1], weights=weights)
    assert again.num_moved == 0


def test_empty_parts_are_filled():
    found = repartition(path_graph(), torch.zeros(100, dtype=torch.int64), [1, 1, 2], num_parts=3)
    assert found.balanced and found.shares == pytest.approx([0.25, 0.25, 0.5], rel=0.06)
    assert found.cut_after <= 5 / 99


def test_types():
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 30, 30
    data["a", "to", "b"].edge_index = torch.arange(30).repeat(2, 1)
    part = {"a": torch.zeros(30).long(), "b": torch.zeros(30).long()}
    found = repartition(data, part, [1, 1], num_parts=2)
    assert found.balanced and set(found.assignment) == {"a", "b"}
    split = found.assignment["a"] != found.assignment["b"]
    assert split.sum() <= 1  # pairs stay together, but for the last one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either shares="),
        ({"shares": [1, 1], "loads": [1, 1]}, "either shares="),
        ({"loads": [1, 1]}, "either shares="),
        ({"shares": [1, 1, 1]}, "each of the 2 parts"),
        ({"shares": [1, 0]}, "above 0"),
        ({"loads": [1, float("nan")], "capabilities": [1, 1]}, "finite"),
        ({"loads": [1, 0], "capabilities": [1, 1]}, "above 0 where a part has nodes"),
        ({"shares": [1, 1], "tolerance": 0}, "tolerance"),
        ({"loads": [1, 1], "capabilities": [1, 1], "weights": torch.ones(100)}, "goes with shares"),
        ({"shares": [1, 1], "weights": -torch.ones(100).long()}, "negative"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        repartition(path_graph(), blocks([50, 50]), **options)


def test_the_assignment_must_fit():
    with pytest.raises(ValueError, match="99 entries for 100 nodes"):
        repartition(path_graph(), torch.zeros(99).long(), [1, 1], num_parts=2)
