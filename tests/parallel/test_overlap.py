"""``halo`` computes inner nodes between the begin and the end of an exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import Tensor, nn

from pyg_scale import parallel
from pyg_scale.parallel.split import edge_rows, split_edges
from pyg_scale.testing.graph_parallel import opened
from pyg_scale.testing.processes import WaitingProcesses
from tests.parallel import models
from tests.parallel.models import BY_HEAD, CHANNELS, CLASSES, HIDDEN, MODELS, MORE, OF_EDGES


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.write(tmp_path_factory.mktemp("graph"), "strip")


@pytest.mark.parametrize(
    "names",
    [
        ["gcn", "sage max", "gat", "gatv2", "transformer", "rgcn"],
        pytest.param([*MODELS, *OF_EDGES, *MORE, *BY_HEAD], marks=pytest.mark.slow),
    ],
)
def test_models_with_many_inner_nodes_are_exact(
    ranks: WaitingProcesses, path: str, names: list[str]
) -> None:
    assert ranks.run(models.compare, path, "strip", names, "halo", world_size=3) == [{}] * 3


# What happens between ##########################################################################


@contextmanager
def reported(events: list[Any]) -> Iterator[None]:
    """Within it, every all-to-all says when it begins and when it is waited for.

    It is made at the last moment: nothing of it can be there before it is waited for.
    """
    plain = dist.all_to_all_single

    class Late:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.args, self.kwargs = args, kwargs
            events.append("begin")

        def wait(self) -> None:
            events.append("end")
            plain(*self.args, **{**self.kwargs, "async_op": False})

    def late(*args: Any, **kwargs: Any) -> Any:
        return Late(*args, **kwargs) if kwargs.get("async_op") else plain(*args, **kwargs)

    dist.all_to_all_single = late
    try:
        yield
    finally:
        dist.all_to_all_single = plain


def telling(layer: Any, events: list[Any]) -> Any:
    """A layer that says of how many edges it makes messages, and gets their gradients."""
    of, name = type(layer), "edge_update" if isinstance(layer, pyg.GATv2Conv) else "message"

    def said(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = getattr(of, name)(self, *args, **kwargs)
        number = out.size(0)
        events.append(number)
        if out.requires_grad:
            out.register_hook(lambda grad: events.append(-number))
        return out

    setattr(layer, name, said.__get__(layer))
    return layer


def order(path: str) -> list[list[Any]]:
    found = []
    with opened(path) as graph:
        for conv in (
            pyg.SAGEConv(HIDDEN, CLASSES, aggr="max"),
            pyg.GATv2Conv(HIDDEN, CLASSES, add_self_loops=False),
            pyg.TransformerConv(HIDDEN, CLASSES),
        ):
            events: list[Any] = []
            model = nn.Module()
            model.into, model.conv = nn.Linear(CHANNELS, HIDDEN), telling(conv, events)
            model.forward = lambda x, e, model=model: model.conv(model.into(x), e)
            model = parallel.wrap(model.double(), "halo", graph=graph)
            own, edges = len(model.own_nodes), model.shard.edges[None]
            far = edges[1][edges[0] >= own].unique()
            outer = int(torch.isin(edges[1], far).sum())
            with reported(events):
                model.backward(model().square().mean(), 1)
            inner = edges.size(1) - outer
            found.append([events, ["begin", inner, "end", outer, -outer, "begin", -inner, "end"]])
    return found


def test_inner_nodes_are_computed_while_rows_are_under_way(
    ranks: WaitingProcesses, path: str
) -> None:
    for each in ranks.run(order, path, world_size=3):
        for events, expected in each:
            assert events == expected and min(map(abs, (expected[1], expected[3]))) > 0


# What layers leave behind ######################################################################


class Weights(nn.Module):
    """The weights of edges, for which a layer is asked."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out, (edges, weights) = self.conv(x, edge_index, return_attention_weights=True)
        assert len(weights) == edges.size(1)
        # Of every node the product of its edges' number and weights, which are in their order.
        by_edge = weights * torch.arange(1, 1 + len(weights)).view(-1, 1)
        return torch.cat([out, weights.new_zeros(len(x), 1).index_add(0, edges[1], by_edge)], 1)


def weigh(path: str) -> None:
    with opened(path) as graph:
        for conv in (
            pyg.TransformerConv(CHANNELS, CLASSES),
            pyg.GATv2Conv(CHANNELS, CLASSES, add_self_loops=False),
        ):
            model = parallel.wrap(Weights(conv).double(), "halo", graph=graph)
            own, edges = model.own_nodes, model.shard.edges[None]
            out = model()
            # The same edges in the same order, by the ids of their nodes.
            ids = torch.cat([own, model.shard.halos[None].halo_ids])
            whole = model.module(graph.x, torch.stack([ids[edges[0]], own[edges[1]]]))
            assert torch.allclose(out[:, -1], whole[own, -1], rtol=0, atol=1e-12)


def test_weights_of_edges_are_those_of_all_edges(ranks: WaitingProcesses, path: str) -> None:
    ranks.run(weigh, path, world_size=3)


# What is not split #############################################################################


def test_layers_that_need_all_edges_at_once_get_them() -> None:
    edges = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])
    split = split_edges(edges, 3, 2)
    assert split is not None
    assert split.inner.tolist() == [[0, 1], [0, 0]] and split.outer_position.tolist() == [2, 3]
    assert split.of_edges(torch.tensor([1, 2]), torch.tensor([3, 4])).tolist() == [1, 2, 3, 4]
    assert split_edges(edges, 0, 2) is None
    normal = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    hooked = pyg.SAGEConv(2, 2)
    hooked.register_message_forward_hook(lambda *_: None)
    for layer, given, splits in (
        (pyg.SAGEConv(2, 2), {}, True),
        (pyg.GINConv(normal), {}, True),  # not in its messages
        (pyg.EdgeConv(normal), {}, False),
        (pyg.SAGEConv(2, 2, aggr="median"), {}, False),
        (hooked, {}, False),
        (pyg.GCNConv(2, 2), {"edge_weight": torch.ones(4)}, True),
        (pyg.GCNConv(2, 2), {"edge_weight": torch.ones(3)}, False),
    ):
        found = edge_rows(layer, edges, given, {"x"}, True)
        assert (found is not None) == splits, layer
