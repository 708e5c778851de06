"""Statistics over the rows of all ranks, where there is one rank: those of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.statistics import global_batch_norm
from pyg_scale.testing.processes import WaitingProcesses


@pytest.fixture(scope="module")
def ranks() -> Iterator[WaitingProcesses]:
    with WaitingProcesses(1) as started:
        yield started


def compare(options: dict[str, Any], training: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.BatchNorm1d(3, **options).double().train(training) for _ in range(2))
    peers = Peers(None, torch.device("cpu"))
    for shape in ((5, 3), (4, 3, 2)):
        x = torch.randn(shape, dtype=torch.float64)
        pair = [x.clone().requires_grad_() for _ in range(2)]
        found, expected = global_batch_norm(ours, peers, pair[0]), theirs(pair[1])
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        for out in (found, expected):
            (out**3).sum().backward()
        assert torch.allclose(pair[0].grad, pair[1].grad, rtol=0, atol=1e-11)
        for name, value in theirs.state_dict().items():
            assert torch.allclose(ours.state_dict()[name], value, rtol=0, atol=1e-12), name
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one.grad, two.grad, rtol=0, atol=1e-11)
    if training:
        with pytest.raises(ValueError, match="more than 1 row"):
            global_batch_norm(ours, peers, torch.randn(1, 3, dtype=torch.float64))


def compare_all() -> None:
    for options in (
        {},
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
    ):
        for training in (True, False):
            if training or options.get("track_running_stats", True):
                compare(options, training)


def test_one_rank_has_the_statistics_of_torch(ranks: WaitingProcesses) -> None:
    ranks.run(compare_all)
