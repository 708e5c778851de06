"""``layer``, where models have buffers, and attributes that change between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from pyg_scale import parallel
from pyg_scale.errors import CommError
from pyg_scale.parallel.pipeline import set_setting
from pyg_scale.testing.parallel import TOLERANCE
from pyg_scale.testing.processes import WaitingProcesses

ROWS = 7


class Plain(nn.Module):
    """Attributes of several kinds, a buffer that it computes with, and one that is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = pyg.SAGEConv(4, 4), pyg.SAGEConv(4, 3)
        self.norm, self.part = nn.BatchNorm1d(4), nn.ModuleList([Part()])
        self.sizes, self.options, self.act = (1.0, 2.0), {"shift": 0.0}, "relu"
        self.register_buffer("warmth", torch.tensor(1.0))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan]))
        self.register_buffer("seen", torch.tensor(False))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.seen.fill_(True)
        factor = (self.warmth + 1).sqrt()
        for _ in range(self.mask.size(0)):
            x = x * factor
        x = self.norm(self.first(x, edge_index)) + self.options["shift"]
        x = self.part[0](getattr(F, self.act)(x)) * self.sizes[1]
        return self.last(x, edge_index) * factor


class Part(nn.Module):
    """A module within, which has a setter."""

    def __init__(self) -> None:
        super().__init__()
        self._scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self._scale


class Alternates(nn.Module):
    """Sets an attribute in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = pyg.SAGEConv(4, 4), pyg.SAGEConv(4, 3)
        self.left = True

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.left = not self.left
        x = self.first(x, edge_index)
        return self.last(x if self.left else -x, edge_index)


class Running(pyg.SimpleConv):
    """Divides by a size that it adds up in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.size.add_(x.detach().abs().mean())
        return super().forward(x, edge_index) / self.size.clone()


class Divides(nn.Module):
    """Has a layer whose results depend on a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.running, self.last = pyg.SAGEConv(4, 4), Running(), pyg.SAGEConv(4, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.running(self.first(x, edge_index), edge_index), edge_index)


class Shares(nn.Module):
    """Layers of all ranks have one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = pyg.SAGEConv(4, 4), nn.BatchNorm1d(4), pyg.SAGEConv(4, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.norm(self.last(self.norm(self.first(x, edge_index)), edge_index))


def built(kind: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().double()


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(ROWS, (2, 20), generator=generator)


def evaluate_but_for_norm(model: Any) -> None:
    model.eval()
    model.norm.train()


CHANGES: dict[str, Callable[[Any], object]] = {
    "none": lambda model: None,
    "tuple": lambda model: setattr(model, "sizes", (1.0, 3.0)),
    "dictionary": lambda model: model.options.update(shift=-0.5),
    "text": lambda model: setattr(model, "act", "tanh"),
    "within": lambda model: setattr(model.part[0], "_scale", 2),
    "numpy": lambda model: setattr(model.part[0], "_scale", np.float32(0.5)),
    "buffer": lambda model: model.warmth.fill_(3.0),
    "back": lambda model: setattr(model, "sizes", (1.0, 2.0)),
    "modes": evaluate_but_for_norm,
}


def differences(
    kind: Callable[[], nn.Module],
    changes: list[str],
    device_map: dict[str, int] | None = None,
) -> dict[str, float]:
    """What is not as in one process, with a step after each change."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    plain, model = built(kind), parallel.wrap(built(kind), "layer", device_map=device_map)
    for step, change in enumerate(changes):
        for each in (plain, model.module):
            CHANGES[change](each)
            each.zero_grad()
        outs = [plain(*batch(r)) for r in range(size)]
        torch.cat(outs).square().mean().backward()
        out = model(*batch(rank))
        model.backward(out.square().mean(), ROWS)
        pairs = {f"buffer {n}": (b, dict(plain.named_buffers())[n])
                 for n, b in model.module.named_buffers()}  # fmt: skip
        pairs |= {f"gradient {n}": (p.grad, dict(plain.named_parameters())[n].grad)
                  for n, p in model.module.named_parameters()}  # fmt: skip
        for name, (one, two) in {**pairs, "out": (out, outs[rank])}.items():
            if not torch.allclose(one, two, rtol=0, atol=TOLERANCE, equal_nan=True):
                found[f"{name} in step {step}"] = float((one - two).abs().max())
    return found


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_attributes_and_buffers_may_change_between_steps(
    ranks: WaitingProcesses, size: int
) -> None:
    """Infinite buffers stay, and bools that a layer writes are those of all ranks."""
    changes = [each for each in CHANGES if each != "modes"]
    on = None if size == 1 else {"first": 0, "part": 1}
    assert ranks.run(differences, Plain, changes, on, world_size=size) == [{}] * size


def test_a_part_may_be_in_training_mode_alone(ranks: WaitingProcesses) -> None:
    assert ranks.run(differences, Plain, ["modes"] * 2, world_size=2) == [{}] * 2


def test_a_layer_may_use_a_buffer_that_it_writes(ranks: WaitingProcesses) -> None:
    """Its gradients are by what was there in the forward."""
    assert ranks.run(differences, Divides, ["none"] * 3, world_size=2) == [{}] * 2


def test_norms_that_layers_of_one_rank_share(ranks: WaitingProcesses) -> None:
    on = {"first": 0, "norm": 1}
    assert ranks.run(differences, Shares, ["none"] * 2, on, world_size=2) == [{}] * 2


def count() -> list[bool]:
    model, signs = parallel.wrap(built(Alternates), "layer"), []
    with torch.no_grad():
        model.module.last.lin_l.bias.zero_()
        before = model(*batch(0))
        for _ in range(4):
            signs.append(torch.equal(model(*batch(0)), before))
    return signs


def test_a_forward_may_set_its_attributes(ranks: WaitingProcesses) -> None:
    assert ranks.run(count, world_size=2) == [[False, True] * 2] * 2


class Scaled(nn.Module):
    """Takes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = pyg.SAGEConv(4, 4), pyg.SAGEConv(4, 3)
        self.shift = 0.0

    def forward(self, x: Tensor, edge_index: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(self.first(x, edge_index) * scale + self.shift, edge_index)


def scale() -> int:
    model = parallel.wrap(built(Scaled), "layer")
    with torch.no_grad():
        for number in [*range(12), 0]:
            out, plain = (each(*batch(0), number) for each in (model, model.module))
            assert torch.allclose(out, plain, rtol=0, atol=TOLERANCE)
    return len(model._programs)


def test_traces_are_kept_for_some_numbers_only(ranks: WaitingProcesses) -> None:
    assert ranks.run(scale, world_size=2) == [8] * 2


def join() -> float:
    """A rank without batches computes layers of the others with their attributes."""
    rank = dist.get_rank()
    model = parallel.wrap(built(Scaled), "layer", device_map={"first": 0, "last": 1})
    with model.join(lambda: None), torch.no_grad():
        for number in (1.0, 2.0) if rank == 1 else ():
            model.module.shift = number
            out, plain = model(*batch(0)), model.module(*batch(0))
            assert torch.allclose(out, plain, rtol=0, atol=TOLERANCE)
    return model.module.shift


def join_with_a_method() -> None:
    """Ranks that join refuse a text for their method, and the one that computes hears of it."""
    computes = dist.get_rank() == 1
    model = parallel.wrap(built(Plain), "layer")

    def joined() -> None:
        with model.join(lambda: None), torch.no_grad():
            if computes:
                model.module.extra_repr = "a text"
                model(*batch(0))

    with pytest.raises(CommError if computes else ValueError, match=r"extra_repr.*cannot be set"):
        joined()


def test_a_rank_that_joins_keeps_its_methods(ranks: WaitingProcesses) -> None:
    ranks.run(join_with_a_method, world_size=3)


def test_a_function_may_become_a_constant() -> None:
    model = Scaled()
    model.act = torch.relu
    set_setting(model, "act", "null")
    set_setting(model, "new", "[1, 2]")
    assert model.act is None and model.new == [1, 2]


def test_a_rank_that_joins_has_the_attributes_of_others(ranks: WaitingProcesses) -> None:
    assert ranks.run(join, world_size=2) == [2.0] * 2


class Decides(Scaled):
    """Decides by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("on", torch.tensor(True))

    def forward(self, x: Tensor, edge_index: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x if self.on else -x, edge_index, scale)


class Writes(Plain):
    """Writes a buffer on one rank, and uses it on another."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.warmth.add_(1)
        return self.last(self.first(x, edge_index), edge_index) * self.warmth


def refuse() -> None:
    def fails(kind: Callable[[], nn.Module], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            parallel.wrap(built(kind), "layer")(*batch(0))

    fails(Shares, r"layers of 2 ranks write into the buffer 'norm.running_mean': give each")
    fails(Decides, r"Decides cannot be cut into stages")
    fails(Writes, r"'warmth' is written by the forward and used on ranks 0 and 1")
    model = parallel.wrap(built(Scaled), "layer")
    model.module.shift = float(dist.get_rank())
    with pytest.raises(RuntimeError, match="ranks have set 'shift' of the model to different"):
        model(*batch(0))
    for name in ("forward", "first.forward", "lost.shift", "training", "first"):
        with pytest.raises(ValueError, match=f"has set '{name}', which cannot be set here"):
            set_setting(built(Scaled), name, "1.0")


def test_what_is_refused(ranks: WaitingProcesses) -> None:
    ranks.run(refuse, world_size=2)
