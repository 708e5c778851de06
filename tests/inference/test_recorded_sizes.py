"""Recorded models that put the number of nodes, or of edges, into what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import EGConv, SAGEConv

import pyg_scale


class Shaped(torch.nn.Module):
    """Two layers, and between them what a test says."""

    def __init__(self, what: Any, first: Any = None) -> None:
        super().__init__()
        self.first = SAGEConv(8, 16) if first is None else first
        self.what, self.last = what, SAGEConv(16, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.what(self.first(x, edge_index), edge_index), edge_index)


class Squeezed(Shaped):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index).squeeze()


def infer(model: torch.nn.Module, out: Path) -> tuple[Tensor, Tensor]:
    """What a model gives at once and layer by layer."""
    torch.manual_seed(0)
    data = Data(x=torch.randn(61, 8), edge_index=torch.randint(0, 61, (2, 400)))
    with torch.no_grad():
        expected = model.eval()(data.x, data.edge_index)
    return expected, pyg_scale.layerwise_inference(model, data, out, progress=False)


def same(h: Tensor, _: Any) -> Tensor:
    return h


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (lambda: Shaped(lambda h, _: h.view(h.size(0), 2, 8).flatten(1)), "calls view, which fail"),
        (
            lambda: Shaped(lambda h, _: h.view(-1, 2, 8).reshape(h.size(0), -1).relu()),
            r"SAGEConv \(last\) is given .* reshape, which Shaped calls, .* Write -1 for",
        ),
        (lambda: Shaped(lambda h, _: h + torch.zeros(h.size(0), 1)), "add, which Shaped calls"),
        (lambda: Shaped(lambda h, _: torch.cat([h, h.new_ones(h.size(0), 1)], 1)[:, 1:]), "calls"),
        (lambda: Shaped(lambda h, _: torch.cat(h.split(1))[: h.size(0)]), "gives 1 tensors of one"),
        (lambda: Squeezed(same), r"returns .* squeeze, which Squeezed calls, .*squeeze\(-1\)"),
        (lambda: Shaped(lambda h, e: h * e.size(1)), "asks edges for 'size'"),
        (lambda: Shaped(lambda h, e: h * e[0].max()), "takes a part of edges"),
        (lambda: Shaped(lambda h, e: h * max(map(len, e))), "takes a part of edges"),
        (lambda: Shaped(lambda h, e: h * torch.cat([e, e]).size(1)), "calls cat on edges"),
        (lambda: Shaped(same, EGConv(8, 16, num_heads=4)), r"EGConv \(first\) .*self_loops=True"),
        (
            lambda: Shaped(same, EGConv(8, 16, ["max"], 4, add_self_loops=False)),
            r"EGConv \(first\) .* aggregators=\['max'\]",
        ),
    ],
)
def test_sizes_that_hold_for_all_nodes_only_are_refused(
    model: Any, match: str, tmp_path: Path
) -> None:
    with pytest.raises(NotImplementedError, match=match):
        infer(model(), tmp_path)
    assert not list(tmp_path.glob("*.npy")), "before any work"


def test_what_fails_with_some_edges_only_is_refused(tmp_path: Path) -> None:
    """A layer that wants many edges, which the whole graph has and a piece may lack."""

    class Picky(SAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            if x_j.size(0) and x_j.size(0) < 20:
                raise ArithmeticError("too few edges")
            return x_j

    with pytest.raises(NotImplementedError, match="Shaped cannot be .*too few edges") as found:
        infer(Shaped(same, Picky(8, 16)), tmp_path)
    assert found.value.__cause__ is not None


@pytest.mark.parametrize(
    "model",
    [
        lambda: Shaped(lambda h, _: h.view(-1, 2, 8).flatten(1)),
        lambda: Shaped(lambda h, _: (h.t() * 2).t()),
        lambda: Shaped(lambda h, _: torch.cat(h.chunk(2, dim=1)[::-1], 1).relu_()),
        lambda: Shaped(lambda h, _: h + h.new_ones(h.size(-1))),
        lambda: Shaped(same, EGConv(8, 16, ["sum"], num_heads=4, add_self_loops=False)),
    ],
)
def test_sizes_that_fit_any_rows_are_computed(model: Any, tmp_path: Path) -> None:
    expected, found = infer(model(), tmp_path)
    torch.testing.assert_close(found, expected)
