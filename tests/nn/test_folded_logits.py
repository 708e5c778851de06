"""Logits of GATConv from a folded weight: PyG's, with its gradients, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import Linear

from pyg_scale.nn import GATConv
from pyg_scale.nn.conv import gat_conv
from tests.nn.oracle import pair

pytestmark = pytest.mark.usefixtures("products")


@pytest.fixture(autouse=True)
def at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gat_conv, "_LEAST_FOLDED", 0)


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the rows of each folded weight that a layer makes."""
    rows: list[int] = []
    fold = GATConv._folded

    def counted(self: Any, lin: Any, att: Tensor) -> Tensor:
        out = fold(self, lin, att)
        rows.append(out.size(0))
        return out

    monkeypatch.setattr(GATConv, "_folded", counted)
    return rows


def of(layer: Any, x: Tensor, other: Tensor | None, edge_index: Tensor, how: str) -> list[Tensor]:
    x = x.clone().requires_grad_()
    given: Any = {"one": x, "start": (x, x[:30]), "computed start": None, "alone": (x, None)}
    leaves = [x]
    if how == "computed start":
        y = x.tanh()
        given[how] = (y, y[:30])
    elif how in ("two", "separate"):
        assert other is not None
        leaves.append(other.clone().requires_grad_())
        given[how] = (x, leaves[1])
    size = (len(x), 30) if how == "alone" else None
    out = layer(given[how], edge_index, size=size)
    draw = torch.Generator().manual_seed(5)
    weights = torch.randn(out.shape, generator=draw, dtype=out.dtype)
    parameters = [each for each in layer.parameters() if each.requires_grad]
    found = torch.autograd.grad((out * weights).sum(), leaves + parameters, allow_unused=True)
    return [out, *(each for each in found if each is not None)]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    ("how", "folds"),
    [("one", 2), ("start", 2), ("computed start", 2), ("separate", 2), ("two", 2), ("alone", 1)],
)
def test_they_are_those_of_pyg(how: str, folds: int, heads: int, folded: list[int]) -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(90, 6, generator=draw, dtype=torch.float64)
    wide = 5 if how == "two" else 6
    other = torch.randn(30, wide, generator=draw, dtype=torch.float64)
    edge_index = torch.stack(
        [torch.randint(90, (400,), generator=draw), torch.randint(30, (400,), generator=draw)]
    )
    given = (6, 5) if how in ("two", "alone") else 6
    theirs, ours = pair(GATConv, lambda cls: cls(given, 4, heads=heads, add_self_loops=False))
    expected = of(theirs, x, other, edge_index, how)
    assert not folded
    found = of(ours, x, other, edge_index, how)
    assert folded == [heads] * folds
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_what_listens_is_heard_and_what_is_narrow_left(folded: list[int]) -> None:
    draw = torch.Generator().manual_seed(4)
    edge_index = torch.randint(90, (2, 400), generator=draw)
    _, layer = pair(GATConv, lambda cls: cls(6, 4, heads=3))
    heard: list[int] = []
    x = torch.randn(90, 6, generator=draw, dtype=torch.float64)
    handle = layer.lin.register_forward_hook(lambda *_: heard.append(1))
    layer(x, edge_index)
    assert heard and not folded
    handle.remove()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer.float()(x.float(), edge_index)
    layer.double()
    layer(x[:20], edge_index[:, (edge_index < 20).all(0)])  # too few rows for a product of weights
    _, narrow = pair(GATConv, lambda cls: cls(20, 4, heads=2))
    narrow(torch.randn(90, 20, generator=draw, dtype=torch.float64), edge_index)
    assert not folded
    layer(x, edge_index)
    assert folded == [3, 3]


def test_a_map_with_a_bias_is_not_folded(folded: list[int]) -> None:
    draw = torch.Generator().manual_seed(6)
    edge_index = torch.randint(90, (2, 400), generator=draw)
    x = torch.randn(90, 6, generator=draw, dtype=torch.float64)
    theirs, ours = pair(GATConv, lambda cls: cls(6, 4, heads=3))
    theirs.lin = ours.lin = Linear(6, 12, bias=True).double()
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index), rtol=1e-11, atol=1e-12)
    assert not folded
