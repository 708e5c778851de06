"""A TGN memory goes on from a checkpoint as if nothing had happened, messages included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator, TGNMemory

from pyg_scale.train import Checkpoint, TGNMessages


def memory(num_nodes: int = 12, dim: int = 3) -> TGNMemory:
    return TGNMemory(num_nodes, dim, 5, 4, IdentityMessage(dim, 5, 4), LastAggregator())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"memory": memory()})

    def step(self, generator: torch.Generator) -> torch.Tensor:
        found = self.inner["memory"]
        src, dst = (torch.randint(0, 12, (6,), generator=generator) for _ in range(2))
        time, msg = torch.arange(6), torch.rand(6, 3, generator=generator)
        out, _ = found(torch.arange(12))
        found.update_state(src, dst, time, msg)
        found.detach()
        return out.detach()


def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, generator = Model(), torch.Generator().manual_seed(1)
    for _ in range(5):
        model.step(generator)
    with Checkpoint(tmp_path, {"model": model}) as checkpoint:
        checkpoint.save(5)
    left = generator.get_state()
    expected = [model.step(generator) for _ in range(3)]

    again = Model()
    with Checkpoint(tmp_path, {"model": again}) as checkpoint:
        assert checkpoint.load().step == 5
    generator.set_state(left)
    for value in expected:
        assert torch.equal(again.step(generator), value)

    forgets = Model()
    with Checkpoint(tmp_path, {"model": forgets}) as checkpoint:
        checkpoint.load()
    forgets.inner["memory"]._reset_message_store()
    generator.set_state(left)
    assert not torch.equal(forgets.step(generator), expected[0]), "messages do not matter here"


def test_messages_of_nobody_are_state_too() -> None:
    found = TGNMessages(memory())
    state = found.state_dict()
    assert state[""]["msg_s_store"]["node"].numel() == 0
    found.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"node": torch.tensor([12])}, "does not fit a memory of 12 nodes"),
        ({"count": torch.tensor([2])}, "does not fit"),
        ({"msg": torch.rand(1, 4)}, "messages of 3 numbers"),
        ({"t": None}, "must have the tensors"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, Any], match: str) -> None:
    one = memory()
    one.update_state(torch.tensor([1]), torch.tensor([2]), torch.tensor([3]), torch.rand(1, 3))
    found = TGNMessages(one)
    state = found.state_dict()
    state[""]["msg_d_store"] |= change
    before = one.msg_s_store
    with pytest.raises(ValueError, match=match):
        found.load_state_dict(state)
    assert one.msg_s_store is before


def test_only_of_modules_that_have_a_memory() -> None:
    with pytest.raises(ValueError, match="Linear has no TGNMemory"):
        TGNMessages(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="the module has the memories"):
        TGNMessages(memory()).load_state_dict({"other": {}})
