"""Layers that are one function for autograd: results, gradients and what they do not compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_scale.nn import GINConv, GraphConv, SAGEConv, fallbacks, mapped
from pyg_scale.ops import adjacency
from pyg_scale.ops.colptr import remember
from pyg_scale.testing import graphs
from tests.nn.oracle import distance, pair

pytestmark = pytest.mark.usefixtures("products")

NAMES = ("sage", "graph", "graph mean", "gin")
INNER = 30
"""Number of nodes with in-edges in a block."""


def layers(name: str, channels: int = 5, **options: Any) -> tuple[Any, Any]:
    """PyG's layer and ours, which takes no shortcut for small inputs."""
    conv = {"sage": SAGEConv, "graph": GraphConv, "gin": GINConv}[name.split()[0]]
    if conv is GINConv:
        build = lambda cls: cls(torch.nn.Linear(6, channels), eps=0.5, **options)  # noqa: E731
    elif " " in name:
        build = lambda cls: cls(6, channels, aggr=name.split()[1], **options)  # noqa: E731
    else:
        build = lambda cls: cls(6, channels, **options)  # noqa: E731
    theirs, ours = pair(conv, build)
    ours.min_work = 0
    return theirs, ours


def block(num_nodes: int = 100, num_edges: int = 400) -> tuple[Tensor, Tensor]:
    """Features and edges to the first nodes, sorted by destination, as a loader gives them."""
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(num_nodes, (num_edges,), generator=generator)
    target = torch.randint(INNER, (num_edges,), generator=generator).sort().values
    x = torch.randn(num_nodes, 6, generator=generator, dtype=torch.float64)
    edge_index = torch.stack([source, target])
    counts = torch.bincount(target, minlength=INNER)
    remember(edge_index, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
    return x, edge_index


def gradients(
    layer: Any, x: Tensor, edge_index: Tensor, how: str, rows: int | None, **more: Any
) -> list[Tensor | None]:
    """The result of a layer and the gradients of the features and parameters."""
    x = x.clone().requires_grad_(how != "leaf without gradient")
    given = x.tanh() if how == "computed" else x
    out = layer(given, edge_index, **more)
    if how == "slice of a leaf":
        out = layer((x, x[:INNER]), edge_index, **more)
    elif how == "slice":
        given = x.tanh()
        out = layer((given, given[:INNER]), edge_index, **more)
    elif how == "detached slice":
        out = layer((x, x.detach()[:INNER]), edge_index, **more)
    elif how == "other features":
        out = layer((x, x[:INNER] * 2), edge_index, **more)
    loss = out[:rows].tanh().sum()
    leaves = [each for each in (x, *layer.parameters()) if each.requires_grad]
    return [out, *torch.autograd.grad(loss, leaves)]


WAYS = (
    *("leaf", "computed", "slice of a leaf", "slice", "detached slice", "other features"),
    "leaf without gradient",
)


@pytest.mark.parametrize("rows", [None, INNER, 7, 0])
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_they_are_those_of_pyg(name: str, how: str, rows: int | None) -> None:
    x, edge_index = block()
    for channels in (2, 5, 40):  # mapped before they are reduced, and after
        found = [gradients(each, x, edge_index, how, rows) for each in layers(name, channels)]
        for right, mine in zip(*found, strict=True):
            assert distance(mine, right) < 1e-12


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("name", ["graph", "graph mean"])
def test_weights_of_edges_in_any_order(
    name: str, rows: int | None, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:  # as of many edges, which are grouped by source when a gradient needs it
        monkeypatch.setattr(adjacency, "_AT_ONCE", 0)
    edge_index = graphs.hostile().edge_index
    x = torch.randn(int(edge_index.max()) + 1, 6, dtype=torch.float64)
    weight = torch.rand(edge_index.size(1), dtype=torch.float64)
    theirs, ours = layers(name)
    for edges in (edge_index, edge_index[:, edge_index[1].argsort(stable=True)]):
        found = [
            gradients(each, x, edges, "computed", rows, edge_weight=weight)
            for each in (theirs, ours)
        ]
        for right, mine in zip(*found, strict=True):
            assert distance(mine, right) < 1e-12
    assert not fallbacks(ours)


@pytest.mark.parametrize("how", ["computed", "slice", "leaf without gradient"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_differentiated_again(name: str, how: str) -> None:
    x, edge_index = block()

    def penalty(layer: Any) -> tuple[Tensor, ...]:
        leaf = x.clone().requires_grad_(how != "leaf without gradient")
        given = leaf if how == "leaf without gradient" else leaf.tanh()
        out = layer((given, given[:INNER]) if how == "slice" else given, edge_index)
        leaves = [each for each in (leaf, *layer.parameters()) if each.requires_grad]
        first = torch.autograd.grad(out.tanh().pow(2).sum(), leaves, create_graph=True)
        loss = sum(each.pow(2).sum() for each in first)
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    for channels in (2, 40):
        found = [penalty(each) for each in layers(name, channels)]
        for right, mine in zip(*found, strict=True):
            assert distance(mine, right) < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_it_is_one_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = layers(name)
    x, edge_index = block()
    function = mapped._Own if name == "gin" else mapped._Mapped
    calls = []
    forward = function.forward
    monkeypatch.setattr(function, "forward", lambda *args: calls.append(1) or forward(*args))
    ours(x.requires_grad_(), edge_index)
    assert calls == [1]
    with torch.autocast("cpu"):
        ours.float()(x.float(), edge_index)
    assert calls == [1]


def test_the_gradient_of_a_slice_is_there_for_those_who_ask() -> None:
    """Unasked, it is added to that of the whole at once."""
    theirs, ours = layers("sage")
    x, edge_index = block()
    seen: list[Tensor] = []
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        first = leaf[:INNER]
        first.retain_grad()
        layer((leaf, first), edge_index).sum().backward()
        assert first.grad is not None
        seen.append(first.grad)
        leaf = x.clone().requires_grad_()
        first = leaf[:INNER]
        first.register_hook(seen.append)
        layer((leaf, first), edge_index).sum().backward()
        between = leaf[:50]
        between.register_hook(lambda grad: seen.append(grad[:INNER]))
        layer((leaf, between[:INNER]), edge_index).sum().backward()
    assert len(seen) == 6
    for each in seen[1:]:
        assert distance(each, seen[0]) < 1e-12


def test_slices_that_were_changed_or_begin_elsewhere() -> None:
    theirs, ours = layers("sage")
    x, edge_index = block()
    found = []
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        given = 3 * leaf
        first = given[:INNER]
        first.mul_(2)  # changes the features, too
        out = layer((given, first), edge_index)
        found.append((out, *torch.autograd.grad(out.tanh().sum(), leaf)))
        out = layer((leaf, leaf[1 : INNER + 1]), edge_index)
        found[-1] += (out, *torch.autograd.grad(out.tanh().sum(), leaf))
    for right, mine in zip(*found, strict=True):
        assert distance(mine, right) < 1e-12


@pytest.mark.parametrize("name", ["sage", "graph"])
def test_edges_without_a_gradient_are_not_grouped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is of few seeds, so only their edges are grouped by source."""
    _, ours = layers(name)
    x, edge_index = block()
    wanted = int((edge_index[1] < 5).sum())
    sizes: list[int] = []
    aggregate = mapped.aggregate

    def watched(graph: Any, *args: Any) -> Tensor:
        sizes.append(graph.num_edges)
        return aggregate(graph, *args)

    monkeypatch.setattr(mapped, "aggregate", watched)
    ours(x.requires_grad_(), edge_index)[:5].sum().backward()
    assert sizes == [edge_index.size(1), wanted]
