"""Batches of equal cost of LABOR, of neighbourhoods that are never redrawn, and beside hubs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pyg_scale.loader import Budget
from pyg_scale.ops.keys import batch_key
from pyg_scale.sampler import Labor
from tests.loader.batches import assert_same_batches
from tests.loader.test_batch_cost import (
    by_planned,
    edges_of,
    loader,
    spread,
    star_and_power_law,
)

CUT: dict[str, Any] = {
    "batch_cost": Budget("edges", 80),  # of hundreds of batches, of which eight are tried
    "num_neighbors": [3, 3],
    "input_nodes": torch.arange(600),
}

LABOR: list[dict[str, Any]] = [
    {},
    {"layer_dependency": True},
    {"hops": "layers", "weights": "sum"},
]


@pytest.mark.parametrize(("leaves", "budget"), [(4000, 12_000), (4000, 16_000), (500, 4_000)])
def test_a_hub_does_not_make_its_batch_larger(leaves: int, budget: int) -> None:
    """Beside it there are few other seeds, which share less: without a correction it is 1.2."""
    own = loader(
        star_and_power_law(leaves=leaves),
        num_neighbors=[-1, 10],
        batch_cost=Budget("edges", budget),
        seed=7,
    )
    for _ in range(2):
        assert spread(edges_of(own)) <= 1.15


@pytest.mark.parametrize("options", LABOR, ids=str)
def test_batches_of_labor_cost_nearly_the_same(options: dict[str, Any]) -> None:
    own = loader(neighbor_sampler=Labor(**options), batch_cost=Budget("edges", 3000))
    for _ in range(2):
        batches = list(own)
        seeds = torch.cat([batch.input_id for batch in batches])
        assert seeds.sort().values.tolist() == list(range(2001))
        cost = edges_of(batches)
        assert cost.max() <= 3000
        assert spread(cost) <= 1.15
        assert all(batch.edge_weight.numel() == batch.num_edges for batch in batches)


@pytest.mark.parametrize("options", LABOR, ids=str)
def test_pieces_of_labor_draw_as_the_whole_and_resume(options: dict[str, Any]) -> None:
    """A source has the number that it would have had in the planned batch."""
    made = [loader(neighbor_sampler=Labor(**options), **CUT, num_workers=n) for n in (0, 2, 0, 0)]
    batches = list(made[0])
    assert_same_batches(batches, made[1])
    for number, _ in enumerate(itertools.islice(made[3], 6), start=1):
        made[2].load_state_dict(made[3].state_dict())
        assert_same_batches(batches[number : number + 2], itertools.islice(made[2], 2))


def test_pieces_draw_with_the_numbers_of_the_whole() -> None:
    """A seed takes the in-edges that it would have taken had its batch not been cut."""
    own = loader(neighbor_sampler=Labor(), **CUT)
    whole = loader(neighbor_sampler=Labor(), **CUT | {"batch_cost": Budget("edges", 10_000)})
    planned = by_planned(list(own))
    assert any(len(group) > 1 for group in planned)
    for number, group in enumerate(planned[:40]):
        key = batch_key(3, 0, number)
        seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in group])
        sampled = whole.node_sampler.sample({None: seeds}, None, key)
        first = sampled.num_sampled_edges[None][0]
        expected = sampled.edge[None][:first].sort().values
        parts = [batch.e_id[: batch.num_sampled_edges[0]] for batch in group]
        assert torch.equal(torch.cat(parts).sort().values, expected)


def test_batches_that_depend_on_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_cost"):
        next(iter(loader(neighbor_sampler=Labor(batch_dependency=4))))


def neighborhoods(batches: Any) -> dict[int, list[int]]:
    """The edges of every seed, by seed."""
    out = {}
    for batch in batches:
        for place, seed in enumerate(batch.n_id[: batch.batch_size].tolist()):
            mine = batch.batch[batch.edge_index[1]] == place
            out[seed] = batch.e_id[mine].tolist()
    return out


def test_neighbourhoods_that_are_never_redrawn_do_not_depend_on_the_plan() -> None:
    kwargs: dict[str, Any] = {"num_neighbors": [4, 3], "disjoint": True, "redraw": False}
    expected = neighborhoods(loader(batch_size=64, **kwargs))
    assert len(expected) == 2001
    for budget in (300, 2000):
        own = loader(batch_cost=Budget("edges", budget), **kwargs)
        for _ in range(2):
            batches = list(own)
            assert edges_of(batches).max() <= budget
            assert neighborhoods(batches) == expected
    redrawn = loader(batch_cost=Budget("edges", 300), **kwargs | {"redraw": True})
    assert neighborhoods(redrawn) != expected
