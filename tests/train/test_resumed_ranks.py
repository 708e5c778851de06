"""Three ranks and more go on, wherever they were stopped, to the bit as if they had not been."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

from pyg_scale import parallel
from pyg_scale.datasets import planted_communities
from pyg_scale.loader import NeighborLoader
from pyg_scale.testing.processes import WaitingProcesses

EPOCHS = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(4) as started:
        yield started


def train(state: dict[str, Any] | None, steps: int | None = None, **options: Any) -> list[Any]:
    """What there was after each step, from a state on.

    An epoch has three steps and one more in which some ranks have no batch.
    """
    size = dist.get_world_size()
    data, count = planted_communities(120, 600, 3, 8), 3 * size + 2
    seeds = torch.arange(3 * count)
    loader = NeighborLoader(
        data, [3, 2], seeds, batch_size=3, shuffle=True, seed=5, split_seeds="global"
    )
    torch.manual_seed(dist.get_rank())
    model = parallel.wrap(GraphSAGE(8, 16, 2, 3), "ddp", **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    parts = {"model": model.module, "optimizer": optimizer, "loader": loader}
    if state is not None:
        for name, part in parts.items():
            part.load_state_dict(copy.deepcopy(state[name]))
    found: list[Any] = []

    def note() -> bool:
        found.append(copy.deepcopy({name: part.state_dict() for name, part in parts.items()}))
        return len(found) == steps

    while loader.epoch < EPOCHS:
        with model.join(optimizer):
            for batch in loader:
                optimizer.zero_grad()
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                loss = F.cross_entropy(out, batch.y[: batch.batch_size])
                model.backward(loss, batch.batch_size)
                optimizer.step()
                if loader.state_dict()["delivered"] < count and note():
                    return found
        if note():  # of the last step, which not all ranks make in the loop
            return found
    return found


def same(one: Any, two: Any) -> bool:
    return all(torch.equal(one["model"][name], value) for name, value in two["model"].items())


def stopped(at: Sequence[int], options: dict[str, Any]) -> tuple[list[int], bool]:
    """After which steps a run was resumed and went another way, and one that was three times."""
    expected = train(None, **options)
    assert len(expected) == 4 * EPOCHS
    wrong = []
    for step in at:
        again = train(expected[step - 1], 2, **options)
        if not all(map(same, again, expected[step:])):
            wrong.append(step)
    state: Any = None
    for steps in (1, 3, 1, None):
        state = train(state, steps, **options)[-1]
    return wrong, same(state, expected[-1])


@pytest.mark.matrix(2)
@pytest.mark.parametrize("world_size", [3, 4])
def test_stopped_after_any_step(ranks: WaitingProcesses, world_size: int) -> None:
    assert ranks.run(stopped, range(1, 8), {}, world_size=world_size) == [([], True)] * world_size


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 1e-3},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)
def test_stopped_with_options(ranks: WaitingProcesses, options: dict[str, Any]) -> None:
    assert ranks.run(stopped, [1, 4], options, world_size=3) == [([], True)] * 3
