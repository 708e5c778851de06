"""Answers about nodes come in the order of the nodes, compiled or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyg_scale.ops import library
from pyg_scale.ops.stitch import PartEdges, stitch_edges

NONE = torch.empty(0, dtype=torch.int64)


@pytest.fixture(params=["never", "require"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "require" and not library.status()["loaded"]:
        pytest.skip("the kernels are not compiled")
    monkeypatch.setenv("PYG_SCALE_KERNELS", request.param)


def edges_of(node: int) -> list[int]:
    """Some neighbours of a node, for some none."""
    return [node * 10 + i for i in range(node % 4)]


def answer(
    position: Tensor, nodes: list[int], take: Tensor | None, dtype: torch.dtype
) -> PartEdges:
    edges = [edge for node in nodes for edge in edges_of(node)]
    found = torch.tensor(edges, dtype=dtype)
    counts = torch.tensor([len(edges_of(node)) for node in nodes], dtype=torch.int64)
    return PartEdges(position, take, counts, found, found + 5, {})


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("num_answers", [1, 2, 5])
def test_edges_come_in_the_order_of_the_nodes(num_answers: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_answers)
    nodes = torch.randint(40, (200,), generator=generator)
    of = torch.randint(num_answers, (200,), generator=generator)
    answers = []
    for number in range(num_answers):
        position = (of == number).nonzero().view(-1)
        mine = nodes[position]
        if number % 2:  # each node once
            different, take = mine.unique(return_inverse=True)
            answers.append(answer(position, different.tolist(), take, dtype))
        else:
            position = position.flip(0)
            answers.append(answer(position, mine.flip(0).tolist(), None, dtype))
    counts, neighbor, edge, attrs = stitch_edges(200, answers)
    expected = [edges_of(node) for node in nodes.tolist()]
    assert counts.tolist() == [len(each) for each in expected]
    assert neighbor.dtype == edge.dtype == torch.int64
    assert neighbor.tolist() == [edge for each in expected for edge in each]
    assert torch.equal(edge, neighbor + 5) and attrs == {}


def test_other_attributes_come_along() -> None:
    one = answer(torch.tensor([2, 0]), [3, 1], None, torch.int64)
    two = answer(torch.tensor([1, 3]), [2], torch.tensor([0, 0]), torch.int64)
    both = [each._replace(attrs={"w": each.neighbor.float()}) for each in (one, two)]
    counts, neighbor, _, attrs = stitch_edges(4, both)
    assert counts.tolist() == [1, 2, 3, 2]
    assert neighbor.tolist() == [10, 20, 21, 30, 31, 32, 20, 21]
    assert torch.equal(attrs["w"], neighbor.float())


def test_no_answers() -> None:
    counts, neighbor, edge, attrs = stitch_edges(0, [])
    assert [each.numel() for each in (counts, neighbor, edge)] == [0, 0, 0] and attrs == {}


@pytest.mark.parametrize(
    ("size", "position", "take"), [(3, [0, 1], None), (2, [0, 0], None), (2, [0, 2], None)]
)
def test_answers_that_do_not_fit_are_refused(
    size: int, position: list[int], take: Tensor | None
) -> None:
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        stitch_edges(size, [answer(torch.tensor(position), [1, 2], take, torch.int64)])
